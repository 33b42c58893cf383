"""Benchmarks of what runs on several ranks."""
