"""Recurrences that are linear in the state, forward and back, against PyTorch and JAX on the same threads.

``python -m benchmarks linear``. Four of them, float32: given factors, a factor that is complex and the same in all
steps (complex64), the minGRU after its projection, and Mamba's selective scan. A call computes the output and, from a
given gradient at it, those at all inputs. Then three layers in a classifier, mean over the steps and cross-entropy: a
call is a whole training step with Adam.

PyTorch has a loop over the steps and a scan of logarithmic depth (Hillis and Steele), as it is and through
`torch.compile`, which takes minutes to unroll a loop of a thousand steps; JAX has `lax.scan`, unrolled or not, and
`lax.associative_scan`, in one `jax.jit`. The fastest of each counts. JAX runs in a process of its own (`Apart`); where
it is not installed, rows go without it. There, `sparsebp.jax` is called too, in one `jax.jit` as JAX's own scans are.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

import sparsebp as sb
from benchmarks import harness
from benchmarks.harness import Benchmark, Overview, Row, Run, columns, import_torch, refuse_difference
from benchmarks.processes import Apart
from benchmarks.recurrent import JaxTraining, adam_step
from benchmarks.workloads import LEARNING_RATE
from sparsebp import kernels, nn
from sparsebp.core import host_pool, timing

TARGETS, MOVED = {"given factors": 3.0, "one complex factor": 4.0, "minGRU": 5.0, "selective scan": 3.0}, 2.5
TARGETS |= {"training MinGRU": 5.0, "training LRU": 4.0, "training SelectiveScan": 3.0}
"""Times faster than the best peer; times a copy of as many bytes, where no arithmetic is in the way."""
FEATURES, CLASSES = 38, 10
"""Of the input of a training step, except of a selective scan, and of its output."""
PEERS = {"torch": "PyTorch", "jax": "JAX"}
NO_JAX = "JAX is not installed (pip install 'sparsebp[peers]'): the best peer is PyTorch alone"

Arrays = dict[str, np.ndarray]
Scan = Callable[[Any, Any], Any]


class Task(NamedTuple):
    """A recurrence and its sizes; `states` of each channel of a selective scan."""

    kind: str
    length: int
    batch: int
    hidden: int
    states: int = 1

    @property
    def arithmetic(self) -> bool:
        """Whether arithmetic, and not memory, takes the time."""
        return self.kind == "selective scan" or self.training

    @property
    def training(self) -> bool:
        """Whether it is a whole training step, of a network with such a layer."""
        return self.kind.startswith("training")


TASKS = (
    Task("given factors", 1000, 16, 64), Task("given factors", 1000, 64, 100), Task("given factors", 16_000, 1, 64),
    Task("one complex factor", 2000, 8, 256),
    Task("minGRU", 1000, 16, 64), Task("minGRU", 1000, 64, 100),
    Task("selective scan", 512, 2, 256, 16),
    Task("training MinGRU", 1000, 16, 64), Task("training MinGRU", 1000, 64, 100), Task("training LRU", 1000, 16, 64),
    Task("training SelectiveScan", 512, 2, 256, 16),
)  # fmt: skip
QUICK = (
    Task("given factors", 9, 2, 5), Task("one complex factor", 3, 2, 5), Task("minGRU", 3, 2, 5),
    Task("selective scan", 3, 2, 5, 3),
    Task("training MinGRU", 3, 2, 5), Task("training LRU", 3, 2, 5), Task("training SelectiveScan", 3, 2, 5, 3),
)  # fmt: skip


def inputs(task: Task) -> tuple[Arrays, np.ndarray]:
    """Return a recurrence's inputs by name, and a gradient at its output."""
    kind, steps, batch, hidden, states = task
    rng, shape = np.random.default_rng(0), (steps, batch, hidden)

    def normal(*sizes: int) -> np.ndarray:
        return rng.standard_normal(sizes, dtype=np.float32)

    if kind == "given factors":
        return {"a": 1 / (1 + np.exp(-normal(*shape))), "b": normal(*shape)}, normal(*shape)
    if kind == "one complex factor":
        a, b, grad = (normal(*sizes, 2).view(np.complex64)[..., 0] for sizes in ((1, 1, hidden), shape, shape))
        return {"a": a * np.float32(0.95) / abs(a), "b": b}, grad
    if kind == "minGRU":
        return {"u": normal(*shape), "v": normal(*shape)}, normal(*shape)
    found = {"x": normal(*shape), "dt": np.log1p(np.exp(normal(*shape) - 3)), "a": -np.exp(normal(hidden, states))}
    return found | {"b": normal(steps, batch, states), "c": normal(steps, batch, states)}, normal(*shape)


# The recurrences in a peer's library: `lib` has its functions, `scan` returns h of ``h[t] = a[t] * h[t-1] + b[t]``.


def _given(lib: Any, scan: Scan, a: Any, b: Any) -> Any:
    return scan(lib.broadcast_to(a, b.shape), b)


def _min_gru(lib: Any, scan: Scan, u: Any, v: Any) -> Any:
    z = lib.sigmoid(u)
    return scan(1 - z, z * v)


def _selective(lib: Any, scan: Scan, x: Any, dt: Any, a: Any, b: Any, c: Any) -> Any:
    h = scan(lib.exp(dt[..., None] * a), (dt * x)[..., None] * b[:, :, None])
    return (h * c[:, :, None]).sum(-1)


_OUTPUTS: dict[str, Callable[..., Any]] = {
    "given factors": _given, "one complex factor": _given, "minGRU": _min_gru, "selective scan": _selective,
}  # fmt: skip


# Layers in a peer's library, from the parameters `p` of ours.


def _min_gru_layer(lib: Any, scan: Scan, p: Mapping[str, Any], x: Any) -> Any:
    parts = x @ p["0.weight_ih_l0"].T + p["0.bias_ih_l0"]
    units = parts.shape[-1] // 2
    return _min_gru(lib, scan, parts[..., :units], parts[..., units:])


def _lru_layer(lib: Any, scan: Scan, p: Mapping[str, Any], x: Any) -> Any:
    factor = lib.exp(-lib.exp(p["0.nu_log"]) + 1j * lib.exp(p["0.theta_log"]))
    terms = (x @ p["0.B_re"].T + 1j * (x @ p["0.B_im"].T)) * lib.exp(p["0.gamma_log"])
    h = scan(lib.broadcast_to(factor, terms.shape), terms)
    return h.real @ p["0.C_re"].T - h.imag @ p["0.C_im"].T + p["0.D"] * x


def _selective_layer(lib: Any, scan: Scan, p: Mapping[str, Any], x: Any) -> Any:
    rank, states = p["0.dt_proj.weight"].shape[1], p["0.A_log"].shape[1]
    parts = x @ p["0.x_proj.weight"].T
    dt = lib.log1p(lib.exp(parts[..., :rank] @ p["0.dt_proj.weight"].T + p["0.dt_proj.bias"]))
    b, c = parts[..., rank : rank + states], parts[..., rank + states :]
    return _selective(lib, scan, x, dt, -lib.exp(p["0.A_log"]), b, c) + p["0.D"] * x


_LAYERS: dict[str, Callable[..., Any]] = {
    "training MinGRU": _min_gru_layer, "training LRU": _lru_layer, "training SelectiveScan": _selective_layer,
}  # fmt: skip


def _logits(task: Task, lib: Any, scan: Scan, p: Mapping[str, Any], x: Any) -> Any:
    return _LAYERS[task.kind](lib, scan, p, x).mean(0) @ p["2.weight"].T + p["2.bias"]


def network(task: Task) -> tuple[nn.Sequential, np.ndarray, np.ndarray]:
    """Return the classifier of a training step, its input and its classes."""
    layers: dict[str, Callable[[], tuple[nn.Layer, int, int]]] = {
        "training MinGRU": lambda: (nn.MinGRU(FEATURES, task.hidden, rng=0), FEATURES, task.hidden),
        "training LRU": lambda: (nn.LRU(FEATURES, task.hidden, r_min=0.9, r_max=0.999, rng=0), FEATURES, FEATURES),
        "training SelectiveScan":
            lambda: (nn.SelectiveScan(task.hidden, task.states, rng=0), task.hidden, task.hidden),
    }  # fmt: skip
    layer, features, width = layers[task.kind]()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((task.length, task.batch, features), dtype=np.float32)
    model = nn.Sequential(layer, nn.MeanOverSteps(), nn.Linear(width, CLASSES, rng=0))
    return model, x, rng.integers(0, CLASSES, task.batch)


# Ours.


def ours(task: Task) -> tuple[Callable[[], object], tuple[np.ndarray, ...]]:
    """Return a call of ours, and the output and the gradients that it gives, in the inputs' order."""
    if task.training:
        return _our_training(task)
    given, grad = inputs(task)
    calls: dict[str, Callable[..., Any]] = {"minGRU": _our_min_gru, "selective scan": _our_scan}
    call = calls.get(task.kind, _our_recurrence)
    run = partial(call, grad, *_packed(task, given))
    y, *grads = run()
    if task.kind == "minGRU":
        grads = [*np.split(grads[0], 2, axis=-1)]
    return run, (y, *grads)


def _our_training(task: Task) -> tuple[Callable[[], object], tuple[np.ndarray, ...]]:
    model, x, target = network(task)
    value_and_grad = sb.value_and_grad(model, nn.CrossEntropyLoss())
    optimizer = sb.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    return lambda: optimizer.step(value_and_grad(x, target)[1]), tuple(value_and_grad(x, target)[1].values())


def _packed(task: Task, given: Arrays) -> tuple[np.ndarray, ...]:
    """Return the inputs as our call takes them: those of a minGRU side by side, as a projection gives them."""
    return (np.concatenate(list(given.values()), -1),) if task.kind == "minGRU" else tuple(given.values())


def _our_recurrence(grad: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, ...]:
    h = sb.linear_recurrence(a, b)
    grads = sb.linear_recurrence_vjp(a, h, grad)
    return h, grads.a, grads.b


def _our_min_gru(grad: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, ...]:
    k, h, gx = kernels.get(np), host_pool.empty(np, grad.shape, grad.dtype), host_pool.empty(np, x.shape, x.dtype)
    h0, gh0 = np.zeros(grad.shape[1:], grad.dtype), np.empty(grad.shape[1:], grad.dtype)
    k.min_gru_forward(x, h0, None, "identity", False, h)
    k.min_gru_backward(x, h, grad, h0, None, "identity", False, gx, gh0)
    return h, gx


def _our_scan(
    grad: np.ndarray, x: np.ndarray, dt: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray
) -> tuple[np.ndarray, ...]:
    y, states = sb.selective_scan(x, dt, a, b, c)
    return y, *sb.selective_scan_vjp(x, dt, a, b, c, None, states, grad)[:5]


def moved_bytes(task: Task) -> int:
    """Return the bytes that a forward and a backward must read and write: its inputs twice, output, gradients."""
    given, grad = inputs(task)
    own = sum(array.nbytes for array in given.values())
    return 3 * own + 3 * grad.nbytes - (0 if task.kind == "minGRU" else given["b"].nbytes)


# PyTorch.


def torch_sides(task: Task, compiled: bool, note: Callable[[str], None]) -> dict[str, Callable[[], Any]]:
    """Return PyTorch's calls by name; one that it cannot compile is left out, with a note."""
    if task.training:
        return _torch_training(task, compiled, note)
    torch = import_torch()
    given, grad = inputs(task)
    tensors = [torch.from_numpy(array).requires_grad_() for array in given.values()]
    incoming = torch.from_numpy(grad)

    def side(function: Callable[..., Any]) -> tuple[Any, ...]:
        y = function(*tensors)
        return y.detach(), *torch.autograd.grad(y, tensors, incoming)

    outputs = {
        name: partial(_OUTPUTS[task.kind], torch, scan) for name, scan in (("loop", _torch_loop), ("scan", torch_scan))
    }
    found: dict[str, Callable[[], Any]] = {f"torch, {name}": partial(side, out) for name, out in outputs.items()}
    if compiled:
        _compiled(task, found, lambda: partial(side, torch.compile(outputs["scan"])), note)
    return found


def _compiled(
    task: Task, found: dict[str, Callable[[], Any]], make: Callable[[], Callable[[], Any]], note: Callable[[str], None]
) -> None:  # fmt: skip
    """Add a compiled side, if PyTorch can compile it."""
    if task.kind in ("one complex factor", "training LRU"):
        note("Complex numbers: without torch.compile, which generates no code for them")
        return
    run, dynamo = make(), import_torch()._dynamo
    dynamo.reset()  # its limit of recompilations is one for all rows
    dynamo.config.fail_on_recompile_limit_hit = True  # not an uncompiled scan under a compiled one's name
    try:
        run()
        found["torch, scan, compiled"] = run
    except Exception as error:  # whatever stops its compiler: the other sides stay
        note(f"{task.kind}, T = {task.length}: torch.compile fails, {type(error).__name__}")


def _torch_training(task: Task, compiled: bool, note: Callable[[str], None]) -> dict[str, Callable[[], Any]]:
    """Return training steps, which return the gradients of their first call."""
    torch = import_torch()
    model, x, target = network(task)
    given, classes = torch.from_numpy(x), torch.from_numpy(target)

    def side(wrap: Callable[..., Any], scan: Scan) -> Callable[[], list[Any]]:
        p = {name: torch.from_numpy(a.copy()).requires_grad_() for name, a in model.state_dict().items()}
        loss = wrap(lambda: torch.nn.functional.cross_entropy(_logits(task, torch, scan, p, given), classes))
        adam, first = torch.optim.Adam(p.values(), lr=LEARNING_RATE, fused=True), list[Any]()

        def step() -> list[Any]:
            adam.zero_grad(set_to_none=True)
            loss().backward()
            adam.step()
            first[:] = first or [param.grad for param in p.values()]
            return first

        return step

    found: dict[str, Callable[[], Any]] = {
        f"torch, {name}": side(lambda call: call, scan) for name, scan in (("loop", _torch_loop), ("scan", torch_scan))
    }
    if compiled:
        _compiled(task, found, lambda: side(torch.compile, torch_scan), note)
    return found


def _torch_loop(a: Any, b: Any) -> Any:
    factors, terms = a.unbind(), b.unbind()  # the gradient of an index a[t] would be as large as a
    found = [terms[0]]
    for factor, term in zip(factors[1:], terms[1:], strict=True):
        found.append(import_torch().addcmul(term, factor, found[-1]))
    return import_torch().stack(found)


def torch_scan(a: Any, b: Any) -> Any:
    torch = import_torch()
    apart = 1
    while apart < len(b):
        b = torch.cat((b[:apart], torch.addcmul(b[apart:], a[apart:], b[:-apart])))
        a = torch.cat((a[:apart], a[apart:] * a[:-apart]))
        apart *= 2
    return b


# JAX, in another process.


def jax_sides(task: Task, compiled: bool) -> tuple[dict[str, Callable[[], object]], dict[str, tuple[np.ndarray, ...]]]:
    """Return JAX's calls by name, and what each gives; `compiled`: with a loop that is unrolled, too."""
    scans = {name: scan for name, scan in _JAX_SCANS.items() if compiled or name != "scan, unrolled"}
    import jax
    import jax.numpy as jnp

    lib = SimpleNamespace(broadcast_to=jnp.broadcast_to, exp=jnp.exp, log1p=jnp.log1p, sigmoid=jax.nn.sigmoid)
    if task.training:
        return _jax_training(task, lib, scans)
    given, grad = inputs(task)
    arrays, incoming = tuple(map(jnp.asarray, given.values())), jnp.asarray(grad)
    found: dict[str, Callable[[], object]] = {}
    results = {}
    for name, scan in scans.items():
        run = jax.jit(partial(_jax_call, partial(_OUTPUTS[task.kind], lib, scan)))
        found[f"jax, {name}"] = partial(_to_its_end, run, incoming, *arrays)
        results[f"jax, {name}"] = tuple(map(np.asarray, run(incoming, *arrays)))
    if task.kind in _FROM_JAX:
        run = jax.jit(partial(_jax_call, _FROM_JAX[task.kind]))
        found[FROM_JAX] = partial(_to_its_end, run, incoming, *arrays)
        results[FROM_JAX] = tuple(map(np.asarray, run(incoming, *arrays)))
    return found, results


def _recurrence_from_jax(a: Any, b: Any) -> Any:
    import sparsebp.jax as sj

    return sj.linear_recurrence(a, b)


def _scan_from_jax(*arrays: Any) -> Any:
    import sparsebp.jax as sj

    return sj.selective_scan(*arrays)[0]


FROM_JAX = "ours, from JAX"
_FROM_JAX: dict[str, Callable[..., Any]] = {
    "given factors": _recurrence_from_jax, "one complex factor": _recurrence_from_jax, "selective scan": _scan_from_jax,
}  # fmt: skip


def _jax_training(
    task: Task, lib: Any, scans: Mapping[str, Scan]
) -> tuple[dict[str, Callable[[], object]], dict[str, tuple[np.ndarray, ...]]]:
    import jax
    import jax.numpy as jnp

    model, x, target = network(task)
    found: dict[str, Callable[[], object]] = {}
    results = {}
    for name, scan in scans.items():
        step = jax.jit(partial(adam_step, jax.value_and_grad(partial(_jax_loss, task, lib, scan)), LEARNING_RATE),
                       donate_argnums=(0, 1, 2))  # fmt: skip
        params = {key: jnp.array(array) for key, array in model.state_dict().items()}
        found[f"jax, {name}"] = training = JaxTraining(step, params, (jnp.asarray(x), jnp.asarray(target)))
        training()
        first = training.first_gradients()
        results[f"jax, {name}"] = tuple(first[key] for key in model.state_dict())
    return found, results


def _jax_loss(task: Task, lib: Any, scan: Scan, params: Mapping[str, Any], x: Any, target: Any) -> Any:
    import jax
    import jax.numpy as jnp

    logits = jax.nn.log_softmax(_logits(task, lib, scan, params, x))
    return -jnp.mean(jnp.take_along_axis(logits, target[:, None], 1))


def _jax_call(output: Callable[..., Any], grad: Any, *arrays: Any) -> tuple[Any, ...]:
    """Return the output and the gradients; in JAX's convention complex ones are the conjugates of PyTorch's."""
    import jax

    y, back = jax.vjp(output, *arrays)
    return y, *(g.conj() for g in back(grad.conj()))


def _to_its_end(run: Callable[..., Any], *arrays: Any) -> None:
    import jax

    jax.block_until_ready(run(*arrays))


def _jax_scan(a: Any, b: Any, unroll: int = 1) -> Any:
    import jax
    import jax.numpy as jnp

    def step(h: Any, at: tuple[Any, Any]) -> tuple[Any, Any]:
        h = at[0] * h + at[1]
        return h, h

    return jax.lax.scan(step, jnp.zeros_like(b[0]), (a, b), unroll=unroll)[1]


def _jax_associative(a: Any, b: Any) -> Any:
    import jax

    def combine(first: tuple[Any, Any], then: tuple[Any, Any]) -> tuple[Any, Any]:
        return first[0] * then[0], then[0] * first[1] + then[1]

    return jax.lax.associative_scan(combine, (a, b))[1]


_JAX_SCANS: dict[str, Scan] = {
    "scan": _jax_scan, "scan, unrolled": partial(_jax_scan, unroll=8), "associative scan": _jax_associative,
}  # fmt: skip


# The measurement.


def measure_linear(run: Run) -> Iterator[Row]:
    has_jax = importlib.util.find_spec("jax") is not None
    if not has_jax:
        run.note(NO_JAX)
    for count in run.threads():
        rate = harness.copy_bandwidth(count)
        with Apart(count) if has_jax else nullcontext(None) as apart:
            for task in run.settings["tasks"]:
                row = measure_linear_row(Task(*task), run, apart)
                yield row | judge_linear(row, Task(*task), rate) | {"threads": count}


def measure_linear_row(task: Task, run: Run, apart: Apart | None) -> Row:
    """Time one recurrence by all sides, after comparing outputs and gradients."""
    call, found = ours(task)
    difference = 0.0
    sides = torch_sides(task, run.settings["compiled"], run.note)
    results = {name: tuple(np.asarray(array) for array in side()) for name, side in sides.items()}
    rounds = dict(run.rounds)
    warm = rounds.pop("warmup", 2)
    timers = {name: timing.timer(side, warm) for name, side in {"ours": call, **sides}.items()}
    if apart is not None:
        theirs, more = apart.build(jax_sides, task, run.settings["compiled"])
        timers, results = timers | theirs, results | more
    for name, wanted in results.items():
        for got, want in zip(found, wanted, strict=True):
            scale = max(float(np.abs(want).max()), 0.0 if task.training else 1.0)
            difference = max(difference, float(np.abs(got - want).max()) / scale)
        refuse_difference(f"{task.kind}, T = {task.length}: an output or a gradient", name, difference)
    timings = timing.in_turn(timers, **rounds)
    row: Row = {"kind": task.kind, "length": task.length, "batch": task.batch, "hidden": task.hidden}
    row |= {"states": task.states, "difference": difference, "ours": timings["ours"].to_dict()}
    best: dict[str, str] = {}
    for peer in PEERS:
        own = [name for name in timings if name.startswith(peer)]
        if own:
            best[peer] = min(own, key=lambda name: timings[name].median)
            row |= {peer: timings[best[peer]].to_dict(), f"{peer}_form": best[peer].partition(", ")[2]}
            row[f"{peer}_ratio"] = timing.ratio(timings[best[peer]], timings["ours"])
    if FROM_JAX in timings:
        row |= {"ours_jax": timings[FROM_JAX].to_dict()}
        row["ours_jax_ratio"] = timing.ratio(timings[best["jax"]], timings[FROM_JAX])
    fastest = min(best, key=lambda peer: timings[best[peer]].median)
    return row | {"best": PEERS[fastest], "best_ratio": row[f"{fastest}_ratio"]}


def judge_linear(row: Mapping[str, Any], task: Task, rate: float) -> Row:
    """Return the target, whether it is met, and our time over that of copying the bytes that must move."""
    over_copy = None if task.arithmetic else row["ours"]["median"] * rate / moved_bytes(task)
    times = row["best_ratio"]["median"]
    missed = [f"{times:.2g}×"] if times < TARGETS[task.kind] else []
    missed += [f"{over_copy:.2g} copies"] if over_copy is not None and over_copy > MOVED else []
    target = f"≥ {TARGETS[task.kind]:g}×" + ("" if task.arithmetic else f", ≤ {MOVED:g} copies")
    return {"over_copy": over_copy, "target": target, "met": harness.outcome(missed)}


LINEAR = Benchmark(
    name="linear",
    title="Linear recurrences, forward and all gradients, and training steps of their layers, on the CPU, float32 and "
    "complex64, compared with PyTorch and JAX",
    leaves_out="compiling by torch.compile and jax.jit, once per shape; except from training steps, the minGRU's "
    "projection, which all sides share",
    settings={"targets": {"peer": TARGETS, "copies": MOVED}, "dtype": "float32"},
    sizes={"tasks": TASKS, "compiled": True},
    quick={"tasks": QUICK, "compiled": False},
    rounds={"rounds": 11, "least_rounds": 5, "budget": 4.0},
    measure=measure_linear,
    columns=columns(
        words={
            "kind": "recurrence", "best": "best peer", "torch_form": "PyTorch's fastest", "jax_form": "JAX's fastest",
        },
        numbers={"hidden": "H", "states": "states"},
        seconds={"torch": "PyTorch", "jax": "JAX", "ours_jax": "sparsebp from JAX"},
        times={"best_ratio": "over the best peer", "torch_ratio": "over PyTorch", "jax_ratio": "over JAX",
               "ours_jax_ratio": "from JAX, over JAX"},
        formats={"{:.2f}": {"over_copy": "time over a copy's"}},
    ),
    short=("kind", "length", "batch", "hidden", "ours", "best_ratio", "best", "over_copy", "met"),
    in_short=lambda row: row["threads"] == 1,
    overview=Overview(task="A linear recurrence and its gradients", peer="PyTorch or JAX, the faster",
                      ratio="best_ratio", label="{kind}, batch {batch}, T = {length}",
                      page="scans.md#linear-recurrences"),
    picture=harness.bars(
        "{kind}, B = {batch}, T = {length}, H = {hidden}", {"torch": "PyTorch", "jax": "JAX", "ours": "sparsebp"},
        "ms, median", (harness.TORCH, harness.JAX, harness.OURS), unit=1e3, log=True,
    ),
)  # fmt: skip
