"""Layers that consist of others: chains, branches, and the scan over a chain."""
