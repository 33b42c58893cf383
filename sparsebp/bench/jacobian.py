"""Generating transposed Jacobians: our analytic ones against PyTorch's automatic ones.

``sparsebp bench jacobian``. Two peers: one ``autograd.grad`` an output column, as the paper does it, and
``vmap(jacrev(…))``, PyTorch's own way to a dense Jacobian. All sides include the forward pass that they need. The rows
of the paper's own table (BPPSA Table 1, last column) are those of `sparsebp.bench.tools.generation`, without the
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparsebp.bench.tools import generation, report, timing
from sparsebp.bench.tools.report import Column
from sparsebp.bench.tools.workload import import_torch
from sparsebp.core.errors import SparseBPError

BATCH = 16

COLUMNS = (
    Column("operator", "name", number=False),
    Column("inputs × outputs", "shape", number=False),
    Column("sparsity", "sparsity", lambda value: f"{value:.4f}"),
    Column("threads", "threads"),
    Column("sparsebp", "ours", report.seconds),
    Column("autograd, column by column", "columns", report.seconds),
    Column("over autograd", "columns_ratio", report.times),
    Column("vmap(jacrev)", "jacrev", report.seconds),
    Column("over jacrev", "jacrev_ratio", report.times),
    Column("paper, over autograd", "target", lambda value: f"≥ {value:.2g}×"),
    Column("outcome", "met", number=False),
)
TABLES = {
    "Time": ("name", "shape", "sparsity", "threads", "ours", "columns", "jacrev"),
    "Ratios": ("name", "shape", "threads", "columns_ratio", "jacrev_ratio", "target", "met"),
}
SHORT = ("name", "shape", "threads", "ours", "columns_ratio", "jacrev_ratio", "target", "met")
"""Columns of the README's table."""


def in_short(row: Mapping[str, Any]) -> bool:
    """Whether the README's table has the row: those of BPPSA's Table 1."""
    return row.get("target") is not None


@dataclass(frozen=True)
class Operator:
    """One operator on both sides, with the same parameters.

    Attributes
    ----------
    name
        As the table shows it.
    ours
        Runs the forward pass and returns the transposed Jacobian (for a sequence: a list of them).
    function
        PyTorch's function of one batch, ``(N, n_in) -> (N, n_out)``.
    x
        PyTorch's input (N, n_in).
    to_dense
        Returns ours as (N, n_in, n_out).
    per_sample
        PyTorch's function of one sample and its other arguments, and those arguments.
    """

    name: str
    ours: Callable[[], Any]
    function: Callable[[Any], Any]
    x: Any
    to_dense: Callable[[Any], np.ndarray]
    per_sample: tuple[Callable[..., Any], tuple[Any, ...]]


def run(
    out: Path | None = None,
    quick: bool = False,
    threads: tuple[int, ...] = (1, 2),
    echo: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure, print the table, write ``jacobian.json`` and ``jacobian.png``; return the result.

    Parameters are those of `sparsebp.bench.recurrent.run`.
    """
    rounds = (
        {"rounds": 2, "least_rounds": 2, "warmup": 1} if quick else {"rounds": 11, "budget": 8.0, "least_rounds": 3}
    )
    batch = 2 if quick else BATCH
    result = report.start(
        "jacobian",
        f"Transposed Jacobians of {batch} samples (conv, max-pool and the ReLU before it: one), float32",
        quick=quick,
        settings={"batch": batch, "threads": threads, "dtype": "float32"},
        leaves_out="of conv, ReLU 64×32×32 and max-pool the forward pass, on both sides; else nothing",
    )
    result["notes"] += generation.NOTES
    for count in timing.thread_counts_here(threads, result["notes"].append):
        with timing.threads(count):
            for operator in operators(batch, quick):
                row = measure_row(operator, rounds) | {"threads": count}
                result["rows"].append(row)
                echo(
                    f"{row['name']}, threads={count}: {report.times(row['columns_ratio'])} over columns, "
                    f"{report.times(row['jacrev_ratio'])} over jacrev"
                )
            for table_1 in generation.generations(quick):
                row = generation.measure_row(table_1, rounds) | {"threads": count}
                result["rows"].append(row)
                echo(
                    f"{row['name']}, threads={count}: {report.times(row['columns_ratio'])} over columns "
                    f"({row['met']}), {report.times(row['jacrev_ratio'])} over jacrev"
                )
    report.finish(result, COLUMNS, picture, out, echo)
    return result


def measure_row(operator: Operator, rounds: Mapping[str, Any]) -> dict[str, Any]:
    """Time one operator against both peers, after comparing the values."""
    jacobian = operator.ours()
    expected = np.swapaxes(_jacrev(operator).numpy(), 1, 2)
    ours = operator.to_dense(jacobian)
    difference = float(np.abs(ours - expected).max())
    if not difference < 1e-4:
        raise SparseBPError(
            f"The transposed Jacobian of {operator.name} differs from PyTorch's",
            expected="a difference below 1e-4",
            got=f"{difference:.3g}",
            remedy="Do not trust this build: please report it with the output of sparsebp info",
        )
    first = jacobian[0] if isinstance(jacobian, (list, tuple)) else jacobian
    timings = timing.measure(
        {
            "ours": timing.Call(lambda _: operator.ours()),
            "columns": timing.Call(lambda _: _column_by_column(operator)),
            "jacrev": timing.Call(lambda _: _jacrev(operator)),
        },
        **rounds,
    )
    row: dict[str, Any] = {
        "name": operator.name,
        "shape": f"{first.shape[0]} × {first.shape[1]}",
        "sparsity": float(first.pattern.sparsity),
        "difference": difference,
    }
    for name, measured in timings.items():
        row[name] = measured.to_dict()
    for name in ("columns", "jacrev"):
        row[f"{name}_ratio"] = timing.ratio(timings[name], timings["ours"])
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
    return Operator(title, ours, twin, torch.from_numpy(x), lambda j: _dense(j, len(x)), (twin, ()))


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

    return Operator(
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

    return Operator(
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


def _column_by_column(operator: Operator) -> Any:
    """One ``autograd.grad`` for each output, the batch together: (n_out, N, n_in)."""
    torch = import_torch()
    x = operator.x.detach().requires_grad_(True)
    y = operator.function(x)
    return torch.stack(
        [torch.autograd.grad(y[:, j].sum(), x, retain_graph=True)[0] for j in range(y.shape[1])]
    )  # fmt: skip


def _jacrev(operator: Operator) -> Any:
    """``vmap(jacrev(f))`` over the samples: (N, n_out, n_in)."""
    torch = import_torch()
    function, others = operator.per_sample
    with torch.no_grad():
        return torch.func.vmap(torch.func.jacrev(function))(operator.x, *others)


def picture(result: Mapping[str, Any]) -> Any:
    """Draw how many times faster ours are than either peer, on a logarithmic scale."""
    fewest = min(row["threads"] for row in result["rows"])
    rows = [row for row in result["rows"] if row["threads"] == fewest]
    drawing, axes = report.figure(1, 1, width=8.0, height=0.5 * len(rows) + 1.4)
    ax = axes[0, 0]
    for peer, offset, color, label in (
        ("columns", -0.2, "#9a3412", "autograd, column by column"),
        ("jacrev", 0.2, "#1e40af", "vmap(jacrev)"),
    ):
        ax.barh(
            [place + offset for place in range(len(rows))],
            [row[f"{peer}_ratio"]["median"] for row in rows],
            0.38,
            color=color,
            label=f"over {label}",
        )
    ax.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    ax.set_xscale("log")
    ax.axvline(1, color="black", linewidth=0.8)
    ax.invert_yaxis()
    ax.set_xlabel(f"times faster (median, {fewest} thread{'s' if fewest > 1 else ''})")
    drawing.legend(fontsize=8, loc="outside lower center", ncols=2)
    ax.spines[["top", "right"]].set_visible(False)
    return drawing
