"""The steps of a planned scan on values."""
