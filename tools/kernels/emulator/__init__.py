"""Executes the PTX that Triton compiles, without a GPU: numpy over the threads of a block, one block at a time."""
