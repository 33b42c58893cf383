"""CSR: products with vectors and matrices, their symbolic phase, sums of patterns, values of Jacobians."""
