"""The page in the browser that `hf-diffkv demo` and the Space serve; it needs gradio (extra `demo`)."""
