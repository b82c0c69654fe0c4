"""Compares caches by quality, bytes held and time: `hf-diffkv evaluate`, `bench` and `lm-eval`."""
