"""Everything that knows Transformers: the cache, its layers, the attention and mask functions, registration."""
