"""How host kernels are compiled, split into parts, and run on a team of threads."""
