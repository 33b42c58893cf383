"""Bitstream classification, the synthetic task of BPPSA §5.1, Eq. 8.

Each sample is a class c in 0 … 9 and T bits, every one drawn from Bernoulli(0.05 + 0.1·c). Bits are stored packed,
eight in a byte: the paper's longest set, 32 000 samples of 30 000 bits, takes 120 MB.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.backend import float_dtype
from sparsebp.core.arguments import check_generator, check_integer
from sparsebp.core.errors import MemoryLimitError
from sparsebp.core.types import Seed
from sparsebp.data.dataset import check_indices

CLASSES = 10
_BITS_AT_ONCE = 1 << 22  # draws per step of the generation: 16 MiB of float32


class BitstreamDataset:
    """Bitstreams (BPPSA Eq. 8): ``x[t] ~ Bernoulli(0.05 + 0.1 * c)`` with c uniform in 0 … 9.

    Parameters
    ----------
    seq_len
        T, the number of bits of a sample, at least 1.
    samples
        Number of samples; the paper trains on 32 000.
    rng
        A `numpy.random.Generator` or a seed; the data is a function of it.
    dtype
        float32 or float64: the dtype of the batches.

    Attributes
    ----------
    targets
        The classes (samples,), int64.
    packed
        The bits (samples, ceil(T / 8)), uint8, as `numpy.packbits` stores them.

    Raises
    ------
    OptionError
        `seq_len` or `samples` is less than 1, or no integer, or `rng` no seed.
    MemoryLimitError
        The bits are more than the machine has memory for.
    DTypeError
        `dtype` is neither float32 nor float64.
    """

    input_size = 1
    classes = CLASSES
    sample_axis = 1
    reads_model = False

    def __init__(self, seq_len: int, samples: int = 32_000, *, rng: Seed = 0, dtype: Any = np.float32) -> None:
        self.seq_len, samples = check_integer("seq_len", seq_len, 1), check_integer("samples", samples, 1)
        self.dtype = float_dtype(dtype)
        generator = check_generator("rng", rng)
        _check_memory(samples * (8 + -(-seq_len // 8)) + 4 * seq_len)
        self.targets = generator.integers(CLASSES, size=samples, dtype=np.int64)
        probability = (0.05 + 0.1 * self.targets).astype(np.float32)
        self.packed = np.empty((samples, -(-seq_len // 8)), np.uint8)
        rows = max(1, _BITS_AT_ONCE // seq_len)
        for start in range(0, samples, rows):
            part = slice(start, min(start + rows, samples))
            draws = generator.random((part.stop - start, seq_len), dtype=np.float32)
            self.packed[part] = np.packbits(draws < probability[part, None], axis=1)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.targets)

    def bits(self, indices: Any = slice(None)) -> np.ndarray:
        """Return the bits of the samples `indices`: (B, T), uint8, each 0 or 1."""
        return np.unpackbits(self.packed[indices], axis=1, count=self.seq_len)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples `indices` (B,): bits (T, B, 1) in `dtype`, C-contiguous, and classes (B,), int64.

        Raises
        ------
        ShapeError, OptionError
            As `ArrayDataset.batch`.
        """
        indices = check_indices(indices, len(self))
        return self.bits(indices).T.astype(self.dtype, order="C")[:, :, None], self.targets[indices]


def _check_memory(needed: int) -> None:
    from sparsebp.backend.machine import host_memory

    memory = host_memory()
    if needed > memory:
        raise MemoryLimitError("The bitstreams need more memory than there is", expected=f"at most {memory} bytes",
                               got=f"{needed} bytes", remedy="Lower seq_len or samples")  # fmt: skip
