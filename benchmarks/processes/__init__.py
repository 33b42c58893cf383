"""Benchmarks on more than one process: sides, points and ranks, and what runs there."""
