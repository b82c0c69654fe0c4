"""Stores a prompt by kernels, in pages and windows: all of its tokens in order, or by thresholds."""
