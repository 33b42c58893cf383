"""An asynchronous schedule on one thread: every action reads exactly the weights that the schedule gives it.

The actions run one after the other in an order that the schedule allows; which version an action reads depends on the
order within its own lane alone, so any such order computes the same numbers, and so do workers side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from sparsebp import nn
from sparsebp.core.types import Array
from sparsebp.optim import Optimizer, Predictor, Update
from sparsebp.schedule import Action, Costs, Schedule, Simulation, parts_of, simulate


class Distance(NamedTuple):
    """How far the weights that an action read, and the newest ones, were from those they were to be.

    Attributes
    ----------
    action
        A forward or backward.
    ahead
        The number of updates between.
    predicted, stale
        Root mean squares over the stage's weights, of Ŵ − W_true and of W_stale − W_true.
    """

    action: Action
    ahead: int
    predicted: float
    stale: float


def units(workers: int) -> Costs:
    """Return costs by which every worker's time unit is as long: the last one runs F and B of a batch in sequence."""
    return Costs(lambda action: 0 if action.kind == "U" else 0.5 if action.stage == workers - 1 else 1)


class Replay:
    """Trains blocks of a network, one a stage and worker, by a schedule with an update after every micro-batch.

    Parameters
    ----------
    blocks
        The stages; the model is their chain, and calls them ``"0"``, ``"1"``, …
    loss, optimizer
        The loss, and the optimizer on the parameters of ``nn.Sequential(*blocks)``.
    simulation
        Of the schedule: as many stages as blocks, and a step of all micro-batches that there are.
    predictor
        Whose weights F and I read; None: as the schedule says, the newest ones or those of the forward.
    note
        Is told of distances; None: nothing is measured.
    every
        Of how many micro-batches one is measured.
    """

    def __init__(
        self, blocks: Sequence[nn.Sequential], loss: Any, optimizer: Optimizer, simulation: Simulation,
        predictor: Predictor | None = None, note: Callable[[Distance], None] | None = None, every: int = 1,
    ) -> None:  # fmt: skip
        self.blocks, self.loss, self.optimizer = blocks, loss, optimizer
        self.simulation, self.schedule, self.predictor = simulation, simulation.schedule, predictor
        self.note, self.every = note, every
        self.stashes = self.schedule.graph.weights == "stashed"
        live = optimizer.params
        self._names = [[name for name in live if name.split(".")[0] == str(k)] for k in range(len(blocks))]
        self._places = {
            f"{k}.{prefix}.{key}" if prefix else f"{k}.{key}": (layer.params, key)
            for k, block in enumerate(blocks) for prefix, layer in block.modules() for key in layer.params
        }  # fmt: skip
        self._stash: dict[Action, dict[str, Array]] = {}
        self._waiting: dict[tuple[int, int], list[Any]] = {}
        self._done = [0] * len(blocks)  # updates of every stage

    def run(self, batches: Iterable[tuple[Array, Array]]) -> Iterator[float]:
        """Train, and yield the loss of every micro-batch as its forward is over; a loss that is not finite ends it."""
        source = iter(batches)
        saved: dict[tuple[int, int], Any] = {}
        flow: dict[tuple[str, int], Any] = {}
        targets, grads, updates = {}, {}, {}
        last = len(self.blocks) - 1
        for number in self.schedule.cells.in_turn():
            cell = self.schedule.cells.cells[number]
            for action in parts_of(cell):
                k, kind, m = action.stage, action.kind, action.microbatch or 0
                if kind == "F":
                    if k == 0:
                        flow["F", m], targets[m] = next(source)
                    with self._reading(action):
                        flow["F", m], saved[k, m] = self.blocks[k].forward(flow["F", m])
                    if k == last:
                        value, kept = self.loss.forward(flow.pop(("F", m)), targets.pop(m))
                        yield float(value)
                        if not math.isfinite(value):
                            return
                        flow["I", m] = self.loss.input_grad(kept)
                elif kind == "I":
                    with self._reading(action):
                        found = self.blocks[k].gradients(flow.pop(("I", m)), saved.pop((k, m)))
                        if k > 0:
                            flow["I", m] = found.input_grad()
                        grads[k, m] = {f"{k}.{key}": grad for key, grad in found.weight_grad().items()}
                elif kind == "U":
                    if m not in updates:
                        updates[m] = self.optimizer.begin()
                    self._update(k, updates[m], grads.pop((k, m)))
                    if not updates[m].remaining:
                        del updates[m]

    def _update(self, k: int, update: Update, grads: Mapping[str, Array]) -> None:
        update.apply(grads)
        if self.predictor is not None:
            self.predictor.observe(grads, grads)
        self._done[k] += 1
        for action, ahead, predicted, stale in self._waiting.pop((k, self._done[k]), ()):
            self._measure(action, ahead, predicted, stale)

    def ahead(self, action: Action) -> int:
        """Return s of an F or I: read off the simulated schedule, for what the predictor predicts."""
        if self.predictor is not None and self.predictor.horizon == "update":
            return self.simulation.staleness(action)
        return self.simulation.version_difference(action)

    @contextmanager
    def _reading(self, action: Action) -> Iterator[None]:
        """Put the weights that the action reads in the place of the newest ones."""
        names, weights = self._names[action.stage], None
        if self.stashes:
            forward = Action(action.stage, "F", action.microbatch)
            if action.kind == "F":
                self._stash[action] = {name: self.optimizer.params[name].copy() for name in names}
            weights = self._stash[forward] if action.kind == "F" else self._stash.pop(forward)
            self._expect(action, weights)
        elif self.predictor is not None:
            if action.kind in self.predictor.kinds:
                weights = self.predictor.predict(names, self.ahead(action))
            self._expect(action, weights)
        if weights is None:
            yield
            return
        with swapped(self._places, weights):
            yield

    def _expect(self, action: Action, weights: Mapping[str, Array] | None) -> None:
        """Keep what an action reads, and what is newest, until the weights are there that it was to read."""
        if self.note is None or (action.microbatch or 0) % self.every:
            return
        ahead, live = self.ahead(action), self.optimizer.params
        stale = {name: live[name].copy() for name in self._names[action.stage]}
        read = stale if weights is None else dict(weights)
        if ahead <= 0:
            self._measure(action, ahead, read, stale)
        else:
            at = action.stage, self._done[action.stage] + ahead
            self._waiting.setdefault(at, []).append((action, ahead, read, stale))

    def _measure(self, action: Action, ahead: int, predicted: Mapping[str, Array], stale: Mapping[str, Array]) -> None:
        live = {name: self.optimizer.params[name] for name in stale}
        if self.note is not None:
            self.note(Distance(action, ahead, rms(predicted, live), rms(stale, live)))


@contextmanager
def swapped(places: Mapping[str, tuple[dict[str, Array], str]], weights: Mapping[str, Array]) -> Iterator[None]:
    """Let layers compute with other arrays by the names of `weights` for a while."""
    kept = {name: places[name][0][places[name][1]] for name in weights}
    try:
        for name, array in weights.items():
            places[name][0][places[name][1]] = array
        yield
    finally:
        for name, array in kept.items():
            places[name][0][places[name][1]] = array


def rms(one: Mapping[str, Array], other: Mapping[str, Array]) -> float:
    """Return the root mean square of a difference over all numbers together."""
    total = sum(float(np.square(one[name] - other[name], dtype=np.float64).sum()) for name in other)
    return math.sqrt(total / sum(array.size for array in other.values()))


def replayed(schedule: Schedule) -> Simulation:
    """Return the simulation that a `Replay` of a schedule with one stage a worker reads s off."""
    return simulate(schedule, units(schedule.workers))
