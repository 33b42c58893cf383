"""Sparse matrices on the host: CSR, the two phases of products, factors, colourings."""
