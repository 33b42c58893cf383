"""The base of the modules on linear recurrences: layouts, checks and lengths of their input."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from sparsebp.core.errors import ShapeError
from sparsebp.torch.modules import cast_input, check_dense, without_autocast
from sparsebp.torch.recurrences import Lengths, lengths_of, within


class LinearlyRecurrent(torch.nn.Module):
    """Base of `MinGRU`, `MinLSTM` and `LRU`: their `forward`."""

    input_size: int
    hidden_size: int
    batch_first: bool

    def forward(
        self, input: Tensor, hx: Tensor | None = None, *, lengths: Lengths | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run all layers.

        Parameters
        ----------
        input
            (T, B, input_size), with ``batch_first`` (B, T, input_size), or unbatched (T, input_size); float32 or
            float64. Under autocast it is converted to the dtype of the weights.
        hx
            The initial state (num_layers · directions, B, hidden_size), of an LRU complex (1, B, hidden_size), or None
            for zeros; unbatched without B.
        lengths
            Valid steps of each sample (B,), from 0 to T. Later input has no influence, later output is zero, and the
            last state is the last valid one, of a sample without any the initial one.

        Returns
        -------
        output
            The last layer's states (T, B, directions · hidden_size), of an LRU y (T, B, input_size); laid out as the
            input.
        h_n
            The last states, as `hx`.

        Raises
        ------
        ShapeError, DTypeError, DeviceError, OptionError
            An argument does not fit, or T is 0.
        """
        name = self._get_name()
        check_dense(name, "input", input)
        x, unbatched = cast_input(name, input, self._first_weight()), input.dim() == 2
        if x.dim() not in (2, 3) or x.shape[-1] != self.input_size or (unbatched and lengths is not None):
            raise ShapeError("input has the wrong shape", expected=f"(T, B, {self.input_size}), batch first if asked "
                             "for, or without lengths unbatched", got=tuple(x.shape))  # fmt: skip
        x = x.unsqueeze(1) if unbatched else x.transpose(0, 1) if self.batch_first else x
        if len(x) == 0:
            raise ShapeError("input is empty", expected="at least one step", got=tuple(input.shape))
        if hx is not None:
            check_dense(name, "hx", hx)
            shape = (self._runs(), *(() if unbatched else x.shape[1:2]), self.hidden_size)
            if hx.shape != shape:
                raise ShapeError("hx has the wrong shape", expected=shape, got=tuple(hx.shape))
            hx = self._checked_state(hx.unsqueeze(1) if unbatched else hx, x)
        with without_autocast(x):
            n = None if lengths is None else lengths_of(lengths, x)
            # so that NaN in the padding cannot spread to the weights' gradients
            y, h_n = self._run(x if n is None else torch.where(within(n, x), x, 0), hx, n)
        if unbatched:
            return y.squeeze(1), h_n.squeeze(1)
        return y.transpose(0, 1) if self.batch_first else y, h_n

    @abstractmethod
    def _first_weight(self) -> Tensor:
        """Return a parameter, whose dtype and device are those of all."""

    @abstractmethod
    def _runs(self) -> int:
        """Return the number of initial states."""

    @abstractmethod
    def _checked_state(self, hx: Tensor, x: Tensor) -> Tensor:
        """Return initial states that fit x, after checking dtype and device."""

    @abstractmethod
    def _run(self, x: Tensor, hx: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output (T, B, …) and the last states (runs, B, H), for x (T, B, I) with zeros beyond lengths."""
