"""The rule for which calls of recurrent modules this library's kernels run, and which PyTorch."""

from __future__ import annotations

import functools
import operator
import types
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence

from sparsebp.torch.modules import DTYPES

# The size rule: which side is predicted to take less time for a call of these sizes.
#
# Either side's time is a sum of `Sizes.terms`: a call, steps, rows, products and weights cost so much each, which was
# measured for each case and fitted. PyTorch calls several operations per step, each costing more than its arithmetic; a
# call of ours costs as much as some of PyTorch's steps. PyTorch's float32 LSTM is different: one oneDNN call for all
# steps of sequences of one length, packed or not. Few steps a call, and cells, are for `one_step`.
#
# So far one thread was measured: the costs of several threads are those of one, except that PyTorch's of the float32
# LSTM for sequences of one length are 0.8 times as high.
# ``python -m benchmarks thresholds`` measures the table anew, and ``python -m benchmarks.thresholds`` writes it here.

COSTS: dict[tuple[str, bool, bool, bool, bool], tuple[tuple[float, ...], tuple[float, ...]]] = {
    # cell, float64, packed, trains, several threads: what the kernels pay for each term, and what PyTorch pays
    ("RNN", False, False, True, False): (
        (714000.0, 11500.0, 0.0, 4.53, 0.123, 0.0, 0.0, 13.2),
        (365000.0, 64200.0, 0.0, 6.68, 0.115, 0.0, 0.163, 5.58),
    ),
    ("RNN", False, False, True, True): (
        (714000.0, 11500.0, 0.0, 4.53, 0.123, 0.0, 0.0, 13.2),
        (365000.0, 64200.0, 0.0, 6.68, 0.115, 0.0, 0.163, 5.58),
    ),
    ("RNN", False, False, False, False): (
        (206000.0, 238.0, 194.0, 0.0, 0.0397, 0.0, 0.0715, 0.171),
        (101000.0, 5970.0, 114.0, 5.52, 0.0329, 0.0, 0.192, 0.0),
    ),
    ("RNN", False, False, False, True): (
        (206000.0, 238.0, 194.0, 0.0, 0.0397, 0.0, 0.0715, 0.171),
        (101000.0, 5970.0, 114.0, 5.52, 0.0329, 0.0, 0.192, 0.0),
    ),
    ("RNN", False, True, True, False): (
        (887000.0, 0.0, 555.0, 6.96, 0.177, 0.0, 0.0, 11.3),
        (429000.0, 62200.0, 941.0, 12.1, 0.187, 0.0, 0.0645, 5.66),
    ),
    ("RNN", False, True, True, True): (
        (887000.0, 0.0, 555.0, 6.96, 0.177, 0.0, 0.0, 11.3),
        (429000.0, 62200.0, 941.0, 12.1, 0.187, 0.0, 0.0645, 5.66),
    ),
    ("RNN", False, True, False, False): (
        (246000.0, 741.0, 40.0, 7.12, 0.0, 0.0819, 0.0372, 0.0),
        (144000.0, 7850.0, 102.0, 10.4, 0.0, 0.0833, 0.0879, 0.259),
    ),
    ("RNN", False, True, False, True): (
        (246000.0, 741.0, 40.0, 7.12, 0.0, 0.0819, 0.0372, 0.0),
        (144000.0, 7850.0, 102.0, 10.4, 0.0, 0.0833, 0.0879, 0.259),
    ),
    ("RNN", True, False, True, False): (
        (798000.0, 6090.0, 43.6, 14.3, 0.312, 0.0588, 0.0, 12.5),
        (378000.0, 52100.0, 668.0, 20.0, 0.0732, 0.98, 0.531, 0.0),
    ),
    ("RNN", True, False, True, True): (
        (798000.0, 6090.0, 43.6, 14.3, 0.312, 0.0588, 0.0, 12.5),
        (378000.0, 52100.0, 668.0, 20.0, 0.0732, 0.98, 0.531, 0.0),
    ),
    ("RNN", True, False, False, False): (
        (243000.0, 1470.0, 14.7, 7.35, 0.0608, 0.0, 0.0, 3.25),
        (120000.0, 7130.0, 16.9, 14.8, 0.0748, 0.0, 0.257, 0.625),
    ),
    ("RNN", True, False, False, True): (
        (243000.0, 1470.0, 14.7, 7.35, 0.0608, 0.0, 0.0, 3.25),
        (120000.0, 7130.0, 16.9, 14.8, 0.0748, 0.0, 0.257, 0.625),
    ),
    ("RNN", True, True, True, False): (
        (1140000.0, 1790.0, 0.0, 26.2, 0.171, 0.124, 0.0, 16.1),
        (489000.0, 84600.0, 0.0, 24.1, 0.238, 0.426, 0.232, 1.67),
    ),
    ("RNN", True, True, True, True): (
        (1140000.0, 1790.0, 0.0, 26.2, 0.171, 0.124, 0.0, 16.1),
        (489000.0, 84600.0, 0.0, 24.1, 0.238, 0.426, 0.232, 1.67),
    ),
    ("RNN", True, True, False, False): (
        (249000.0, 2600.0, 24.2, 1.75, 0.103, 0.0249, 0.0508, 0.92),
        (128000.0, 10400.0, 0.0, 10.2, 0.13, 0.0356, 0.0, 0.41),
    ),
    ("RNN", True, True, False, True): (
        (249000.0, 2600.0, 24.2, 1.75, 0.103, 0.0249, 0.0508, 0.92),
        (128000.0, 10400.0, 0.0, 10.2, 0.13, 0.0356, 0.0, 0.41),
    ),
    ("GRU", False, False, True, False): (
        (978000.0, 0.0, 0.0, 8.16, 0.0936, 0.0, 0.0, 10.4),
        (382000.0, 159000.0, 0.0, 31.3, 0.017, 0.0, 0.406, 3.46),
    ),
    ("GRU", False, False, True, True): (
        (978000.0, 0.0, 0.0, 8.16, 0.0936, 0.0, 0.0, 10.4),
        (382000.0, 159000.0, 0.0, 31.3, 0.017, 0.0, 0.406, 3.46),
    ),
    ("GRU", False, False, False, False): (
        (209000.0, 1970.0, 0.0, 1.38, 0.0195, 0.0491, 0.0, 0.654),
        (119000.0, 22000.0, 12.8, 4.2, 0.0286, 0.0, 0.0592, 0.372),
    ),
    ("GRU", False, False, False, True): (
        (209000.0, 1970.0, 0.0, 1.38, 0.0195, 0.0491, 0.0, 0.654),
        (119000.0, 22000.0, 12.8, 4.2, 0.0286, 0.0, 0.0592, 0.372),
    ),
    ("GRU", False, True, True, False): (
        (988000.0, 0.0, 473.0, 16.5, 0.05, 0.296, 0.0, 12.0),
        (747000.0, 154000.0, 2040.0, 0.0, 0.0, 0.658, 2.04, 0.176),
    ),
    ("GRU", False, True, True, True): (
        (988000.0, 0.0, 473.0, 16.5, 0.05, 0.296, 0.0, 12.0),
        (747000.0, 154000.0, 2040.0, 0.0, 0.0, 0.658, 2.04, 0.176),
    ),
    ("GRU", False, True, False, False): (
        (285000.0, 2580.0, 101.0, 5.02, 0.0172, 0.0, 0.0427, 1.26),
        (133000.0, 20400.0, 177.0, 6.75, 0.0241, 0.0, 0.133, 0.665),
    ),
    ("GRU", False, True, False, True): (
        (285000.0, 2580.0, 101.0, 5.02, 0.0172, 0.0, 0.0427, 1.26),
        (133000.0, 20400.0, 177.0, 6.75, 0.0241, 0.0, 0.133, 0.665),
    ),
    ("GRU", True, False, True, False): (
        (868000.0, 607.0, 0.0, 32.9, 0.0677, 0.159, 0.207, 14.7),
        (454000.0, 160000.0, 0.0, 43.5, 0.102, 0.0, 1.14, 3.97),
    ),
    ("GRU", True, False, True, True): (
        (868000.0, 607.0, 0.0, 32.9, 0.0677, 0.159, 0.207, 14.7),
        (454000.0, 160000.0, 0.0, 43.5, 0.102, 0.0, 1.14, 3.97),
    ),
    ("GRU", True, False, False, False): (
        (226000.0, 1350.0, 143.0, 6.3, 0.047, 0.0, 0.0627, 2.1),
        (81400.0, 16900.0, 605.0, 11.0, 0.0445, 0.0, 0.221, 1.67),
    ),
    ("GRU", True, False, False, True): (
        (226000.0, 1350.0, 143.0, 6.3, 0.047, 0.0, 0.0627, 2.1),
        (81400.0, 16900.0, 605.0, 11.0, 0.0445, 0.0, 0.221, 1.67),
    ),
    ("GRU", True, True, True, False): (
        (1160000.0, 0.0, 0.0, 28.9, 0.0718, 0.163, 0.1, 15.9),
        (737000.0, 182000.0, 5470.0, 29.7, 0.0661, 0.0, 1.84, 1.97),
    ),
    ("GRU", True, True, True, True): (
        (1160000.0, 0.0, 0.0, 28.9, 0.0718, 0.163, 0.1, 15.9),
        (737000.0, 182000.0, 5470.0, 29.7, 0.0661, 0.0, 1.84, 1.97),
    ),
    ("GRU", True, True, False, False): (
        (262000.0, 349.0, 250.0, 7.13, 0.0665, 0.0, 0.00605, 2.54),
        (154000.0, 23900.0, 0.0, 18.5, 0.052, 0.0, 0.0556, 1.47),
    ),
    ("GRU", True, True, False, True): (
        (262000.0, 349.0, 250.0, 7.13, 0.0665, 0.0, 0.00605, 2.54),
        (154000.0, 23900.0, 0.0, 18.5, 0.052, 0.0, 0.0556, 1.47),
    ),
    ("LSTM", False, False, True, False): (
        (1080000.0, 161.0, 95.5, 2.11, 0.11, 0.0, 0.0, 8.02),
        (738000.0, 4070.0, 405.0, 0.0, 0.137, 0.0, 0.0, 4.54),
    ),
    ("LSTM", False, False, True, True): (
        (1080000.0, 161.0, 95.5, 2.11, 0.11, 0.0, 0.0, 8.02),
        (590000.0, 3260.0, 324.0, 0.0, 0.11, 0.0, 0.0, 3.63),
    ),
    ("LSTM", False, False, False, False): (
        (227000.0, 0.0, 78.0, 3.78, 0.0219, 0.0, 0.0198, 1.82),
        (183000.0, 802.0, 22.8, 5.76, 0.0213, 0.0, 0.0184, 1.56),
    ),
    ("LSTM", False, False, False, True): (
        (227000.0, 0.0, 78.0, 3.78, 0.0219, 0.0, 0.0198, 1.82),
        (146000.0, 642.0, 18.2, 4.61, 0.017, 0.0, 0.0147, 1.25),
    ),
    ("LSTM", False, True, True, False): (
        (854000.0, 3470.0, 149.0, 12.8, 0.0952, 0.0, 0.0, 11.0),
        (438000.0, 160000.0, 630.0, 16.2, 0.1, 0.0, 0.377, 4.57),
    ),
    ("LSTM", False, True, True, True): (
        (854000.0, 3470.0, 149.0, 12.8, 0.0952, 0.0, 0.0, 11.0),
        (438000.0, 160000.0, 630.0, 16.2, 0.1, 0.0, 0.377, 4.57),
    ),
    ("LSTM", False, True, False, False): (
        (278000.0, 2660.0, 19.8, 2.97, 0.0271, 0.0389, 0.00404, 1.32),
        (149000.0, 22000.0, 0.0, 6.72, 0.0327, 0.0, 0.0271, 1.13),
    ),
    ("LSTM", False, True, False, True): (
        (278000.0, 2660.0, 19.8, 2.97, 0.0271, 0.0389, 0.00404, 1.32),
        (149000.0, 22000.0, 0.0, 6.72, 0.0327, 0.0, 0.0271, 1.13),
    ),
    ("LSTM", True, False, True, False): (
        (1260000.0, 0.0, 0.0, 17.2, 0.151, 0.00973, 0.0, 19.5),
        (654000.0, 117000.0, 0.0, 68.3, 0.0549, 0.0, 1.47, 3.99),
    ),
    ("LSTM", True, False, True, True): (
        (1260000.0, 0.0, 0.0, 17.2, 0.151, 0.00973, 0.0, 19.5),
        (654000.0, 117000.0, 0.0, 68.3, 0.0549, 0.0, 1.47, 3.99),
    ),
    ("LSTM", True, False, False, False): (
        (210000.0, 3390.0, 34.0, 5.73, 0.0492, 0.0318, 0.0, 2.53),
        (84000.0, 24500.0, 0.0, 12.8, 0.0619, 0.0, 0.205, 1.6),
    ),
    ("LSTM", True, False, False, True): (
        (210000.0, 3390.0, 34.0, 5.73, 0.0492, 0.0318, 0.0, 2.53),
        (84000.0, 24500.0, 0.0, 12.8, 0.0619, 0.0, 0.205, 1.6),
    ),
    ("LSTM", True, True, True, False): (
        (981000.0, 0.0, 243.0, 23.6, 0.166, 0.0, 0.192, 14.0),
        (366000.0, 186000.0, 4350.0, 30.2, 0.0879, 0.0, 0.438, 5.17),
    ),
    ("LSTM", True, True, True, True): (
        (981000.0, 0.0, 243.0, 23.6, 0.166, 0.0, 0.192, 14.0),
        (366000.0, 186000.0, 4350.0, 30.2, 0.0879, 0.0, 0.438, 5.17),
    ),
    ("LSTM", True, True, False, False): (
        (275000.0, 2330.0, 0.0, 10.7, 0.0397, 0.0779, 0.0, 2.08),
        (132000.0, 20300.0, 1930.0, 12.2, 0.0541, 0.0, 0.141, 1.17),
    ),
    ("LSTM", True, True, False, True): (
        (275000.0, 2330.0, 0.0, 10.7, 0.0397, 0.0779, 0.0, 2.08),
        (132000.0, 20300.0, 1930.0, 12.2, 0.0541, 0.0, 0.141, 1.17),
    ),
}
"""Nanoseconds by case of the size rule and term of a call: of the kernels, and of PyTorch."""

MOST = 512
"""The largest hidden size that was measured."""


class Case(NamedTuple):
    """A case of the size rule."""

    cell: str
    in_float64: bool
    packed: bool
    trains: bool
    threaded: bool

    def __str__(self) -> str:
        packed, trains = ", packed" if self.packed else "", "" if self.trains else ", no gradients"
        threads = "several threads" if self.threaded else "one thread"
        return f"{'float64' if self.in_float64 else 'float32'} {self.cell}{packed}{trains}, {threads}"


class Sizes(NamedTuple):
    """The sizes of a call that the rule sees; `rows`: steps of all samples together."""

    features: int
    hidden: int
    batch: int
    steps: int
    rows: int
    layers: int = 1
    directions: int = 1

    def __str__(self) -> str:
        return f"I = {self.features}, H = {self.hidden}, B = {self.batch}, T = {self.steps}"

    def terms(self, gates: int) -> tuple[float, ...]:
        """Return the numbers that a call's time is a sum of, each times its cost, over all layers and directions."""
        inputs = self.features + (self.layers - 1) * self.directions * self.hidden  # of all layers together
        units, runs = gates * self.hidden, self.layers * self.directions
        weights = units * self.directions * (inputs + self.layers * self.hidden)
        tiles = self.rows / 4 + self.steps * (-self.batch % 4) / 4  # of four samples, also where there are fewer
        return (
            runs, runs * self.steps, runs * self.rows, runs * self.rows * units, self.rows * weights, tiles * weights,
            self.steps * weights, weights,
        )  # fmt: skip


def predicted(case: Case, sizes: Sizes) -> tuple[float, float]:
    """Return the seconds that a call is predicted to take by the kernels and by PyTorch."""
    terms = sizes.terms(GATES[case.cell])
    ours, torchs = COSTS[case]
    return 1e-9 * sum(map(operator.mul, ours, terms)), 1e-9 * sum(map(operator.mul, torchs, terms))


GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


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

    Runs before every call, so it reads no values but a batch size, and the cheapest and most decisive attributes first.
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
    obstacle = _dispatch_obstacle(module, x, packed) if packed else None
    if obstacle is not None:  # before values of the batch sizes are read
        return obstacle
    if packed:
        steps, batch, rows = len(input.batch_sizes), int(input.batch_sizes[0]), shape[0]
    else:
        batch, steps = (1, shape[0]) if dims == 2 else shape[:2] if module.batch_first else (shape[1], shape[0])
        rows = batch * steps
    if batch == 0 or steps == 0:
        return _MALFORMED
    way = _by_size(
        module.mode, dtype, packed, torch.is_grad_enabled(), torch.get_num_threads() > 1, module.input_size,
        module.hidden_size, batch, steps, rows, module.num_layers, 2 if module.bidirectional else 1,
    )  # fmt: skip
    return (_dispatch_obstacle(module, x, packed) or way) if way.ours and not packed else way


@functools.lru_cache(maxsize=4096)
def _by_size(mode: str, dtype: torch.dtype, packed: bool, trains: bool, threaded: bool, *numbers: int) -> Way:
    """Decide by the size rule."""
    case, sizes = Case(mode.partition("_")[0], dtype == torch.float64, packed, trains, threaded), Sizes(*numbers)
    if case.cell == "LSTM" and not case.in_float64 and sizes.steps * sizes.batch == sizes.rows:
        case = case._replace(packed=False)  # one length, which PyTorch's float32 LSTM detects
    if sizes.hidden > MOST:
        return Way(False, f"{case}, H = {sizes.hidden} > {MOST}, the largest measured")
    ours, torchs = predicted(case, sizes)
    told = f"{case}, {sizes}: about {ours * 1e3:.3g} ms by the kernels, {torchs * 1e3:.3g} ms by PyTorch"
    return Way(ours < torchs, told)


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
