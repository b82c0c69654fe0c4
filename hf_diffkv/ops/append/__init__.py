"""Appends the newest token of every request to its window."""
