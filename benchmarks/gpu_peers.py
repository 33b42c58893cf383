"""Ours and the strongest peers on a GPU, as a user calls them: rows of ``gpu-peers``.

``python -m benchmarks gpu-peers``. Modules of PyTorch after `accelerate`, packed sequences too, compared with cuDNN;
training steps of convolutional networks, captured, compared with PyTorch's; linear recurrences compared with scans in
PyTorch; a selective scan and the time of a copy; Adam; Jacobians of single layers compared with vector-Jacobian
products (BPPSA, Table 1).

A side that fails costs its own numbers only: the row's ``failed`` says why. A row whose own side fails, or whose result
is wrong, has an ``error``.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

import sparsebp as sb
from benchmarks import harness
from benchmarks.gpu import SECONDS, Steps, begin
from benchmarks.gpu_timing import COPIES, kernel_names, measured, ratio, torch_replay
from benchmarks.harness import Benchmark, Row, Run, columns
from benchmarks.processes import measure_apart
from benchmarks.workloads import IMAGES, LEARNING_RATE, torch_twin
from sparsebp import nn, optim
from sparsebp.core import backend
from sparsebp.core.check import Array

Call = Callable[[], object]

POINT_LIMIT = 40.0
"""Seconds of a point; PyTorch compiles for 10 to 20 of them."""
TOGETHER = 0.03
"""Seconds of the calls of a side that are timed together, where one call takes less."""
VECTORS = 256
"""Vector-Jacobian products that PyTorch computes in one call."""
RIGHT = 1e-3
"""The largest relative difference from float64 of a result that counts as right."""
NO_CAPTURE = "PyTorch captures on a GPU alone"


class CellPoint(NamedTuple):
    """A recurrent module of PyTorch: ``accelerate``, ``packed``, ``inference``, or the names of its ``kernels``."""

    what: str
    cell: str
    length: int
    batch: int
    hidden: int


class NetworkPoint(NamedTuple):
    """A captured training step (``step``), or one update of all parameters (``adam``)."""

    what: str
    network: str
    batch: int | None = None


class RecurrencePoint(NamedTuple):
    """A linear recurrence, compared with scans that PyTorch runs, or with one that it compiles; or a selective scan."""

    what: str
    length: int
    batch: int
    hidden: int
    compiled: str = ""


class LayerPoint(NamedTuple):
    """The transposed Jacobian of one of VGG-11's first layers."""

    what: str
    layer: str


Point = CellPoint | NetworkPoint | RecurrencePoint | LayerPoint


def measure_peers(run: Run) -> Iterator[Row]:
    """Measure every point until time is up."""
    begin(run)
    settings = dict(run.settings)
    for row in measure_apart(run, [*points(settings)], make_peers, settings, dict(run.rounds), limit=POINT_LIMIT):
        for side, why in row.get("failed", {}).items() if "error" not in row else ():
            run.note(f"{row['what']}, {row['case']}: {side} not measured: {why}")
        yield row


def points(sizes: Mapping[str, Any]) -> Iterator[Point]:
    """Yield the points: each kind first, then more sizes of modules, and last what takes PyTorch longest to prepare."""
    cells, (length, *others) = sizes["cells"], sizes["lengths"]
    batch, wide = sizes["batch"], sizes["inference_hidden"]
    sequences = [(cell, hidden) for hidden in sizes["hidden"] for cell in cells]
    yield from (CellPoint("accelerate", cell, length, batch, hidden) for cell, hidden in sequences)
    yield CellPoint("packed", "GRU", *sizes["packed"])
    yield from (NetworkPoint("step", *each) for each in sizes["networks"])
    yield from (RecurrencePoint("recurrence", *each) for each in sizes["recurrences"])
    yield RecurrencePoint("selective scan", *sizes["selective"])
    yield NetworkPoint("adam", sizes["updated"])
    yield from (LayerPoint("jacobian", layer) for layer in LAYERS)
    yield from (CellPoint("accelerate", cell, steps, batch, hidden) for steps in others for cell, hidden in sequences)
    yield from (CellPoint("accelerate", *each) for each in sizes["published"])
    for each in sizes["batches"]:
        yield from (CellPoint("accelerate", cell, length, each, wide) for cell in cells if cell != "RNN")
    yield from (CellPoint("inference", cell, steps, batch, wide) for steps in sizes["lengths"] for cell in cells)
    yield from (CellPoint("kernels", cell, length, batch, hidden) for cell, hidden in sequences)
    for steps, samples, units in sizes["compiled"]:
        yield from (RecurrencePoint("compiled recurrence", steps, samples, units, scan) for scan in SCANS)


def make_peers(sizes: Mapping[str, Any], rounds: Mapping[str, Any]) -> Callable[[Point], Row]:
    """Return the function that measures a point, in the measuring process."""
    cupy = backend.cupy()

    def measure(point: Point) -> Row:
        try:
            return measure_peers_point(point, cupy, sizes, rounds)
        finally:
            with contextlib.suppress(RuntimeError):  # a broken device, which the row's error tells
                cupy.get_default_memory_pool().free_all_blocks()
                if place_of(cupy).captures:
                    harness.import_torch().cuda.empty_cache()

    return measure


def measure_peers_point(point: Point, xp: ModuleType, sizes: Mapping[str, Any], rounds: Mapping[str, Any]) -> Row:
    place = place_of(xp)
    sides = Sides(place, rounds)
    kinds: dict[type, Callable[..., Row]] = {
        CellPoint: measure_cell, NetworkPoint: measure_network, RecurrencePoint: measure_recurrence,
        LayerPoint: measure_layer,
    }  # fmt: skip
    with flags(place.torch):
        row: Row = {"tf32": dict(zip(("cudnn", "matmul"), _flags(place.torch), strict=False))}
        row |= kinds[type(point)](point, place, sides, sizes)
    if sides.failed:
        row["failed"] = sides.failed
    if "ours" in sides.failed:
        row["error"] = sides.failed["ours"]
    elif not row.get("difference", 0.0) < RIGHT:
        row["error"] = f"our result differs from float64's by {row['difference']:.2g}"
    return row


# What sides have in common: where they run, PyTorch's flags, and what a failure of one of them costs.


class Place(NamedTuple):
    """CuPy, or NumPy for tests, and PyTorch with its device for the same memory."""

    xp: ModuleType
    torch: Any
    device: Any

    @property
    def captures(self) -> bool:
        """Whether PyTorch can capture graphs here."""
        return bool(self.device.type == "cuda")

    @property
    def ours(self) -> str:
        """Our name of the device."""
        return "cpu" if backend.is_host(self.xp) else "cuda"

    def array(self, tensor: Any) -> Array:
        """Return a tensor's values as an array."""
        return self.xp.from_dlpack(tensor) if self.captures else self.xp.asarray(tensor.numpy())

    def tensor(self, array: Array) -> Any:
        """Return an array's values as a tensor."""
        return self.torch.from_dlpack(array) if self.captures else self.torch.as_tensor(backend.to_host(array))

    def synchronize(self) -> None:
        """Wait for the GPU."""
        backend.synchronize(self.xp)  # PyTorch's default stream, too
        if self.captures:
            self.torch.cuda.synchronize()


def place_of(xp: ModuleType) -> Place:
    """Return where the arrays of `xp` are."""
    torch = harness.import_torch()
    return Place(xp, torch, torch.device("cpu" if backend.is_host(xp) else "cuda"))


def _flags(torch: Any) -> tuple[bool, bool, bool]:
    backends = torch.backends
    return backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32, backends.cudnn.benchmark


@contextlib.contextmanager
def flags(torch: Any, *, tf32: bool = False) -> Iterator[None]:
    """Let PyTorch multiply in float32, or in TF32, inside the ``with`` block; cuDNN tries its algorithms."""
    backends, before = torch.backends, _flags(torch)

    def put(cudnn: bool, matmul: bool, benchmark: bool) -> None:
        backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32 = cudnn, matmul
        backends.cudnn.benchmark = benchmark

    put(tf32, tf32, True)
    try:
        yield
    finally:
        put(*before)


def in_tf32(torch: Any, call: Call) -> Call:
    """Return a call that may multiply in TF32."""

    def run() -> object:
        with flags(torch, tf32=True):
            return call()

    return run


def told(error: Exception) -> str:
    """Return an error as a line, and the first of those that led to it."""
    first: BaseException = error
    while first.__context__ is not None:
        first = first.__context__
    lines = [f"{type(each).__name__}: {' '.join(str(each).split())[:400]}" for each in dict.fromkeys((error, first))]
    return ", after ".join(lines)


class Sides:
    """Sides of a point by name, all of which have run; `failed` says why others are missing."""

    def __init__(self, place: Place, rounds: Mapping[str, Any]) -> None:
        self._place, self._rounds = place, rounds
        self.calls: dict[str, Call] = {}
        self.failed: dict[str, str] = {}

    def add(self, name: str, call: Call) -> None:
        """Run a side for the first time."""
        self.make(name, lambda: call)

    def make(self, name: str, make: Callable[[], Call]) -> None:
        """Make a side, and run it for the first time."""
        try:
            call = make()
            call()
            self._place.synchronize()
        except Exception as error:
            self.failed[name] = told(error)
        else:
            self.calls[name] = call

    def measured(self, *, queue: bool = True) -> Row:
        """Time the sides in turn, and forget them."""
        calls, self.calls = self.calls, {}
        if not calls:
            return {}
        copies = int(np.clip(TOGETHER / max(self._seconds(call) for call in calls.values()), 2, COPIES))
        return dict(measured(calls, self._place.xp, {"copies": copies, **self._rounds}, queue=queue))

    def _seconds(self, call: Call) -> float:
        start = time.perf_counter()
        call()
        self._place.synchronize()
        return max(time.perf_counter() - start, 1e-9)


def ratios(row: Row, pairs: Mapping[str, tuple[str, str]]) -> Row:
    """Return, by key, the ratios of a peer's time to one of ours, of the sides that were measured."""
    return {key: ratio(row[peer], row[ours]) for key, (peer, ours) in pairs.items() if {peer, ours} <= row.keys()}


def over_best(row: Row, peers: Iterable[str]) -> Row:
    """Return the fastest of the peers that were measured, its time, and its ratios to ours.

    `called_ratio`: of the seconds that a caller waits who does nothing else, the GPU's or the host's.
    """
    there = [name for name in peers if name in row]
    if not there or "ours" not in row:
        return {}
    best = min(there, key=lambda name: row[name]["median"])
    waited = [max(row[name]["median"], row[name].get("host", 0.0)) for name in (best, "ours")]
    return {"peer": best.replace("_", " "), "theirs": row[best], "ratio": ratio(row[best], row["ours"]),
            "called_ratio": waited[0] / waited[1]}  # fmt: skip


def difference(found: Iterable[Any], right: Iterable[Any]) -> float:
    """Return the largest ``‖found − right‖ / ‖right‖`` of pairs of tensors."""
    smallest = np.finfo(np.float64).tiny
    pairs = [(each.double(), other.double()) for each, other in zip(found, right, strict=True)]
    return float(np.max([float((a - b).norm()) / max(float(b.norm()), smallest) for a, b in pairs]))  # a NaN stays


# Recurrent modules of PyTorch, accelerated.


class Module:
    """A call of a recurrent module: forward and backward, or forward alone."""

    def __init__(self, torch: Any, module: Any, x: Any, trains: bool) -> None:
        self._torch, self.module, self._x, self._trains = torch, module, x, trains

    def __call__(self) -> Any:
        """Run it; return the outputs."""
        if not self._trains:
            with self._torch.no_grad():
                return self.module(self._x)[0]
        self.module.zero_grad(set_to_none=True)
        y, last = self.module(self._x)
        packed = not isinstance(y, self._torch.Tensor)
        read = (last[0] if isinstance(last, tuple) else last) if packed else y[-1]
        read.sum().backward()
        return y

    def results(self) -> list[Any]:
        """Run it; return the outputs, then the gradients, in copies."""
        y = self()
        y = y if isinstance(y, self._torch.Tensor) else y.data
        return [y.detach().clone(), *self.gradients()]

    def gradients(self) -> list[Any]:
        """Return copies of the gradients."""
        return [p.grad.clone() for p in self.module.parameters()] if self._trains else []


def measure_cell(point: CellPoint, place: Place, sides: Sides, sizes: Mapping[str, Any]) -> Row:
    import sparsebp.torch as st

    torch, trains = place.torch, point.what != "inference"
    torch.manual_seed(0)
    x = torch.randn(point.length, point.batch, sizes["features"], device=place.device)
    if point.what == "packed":
        lengths = np.random.default_rng(0).integers(max(point.length // 10, 1), point.length + 1, point.batch)
        x = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
    module = getattr(torch.nn, point.cell)(sizes["features"], point.hidden, device=place.device)
    theirs = Module(torch, module, x, trains)
    ours = Module(torch, st.accelerate(copy.deepcopy(module), faster_only=False), x, trains)
    row: Row = {"case": f"{point.cell}, H = {point.hidden}, B = {point.batch}, T = {point.length}"}
    if point.what == "kernels":
        return row | {"torch_kernels": kernel_names(theirs), "kernels": kernel_names(ours)}
    with torch.set_grad_enabled(trains):
        (outcome,) = st.explain(module, x)
    row |= {"chosen": "the kernels" if outcome.replaced else "PyTorch", "rule": outcome.reason}
    right = Module(torch, copy.deepcopy(module).double(), x.double(), trains).results()
    calls: dict[str, Call] = {"ours": ours, "torch": theirs, "torch_tf32": in_tf32(torch, theirs)}
    for name, call in calls.items():
        sides.add(name, call)
    if "ours" in sides.calls:
        row |= errors("", ours, right)
    if "torch" in sides.calls:
        row |= errors("torch_", theirs, right)
        with flags(torch, tf32=True):
            row |= errors("tf32_", theirs, right)
    row |= sides.measured()
    row |= over_best(row, ["torch"]) | ratios(row, {"tf32_ratio": ("torch_tf32", "ours")})
    return row | captured_cell(place, ours, theirs, right, sides)


def errors(side: str, call: Module, right: Sequence[Any]) -> Row:
    """Return how far outputs and gradients are from those of float64; `difference` is the larger one."""
    found = call.results()
    row = {f"{side}output_difference": difference(found[:1], right[:1])}
    if len(found) > 1:
        row[f"{side}gradient_difference"] = difference(found[1:], right[1:])
    return row | {f"{side}difference": float(np.max([*row.values()]))}


def captured_cell(place: Place, ours: Module, theirs: Module, right: Sequence[Any], sides: Sides) -> Row:
    """Time both sides as replays of PyTorch's CUDA graphs; say why one is not, where it is not."""
    if not place.captures:
        return {"uncaptured": NO_CAPTURE}
    row: Row = {}
    try:
        sides.make("captured_torch", partial(torch_replay, theirs))
        with flags(place.torch, tf32=True):
            sides.make("captured_torch_tf32", partial(torch_replay, theirs))
        sides.make("captured_ours", partial(torch_replay, ours))
        row |= sides.measured()
        if "captured_ours" in row and len(right) > 1:
            row["captured_difference"] = found = difference(ours.gradients(), right[1:])  # of the last of many replays
            if not found < RIGHT:
                del row["captured_ours"]
                sides.failed["captured_ours"] = f"a replay's gradients differ from float64's by {found:.2g}"
    except Exception as error:  # what was measured before stays
        sides.failed["captured_ours"] = told(error)
    row |= ratios(row, {key: (f"captured_{peer}", "captured_ours") for key, peer in CAPTURED.items()})
    return row | ({"uncaptured": sides.failed["captured_ours"]} if "captured_ours" in sides.failed else {})


CAPTURED = {"captured_ratio": "torch", "captured_tf32_ratio": "torch_tf32"}


# Convolutional networks: whole training steps with Adam, captured; and Adam alone.

VARIANTS = {"torch": (False, False), "torch_channels_last": (True, False), "torch_channels_last_tf32": (True, True)}
"""PyTorch's sides: whether channels are last in memory, and whether TF32 is allowed."""
SMALL = "small"


def _small() -> nn.Sequential:
    layers = nn.Conv2d(1, 2, 3, rng=0), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3, rng=0)
    return nn.Sequential(*layers)


NETWORKS = IMAGES | {SMALL: (_small, (1, 6, 6))}


def measure_network(point: NetworkPoint, place: Place, sides: Sides, sizes: Mapping[str, Any]) -> Row:
    make, shape = NETWORKS[point.network]
    model = make()
    twin = torch_twin(model).to(place.device)
    model.to(place.ours)
    optimizer = optim.Adam(model.parameters(), lr=LEARNING_RATE)
    count = sum(array.size for array in model.parameters().values())
    row: Row = {"case": point.network, "parameters": int(count)}
    if point.batch is None:
        return row | updates(place, sides, optimizer, model.parameters(), twin)
    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((point.batch, *shape), np.float32), rng.integers(3, size=point.batch)
    batch = place.xp.asarray(x), place.xp.asarray(target)
    steps: list[Steps] = []

    def ours() -> Call:
        steps.append(Steps(model, nn.CrossEntropyLoss(), optimizer, batch, graph=True))
        return steps[0]

    try:
        sides.make("ours", ours)
        for name, variant in VARIANTS.items():
            sides.make(name, partial(torch_step, place, twin, x, target, *variant))
        found = sides.measured(queue=False)  # whole steps wait for the numbers of earlier ones
        row |= {"case": f"{point.network}, B = {point.batch}", **found}
        if steps and steps[0].uncaptured:
            row["uncaptured"] = steps[0].uncaptured
    finally:
        for each in steps:
            each.close()
    row |= over_best(row, [name for name, (_, tf32) in VARIANTS.items() if not tf32])
    return row | ratios(row, {"tf32_ratio": ("torch_channels_last_tf32", "ours")})


def torch_step(place: Place, twin: Any, x: np.ndarray, target: np.ndarray, channels_last: bool, tf32: bool) -> Call:
    """Return PyTorch's training step from the weights of `twin`, captured on a GPU."""
    torch = place.torch
    model, images = copy.deepcopy(twin), torch.tensor(x).to(place.device)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    classes, loss = torch.tensor(target).to(place.device), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True, capturable=place.captures)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(model(images), classes).backward()
        optimizer.step()

    with flags(torch, tf32=tf32):
        return torch_replay(step) if place.captures else step


def updates(place: Place, sides: Sides, optimizer: Any, params: Mapping[str, Array], twin: Any) -> Row:
    """Time one update of all parameters by Adam."""
    torch = place.torch
    for parameter in twin.parameters():
        parameter.grad = torch.randn_like(parameter)
    rng = np.random.default_rng(0)
    grads = {name: place.xp.asarray(rng.standard_normal(a.shape, np.float32)) for name, a in params.items()}
    theirs = torch.optim.Adam(twin.parameters(), lr=LEARNING_RATE, fused=True)
    sides.add("ours", lambda: optimizer.step(grads))
    sides.add("torch", theirs.step)
    row = sides.measured()
    return row | over_best(row, ["torch"])


# Linear recurrences and the selective scan.


SCANS = ("hillis_steele", "associative_scan")
"""Scans in PyTorch: log T passes (Hillis and Steele, 1986), and its own, which it compiles into one kernel."""


def scan_of(name: str, place: Place) -> Callable[[Any, Any], Any]:
    """Return a function that computes h with ``h[t] = a[t] h[t-1] + b[t]``."""
    torch, mode = place.torch, "pointwise" if place.captures else "generic"
    from torch._higher_order_ops.associative_scan import associative_scan as scan

    def hillis_steele(a: Any, b: Any) -> Any:
        n = 1
        while n < a.shape[0]:
            b = torch.cat([b[:n], a[n:] * b[:-n] + b[n:]])
            a = torch.cat([a[:n], a[n:] * a[:-n]])
            n *= 2
        return b

    def associative_scan(a: Any, b: Any) -> Any:
        return scan(lambda l, r: (r[0] * l[0], r[0] * l[1] + r[1]), (a, b), dim=0, combine_mode=mode)[1]

    return {"hillis_steele": hillis_steele, "associative_scan": associative_scan}[name]


def measure_recurrence(point: RecurrencePoint, place: Place, sides: Sides, sizes: Mapping[str, Any]) -> Row:
    import sparsebp.torch as st

    if point.what == "selective scan":
        return selective_scan(point, place, sides, sizes["states"])
    torch, shape = place.torch, (point.length, point.batch, point.hidden)
    row: Row = {"case": f"T = {point.length}, B = {point.batch}, H = {point.hidden}"}
    torch.manual_seed(0)
    a, b, gy = (draw(shape, device=place.device) for draw in (torch.rand, torch.randn, torch.randn))
    arrays = [place.array(tensor) for tensor in (a, b, gy)]
    leaves = [tensor.clone().requires_grad_() for tensor in (a, b)]
    target = torch.empty_like(a)

    def gradients(scan: Callable[[Any, Any], Any]) -> Call:
        def run() -> None:
            for leaf in leaves:
                leaf.grad = None
            scan(*leaves).backward(gy)

        return run

    def ours() -> tuple[Array, Array, Array]:
        h = sb.linear_recurrence(*arrays[:2])
        grads = sb.linear_recurrence_vjp(arrays[0], h, arrays[2])
        return h, grads.a, grads.b

    both: dict[str, Call] = {"ours": ours, "ours_torch": gradients(st.linear_recurrence)}
    forward: dict[str, Call] = {"forward_ours": lambda: sb.linear_recurrence(*arrays[:2])}
    peer = point.compiled or "hillis_steele"
    scan = scan_of(peer, place)
    if point.compiled and place.captures:
        scan = torch.compile(scan, dynamic=False, fullgraph=True)
    else:
        row |= recurrence_errors(place, ours, (a, b, gy))
    calls = {**both, **forward, peer: gradients(scan), f"forward_{peer}": lambda: scan(a, b),
             "copy": lambda: target.copy_(a)}  # fmt: skip
    for name, call in calls.items():
        sides.add(name, call)
    row |= sides.measured() | {"bytes": {"copy": 2 * a.nbytes, "forward": 3 * a.nbytes, "ours": 8 * a.nbytes}}
    pairs = {"copy_ratio": ("copy", "ours"), "forward_copy_ratio": ("copy", "forward_ours"),
             "forward_ratio": (f"forward_{peer}", "forward_ours")}  # fmt: skip
    return row | over_best(row, [peer]) | ratios(row, pairs)


def recurrence_errors(place: Place, ours: Callable[[], Sequence[Array]], tensors: Sequence[Any]) -> Row:
    """Return how far our states and gradients are from those of float64."""
    a, b, gy = (tensor.double() for tensor in tensors)
    h = scan_of("hillis_steele", place)(a.requires_grad_(), b.requires_grad_())
    right = [h.detach(), *place.torch.autograd.grad(h, (a, b), gy)]
    try:
        found = [place.tensor(array).to(place.device) for array in ours()]
    except Exception:  # told by the side itself
        return {}
    return {"difference": difference(found, right)}


def selective_scan(point: RecurrencePoint, place: Place, sides: Sides, states: int) -> Row:
    """Time Mamba's scan, forwards and backwards, and a copy of its input."""
    torch, shape = place.torch, (point.length, point.batch, point.hidden)
    torch.manual_seed(0)

    def normal(*sizes: int) -> Any:
        return torch.randn(sizes, device=place.device)

    softplus = torch.nn.functional.softplus
    tensors = (normal(*shape), softplus(normal(*shape) - 3), -normal(point.hidden, states).exp(),
               normal(*shape[:2], states), normal(*shape[:2], states))  # fmt: skip
    arrays, gy = [place.array(each) for each in tensors], place.array(normal(*shape))
    target = torch.empty_like(tensors[0])
    x, dt, a, b, c = arrays
    saved = sb.selective_scan(x, dt, a, b, c).states
    sides.add("ours", lambda: sb.selective_scan(x, dt, a, b, c))
    sides.add("backward", lambda: sb.selective_scan_vjp(x, dt, a, b, c, None, saved, gy))
    sides.add("copy", lambda: target.copy_(tensors[0]))
    row = sides.measured()
    row |= {"case": f"T = {point.length}, B = {point.batch}, E = {point.hidden}, N = {states}"}
    return row | ratios(row, {"copy_ratio": ("copy", "ours")})


# Jacobians of VGG-11's first layers at one sample.

LAYERS = ("convolution", "ReLU", "max-pooling")


def measure_layer(point: LayerPoint, place: Place, sides: Sides, sizes: Mapping[str, Any]) -> Row:
    torch, (channels, side) = place.torch, sizes["first"]
    rng = np.random.default_rng(0)
    first = nn.Conv2d(3, channels, 3, padding=1, rng=0)
    layer, theirs = {
        "convolution": (first, torch_twin(nn.Sequential(first))), "ReLU": (nn.ReLU(), torch.nn.ReLU()),
        "max-pooling": (nn.MaxPool2d(2), torch.nn.MaxPool2d(2)),
    }[point.layer]  # fmt: skip
    theirs.to(place.device)
    layer.to(place.ours)
    given = 3 if point.layer == "convolution" else channels
    x = rng.standard_normal((1, given, side, side), np.float32)
    ours_x, x = place.xp.asarray(x), torch.tensor(x).to(place.device).requires_grad_()
    y = theirs(x)
    outputs, together = y.numel(), min(VECTORS, y.numel())
    vectors = torch.eye(together, outputs, device=place.device).reshape(together, *y.shape)
    sides.add("ours", lambda: sb.jacobian_t(layer, ours_x))
    grad = partial(torch.autograd.grad, y, x, retain_graph=True)
    sides.add("vjp", lambda: grad(vectors[together // 2]))
    sides.add("vjps_together", lambda: grad(vectors, is_grads_batched=True))
    row: Row = {"case": f"{point.layer}, {outputs} × {x.numel()}", "outputs": outputs, "together": together}
    if "ours" in sides.calls:
        one = sb.jacobian_t(layer, ours_x).vjp(place.array(vectors[together // 2]))
        row["difference"] = difference([place.tensor(one).to(place.device)], grad(vectors[together // 2]))
    row |= sides.measured(queue=False)
    whole = {name: row[name]["median"] * outputs / count
             for name, count in (("vjp", 1), ("vjps_together", together)) if name in row}  # fmt: skip
    if whole and "ours" in row:
        best = min(whole, key=whole.__getitem__)
        row |= {"peer": f"{best.replace('_', ' ')}, for all outputs", "theirs": whole[best],
                "ratio": whole[best] / row["ours"]["median"]}  # fmt: skip
    return row


def in_short(row: Row) -> bool:
    """Whether documents show a row."""
    shown = {
        "accelerate": (row.get("cell"), row.get("length"), row.get("batch")) == ("GRU", 1000, 16),
        "packed": True, "adam": True, "step": row.get("network") == "LeNet-5" or row.get("batch") == 128,
        "compiled recurrence": row.get("compiled") == SCANS[0], "jacobian": row.get("layer") == LAYERS[0],
    }  # fmt: skip
    return "ratio" in row and shown.get(row["what"], False)


GPU_PEERS = Benchmark(
    name="gpu-peers",
    title="Ours and the strongest peers on a GPU: modules of PyTorch, networks, recurrences, Adam, Jacobians; float32",
    leaves_out="moving data to the GPU; capturing, compiling, and the trials of cuDNN's algorithms",
    settings={"features": 38, "states": 16},
    sizes={
        "cells": ("GRU", "LSTM", "RNN"), "hidden": (20, 64, 128, 256), "lengths": (1000, 100), "batch": 16,
        "batches": (1, 64, 256), "inference_hidden": 64, "packed": (1000, 64, 20),
        "networks": (("VGG-11", 32), ("VGG-11", 128), ("LeNet-5", 64), ("MobileNetV2-style", 32),
                     ("MobileNetV2-style", 128)),
        # of which others have published times, see what-we-expect-on-a-gpu.md
        "published": (("LSTM", 3047, 6, 40), ("LSTM", 3854, 16, 128), ("RNN", 1406, 34, 120)),
        "recurrences": ((1000, 16, 64), (1000, 64, 100), (16_000, 1, 64), (4096, 8, 1024), (16_384, 16, 128)),
        "compiled": ((1000, 16, 64), (1000, 64, 100)), "selective": (2048, 4, 1024), "updated": "VGG-11",
        "first": (64, 32),
    },
    quick={
        "features": 2, "states": 3, "cells": ("GRU", "LSTM", "RNN"), "hidden": (5,), "lengths": (6, 3), "batch": 2,
        "batches": (1,), "inference_hidden": 3, "packed": (7, 3, 5), "networks": ((SMALL, 2),), "published": (),
        "recurrences": ((7, 2, 3),), "compiled": ((3, 2, 3),), "selective": (7, 2, 5), "updated": SMALL,
        "first": (2, 4),
    },
    rounds={"rounds": 9, "least_rounds": 3, "budget": 0.4},
    quick_rounds={**harness.QUICK_ROUNDS, "copies": 2},
    threads=None,
    seconds=SECONDS,
    measure=measure_peers,
    columns=columns(
        words={"what": "what", "case": "case", "peer": "fastest peer", "chosen": "`accelerate` chooses",
               "uncaptured": "not captured"},
        numbers={"hidden": "H", "outputs": "outputs"},
        counts={"parameters": "parameters"},
        seconds={
            "theirs": "its time", "torch_tf32": "TF32", "captured_ours": "captured",
            "captured_torch": "cuDNN, captured", "captured_torch_tf32": "cuDNN, TF32, captured",
            "torch_channels_last": "channels last", "torch_channels_last_tf32": "channels last, TF32",
            "ours_torch": "in PyTorch", "hillis_steele": "Hillis–Steele", "associative_scan": "associative_scan",
            "forward_ours": "forward", "forward_hillis_steele": "forward, Hillis–Steele",
            "forward_associative_scan": "forward, associative_scan", "backward": "backward", "copy": "copy",
            "vjp": "one vjp", "vjps_together": "vjps together",
        },
        times={
            "ratio": "over the peer", "called_ratio": "as called", "tf32_ratio": "over TF32",
            "captured_ratio": "both captured", "captured_tf32_ratio": "both captured, over TF32",
            "forward_ratio": "forward, over the peer", "copy_ratio": "a copy's time over ours",
            "forward_copy_ratio": "a copy's over the forward's",
        },
        formats={"{:.1e}": {
            "difference": "from float64", "torch_difference": "from float64, cuDNN",
            "tf32_difference": "from float64, TF32", "captured_difference": "from float64, captured",
        }},
    ),
    short=("what", "case", "ours", "peer", "theirs", "ratio", "called_ratio", "captured_ratio"),
    in_short=in_short,
    picture=harness.bars("{what}\n{case}", {"ratio": "over the fastest peer"}, harness.SPEED_UP, log=True, line=1.0),
)  # fmt: skip
