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
        (1110000.0, 9830.0, 0.0, 64.8, 0.135, 0.0, 0.0, 1.98),
        (748000.0, 72400.0, 0.0, 0.0, 0.118, 0.0, 0.0, 0.0),
    ),
    ("RNN", False, False, True, True): (
        (1110000.0, 9830.0, 0.0, 64.8, 0.135, 0.0, 0.0, 1.98),
        (748000.0, 72400.0, 0.0, 0.0, 0.118, 0.0, 0.0, 0.0),
    ),
    ("RNN", False, False, False, False): (
        (154000.0, 0.0, 0.0, 6.21, 0.0, 0.0602, 0.0, 2.25),
        (130000.0, 4220.0, 0.0, 12.6, 0.0, 0.0, 0.00375, 2.57),
    ),
    ("RNN", False, False, False, True): (
        (154000.0, 0.0, 0.0, 6.21, 0.0, 0.0602, 0.0, 2.25),
        (130000.0, 4220.0, 0.0, 12.6, 0.0, 0.0, 0.00375, 2.57),
    ),
    ("RNN", False, True, True, False): (
        (899000.0, 0.0, 0.0, 33.8, 0.0, 0.0, 0.0, 13.4),
        (335000.0, 46700.0, 311.0, 101.0, 0.0, 0.165, 0.0, 9.32),
    ),
    ("RNN", False, True, True, True): (
        (899000.0, 0.0, 0.0, 33.8, 0.0, 0.0, 0.0, 13.4),
        (335000.0, 46700.0, 311.0, 101.0, 0.0, 0.165, 0.0, 9.32),
    ),
    ("RNN", False, True, False, False): (
        (307000.0, 2020.0, 0.0, 19.2, 0.0, 0.00022, 0.0, 0.0),
        (39300.0, 11800.0, 313.0, 19.5, 0.0, 0.0241, 0.0, 2.1),
    ),
    ("RNN", False, True, False, True): (
        (307000.0, 2020.0, 0.0, 19.2, 0.0, 0.00022, 0.0, 0.0),
        (39300.0, 11800.0, 313.0, 19.5, 0.0, 0.0241, 0.0, 2.1),
    ),
    ("RNN", True, False, True, False): (
        (1110000.0, 9830.0, 0.0, 130.0, 0.271, 0.0, 0.0, 3.96),
        (748000.0, 72400.0, 0.0, 0.0, 0.236, 0.0, 0.0, 0.0),
    ),
    ("RNN", True, False, True, True): (
        (1110000.0, 9830.0, 0.0, 130.0, 0.271, 0.0, 0.0, 3.96),
        (748000.0, 72400.0, 0.0, 0.0, 0.236, 0.0, 0.0, 0.0),
    ),
    ("RNN", True, False, False, False): (
        (154000.0, 0.0, 0.0, 12.4, 0.0, 0.12, 0.0, 4.51),
        (130000.0, 4220.0, 0.0, 25.1, 0.0, 0.0, 0.0075, 5.13),
    ),
    ("RNN", True, False, False, True): (
        (154000.0, 0.0, 0.0, 12.4, 0.0, 0.12, 0.0, 4.51),
        (130000.0, 4220.0, 0.0, 25.1, 0.0, 0.0, 0.0075, 5.13),
    ),
    ("RNN", True, True, True, False): (
        (899000.0, 0.0, 0.0, 67.5, 0.0, 0.0, 0.0, 26.8),
        (335000.0, 46700.0, 311.0, 202.0, 0.0, 0.329, 0.0, 18.6),
    ),
    ("RNN", True, True, True, True): (
        (899000.0, 0.0, 0.0, 67.5, 0.0, 0.0, 0.0, 26.8),
        (335000.0, 46700.0, 311.0, 202.0, 0.0, 0.329, 0.0, 18.6),
    ),
    ("RNN", True, True, False, False): (
        (307000.0, 2020.0, 0.0, 38.4, 0.0, 0.00044, 0.0, 0.0),
        (39300.0, 11800.0, 313.0, 38.9, 0.0, 0.0483, 0.0, 4.2),
    ),
    ("RNN", True, True, False, True): (
        (307000.0, 2020.0, 0.0, 38.4, 0.0, 0.00044, 0.0, 0.0),
        (39300.0, 11800.0, 313.0, 38.9, 0.0, 0.0483, 0.0, 4.2),
    ),
    ("GRU", False, False, True, False): (
        (725000.0, 5140.0, 1850.0, 0.362, 0.0, 0.208, 0.332, 12.8),
        (231000.0, 121000.0, 14400.0, 0.0, 0.00804, 0.0, 1.81, 6.29),
    ),
    ("GRU", False, False, True, True): (
        (725000.0, 5140.0, 1850.0, 0.362, 0.0, 0.208, 0.332, 12.8),
        (231000.0, 121000.0, 14400.0, 0.0, 0.00804, 0.0, 1.81, 6.29),
    ),
    ("GRU", False, False, False, False): (
        (204000.0, 2150.0, 0.0, 0.077, 0.0343, 0.0, 0.0, 1.58),
        (166000.0, 0.0, 538.0, 3.36, 0.0, 0.0, 0.308, 0.822),
    ),
    ("GRU", False, False, False, True): (
        (204000.0, 2150.0, 0.0, 0.077, 0.0343, 0.0, 0.0, 1.58),
        (166000.0, 0.0, 538.0, 3.36, 0.0, 0.0, 0.308, 0.822),
    ),
    ("GRU", False, True, True, False): (
        (1360000.0, 0.0, 0.0, 0.0, 0.225, 0.0, 0.777, 5.46),
        (786000.0, 156000.0, 7590.0, 15.5, 0.0, 0.0, 2.23, 0.0),
    ),
    ("GRU", False, True, True, True): (
        (1360000.0, 0.0, 0.0, 0.0, 0.225, 0.0, 0.777, 5.46),
        (786000.0, 156000.0, 7590.0, 15.5, 0.0, 0.0, 2.23, 0.0),
    ),
    ("GRU", False, True, False, False): (
        (346000.0, 529.0, 414.0, 0.0, 0.0421, 0.00234, 0.0, 0.0),
        (114000.0, 9740.0, 537.0, 5.41, 0.0366, 0.0, 0.0, 2.44),
    ),
    ("GRU", False, True, False, True): (
        (346000.0, 529.0, 414.0, 0.0, 0.0421, 0.00234, 0.0, 0.0),
        (114000.0, 9740.0, 537.0, 5.41, 0.0366, 0.0, 0.0, 2.44),
    ),
    ("GRU", True, False, True, False): (
        (725000.0, 5140.0, 1850.0, 0.725, 0.0, 0.415, 0.664, 25.7),
        (231000.0, 121000.0, 14400.0, 0.0, 0.0161, 0.0, 3.63, 12.6),
    ),
    ("GRU", True, False, True, True): (
        (725000.0, 5140.0, 1850.0, 0.725, 0.0, 0.415, 0.664, 25.7),
        (231000.0, 121000.0, 14400.0, 0.0, 0.0161, 0.0, 3.63, 12.6),
    ),
    ("GRU", True, False, False, False): (
        (204000.0, 2150.0, 0.0, 0.154, 0.0686, 0.0, 0.0, 3.16),
        (166000.0, 0.0, 538.0, 6.72, 0.0, 0.0, 0.617, 1.64),
    ),
    ("GRU", True, False, False, True): (
        (204000.0, 2150.0, 0.0, 0.154, 0.0686, 0.0, 0.0, 3.16),
        (166000.0, 0.0, 538.0, 6.72, 0.0, 0.0, 0.617, 1.64),
    ),
    ("GRU", True, True, True, False): (
        (1360000.0, 0.0, 0.0, 0.0, 0.449, 0.0, 1.55, 10.9),
        (786000.0, 156000.0, 7590.0, 31.1, 0.0, 0.0, 4.46, 0.0),
    ),
    ("GRU", True, True, True, True): (
        (1360000.0, 0.0, 0.0, 0.0, 0.449, 0.0, 1.55, 10.9),
        (786000.0, 156000.0, 7590.0, 31.1, 0.0, 0.0, 4.46, 0.0),
    ),
    ("GRU", True, True, False, False): (
        (346000.0, 529.0, 414.0, 0.0, 0.0842, 0.00467, 0.0, 0.0),
        (114000.0, 9740.0, 537.0, 10.8, 0.0733, 0.0, 0.0, 4.87),
    ),
    ("GRU", True, True, False, True): (
        (346000.0, 529.0, 414.0, 0.0, 0.0842, 0.00467, 0.0, 0.0),
        (114000.0, 9740.0, 537.0, 10.8, 0.0733, 0.0, 0.0, 4.87),
    ),
    ("LSTM", False, False, True, False): (
        (472000.0, 0.0, 0.0, 11.2, 0.0, 0.212, 0.0, 12.5),
        (181000.0, 5860.0, 0.0, 9.57, 0.0, 0.132, 0.0, 12.5),
    ),
    ("LSTM", False, False, True, True): (
        (472000.0, 0.0, 0.0, 11.2, 0.0, 0.212, 0.0, 12.5),
        (181000.0, 5860.0, 0.0, 9.57, 0.0, 0.132, 0.0, 12.5),
    ),
    ("LSTM", False, False, False, False): (
        (176000.0, 0.0, 455.0, 1.03, 0.0, 0.0744, 0.251, 0.706),
        (61100.0, 3470.0, 0.0, 4.48, 0.0164, 0.0, 0.451, 0.0),
    ),
    ("LSTM", False, False, False, True): (
        (176000.0, 0.0, 455.0, 1.03, 0.0, 0.0744, 0.251, 0.706),
        (61100.0, 3470.0, 0.0, 4.48, 0.0164, 0.0, 0.451, 0.0),
    ),
    ("LSTM", False, True, True, False): (
        (899000.0, 6630.0, 653.0, 0.0, 0.183, 0.0, 0.0, 12.1),
        (993000.0, 116000.0, 320.0, 0.0, 0.208, 0.0, 0.41, 1.67),
    ),
    ("LSTM", False, True, True, True): (
        (899000.0, 6630.0, 653.0, 0.0, 0.183, 0.0, 0.0, 12.1),
        (993000.0, 116000.0, 320.0, 0.0, 0.208, 0.0, 0.41, 1.67),
    ),
    ("LSTM", False, True, False, False): (
        (228000.0, 15600.0, 0.0, 0.0, 0.0563, 0.0, 0.0, 1.65),
        (123000.0, 15700.0, 0.0, 11.6, 0.0455, 0.0, 0.0, 2.69),
    ),
    ("LSTM", False, True, False, True): (
        (228000.0, 15600.0, 0.0, 0.0, 0.0563, 0.0, 0.0, 1.65),
        (123000.0, 15700.0, 0.0, 11.6, 0.0455, 0.0, 0.0, 2.69),
    ),
    ("LSTM", True, False, True, False): (
        (472000.0, 0.0, 0.0, 22.3, 0.0, 0.424, 0.0, 25.1),
        (1490000.0, 0.0, 0.0, 155.0, 0.0849, 2.73, 0.0, 0.0),
    ),
    ("LSTM", True, False, True, True): (
        (472000.0, 0.0, 0.0, 22.3, 0.0, 0.424, 0.0, 25.1),
        (1490000.0, 0.0, 0.0, 155.0, 0.0849, 2.73, 0.0, 0.0),
    ),
    ("LSTM", True, False, False, False): (
        (176000.0, 0.0, 455.0, 2.07, 0.0, 0.149, 0.501, 1.41),
        (120000.0, 0.0, 0.0, 23.4, 0.0, 0.319, 0.302, 8.0),
    ),
    ("LSTM", True, False, False, True): (
        (176000.0, 0.0, 455.0, 2.07, 0.0, 0.149, 0.501, 1.41),
        (120000.0, 0.0, 0.0, 23.4, 0.0, 0.319, 0.302, 8.0),
    ),
    ("LSTM", True, True, True, False): (
        (899000.0, 6630.0, 653.0, 0.0, 0.365, 0.0, 0.0, 24.2),
        (993000.0, 116000.0, 320.0, 0.0, 0.416, 0.0, 0.821, 3.33),
    ),
    ("LSTM", True, True, True, True): (
        (899000.0, 6630.0, 653.0, 0.0, 0.365, 0.0, 0.0, 24.2),
        (993000.0, 116000.0, 320.0, 0.0, 0.416, 0.0, 0.821, 3.33),
    ),
    ("LSTM", True, True, False, False): (
        (228000.0, 15600.0, 0.0, 0.0, 0.113, 0.0, 0.0, 3.29),
        (123000.0, 15700.0, 0.0, 23.2, 0.091, 0.0, 0.0, 5.37),
    ),
    ("LSTM", True, True, False, True): (
        (228000.0, 15600.0, 0.0, 0.0, 0.113, 0.0, 0.0, 3.29),
        (123000.0, 15700.0, 0.0, 23.2, 0.091, 0.0, 0.0, 5.37),
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
