"""RNN, GRU and LSTM: modules of PyTorch in everything but their forward, which this library's kernels run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.torch.checks import autocasts, cast_input, check_dense, check_lengths, check_tensors, without_autocast
from sparsebp.torch.gradients import recurrent
from sparsebp.torch.projection import run_projected

State = Tensor | tuple[Tensor, Tensor]


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
        for part in _parts(hx):
            check_dense(
                self._get_name(), "hx", part, "a pair of dense tensors" if self.mode == "LSTM" else "a dense tensor"
            )
        if isinstance(input, PackedSequence):
            if lengths is not None:
                raise OptionError("A packed sequence has its lengths", expected="lengths=None", got="lengths too",
                                  remedy="Pass the padded tensor, or no lengths")  # fmt: skip
            return self._forward_packed(input, hx)
        check_dense(self._get_name(), "input", input, "a dense tensor or a PackedSequence")
        if lengths is not None:
            return self._forward_lengths(input, hx, lengths)
        return self._forward_padded(input, hx)

    def _forward_padded(self, x: Tensor, hx: Any) -> tuple[Tensor, State]:
        if x.dim() not in (2, 3):
            raise ValueError(f"{self._get_name()}: Expected input to be 2D or 3D, got {x.dim()}D tensor instead")
        batched = x.dim() == 3
        for part in _parts(hx):
            if part.dim() != x.dim():
                kind = "batched 3-D" if batched else "unbatched 2-D"
                raise RuntimeError(f"For {kind} input, hx should also be {x.dim()}-D but got {part.dim()}-D tensor")
        if not batched:
            x, hx = x.unsqueeze(0 if self.batch_first else 1), _map(hx, lambda part: part.unsqueeze(1))
        x = self._checked(x, None)
        if self.batch_first:
            x = x.transpose(0, 1)
        steps, batch, features = x.shape
        if steps == 0:
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
        rows, hx = self._run(x.reshape(steps * batch, features), None, batch, self._state(hx, batch, x))
        y = rows.view(steps, batch, rows.shape[1])
        if self.batch_first:
            y = y.transpose(0, 1)
        if not batched:
            return y.squeeze(0 if self.batch_first else 1), _map(hx, lambda part: part.squeeze(1))
        return y, hx

    def _forward_packed(self, packed: PackedSequence, hx: Any) -> tuple[PackedSequence, State]:
        x, batch_sizes, in_order, back = packed
        if batch_sizes.numel() == 0:
            raise OptionError("The packed sequence is empty", expected="at least one step", got="no batch sizes",
                              remedy="Skip empty batches")  # fmt: skip
        x = self._checked(x, batch_sizes)
        batch = int(batch_sizes[0]) if in_order is None else in_order.shape[0]
        hx = self._state(hx, batch, x)
        if in_order is not None:
            hx = _map(hx, lambda part: part.index_select(1, in_order))
        y, hx = self._run(x, batch_sizes, batch, hx)
        if back is not None:
            hx = _map(hx, lambda part: part.index_select(1, back))
        return PackedSequence(y, batch_sizes, in_order, back), hx

    def _forward_lengths(self, x: Tensor, hx: Any, lengths: Tensor | list[int]) -> tuple[Tensor, State]:
        if x.dim() != 3:
            raise ShapeError("lengths is for a batch", expected="input of three dimensions", got=tuple(x.shape),
                             remedy="Cut a single sequence to its length")  # fmt: skip
        batch, steps = x.shape[:2] if self.batch_first else x.shape[1::-1]
        values = check_lengths(lengths, steps, batch)
        if batch == 0:
            return self._forward_padded(x, hx)
        packed = pack_padded_sequence(x, values, self.batch_first, enforce_sorted=False)
        y, hx = self._forward_packed(packed, hx)
        return pad_packed_sequence(y, self.batch_first, total_length=steps)[0], hx

    def _run(self, x: Tensor, batch_sizes: Tensor | None, batch: int, hx: State | None) -> tuple[Tensor, State]:
        """Run all layers over rows x (N, I), from states (runs, B, H) or None; rows of the output are as those of x."""
        kind, directions = self.mode.lower(), 2 if self.bidirectional else 1
        # of zeros, those of all runs are the same
        zeros = None if hx is not None else tuple(x.new_zeros(batch, size) for size in self._sizes())
        lasts: list[list[Tensor]] = [[] for _ in self._sizes()]
        with without_autocast(x):
            for layer in range(self.num_layers):
                if layer and self.dropout:
                    x = torch.nn.functional.dropout(x, self.dropout, self.training)
                outputs = []
                for direction in range(directions):
                    run = layer * directions + direction
                    start = tuple(part[run] for part in _parts(hx)) if zeros is None else zeros
                    y, *last = self._run_once(kind, run, direction == 1, batch_sizes, x, start)
                    outputs.append(y)
                    for part, found in zip(lasts, last, strict=True):
                        part.append(found)
                x = torch.cat(outputs, 1) if self.bidirectional else outputs[0]
        if x.requires_grad and not self.bidirectional:
            x = x.clone()  # else whoever writes to the output writes to what the way back needs
        states = [torch.stack(part) if len(part) > 1 else part[0].unsqueeze(0) for part in lasts]
        return x, states[0] if len(states) == 1 else (states[0], states[1])

    def _run_once(
        self, kind: str, run: int, reverse: bool, batch_sizes: Tensor | None, x: Tensor, start: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return y and the last state of one run."""
        weights = [
            cast(Tensor, getattr(self, name)) for name in self._all_weights[run]
        ]  # also what replaces a Parameter
        w_ih, w_hh, *rest = weights
        b_ih, b_hh = rest[:2] if self.bias else (None, None)
        check_tensors(self._get_name(), {"input": x, **dict(zip(self._all_weights[run], weights, strict=True))})
        if self.proj_size:
            return run_projected(reverse, batch_sizes, x, start[0], start[1], w_ih, w_hh, b_ih, b_hh, rest[-1])
        c0 = start[1] if len(start) == 2 else None
        found = recurrent(kind, reverse, batch_sizes, x, start[0], c0, w_ih, w_hh, b_ih, b_hh)
        return found[: 1 + len(start)]

    def _checked(self, x: Tensor, batch_sizes: Tensor | None) -> Tensor:
        self.check_input(x, batch_sizes)
        return cast_input(self._get_name(), x, cast(Tensor, getattr(self, self._all_weights[0][0])))

    def _sizes(self) -> tuple[int, ...]:
        """Return the number of values of each array of the state."""
        first = self.proj_size or self.hidden_size
        return (first, self.hidden_size) if self.mode == "LSTM" else (first,)

    def _state(self, hx: Any, batch: int, x: Tensor) -> State | None:
        """Return the state before the first step, checked as torch.nn does; None stands for zeros."""
        if hx is None:
            return None
        runs, sizes = self.num_layers * (2 if self.bidirectional else 1), self._sizes()
        if len(_parts(hx)) != len(sizes):
            wanted = "a pair (h_0, c_0)" if len(sizes) == 2 else "a tensor"
            raise OptionError(f"hx is not the state of st.{self._get_name()}", expected=wanted,
                              got=f"{len(_parts(hx))} tensors", remedy="Pass what the module returns")  # fmt: skip
        names = ("hidden",) if len(sizes) == 1 else ("hidden[0]", "hidden[1]")
        for part, size, name in zip(_parts(hx), sizes, names, strict=True):
            self.check_hidden_size(part, (runs, batch, size), f"Expected {name} size {{}}, got {{}}")
        if autocasts(x):
            hx = _map(hx, lambda part: part.to(x.dtype))
        check_tensors(self._get_name(), {"input": x, **dict(zip(("hx", "cx"), _parts(hx), strict=False))})
        checked: State = hx
        return checked


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


def _parts(hx: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a state: one, an LSTM's two, or none of None."""
    return () if hx is None else tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)


def _map(hx: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if hx is None or isinstance(hx, Tensor):
        return hx if hx is None else function(hx)
    return tuple(function(part) for part in hx)
