"""Recurrent layers: cells and their runs, layers of them and their gradients, streams, linear recurrences."""
