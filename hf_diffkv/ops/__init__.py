"""The operations on pages: plain tensors in, plain tensors out. Each has a PyTorch reference beside its kernels."""
