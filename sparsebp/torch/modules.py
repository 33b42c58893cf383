"""RNN, GRU, LSTM and their cells: PyTorch's modules, run by this library's kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import RNNBase
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from sparsebp.core.errors import DeviceError, DTypeError, OptionError, ShapeError
from sparsebp.torch.ops import recurrent, run_projected

# A call of a recurrent module, run by this library's kernels: checked as torch.nn does, layer by layer. The functions
# take any `torch.nn.RNNBase`, ours and PyTorch's: they only read its options and weights.

DTYPES = (torch.float32, torch.float64)
DEVICES = ("cpu", "cuda", "meta")


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for x's device."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a block in which autocast is off for x's device."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else _NOTHING


_NOTHING = contextlib.nullcontext()


def cast_input(name: str, x: Tensor, weight: Tensor) -> Tensor:
    """Return x, under autocast in the dtype of the weights, which recurrences use throughout."""
    if autocasts(x) and x.is_floating_point():
        x = x.to(weight.dtype)
    check_tensors(name, {"weight": weight, "input": x})
    return x


def check_tensors(name: str, tensors: dict[str, Tensor | None]) -> None:
    """Check that all tensors have one dtype and device, with kernels; `name` is the module's."""
    first: Tensor | None = None
    for what, tensor in tensors.items():
        if tensor is None:
            continue
        if first is None:
            first, other = tensor, f"torch.nn.{name}" if hasattr(torch.nn, name) else None
            if first.dtype not in DTYPES:
                raise DTypeError(f"st.{name} has no kernels for {first.dtype}", expected="float32 or float64",
                                 got=first.dtype, remedy=f"Use .float(){f', or {other}' if other else ''}")  # fmt: skip
            if first.device.type not in DEVICES or first.layout != torch.strided:
                raise DeviceError(f"st.{name} has no kernels for such tensors", got=f"{first.layout} on {first.device}",
                                  expected="dense ones on a CPU or on CUDA",
                                  remedy=f"Use {other}" if other else None)  # fmt: skip
        elif tensor.dtype != first.dtype:
            raise DTypeError(f"{what} of st.{name} has another dtype", expected=first.dtype, got=tensor.dtype)
        elif tensor.device != first.device or tensor.layout != first.layout:
            expected, got = f"a dense tensor on {first.device}", f"{tensor.layout} on {tensor.device}"
            raise DeviceError(f"{what} of st.{name} is elsewhere", expected=expected, got=got)


def check_dense(name: str, what: str, value: Any, expected: str = "a dense tensor") -> None:
    """Check that an argument of the module `name` is a dense tensor."""
    if not isinstance(value, Tensor):
        raise DTypeError(f"{what} of st.{name} is not a tensor", expected=expected, got=type(value).__name__)
    if value.layout != torch.strided:
        raise DeviceError(f"{what} of st.{name} is sparse", expected=expected, got=value.layout)


def check_lengths(lengths: Tensor | list[int], steps: int, batch: int) -> Tensor:
    """Return the lengths (B,) as an int64 CPU tensor."""
    try:
        values = lengths if isinstance(lengths, Tensor) else torch.tensor(lengths)  # a copy: arrays may be read-only
    except (TypeError, ValueError, RuntimeError) as error:
        raise DTypeError("lengths are not numbers", expected="integers", got=type(lengths).__name__) from error
    values = values.cpu()
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise DTypeError("lengths has the wrong dtype", expected="integers", got=values.dtype)
    if values.shape != (batch,):
        raise OptionError("lengths has the wrong shape", expected=f"{(batch,)}, a number for each sample",
                          got=tuple(values.shape), remedy="Is the layer made with batch_first=True?")  # fmt: skip
    if batch and (int(values.min()) < 1 or int(values.max()) > steps):
        raise OptionError("lengths is out of range", expected=f"1 to {steps} (the number of steps of the input)",
                          got=f"{int(values.min())} to {int(values.max())}")  # fmt: skip
    return values.to(torch.int64)


State = Tensor | tuple[Tensor, Tensor]


def by_kernels(module: RNNBase, input: Any, hx: Any = None) -> tuple[Any, Any]:
    """Run the module's forward on a padded or packed input."""
    for part in _parts(hx):
        expected = "a pair of dense tensors" if module.mode == "LSTM" else "a dense tensor"
        check_dense(module._get_name(), "hx", part, expected)
    if isinstance(input, PackedSequence):
        return _forward_packed(module, input, hx)
    check_dense(module._get_name(), "input", input, "a dense tensor or a PackedSequence")
    return _forward_padded(module, input, hx)


def with_lengths(
    module: RNNBase, forward: Callable[[Any, Any], Any], x: Any, hx: Any, lengths: Tensor | list[int]
) -> tuple[Tensor, State]:
    """Run `forward` on a padded batch of sequences of these lengths, by packing it."""
    if isinstance(x, PackedSequence):
        raise OptionError("A packed sequence has its own lengths", expected="lengths=None", got="lengths too")
    check_dense(module._get_name(), "input", x, "a dense tensor or a PackedSequence")
    if x.dim() != 3:
        raise ShapeError("lengths is for a batch", expected="input of three dimensions", got=tuple(x.shape))
    batch, steps = x.shape[:2] if module.batch_first else x.shape[1::-1]
    values = check_lengths(lengths, steps, batch)
    if batch == 0:
        return forward(x, hx)
    packed = pack_padded_sequence(x, values, module.batch_first, enforce_sorted=False)
    y, hx = forward(packed, hx)
    return pad_packed_sequence(y, module.batch_first, total_length=steps)[0], hx


def _parts(hx: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a state: one, two for an LSTM, none for None."""
    return () if hx is None else tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)


def _map(hx: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if hx is None or isinstance(hx, Tensor):
        return hx if hx is None else function(hx)
    return tuple(function(part) for part in hx)


def _forward_padded(module: RNNBase, x: Tensor, hx: Any) -> tuple[Tensor, State]:
    if x.dim() not in (2, 3):
        raise ValueError(f"{module._get_name()}: Expected input to be 2D or 3D, got {x.dim()}D tensor instead")
    batched = x.dim() == 3
    for part in _parts(hx):
        if part.dim() != x.dim():
            kind = "batched 3-D" if batched else "unbatched 2-D"
            raise RuntimeError(f"For {kind} input, hx should also be {x.dim()}-D but got {part.dim()}-D tensor")
    if not batched:
        x, hx = x.unsqueeze(0 if module.batch_first else 1), _map(hx, lambda part: part.unsqueeze(1))
    x = _checked(module, x, None)
    if module.batch_first:
        x = x.transpose(0, 1)
    steps, batch, features = x.shape
    if steps == 0:
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    rows, hx = _run(module, x.reshape(steps * batch, features), None, batch, _state(module, hx, batch, x))
    # no views, as in PyTorch: callers may detach_ them, or change in place what was computed under no_grad
    y = torch.ops.aten._unsafe_view(rows, (steps, batch, rows.shape[1]))
    if module.batch_first:
        y = y.transpose_(0, 1)
    if not batched:
        return y.squeeze(0 if module.batch_first else 1), _map(hx, lambda part: part.squeeze(1))
    return y, hx


def _forward_packed(module: RNNBase, packed: PackedSequence, hx: Any) -> tuple[PackedSequence, State]:
    x, batch_sizes, in_order, back = packed
    if batch_sizes.numel() == 0:
        raise OptionError("The packed sequence is empty", expected="at least one step", got="no batch sizes")
    x = _checked(module, x, batch_sizes)
    batch = int(batch_sizes[0]) if in_order is None else in_order.shape[0]
    hx = _state(module, hx, batch, x)
    if in_order is not None:
        hx = _map(hx, lambda part: part.index_select(1, in_order))
    y, hx = _run(module, x, batch_sizes, batch, hx)
    if back is not None:
        hx = _map(hx, lambda part: part.index_select(1, back))
    return PackedSequence(y, batch_sizes, in_order, back), hx


def _run(module: RNNBase, x: Tensor, batch_sizes: Tensor | None, batch: int, hx: State | None) -> tuple[Tensor, State]:
    """Run all layers over rows x (N, I), from states (runs, B, H) or None; output rows are in the order of x."""
    kind, directions = module.mode.lower(), 2 if module.bidirectional else 1
    # all runs share the zeros
    zeros = None if hx is not None else tuple(x.new_zeros(batch, size) for size in _sizes(module))
    lasts: list[list[Tensor]] = [[] for _ in _sizes(module)]
    with without_autocast(x):
        for layer in range(module.num_layers):
            if layer and module.dropout:
                x = torch.nn.functional.dropout(x, module.dropout, module.training)
            outputs = []
            for direction in range(directions):
                run = layer * directions + direction
                start = tuple(part[run] for part in _parts(hx)) if zeros is None else zeros
                y, *last = _run_once(module, kind, run, direction == 1, batch_sizes, x, start)
                outputs.append(y)
                for part, found in zip(lasts, last, strict=True):
                    part.append(found)
            x = torch.cat(outputs, 1) if module.bidirectional else outputs[0]
    states = [torch.stack(part) if len(part) > 1 else _alone(part[0]) for part in lasts]
    return x, states[0] if len(states) == 1 else (states[0], states[1])


def _alone(state: Tensor) -> Tensor:
    """Return the state of a single run as that of all runs: no copy, and no view either."""
    found: Tensor = torch.ops.aten._unsafe_view(state, (1, *state.shape))
    return found


def _run_once(
    module: RNNBase, kind: str, run: int, reverse: bool, batch_sizes: Tensor | None, x: Tensor,
    start: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return y and the last state of one run."""
    # read by name: parametrizations replace a Parameter
    weights = [cast(Tensor, getattr(module, name)) for name in module._all_weights[run]]
    w_ih, w_hh, *rest = weights
    b_ih, b_hh = rest[:2] if module.bias else (None, None)
    check_tensors(module._get_name(), {"input": x, **dict(zip(module._all_weights[run], weights, strict=True))})
    if module.proj_size:
        return run_projected(reverse, batch_sizes, x, start[0], start[1], w_ih, w_hh, b_ih, b_hh, rest[-1])
    c0 = start[1] if len(start) == 2 else None
    found = recurrent(kind, reverse, batch_sizes, x, start[0], c0, w_ih, w_hh, b_ih, b_hh)
    return found[: 1 + len(start)]


def _checked(module: RNNBase, x: Tensor, batch_sizes: Tensor | None) -> Tensor:
    module.check_input(x, batch_sizes)
    return cast_input(module._get_name(), x, cast(Tensor, getattr(module, module._all_weights[0][0])))


def _sizes(module: RNNBase) -> tuple[int, ...]:
    """Return the width of each array of the state."""
    first = module.proj_size or module.hidden_size
    return (first, module.hidden_size) if module.mode == "LSTM" else (first,)


def _state(module: RNNBase, hx: Any, batch: int, x: Tensor) -> State | None:
    """Return the initial state, checked as torch.nn does; None stands for zeros."""
    if hx is None:
        return None
    runs, sizes = module.num_layers * (2 if module.bidirectional else 1), _sizes(module)
    if len(_parts(hx)) != len(sizes):
        wanted = "a pair (h_0, c_0)" if len(sizes) == 2 else "a tensor"
        got = f"{len(_parts(hx))} tensors"
        raise OptionError(f"hx is not the state of st.{module._get_name()}", expected=wanted, got=got)
    names = ("hidden",) if len(sizes) == 1 else ("hidden[0]", "hidden[1]")
    for part, size, name in zip(_parts(hx), sizes, names, strict=True):
        module.check_hidden_size(part, (runs, batch, size), f"Expected {name} size {{}}, got {{}}")
    if autocasts(x):
        hx = _map(hx, lambda part: part.to(x.dtype))
    check_tensors(module._get_name(), {"input": x, **dict(zip(("hx", "cx"), _parts(hx), strict=False))})
    checked: State = hx
    return checked


# RNNCell, GRUCell and LSTMCell: one step, with torch.nn's arguments, parameters and errors.


class RNNCell(torch.nn.RNNCell):
    """`torch.nn.RNNCell`, run by this library's kernels."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Return the next state (B, hidden_size) for the input (B, input_size) and the state; without B for one."""
        if self.nonlinearity not in ("tanh", "relu"):
            raise RuntimeError(f"Unknown nonlinearity: {self.nonlinearity}")
        return _step(self, f"rnn_{self.nonlinearity}", input, (hx,))[0]


class GRUCell(torch.nn.GRUCell):
    """`torch.nn.GRUCell`, run by this library's kernels."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Return the next state (B, hidden_size) for the input (B, input_size) and the state; without B for one."""
        return _step(self, "gru", input, (hx,))[0]


class LSTMCell(torch.nn.LSTMCell):
    """`torch.nn.LSTMCell`, run by this library's kernels."""

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return the next state, a pair of (B, hidden_size), for the input (B, input_size) and the state."""
        if hx is not None and not (isinstance(hx, (tuple, list)) and len(hx) == 2):
            raise OptionError("hx is not the state of st.LSTMCell", expected="a pair (h, c)", got=type(hx).__name__)
        h, c = _step(self, "lstm", input, (None, None) if hx is None else hx)
        return h, c


def _step(
    cell: torch.nn.RNNCell | torch.nn.GRUCell | torch.nn.LSTMCell, kind: str, x: Tensor, state: Any
) -> tuple[Tensor, ...]:
    """Return the next state."""
    name = cell._get_name()
    check_dense(name, "input", x)
    for part in state:
        if part is not None:
            check_dense(name, "hx", part)
    if x.dim() not in (1, 2):
        raise ValueError(f"{name}: Expected input to be 1D or 2D, got {x.dim()}D instead")
    for number, part in enumerate(state):
        if part is not None and part.dim() not in (1, 2):
            what = "hidden" if len(state) == 1 else f"hx[{number}]"
            raise ValueError(f"{name}: Expected {what} to be 1D or 2D, got {part.dim()}D instead")
    batched = x.dim() == 2
    x = cast_input(name, x if batched else x.unsqueeze(0), cell.weight_ih)
    if x.shape[1] != cell.input_size:
        raise RuntimeError(f"input has inconsistent input_size: got {x.shape[1]} expected {cell.input_size}")
    starts = []
    for number, part in enumerate(state):
        if part is None:
            start = x.new_zeros(x.shape[0], cell.hidden_size)
        else:
            start = part if batched else part.unsqueeze(0)
            _check_state(number, start, x, cell.hidden_size)
            if autocasts(x):
                start = start.to(x.dtype)
        starts.append(start)
    weights = cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh
    named = dict(zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), weights, strict=True))
    check_tensors(name, {"input": x, **dict(zip(("hx", "cx"), starts, strict=False)), **named})
    with without_autocast(x):
        _, *last = recurrent(kind, False, None, x, starts[0], starts[1] if len(starts) == 2 else None, *weights)
    return tuple(part if batched else part.squeeze(0) for part in last[: len(starts)])


def _check_state(number: int, start: Tensor, x: Tensor, hidden: int) -> None:
    if start.dim() != 2 or x.shape[0] != start.shape[0]:
        raise RuntimeError(f"Input batch size {x.shape[0]} doesn't match hidden{number} batch size {start.shape[0]}")
    if start.shape[1] != hidden:
        raise RuntimeError(f"hidden{number} has inconsistent hidden_size: got {start.shape[1]}, expected {hidden}")


# RNN, GRU and LSTM: modules of PyTorch in everything but their forward, which this library's kernels run.


class Recurrent(torch.nn.RNNBase):
    """Base of `RNN`, `GRU` and `LSTM`: `torch.nn.RNNBase` with another `forward`.

    They are not subclasses of torch.nn.RNN, GRU and LSTM: `torch.compile` breaks its graph at each of those.
    """

    def forward(
        self, input: Tensor | PackedSequence, hx: Any = None, *, lengths: Tensor | list[int] | None = None
    ) -> tuple[Any, Any]:
        """Run all layers, as torch.nn's modules do.

        Parameters
        ----------
        input
            (T, B, input_size), with ``batch_first`` (B, T, input_size), unbatched (T, input_size); float32 or float64.
            Or a `PackedSequence`: no padding is computed or stored.
        hx
            The initial state (num_layers · directions, B, hidden_size), a pair (h_0, c_0) for an LSTM; None for zeros.
        lengths
            Valid steps of each sample (B,), from 1 to T; equivalent to packing the input and padding the output. Later
            input has no influence, later output is zero, and the last state is the last valid one.

        Returns
        -------
        output
            The last layer's states (T, B, directions · hidden_size), laid out as the input; packed if that is.
        h_n
            The last state, as `hx`.

        Raises
        ------
        RuntimeError, ValueError
            A shape or dtype does not fit: the errors of torch.nn.
        DTypeError, DeviceError, ShapeError, OptionError
            A dtype or device without kernels, mixed devices, lengths that do not fit.
        """
        if lengths is None:
            return by_kernels(self, input, hx)
        return with_lengths(self, partial(by_kernels, self), input, hx, lengths)


class RNN(Recurrent):
    """`torch.nn.RNN` with the same arguments and ``state_dict``, run by this library's kernels; see `forward`."""

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
    """`torch.nn.GRU` with the same arguments and ``state_dict``, run by this library's kernels; see `forward`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse_projection(kwargs)
        super().__init__("GRU", *args, **kwargs)


class LSTM(Recurrent):
    """`torch.nn.LSTM` with the same arguments and ``state_dict``, run by this library's kernels; see `forward`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("LSTM", *args, **kwargs)


def _refuse_projection(kwargs: dict[str, Any]) -> None:
    if "proj_size" in kwargs:
        raise ValueError("proj_size argument is only supported for LSTM, not RNN or GRU")
