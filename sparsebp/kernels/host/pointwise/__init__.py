"""Element by element: channels, cutting off, what training needs."""
