"""Steps captured into CUDA graphs and replayed: the host gives the device one graph in place of every kernel.

Launches cost the host more than small kernels cost the device, so that nets of many small layers wait for Python; a
graph that was captured once takes that away (Oh et al., EuroSys 2022, §4.2).
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsebp.core import backend
from sparsebp.core.cuda_graphs import GraphRecorder
from sparsebp.core.errors import SparseBPError
from sparsebp.runtime.actions import Actions, Batch, Later, Step
from sparsebp.runtime.program import Program, Task

PLAIN = 1
"""Steps of one shape, in a row, that run as ever; so a last, smaller batch of an epoch does."""
MOST = 8
"""Shapes that are captured: each graph has a step's memory of its own."""
_NUMBERS = (bool, int, float, str, np.generic)
"""Types of a layer's attributes that are compared by value; tuples are compared by identity."""
LENGTHS = "batches with lengths: the host looks at them"


@dataclass
class _Recorded:
    """A shape of batches: how to run it, and what its graph reads and writes."""

    recorder: GraphRecorder
    model: list[Any]
    inputs: list[Batch]
    step: Step | None = None


class Graphs:
    """The captured steps of an executor, one for each shape of batches."""

    # The first step of a shape, or the first ones if another shape comes between, runs as ever; the next one on the
    # streams that are captured, to compile kernels and set up libraries; then the step is captured, and replayed from
    # there on. A captured step leaves nothing over for the next one.
    # obstacles: Why steps cannot be captured, each with its layer; empty if they can.

    def __init__(self, actions: Actions) -> None:
        self._actions, self._stages = actions, actions.stages
        self._xp = backend.namespace(next(iter(actions.stages.model.parameters().values())))
        self._recorded: dict[Any, _Recorded] = {}
        self._last: tuple[Any, int] = (None, 0)
        self._at = ""
        self._had_lengths = False
        self._changes = 0  # of the model, since a step was captured
        self.obstacles = tuple(self._obstacles())

    @property
    def uncaptured(self) -> tuple[str, ...]:
        """The obstacles, and why some batches so far were not captured."""
        return (*self.obstacles, LENGTHS) if self._had_lengths else self.obstacles

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
        if not hasattr(self._actions.loss, "on_device"):
            yield f"{type(self._actions.loss).__name__} has no on_device, so the host reads the loss as it goes"
        if not hasattr(self._actions.optimizer, "begin_on_device"):
            yield f"{type(self._actions.optimizer).__name__} has no begin_on_device, so its numbers come from the host"

    def takes(self, batches: Sequence[Batch]) -> bool:
        """Say whether the next step, of these batches, is for `step`; every step is to be asked for."""
        if any(len(batch) > 2 for batch in batches):
            self._had_lengths = True
            return False
        if self.obstacles:
            return False
        key = _shapes(batches)
        before, count = self._last
        self._last = key, count + 1 if key == before else 1
        return key in self._recorded or (self._last[1] > PLAIN and len(self._recorded) < MOST)

    def step(self, program: Program, batches: Sequence[Batch], tag: Any) -> Step | None:
        """Run a step on the streams that are captured, or replay it; None if it proves not to be capturable."""
        # In that case nothing has run, `obstacles` says why, and a warning does.
        key, model = _shapes(batches), self._state()
        found = self._recorded.get(key)
        try:
            if found is None or not _same(found.model, model):
                self.obstacles = tuple(self._obstacles())  # a layer's numbers and mode may have changed since
                if self.obstacles:
                    self._recorded.clear()
                    return None
                self._changes += found is not None
                if self._changes > MOST:
                    self._recorded.clear()
                    self.obstacles = ("the model's arrays, or numbers of its layers, change from step to step",)
                    return None
                recorder = GraphRecorder(self._xp, len(program.streams))
                found = self._recorded[key] = _Recorded(recorder, model, [(x.copy(), t.copy()) for x, t in batches])
            elif found.step is None:
                self._capture(program, found)
                self._changes = 0
        except (SparseBPError, RuntimeError, MemoryError) as error:  # CuPy's and CUDA's are RuntimeErrors
            self._give_up(error)
            return None
        step, recorded = self._new(batches, tag), found.step
        if recorded is not None:
            for (x, t), (new_x, new_t) in zip(found.inputs, batches, strict=True):
                x[...], t[...] = new_x, new_t
            recorded.update.write()
            found.recorder.replay()
            step.later, step.packed, step.predictions = recorded.later, recorded.packed, recorded.predictions
            return step
        step.update = self._actions.optimizer.begin_on_device()
        step.update.write()
        try:
            with found.recorder.running():
                self._run(program, step, found.recorder)
        except BaseException:
            step.update.take_back()
            raise
        return step

    def forget(self) -> None:
        """Give up all graphs, and the memory that they hold."""
        self._recorded.clear()

    def _new(self, batches: Sequence[Batch], tag: Any) -> Step:
        step = Step(batches, len(self._stages), tag)
        step.later = Later()
        return step

    def _capture(self, program: Program, found: _Recorded) -> None:
        step = self._new(found.inputs, None)
        step.update = self._actions.optimizer.begin_on_device()
        with found.recorder.capturing():
            self._run(program, step, found.recorder)
        found.step = step

    def _give_up(self, error: Exception) -> None:
        where = f" at {self._at}" if self._at else ""
        why = f"{type(error).__name__}{where}: {error}"
        self.obstacles = (why,)
        self._recorded.clear()
        warnings.warn(f"Steps are not captured into a CUDA graph: {why}", RuntimeWarning, stacklevel=2)

    # ---- one step, from one thread -----------------------------------------------------------------------------------

    def _run(self, program: Program, step: Step, recorder: GraphRecorder) -> None:
        """Run all of a step, what it would leave over included, and pack its numbers."""
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
            step.packed = step.later.packed(xp)  # type: ignore[union-attr]
        step.held = None
        self._at = ""

    def _join(self, ended: Sequence[Any], begun: Sequence[Any]) -> None:
        for stream in ended:
            with stream:
                mark = backend.record(self._xp)
            for other in begun:
                with other:
                    backend.wait(self._xp, mark)

    def _state(self) -> list[Any]:
        """Return what a graph is captured for: the model's arrays, and the numbers and flags of its layers."""
        model = self._stages.model
        if not hasattr(model, "modules"):
            return list(model.parameters().values())
        found: list[Any] = []
        for _, layer in model.modules():
            found += layer.params.values()
            found += layer.buffers.values()
            found += [value for value in vars(layer).values() if isinstance(value, _NUMBERS) or type(value) is tuple]
        return found


def in_turn(program: Program) -> Iterator[tuple[int, Task]]:
    """Yield a step's tasks with the number of their stream, each after those that it waits for."""
    # What is left over for the next step comes too, at its stream's end, but for updates.
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
    """Say whether arrays are the same ones, and numbers equal."""
    return len(one) == len(other) and all(
        a is b or (isinstance(a, _NUMBERS) and type(a) is type(b) and a == b) for a, b in zip(one, other, strict=True)
    )
