"""Judging caches on real models: how well they keep what a model can do, and what that costs."""
