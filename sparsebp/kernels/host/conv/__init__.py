"""Convolutions and pooling on the host: a file for each way, `conv` chooses."""
