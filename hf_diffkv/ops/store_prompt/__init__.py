"""Stores a prompt in pages and windows with kernels: all of its tokens in order, or by thresholds."""
