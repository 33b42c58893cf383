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

from sparsebp.core import backend
from sparsebp.torch.modules import DTYPES

# The size rule: which side is predicted to take less time for a call of these sizes.
#
# Either side's time is a sum of `Sizes.terms`: a call, steps, rows, products and weights cost so much each, which was
# measured for each case and fitted. PyTorch calls several operations per step, each costing more than its arithmetic; a
# call of ours costs as much as some of PyTorch's steps. PyTorch's float32 LSTM is different: one oneDNN call for all
# steps of sequences of one length, packed or not. Few steps a call, and cells, are for `one_step`.
#
# Measured on one thread and on two of an AMD EPYC (Zen 3, AVX2).
# ``python -m benchmarks thresholds`` measures the table anew, and ``python -m benchmarks.thresholds`` writes it here.

COSTS: dict[tuple[str, bool, bool, bool, bool], tuple[tuple[float, ...], tuple[float, ...]]] = {
    # cell, float64, packed, trains, several threads: what the kernels pay for each term, and what PyTorch pays
    ("RNN", False, False, True, False): (
        (705000.0, 0.0, 618.0, 0.47, 0.0504, 0.136, 0.0, 7.34),
        (276000.0, 45900.0, 359.0, 16.1, 0.0458, 0.0, 0.45, 3.71),
    ),
    ("RNN", False, False, True, True): (
        (956000.0, 0.0, 0.0, 6.11, 0.0386, 0.0, 0.0, 13.9),
        (366000.0, 45900.0, 90.8, 14.6, 0.0131, 0.0, 0.349, 8.9),
    ),
    ("RNN", False, False, False, False): (
        (196000.0, 0.0, 98.2, 1.95, 0.0121, 0.0221, 0.0133, 3.68),
        (80800.0, 5990.0, 98.3, 5.92, 0.015, 0.019, 0.129, 2.69),
    ),
    ("RNN", False, False, False, True): (
        (253000.0, 144.0, 45.7, 0.0, 0.0266, 0.0, 0.0, 1.16),
        (111000.0, 6190.0, 287.0, 3.99, 0.0189, 0.0, 0.136, 1.14),
    ),
    ("RNN", False, True, True, False): (
        (794000.0, 0.0, 0.0, 15.6, 0.0431, 0.0, 0.0976, 10.2),
        (318000.0, 70000.0, 0.0, 34.1, 0.0276, 0.0, 0.56, 0.118),
    ),
    ("RNN", False, True, True, True): (
        (980000.0, 0.0, 176.0, 6.7, 0.0722, 0.0, 0.0517, 9.63),
        (582000.0, 73800.0, 76.8, 9.66, 0.0683, 0.0, 0.473, 0.592),
    ),
    ("RNN", False, True, False, False): (
        (262000.0, 57.8, 0.0, 0.966, 0.0335, 0.0, 0.00961, 0.0),
        (113000.0, 8300.0, 45.2, 9.88, 0.0255, 0.0, 0.0542, 0.0),
    ),
    ("RNN", False, True, False, True): (
        (211000.0, 104.0, 69.8, 2.14, 0.0216, 0.0, 0.0396, 1.38),
        (134000.0, 8970.0, 175.0, 4.63, 0.0, 0.0913, 0.136, 0.0),
    ),
    ("RNN", True, False, True, False): (
        (755000.0, 0.0, 0.0, 13.3, 0.0965, 0.14, 0.0, 23.1),
        (343000.0, 63100.0, 0.0, 24.7, 0.0321, 0.353, 0.704, 3.63),
    ),
    ("RNN", True, False, True, True): (
        (947000.0, 0.0, 0.0, 7.65, 0.0702, 0.234, 0.0, 16.3),
        (85200.0, 56800.0, 79.3, 22.4, 0.0266, 0.302, 1.01, 1.06),
    ),
    ("RNN", True, False, False, False): (
        (181000.0, 0.0, 48.3, 2.03, 0.0463, 0.0553, 0.0, 3.13),
        (52400.0, 5480.0, 55.5, 10.1, 0.0527, 0.108, 0.0667, 0.866),
    ),
    ("RNN", True, False, False, True): (
        (377000.0, 9.59, 134.0, 2.48, 0.0293, 0.0, 0.0517, 3.89),
        (152000.0, 14400.0, 253.0, 10.3, 0.0334, 0.0, 0.107, 2.83),
    ),
    ("RNN", True, True, True, False): (
        (708000.0, 0.0, 118.0, 15.5, 0.203, 0.0, 0.0, 10.4),
        (326000.0, 60800.0, 206.0, 36.7, 0.182, 0.0, 0.651, 0.709),
    ),
    ("RNN", True, True, True, True): (
        (1120000.0, 0.0, 256.0, 37.4, 0.0954, 0.0, 0.0317, 25.2),
        (432000.0, 130000.0, 2190.0, 25.6, 0.0483, 0.0, 1.03, 7.9),
    ),
    ("RNN", True, True, False, False): (
        (218000.0, 0.0, 99.3, 3.67, 0.0565, 0.0, 0.0378, 1.66),
        (125000.0, 4000.0, 396.0, 18.9, 0.0602, 0.0, 0.141, 0.356),
    ),
    ("RNN", True, True, False, True): (
        (241000.0, 0.0, 0.0, 5.79, 0.0442, 0.0, 0.0962, 1.3),
        (158000.0, 7930.0, 104.0, 14.3, 0.031, 0.0, 0.185, 0.0),
    ),
    ("GRU", False, False, True, False): (
        (267000.0, 119.0, 0.0, 6.11, 0.0679, 0.0, 0.0476, 10.3),
        (228000.0, 136000.0, 629.0, 7.23, 0.0608, 0.0, 0.665, 1.21),
    ),
    ("GRU", False, False, True, True): (
        (721000.0, 0.0, 0.0, 5.21, 0.0565, 0.0, 0.0958, 5.96),
        (0.0, 208000.0, 0.0, 8.97, 0.0361, 0.0, 0.351, 1.86),
    ),
    ("GRU", False, False, False, False): (
        (211000.0, 0.0, 55.5, 1.2, 0.0199, 0.0171, 0.00582, 1.19),
        (62700.0, 22300.0, 190.0, 2.8, 0.0318, 0.0, 0.0669, 0.224),
    ),
    ("GRU", False, False, False, True): (
        (421000.0, 241.0, 0.432, 0.19, 0.00578, 0.0499, 0.0, 0.793),
        (156000.0, 23900.0, 485.0, 2.91, 0.00359, 0.0486, 0.0969, 0.324),
    ),
    ("GRU", False, True, True, False): (
        (1080000.0, 441.0, 25.8, 7.14, 0.0667, 0.0153, 0.0, 7.69),
        (447000.0, 272000.0, 228.0, 11.0, 0.0, 0.223, 0.157, 1.96),
    ),
    ("GRU", False, True, True, True): (
        (651000.0, 0.0, 1710.0, 0.0, 0.0938, 0.0, 0.0862, 6.35),
        (366000.0, 179000.0, 0.0, 21.2, 0.0244, 0.0, 0.596, 0.491),
    ),
    ("GRU", False, True, False, False): (
        (274000.0, 0.0, 0.0, 1.04, 0.0212, 0.0458, 0.0, 0.706),
        (145000.0, 30100.0, 0.0, 2.75, 0.0397, 0.0, 0.0459, 0.265),
    ),
    ("GRU", False, True, False, True): (
        (179000.0, 234.0, 70.6, 0.0, 0.0238, 0.0, 0.038, 0.974),
        (123000.0, 18300.0, 189.0, 4.05, 0.0182, 0.0, 0.0921, 0.301),
    ),
    ("GRU", True, False, True, False): (
        (774000.0, 0.0, 0.0, 10.0, 0.159, 0.0747, 0.0297, 4.53),
        (483000.0, 116000.0, 0.0, 44.3, 0.0877, 0.0, 1.01, 0.0),
    ),
    ("GRU", True, False, True, True): (
        (611000.0, 0.0, 0.0, 5.2, 0.0902, 0.269, 0.0, 8.4),
        (311000.0, 124000.0, 0.0, 43.8, 0.0, 0.0, 0.703, 4.77),
    ),
    ("GRU", True, False, False, False): (
        (221000.0, 0.0, 163.0, 1.47, 0.0351, 0.0801, 0.0, 1.65),
        (25000.0, 20200.0, 303.0, 4.07, 0.0239, 0.172, 0.126, 0.31),
    ),
    ("GRU", True, False, False, True): (
        (180000.0, 717.0, 145.0, 1.24, 0.0282, 0.0, 0.0, 3.41),
        (32200.0, 22400.0, 62.8, 8.33, 0.0154, 0.0528, 0.0277, 2.39),
    ),
    ("GRU", True, True, True, False): (
        (618000.0, 0.0, 0.0, 16.5, 0.145, 0.0, 0.119, 11.6),
        (258000.0, 155000.0, 0.0, 29.2, 0.0957, 0.0, 1.46, 1.35),
    ),
    ("GRU", True, True, True, True): (
        (676000.0, 0.0, 1340.0, 14.9, 0.101, 0.0, 0.109, 14.2),
        (348000.0, 155000.0, 1600.0, 21.7, 0.0742, 0.0, 1.04, 2.52),
    ),
    ("GRU", True, True, False, False): (
        (179000.0, 0.0, 168.0, 2.66, 0.0461, 0.0457, 0.0285, 1.24),
        (127000.0, 15500.0, 0.0, 5.12, 0.0713, 0.0, 0.169, 0.193),
    ),
    ("GRU", True, True, False, True): (
        (184000.0, 0.0, 0.0, 6.34, 0.0337, 0.0, 0.0811, 1.84),
        (120000.0, 16700.0, 173.0, 10.2, 0.0371, 0.0, 0.182, 0.767),
    ),
    ("LSTM", False, False, True, False): (
        (640000.0, 293.0, 0.0, 5.55, 0.0626, 0.0104, 0.0433, 4.69),
        (583000.0, 1350.0, 155.0, 5.09, 0.0747, 0.0, 0.0513, 2.36),
    ),
    ("LSTM", False, False, True, True): (
        (613000.0, 1270.0, 0.0, 5.62, 0.0511, 0.0, 0.0393, 9.13),
        (687000.0, 1430.0, 652.0, 3.82, 0.0455, 0.0, 0.106, 1.75),
    ),
    ("LSTM", False, False, False, False): (
        (215000.0, 157.0, 213.0, 0.341, 0.0246, 0.00926, 0.0214, 0.868),
        (240000.0, 0.0, 105.0, 1.98, 0.0314, 0.0, 0.0257, 0.966),
    ),
    ("LSTM", False, False, False, True): (
        (342000.0, 117.0, 25.6, 1.35, 0.0103, 0.00173, 0.0105, 2.16),
        (370000.0, 932.0, 85.5, 2.08, 0.0147, 0.00156, 0.0166, 0.701),
    ),
    ("LSTM", False, True, True, False): (
        (706000.0, 0.0, 162.0, 11.0, 0.063, 0.0, 0.0945, 5.93),
        (300000.0, 170000.0, 0.0, 23.2, 0.0181, 0.0, 0.377, 2.64),
    ),
    ("LSTM", False, True, True, True): (
        (836000.0, 0.0, 0.0, 8.08, 0.0869, 0.0, 0.0833, 7.05),
        (506000.0, 184000.0, 0.0, 14.3, 0.07, 0.0, 0.345, 1.08),
    ),
    ("LSTM", False, True, False, False): (
        (213000.0, 0.0, 25.0, 1.97, 0.00659, 0.107, 0.000241, 0.655),
        (160000.0, 23300.0, 490.0, 2.46, 0.0349, 0.0, 0.0591, 0.356),
    ),
    ("LSTM", False, True, False, True): (
        (199000.0, 277.0, 63.9, 4.3, 0.00539, 0.0391, 0.0393, 1.19),
        (138000.0, 17900.0, 27.8, 7.8, 0.0146, 0.0, 0.188, 0.537),
    ),
    ("LSTM", True, False, True, False): (
        (563000.0, 0.0, 0.0, 20.2, 0.092, 0.343, 0.0, 4.87),
        (0.0, 130000.0, 0.0, 42.9, 0.0, 0.588, 0.578, 0.0),
    ),
    ("LSTM", True, False, True, True): (
        (519000.0, 0.0, 0.0, 19.7, 0.109, 0.0398, 0.0, 17.7),
        (0.0, 178000.0, 0.0, 24.3, 0.0584, 0.199, 0.278, 6.53),
    ),
    ("LSTM", True, False, False, False): (
        (229000.0, 0.0, 117.0, 4.64, 0.0473, 0.0392, 0.0, 2.53),
        (102000.0, 17300.0, 626.0, 8.61, 0.0691, 0.00888, 0.0606, 1.14),
    ),
    ("LSTM", True, False, False, True): (
        (240000.0, 155.0, 163.0, 5.25, 0.0291, 0.0, 0.0204, 2.18),
        (238000.0, 22800.0, 440.0, 4.25, 0.0421, 0.0, 0.14, 0.657),
    ),
    ("LSTM", True, True, True, False): (
        (966000.0, 0.0, 0.0, 30.0, 0.0, 0.391, 0.176, 8.62),
        (450000.0, 235000.0, 0.0, 29.0, 0.0442, 0.382, 0.983, 2.21),
    ),
    ("LSTM", True, True, True, True): (
        (726000.0, 0.0, 0.0, 13.8, 0.156, 0.0, 0.117, 10.9),
        (349000.0, 178000.0, 0.0, 16.4, 0.147, 0.0, 0.372, 2.38),
    ),
    ("LSTM", True, True, False, False): (
        (290000.0, 417.0, 354.0, 2.2, 0.0571, 0.0, 0.0619, 1.46),
        (117000.0, 27300.0, 0.0, 11.7, 0.052, 0.0, 0.0739, 0.953),
    ),
    ("LSTM", True, True, False, True): (
        (216000.0, 358.0, 687.0, 0.0, 0.0471, 0.0, 0.045, 1.55),
        (107000.0, 28400.0, 296.0, 6.58, 0.0434, 0.0, 0.0877, 0.537),
    ),
}
"""Nanoseconds by case of the size rule and term of a call: of the kernels, and of PyTorch."""

MOST = 512
"""The largest hidden size that was measured."""


# The size rule on a GPU: the GPU's time of a call counts, and the host's, which a CUDA graph does away with.
#
# The kernels run a call that saves more of the GPU's time than they take longer on the host. Where a CUDA graph is
# captured the host's time does not count, nor in a side stream, where PyTorch wants the calls before a capture to be: a
# kernel must have been loaded before it is captured.
#
# Measured on one H100 with PyTorch 2.11, float32 and 38 features: `GPU_COSTS` from the calls of 100 and of 1000 steps
# (docs/benchmarks/gpu-peers-nvidia-h100-80gb-hbm3-d37eb1f3.json). With TF32 PyTorch takes up to 25 µs less.

MEASURED_ON = "NVIDIA H100 80GB HBM3"
GPU_COSTS: dict[tuple[str, bool], dict[int, tuple[tuple[float, float], tuple[float, float]]]] = {
    # cell, trains: by hidden size what the kernels take for a call and a step, and what PyTorch takes
    ("RNN", True): {
        20: ((60, 0.121), (110, 0.679)),
        64: ((54, 0.257), (95, 0.775)),
        128: ((59, 0.477), (103, 1.1)),
        256: ((83, 2.3), (98, 3.93)),
    },
    ("GRU", True): {
        20: ((61, 0.199), (69, 1.16)),
        64: ((45, 0.624), (59, 1.56)),
        128: ((56, 1.55), (56, 2.28)),
        256: ((0, 33.8), (0, 16)),
    },
    ("LSTM", True): {
        20: ((57, 0.358), (92, 0.829)),
        64: ((46, 0.785), (105, 1.2)),
        128: ((63, 2.29), (116, 4.22)),
        256: ((6, 48.9), (0, 16.2)),
    },
    ("RNN", False): {64: ((14, 0.127), (11, 0.297))},
    ("GRU", False): {64: ((14, 0.22), (17, 0.489))},
    ("LSTM", False): {64: ((18, 0.292), (18, 0.443))},
}
"""Microseconds with 16 samples; of GRU and LSTM with 256 units PyTorch's captured, which no host slows down."""
OF_ONE_SAMPLE = {"RNN": 0.7, "GRU": 0.7, "LSTM": 0.9}
"""Share of its time that PyTorch takes with less than 16 samples, at least; the RNN's was not measured. The kernels
take as long. With more samples both take longer, PyTorch by more (GRU and LSTM of 64 units, 64 and 256 samples)."""
GPU_SAMPLES, GPU_VALUES = 256, 2**14
"""The most samples, and values of a state, that were measured."""
HOST_TIMES = {True: (3100.0, 1800.0), False: (740.0, 250.0)}
"""Microseconds of the host by the kernels and by PyTorch, by whether the call trains."""
PACKED = (9.0, 0.0), (12.7, 61.0)
"""The same that a packed sequence takes besides, of the GPU and of the host: the kernels for every length, PyTorch for
every step, in place of its steps above. Of a GRU of 20 units with 64 samples of different lengths up to 1000; captured,
as a call that is not captured is one padded run and takes less."""


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
_ELSEWHERE = Way(False, "measured on a CPU and on a GPU of NVIDIA's alone")
_WITHOUT_CUPY = Way(False, "a GPU that CuPy does not see; the kernels need it")
_NOT_LOADED = Way(False, "a CUDA graph, and the kernels have not run such a call in a side stream before")
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
    trains, numbers = torch.is_grad_enabled(), (
        module.input_size, module.hidden_size, batch, steps, rows, module.num_layers, 2 if module.bidirectional else 1,
    )  # fmt: skip
    if x.is_cpu:
        way = _by_size(module.mode, dtype, packed, trains, torch.get_num_threads() > 1, *numbers)
    else:
        way = _on_a_gpu(module, x, packed, trains, numbers)
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


def _on_a_gpu(module: Any, x: Tensor, packed: bool, trains: bool, numbers: tuple[int, ...]) -> Way:
    """Decide by the size rule for a GPU, and by whether what is captured has been loaded."""
    if not x.is_cuda or torch.version.hip:
        return _ELSEWHERE
    if x.dtype is torch.float64 or module.proj_size:
        return Way(False, f"{'float64' if x.dtype is torch.float64 else 'a projection'}, not measured on a GPU")
    number = x.device.index
    captured = torch.cuda.is_current_stream_capturing()
    aside = not captured and torch.cuda.current_stream(number) != torch.cuda.default_stream(number)
    cell = module.mode.partition("_")[0]
    way = _by_size_on_a_gpu(cell, packed, trains, captured or aside, _device_name(number), *numbers)
    if not way.ours:
        return way
    if not _sees_gpu():
        return _WITHOUT_CUPY
    loaded = _loaded(module.mode, packed, trains, number, *numbers)
    if captured and not loaded:
        return _NOT_LOADED
    if aside:
        loaded[:] = [True]
    return way


@functools.lru_cache(maxsize=4096)
def _by_size_on_a_gpu(cell: str, packed: bool, trains: bool, in_graph: bool, name: str, *numbers: int) -> Way:
    """Decide by the size rule for a GPU, float32; `in_graph`: the host's time does not count."""
    sizes = Sizes(*numbers)
    packed = packed and sizes.steps * sizes.batch > sizes.rows
    case = f"float32 {cell}{', packed' if packed else ''}{'' if trains else ', no gradients'}"
    measured = GPU_COSTS[cell, trains]
    found = next((costs for hidden, costs in measured.items() if hidden >= sizes.hidden), None)
    unlike = {
        f"H = {sizes.hidden}": found is None,
        f"{sizes.batch} samples": sizes.batch > GPU_SAMPLES or sizes.batch * sizes.hidden > GPU_VALUES,
        "several layers or directions": (sizes.layers, sizes.directions) != (1, 1),
        "packed": packed and (cell, trains) != ("GRU", True),
    }
    if found is None or any(unlike.values()):
        return Way(False, f"{case}, {next(key for key, value in unlike.items() if value)}: not measured on a GPU")
    (call, step), (torch_call, torch_step) = found
    ours, torchs, (host, torch_host) = call + step * sizes.steps, torch_call, HOST_TIMES[trains]
    if packed:
        (length, host_length), (torch_step, torch_host_step) = PACKED
        ours, host = ours + length * min(sizes.batch, sizes.steps), host + host_length * min(sizes.batch, sizes.steps)
        torch_host += torch_host_step * sizes.steps
    torchs += torch_step * sizes.steps
    if sizes.batch < 16:
        torchs *= OF_ONE_SAMPLE[cell]
    device = MEASURED_ON if name == MEASURED_ON else f"{MEASURED_ON}, not this {name}"
    told = f"{case}, {sizes}: about {ours / 1e3:.3g} ms of the GPU by the kernels, {torchs / 1e3:.3g} ms by PyTorch"
    of_host = f"{host / 1e3:.3g} and {torch_host / 1e3:.3g} ms of the host"
    told += f"; {'in or before a CUDA graph' if in_graph else of_host}; measured on an {device}"
    return Way(torchs - ours > (0.0 if in_graph else max(0.0, host - torch_host)), told)


@functools.lru_cache(maxsize=256)
def _loaded(*call: Any) -> list[bool]:
    """Return what holds an entry if the kernels have run such a call in a side stream."""
    return []


@functools.cache
def _device_name(number: int | None) -> str:
    return torch.cuda.get_device_name(number)


@functools.cache
def _sees_gpu() -> bool:
    return backend.has_gpu()


def _dispatch_obstacle(module: Any, x: Tensor, packed: bool) -> Way | None:
    """Return the way that rules out the kernels where they would be faster, None if nothing does."""
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
