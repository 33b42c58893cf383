"""Which order of a step, which backward and how many threads are the fastest for a model on this machine.

``sparsebp tune``. All combinations that can be had run a few training steps in turn; none of them changes what is
learned, but for rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from sparsebp.core import timing
from sparsebp.core.errors import OptionError, SparseBPError
from sparsebp.core.threads import set_threads, thread_counts
from sparsebp.recipes.config import TrainConfig
from sparsebp.recipes.recipe import build, config_for
from sparsebp.runtime.out_of_order import OutOfOrderExecutor
from sparsebp.train.arrays import batch_of
from sparsebp.train.runner import Runner

TUNED = ("fusion", "schedule", "backward", "threads")


@dataclasses.dataclass(frozen=True)
class Trial:
    """One combination.

    Attributes
    ----------
    options
        By the names in `TUNED`.
    seconds
        Of a step; None if it was refused.
    refused
        Why it was, else None.
    """

    options: Mapping[str, Any]
    seconds: timing.Timing | None = None
    refused: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return everything in JSON types."""
        measured = None if self.seconds is None else self.seconds.to_dict()
        return {**self.options, "seconds": measured, "refused": self.refused}


def combinations(
    config: TrainConfig, fusions: Iterable[str] = (), schedules: Iterable[str] = (), backwards: Iterable[str] = (),
    threads: Iterable[int] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """Return all combinations of the choices.

    Without choices: all fusions, the conventional and the out-of-order schedule, ``"bp"`` and ``"auto"``
    beside that of `config`, and one thread and as many as there may be now.
    """
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
    """Time a few steps of every combination.

    Parameters
    ----------
    options
        Of the run, as `config_for` takes them.
    tried
        The combinations, see `combinations`.
    steps
        How many run in a row.
    rounds, budget
        How often each runs, in turn with the others, and seconds after which two rounds must do.
    progress
        Called before a combination is made ready to run, with what it is, its number from 0, and how many there are;
        then once when they are measured, all together.

    Returns
    -------
    list of Trial
        The fastest first; then those that cannot be had, with the reason.

    Raises
    ------
    OptionError
        A number is too small, or nothing can be had.
    """
    for name, value in (("steps", steps), ("rounds", rounds)):
        if value < 1:
            raise OptionError(f"{name} is too small", expected="1 or more", got=value, remedy=f"Raise {name}")
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
            raise OptionError("No combination can be had", expected="one at least", got="; ".join(map(str, reasons)),
                              remedy="Try others")  # fmt: skip
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
    """A trainer that runs the same batches again and again; what has to be found out is found out at once."""

    def __init__(self, config: TrainConfig, data: Any, threads: int, steps: int) -> None:
        self.threads, self.steps = threads, steps
        set_threads(threads)
        run = build(config, data=data)
        size = min(config.batch_size, len(run.train_set))
        parts = [range(i * size // config.accumulate, (i + 1) * size // config.accumulate)
                 for i in range(config.accumulate)]  # fmt: skip
        self._batches = [batch_of(run.train_set, np.array(part), run.trainer.model) for part in parts if part]
        run.trainer.lr_scheduler = None  # it counts the steps of a whole run
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
