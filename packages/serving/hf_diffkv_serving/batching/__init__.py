"""Continuous batching: this cache inside Transformers' engine, and a server around it."""
