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
# steps of sequences of one length, packed or not. A cell runs one step per call.
# ``python -m benchmarks thresholds`` measures the table anew, and ``python -m benchmarks.thresholds`` writes it here.

COSTS: dict[tuple[str, bool, bool, bool, bool], tuple[tuple[float, ...], tuple[float, ...]]] = {
    # cell, float64, packed, trains, several threads: what the kernels pay for each term, and what PyTorch pays
    ("RNN", False, False, True, False): (
        (740000.0, 10400.0, 0.0, 32.4, 0.0521, 0.0, 0.199, 13.5),
        (369000.0, 65600.0, 0.0, 42.7, 0.0124, 0.0, 0.205, 5.7),
    ),
    ("RNN", False, False, True, True): (
        (740000.0, 10400.0, 0.0, 32.4, 0.0521, 0.0, 0.199, 13.5),
        (369000.0, 65600.0, 0.0, 42.7, 0.0124, 0.0, 0.205, 5.7),
    ),
    ("RNN", False, False, False, False): (
        (195000.0, 0.0, 208.0, 0.0, 0.0324, 0.0, 0.0441, 0.761),
        (114000.0, 4140.0, 150.0, 4.53, 0.0297, 0.0, 0.196, 0.0485),
    ),
    ("RNN", False, False, False, True): (
        (195000.0, 0.0, 208.0, 0.0, 0.0324, 0.0, 0.0441, 0.761),
        (114000.0, 4140.0, 150.0, 4.53, 0.0297, 0.0, 0.196, 0.0485),
    ),
    ("RNN", False, True, True, False): (
        (867000.0, 0.0, 442.0, 11.4, 0.18, 0.0, 0.0, 10.3),
        (499000.0, 52800.0, 1350.0, 0.0, 0.311, 0.0, 0.0, 4.54),
    ),
    ("RNN", False, True, True, True): (
        (867000.0, 0.0, 442.0, 11.4, 0.18, 0.0, 0.0, 10.3),
        (499000.0, 52800.0, 1350.0, 0.0, 0.311, 0.0, 0.0, 4.54),
    ),
    ("RNN", False, True, False, False): (
        (253000.0, 1770.0, 0.0, 6.51, 0.0, 0.0932, 0.0, 0.0),
        (158000.0, 9630.0, 0.0, 9.94, 0.0235, 0.0, 0.0571, 0.194),
    ),
    ("RNN", False, True, False, True): (
        (253000.0, 1770.0, 0.0, 6.51, 0.0, 0.0932, 0.0, 0.0),
        (158000.0, 9630.0, 0.0, 9.94, 0.0235, 0.0, 0.0571, 0.194),
    ),
    ("RNN", True, False, True, False): (
        (802000.0, 6600.0, 0.0, 26.3, 0.171, 0.12, 0.0, 16.0),
        (453000.0, 48900.0, 79.9, 37.9, 0.0179, 0.972, 0.467, 0.0),
    ),
    ("RNN", True, False, True, True): (
        (802000.0, 6600.0, 0.0, 26.3, 0.171, 0.12, 0.0, 16.0),
        (453000.0, 48900.0, 79.9, 37.9, 0.0179, 0.972, 0.467, 0.0),
    ),
    ("RNN", True, False, False, False): (
        (241000.0, 1450.0, 10.7, 8.59, 0.0566, 0.0, 0.000992, 3.16),
        (118000.0, 7130.0, 24.7, 15.9, 0.0699, 0.0, 0.259, 0.612),
    ),
    ("RNN", True, False, False, True): (
        (241000.0, 1450.0, 10.7, 8.59, 0.0566, 0.0, 0.000992, 3.16),
        (118000.0, 7130.0, 24.7, 15.9, 0.0699, 0.0, 0.259, 0.612),
    ),
    ("RNN", True, True, True, False): (
        (1150000.0, 1490.0, 0.0, 30.7, 0.159, 0.132, 0.0, 16.2),
        (443000.0, 81700.0, 0.0, 54.4, 0.0892, 0.779, 0.0, 2.33),
    ),
    ("RNN", True, True, True, True): (
        (1150000.0, 1490.0, 0.0, 30.7, 0.159, 0.132, 0.0, 16.2),
        (443000.0, 81700.0, 0.0, 54.4, 0.0892, 0.779, 0.0, 2.33),
    ),
    ("RNN", True, True, False, False): (
        (266000.0, 2680.0, 33.0, 4.11, 0.107, 0.0, 0.068, 0.606),
        (130000.0, 10100.0, 84.4, 10.1, 0.141, 0.023, 0.0, 0.262),
    ),
    ("RNN", True, True, False, True): (
        (266000.0, 2680.0, 33.0, 4.11, 0.107, 0.0, 0.068, 0.606),
        (130000.0, 10100.0, 84.4, 10.1, 0.141, 0.023, 0.0, 0.262),
    ),
    ("GRU", False, False, True, False): (
        (1110000.0, 0.0, 0.0, 6.35, 0.0904, 0.0, 0.0, 10.3),
        (429000.0, 157000.0, 0.0, 34.9, 0.0141, 0.0, 0.504, 3.54),
    ),
    ("GRU", False, False, True, True): (
        (1110000.0, 0.0, 0.0, 6.35, 0.0904, 0.0, 0.0, 10.3),
        (429000.0, 157000.0, 0.0, 34.9, 0.0141, 0.0, 0.504, 3.54),
    ),
    ("GRU", False, False, False, False): (
        (210000.0, 1450.0, 0.0, 0.762, 0.0277, 0.0248, 0.00644, 1.03),
        (143000.0, 18200.0, 0.0, 4.26, 0.0287, 0.0, 0.0771, 0.214),
    ),
    ("GRU", False, False, False, True): (
        (210000.0, 1450.0, 0.0, 0.762, 0.0277, 0.0248, 0.00644, 1.03),
        (143000.0, 18200.0, 0.0, 4.26, 0.0287, 0.0, 0.0771, 0.214),
    ),
    ("GRU", False, True, True, False): (
        (980000.0, 0.0, 392.0, 27.3, 0.0, 0.293, 0.0, 14.0),
        (748000.0, 163000.0, 1190.0, 16.3, 0.0, 0.329, 3.1, 0.0),
    ),
    ("GRU", False, True, True, True): (
        (980000.0, 0.0, 392.0, 27.3, 0.0, 0.293, 0.0, 14.0),
        (748000.0, 163000.0, 1190.0, 16.3, 0.0, 0.329, 3.1, 0.0),
    ),
    ("GRU", False, True, False, False): (
        (293000.0, 3710.0, 629.0, 0.0, 0.0252, 0.0, 0.0393, 1.38),
        (145000.0, 19400.0, 179.0, 7.5, 0.0223, 0.0, 0.127, 0.74),
    ),
    ("GRU", False, True, False, True): (
        (293000.0, 3710.0, 629.0, 0.0, 0.0252, 0.0, 0.0393, 1.38),
        (145000.0, 19400.0, 179.0, 7.5, 0.0223, 0.0, 0.127, 0.74),
    ),
    ("GRU", True, False, True, False): (
        (1030000.0, 1230.0, 0.0, 28.1, 0.108, 0.0, 0.0591, 16.6),
        (219000.0, 249000.0, 0.0, 29.7, 0.104, 0.0, 0.0552, 14.6),
    ),
    ("GRU", True, False, True, True): (
        (1030000.0, 1230.0, 0.0, 28.1, 0.108, 0.0, 0.0591, 16.6),
        (219000.0, 249000.0, 0.0, 29.7, 0.104, 0.0, 0.0552, 14.6),
    ),
    ("GRU", True, False, False, False): (
        (229000.0, 5920.0, 133.0, 3.73, 0.0458, 0.0, 0.0401, 2.78),
        (86300.0, 22400.0, 559.0, 9.59, 0.0461, 0.0, 0.188, 1.85),
    ),
    ("GRU", True, False, False, True): (
        (229000.0, 5920.0, 133.0, 3.73, 0.0458, 0.0, 0.0401, 2.78),
        (86300.0, 22400.0, 559.0, 9.59, 0.0461, 0.0, 0.188, 1.85),
    ),
    ("GRU", True, True, True, False): (
        (1360000.0, 0.0, 0.0, 25.5, 0.0, 0.503, 0.0, 13.6),
        (857000.0, 182000.0, 4240.0, 34.1, 0.0, 0.188, 1.84, 1.75),
    ),
    ("GRU", True, True, True, True): (
        (1360000.0, 0.0, 0.0, 25.5, 0.0, 0.503, 0.0, 13.6),
        (857000.0, 182000.0, 4240.0, 34.1, 0.0, 0.188, 1.84, 1.75),
    ),
    ("GRU", True, True, False, False): (
        (291000.0, 161.0, 152.0, 8.42, 0.0577, 0.00525, 0.00824, 2.31),
        (176000.0, 29300.0, 0.0, 19.3, 0.0311, 0.0451, 0.0146, 1.28),
    ),
    ("GRU", True, True, False, True): (
        (291000.0, 161.0, 152.0, 8.42, 0.0577, 0.00525, 0.00824, 2.31),
        (176000.0, 29300.0, 0.0, 19.3, 0.0311, 0.0451, 0.0146, 1.28),
    ),
    ("LSTM", False, False, True, False): (
        (1040000.0, 865.0, 106.0, 1.1, 0.0786, 0.115, 0.0, 10.8),
        (754000.0, 4820.0, 324.0, 0.422, 0.128, 0.063, 0.0, 3.82),
    ),
    ("LSTM", False, False, True, True): (
        (1040000.0, 865.0, 106.0, 1.1, 0.0786, 0.115, 0.0, 10.8),
        (603000.0, 3860.0, 259.0, 0.338, 0.102, 0.0504, 0.0, 3.06),
    ),
    ("LSTM", False, False, False, False): (
        (240000.0, 0.0, 101.0, 2.71, 0.0257, 0.0, 0.0416, 2.13),
        (221000.0, 70.8, 71.8, 3.58, 0.0, 0.138, 0.0462, 1.26),
    ),
    ("LSTM", False, False, False, True): (
        (240000.0, 0.0, 101.0, 2.71, 0.0257, 0.0, 0.0416, 2.13),
        (177000.0, 56.6, 57.4, 2.86, 0.0, 0.11, 0.037, 1.01),
    ),
    ("LSTM", False, True, True, False): (
        (792000.0, 3130.0, 0.0, 24.4, 0.0, 0.0, 0.0, 13.3),
        (334000.0, 165000.0, 316.0, 24.7, 0.0255, 0.0, 0.29, 7.13),
    ),
    ("LSTM", False, True, True, True): (
        (792000.0, 3130.0, 0.0, 24.4, 0.0, 0.0, 0.0, 13.3),
        (334000.0, 165000.0, 316.0, 24.7, 0.0255, 0.0, 0.29, 7.13),
    ),
    ("LSTM", False, True, False, False): (
        (281000.0, 4090.0, 130.0, 0.994, 0.0278, 0.0, 0.0556, 1.49),
        (149000.0, 25500.0, 0.0, 3.44, 0.0478, 0.0, 0.0192, 1.06),
    ),
    ("LSTM", False, True, False, True): (
        (281000.0, 4090.0, 130.0, 0.994, 0.0278, 0.0, 0.0556, 1.49),
        (149000.0, 25500.0, 0.0, 3.44, 0.0478, 0.0, 0.0192, 1.06),
    ),
    ("LSTM", True, False, True, False): (
        (1370000.0, 359.0, 0.0, 11.3, 0.15, 0.0, 0.0, 19.6),
        (619000.0, 115000.0, 0.0, 81.3, 0.0093, 0.0, 1.9, 3.24),
    ),
    ("LSTM", True, False, True, True): (
        (1370000.0, 359.0, 0.0, 11.3, 0.15, 0.0, 0.0, 19.6),
        (619000.0, 115000.0, 0.0, 81.3, 0.0093, 0.0, 1.9, 3.24),
    ),
    ("LSTM", True, False, False, False): (
        (209000.0, 123.0, 144.0, 10.7, 0.0345, 0.0536, 0.0, 2.66),
        (66100.0, 24200.0, 0.0, 22.2, 0.0575, 0.0, 0.239, 1.23),
    ),
    ("LSTM", True, False, False, True): (
        (209000.0, 123.0, 144.0, 10.7, 0.0345, 0.0536, 0.0, 2.66),
        (66100.0, 24200.0, 0.0, 22.2, 0.0575, 0.0, 0.239, 1.23),
    ),
    ("LSTM", True, True, True, False): (
        (986000.0, 0.0, 0.0, 27.1, 0.134, 0.0, 0.202, 14.3),
        (392000.0, 176000.0, 0.0, 60.0, 0.0, 0.0, 0.513, 4.83),
    ),
    ("LSTM", True, True, True, True): (
        (986000.0, 0.0, 0.0, 27.1, 0.134, 0.0, 0.202, 14.3),
        (392000.0, 176000.0, 0.0, 60.0, 0.0, 0.0, 0.513, 4.83),
    ),
    ("LSTM", True, True, False, False): (
        (281000.0, 2970.0, 0.0, 7.9, 0.0871, 0.0464, 0.0, 1.22),
        (110000.0, 15800.0, 5640.0, 13.0, 0.0365, 0.0, 0.153, 1.17),
    ),
    ("LSTM", True, True, False, True): (
        (281000.0, 2970.0, 0.0, 7.9, 0.0871, 0.0464, 0.0, 1.22),
        (110000.0, 15800.0, 5640.0, 13.0, 0.0365, 0.0, 0.153, 1.17),
    ),
}
"""Nanoseconds by case of the size rule and term of a call: of the kernels, and of PyTorch."""

MOST = 512
"""The largest hidden size that was measured."""

OF_CELLS = "a cell runs one step per call, for which the kernels were measured to be slower"


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
    if x.layout is not torch.strided or not _OF_WEIGHTS.issuperset(map(type, module._flat_weights)):
        return _NOT_PLAIN
    return None


def _is_mapped() -> bool:
    """Whether vmap is among the active transforms of `torch.func`."""
    return any(level.key() == TransformType.Vmap for level in retrieve_all_functorch_interpreters())
