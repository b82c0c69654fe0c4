"""The web page that `hf-diffkv demo` and the Space serve; it needs gradio (extra `demo`)."""
