"""Whether a forward keeps what the way back needs; calling a layer does not, `inference_mode` says it for more."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, NoReturn

from sparsebp.core.errors import OptionError

__all__ = ["NothingKept", "inference_mode", "keeps"]


class _Depth(threading.local):
    value = 0


_depth = _Depth()


def keeps() -> bool:
    """Say whether a forward of the calling thread is to keep what the way back needs."""
    return _depth.value == 0


class inference_mode:  # as in torch
    """Let forward passes of this thread keep nothing for a way back, inside the ``with`` block.

    Recurrent layers then write states alone, without gates and without a copy of anything; ``saved.h_n`` (and an LSTM's
    ``saved.c_n``) are there, gradients are refused. Other layers keep what they do anyway. Calling a layer,
    ``model(x)``, does it by itself. As `torch.inference_mode`; it changes no layer's mode, see `Layer.eval`.

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> gru = sb.nn.GRU(3, 5, rng=0)
    >>> with sb.nn.inference_mode():
    ...     y, saved = gru.forward(np.ones((7, 4, 3), np.float32))
    >>> y.shape, saved.h_n.shape
    ((7, 4, 5), (1, 4, 5))
    """

    __slots__ = ()

    def __enter__(self) -> None:
        _depth.value += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _depth.value -= 1


class NothingKept(list[Any]):
    """Stands where the runs of a forward would, after one that kept nothing: whoever reads them is told."""

    def _refused(self, *_: Any) -> NoReturn:
        raise OptionError(
            "This forward kept nothing for a way back", expected="what forward(x) saves outside of inference_mode",
            got="what it saves inside", remedy="Run forward(x), or vjp(x), outside of inference_mode",
        )  # fmt: skip

    __getitem__ = __iter__ = __len__ = __bool__ = append = _refused

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return NothingKept, ()
