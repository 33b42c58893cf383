"""The rule for which calls of recurrent modules this library's kernels run, and which PyTorch."""

from __future__ import annotations

import functools
import types
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence

from sparsebp.torch.modules import DTYPES

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
        if not _OF_WEIGHTS.issuperset(map(type, module._parameters.values())):
            return _NOT_PLAIN
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
    # a functional call puts its tensors among the parameters, of which PyTorch's forward makes the flat weights anew
    weights = (*module._flat_weights, *module._parameters.values())
    if x.layout is not torch.strided or not _OF_WEIGHTS.issuperset(map(type, weights)):
        return _NOT_PLAIN
    return None


def _is_mapped() -> bool:
    """Whether vmap is among the active transforms of `torch.func`."""
    return any(level.key() == TransformType.Vmap for level in retrieve_all_functorch_interpreters())
