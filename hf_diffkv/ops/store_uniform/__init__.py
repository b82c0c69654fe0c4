"""Many new tokens enter rows that keep every token, in order: quantised into pages, or kept in the window."""
