"""RNN, GRU, LSTM and their cells; `accelerate`, `restore` and `explain`; the rule for which calls the kernels run."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad
from torch.nn import Module, RNNBase
from torch.nn.utils.parametrize import type_before_parametrizations
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
        values = torch.as_tensor(lengths)
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
    y = rows.view(steps, batch, rows.shape[1])
    if module.batch_first:
        y = y.transpose(0, 1)
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
    states = [torch.stack(part) if len(part) > 1 else part[0].unsqueeze(0) for part in lasts]
    return x, states[0] if len(states) == 1 else (states[0], states[1])


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


# The size rule: the number of steps from which this library's kernels run a call of an accelerated module.
#
# The kernels win for many steps: PyTorch calls several operations per step, each costing more than its arithmetic,
# while a call of ours costs as much as some eight of PyTorch's steps. The larger H, the more both spend on the same
# products. PyTorch's float32 LSTM is different: one oneDNN call for all steps of sequences of one length, packed or
# not. `FEWEST_STEPS` was measured on a CPU with one and two threads, 1 and 16 samples and up to 128 steps in float32,
# and rounded up to where no case was slower; float64 LSTMs were measured too. A cell runs one step per call.
# ``python -m benchmarks thresholds`` measures it anew, and ``python -m benchmarks.thresholds`` writes it here.

FEWEST_STEPS: dict[tuple[str, bool, bool, bool], tuple[tuple[int, int], ...]] = {
    # cell, float64, packed, trains: (hidden size up to which, steps from which), …
    ("RNN", False, False, True): ((64, 32), (512, 64)),
    ("RNN", False, False, False): ((128, 16), (512, 32)),
    ("RNN", False, True, True): ((64, 32), (256, 64), (512, 128)),
    ("RNN", False, True, False): ((20, 32), (128, 64), (512, 256)),
    ("RNN", True, False, True): ((64, 32), (512, 64)),
    ("RNN", True, False, False): ((128, 16), (512, 32)),
    ("RNN", True, True, True): ((64, 32), (128, 64), (512, 128)),
    ("RNN", True, True, False): ((20, 32), (128, 64), (512, 256)),
    ("GRU", False, False, True): ((32, 8), (128, 16), (512, 32)),
    ("GRU", False, False, False): ((64, 8), (128, 16), (512, 32)),
    ("GRU", False, True, True): ((64, 16), (256, 64), (512, 128)),
    ("GRU", False, True, False): ((64, 32), (128, 64)),
    ("GRU", True, False, True): ((32, 8), (128, 16), (512, 32)),
    ("GRU", True, False, False): ((64, 8), (128, 16), (256, 32), (512, 128)),
    ("GRU", True, True, True): ((64, 16), (256, 64), (512, 128)),
    ("GRU", True, True, False): ((64, 32), (128, 64)),
    ("LSTM", False, False, True): ((20, 100), (64, 256), (128, 512)),
    ("LSTM", False, False, False): ((20, 16), (64, 256)),
    ("LSTM", False, True, True): ((64, 16), (128, 64), (256, 128)),
    ("LSTM", False, True, False): ((20, 16), (64, 32), (128, 128)),
    ("LSTM", True, False, True): ((64, 16), (128, 32), (512, 64)),
    ("LSTM", True, False, False): ((64, 16), (128, 32), (256, 64), (512, 128)),
    ("LSTM", True, True, True): ((64, 16), (128, 64), (256, 128)),
    ("LSTM", True, True, False): ((20, 16), (64, 32), (128, 64), (256, 128)),
}
"""By cell, float64, packed and recorded gradients: pairs of a largest hidden size and the number of steps from which
the kernels run a call. Beyond the last hidden size they never do."""

OF_CELLS = "a cell runs one step per call, for which the kernels were measured to be slower"


class Case(NamedTuple):
    """A case of the size rule."""

    cell: str
    in_float64: bool
    packed: bool
    trains: bool

    def __str__(self) -> str:
        packed, trains = ", packed" if self.packed else "", "" if self.trains else ", no gradients"
        return f"{'float64' if self.in_float64 else 'float32'} {self.cell}{packed}{trains}"

    @property
    def largest(self) -> int:
        """The hidden size beyond which the kernels run no call."""
        return max((hidden for hidden, _ in FEWEST_STEPS[self]), default=0)

    def fewest_steps(self, hidden: int) -> int | None:
        """Return the number of steps from which the kernels run a call; None for never."""
        return next((steps for largest, steps in FEWEST_STEPS[self] if hidden <= largest), None)


def is_faster(kind: str, hidden: int, in_float64: bool, steps: int, packed: bool, trains: bool = True) -> bool:
    """Whether the kernels run a call of `steps` steps."""
    fewest = Case(kind, in_float64, packed, trains).fewest_steps(hidden)
    return fewest is not None and steps >= fewest


# An accelerated module picks the faster of this library's kernels and PyTorch's forward at every call.
#
# The module keeps its torch.nn class; its `forward` is a `Dispatch` in its ``__dict__``. The length of the sequences,
# and whether they are packed, is known at the call. `way_of` decides by shapes, dtypes, the mode and this module's
# table alone, and both ways compute the same up to rounding.

OURS: dict[type[Module], type[Module]] = {
    torch.nn.RNN: RNN,
    torch.nn.GRU: GRU,
    torch.nn.LSTM: LSTM,
    torch.nn.RNNCell: RNNCell,
    torch.nn.GRUCell: GRUCell,
    torch.nn.LSTMCell: LSTMCell,
}
"""This library's class for each class of torch.nn."""


class Way(NamedTuple):
    """The way a call goes, and why."""

    ours: bool
    why: str

    def __str__(self) -> str:
        return f"{'the kernels' if self.ours else PLAIN}: {self.why}"


PLAIN = "PyTorch's forward"
_ALWAYS = Way(True, "every call that they can run")
_NO_BATCHING = Way(True, "vmap, for which PyTorch's has no rule")
_NO_TANGENTS = Way(True, "forward mode, which PyTorch's float32 LSTM does not have")
_TANGENTS = Way(False, "forward mode, whose derivatives are computed by PyTorch's operations either way")
_AUTOCAST = Way(False, "autocast, in whose dtypes there are no kernels")
_TRACED = Way(False, "traced for TorchScript or ONNX")
_SEEN = Way(False, "a mode of PyTorch's dispatcher, which is to see every operation")
_MALFORMED = Way(False, "an input that is empty, or not of two or three dimensions")
_NOT_PLAIN = Way(False, "an input or weights that are no plain dense tensors")
_ELSEWHERE = Way(False, "measured on a CPU alone")
_TENSORS = (Tensor, torch.nn.Parameter)
_OF_WEIGHTS = frozenset((*_TENSORS, types.NoneType))


def way_of(module: Any, input: Any, always: bool = False) -> Way:
    """Decide the way of a call of a recurrent module; `always`: by the kernels wherever they can run it.

    Runs before every call, so it reads no values, and the cheapest and most decisive attributes first.
    """
    packed = isinstance(input, PackedSequence)
    x = input.data if packed else input
    if type(x) not in _TENSORS:
        return _NOT_PLAIN
    dtype = x.dtype
    if dtype not in DTYPES:
        return Way(False, f"there are no kernels for {dtype}")
    if always:
        return _ALWAYS if torch._C._get_tracing_state() is None else _TRACED
    if torch._C._are_functorch_transforms_active() and _is_mapped():
        return _NO_BATCHING
    if forward_ad._current_level >= 0:
        return _NO_TANGENTS if module.mode == "LSTM" and dtype is torch.float32 else _TANGENTS
    shape = x.shape
    dims = len(shape)
    if dims not in (2, 3):
        return _MALFORMED
    steps = len(input.batch_sizes) if packed else shape[1 if dims == 3 and module.batch_first else 0]
    trains, hidden = torch.is_grad_enabled(), module.hidden_size
    way = _by_size(module.mode, dtype, packed, trains, hidden, steps)
    if way.ours and packed and steps * int(input.batch_sizes[0]) == shape[0]:  # one length: PyTorch's LSTM detects it
        way = _by_size(module.mode, dtype, False, trains, hidden, steps)
    return (_dispatch_obstacle(module, x, packed) or way) if way.ours else way


@functools.lru_cache(maxsize=4096)
def _by_size(mode: str, dtype: torch.dtype, packed: bool, trains: bool, hidden: int, steps: int) -> Way:
    """Decide by the size rule."""
    case = Case(mode.partition("_")[0], dtype == torch.float64, packed, trains)
    fewest = case.fewest_steps(hidden)
    if fewest is None:
        return Way(False, f"{case}, H = {hidden} > {case.largest}")
    return Way(steps >= fewest, f"{case}, T = {steps} {'≥' if steps >= fewest else '<'} {fewest}")


def _dispatch_obstacle(module: Any, x: Tensor, packed: bool) -> Way | None:
    """Return the way that rules out the kernels where they would be faster, None if nothing does."""
    if not x.is_cpu:
        return _ELSEWHERE
    if x.numel() == 0 or (packed and x.dim() != 2):
        return _MALFORMED
    if torch._C._is_any_autocast_enabled():
        return _AUTOCAST
    if torch._C._get_tracing_state() is not None:
        return _TRACED
    if torch._C._len_torch_dispatch_stack():
        return _SEEN
    if x.layout is not torch.strided or not _OF_WEIGHTS.issuperset(map(type, module._flat_weights)):
        return _NOT_PLAIN
    return None


def _is_mapped() -> bool:
    """Whether vmap is among the active transforms of `torch.func`."""
    return any(level.key() == TransformType.Vmap for level in retrieve_all_functorch_interpreters())


class Dispatch:
    """The forward of an accelerated module, in the place of the bound method of its class."""

    def __init__(self, module: Module, always: bool) -> None:
        kind = next(kind for kind in type(module).__mro__ if kind in OURS)  # parametrizations subclass it
        self.module, self.always = module, always
        self._theirs: Any = kind
        self._ours: Any = OURS[kind]
        self.__name__, self.__code__ = "forward", kind.forward.__code__  # torch.export names inputs by them

    # graphs end at every torch.nn.GRU; its callees must not become graphs
    @torch.compiler.disable(reason="Before torch.export(strict=True), call sparsebp.torch.restore(model)")
    def __call__(self, input: Any, hx: Any = None, *, lengths: Any = None) -> Any:
        """Run a call by whichever forward was measured to be faster; `lengths` as for `sparsebp.torch.GRU`."""
        if lengths is not None:
            return with_lengths(cast(RNNBase, self.module), self, input, hx, lengths)
        kind = self._ours if way_of(self.module, input, self.always).ours else self._theirs
        return kind.forward(self.module, input, hx)

    def __reduce__(self) -> Any:
        return Dispatch, (self.module, self.always)

    def replicate(self) -> Module:
        """Return a replica of the module for one device of `torch.nn.DataParallel`, with its own forward."""
        replica = type(self.module)._replicate_for_data_parallel(self.module)
        attach(replica, self.always)
        return replica

    def refuse_scripting(self) -> NoReturn:
        """Raise: TorchScript compiles the source of a module's class, so it cannot use this forward."""
        raise OptionError("TorchScript compiles PyTorch's own forward alone", expected="a model not accelerated",
                          got=f"an accelerated {self.module._get_name()}",
                          remedy="Call sparsebp.torch.restore(model) first, or use torch.jit.trace")  # fmt: skip


def attach(module: Module, always: bool) -> None:
    """Give a module of torch.nn a forward that dispatches."""
    forward = Dispatch(module, always)
    module.__dict__.update(zip(ATTRIBUTES, (forward, forward.replicate, forward.refuse_scripting), strict=True))


def detach(module: Module) -> None:
    """Remove the forward that dispatches, if there is one."""
    if dispatch_of(module) is not None:
        for name in ATTRIBUTES:
            del module.__dict__[name]


def dispatch_of(module: Module) -> Dispatch | None:
    """Return the forward of an accelerated module; None for any other."""
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, Dispatch) else None


ATTRIBUTES = ("forward", "_replicate_for_data_parallel", "__prepare_scriptable__")
"""Attributes set by `attach`, which PyTorch looks up on the module before its class."""


def _reduce(module: Module) -> Any:
    """Reduce a module for `copy` and `pickle`, with a new `Dispatch` for an accelerated copy.

    A shallow copy would otherwise share it, and with it the module that it runs.
    """
    reduced: Any = object.__reduce_ex__(module, 2)
    forward = dispatch_of(module)
    if forward is None:
        return reduced
    state = {name: value for name, value in reduced[2].items() if name not in ATTRIBUTES}
    return _accelerated, (type(module), forward.always), state


def _accelerated(kind: type[Module], always: bool) -> Module:
    """Return a module without its state, whose forward dispatches."""
    module = kind.__new__(kind)
    attach(module, always)
    return module


for _kind in OURS:
    copyreg.pickle(_kind, _reduce)


M = TypeVar("M", bound=Module)


class Outcome(NamedTuple):
    """The effect of `accelerate` on one recurrent module of a model, or on one of its calls.

    Attributes
    ----------
    name
        Name in ``model.named_modules()``; empty for the model itself.
    module
        Its class: ``"GRU"``.
    replaced
        Whether this library's kernels may run its calls or, with an input, whether they run this call.
    reason
        Why, or why not: ``"PyTorch's forward: float32 LSTM, T = 200 < 256"``.
    """

    name: str
    module: str
    replaced: bool
    reason: str = ""


def accelerate(model: M, *, faster_only: bool = True) -> M:
    """Let this library's kernels run every torch.nn.RNN, GRU and LSTM inside a model, or the model itself.

    Each module stays the same object of the same class with another ``forward``, so parameters, hooks, the mode and
    references to it stay valid, and `torch.nn.Module.apply` and `quantize_dynamic` recognise it. Every call goes the
    way that was measured to be faster for its shapes and dtype, by the kernels or by PyTorch's forward; `explain` says
    which, and `restore` undoes it. Modules that cannot be replaced safely are left alone, with one warning.

    Parameters
    ----------
    model
        Changed in place.
    faster_only
        False: run every call that the kernels can run, even where they are slower, and calls of cells.

    Returns
    -------
    torch.nn.Module
        `model`.

    Raises
    ------
    OptionError
        `model` is not a `torch.nn.Module`.
    """
    left = []
    for name, module in _recurrent_modules(model, "accelerate"):
        reason = _replacement_obstacle(module, faster_only)
        if reason:
            left.append(f"{name or 'the model'} ({type(module).__name__}): {reason}")
        elif not isinstance(module, _ALL_OURS) and (dispatch_of(module) is None or not faster_only):
            attach(module, not faster_only)
    if left:
        warnings.warn("accelerate does not change " + "; ".join(left), stacklevel=2)
    return model


def restore(model: M) -> M:
    """Undo `accelerate` in place: give each accelerated module inside a model PyTorch's forward again; return `model`.

    Raises
    ------
    OptionError
        `model` is not a `torch.nn.Module`.
    """
    for _, module in _recurrent_modules(model, "restore"):
        detach(module)
    return model


def explain(model: Module, *inputs: Any, faster_only: bool = True, **named: Any) -> list[Outcome]:
    """Say what `accelerate` does, or did, with each recurrent module of a model; with an input, with each of its calls.

    Parameters
    ----------
    model
        A model, accelerated or not. It is not changed.
    *inputs, **named
        Arguments for one call of the model, in its current mode, with gradients or without as set now. Changes of
        buffers and of PyTorch's random numbers are undone. Without arguments nothing is called.
    faster_only
        As for `accelerate`, for modules that are not accelerated.

    Returns
    -------
    list of Outcome
        One per module, in the order of ``model.named_modules()``; with an input one per call, in order.

    Raises
    ------
    OptionError
        `model` is not a `torch.nn.Module`.
    """
    modules = {
        module: Outcome(name, module._get_name(), not reason, reason or _WITHOUT_INPUT)
        for name, module in _recurrent_modules(model, "explain")
        for reason in (_replacement_obstacle(module, faster_only),)
    }
    if not inputs and not named:
        return list(modules.values())
    calls: list[Outcome] = []

    def note(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        outcome = modules[module]
        if outcome.replaced:
            way = _way(module, args, kwargs, faster_only)
            outcome = outcome._replace(replaced=way.ours, reason=str(way))
        calls.append(outcome)

    with contextlib.ExitStack() as stack:
        for module in modules:
            hook = module.register_forward_pre_hook(note, with_kwargs=True)
            stack.callback(hook.remove)
        stack.enter_context(_left_as_it_is(model))
        model(*inputs, **named)
    return calls


_ALL_OURS = tuple(OURS.values())
_WITHOUT_INPUT = "each call uses whichever was measured to be faster; explain(model, input) says which"


def _way(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], faster_only: bool) -> Way:
    """Return the way that the module's forward takes for a call."""
    if isinstance(module, _ALL_OURS):
        return Way(True, f"the module is a sparsebp.torch.{module._get_name()}")
    input, lengths, dispatch = args[0] if args else kwargs["input"], kwargs.get("lengths"), dispatch_of(module)
    if lengths is not None:  # the forward gets a packed sequence
        packed: list[Any] = []

        def keep(*call: Any) -> Any:
            packed.append(call[0])
            return call

        with_lengths(cast(RNNBase, module), keep, input, None, lengths)
        input = packed[0]
    return way_of(module, input, not faster_only if dispatch is None else dispatch.always)


@contextlib.contextmanager
def _left_as_it_is(model: Module) -> Iterator[None]:
    """Undo what a call of the model changes in its buffers and in PyTorch's random numbers.

    Only changed values are written, without counting a version: a graph of the user may hold the buffers, and not all
    buffers are writeable.
    """
    named = [(module, dict(module._buffers)) for module in model.modules()]  # a call may assign another tensor
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for module, buffers in named:
            module._buffers.update(buffers)
        for buffer, values in before:
            with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                if not _equal(buffer, values):
                    buffer.data.copy_(values)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same values; NaN equals NaN."""
    if a.layout is not torch.strided:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _recurrent_modules(model: Module, action: str) -> Iterator[tuple[str, Module]]:
    """Yield each recurrent module once, with its name; `action` is for the message."""
    if not isinstance(model, Module):
        raise OptionError(f"There is nothing to {action}", expected="a torch.nn.Module", got=type(model).__name__)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        if isinstance(module, (torch.nn.RNNBase, torch.nn.RNNCellBase)):
            yield name, module


def _replacement_obstacle(module: Module, faster_only: bool) -> str:
    """Return why a recurrent module cannot be replaced; empty if it can be, or is one of ours."""
    kind = type_before_parametrizations(module)
    if dispatch_of(module) is not None or isinstance(module, _ALL_OURS):
        return ""
    if kind not in OURS:
        return "it is a subclass and may have a forward of its own; derive it from sparsebp.torch's class instead"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    if faster_only and issubclass(kind, torch.nn.RNNCellBase):
        return f"{OF_CELLS} (faster_only=False replaces it)"
    return ""
