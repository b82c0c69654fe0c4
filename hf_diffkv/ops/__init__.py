"""Operations on pages, which take and return plain tensors. Each has a PyTorch reference besides its kernels."""
