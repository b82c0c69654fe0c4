"""Evaluates the quality and measured bytes of KV cache methods on any model of Transformers."""
