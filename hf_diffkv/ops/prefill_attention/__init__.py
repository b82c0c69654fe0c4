"""Attention of a prompt, or of several new tokens over a past, and the attention that each key receives."""
