"""``sparsebp tune``: the fastest order of a step, backward and number of threads for a model on this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from sparsebp.core import timing
from sparsebp.core.errors import OptionError, SparseBPError
from sparsebp.core.threads import set_threads, thread_counts
from sparsebp.runtime.search import OutOfOrderExecutor
from sparsebp.train.batches import batch_of
from sparsebp.train.config import TrainConfig, build, config_for
from sparsebp.train.runner import Runner

# ``sparsebp tune``: the fastest order of a step, backward and number of threads for a model on this machine. The
# combinations run a few training steps in turn; their results differ by rounding only.

TUNED = ("fusion", "schedule", "backward", "threads")


@dataclasses.dataclass(frozen=True)
class Trial:
    """One combination."""

    options: Mapping[str, Any]  # by the names in `TUNED`
    seconds: timing.Timing | None = None  # of a step; None if refused
    refused: str | None = None  # why

    def to_json(self) -> dict[str, Any]:
        """Return everything in JSON types."""
        measured = None if self.seconds is None else self.seconds.to_dict()
        return {**self.options, "seconds": measured, "refused": self.refused}


def combinations(
    config: TrainConfig, fusions: Iterable[str] = (), schedules: Iterable[str] = (), backwards: Iterable[str] = (),
    threads: Iterable[int] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """Return all combinations of the choices; where there are none, of the usual ones."""
    here = thread_counts()["kernels"]
    choices = (
        tuple(fusions) or ("none", "forward", "backward"),
        tuple(schedules) or ("conventional", "ooo"),
        tuple(backwards) or tuple(dict.fromkeys((config.backward, "bp", "auto"))),
        tuple(threads) or tuple(dict.fromkeys((1, here))),
    )
    return [dict(zip(TUNED, values, strict=True)) for values in product(*choices)]


def tune(
    options: Mapping[str, Any], tried: Sequence[Mapping[str, Any]], *, steps: int = 3, rounds: int = 5,
    budget: float = 60.0, progress: Callable[[str, int, int], None] = lambda name, number, count: None,
) -> list[Trial]:  # fmt: skip
    """Time `steps` steps in a row of every combination, in turn; return the fastest first, then those refused.

    `options` are those of `config_for`. Once `budget` seconds have passed, measuring stops after two rounds. `progress`
    is called with a name, a number from 0 and the count, before each combination is prepared and once before all are
    measured.
    """
    for name, value in (("steps", steps), ("rounds", rounds)):
        if value < 1:
            raise OptionError(f"{name} is too small", expected="1 or more", got=value)
    before = thread_counts()["kernels"]
    sides: dict[int, _Side] = {}
    refused: list[Trial] = []
    data = None
    try:
        for number, choice in enumerate(tried):
            progress(", ".join(f"{name}={value}" for name, value in choice.items()), number, len(tried))
            try:
                config = _config(options, choice)
                data = data or config.load_data()
                sides[number] = _Side(config, data, int(choice["threads"]), steps)
            except SparseBPError as error:
                refused.append(Trial(choice, refused=str(error)))
        if not sides:
            reasons = dict.fromkeys(trial.refused for trial in refused)
            raise OptionError("No combination can be had", expected="one at least", got="; ".join(map(str, reasons)))
        progress("while they were measured", len(tried), len(tried))
        calls = {str(number): timing.Call(side.run, side.prepare) for number, side in sides.items()}
        measured = timing.measure(calls, rounds=rounds, least_rounds=min(2, rounds), warmup=1, budget=budget)
    finally:
        for side in sides.values():
            side.close()
        set_threads(before)
    trials = [
        Trial(tried[int(number)], timing.Timing(tuple(value / steps for value in found.seconds)))
        for number, found in measured.items()
    ]
    return [*sorted(trials, key=lambda trial: trial.seconds.median if trial.seconds else 0.0), *refused]


def _config(options: Mapping[str, Any], choice: Mapping[str, Any]) -> TrainConfig:
    if choice["schedule"] != "conventional" and choice["threads"] < 2:
        raise OptionError("Two streams need two threads", expected="threads=2 or more", got=choice["threads"],
                          remedy="Use schedule='conventional'")  # fmt: skip
    chosen = {name: value for name, value in choice.items() if name != "threads"}
    return config_for(**{**options, **chosen})


class _Side:
    """A trainer that runs the same batches again and again, after an out-of-order schedule is found."""

    def __init__(self, config: TrainConfig, data: Any, threads: int, steps: int) -> None:
        self.threads, self.steps = threads, steps
        set_threads(threads)
        run = build(config, data=data)
        size = min(config.batch_size, len(run.train_set))
        parts = [range(i * size // config.accumulate, (i + 1) * size // config.accumulate)
                 for i in range(config.accumulate)]  # fmt: skip
        self._batches = [batch_of(run.train_set, np.array(part), run.trainer.model) for part in parts if part]
        run.trainer.lr_scheduler = None  # which counts the steps of a whole run
        self._runner = Runner(run.trainer)
        self.run()
        executor = self._runner.executor
        while isinstance(executor, OutOfOrderExecutor) and executor.found is None:
            self.run()

    def prepare(self) -> None:
        """Give this side its threads."""
        if thread_counts()["kernels"] != self.threads:
            set_threads(self.threads)

    def run(self, _: object = None) -> None:
        """Run the steps."""
        for _step in range(self.steps):
            self._runner.step(self._batches, 0)
        self._runner.flush()

    def close(self) -> None:
        """End the threads of two streams."""
        self._runner.close()
