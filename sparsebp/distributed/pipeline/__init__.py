"""Models whose stages are on several ranks."""
