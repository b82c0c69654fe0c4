"""Continuous batching: this cache inside Transformers' engine."""
