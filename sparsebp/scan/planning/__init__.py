"""Before the first value: which algorithm, which products, how much memory and time."""
