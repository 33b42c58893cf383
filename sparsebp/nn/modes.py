"""Inference mode: forwards that save nothing for a backward."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, NoReturn

from sparsebp.core.errors import OptionError


class _Inference(threading.local):
    depth = 0  # of blocks of the calling thread; a forward saves something for backward where there are none


inference = _Inference()


class inference_mode:  # as in torch
    """Inside the ``with`` block, forward passes of this thread save nothing for backward, as `torch.inference_mode`.

    Recurrent layers then write states only; ``saved.h_n`` (and an LSTM's ``saved.c_n``) exist, gradients are refused.
    Other layers save what they always do. Calling a layer, ``model(x)``, implies it. Layers stay in their mode, see
    `Layer.eval`.

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
        inference.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        inference.depth -= 1


class NothingKept(list[Any]):
    """Takes the place of the saved runs after a forward in `inference_mode`; reading it raises an error."""

    def _refused(self, *_: Any) -> NoReturn:
        raise OptionError("This forward saved nothing for backward",
                          expected="a forward outside of inference_mode", got="one inside",
                          remedy="Run forward(x), or vjp(x), outside of inference_mode")  # fmt: skip

    __getitem__ = __iter__ = __len__ = __bool__ = append = _refused

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return NothingKept, ()
