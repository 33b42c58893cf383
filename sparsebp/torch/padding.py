"""Packed rows padded to one length: a GPU then runs all samples in one launch, where each segment would take one.

Places are sent to the device at the first use, on the stream that uses them, and the host does not wait.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MOST_PADDING = 4
"""Most rows with padding, over those without: more would take too much memory."""
FEW_SEGMENTS = 2
"""Segments that are as quickly launched one by one."""


class Padding(NamedTuple):
    """Places of the rows of a packed sequence among those of all samples at all steps, (T · B) rows, step by step.

    Attributes
    ----------
    steps, batch
        T and B.
    given, run
        Of each row (N,), in the order given and in that of the run, which is another one if it is reversed.
    kept
        ``run`` where B rows of the initial state come first, and before it the places of those (B + N,).
    ends
        Of each sample's last row (B,).
    """

    steps: int
    batch: int
    given: Tensor
    run: Tensor
    kept: Tensor
    ends: Tensor

    def pad(self, rows: Tensor, at: Tensor, fill: float = 0, before: int = 0) -> Tensor:
        """Return rows at their places and `fill` elsewhere; `before` steps come first."""
        padded = rows.new_full(((before + self.steps) * self.batch, rows.shape[1]), fill)
        return padded.index_copy_(0, at, rows)

    def pad_gates(self, gates: Tensor, ones: int) -> Tensor:
        """Return four gates at their places; elsewhere zeros, but for the one with number `ones`."""
        padded = gates.new_zeros((self.steps * self.batch, 4, gates.shape[1] // 4))
        padded[:, ones] = 1
        return padded.view(len(padded), gates.shape[1]).index_copy_(0, self.run, gates)


def padding_of(batch_sizes: np.ndarray, order: np.ndarray | None, like: Tensor, batch: int) -> Padding | None:
    """Return the padding of a packed sequence with rows `like`; None where it does not pay, or while work is captured.

    `order` are the rows that replace each row in a reversed run. A captured transfer would be sent again at each
    replay, from memory that others have by then.
    """
    if len(batch_sizes) * batch > MOST_PADDING * len(like) or torch.cuda.is_current_stream_capturing():
        return None
    device, stream = like.device, torch._C._cuda_getCurrentRawStream(like.device.index)
    return _padding(batch_sizes.tobytes(), None if order is None else order.tobytes(), batch, device, stream)


@lru_cache(maxsize=16)  # the forward and backward of one step ask for the same
def _padding(sizes: bytes, order: bytes | None, batch: int, device: torch.device, stream: int) -> Padding:
    batch_sizes = np.frombuffer(sizes, np.int64)
    steps, rows = len(batch_sizes), int(batch_sizes.sum())
    firsts = np.cumsum(batch_sizes) - batch_sizes
    run = np.arange(rows) + np.repeat(np.arange(steps) * batch - firsts, batch_sizes)
    lengths = steps - np.searchsorted(batch_sizes[::-1], np.arange(batch), side="right")
    given = run if order is None else run[np.frombuffer(order, np.int64)]
    ends = (lengths - 1) * batch + np.arange(batch)
    parts = given, run, np.arange(batch), run + batch, ends
    places = torch.from_numpy(np.concatenate(parts))
    places = (places.pin_memory() if device.type == "cuda" else places).to(device, non_blocking=True)
    return Padding(steps, batch, *places.split([rows, rows, batch + rows, batch]))
