"""LSTM and LSTMCell, with torch.nn's arguments, parameters and results; see `lstm_math` for what they compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Unpack

import numpy as np

from sparsebp.core.arguments import check_integer, forward_of
from sparsebp.core.errors import OptionError
from sparsebp.core.types import Array, Seed
from sparsebp.nn.recurrent.lone import takes_lone
from sparsebp.nn.recurrent.lstm_math import LSTMMath, ProjectedLSTMMath
from sparsebp.nn.recurrent.recurrent import Recurrent, RecurrentOptions
from sparsebp.nn.recurrent.recurrent_cell import CellGradients, RecurrentCell
from sparsebp.nn.recurrent.tape import GivenState, RecurrentSaved, StateGradients, Tape

StatePair = Sequence[Array]
"""(h0, c0), as torch.nn takes them."""


class LSTMSaved(RecurrentSaved):
    """What `LSTM.forward` keeps. It unpacks as torch.nn's second result: ``y, (h_n, c_n) = lstm.forward(x)``."""

    @property
    def c_n(self) -> Array:
        """Last cell states (num_layers · directions, B, H); with lengths, each sample's last valid one."""
        return self.last[1]

    def __iter__(self) -> Iterator[Array]:
        """Yield h_n and c_n."""
        return iter(self.last)


class LSTMGradients(StateGradients):
    """`Gradients` of an LSTM, those with respect to h0 and c0 among them."""

    __slots__ = ()

    @property
    def c0(self) -> Array:
        """The gradient with respect to c0, of its shape; computed once."""
        return self._initial[1]


@takes_lone(2, 1)
class LSTM(Recurrent):
    """A recurrent layer with torch.nn.LSTM's arguments, parameters and layouts; see `Recurrent` for all of them.

    Parameters
    ----------
    input_size, hidden_size
        Features of the input and of the hidden state.
    num_layers
        Layers stacked on one another.
    bias, batch_first, dropout, bidirectional
        As `Recurrent`.
    proj_size
        If above 0, the output and h have so many features: ``h = W_hr (o * tanh(c))``. The recursion then runs on
        ``o * tanh(c)`` with the weights ``W_hh W_hr``, so that every backward algorithm is there; its cost is that of
        the full hidden size.
    **options
        As `Recurrent`: backward, up_levels, chunks, workers, memory_limit, device, dtype, rng.

    Raises
    ------
    OptionError
        `proj_size` is not below `hidden_size`; or as `Recurrent`.

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> lstm = sb.nn.LSTM(3, 5, num_layers=2, rng=0)
    >>> y, (h_n, c_n) = lstm.forward(np.ones((7, 4, 3), np.float32))
    >>> y.shape, h_n.shape, c_n.shape
    ((7, 4, 5), (2, 4, 5), (2, 4, 5))
    """

    saved_class = LSTMSaved
    gradients_class = LSTMGradients

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, proj_size: int = 0, **options: Unpack[RecurrentOptions],
    ) -> None:  # fmt: skip
        self.proj_size = check_integer("proj_size", proj_size, 0)
        if self.proj_size and self.proj_size >= check_integer("hidden_size", hidden_size, 1):
            raise OptionError("A projection makes h smaller", expected=f"proj_size < hidden_size = {hidden_size}",
                              got=proj_size, remedy="Pass a smaller proj_size, or 0 for none")  # fmt: skip
        cell = ProjectedLSTMMath() if self.proj_size else LSTMMath()
        super().__init__(
            cell, input_size, hidden_size, num_layers, bias=bias, batch_first=batch_first, dropout=dropout,
            bidirectional=bidirectional, proj_size=self.proj_size, **options,
        )  # fmt: skip

    def forward(self, x: Array, hx: StatePair | None = None, lengths: Any = None) -> tuple[Array, LSTMSaved]:
        """Run all layers, as `Recurrent.forward`.

        Parameters
        ----------
        x, lengths
            As there.
        hx
            The pair of h0 (num_layers · directions, B, proj_size or H) and c0 (num_layers · directions, B, H), or None
            for zeros.

        Returns
        -------
        y
            As there.
        saved
            ``saved.h_n`` and ``saved.c_n`` are the last states, and it unpacks into these two.

        Raises
        ------
        OptionError
            `hx` is no pair; or as there.
        ShapeError, DTypeError, DeviceError
            An argument does not fit, T is 0 or the batch is empty.
        """
        return self._batch_second(*self.forward_time_major(x, pair("hx", hx), lengths))

    def gradients(
        self, gy: Array | None, saved: RecurrentSaved, grad_h_n: Array | None = None, grad_c_n: Array | None = None
    ) -> LSTMGradients:
        """Return the gradients from `gy` (of y's shape), `grad_h_n` and `grad_c_n` (of h_n's and c_n's).

        Each may be None, but not all. As `Recurrent.gradients`, and ``c0`` beside ``h0``.
        """
        return self._gradients(gy, saved, {"grad_h_n": grad_h_n, "grad_c_n": grad_c_n})


class LSTMCellGradients(CellGradients):
    """`Gradients` of an LSTM cell, those with respect to both parts of the state before the step among them."""

    __slots__ = ()

    @property
    def cell(self) -> Array:
        """The gradient with respect to c, (B, hidden_size); computed once."""
        return self._initial[1]


@takes_lone(1, 0)
class LSTMCell(RecurrentCell):
    """One step of an LSTM, as `torch.nn.LSTMCell`; see `RecurrentCell`.

    ``forward`` returns the next h as the output and keeps the next c, ``saved.c[0]``; a call returns both, as in torch.
    """

    gradients_class: ClassVar[type[CellGradients]] = LSTMCellGradients

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device: Any = None, dtype: Any = np.float32, *,
        rng: Seed = None,
    ) -> None:  # fmt: skip
        super().__init__(LSTMMath(), input_size, hidden_size, bias, device=device, dtype=dtype, rng=rng)

    def __call__(self, x: Array, hx: StatePair | None = None, **options: Any) -> tuple[Array, Array]:
        """Return the next h and c, (B, hidden_size) each."""
        h, saved = forward_of(self, x, hx=hx, **options)
        return h, saved.c[0]

    def forward(self, x: Array, hx: StatePair | None = None) -> tuple[Array, Tape]:
        """Return the next h (B, hidden_size) for x (B, input_size) and the pair (h, c) or None for zeros.

        Raises
        ------
        OptionError
            `hx` is no pair.
        ShapeError, DTypeError, DeviceError
            An argument does not fit, or the batch is empty.
        """
        return self._forward(x, pair("hx", hx))

    def gradients(self, gy: Array | None, saved: Tape, grad_c: Array | None = None) -> LSTMCellGradients:
        """Return the gradients from `gy` at the next h and `grad_c` at the next c; either may be None, but not both.

        ``input``, ``hidden`` and ``cell`` are those at x, h and c, ``weights`` those at the parameters.
        """
        return self._gradients(gy, saved, {"gy": gy, "grad_c": grad_c})


def pair(name: str, hx: Any) -> GivenState | None:
    """Return (h0, c0) after checking that it is a pair.

    Raises
    ------
    OptionError
        It is not.
    """
    if hx is None:
        return None
    if isinstance(hx, (tuple, list)) and len(hx) == 2:
        return tuple(hx)
    raise OptionError(f"{name} is not the state of an LSTM", expected="a pair of arrays (h0, c0)",
                      got=f"{type(hx).__name__}" + (f" of {len(hx)}" if isinstance(hx, (tuple, list)) else ""),
                      remedy=f"Pass {name}=(h0, c0), or None for zeros")  # fmt: skip
