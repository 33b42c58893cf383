"""Table 1 of BPPSA: generating the transposed Jacobians of the first VGG-11 operators on one 32×32 image.

What is timed, on every side, begins after the forward pass. Ours: ``layer.jacobian_t(saved)``, all that a user pays
whose forward ran anyway; patterns are cached. The paper's peer is what its own program does: for every output column a
one-hot gradient, one ``autograd.grad`` through the recorded forward, and at the end one stack of the columns into the
dense matrix. Dense matrices of 65 536 columns take many seconds and, for ReLU, more memory than most machines have; so
a random sample of columns is timed and multiplied. ``torch.func.jacrev`` has to run the forward itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsebp.bench.tools import timing
from sparsebp.bench.tools.workload import import_torch
from sparsebp.core.errors import SparseBPError

TARGETS = {"conv": 8.3e3, "ReLU": 1.2e6, "max-pool": 1.5e5}
"""Speed-up over autograd column by column that the paper reports (Table 1, last column)."""

SAMPLE = 256
"""Columns that either side of PyTorch is timed on."""

NOTES = (
    "conv, ReLU and max-pool are the first VGG-11 operators on one 32×32 image (BPPSA Table 1), timed after the "
    "forward pass: ours is jacobian_t of what the forward saved; autograd takes a one-hot gradient, one autograd.grad"
    " a column and a stack of the columns.",
    f"Both sides of PyTorch are timed on {SAMPLE} random columns, multiplied to all: the dense matrix takes 0.75 GiB "
    "for conv, 16 GiB for ReLU, 4 GiB for max-pool. jacrev runs the forward itself.",
)


@dataclass(frozen=True)
class Generation:
    """One operator on both sides, after their forward passes.

    Attributes
    ----------
    name
        A key of `TARGETS`.
    title
        As the table shows it.
    ours
        Returns our transposed Jacobian.
    function
        PyTorch's operator.
    x, y
        Its input, which requires gradients, and its recorded output; batches of one.
    """

    name: str
    title: str
    ours: Callable[[], Any]
    function: Callable[[Any], Any]
    x: Any
    y: Any


def generations(quick: bool) -> Iterator[Generation]:
    """Yield the three operators; with `quick`, on an 8×8 image and with fewer channels."""
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
        twin.load_state_dict({key: torch.from_numpy(np.array(a)) for key, a in layer.state_dict().items()})
        x = torch.from_numpy(value).clone().requires_grad_(True)
        value, saved = layer.forward(value)
        yield Generation(name, title, lambda layer=layer, saved=saved: layer.jacobian_t(saved), twin, x, twin(x))  # type: ignore[misc]


def measure_row(generation: Generation, rounds: Mapping[str, Any]) -> dict[str, Any]:
    """Time one operator against both peers, after comparing the values of the sampled columns."""
    jacobian = generation.ours()
    n_in, n_out = jacobian.shape
    columns = np.random.default_rng(0).permutation(n_out)[:SAMPLE]
    difference = _difference(jacobian, _column_by_column(generation, columns)[0].numpy(), columns)
    if not difference < 1e-4:
        raise SparseBPError(
            f"The transposed Jacobian of {generation.title} differs from PyTorch's",
            expected="a difference below 1e-4",
            got=f"{difference:.3g}",
            remedy="Do not trust this build: please report it with the output of sparsebp info",
        )
    timings = timing.measure(
        {
            "ours": timing.Call(lambda _: generation.ours()),
            "columns": timing.Call(lambda _: _column_by_column(generation, columns)),
            "jacrev": timing.Call(lambda _: _jacrev(generation, columns)),
        },
        **rounds,
    )
    for name in ("columns", "jacrev"):
        timings[name] = timing.Timing(tuple(seconds * n_out / len(columns) for seconds in timings[name].seconds))
    row: dict[str, Any] = {
        "name": generation.title,
        "shape": f"{n_in} × {n_out}",
        "sparsity": float(jacobian.pattern.sparsity),
        "difference": difference,
        "timed": len(columns),
        "dense_bytes": 4 * n_in * n_out,
    }
    for name, measured in timings.items():
        row[name] = measured.to_dict()
    for name in ("columns", "jacrev"):
        row[f"{name}_ratio"] = timing.ratio(timings[name], timings["ours"])
    row["target"] = TARGETS[generation.name]
    row["met"] = "met" if row["columns_ratio"]["median"] >= row["target"] else "missed"
    return row


def _difference(jacobian: Any, expected: np.ndarray, columns: np.ndarray) -> float:
    return float(np.abs(jacobian.to_scipy().tocsc()[:, columns].toarray() - expected).max())


def _column_by_column(generation: Generation, columns: np.ndarray) -> Any:
    """Return the columns, (1, n_in, columns), as the paper's own program makes them."""
    torch = import_torch()
    x, y = generation.x, generation.y
    made = []
    for column in columns.tolist():
        gradient = torch.zeros(1, y.numel())
        gradient[:, column] = 1
        made.append(torch.autograd.grad(y, x, gradient.view(y.shape), retain_graph=True)[0].view(1, -1))
    return torch.stack(made, dim=2)


def _jacrev(generation: Generation, columns: np.ndarray) -> Any:
    """Return these outputs' rows of the Jacobian, (columns, 1, …), by one vectorised vjp."""
    torch = import_torch()
    chosen = torch.from_numpy(columns)
    with torch.no_grad():
        return torch.func.jacrev(lambda x: generation.function(x).reshape(-1)[chosen])(generation.x.detach())
