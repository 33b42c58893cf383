"""A sparse product in a training step, C = A @ B and the gradients at both, against PyTorch and JAX.

``python -m benchmarks sparse-grad``. Structures are those of `spgemm-sweep`: of each family, of some, the one whose
multiplications are nearest to 10⁵. The loss weighs C's entries by the row and the column, so that every library can
form it. A row is a product alone, or with the loss and its gradients.

PyTorch multiplies COO and CSR tensors; of COO alone it has gradients. JAX has BCOO, compiled by `jax.jit`: times a
dense B, and without gradients times another BCOO, where all pairs of entries fit in memory, which that product forms.
The fastest of each library counts. Ours is `sparsebp.torch.plan_product`, planned once, outside of the time that is
compared.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Row, Run, columns, import_torch, refuse_difference
from benchmarks.processes import Apart
from benchmarks.spgemm import FAMILIES, drawn_pair
from benchmarks.workloads import Pair
from sparsebp.core import timing
from sparsebp.patterns import SparsityPattern

TARGET = 30.0
"""Times faster than PyTorch."""
DRAWN, PRODUCTS = 12, 100_000
"""Structures of a family, of which one is measured: that of about so many multiplications."""
MOST_PAIRS = 300_000
"""Pairs of an entry of A and one of B, at most, of which JAX forms all."""
PARTS = ("product", "product and gradients")
PEERS = {"torch": "PyTorch", "jax": "JAX"}
NO_JAX = "JAX is not installed (pip install 'sparsebp[jax]'): rows go without it"

Sides = dict[str, Callable[[], Any]]


class Task(NamedTuple):
    """A product, by how it is drawn, and whether gradients are computed."""

    family: str
    largest: int
    gradients: bool

    def pair(self) -> Pair:
        """Draw the matrices, with values."""
        number, draw = list(FAMILIES).index(self.family), FAMILIES[self.family]
        pairs = [drawn_pair(self.family, draw, (number, i), self.largest) for i in range(DRAWN)]
        found = min(pairs, key=lambda pair: abs(np.log(multiplications(pair) / PRODUCTS)))
        rng = np.random.default_rng(0)
        for matrix in (found.a, found.b):
            matrix.data = rng.standard_normal(matrix.nnz, dtype=np.float32)
        return found


def multiplications(pair: Pair) -> int:
    return int(np.diff(pair.b.indptr)[pair.a.indices].sum())


def weights(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of C's rows and of its columns in the loss."""
    rng = np.random.default_rng(1)
    u, v = (rng.standard_normal(n, dtype=np.float32) for n in (pair.a.shape[0], pair.b.shape[1]))
    return u, v


def measure_sparse_grad(run: Run) -> Iterator[Row]:
    has_jax = importlib.util.find_spec("jax") is not None
    if not has_jax:
        run.note(NO_JAX)
    for count in run.threads():
        with Apart(count) if has_jax else nullcontext(None) as apart:
            for family in [*FAMILIES][: run.settings["families"]]:
                for gradients in (False, True):
                    row = measure_product(Task(family, run.settings["largest"], gradients), run, apart)
                    yield row | harness.reaches(row, "torch_ratio", TARGET, " PyTorch") | {"threads": count}


def measure_product(task: Task, run: Run, apart: Apart | None) -> Row:
    """Time one product by all sides, after comparing what they give."""
    pair = task.pair()
    call, seconds = ours(task, pair)
    sides, results = torch_sides(task, pair)
    rounds = dict(run.rounds)
    warm = rounds.pop("warmup", 2)
    timers = {name: timing.timer(side, warm) for name, side in {"ours": call, **sides}.items()}
    if apart is not None:
        theirs, more = apart.build(jax_sides, task)
        timers, results = timers | theirs, results | more
    found = answers(call())
    for name, wanted in results.items():
        for got, want in zip(found, wanted, strict=True):
            difference = float(np.abs(got - want).max(initial=0) / max(np.abs(want).max(initial=0), 1))
            refuse_difference(f"{task.family}: the loss or a gradient", name, difference)
    timings = timing.in_turn(timers, **rounds)
    row: Row = {
        "family": task.family, "part": PARTS[task.gradients], "rows": pair.a.shape[0], "entries": pair.a.nnz,
        "products": multiplications(pair), "plan": seconds, "ours": timings["ours"].to_dict(),
    }  # fmt: skip
    for peer in PEERS:
        own = [name for name in timings if name.startswith(peer)]
        if own:
            fastest = min(own, key=lambda name: timings[name].median)
            row |= {peer: timings[fastest].to_dict(), f"{peer}_form": fastest.partition(", ")[2]}
            row[f"{peer}_ratio"] = timing.ratio(timings[fastest], timings["ours"])
    return row


def answers(found: Any) -> tuple[np.ndarray, ...]:
    """Return the loss, and the gradients if there are any, as arrays."""
    return tuple(np.asarray(value) for value in (found if isinstance(found, tuple) else (found,)))


# Each library's call returns the loss, or the loss and the gradients at the values of A and of B.


def ours(task: Task, pair: Pair) -> tuple[Callable[[], Any], float]:
    """Return the call, and the seconds of the plan."""
    torch = import_torch()
    import sparsebp.torch as st

    start = time.perf_counter()
    plan = st.plan_product(SparsityPattern.from_scipy(pair.a), SparsityPattern.from_scipy(pair.b))
    seconds = time.perf_counter() - start
    (u, v), c = weights(pair), plan.pattern
    weight = torch.from_numpy(u[c.row_of_entry] * v[c.indices])
    a, b = (torch.from_numpy(m.data.copy()).requires_grad_(task.gradients) for m in (pair.a, pair.b))

    def call() -> Any:
        loss = (plan(a, b) * weight).sum()
        return (loss.detach(), *torch.autograd.grad(loss, (a, b))) if task.gradients else loss

    return call, seconds


def torch_sides(task: Task, pair: Pair) -> tuple[Sides, dict[str, tuple[np.ndarray, ...]]]:
    """Return PyTorch's calls by name, and what each gives."""
    torch = import_torch()
    u, v = map(torch.from_numpy, weights(pair))

    def coo(matrix: Any) -> Any:
        rows, columns = matrix.tocoo().coords
        indices = np.stack([rows, columns]).astype(np.int64)
        return torch.sparse_coo_tensor(indices, matrix.data, matrix.shape, is_coalesced=True, check_invariants=False)

    def csr(matrix: Any) -> Any:
        parts = (torch.from_numpy(part.copy()) for part in (matrix.indptr, matrix.indices, matrix.data))
        return torch.sparse_csr_tensor(*parts, matrix.shape, check_invariants=False)

    def by_coo(a: Any, b: Any) -> Any:
        c = torch.sparse.mm(a, b).coalesce()
        rows, columns = c.indices()
        loss = (c.values() * (u[rows] * v[columns])).sum()
        if not task.gradients:
            return loss
        return (loss.detach(), *(g.coalesce() for g in torch.autograd.grad(loss, (a, b))))

    def by_csr(a: Any, b: Any) -> Any:
        c = torch.sparse.mm(a, b)
        return (c.values() * torch.repeat_interleave(u, c.crow_indices().diff()) * v[c.col_indices()]).sum()

    sides: Sides = {"torch, COO": partial(by_coo, *(coo(m).requires_grad_(task.gradients) for m in (pair.a, pair.b)))}
    if not task.gradients:
        sides["torch, CSR"] = partial(by_csr, csr(pair.a), csr(pair.b))
    results = {name: side() for name, side in sides.items()}
    if task.gradients:
        loss, *grads = results["torch, COO"]
        results["torch, COO"] = loss, *map(_placed, grads, (pair.a, pair.b))
    return sides, {name: answers(found) for name, found in results.items()}


def _placed(gradient: Any, matrix: Any) -> np.ndarray:
    """Return PyTorch's gradient on the matrix's entries: it leaves those out that meet nothing."""
    rows, columns = gradient.indices().numpy()
    here, width = matrix.tocoo().coords, matrix.shape[1]
    found = np.zeros(matrix.nnz, np.float32)
    found[np.searchsorted(here[0].astype(np.int64) * width + here[1], rows * width + columns)] = gradient.values()
    return found


def jax_sides(task: Task) -> tuple[Sides, dict[str, tuple[np.ndarray, ...]]]:
    """Return JAX's calls by name, and what each gives; in another process."""
    import jax
    from jax import numpy as jnp
    from jax.experimental.sparse import BCOO

    pair = task.pair()
    u, v = map(jnp.asarray, weights(pair))
    places = [jnp.asarray(np.stack(m.tocoo().coords, 1).astype(np.int32)) for m in (pair.a, pair.b)]

    def operands(a: Any, b: Any, places: Any) -> list[Any]:
        return [
            BCOO((data, at), shape=matrix.shape, indices_sorted=True, unique_indices=True)
            for data, at, matrix in zip((a, b), places, (pair.a, pair.b), strict=True)
        ]

    def by_sparse(a: Any, b: Any, places: Any, u: Any, v: Any) -> Any:
        left, right = operands(a, b, places)
        c = left @ right
        rows, columns = c.indices.T
        return (c.data * u[rows] * v[columns]).sum()  # entries behind the last are zero

    def by_dense(a: Any, b: Any, places: Any, u: Any, v: Any) -> Any:
        left, right = operands(a, b, places)
        return u @ (left @ right.todense()) @ v

    forms = {"jax, BCOO times dense": by_dense}
    if not task.gradients and pair.a.nnz * pair.b.nnz <= MOST_PAIRS:
        forms["jax, BCOO times BCOO"] = by_sparse
    given = jnp.asarray(pair.a.data), jnp.asarray(pair.b.data), places, u, v
    sides: Sides = {}
    for name, form in forms.items():
        run = jax.jit(jax.value_and_grad(form, (0, 1)) if task.gradients else form)
        sides[name] = partial(_flat, run, *given)
    return sides, {name: answers(side()) for name, side in sides.items()}


def _flat(run: Callable[..., Any], *values: Any) -> Any:
    import jax

    found = jax.block_until_ready(run(*values))
    return (found[0], *found[1]) if isinstance(found, tuple) else found


SPARSE_GRAD = Benchmark(
    name="sparse-grad",
    title="A product of sparse matrices with gradients at both, float32, CPU, compared with PyTorch and JAX",
    leaves_out="our symbolic phase (column 'plan once') and compiling by jax.jit",
    settings={"dtype": "float32", "target": TARGET},
    sizes={"largest": 4000, "families": len(FAMILIES)},
    quick={"largest": 40, "families": 3},
    rounds={"rounds": 11, "least_rounds": 5, "budget": 4.0},
    measure=measure_sparse_grad,
    columns=columns(
        words={
            "family": "structure", "part": "what is computed", "torch_form": "PyTorch's fastest",
            "jax_form": "JAX's fastest",
        },
        numbers={"rows": "rows of A", "entries": "entries of A"},
        seconds={"plan": "plan once", "torch": "PyTorch", "jax": "JAX"},
        counts={"products": "multiplications"},
        times={"torch_ratio": "over PyTorch", "jax_ratio": "over JAX"},
    ),
    short=("family", "part", "products", "ours", "torch_ratio", "jax_ratio", "met"),
    in_short=lambda row: row["threads"] == 1 and row["part"] == PARTS[1],
    picture=harness.bars("{family}", {"torch_ratio": "over PyTorch", "jax_ratio": "over JAX"}, harness.SPEED_UP,
                         (harness.TORCH, harness.JAX), log=True, line=1.0),
)  # fmt: skip
