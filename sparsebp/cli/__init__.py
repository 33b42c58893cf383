"""The command line: ``sparsebp``."""
