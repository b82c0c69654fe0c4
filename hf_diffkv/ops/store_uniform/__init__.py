"""Stores many new tokens in rows without token selection: quantised into pages in order, or exact in the window."""
