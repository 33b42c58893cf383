"""Convolutions and max pooling."""
