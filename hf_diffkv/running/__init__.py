"""Loads models and runs them: generation with two caches side by side, talks, peak memory."""
