"""Layers that work on each element by itself, and softmax."""
