"""Normalisations: of channels over the batch, of groups of channels, of the trailing axes with a mean and without."""
