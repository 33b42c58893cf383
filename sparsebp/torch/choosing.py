"""What `accelerate` makes of a module: at every call the faster of this library's kernels and PyTorch's own forward.

How long the sequences are, and whether they are packed, is known at the call. The choice depends on shapes, dtypes and
`sparsebp.torch.limits` alone, and both ways compute the same to rounding. A compiled graph, a transform of
`torch.func`, autocast, or weights that are computed (parametrizations, `functional_call`) always take the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from sparsebp.torch.checks import autocasts
from sparsebp.torch.layers import GRU, LSTM, RNN, Recurrent
from sparsebp.torch.limits import is_faster


class Choosing(Recurrent):
    """A recurrent module that runs PyTorch's own forward where that is the faster one."""

    plain: type[torch.nn.RNNBase]
    """The class of torch.nn in whose place it is."""

    def forward(self, input: Any, hx: Any = None, *, lengths: Any = None) -> tuple[Any, Any]:
        """As `Recurrent.forward`."""
        if torch.compiler.is_compiling() or lengths is not None or self._runs_here(input):
            return super().forward(input, hx, lengths=lengths)
        twin = self.plain.__new__(self.plain)
        twin.__dict__ = self.__dict__  # the very same parameters, and options
        found: tuple[Any, Any] = self.plain.forward(twin, input, hx)
        return found

    def _get_name(self) -> str:
        return self.plain.__name__

    def _runs_here(self, input: Any) -> bool:
        """Say whether the kernels run this call."""
        packed = isinstance(input, PackedSequence)
        x = input.data if packed else input
        if not self._is_plain(x):
            return True
        time_axis = 1 if self.batch_first and x.dim() == 3 else 0
        steps = input.batch_sizes.numel() if packed else x.shape[time_axis]
        in_float64, trains = x.dtype == torch.float64, torch.is_grad_enabled()
        return is_faster(self.plain.__name__, self.hidden_size, in_float64, steps, packed, trains)

    def _is_plain(self, x: Any) -> bool:
        """Say whether PyTorch's forward computes the same: on a CPU, with parameters that nothing has replaced."""
        if not isinstance(x, Tensor) or x.device.type != "cpu" or x.numel() == 0 or x.dim() not in (2, 3):
            return False
        if torch._C._are_functorch_transforms_active() or autocasts(x):
            return False
        weights = [getattr(self, name) for names in self._all_weights for name in names]
        kept = self._flat_weights
        if len(weights) != len(kept) or any(a is not b for a, b in zip(weights, kept, strict=True)):
            return False
        return all(weight.dtype == x.dtype and weight.device == x.device for weight in weights)


class ChoosingRNN(Choosing, RNN):
    """`RNN`, or torch.nn.RNN's forward."""

    plain = torch.nn.RNN


class ChoosingGRU(Choosing, GRU):
    """`GRU`, or torch.nn.GRU's forward."""

    plain = torch.nn.GRU


class ChoosingLSTM(Choosing, LSTM):
    """`LSTM`, or torch.nn.LSTM's forward."""

    plain = torch.nn.LSTM
