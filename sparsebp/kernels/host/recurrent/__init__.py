"""Recurrent cells: the sequential and the chunked kernels."""
