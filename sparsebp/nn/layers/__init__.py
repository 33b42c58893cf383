"""Layers with windows, weights or statistics."""
