"""Serving with hf-diffkv's cache: continuous batching, a server for OpenAI's protocol, Ray, an LMCache serialiser."""
