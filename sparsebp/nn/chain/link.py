"""What a chain knows of one of its layers."""

from __future__ import annotations

from typing import Any, NamedTuple

from sparsebp.nn.layer import Layer


class Link(NamedTuple):
    """A layer of a chain, what it saved, and the shapes of its input and output."""

    layer: Layer
    saved: Any
    shape: tuple[int, ...]
    out_shape: tuple[int, ...]
