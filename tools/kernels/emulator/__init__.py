"""Executes the PTX that Triton compiles, without a GPU: numpy over the threads of a block, block after block."""
