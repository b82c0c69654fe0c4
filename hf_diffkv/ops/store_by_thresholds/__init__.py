"""Stores many new tokens in rows with selection by thresholds; the levels of all tokens of a row are decided again."""
