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
        (264000.0, 3780.0, 195.0, 0.936, 0.0903, 0.131, 0.073, 0.156),
        (273000.0, 45700.0, 275.0, 15.7, 0.0444, 0.0, 0.522, 0.41),
    ),
    ("RNN", False, False, True, True): (
        (222000.0, 3650.0, 0.0, 4.53, 0.101, 0.0, 0.449, 0.7),
        (249000.0, 52100.0, 194.0, 0.255, 0.0856, 0.0, 0.544, 0.717),
    ),
    ("RNN", False, False, False, False): (
        (48900.0, 3350.0, 0.0, 1.99, 0.0282, 0.0, 0.0, 0.763),
        (81300.0, 5850.0, 71.8, 5.92, 0.0224, 0.0, 0.13, 1.05),
    ),
    ("RNN", False, False, False, True): (
        (37100.0, 2120.0, 28.8, 0.0, 0.0361, 0.0, 0.00602, 0.505),
        (96900.0, 6100.0, 212.0, 2.86, 0.026, 0.0, 0.173, 0.151),
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
        (215000.0, 3530.0, 310.0, 0.0, 0.194, 0.381, 0.0, 1.59),
        (220000.0, 62700.0, 470.0, 6.85, 0.211, 0.0, 1.02, 2.34),
    ),
    ("RNN", True, False, True, True): (
        (224000.0, 8620.0, 0.0, 0.0, 0.241, 0.0, 0.302, 2.63),
        (279000.0, 48500.0, 0.0, 35.3, 0.00756, 0.0, 1.16, 1.42),
    ),
    ("RNN", True, False, False, False): (
        (29800.0, 1420.0, 210.0, 0.0, 0.0688, 0.0335, 0.0872, 0.294),
        (71300.0, 4870.0, 3.06, 10.5, 0.0712, 0.0, 0.15, 0.551),
    ),
    ("RNN", True, False, False, True): (
        (58600.0, 2860.0, 14.8, 5.32, 0.0383, 0.0317, 0.135, 0.539),
        (149000.0, 12000.0, 190.0, 11.7, 0.0432, 0.0, 0.198, 0.218),
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
        (186000.0, 0.0, 0.0, 5.26, 0.0793, 0.0, 0.113, 1.79),
        (275000.0, 126000.0, 123.0, 9.27, 0.0456, 0.0, 0.82, 0.693),
    ),
    ("GRU", False, False, True, True): (
        (221000.0, 435.0, 54.3, 5.51, 0.088, 0.0, 0.242, 0.437),
        (390000.0, 183000.0, 0.0, 4.66, 0.043, 0.0, 0.332, 0.0),
    ),
    ("GRU", False, False, False, False): (
        (23600.0, 1230.0, 291.0, 0.399, 0.0317, 0.0, 0.0105, 0.713),
        (107000.0, 20200.0, 126.0, 3.01, 0.0276, 0.0, 0.0544, 0.347),
    ),
    ("GRU", False, False, False, True): (
        (35900.0, 2120.0, 0.0, 0.0, 0.0259, 0.0, 0.0703, 0.263),
        (124000.0, 23700.0, 602.0, 1.14, 0.0193, 0.0, 0.15, 0.141),
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
        (226000.0, 1730.0, 0.0, 10.9, 0.153, 0.0, 0.186, 2.15),
        (251000.0, 160000.0, 0.0, 30.5, 0.0724, 0.0, 0.3, 3.37),
    ),
    ("GRU", True, False, True, True): (
        (208000.0, 3010.0, 0.0, 1.91, 0.151, 0.0995, 0.188, 1.77),
        (235000.0, 128000.0, 0.0, 46.8, 0.0138, 0.0, 0.721, 1.85),
    ),
    ("GRU", True, False, False, False): (
        (22700.0, 111.0, 368.0, 0.343, 0.0228, 0.167, 0.0, 0.695),
        (79700.0, 18300.0, 167.0, 5.52, 0.0156, 0.167, 0.126, 0.513),
    ),
    ("GRU", True, False, False, True): (
        (15800.0, 1540.0, 320.0, 0.0, 0.0339, 0.00908, 0.0487, 1.32),
        (53700.0, 20300.0, 89.5, 7.05, 0.0223, 0.0345, 0.0695, 1.51),
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
        (254000.0, 4130.0, 0.0, 5.98, 0.0694, 0.0, 0.0314, 1.26),
        (547000.0, 3000.0, 89.8, 5.99, 0.063, 0.0, 0.0238, 2.47),
    ),
    ("LSTM", False, False, True, True): (
        (359000.0, 3850.0, 0.0, 2.58, 0.0897, 0.0, 0.0483, 1.05),
        (677000.0, 1180.0, 591.0, 4.7, 0.0428, 0.0, 0.0996, 1.94),
    ),
    ("LSTM", False, False, False, False): (
        (69500.0, 1590.0, 257.0, 0.0, 0.027, 0.0275, 0.0133, 0.403),
        (241000.0, 0.0, 98.9, 1.26, 0.0371, 0.0, 0.031, 0.511),
    ),
    ("LSTM", False, False, False, True): (
        (48900.0, 1960.0, 0.0, 3.0, 0.00795, 0.0313, 0.00306, 0.467),
        (284000.0, 1180.0, 51.5, 3.35, 0.00972, 0.00721, 0.0174, 0.693),
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
        (142000.0, 11300.0, 132.0, 11.2, 0.132, 0.0, 0.347, 3.13),
        (258000.0, 123000.0, 0.0, 32.8, 0.0728, 0.0, 1.32, 2.03),
    ),
    ("LSTM", True, False, True, True): (
        (324000.0, 0.0, 82.0, 14.0, 0.158, 0.0, 0.224, 2.43),
        (300000.0, 192000.0, 0.0, 19.6, 0.092, 0.0, 0.212, 2.74),
    ),
    ("LSTM", True, False, False, False): (
        (45700.0, 0.0, 440.0, 3.78, 0.0449, 0.106, 0.0039, 0.546),
        (93800.0, 16200.0, 614.0, 6.09, 0.0763, 0.0, 0.0642, 1.07),
    ),
    ("LSTM", True, False, False, True): (
        (87000.0, 0.0, 68.0, 6.24, 0.0446, 0.00446, 0.0415, 0.442),
        (222000.0, 21900.0, 204.0, 5.73, 0.0432, 0.0, 0.123, 0.58),
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
