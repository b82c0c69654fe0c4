"""Measurements of a model's heads, the precisions they lead to, and the recognition of measured models."""
