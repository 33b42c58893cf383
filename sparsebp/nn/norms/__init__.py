"""Normalisations beside those of `sparsebp.nn.layers.norm`: of sequences, of groups of channels, without a mean."""
