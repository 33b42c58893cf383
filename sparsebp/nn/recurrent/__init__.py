"""RNN, GRU and their cells."""
