"""RNN, GRU and LSTM, and their cells."""
