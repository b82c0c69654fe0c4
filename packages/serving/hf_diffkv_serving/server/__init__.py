"""A server for OpenAI's protocol, with continuous batching on a compressed cache."""
