"""RNN, GRU and LSTM: modules of PyTorch in everything but their forward, which this library's kernels run."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from sparsebp.torch.calls import by_kernels, with_lengths


class Recurrent(torch.nn.RNNBase):
    """What `RNN`, `GRU` and `LSTM` share. Everything but `forward` is `torch.nn.RNNBase`'s.

    They are no subclasses of torch.nn.RNN, GRU and LSTM: `torch.compile` breaks its graph at each of those.
    """

    def forward(
        self, input: Tensor | PackedSequence, hx: Any = None, *, lengths: Tensor | list[int] | None = None
    ) -> tuple[Any, Any]:
        """Run all layers, as torch.nn's modules do.

        Parameters
        ----------
        input
            (T, B, input_size), with ``batch_first`` (B, T, input_size), without a batch (T, input_size); float32 or
            float64. Or a `PackedSequence`, whose padding is neither computed nor stored.
        hx
            The initial state (num_layers · directions, B, hidden_size), an LSTM's a pair (h_0, c_0); zeros if None.
        lengths
            Valid steps of each sample (B,), from 1 to T. What the input holds behind them has no influence, the output
            is zero there, and the last state is the last valid one. The same as packing the input and padding the
            output.

        Returns
        -------
        output
            The last layer's states (T, B, directions · hidden_size), laid out as the input; packed if that was.
        h_n
            The last state, as `hx`.

        Raises
        ------
        RuntimeError, ValueError
            A shape or dtype does not fit: the errors of torch.nn.
        DTypeError, DeviceError, ShapeError, OptionError
            A dtype or device that there are no kernels for, mixed devices, a batch of lengths that does not fit.
        """
        if lengths is None:
            return by_kernels(self, input, hx)
        return with_lengths(self, partial(by_kernels, self), input, hx, lengths)


class RNN(Recurrent):
    """`torch.nn.RNN`, run by this library's kernels.

    Its arguments, parameters and ``state_dict`` are torch.nn's; `Recurrent.forward` tells what it takes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse_projection(kwargs)
        if len(args) > 3:
            self.nonlinearity, args = args[3], args[:3] + args[4:]
        else:
            self.nonlinearity = kwargs.pop("nonlinearity", "tanh")
        if self.nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"Unknown nonlinearity '{self.nonlinearity}'. Select from 'tanh' or 'relu'.")
        super().__init__("RNN_" + self.nonlinearity.upper(), *args, **kwargs)


class GRU(Recurrent):
    """`torch.nn.GRU`, run by this library's kernels.

    Its arguments, parameters and ``state_dict`` are torch.nn's; `Recurrent.forward` tells what it takes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse_projection(kwargs)
        super().__init__("GRU", *args, **kwargs)


class LSTM(Recurrent):
    """`torch.nn.LSTM`, run by this library's kernels; also with ``proj_size``.

    Its arguments, parameters and ``state_dict`` are torch.nn's; `Recurrent.forward` tells what it takes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("LSTM", *args, **kwargs)


def _refuse_projection(kwargs: dict[str, Any]) -> None:
    if "proj_size" in kwargs:
        raise ValueError("proj_size argument is only supported for LSTM, not RNN or GRU")
