"""Attention of one new token per request over pages and window, updating significance sums."""
