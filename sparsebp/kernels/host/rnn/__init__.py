"""RNN, GRU and LSTM on the host: equations, runs over all steps, their backward, and single steps."""
