"""Judges caches by what they keep, the bytes they hold and their time: `hf-diffkv evaluate`, `bench` and `lm-eval`."""
