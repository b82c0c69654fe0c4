"""Quantises keys and values into pages and reads them back."""
