"""Dense matrices: stacks of small ones, chains of them, and large ones through the machine's BLAS."""
