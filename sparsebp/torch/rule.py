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
        (733000.0, 0.0, 0.0, 7.52, 0.0398, 0.115, 0.0075, 6.61),
        (306000.0, 43500.0, 0.0, 22.7, 0.00207, 0.0, 0.391, 7.19),
    ),
    ("RNN", False, False, True, True): (
        (824000.0, 0.0, 0.0, 5.33, 0.0585, 0.0, 0.0, 13.6),
        (194000.0, 54600.0, 33.3, 5.66, 0.0605, 0.0, 0.0, 13.0),
    ),
    ("RNN", False, False, False, False): (
        (190000.0, 0.0, 46.1, 3.2, 0.00485, 0.0342, 0.00693, 3.68),
        (74600.0, 6080.0, 103.0, 6.63, 0.011, 0.0, 0.113, 3.96),
    ),
    ("RNN", False, False, False, True): (
        (223000.0, 86.2, 31.6, 0.297, 0.0308, 0.0, 0.0, 0.443),
        (118000.0, 4970.0, 207.0, 4.39, 0.0191, 0.0, 0.145, 0.944),
    ),
    ("RNN", False, True, True, False): (
        (765000.0, 0.0, 0.0, 14.5, 0.0443, 0.0, 0.0785, 10.3),
        (304000.0, 69200.0, 0.0, 30.1, 0.0336, 0.0, 0.495, 0.405),
    ),
    ("RNN", False, True, True, True): (
        (948000.0, 0.0, 174.0, 7.76, 0.0642, 0.0, 0.125, 9.5),
        (605000.0, 60100.0, 24.2, 13.7, 0.0434, 0.0, 0.744, 0.0),
    ),
    ("RNN", False, True, False, False): (
        (248000.0, 0.0, 0.0, 2.54, 0.0298, 0.0, 0.0048, 0.0813),
        (109000.0, 7790.0, 0.0, 11.6, 0.0198, 0.0, 0.0381, 0.0),
    ),
    ("RNN", False, True, False, True): (
        (206000.0, 132.0, 67.3, 1.36, 0.0251, 0.0, 0.0264, 1.33),
        (130000.0, 8880.0, 184.0, 3.27, 0.000545, 0.101, 0.0914, 0.188),
    ),
    ("RNN", True, False, True, False): (
        (752000.0, 0.0, 0.0, 4.84, 0.197, 0.112, 0.0, 17.0),
        (326000.0, 59100.0, 140.0, 13.3, 0.191, 0.0, 1.02, 0.233),
    ),
    ("RNN", True, False, True, True): (
        (927000.0, 0.0, 0.0, 8.36, 0.0206, 0.36, 0.0, 16.1),
        (79500.0, 56500.0, 0.0, 35.9, 0.0, 0.0154, 0.926, 5.81),
    ),
    ("RNN", True, False, False, False): (
        (180000.0, 0.0, 31.1, 2.14, 0.0502, 0.0372, 0.0, 3.01),
        (71100.0, 4830.0, 2.67, 10.7, 0.0673, 0.00546, 0.128, 0.866),
    ),
    ("RNN", True, False, False, True): (
        (308000.0, 45.4, 35.2, 4.82, 0.0316, 0.0, 0.0496, 4.05),
        (132000.0, 13000.0, 257.0, 9.74, 0.0397, 0.0, 0.111, 2.54),
    ),
    ("RNN", True, True, True, False): (
        (684000.0, 0.0, 0.0, 29.5, 0.143, 0.0, 0.0, 10.3),
        (307000.0, 59300.0, 256.0, 61.6, 0.0751, 0.0, 0.591, 1.56),
    ),
    ("RNN", True, True, True, True): (
        (1070000.0, 0.0, 512.0, 30.3, 0.178, 0.0, 0.0429, 23.3),
        (421000.0, 118000.0, 3440.0, 3.71, 0.117, 0.0, 1.42, 5.58),
    ),
    ("RNN", True, True, False, False): (
        (207000.0, 0.0, 85.3, 3.23, 0.0568, 0.0, 0.0221, 1.49),
        (118000.0, 4410.0, 267.0, 15.6, 0.0635, 0.0, 0.0958, 0.513),
    ),
    ("RNN", True, True, False, True): (
        (219000.0, 0.0, 0.0, 9.23, 0.0401, 0.0, 0.0944, 1.12),
        (147000.0, 7170.0, 66.9, 15.6, 0.0277, 0.0, 0.177, 0.0),
    ),
    ("GRU", False, False, True, False): (
        (0.0, 4740.0, 0.0, 4.27, 0.0704, 0.0, 0.00618, 9.58),
        (572000.0, 117000.0, 0.0, 6.89, 0.0449, 0.0, 0.872, 0.708),
    ),
    ("GRU", False, False, True, True): (
        (705000.0, 0.0, 0.0, 2.1, 0.0799, 0.0, 0.127, 3.43),
        (0.0, 197000.0, 55.0, 10.4, 0.0204, 0.0, 0.247, 3.37),
    ),
    ("GRU", False, False, False, False): (
        (203000.0, 0.0, 46.5, 1.26, 0.0232, 0.0, 0.0172, 1.17),
        (69600.0, 21200.0, 165.0, 3.06, 0.0275, 0.0, 0.0526, 0.434),
    ),
    ("GRU", False, False, False, True): (
        (415000.0, 198.0, 0.0, 0.371, 0.0048, 0.0455, 0.0, 0.91),
        (61900.0, 27800.0, 458.0, 2.35, 0.0, 0.0357, 0.0508, 1.39),
    ),
    ("GRU", False, True, True, False): (
        (1060000.0, 0.0, 0.0, 8.45, 0.052, 0.0418, 0.000524, 7.45),
        (484000.0, 232000.0, 680.0, 9.93, 0.0, 0.193, 0.61, 0.928),
    ),
    ("GRU", False, True, True, True): (
        (643000.0, 0.0, 1530.0, 0.0, 0.144, 0.0, 0.0, 5.33),
        (382000.0, 168000.0, 0.0, 17.0, 0.0828, 0.0, 0.53, 0.166),
    ),
    ("GRU", False, True, False, False): (
        (255000.0, 0.0, 0.0, 1.09, 0.0286, 0.0422, 0.0, 0.541),
        (136000.0, 27700.0, 0.0, 2.75, 0.0363, 0.0329, 0.0231, 0.229),
    ),
    ("GRU", False, True, False, True): (
        (178000.0, 222.0, 58.0, 0.291, 0.0226, 0.0, 0.0325, 0.945),
        (121000.0, 19100.0, 185.0, 3.24, 0.0189, 0.0, 0.064, 0.362),
    ),
    ("GRU", True, False, True, False): (
        (698000.0, 0.0, 0.0, 10.6, 0.112, 0.0, 0.0859, 6.44),
        (630000.0, 128000.0, 0.0, 40.2, 0.0482, 0.0567, 0.559, 0.0),
    ),
    ("GRU", True, False, True, True): (
        (578000.0, 0.0, 0.0, 1.03, 0.118, 0.249, 0.0, 6.35),
        (239000.0, 126000.0, 0.0, 42.4, 0.0, 0.0, 0.498, 8.55),
    ),
    ("GRU", True, False, False, False): (
        (219000.0, 0.0, 101.0, 2.33, 0.0292, 0.0823, 0.0, 1.61),
        (64100.0, 18600.0, 214.0, 5.02, 0.0, 0.236, 0.0938, 0.522),
    ),
    ("GRU", True, False, False, True): (
        (86500.0, 715.0, 257.0, 0.39, 0.0288, 0.0147, 0.00413, 2.52),
        (36000.0, 21200.0, 125.0, 7.29, 0.0108, 0.0619, 0.00854, 2.71),
    ),
    ("GRU", True, True, True, False): (
        (598000.0, 0.0, 0.0, 18.9, 0.107, 0.0, 0.0758, 12.4),
        (289000.0, 141000.0, 333.0, 25.1, 0.0796, 0.0, 1.49, 1.77),
    ),
    ("GRU", True, True, True, True): (
        (627000.0, 0.0, 1850.0, 14.9, 0.0807, 0.0, 0.0217, 15.1),
        (344000.0, 143000.0, 1770.0, 21.2, 0.0529, 0.0, 0.933, 3.38),
    ),
    ("GRU", True, True, False, False): (
        (177000.0, 0.0, 185.0, 3.0, 0.0433, 0.0384, 0.0277, 1.27),
        (127000.0, 15300.0, 0.0, 4.9, 0.0716, 0.0, 0.151, 0.239),
    ),
    ("GRU", True, True, False, True): (
        (183000.0, 0.0, 20.0, 4.63, 0.0398, 0.0146, 0.0771, 1.65),
        (117000.0, 16800.0, 240.0, 8.16, 0.0424, 0.0, 0.173, 0.781),
    ),
    ("LSTM", False, False, True, False): (
        (673000.0, 701.0, 284.0, 4.0, 0.0446, 0.0701, 0.0, 2.31),
        (559000.0, 2910.0, 133.0, 5.15, 0.0643, 0.0318, 0.0, 1.63),
    ),
    ("LSTM", False, False, True, True): (
        (608000.0, 1370.0, 0.0, 4.59, 0.0513, 0.0, 0.0395, 8.51),
        (707000.0, 1350.0, 493.0, 2.46, 0.0672, 0.0, 0.0913, 0.0),
    ),
    ("LSTM", False, False, False, False): (
        (207000.0, 0.0, 228.0, 0.0968, 0.0283, 0.0, 0.0289, 0.779),
        (238000.0, 0.0, 105.0, 1.44, 0.0347, 0.0, 0.0263, 0.85),
    ),
    ("LSTM", False, False, False, True): (
        (285000.0, 103.0, 0.0, 2.88, 0.00596, 0.000127, 0.0124, 2.36),
        (327000.0, 748.0, 60.9, 3.07, 0.011, 0.000443, 0.0196, 0.936),
    ),
    ("LSTM", False, True, True, False): (
        (751000.0, 0.0, 0.0, 11.8, 0.0493, 0.0, 0.22, 4.73),
        (323000.0, 159000.0, 0.0, 24.0, 0.00221, 0.0, 0.435, 2.47),
    ),
    ("LSTM", False, True, True, True): (
        (816000.0, 0.0, 0.0, 11.8, 0.0401, 0.0551, 0.0821, 6.55),
        (474000.0, 205000.0, 0.0, 13.1, 0.0787, 0.0, 0.0933, 1.25),
    ),
    ("LSTM", False, True, False, False): (
        (205000.0, 0.0, 34.0, 1.59, 0.0108, 0.101, 0.0, 0.621),
        (158000.0, 22000.0, 539.0, 2.15, 0.0342, 0.0, 0.0495, 0.416),
    ),
    ("LSTM", False, True, False, True): (
        (191000.0, 242.0, 37.7, 4.31, 0.00878, 0.0257, 0.0555, 1.1),
        (135000.0, 16300.0, 0.0, 8.11, 0.0124, 0.0, 0.186, 0.536),
    ),
    ("LSTM", True, False, True, False): (
        (800000.0, 0.0, 0.0, 9.48, 0.108, 0.0, 0.348, 4.31),
        (0.0, 133000.0, 0.0, 36.7, 0.0475, 0.0664, 1.31, 0.0),
    ),
    ("LSTM", True, False, True, True): (
        (677000.0, 0.0, 0.0, 19.0, 0.00709, 0.0808, 0.0, 21.0),
        (0.0, 226000.0, 0.0, 24.5, 0.0, 0.0953, 0.0, 7.38),
    ),
    ("LSTM", True, False, False, False): (
        (209000.0, 0.0, 51.5, 5.7, 0.0368, 0.0415, 0.0, 2.48),
        (123000.0, 16200.0, 474.0, 6.54, 0.0684, 0.00688, 0.0593, 1.18),
    ),
    ("LSTM", True, False, False, True): (
        (141000.0, 316.0, 51.4, 6.83, 0.0307, 0.0, 0.0128, 1.93),
        (237000.0, 21600.0, 418.0, 4.22, 0.0412, 0.0, 0.116, 0.762),
    ),
    ("LSTM", True, True, True, False): (
        (953000.0, 0.0, 0.0, 28.4, 0.0413, 0.356, 0.116, 6.69),
        (537000.0, 174000.0, 0.0, 28.0, 0.0505, 0.384, 1.77, 0.283),
    ),
    ("LSTM", True, True, True, True): (
        (718000.0, 0.0, 774.0, 21.7, 0.0461, 0.0, 0.153, 10.3),
        (368000.0, 175000.0, 276.0, 17.9, 0.0961, 0.0, 0.317, 2.2),
    ),
    ("LSTM", True, True, False, False): (
        (272000.0, 506.0, 273.0, 3.59, 0.0559, 0.0, 0.0424, 1.46),
        (120000.0, 23600.0, 14.4, 12.8, 0.0482, 0.0, 0.128, 0.725),
    ),
    ("LSTM", True, True, False, True): (
        (205000.0, 106.0, 667.0, 2.49, 0.0286, 0.0, 0.0372, 1.73),
        (105000.0, 26400.0, 0.0, 11.4, 0.0137, 0.022, 0.0706, 0.716),
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
_OF_INFERENCE = Way(False, "tensors of inference mode, which cannot be saved for a backward")
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
    if torch.is_grad_enabled() and any(tensor.is_inference() for tensor in (x, *weights) if tensor is not None):
        return _OF_INFERENCE
    return None


def _is_mapped() -> bool:
    """Whether vmap is among the active transforms of `torch.func`."""
    return any(level.key() == TransformType.Vmap for level in retrieve_all_functorch_interpreters())
