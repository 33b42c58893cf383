"""Forward mode within forward mode: what a ``jvp`` of an `autograd.Function` needs for its own derivatives.

PyTorch calls it with forward mode off, at every level: without this, derivatives in forward mode of what it computes
are zero, without a word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad


@contextlib.contextmanager
def primals(saved: Sequence[Tensor | None]) -> Iterator[list[Tensor | None]]:
    """Give what was saved without its tangents at the level of the ``jvp``; outer levels go on in the block."""
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield [tensor if tensor is None else forward_ad.unpack_dual(tensor).primal for tensor in saved]
