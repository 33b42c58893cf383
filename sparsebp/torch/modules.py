"""`accelerate`, `restore` and `explain`; RNN, GRU, LSTM and their cells; which calls the kernels run."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import types
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad
from torch.nn import Module, RNNBase
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.nn.utils.rnn import PackedSequence

from sparsebp.core.errors import OptionError
from sparsebp.torch.calls import (
    autocasts,
    by_kernels,
    cast_input,
    check_dense,
    check_tensors,
    with_lengths,
    without_autocast,
)
from sparsebp.torch.ops import recurrent

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


# The one rule of size: from how many steps on a call of an accelerated module is run by this library's kernels.
#
# The kernels gain where there are many steps: PyTorch calls several operations a step, each of which costs more than
# its arithmetic, while a call of ours costs what PyTorch takes for some eight steps. The larger H is, the more both
# spend on the same products. An LSTM in float32 is another matter: PyTorch has one call of oneDNN for all steps of
# sequences of one length, packed or not. `FEWEST_STEPS` was measured on a CPU with one and two threads, ours and
# PyTorch's calls in turn, with 1 and 16 samples of up to 128 steps in float32; it is rounded up to where none was
# slower. In float64 no row is below that of float32 but for the LSTM's, of which one thread was measured, and longer
# sequences are expected to gain as those of 128 steps. A cell is one step a call.

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
"""By the cell, float64 or not, packed sequences or one length, gradients recorded or not: pairs of a hidden size, up to
which, and the number of steps from which calls are run by the kernels. Beyond the last hidden size none is."""

OF_CELLS = "a cell runs one step a call, which was measured to be slower here"


class Case(NamedTuple):
    """What the rule tells apart, besides the hidden size and the number of steps."""

    cell: str
    in_float64: bool
    packed: bool
    trains: bool

    def __str__(self) -> str:
        packed, trains = ", packed" if self.packed else "", "" if self.trains else ", no gradients"
        return f"{'float64' if self.in_float64 else 'float32'} {self.cell}{packed}{trains}"

    @property
    def largest(self) -> int:
        """The hidden size beyond which no call is run by the kernels."""
        return FEWEST_STEPS[self][-1][0]

    def fewest_steps(self, hidden: int) -> int | None:
        """Return the steps from which a call is run by the kernels; None: it never is."""
        return next((steps for largest, steps in FEWEST_STEPS[self] if hidden <= largest), None)


def is_faster(kind: str, hidden: int, in_float64: bool, steps: int, packed: bool, trains: bool = True) -> bool:
    """Say whether a call of so many steps is run by the kernels."""
    fewest = Case(kind, in_float64, packed, trains).fewest_steps(hidden)
    return fewest is not None and steps >= fewest


# What `accelerate` makes of a module: at every call the faster of this library's kernels and PyTorch's own forward.
#
# The module stays of torch.nn's own class; its `forward` is a `Dispatch`, in the module's ``__dict__``. How long the
# sequences are, and whether they are packed, is known at the call. `way_of` decides, by shapes, dtypes, the mode and
# `sparsebp.torch.modules` alone, and both ways compute the same to rounding.

OURS: dict[type[Module], type[Module]] = {
    torch.nn.RNN: RNN,
    torch.nn.GRU: GRU,
    torch.nn.LSTM: LSTM,
    torch.nn.RNNCell: RNNCell,
    torch.nn.GRUCell: GRUCell,
    torch.nn.LSTMCell: LSTMCell,
}
"""By the class of torch.nn: the class of this library that computes the same."""


class Way(NamedTuple):
    """Which way a call goes, and why."""

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
_DTYPES = (torch.float32, torch.float64)
_TENSORS = (Tensor, torch.nn.Parameter)
_OF_WEIGHTS = frozenset((*_TENSORS, types.NoneType))


def way_of(module: Any, input: Any, always: bool = False) -> Way:
    """Decide which way a call of a recurrent module goes; `always`: by the kernels wherever there are any.

    It runs before every call, so it reads attributes, the cheapest and most decisive ones first, and no values.
    """
    packed = isinstance(input, PackedSequence)
    x = input.data if packed else input
    if type(x) not in _TENSORS:
        return _NOT_PLAIN
    dtype = x.dtype
    if dtype not in _DTYPES:
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
    if way.ours and packed and steps * int(input.batch_sizes[0]) == shape[0]:  # of one length: PyTorch's LSTM sees that
        way = _by_size(module.mode, dtype, False, trains, hidden, steps)
    return (_dispatch_obstacle(module, x, packed) or way) if way.ours else way


@functools.lru_cache(maxsize=4096)
def _by_size(mode: str, dtype: torch.dtype, packed: bool, trains: bool, hidden: int, steps: int) -> Way:
    """Decide by what was measured."""
    case = Case(mode.partition("_")[0], dtype == torch.float64, packed, trains)
    fewest = case.fewest_steps(hidden)
    if fewest is None:
        return Way(False, f"{case}, H = {hidden} > {case.largest}")
    return Way(steps >= fewest, f"{case}, T = {steps} {'≥' if steps >= fewest else '<'} {fewest}")


def _dispatch_obstacle(module: Any, x: Tensor, packed: bool) -> Way | None:
    """Say what speaks against the kernels, where they are the faster ones; None: nothing does."""
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
    """Say whether vmap is among the transforms of `torch.func` that are active."""
    return any(level.key() == TransformType.Vmap for level in retrieve_all_functorch_interpreters())


class Dispatch:
    """The forward of an accelerated module, in the place of the bound method of its class."""

    def __init__(self, module: Module, always: bool) -> None:
        kind = next(kind for kind in type(module).__mro__ if kind in OURS)  # parametrizations derive a class from it
        self.module, self.always = module, always
        self._theirs: Any = kind
        self._ours: Any = OURS[kind]

    @torch.compiler.disable  # graphs end at every torch.nn.GRU; what it calls is not to become graphs of its own
    def __call__(self, input: Any, hx: Any = None, *, lengths: Any = None) -> Any:
        """Run a call whichever way is the faster one; `lengths` as for `sparsebp.torch.GRU`."""
        if lengths is not None:
            return with_lengths(cast(RNNBase, self.module), self, input, hx, lengths)
        kind = self._ours if way_of(self.module, input, self.always).ours else self._theirs
        return kind.forward(self.module, input, hx)

    def __reduce__(self) -> Any:
        return Dispatch, (self.module, self.always)

    def replicate(self) -> Module:
        """Return a replica of the module for a device of `torch.nn.DataParallel`, which has a forward of its own."""
        replica = type(self.module)._replicate_for_data_parallel(self.module)
        attach(replica, self.always)
        return replica

    def refuse_scripting(self) -> NoReturn:
        """Say that TorchScript, which compiles the source of a module's class, cannot have this forward."""
        raise OptionError("TorchScript compiles PyTorch's own forward alone", expected="a model not accelerated",
                          got=f"an accelerated {self.module._get_name()}",
                          remedy="Call sparsebp.torch.restore(model) first, or use torch.jit.trace")  # fmt: skip


def attach(module: Module, always: bool) -> None:
    """Give a module of torch.nn a forward that dispatches."""
    forward = Dispatch(module, always)
    module.__dict__.update(zip(ATTRIBUTES, (forward, forward.replicate, forward.refuse_scripting), strict=True))


def detach(module: Module) -> None:
    """Take the forward that dispatches away again, if it has one."""
    if dispatch_of(module) is not None:
        for name in ATTRIBUTES:
            del module.__dict__[name]


def dispatch_of(module: Module) -> Dispatch | None:
    """Return the forward of an accelerated module; None of any other."""
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, Dispatch) else None


ATTRIBUTES = ("forward", "_replicate_for_data_parallel", "__prepare_scriptable__")
"""What `attach` adds to a module: what PyTorch looks up on it, and would find in its class."""


def _reduce(module: Module) -> Any:
    """Reduce a module for `copy` and `pickle`: as ever, but for a forward of ours, which belongs to one module.

    A shallow copy would share it otherwise, and with it the options of the module that it was made from.
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
    """What `accelerate` does with one recurrent module of a model, or with one call of it.

    Attributes
    ----------
    name
        Where it is in the model, as in ``model.named_modules()``; empty for the model itself.
    module
        What it is: ``"GRU"``.
    replaced
        Whether its calls may be run by this library's kernels. With an input: whether they run this call.
    reason
        Why, or why not: ``"PyTorch's forward: float32 LSTM, T = 200 < 256"``.
    """

    name: str
    module: str
    replaced: bool
    reason: str = ""


def accelerate(model: M, *, faster_only: bool = True) -> M:
    """Let this library's kernels run every torch.nn.RNN, GRU and LSTM inside a model, or the model itself.

    Each module stays the same object of the same class, with another ``forward``: so parameters, hooks, the mode, and
    whoever else refers to it stay as they are, and `torch.nn.Module.apply` and `quantize_dynamic` know it. Every call
    goes the way that was measured to be the faster one for its shapes and dtype, by the kernels or by PyTorch's own
    forward; `explain` tells which, and `restore` undoes it. What would not be computed rightly is left alone, with one
    warning that says why.

    Parameters
    ----------
    model
        Changed in place.
    faster_only
        False: run every call by the kernels that they can run, also where they are slower, and those of cells.

    Returns
    -------
    torch.nn.Module
        `model`.

    Raises
    ------
    OptionError
        It is no `torch.nn.Module`.
    """
    left = []
    for name, module in _recurrent_modules(model, "accelerate"):
        reason = _replacement_obstacle(module, faster_only)
        if reason:
            left.append(f"{name or 'the model'} ({type(module).__name__}): {reason}")
        elif not isinstance(module, _ALL_OURS) and (dispatch_of(module) is None or not faster_only):
            attach(module, not faster_only)
    if left:
        warnings.warn("accelerate leaves alone " + "; ".join(left), stacklevel=2)
    return model


def restore(model: M) -> M:
    """Undo `accelerate`: every accelerated module inside a model, or the model itself, has PyTorch's forward again.

    Parameters
    ----------
    model
        Changed in place.

    Returns
    -------
    torch.nn.Module
        `model`.

    Raises
    ------
    OptionError
        It is no `torch.nn.Module`.
    """
    for _, module in _recurrent_modules(model, "restore"):
        detach(module)
    return model


def explain(model: Module, *inputs: Any, faster_only: bool = True, **named: Any) -> list[Outcome]:
    """Say what `accelerate` does, or did, with each recurrent module of a model; with an input, with each call of it.

    Parameters
    ----------
    model
        A model, accelerated or not. It is not changed.
    *inputs, **named
        What to call the model with. It is called once, in its mode and with gradients or without as they are now; what
        that changes in its buffers and in PyTorch's random numbers is put back. Left out: nothing is called.
    faster_only
        As for `accelerate`, for modules that are not accelerated.

    Returns
    -------
    list of Outcome
        One a module, in the order of ``model.named_modules()``; with an input one a call, in the order of the calls.

    Raises
    ------
    OptionError
        It is no `torch.nn.Module`.
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
_WITHOUT_INPUT = "each call goes the faster way; explain(model, input) says which"


def _way(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], faster_only: bool) -> Way:
    """Return the way of a call, as the module's forward decides."""
    if isinstance(module, _ALL_OURS):
        return Way(True, f"the module is a sparsebp.torch.{module._get_name()}")
    input, lengths, dispatch = args[0] if args else kwargs["input"], kwargs.get("lengths"), dispatch_of(module)
    if lengths is not None:  # the forward gets these packed
        packed: list[Any] = []

        def keep(*call: Any) -> Any:
            packed.append(call[0])
            return call

        with_lengths(cast(RNNBase, module), keep, input, None, lengths)
        input = packed[0]
    return way_of(module, input, not faster_only if dispatch is None else dispatch.always)


@contextlib.contextmanager
def _left_as_it_is(model: Module) -> Iterator[None]:
    """Put back what a call of the model changes in its buffers and in PyTorch's random numbers.

    Only what did change is written to, past the count of versions: a graph of the user's may hold the buffers, batch
    normalisation does not count either, and not all of them can be written.
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
    """Say whether two tensors hold the same; NaN is the same as NaN."""
    if a.layout is not torch.strided:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _recurrent_modules(model: Module, action: str) -> Iterator[tuple[str, Module]]:
    """Yield each recurrent module once, with its name; `action` is what there is nothing to do for otherwise."""
    if not isinstance(model, Module):
        raise OptionError(f"There is nothing to {action}", expected="a torch.nn.Module", got=type(model).__name__)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        if isinstance(module, (torch.nn.RNNBase, torch.nn.RNNCellBase)):
            yield name, module


def _replacement_obstacle(module: Module, faster_only: bool) -> str:
    """Say why a recurrent module has to stay as it is; empty if it need not, or is one of ours."""
    kind = type_before_parametrizations(module)
    if dispatch_of(module) is not None or isinstance(module, _ALL_OURS):
        return ""
    if kind not in OURS:
        return "a class of its own, whose forward may be another; derive it from sparsebp.torch's instead"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    if faster_only and issubclass(kind, torch.nn.RNNCellBase):
        return f"{OF_CELLS} (faster_only=False replaces it)"
    return ""
