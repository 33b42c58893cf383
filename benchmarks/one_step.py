"""One step a call, or a few: PyTorch's recurrent modules accelerated, and as they are.

``python -m benchmarks one-step``. Layers and cells on the CPU, float32, that are given the state of the call before:
outputs alone, and with the gradients of the state and of all weights. Both sides go through the module's own call.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import harness
from benchmarks.harness import Benchmark, Row, Run, columns, import_torch, refuse_difference
from sparsebp.core import timing

TARGETS = {"LSTM": 5.0, "GRU": 4.0, "cell": 2.5, "trained layer": 1.5, "any": 1.0}
"""Times faster than PyTorch, for the smallest layers and cells; no case may be slower."""
CALLS = ("forward", "forward and backward")
SMALL = 64
"""Units up to which, with one sample and one step, a row has its cell's target."""


def target(cell: str, hidden: int, batch: int, steps: int, trains: bool) -> float:
    """Return the speed-up that is wanted of a row."""
    if hidden > SMALL or batch > 1 or steps > 1 or (trains and "Cell" in cell):
        return TARGETS["any"]
    return TARGETS.get("trained layer" if trains else "cell" if "Cell" in cell else cell, TARGETS["any"])


def measure_one_step(run: Run) -> Iterator[Row]:
    import_torch()
    for count in run.threads():
        for cell, features, hidden, steps in run.settings["modules"]:
            for batch in run.settings["batches"]:
                for trains in (False, True):
                    yield measure_row(run, cell, (features, hidden, steps, batch), trains) | {"threads": count}


def measure_row(run: Run, cell: str, sizes: tuple[int, int, int, int], trains: bool) -> Row:
    """Time calls of one module of torch.nn, accelerated and not, after comparing the outputs."""
    from sparsebp import torch as st

    torch = import_torch()
    features, hidden, steps, batch = sizes
    torch.manual_seed(0)
    module, alone = getattr(torch.nn, cell)(features, hidden), "Cell" in cell
    lead = (batch,) if alone else (steps, batch)
    x, gradient = torch.randn(*lead, features), torch.randn(*lead, hidden)
    shape = (batch, hidden) if alone else (1, batch, hidden)
    state = [torch.randn(shape, requires_grad=trains) for _ in range(2 if "LSTM" in cell else 1)]
    hx = tuple(state) if len(state) == 2 else state[0]

    def call(module: Any) -> Any:
        found = module(x, hx)
        return found if isinstance(found, torch.Tensor) else found[0]

    def infer(module: Any) -> Any:
        with torch.no_grad():
            return call(module)

    def train(module: Any) -> Any:
        return torch.autograd.grad(call(module), (*state, *module.parameters()), gradient, allow_unused=True)[-1]

    run_once: Callable[[Any], Any] = train if trains else infer
    ours = st.accelerate(copy.deepcopy(module))
    difference = float((run_once(ours) - run_once(module)).abs().max())
    refuse_difference(f"{cell}({features}, {hidden}), B = {batch}", "torch.nn", difference)
    with torch.set_grad_enabled(trains):
        (told,) = st.explain(ours, x, hx)
    sides = {name: functools.partial(run_once, one) for name, one in (("ours", ours), ("torch", module))}
    row: Row = {"model": f"{cell}({features}, {hidden})", "batch": batch, "length": steps, "call": CALLS[trains],
                "runs": "sparsebp" if told.replaced else "torch.nn", "difference": difference}  # fmt: skip
    row |= timing.side_by_side(timing.measure(sides, **run.rounds))
    wanted = target(cell, hidden, batch, steps, trains)
    # a call that is left to PyTorch costs the decision
    return row | (harness.reaches(row, "torch_ratio", wanted) if told.replaced else {"target": None, "met": None})


ONE_STEP = Benchmark(
    name="one-step",
    title="One step a call, or four, on the CPU, float32, PyTorch's modules with and without accelerate",
    leaves_out="nothing; with gradients a call is forward and backward, to the state and all weights",
    settings={"targets": TARGETS, "dtype": "float32"},
    sizes={
        "modules": (
            *((cell, *sizes, 1) for cell in ("LSTM", "GRU", "RNN") for sizes in ((4, 16), (64, 64), (64, 256))),
            *((cell, 64, 64, 4) for cell in ("LSTM", "GRU", "RNN")),
            *((cell, *sizes, 1) for cell in ("LSTMCell", "GRUCell", "RNNCell") for sizes in ((4, 16), (64, 64))),
        ),
        "batches": (1, 8, 64),
    },
    quick={"modules": (("GRU", 3, 4, 1), ("LSTMCell", 3, 4, 1)), "batches": (2,)},
    rounds={"rounds": 25, "least_rounds": 9, "budget": 0.4},
    measure=measure_one_step,
    columns=columns(
        words={"call": "call", "runs": "accelerate runs"},
        times={"torch_ratio": "over torch.nn"},
    ),
    short=("model", "batch", "length", "call", "runs", "ours", "torch", "torch_ratio", "target", "met"),
    in_short=lambda row: (row["threads"], row["batch"], row["length"]) == (1, 1, 1) and "(64, 64)" in row["model"],
    picture=harness.bars("{model}, {call}", {"torch_ratio": "over torch.nn"}, harness.SPEED_UP,
                         (harness.TORCH,), log=True, line=1.0),
)  # fmt: skip
