"""Loads models and runs them: generation with two caches side by side, conversations, peak memory."""
