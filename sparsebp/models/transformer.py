"""A small Transformer that classifies sequences, of vectors or of numbers of words."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp import nn
from sparsebp.core.arguments import check_flag, check_generator, check_integer
from sparsebp.core.types import Seed


def transformer_classifier(
    inputs: int,
    classes: int = 10,
    *,
    steps: int,
    tokens: bool = False,
    width: int = 64,
    heads: int = 4,
    layers: int = 4,
    dropout: float = 0.0,
    dtype: Any = np.float32,
    rng: Seed = None,
) -> nn.Sequential:
    """Return a Transformer's encoder with the mean over the steps and a linear layer behind it.

    Parameters
    ----------
    inputs
        Features of a step; with `tokens`, how many different numbers a step can be.
    classes
        Number of classes.
    steps
        Most steps of a sequence.
    tokens
        Whether a step is a number, which an `Embedding` takes, and not a vector, which a `Linear` takes.
    width
        Length of a step's vector between the layers, a multiple of `heads`.
    heads
        Heads of each attention.
    layers
        Encoder layers; each has 4 · width features between its two linear layers.
    dropout
        Probability of a zero in the encoder layers while training.
    dtype
        float32 or float64.
    rng
        Generator or seed of the initial values, torch.nn's default ones, and of dropout.

    Returns
    -------
    Sequential
        Sequences (B, T, inputs), with `tokens` integers (B, T), to logits (B, classes). Its stages: embedding,
        positions, every encoder layer, normalisation, mean, linear layer.
        Of sequences padded at the end it takes ``lengths=``: they are classified as if they were cut.

    Raises
    ------
    OptionError
        A number is out of range, `width` no multiple of `heads`, or `tokens` no truth value.

    Notes
    -----
    Sources: Vaswani et al., "Attention Is All You Need", 2017, §3. Normalisations that come first need no warm-up of
    the learning rate (Xiong et al., "On Layer Normalization in the Transformer Architecture", 2020); GELU, learned
    positions and four times the width between the linear layers are those of Devlin et al., "BERT", 2019.
    """
    inputs, classes, width = (
        check_integer(name, value, 1) for name, value in (("inputs", inputs), ("classes", classes), ("width", width))
    )
    layers = check_integer("layers", layers, 1)
    options: dict[str, Any] = {"dtype": dtype, "rng": check_generator("rng", rng)}
    first = nn.Embedding if check_flag("tokens", tokens) else nn.Linear
    return nn.Sequential(
        first(inputs, width, **options),
        nn.PositionalEmbedding(steps, width, batch_first=True, **options),
        *(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True, **options
            )
            for _ in range(layers)
        ),
        nn.LayerNorm(width, dtype=dtype),
        nn.MeanOverSteps(batch_first=True),
        nn.Linear(width, classes, **options),
    )
