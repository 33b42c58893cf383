"""Steps captured into CUDA graphs and replayed: the host gives the device one graph in place of every kernel.

Launches cost the host more than small kernels cost the device, so that nets of many small layers wait for Python; a
graph that was captured once takes that away (Oh et al., EuroSys 2022, §4.2).
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.backend.graphs import GraphRecorder
from sparsebp.core.errors import SparseBPError
from sparsebp.core.types import Array
from sparsebp.runtime.actions import Actions, Batch, Later, Step
from sparsebp.runtime.program import Program, Task

PLAIN = 1
"""Steps of one shape, in a row, that run as ever; so a last, smaller batch of an epoch does."""


@dataclass
class _Recorded:
    """A shape of batches: how to run it, and what its graph reads and writes."""

    recorder: GraphRecorder
    model: list[Any]
    inputs: list[Batch]
    warm: bool = False
    update: Any = None
    step: Step | None = None
    results: Array = None


class Graphs:
    """The captured steps of an executor, one for each shape of batches.

    The first step of a shape, or the first ones if another shape comes between, runs as ever; the next one on the
    streams that are captured, to compile kernels and set up libraries; then the step is captured, and replayed from
    there on. A captured step leaves nothing over for the next one. Losses and norms are read after it, so that an
    error about them comes when the parameters have been updated.

    Attributes
    ----------
    obstacles
        Why steps cannot be captured, each with its layer; empty if they can.
    """

    def __init__(self, actions: Actions) -> None:
        self._actions, self._stages = actions, actions.stages
        self._xp = backend.namespace(next(iter(actions.stages.model.parameters().values())))
        self._recorded: dict[Any, _Recorded] = {}
        self._last: tuple[Any, int] = (None, 0)
        self._at = ""
        self.obstacles = tuple(self._obstacles())

    def _obstacles(self) -> Iterator[str]:
        model = self._stages.model
        if backend.is_host(self._xp):
            yield "the model is on the host"
        for name, layer in model.modules() if hasattr(model, "modules") else [("", model)]:
            ask = getattr(layer, "capture_obstacle", None)
            why = "does not say whether it can be captured" if ask is None else ask()
            if why is not None:
                yield f"{name or 'the model'} ({type(layer).__name__}) {why}"
        if self._stages.scans:
            yield "a scan in place of back-propagation is planned on the host"
        if self._actions.clip_norm is not None:
            yield "clip_norm: the host decides by the norm whether to scale"
        if not hasattr(self._actions.loss, "on_device"):
            yield f"{type(self._actions.loss).__name__} has no on_device, so the host reads the loss as it goes"
        if not hasattr(self._actions.optimizer, "begin_on_device"):
            yield f"{type(self._actions.optimizer).__name__} has no begin_on_device, so its numbers come from the host"

    def takes(self, batches: Sequence[Batch]) -> bool:
        """Say whether the next step, of these batches, is for `step`; every step is to be asked for."""
        if self.obstacles or any(len(batch) > 2 for batch in batches):
            return False
        key = _shapes(batches)
        before, count = self._last
        self._last = key, count + 1 if key == before else 1
        return key in self._recorded or self._last[1] > PLAIN

    def step(self, program: Program, batches: Sequence[Batch], tag: Any) -> Step | None:
        """Run a step on the streams that are captured, or replay it; None if it proves not to be capturable.

        In that case nothing has run, `obstacles` says why, and a warning does.

        Raises
        ------
        Exception
            Whatever an action raises.
        """
        key, model = _shapes(batches), self._arrays()
        found = self._recorded.get(key)
        try:
            if found is None or not _same(found.model, model):
                recorder = GraphRecorder(self._xp, len(program.streams))
                found = self._recorded[key] = _Recorded(recorder, model, [(x.copy(), t.copy()) for x, t in batches])
            elif not found.recorder.captured:
                self._capture(program, found)
        except (SparseBPError, RuntimeError) as error:  # CuPy's and CUDA's are RuntimeErrors
            self._give_up(error)
            return None
        step = self._new(batches, tag)
        if found.recorder.captured:
            for (x, t), (new_x, new_t) in zip(found.inputs, batches, strict=True):
                x[...], t[...] = new_x, new_t
            found.update.write()
            found.recorder.replay()
            return self._read(step, found.step, found.results)
        step.update = self._actions.optimizer.begin_on_device()
        step.update.write()
        with found.recorder.running():
            results = self._run(program, step, found.recorder)
        return self._read(step, step, results)

    def _new(self, batches: Sequence[Batch], tag: Any) -> Step:
        step = Step(batches, len(self._stages), tag)
        step.later = Later()
        return step

    def _capture(self, program: Program, found: _Recorded) -> None:
        step = self._new(found.inputs, None)
        step.update = self._actions.optimizer.begin_on_device()
        with found.recorder.capturing():
            results = self._run(program, step, found.recorder)
        found.update, found.step, found.results = step.update, step, results

    def _give_up(self, error: Exception) -> None:
        where = f" at {self._at}" if self._at else ""
        why = f"{type(error).__name__}{where}: {error}"
        self.obstacles = (why,)
        self._recorded.clear()
        warnings.warn(f"Steps are not captured into a CUDA graph: {why}", RuntimeWarning, stacklevel=2)

    # ---- one step, from one thread -----------------------------------------------------------------------------------

    def _run(self, program: Program, step: Step, recorder: GraphRecorder) -> Array:
        """Run all of a step, what it would leave over included; return losses and sums in one array."""
        xp, streams = self._xp, recorder.streams
        step.marks = [None] * program.events
        step.held = [] if len(streams) > 1 else None
        self._join(streams[:1], streams[1:])
        for number, task in in_turn(program):
            self._at = "" if task.action is None else f"stage {self._stages[task.action.stage].name or 0!r}"
            with streams[number]:
                for event, before in task.waits:
                    if not before:
                        backend.wait(xp, step.marks[event])
                task.run(step)
                if task.signal is not None:
                    step.marks[task.signal] = backend.record(xp)
        self._at = "the update"
        self._join(streams[1:], streams[:1])
        with streams[0]:
            if program.gathered and len(streams) > 1:
                self._actions.gather(step)
            self._actions.finish(step, gathered=program.gathered)
            results = self._results(step.later)
        step.held = None
        self._at = ""
        return results

    def _join(self, ended: Sequence[Any], begun: Sequence[Any]) -> None:
        for stream in ended:
            with stream:
                mark = backend.record(self._xp)
            for other in begun:
                with other:
                    backend.wait(self._xp, mark)

    def _results(self, later: Later | None) -> Array:
        parts = [] if later is None else [*later.losses.values(), *(sums for _, sums in later.sums)]
        results, at = self._xp.empty(sum(part.size for part in parts), np.float64), 0
        for part in parts:
            results[at : at + part.size] = part
            at += part.size
        return results

    def _read(self, step: Step, ran: Step | None, results: Array) -> Step:
        """Read losses and sums of squares into `step`, and look at them."""
        if ran is None or ran.later is None:
            return step
        numbers = iter(backend.to_host(results).tolist())  # synchronize!
        step.predictions = ran.predictions
        for m in ran.later.losses:
            step.values[m] = next(numbers)
        for names, _ in ran.later.sums:
            step.squares.update((name, next(numbers)) for name in names)
        step.later, step.update, step.flow = None, None, []
        watch = self._actions.watch
        for m, value in enumerate(step.values):
            if not math.isfinite(value):
                self._actions.loss.forward(step.predictions[m], step.batches[m][1])  # says if it is the target's fault
            watch.loss(step, m, value)
        wrong = {name: np.float64(square) for name, square in step.squares.items() if not math.isfinite(square)}
        if wrong:
            watch.gradients(step, wrong)
        return step

    def _arrays(self) -> list[Any]:
        """Return what a graph has been captured for: the model's arrays, and whether its layers train."""
        model = self._stages.model
        if not hasattr(model, "modules"):
            return list(model.parameters().values())
        layers = [layer for _, layer in model.modules()]
        return [each for layer in layers for each in (layer.training, *layer.params.values(), *layer.buffers.values())]


def in_turn(program: Program) -> Iterator[tuple[int, Task]]:
    """Yield a step's tasks with the number of their stream, each after those that it waits for.

    What is left over for the next step comes too, at its stream's end, but for updates.
    """
    streams = [
        deque([*(t for t in stream if not t.old), *(t for t in stream if t.old and not t.updates)])
        for stream in program.streams
    ]
    done: set[int] = set()
    while any(streams):
        for number, stream in enumerate(streams):
            while stream and all(before or event in done for event, before in stream[0].waits):
                task = stream.popleft()
                yield number, task
                if task.signal is not None:
                    done.add(task.signal)


def _shapes(batches: Sequence[Batch]) -> tuple[Any, ...]:
    return tuple((x.shape, x.dtype, t.shape, t.dtype) for x, t in batches)


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
