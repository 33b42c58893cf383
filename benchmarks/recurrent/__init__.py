"""RNN, GRU and LSTM on the CPU: training beside PyTorch and JAX, and what a step costs in long sequences."""
