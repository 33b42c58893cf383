"""What `accelerate` makes of a module: at every call the faster of this library's kernels and PyTorch's own forward.

The module stays of torch.nn's own class; its `forward` is a `Dispatch`, in the module's ``__dict__``. How long the
sequences are, and whether they are packed, is known at the call. `way_of` decides, by shapes, dtypes, the mode and
`sparsebp.torch.limits` alone, and both ways compute the same to rounding.
"""

from __future__ import annotations

import copyreg
import functools
import types
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad
from torch.nn import Module, RNNBase
from torch.nn.utils.rnn import PackedSequence

from sparsebp.core.errors import OptionError
from sparsebp.torch import limits
from sparsebp.torch.calls import with_lengths
from sparsebp.torch.cells import GRUCell, LSTMCell, RNNCell
from sparsebp.torch.layers import GRU, LSTM, RNN

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
    """Which way a call goes, and why.

    Attributes
    ----------
    ours
        Whether this library's kernels run it.
    why
        The reason, in words.
    """

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
    return (_obstacle(module, x, packed) or way) if way.ours else way


@functools.lru_cache(maxsize=4096)
def _by_size(mode: str, dtype: torch.dtype, packed: bool, trains: bool, hidden: int, steps: int) -> Way:
    """Decide by what was measured."""
    case = limits.Case(mode.partition("_")[0], dtype == torch.float64, packed, trains)
    fewest = case.fewest_steps(hidden)
    if fewest is None:
        return Way(False, f"{case}, H = {hidden} > {case.largest}")
    return Way(steps >= fewest, f"{case}, T = {steps} {'≥' if steps >= fewest else '<'} {fewest}")


def _obstacle(module: Any, x: Tensor, packed: bool) -> Way | None:
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
