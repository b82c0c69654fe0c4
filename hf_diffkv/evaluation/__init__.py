"""How much quality each way to hold a KV cache keeps, at measured bytes, on any model of Transformers."""
