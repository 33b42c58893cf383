"""Sparse products on a fixed pattern beside SciPy: chosen ones with targets, and two hundred drawn at random."""
