"""Training a recurrent network: whole step and backward alone, against ``torch.nn`` and JAX on the same threads.

``python -m benchmarks recurrent``. Classifiers of 20 to 512 hidden units, float32, on the CPU. JAX runs in a process of
its own (`jax_twin`), which starts as many threads as a row says; where it is not installed, rows go without it. From
128 units on, the rate of the machine's matrix products is measured in the same rounds, for comparison.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Overview, Result, Row, Run, columns, import_torch, refuse_difference
from benchmarks.processes import Apart
from benchmarks.workloads import LEARNING_RATE, SIZES, SequenceWorkload, TorchClassifier, TorchTwin
from sparsebp import nn
from sparsebp.core import tables, timing
from sparsebp.core.tables import Column
from sparsebp.core.threads import get_threads, set_threads

# A recurrent layer in ONNX Runtime: the model, and a session that reads and writes arrays where they are.

_ORDER = {"RNN": (0,), "GRU": (1, 0, 2), "LSTM": (0, 3, 1, 2)}
"""Where ONNX's gates are among torch's: z r h, and i o f c."""


def side(layer: Any, x: np.ndarray, threads: int) -> tuple[Callable[[], object], np.ndarray]:
    """Return a function that runs a layer over x (T, B, I), and the array (T, B, H) that it writes."""
    import onnxruntime

    steps, batch, _ = x.shape
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(model(layer, x), options, providers=["CPUExecutionProvider"])
    y = np.empty((steps, 1, batch, layer.hidden_size), x.dtype)
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_output("y", "cpu", 0, x.dtype.type, y.shape, y.ctypes.data)
    return lambda: session.run_with_iobinding(binding), y[:, 0]


def model(layer: Any, x: np.ndarray) -> bytes:
    """Return the layer as an ONNX model with one node, for inputs like x."""
    from onnx import TensorProto, helper, numpy_helper

    kind, hidden = type(layer).__name__, layer.hidden_size
    weights = {name: _ordered(kind, layer.params[f"{name}_l0"], hidden)
               for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}  # fmt: skip
    given = {"W": weights["weight_ih"], "R": weights["weight_hh"],
             "B": np.concatenate((weights["bias_ih"], weights["bias_hh"]))}  # fmt: skip
    attributes = {"hidden_size": hidden} | ({"linear_before_reset": 1} if kind == "GRU" else {})
    real = TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node(kind, ["x", *given], ["y"], **attributes)], kind,
        [helper.make_tensor_value_info("x", real, x.shape)],
        [helper.make_tensor_value_info("y", real, (x.shape[0], 1, x.shape[1], hidden))],
        [numpy_helper.from_array(np.ascontiguousarray(array[None]), name) for name, array in given.items()],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    made.ir_version = 9
    content: bytes = made.SerializeToString()
    return content


def _ordered(kind: str, array: np.ndarray, hidden: int) -> np.ndarray:
    return np.concatenate([array[gate * hidden : (gate + 1) * hidden] for gate in _ORDER[kind]])


# Outputs of recurrent layers, without gradients, against ONNX Runtime and ``torch.nn``; and a step of a stream.
#
# ``python -m benchmarks inference``. Layers of 20 to 128 units on the CPU, float32. ONNX Runtime has its weights packed
# when the session is made and its arrays bound; ours are packed in every call. PyTorch runs in its inference mode.
# Where ONNX Runtime is not installed, rows go without it. The rows with T = 1 are steps of a stream, as `Stream.step`
# runs them; their peers run a sequence of one step.

INFERENCE_TARGET, STEP_TARGET = 1.2, 3e-6
"""Times faster than ONNX Runtime; seconds of a step of 20 units, one sample."""
NO_ONNX = "ONNX Runtime is not installed (pip install 'sparsebp[peers]'): torch.nn is the only peer"


def measure_inference(run: Run) -> Iterator[Row]:
    import_torch()
    has_onnx = all(importlib.util.find_spec(name) is not None for name in ("onnx", "onnxruntime"))
    if not has_onnx:
        run.note(NO_ONNX)
    for count in run.threads():
        for cell, features, hidden, length in run.settings["layers"]:
            layer = getattr(nn, cell)(features, hidden, rng=0)
            shapes = [(length, batch) for batch in run.settings["batches"]]
            for steps, batch in (*shapes, (1, 1)) if hidden <= 20 else shapes:
                yield measure_inference_row(layer, steps, batch, count, run.rounds, has_onnx) | {"threads": count}


def measure_inference_row(
    layer: Any, length: int, batch: int, threads: int, rounds: Mapping[str, Any], has_onnx: bool
) -> Row:
    """Time one layer over a batch, after comparing the outputs; one step of one sample runs as a stream."""
    torch = import_torch()
    kind, name = type(layer).__name__, f"{type(layer).__name__}({layer.input_size}, {layer.hidden_size})"
    x = np.random.default_rng(0).standard_normal((length, batch, layer.input_size), dtype=np.float32)
    twin, given = getattr(torch.nn, kind)(layer.input_size, layer.hidden_size), torch.from_numpy(x)
    twin.load_state_dict({key: torch.from_numpy(array) for key, array in layer.state_dict().items()})

    def of_torch() -> Any:
        with torch.inference_mode():
            return twin(given)[0]

    streamed = length == batch == 1
    stream, x_t = layer.stream(), x[0, 0]
    sides: dict[str, Callable[[], object]] = {
        "ours": (lambda: stream.step(x_t)) if streamed else lambda: layer(x), "torch": of_torch
    }  # fmt: skip
    expected = of_torch().numpy()
    differences = {"torch.nn": np.abs(layer(x) - expected).max()}
    if has_onnx:
        sides["onnx"], y = side(layer, x, threads)
        sides["onnx"]()
        differences["ONNX Runtime"] = np.abs(layer(x) - y).max()
    for peer, difference in differences.items():
        refuse_difference(f"{name}, B = {batch}: an output", peer, float(difference))
    row: Row = {"model": name, "batch": batch, "length": length, "difference": float(max(differences.values()))}
    row |= timing.side_by_side(timing.measure(sides, **rounds)) | {"target": None, "met": None}
    if streamed:
        missed = [tables.seconds(row["ours"])] if row["ours"]["median"] > STEP_TARGET else []
        row |= {"target": f"≤ {tables.seconds(STEP_TARGET)}", "met": harness.outcome(missed)}
    elif has_onnx:
        row |= harness.reaches(row, "onnx_ratio", INFERENCE_TARGET)
    return row


INFERENCE = Benchmark(
    name="inference",
    title="Outputs of recurrent layers (no gradients) on the CPU, float32, compared with ONNX Runtime and torch.nn",
    leaves_out="nothing for sparsebp and torch.nn; for ONNX Runtime, packing the weights once per session",
    settings={"targets": {"onnx": INFERENCE_TARGET, "step": STEP_TARGET}, "dtype": "float32"},
    sizes={
        "layers": tuple(
            (cell, *sizes)
            for sizes in ((38, 20, 1000), (38, 64, 300), (64, 128, 200)) for cell in ("GRU", "RNN", "LSTM")
        ),
        "batches": (1, 4, 16, 32),
    },
    quick={"layers": (("GRU", 3, 5, 7),), "batches": (2,)},
    rounds={"rounds": 11, "least_rounds": 5, "budget": 1.0},
    measure=measure_inference,
    columns=columns(
        seconds={"onnx": "ONNX Runtime"},
        times={"onnx_ratio": "over ONNX Runtime", "torch_ratio": "over torch.nn"},
    ),
    short=("model", "batch", "length", "threads", "ours", "onnx_ratio", "torch_ratio", "target", "met"),
    in_short=lambda row: (
        row["threads"] == 1 and (row["batch"], row["length"]) in ((1, 1), (16, 1000), (1, 200), (16, 200))
    ),
    overview=Overview(task="Outputs of a recurrent layer", peer="ONNX Runtime", ratio="onnx_ratio",
                      label="{model}, batch {batch}", page="recurrent.md#outputs-alone"),
    picture=harness.bars("{model}, B = {batch}, T = {length}", {"onnx_ratio": "over ONNX Runtime", "torch_ratio":
                         "over torch.nn"}, harness.SPEED_UP, (harness.ONNX, harness.TORCH),
                         log=True, line=1.0),
)  # fmt: skip


# The recurrent benchmarks' workload in JAX: one compiled step, `jax.lax.scan` over the projected input.
#
# Everything is inside one `jax.jit`: the projection of all steps as one product, the scan, softmax cross-entropy on the
# last hidden state, its gradients, and Adam, whose arguments are donated. How far the scan's loop is unrolled decides
# much on a CPU, so there is a side for each of `UNROLLED`. It runs in another process (`Apart`).

UNROLLED = (1, 8)
"""Steps of the scan that one turn of its loop does."""
_BETAS, _EPS = (0.9, 0.999), 1e-8

Params = dict[str, Any]


def sides(
    cell: str, state: dict[str, np.ndarray], x: np.ndarray, target: np.ndarray, rate: float
) -> tuple[dict[str, Callable[[], object]], dict[str, dict[str, np.ndarray]]]:
    """Return a step for each of `UNROLLED`, named ``"jax1"``, …, and the gradients that each has at `state`."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", x.dtype == np.float64)
    batch = jnp.asarray(x), jnp.asarray(target)

    def fresh() -> Params:
        return {name: jnp.array(array) for name, array in state.items()}

    found: dict[str, Callable[[], object]] = {}
    gradients: dict[str, dict[str, np.ndarray]] = {}
    for unroll in UNROLLED:
        value_and_grad = jax.value_and_grad(partial(loss, cell, unroll))
        step = jax.jit(partial(adam_step, value_and_grad, rate), donate_argnums=(0, 1, 2))
        found[f"jax{unroll}"] = training = JaxTraining(step, fresh(), batch)
        training()
        gradients[f"jax{unroll}"] = training.first_gradients()
    return found, gradients


class JaxTraining:
    """A training step that keeps parameters and moments."""

    def __init__(self, step: Callable[..., Any], params: Params, batch: tuple[Any, Any]) -> None:
        import jax
        import jax.numpy as jnp

        zeros = partial(jax.tree.map, jnp.zeros_like)
        self._step, self._batch = step, batch
        self._state = [params, zeros(params), zeros(params), jnp.zeros((), jnp.int32)]

    def __call__(self) -> None:
        """Run one whole training step, to its end."""
        import jax

        *self._state, value = self._step(*self._state, *self._batch)
        jax.block_until_ready((self._state, value))

    def first_gradients(self) -> dict[str, np.ndarray]:
        """Return the gradients of the first step, right after it: its first moments hold nothing else."""
        return {name: np.asarray(m) / np.asarray(1 - _BETAS[0], m.dtype) for name, m in self._state[1].items()}


def adam_step(
    value_and_grad: Callable[..., Any], rate: float, params: Params, m: Params, v: Params, count: Any, x: Any, y: Any
) -> tuple[Any, ...]:
    import jax
    import jax.numpy as jnp

    value, grads = value_and_grad(params, x, y)
    count = count + 1
    m = jax.tree.map(lambda old, g: _BETAS[0] * old + (1 - _BETAS[0]) * g, m, grads)
    v = jax.tree.map(lambda old, g: _BETAS[1] * old + (1 - _BETAS[1]) * g * g, v, grads)
    first, second = (1 - beta ** count.astype(value.dtype) for beta in _BETAS)
    params = jax.tree.map(lambda p, a, b: p - rate * (a / first) / (jnp.sqrt(b / second) + _EPS), params, m, v)
    return params, m, v, count, value


def loss(cell: str, unroll: int, params: Params, x: Any, target: Any) -> Any:
    """Return the softmax cross-entropy of the classifier's logits on the last hidden state."""
    import jax
    import jax.numpy as jnp

    w_hh, b_ih, b_hh = (params[f"rnn.{name}_l0"] for name in ("weight_hh", "bias_ih", "bias_hh"))
    hidden = w_hh.shape[1]
    gates_of_both = b_hh if cell != "GRU" else jnp.concatenate((b_hh[: 2 * hidden], jnp.zeros_like(b_hh[:hidden])))
    projected = x @ params["rnn.weight_ih_l0"].T + (b_ih + gates_of_both)
    zeros = jnp.zeros((x.shape[1], hidden), x.dtype)
    start = (zeros, zeros) if cell == "LSTM" else zeros
    step = partial(_CELLS[cell], w_hh.T, b_hh[2 * hidden :])
    last, _ = jax.lax.scan(step, start, projected, unroll=unroll)
    h = last[0] if cell == "LSTM" else last
    logits = h @ params["head.weight"].T + params["head.bias"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], 1))


def _rnn(w: Any, _: Any, h: Any, gx: Any) -> tuple[Any, None]:
    import jax.numpy as jnp

    return jnp.tanh(gx + h @ w), None


def _gru(w: Any, b_hn: Any, h: Any, gx: Any) -> tuple[Any, None]:
    import jax
    import jax.numpy as jnp

    (x_r, x_z, x_n), (h_r, h_z, h_n) = jnp.split(gx, 3, 1), jnp.split(h @ w, 3, 1)
    r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
    n = jnp.tanh(x_n + r * (h_n + b_hn))
    return (1 - z) * n + z * h, None


def _lstm(w: Any, _: Any, state: Any, gx: Any) -> tuple[Any, None]:
    import jax
    import jax.numpy as jnp

    h, c = state
    i, f, g, o = jnp.split(gx + h @ w, 4, 1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None


_CELLS: dict[str, Callable[..., Any]] = {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}


# The cost of a time step in long and in short sequences: forward and backward of recurrent layers on the CPU.
#
# ``python -m benchmarks long-sequences``. The work grows with the number of steps T, and the cost is to grow as fast
# and no faster. Both lengths are measured in turn; there is no peer.

BATCH = 16
LONG_SEQUENCES_TARGET = 1.5
"""Times a step of the short sequence that one of the long may cost."""
PARTS = ("forward", "backward")


def measure_long_sequences(run: Run) -> Iterator[Row]:
    for count in run.threads():
        for cell in SIZES:
            yield measure_long_sequences_row(cell, run.settings["lengths"], run.rounds) | {"threads": count}


def measure_long_sequences_row(cell: str, lengths: tuple[int, int], rounds: Mapping[str, Any]) -> Row:
    workloads = {
        name: SequenceWorkload(cell, length, BATCH) for name, length in zip(("short", "long"), lengths, strict=True)
    }
    calls: dict[str, timing.Call | Callable[[], object]] = {}
    for name, workload in workloads.items():
        calls[f"forward_{name}"] = workload.forward
        calls[f"backward_{name}"] = timing.Call(workload.backward, workload.forward)
    timings = timing.measure(calls, **rounds)
    any_of = workloads["long"]
    row: Row = {"model": f"{cell}({any_of.input_size}, {any_of.hidden})", "long": lengths[1], "batch": BATCH}
    for name, length in zip(("short", "long"), lengths, strict=True):
        for part in PARTS:
            timings[f"{part}_{name}"] = harness.each(timings[f"{part}_{name}"], length)
    row |= {name: timed.to_dict() for name, timed in timings.items()}
    missed = []
    for part in PARTS:
        row[f"{part}_ratio"] = timing.ratio(timings[f"{part}_long"], timings[f"{part}_short"])
        missed += [part] if row[f"{part}_ratio"]["median"] > LONG_SEQUENCES_TARGET else []
    return row | {"target": LONG_SEQUENCES_TARGET, "met": harness.outcome(missed)}


LONG_SEQUENCES = Benchmark(
    name="long-sequences",
    title="Time per time step in long and short sequences: T = {lengths[1]} and {lengths[0]}, B = {batch}, float32",
    leaves_out="the optimizer. There is no peer; forward includes the loss, backward gives all parameters' gradients",
    settings={"batch": BATCH, "dtype": "float32"},
    sizes={"lengths": (1000, 30_000)},
    quick={"lengths": (10, 40)},
    rounds={"rounds": 15, "least_rounds": 5, "budget": 6.0},
    measure=measure_long_sequences,
    columns=columns(
        numbers={"long": "T"},
        seconds={
            "forward_short": "forward, short", "forward_long": "forward, long", "backward_short": "backward, short",
            "backward_long": "backward, long",
        },
        times={"forward_ratio": "forward, long / short", "backward_ratio": "backward, long / short"},
        formats={"≤ {:g}×": {"target": "target"}},
    ),
    short=("model", "threads", "forward_short", "forward_ratio", "backward_short", "backward_ratio", "target", "met"),
    picture=harness.bars(
        "{model}",
        {"forward_short": "forward, short", "forward_long": "forward, long",
         "backward_short": "backward, short", "backward_long": "backward, long"},
        "µs per time step, median", unit=1e6,
    ),
)  # fmt: skip


PEERS = {"torch": "torch.nn", "jax": "JAX"}
WIDE = 128
"""Hidden size from which the products decide, and the target is their rate."""
RECURRENT_TARGETS = {32: 3.0, WIDE - 1: 2.0}
"""Times faster than the best peer, by the largest number of hidden units."""
WIDE_SHARE, WEAK_SHARE, WEAK_TIMES = 0.85, 0.7, 1.2
"""From `WIDE` units on: the share of the rate of matrix products, and the ratio over a peer under `WEAK_SHARE`."""
GEMM = 1024
"""Rows and columns of the matrices whose product gives the machine's rate."""
STEPS_ALONE = 10
"""Training steps that follow each other in a process of their own."""
LONGEST = 1000
"""Steps up to which the backward alone is measured too."""
NO_JAX = "JAX is not installed (pip install 'sparsebp[peers]'): the best peer is torch.nn alone"


class Task(NamedTuple):
    """A recurrent classifier and its batch."""

    cell: str
    features: int
    hidden: int
    batch: int
    length: int

    @property
    def name(self) -> str:
        """The recurrent layer, as it is built."""
        return f"{self.cell}({self.features}, {self.hidden})"

    def workload(self) -> SequenceWorkload:
        """Build it."""
        cell, features, hidden, batch, length = self
        return SequenceWorkload(cell, length, batch, input_size=features, hidden=hidden)


TASKS = (
    Task("RNN", 1, 20, 16, 1000), Task("RNN", 1, 20, 16, 3000),
    Task("GRU", 38, 20, 16, 1000), Task("GRU", 38, 20, 16, 3000), Task("GRU", 38, 20, 1, 1000),
    Task("LSTM", 38, 20, 16, 1000),
    Task("GRU", 38, 64, 16, 300), Task("LSTM", 38, 64, 16, 300),
    Task("RNN", 64, 128, 32, 200), Task("GRU", 64, 128, 32, 200), Task("LSTM", 64, 128, 32, 200),
    Task("GRU", 128, 256, 32, 100), Task("LSTM", 128, 256, 32, 100),
    Task("RNN", 128, 512, 64, 50),
)  # fmt: skip
QUICK = (Task("RNN", 1, 20, 4, 40), Task("GRU", 3, WIDE, 2, 5))


def measure_recurrent(run: Run) -> Iterator[Row]:
    has_jax = importlib.util.find_spec("jax") is not None
    if not has_jax:
        run.note(NO_JAX)
    for count in run.threads():
        with Apart(count) if has_jax else nullcontext(None) as apart, Apart() as alone:
            for task in run.settings["tasks"]:
                wanted = Task(*task)
                row = measure_recurrent_row(
                    wanted.workload(), run.rounds, apart=apart, backward=wanted.length <= LONGEST
                )
                steps = timing.in_turn(alone.build(ours_alone, wanted, count)[0], **_without_warmup(run.rounds))["ours"]
                row["step_alone"] = harness.each(steps, STEPS_ALONE).to_dict()
                yield row | judge_recurrent(row) | {"threads": count}


def ours_alone(task: Task, count: int) -> tuple[dict[str, Callable[[], object]], None]:
    """Return some of our steps, in a process without the peers, whose threads spin for a while after their calls."""
    set_threads(count)
    workload = task.workload()

    def steps() -> None:
        for _ in range(STEPS_ALONE):
            workload.step()

    return {"ours": steps}, None


def _without_warmup(rounds: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rounds.items() if name != "warmup"}


def measure_recurrent_row(
    workload: SequenceWorkload,
    rounds: Mapping[str, Any],
    clock: timing.Clock | None = None,
    apart: Apart | None = None,
    backward: bool = True,
) -> Row:
    """Time step and backward of one workload against its twins, after comparing their gradients.

    Without `apart` there is no JAX; without `backward` only whole steps are timed.
    """
    twin = TorchTwin(workload)
    row = described(workload, twin)
    sides: dict[str, Any] = {"ours": workload, "torch": twin}
    warm = rounds.get("warmup", 2)
    timers = {name: timing.timer(side.step, warm, clock) for name, side in sides.items()}
    if apart is not None:
        timers |= _timers_of_jax(workload, apart, row)
    if workload.hidden >= WIDE:
        timers["gemm"] = timing.timer(gemm(workload.dtype), warm, clock)
    step = timing.in_turn(timers, **_without_warmup(rounds))
    if apart is not None:
        best = min(UNROLLED, key=lambda unroll: step[f"jax{unroll}"].median)
        step["jax"], row["jax_unroll"] = step[f"jax{best}"], best
    parts = {"step": step}
    if backward:
        calls = {name: timing.Call(side.backward, side.forward) for name, side in sides.items()}
        parts["backward"] = timing.measure(calls, clock=clock, **rounds)
    for part, timings in parts.items():
        row |= {f"{part}_{name}": measured.to_dict() for name, measured in timings.items()}
        row[f"{part}_ratio"] = timing.ratio(timings["torch"], timings["ours"])
    return row | _beside_best(step) | _beside_products(step, workload.flops)


def described(workload: SequenceWorkload, twin: TorchTwin) -> Row:
    """Return what a row says of its workload, whose gradients are compared with the twin's."""
    choice = workload.choice()
    return {
        "model": f"{workload.cell}({workload.input_size}, {workload.hidden})", "cell": workload.cell,
        "hidden": workload.hidden, "length": workload.length, "batch": workload.batch, "dtype": workload.dtype.name,
        "algorithm": choice.algorithm, "reason": choice.reason, "gradient_difference": workload.agreement(twin),
    }  # fmt: skip


def _timers_of_jax(workload: SequenceWorkload, apart: Apart, row: Row) -> dict[str, Callable[[], float]]:
    """Build JAX's sides; compare their gradients at the first parameters with ours."""
    timers, theirs = apart.build(sides, workload.cell, workload.state, *workload.host_batch, LEARNING_RATE)
    row["jax_difference"] = max(map(workload.difference, theirs.values()))
    refuse_difference(f"{row['model']}, T = {workload.length}: a gradient", "JAX", row["jax_difference"])
    return timers


def gemm(dtype: np.dtype) -> Callable[[], object]:
    a, out = np.ones((GEMM, GEMM), dtype), np.empty((GEMM, GEMM), dtype)
    return lambda: np.matmul(a, a, out=out)


def _beside_best(step: Mapping[str, timing.Timing]) -> Row:
    best = min((name for name in PEERS if name in step), key=lambda name: step[name].median)
    found: Row = {"best": PEERS[best], "best_ratio": timing.ratio(step[best], step["ours"])}
    if "jax" in step:
        found["jax_ratio"] = timing.ratio(step["jax"], step["ours"])
    return found


def _beside_products(step: Mapping[str, timing.Timing], flops: int) -> Row:
    """Return the rate of matrix products, and the shares of it at which ours and the best peer do their products."""
    if "gemm" not in step:
        return {}
    work = 2 * GEMM**3
    share = {
        name: timing.Timing(
            tuple(flops / side * gemm / work for side, gemm in zip(timed.seconds, step["gemm"].seconds, strict=True))
        ).median
        for name, timed in step.items()
    }
    return {
        "gemm_rate": work / step["gemm"].median,
        "share": share["ours"],
        "peer_share": max(share[name] for name in PEERS if name in share),
    }


def judge_recurrent(row: Mapping[str, Any]) -> dict[str, str]:
    times = row["best_ratio"]["median"]
    wanted = next((least for most, least in RECURRENT_TARGETS.items() if row["hidden"] <= most), None)
    if wanted is not None:
        missed = [f"{times:.2g}×"] if times < wanted else []
        return {"target": f"≥ {wanted:g}×", "met": harness.outcome(missed)}
    least = WEAK_TIMES if row["peer_share"] < WEAK_SHARE else 1.0
    missed = [f"{row['share']:.0%} of GEMM"] if row["share"] < WIDE_SHARE else []
    missed += [f"{times:.2g}×"] if times < least else []
    return {"target": f"≥ {WIDE_SHARE:.0%} of GEMM, ≥ {least:g}×", "met": harness.outcome(missed)}


RECURRENT = Benchmark(
    name="recurrent",
    title="Training step of a recurrent network on the CPU, float32, compared with torch.nn and JAX",
    leaves_out="compiling JAX's step. A step is forward, cross-entropy, backward and Adam; backward computes all "
    "parameters' gradients. JAX runs one compiled step, with lax.scan at unroll=1 or 8, whichever is faster",
    settings={"targets": {"H <= 32": 3.0, "H < 128": 2.0, "share of GEMM": WIDE_SHARE}, "dtype": "float32"},
    sizes={"tasks": TASKS},
    quick={"tasks": QUICK},
    rounds={"rounds": 15, "least_rounds": 5, "budget": 2.0},
    measure=measure_recurrent,
    columns=columns(
        Column("GEMM, GFLOP/s", "gemm_rate", lambda rate: f"{rate / 1e9:.0f}"),
        words={"best": "best peer", "algorithm": "`auto` chose"},
        numbers={"jax_unroll": "JAX's unroll"},
        seconds={
            "step_ours": "step, sparsebp", "step_alone": "sparsebp, in a process of its own",
            "step_jax": "step, JAX", "step_torch": "step, torch.nn",
            "backward_ours": "backward, sparsebp", "backward_torch": "backward, torch.nn",
        },
        times={
            "best_ratio": "over the best peer", "jax_ratio": "over JAX", "step_ratio": "over torch.nn",
            "backward_ratio": "backward, over torch.nn",
        },
        formats={"{:.0%}": {"share": "share of GEMM", "peer_share": "best peer's share"}},
    ),
    short=("model", "batch", "length", "threads", "step_ours", "best_ratio", "best", "met"),
    in_short=lambda row: row["threads"] == 1 and row["batch"] > 1 and row["length"] <= 1000,
    overview=Overview(task="A training step of a recurrent network", peer="PyTorch or JAX, the faster",
                      ratio="best_ratio", label="{model}, batch {batch}", page="recurrent.md#training"),
    picture=harness.bars(
        "{model}, B = {batch}, T = {length}", {"step_torch": "torch.nn", "step_jax": "JAX", "step_ours": "sparsebp"},
        "ms per step, median", (harness.TORCH, harness.JAX, harness.OURS), unit=1e3, log=True,
    ),
)  # fmt: skip


# Training steps of PyTorch's models with and without `sparsebp.torch.accelerate`, on the same threads.
#
# ``python -m benchmarks torch``. Five parts, each a model of torch.nn, softmax cross-entropy and torch's fused Adam:
#
# - *script*: Embedding, GRU(32), Linear on sequences of up to 300 numbers, packed; a step is the mean of an epoch's;
# - *packed*: packed sequences of lengths 1 … T (pytorch#149194, whose model has two layers of LSTM), and GRU(38, 20);
# - *long*: more than 65 535 steps (pytorch#133751: cuDNN refuses them), for an LSTM of 24 units;
# - *small*: the small networks of the benchmark ``recurrent``;
# - *grid*: RNN, GRU and LSTM of 8 to 512 units.
#
# Every call is run by the kernels, also where `accelerate` leaves it to PyTorch, so that the rows say where it should.

CLASSES, WORDS = 10, 1000
OURS = "sparsebp"
TORCH_TARGETS = {"small": 12.0, "packed": 18.0, "any": 1.0}
"""Times faster: at 20 units and 1000 steps, packed at 20 units, and everywhere."""


@dataclass(frozen=True)
class TorchTask:
    """One model and its data."""

    part: str  # ``"script"``, ``"packed"``, ``"long"``, ``"small"`` or ``"grid"``
    cell: str  # ``"RNN"``, ``"GRU"`` or ``"LSTM"``
    features: int  # of the recurrent layer
    hidden: int
    batch: int  # B and T
    length: int
    layers: int = 1
    batches: int = 1  # how many batches are trained on, one after the other

    @property
    def name(self) -> str:
        """The recurrent layer, as it is built."""
        return f"{self.cell}({self.features}, {self.hidden}" + (f", {self.layers})" if self.layers > 1 else ")")

    @property
    def packed(self) -> bool:
        """Whether sequences of different lengths are packed."""
        return self.part in ("script", "packed")

    @property
    def target(self) -> float:
        """The ratio to reach."""
        if self.part == "packed" and self.hidden == 20:
            return TORCH_TARGETS["packed"]
        small = self.hidden == 20 and self.length >= 1000
        return TORCH_TARGETS["small" if small else "any"]


def tasks(settings: Mapping[str, Any]) -> Iterator[TorchTask]:
    """Yield every task of a run."""
    script, long = settings["script"], settings["long"]
    yield TorchTask("script", "GRU", 32, 32, script["batch"], script["length"], batches=script["batches"])
    for length in settings["packed"]:
        yield TorchTask("packed", "GRU", 38, 20, 16, length)
        yield TorchTask("packed", "LSTM", 16, 32, 16, length, layers=2)
    yield TorchTask("long", "LSTM", 4, 24, 2, long)
    for cell, features in (("RNN", 1), ("GRU", 38), ("LSTM", 38)):
        yield TorchTask("small", cell, features, 20, 16, settings["small"])
    for cell in settings["cells"]:
        for batch, length, largest in settings["shapes"]:
            for hidden in settings["hidden"]:
                if hidden <= largest:
                    yield TorchTask("grid", cell, settings["features"], hidden, batch, length)


def measure_torch(run: Run) -> Iterator[Row]:
    import_torch()
    slower: dict[str, set[str]] = {}
    for count in run.threads():
        for task in tasks(run.settings):
            row = measure_torch_row(task, run.rounds) | {"threads": count}
            if row["accelerate"] == OURS and row["ratio"]["median"] < 1:
                slower.setdefault(task.cell, set()).add(f"H = {task.hidden}, B = {task.batch}, T = {task.length}")
            yield row
    run.note(advice(slower))


def advice(slower: Mapping[str, set[str]]) -> str:
    """Name the slower tasks of the grid that `accelerate` does not leave to PyTorch."""
    said = [f"{cell}: {', '.join(sorted(places))}" for cell, places in sorted(slower.items())]
    return f"Cases slower than torch.nn that accelerate still runs in our kernels: {'; '.join(said) or 'none'}"


def measure_torch_row(task: TorchTask, rounds: Mapping[str, Any]) -> Row:
    from sparsebp.torch.rule import Case, Sizes, predicted

    plain = Side(task)
    ours = plain.accelerated()
    difference = ours.difference(plain)
    refuse_difference(f"{task.name}, T = {task.length}, B = {task.batch}: a gradient", "torch.nn", difference)
    if task.part == "long":  # seconds a step
        rounds = {**rounds, "rounds": min(3, rounds["rounds"]), "least_rounds": min(3, rounds["least_rounds"])}
    timings = {
        name: harness.each(found, task.batches)
        for name, found in timing.measure({"ours": ours.epoch, "torch": plain.epoch}, **rounds).items()
    }
    lengths = plain.batches[0][2]
    rows = task.batch * task.length if lengths is None else int(lengths.sum())
    sizes = Sizes(task.features, task.hidden, task.batch, task.length, rows, task.layers)
    by_kernels, by_torch = predicted(Case(task.cell, False, task.packed, True, get_threads() > 1), sizes)
    row: Row = {
        "part": task.part, "model": task.name, "cell": task.cell, "hidden": task.hidden, "batch": task.batch,
        "length": task.length, "gradient_difference": difference,
        "accelerate": OURS if by_kernels < by_torch else "torch.nn", "target": task.target,
    }  # fmt: skip
    row |= {name: timing_.to_dict() for name, timing_ in timings.items()}
    row["ratio"] = timing.ratio(timings["torch"], timings["ours"])
    reached = row["ratio"]["median"] >= task.target
    if by_torch <= by_kernels and task.target <= 1:
        return row | {"met": "left to PyTorch"}
    return row | {"met": harness.outcome([] if reached else [f"≥ {task.target:g}×"])}


class Side(TorchClassifier):
    """A model of torch.nn, its batches and its optimizer."""

    def __init__(self, task: TorchTask) -> None:
        torch = import_torch()
        self._task = task
        torch.manual_seed(0)
        rng = np.random.default_rng(0)
        parts = {
            "rnn": getattr(torch.nn, task.cell)(task.features, task.hidden, task.layers),
            "head": torch.nn.Linear(task.hidden, CLASSES),
        }
        if task.part == "script":
            parts["embedding"] = torch.nn.Embedding(WORDS, task.features)
        self.batches = [self._batch(torch, rng) for _ in range(task.batches)]
        super().__init__(torch.nn.ModuleDict(parts))

    def _batch(self, torch: Any, rng: np.random.Generator) -> tuple[Any, Any, Any]:
        """Return inputs (T, B) or (T, B, features), classes, and lengths or None."""
        task = self._task
        shape = (task.length, task.batch)
        if task.part == "script":
            x = torch.from_numpy(rng.integers(0, WORDS, shape))
            lengths = torch.from_numpy(rng.integers(max(1, task.length // 10), task.length + 1, task.batch))
        else:
            x = torch.from_numpy(rng.standard_normal((*shape, task.features), dtype=np.float32))
            lengths = torch.linspace(1, task.length, task.batch).round().long() if task.packed else None
        return x, torch.from_numpy(rng.integers(0, CLASSES, task.batch)), lengths

    def accelerated(self) -> Side:
        """Return the same whose recurrent layer is ours, whatever `accelerate` would do."""
        from sparsebp.torch.dispatch import OURS

        side = Side(self._task)
        side.model["rnn"].__class__ = OURS[type(side.model["rnn"])]
        return side

    def epoch(self) -> None:
        """Run a whole training step on every batch."""
        for batch in self.batches:
            self.loss_of(*batch).backward()
            self.optimizer.step()

    def difference(self, peer: Side) -> float:
        """Return the largest ``‖ours − theirs‖ / ‖theirs‖`` over the gradients of all parameters on the first batch."""
        for side in (self, peer):
            side.loss_of(*side.batches[0]).backward()
        theirs = dict(peer.model.named_parameters())
        return max(
            float((mine.grad - theirs[name].grad).norm() / theirs[name].grad.norm().clamp_min(1e-30))
            for name, mine in self.model.named_parameters()
        )


def draw_torch(result: Result) -> Any:
    """Draw who is faster at which size and length, and bars of the other parts."""
    threads, rows = harness.with_threads(result, max)
    drawing, axes = harness.figure(4, 1, width=8.0, height=11.0)
    grid, others = [row for row in rows if row["part"] == "grid"], axes[3, 0]
    shades = harness.shades_between(harness.TORCH, harness.OURS)
    for ax, cell in zip(axes[:3, 0], ("RNN", "GRU", "LSTM"), strict=True):
        cells = {(row["length"], row["hidden"]): row for row in grid if row["cell"] == cell}
        lengths, sizes = (sorted({key[i] for key in cells}) for i in (0, 1))
        ratios = np.array([[cells[length, hidden]["ratio"]["median"] if (length, hidden) in cells else np.nan
                            for hidden in sizes] for length in lengths])  # fmt: skip
        if ratios.size:
            ax.imshow(np.log2(ratios), shades, vmin=-4, vmax=4, aspect="auto", origin="lower", alpha=0.6)
        for (length, hidden), row in cells.items():
            left = "\nPyTorch runs" if row["accelerate"] != OURS else ""
            text = f"{row['ratio']['median']:.3g}×{left}"
            ax.text(sizes.index(hidden), lengths.index(length), text, ha="center", va="center", fontsize=8)
        ax.set_xticks(range(len(sizes)), sizes)
        ax.set_yticks(range(len(lengths)), lengths)
        ax.set(ylabel=f"{cell}: T, steps", xlabel=f"hidden size, units; {threads}; our kernels' speed-up over torch.nn")
        ax.grid(visible=False)
    for colour, name in (
        (harness.OURS, "maps: our kernels faster"),
        (harness.TORCH, "slower, and bars: speed-up over torch.nn"),
    ):
        others.barh([], [], color=colour, label=name)
    rows = [row for row in rows if row["part"] != "grid"]
    drawn = others.barh(range(len(rows)), [row["ratio"]["median"] for row in rows], color=harness.TORCH)
    others.bar_label(drawn, fmt="{:.3g}", padding=2, fontsize=7)
    others.set_yticks(range(len(rows)), [f"{row['part']}: {row['model']}\nB = {row['batch']}, T = {row['length']}"
                                         for row in rows], fontsize=8)  # fmt: skip
    others.invert_yaxis()
    others.set(xlabel="speed-up over torch.nn: its time over ours, median")
    return drawing


TORCH = Benchmark(
    name="torch",
    title="Training PyTorch's recurrent models on the CPU with and without accelerate, float32",
    leaves_out="nothing; a step is packing, forward, cross-entropy, backward and PyTorch's fused Adam",
    settings={"targets": TORCH_TARGETS, "features": 32, "cells": ("RNN", "GRU", "LSTM")},
    sizes={
        "script": {"batch": 32, "length": 300, "batches": 4}, "packed": (100, 1000), "long": 66_000, "small": 1000,
        "hidden": (8, 20, 64, 128, 256, 512), "shapes": ((16, 10, 512), (16, 100, 512), (16, 1000, 128)),
    },
    quick={
        "script": {"batch": 3, "length": 10, "batches": 2}, "packed": (8,), "long": 40, "small": 8,
        "hidden": (8,), "shapes": ((2, 6, 8),),
    },
    rounds={"rounds": 9, "least_rounds": 5, "budget": 3.0},
    measure=measure_torch,
    columns=columns(
        words={"part": "part", "accelerate": "accelerate runs"},
        seconds={"ours": "accelerated"},
        times={"ratio": "over torch.nn"},
        formats={"≥ {:g}×": {"target": "target"}},
    ),
    short=("part", "model", "length", "threads", "accelerate", "ours", "torch", "ratio"),
    in_short=lambda row: (
        row["threads"] == 1 and (row["part"] != "grid" or (row["hidden"] == 64 and row["length"] == 100))
    ),
    overview=Overview(task="A PyTorch model, accelerated", peer="PyTorch", ratio="ratio",
                      label="{model}, {length} steps", page="pytorch.md",
                      of=lambda row: row["accelerate"] == "sparsebp"),
    picture=draw_torch,
)  # fmt: skip
