"""Commands of `hf-diffkv` that this distribution adds, one module each, named like the command."""
