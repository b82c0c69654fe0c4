"""Operations on pages that take and return plain tensors. All but `store_prompt` have a PyTorch reference."""
