"""Generating transposed Jacobians: our analytic ones against PyTorch's automatic ones.

``python -m benchmarks jacobian``. Two peers: one ``autograd.grad`` an output column, as the paper does it, and
``vmap(jacrev(…))``, PyTorch's own way to a dense Jacobian. All sides include the forward pass that they need.

The rows of the paper's own table (BPPSA Table 1: the first VGG-11 operators on one 32×32 image) begin after the forward
pass, on every side. Ours: ``layer.jacobian_t(saved)``, all that a user pays whose forward ran anyway; patterns are
cached. The paper's peer is what its own program does: for every output column a one-hot gradient, one ``autograd.grad``
through the recorded forward, and at the end one stack of the columns into the dense matrix. Dense matrices of 65 536
columns take many seconds and, for ReLU, more memory than most machines have; so a random sample of columns is timed and
multiplied. ``torch.func.jacrev`` has to run the forward itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from benchmarks.tools import pictures
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run, refuse_difference, with_threads
from benchmarks.tools.peers import import_torch
from sparsebp.core import tables, timing
from sparsebp.core.tables import Column

TABLE_1 = {"conv": 8.3e3, "ReLU": 1.2e6, "max-pool": 1.5e5}
"""Speed-up over autograd column by column that the paper reports (Table 1, last column)."""

SAMPLE = 256
"""Columns of the operators of Table 1 that either side of PyTorch is timed on."""

NOTES = (
    "conv, ReLU and max-pool are the first VGG-11 operators on one 32×32 image (BPPSA Table 1), timed after the "
    "forward pass: ours is jacobian_t of what the forward saved; autograd takes a one-hot gradient, one autograd.grad"
    " a column and a stack of the columns.",
    f"Both sides of PyTorch are timed on {SAMPLE} random columns, multiplied to all: the dense matrix takes 0.75 GiB "
    "for conv, 16 GiB for ReLU, 4 GiB for max-pool. jacrev runs the forward itself.",
)


@dataclass(frozen=True)
class Operator:
    """One operator on all sides, with the same parameters.

    Attributes
    ----------
    name
        As the table shows it.
    ours
        Returns the transposed Jacobian (for a sequence: a list of them).
    columns, jacrev
        PyTorch's two ways.
    difference
        Returns how far ours lies from PyTorch's, at most.
    times
        How many times what is timed of PyTorch the whole would take.
    more
        What else the row says.
    """

    name: str
    ours: Callable[[], Any]
    columns: Callable[[], Any]
    jacrev: Callable[[], Any]
    difference: Callable[[Any], float]
    times: float = 1.0
    more: Mapping[str, Any] = field(default_factory=dict)


def measure(run: Run) -> Iterator[Row]:
    """Measure every operator, those of Table 1 last."""
    for note in NOTES:
        run.note(note)
    for count in run.threads():
        for operator in chain(operators(run.settings["batch"], run.quick), table_1(run.quick)):
            yield measure_row(operator, run.rounds) | {"threads": count}


def measure_row(operator: Operator, rounds: Mapping[str, Any]) -> Row:
    """Time one operator against both peers, after comparing the values."""
    jacobian = operator.ours()
    difference = operator.difference(jacobian)
    refuse_difference(f"The transposed Jacobian of {operator.name}", "PyTorch", difference)
    first = jacobian[0] if isinstance(jacobian, (list, tuple)) else jacobian
    sides = {"ours": operator.ours, "columns": operator.columns, "jacrev": operator.jacrev}
    timings = timing.measure(sides, **rounds)
    for name in ("columns", "jacrev"):
        timings[name] = timing.Timing(tuple(seconds * operator.times for seconds in timings[name].seconds))
    row: Row = {
        "name": operator.name,
        "shape": f"{first.shape[0]} × {first.shape[1]}",
        "sparsity": float(first.pattern.sparsity),
        "difference": difference,
        **operator.more,
        **timing.side_by_side(timings),
    }
    if "target" in row:
        row["met"] = "met" if row["columns_ratio"]["median"] >= row["target"] else "missed"
    return row


def operators(batch: int, quick: bool) -> Iterator[Operator]:
    """Yield the operators, smallest first."""
    n = 8 if quick else 1024
    rng = np.random.default_rng(0)
    for name in ("ReLU", "Tanh", "Sigmoid"):
        yield _feed_forward(name, (), rng.standard_normal((batch, n), dtype=np.float32))
    yield _feed_forward("Linear", (n, n // 4), rng.standard_normal((batch, n), dtype=np.float32))
    for name, input_size in (("RNN", 1), ("GRU", 38)):
        yield _cell(name, input_size, 20, batch, rng)
        yield _sequence(name, input_size, 20, 3 if quick else 100, batch, rng)


def _feed_forward(name: str, arguments: tuple[int, ...], x: np.ndarray) -> Operator:
    from sparsebp import nn

    torch = import_torch()
    layer, twin = getattr(nn, name)(*arguments), getattr(torch.nn, name)(*arguments)
    _load(twin, layer)

    def ours() -> Any:
        _, saved = layer.forward(x)
        return layer.jacobian_t(saved)

    title = f"{name}({', '.join(map(str, arguments))})" if arguments else name
    return _in_batches(title, ours, twin, torch.from_numpy(x), lambda j: _dense(j, len(x)), (twin, ()))


def _cell(name: str, input_size: int, hidden: int, batch: int, rng: np.random.Generator) -> Operator:
    from sparsebp import nn

    torch = import_torch()
    layer, twin = (
        getattr(nn, name + "Cell")(input_size, hidden, rng=0),
        getattr(torch.nn, name + "Cell")(input_size, hidden),
    )
    _load(twin, layer)
    x = rng.standard_normal((batch, input_size), dtype=np.float32)
    h = np.tanh(rng.standard_normal((batch, hidden), dtype=np.float32))
    x_torch = torch.from_numpy(x)

    def ours() -> Any:
        _, saved = layer.forward(x, h)
        return layer.hidden_jacobian_t(saved)

    return _in_batches(
        f"{name}Cell({input_size}, {hidden}), hidden state",
        ours,
        lambda state: twin(x_torch, state),
        torch.from_numpy(h),
        lambda j: _dense(j, batch),
        (lambda state, one: twin(one, state), (x_torch,)),
    )


def _sequence(name: str, input_size: int, hidden: int, length: int, batch: int, rng: np.random.Generator) -> Operator:
    """Every hidden Jacobian of a sequence: the scan's elements. PyTorch takes all steps as one batch."""
    from sparsebp import nn

    torch = import_torch()
    layer, twin = getattr(nn, name)(input_size, hidden, rng=0), getattr(torch.nn, name + "Cell")(input_size, hidden)
    twin.load_state_dict({key[: -len("_l0")]: torch.from_numpy(np.array(a)) for key, a in layer.state_dict().items()})
    x = rng.standard_normal((length, batch, input_size), dtype=np.float32)
    y = layer(x)
    previous = np.concatenate([np.zeros((1, batch, hidden), np.float32), y[:-1]]).reshape(length * batch, hidden)
    x_torch = torch.from_numpy(x.reshape(length * batch, input_size))

    def ours() -> Any:
        _, saved = layer.forward(x)
        return layer.hidden_jacobians_t(saved)

    return _in_batches(
        f"{name}({input_size}, {hidden}), all {length} steps",
        ours,
        lambda state: twin(x_torch, state),
        torch.from_numpy(previous),
        lambda js: np.concatenate([_dense(j, batch) for j in js]),
        (lambda state, one: twin(one, state), (x_torch,)),
    )


def _load(twin: Any, layer: Any) -> None:
    torch = import_torch()
    twin.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in layer.state_dict().items()})


def _dense(jacobian: Any, batch: int) -> np.ndarray:
    return np.stack([np.asarray(jacobian.to_dense(sample=s)) for s in range(batch)])


def _in_batches(
    name: str, ours: Callable[[], Any], function: Callable[[Any], Any], x: Any, to_dense: Callable[[Any], np.ndarray],
    per_sample: tuple[Callable[..., Any], tuple[Any, ...]],
) -> Operator:  # fmt: skip
    """Return an operator on a batch, forward passes included.

    Parameters
    ----------
    name, ours
        See `Operator`; ours runs the forward pass too.
    function, x
        PyTorch's function of one batch, ``(N, n_in) -> (N, n_out)``, and its input.
    to_dense
        Returns ours as (N, n_in, n_out).
    per_sample
        PyTorch's function of one sample and its other arguments, and those arguments.
    """
    torch = import_torch()

    def columns() -> Any:
        """One ``autograd.grad`` for each output, the batch together: (n_out, N, n_in)."""
        at = x.detach().requires_grad_(True)
        y = function(at)
        return torch.stack([torch.autograd.grad(y[:, j].sum(), at, retain_graph=True)[0] for j in range(y.shape[1])])

    def jacrev() -> Any:
        """``vmap(jacrev(f))`` over the samples: (N, n_out, n_in)."""
        single, others = per_sample
        with torch.no_grad():
            return torch.func.vmap(torch.func.jacrev(single))(x, *others)

    def difference(jacobian: Any) -> float:
        return float(np.abs(to_dense(jacobian) - np.swapaxes(jacrev().numpy(), 1, 2)).max())

    return Operator(name, ours, columns, jacrev, difference)


def table_1(quick: bool) -> Iterator[Operator]:
    """Yield the operators of the paper's table, after their forward; with `quick`, fewer channels on an 8×8 image."""
    from sparsebp import nn

    torch = import_torch()
    channels, size = (4, 8) if quick else (64, 32)
    layers = {
        "conv": (
            f"Conv2d(3, {channels}, 3, padding=1)",
            nn.Conv2d(3, channels, 3, padding=1, rng=0),
            torch.nn.Conv2d(3, channels, 3, padding=1),
        ),
        "ReLU": (f"ReLU, {channels}×{size}×{size}", nn.ReLU(), torch.nn.ReLU()),
        "max-pool": (f"MaxPool2d(2), {channels}×{size}×{size}", nn.MaxPool2d(2), torch.nn.MaxPool2d(2)),
    }
    value = np.random.default_rng(0).standard_normal((1, 3, size, size), dtype=np.float32)
    for name, (title, layer, twin) in layers.items():
        _load(twin, layer)
        x = torch.from_numpy(value).clone().requires_grad_(True)
        value, saved = layer.forward(value)
        yield _after_forward(title, partial(layer.jacobian_t, saved), twin, x, TABLE_1[name])


def _after_forward(
    name: str, ours: Callable[[], Any], function: Callable[[Any], Any], x: Any, target: float
) -> Operator:
    torch = import_torch()
    y = function(x)
    chosen = np.random.default_rng(0).permutation(y.numel())[:SAMPLE]

    def columns() -> Any:
        """The columns, (1, n_in, columns), as the paper's own program makes them."""
        made = []
        for column in chosen.tolist():
            gradient = torch.zeros(1, y.numel())
            gradient[:, column] = 1
            made.append(torch.autograd.grad(y, x, gradient.view(y.shape), retain_graph=True)[0].view(1, -1))
        return torch.stack(made, dim=2)

    def jacrev() -> Any:
        """These outputs' rows of the Jacobian, (columns, 1, …), by one vectorised vjp."""
        outputs = torch.from_numpy(chosen)
        with torch.no_grad():
            return torch.func.jacrev(lambda at: function(at).reshape(-1)[outputs])(x.detach())

    def difference(jacobian: Any) -> float:
        return float(np.abs(jacobian.to_scipy().tocsc()[:, chosen].toarray() - columns()[0].numpy()).max())

    more = {"timed": len(chosen), "dense_bytes": 4 * x.numel() * y.numel(), "target": target}
    return Operator(name, ours, columns, jacrev, difference, y.numel() / len(chosen), more)


def picture(result: Result) -> Any:
    """Draw how many times faster ours are than either peer, on a logarithmic scale."""
    threads, rows = with_threads(result, min)
    peers = (("columns", "#9a3412", "autograd, column by column"), ("jacrev", "#1e40af", "vmap(jacrev)"))
    bars = [
        (f"over {words}", colour, [row[f"{peer}_ratio"]["median"] for row in rows]) for peer, colour, words in peers
    ]
    drawing, ax = pictures.bar_chart([row["name"] for row in rows], bars, f"times faster (median, {threads})", each=0.5)
    ax.set_xscale("log")
    ax.axvline(1, color="black", linewidth=0.8)
    pictures.legend_below(drawing)
    return drawing


BENCHMARK = Benchmark(
    name="jacobian",
    title="Transposed Jacobians of {batch} samples (conv, max-pool and the ReLU before it: one), float32",
    leaves_out="of conv, ReLU 64×32×32 and max-pool the forward pass, on both sides; else nothing",
    settings={"dtype": "float32"},
    sizes={"batch": 16},
    quick={"batch": 2},
    rounds={"rounds": 11, "budget": 8.0, "least_rounds": 3},
    measure=measure,
    columns=(
        Column("operator", "name", number=False),
        Column("inputs × outputs", "shape", number=False),
        Column("sparsity", "sparsity", "{:.4f}".format),
        Column("threads", "threads"),
        Column("sparsebp", "ours", tables.seconds),
        Column("autograd, column by column", "columns", tables.seconds),
        Column("over autograd", "columns_ratio", tables.times),
        Column("vmap(jacrev)", "jacrev", tables.seconds),
        Column("over jacrev", "jacrev_ratio", tables.times),
        Column("paper, over autograd", "target", "≥ {:.2g}×".format),
        Column("outcome", "met", number=False),
    ),
    tables={
        "Time": ("name", "shape", "sparsity", "threads", "ours", "columns", "jacrev"),
        "Ratios": ("name", "shape", "threads", "columns_ratio", "jacrev_ratio", "target", "met"),
    },
    short=("name", "shape", "threads", "ours", "columns_ratio", "jacrev_ratio", "target", "met"),
    in_short=lambda row: row.get("target") is not None,  # those of BPPSA's Table 1
    picture=picture,
)
