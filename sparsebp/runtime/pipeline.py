"""Pipelines: runs the training steps of a model whose stages are on several ranks, in the order of a schedule."""

from __future__ import annotations

import contextlib
import math
import pickle
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sparsebp.comm.transport import Handle, Transport
from sparsebp.core import backend
from sparsebp.core.absent import initial_values, is_absent
from sparsebp.core.check import Array
from sparsebp.core.errors import OptionError, ShapeError, TransportError
from sparsebp.core.packed import arrays_of, packed
from sparsebp.nn.deferred import absent_in, fill
from sparsebp.nn.layer import dotted
from sparsebp.nn.linear import MASK
from sparsebp.optim import Optimizer, Predictor
from sparsebp.runtime.actions import (
    Actions,
    Batch,
    Observer,
    Stages,
    Step,
    StepFunction,
    check_complete,
    check_even,
    in_sequence,
    trained_parameters,
)
from sparsebp.runtime.agreement import check_marks, checksum, exchange, mark_of, options_of
from sparsebp.runtime.executor import Executor
from sparsebp.runtime.streams import check_of_model, fewer, without_frozen
from sparsebp.schedule import Action, Costs, Kind, Overlap, Schedule, Simulation, actions_of, parts_of, simulate
from sparsebp.schedule.builders import place_updates
from sparsebp.schedule.lowering import Await, Compute, Message, Post, RankProgram, Send, Sent, lower

# The actions of one rank of a pipeline: as on one device, but with messages from and to other ranks.


class PipelineActions(Actions):
    """The actions of some of the stages."""

    # own: This rank's stages, and the micro-batches that it runs of each: all, unless the stage is replicated.
    # share: Makes the numbers of a step known to all ranks, before the first update if all gradients are ready by then.

    def __init__(
        self, stages: Stages, loss: Any, optimizer: Any, clip_norm: float | None, observer: Observer,
        own: Mapping[int, Collection[int]], share: StepFunction,
    ) -> None:  # fmt: skip
        super().__init__(stages, loss, optimizer, clip_norm, observer)
        self.own, self._share = own, share
        held = {name for number in own for name in stages[number].parameters.values()}
        self.names = tuple(name for name in stages.names if name in held)

    def runs(self, number: int, m: int) -> bool:
        """Return whether a stage runs on this rank for a micro-batch."""
        return m in self.own.get(number, ())

    def forward(self, number: int, m: int, count: int) -> StepFunction:
        """F; an output that another rank needs goes to the outbox."""
        forward, last = super().forward(number, m, count), number == len(self.stages) - 1
        if self.runs(number + 1, m) or last:
            return forward

        def run(step: Step) -> None:
            forward(step)
            step.outbox["F", number, m] = step.flow[m]
            step.flow[m] = None

        return run

    def _behind(self, number: int) -> Any:
        here, there = self.own.get(number), self.own.get(number + 1)
        return super()._behind(number) if here is not None and here == there else None

    def _loss(self, m: int, count: int) -> StepFunction:
        loss = super()._loss(m, count)

        def run(step: Step) -> None:
            loss(step)
            step.set_score(m, self.observer.score(step.predictions[m], step.targets[m]))

        return run

    def _place(self, step: Step, m: int, number: int, gy: Array) -> None:
        if self.runs(number, m):
            super()._place(step, m, number, gy)
        else:
            step.outbox["I", number + 1, m] = gy

    def receive(self, step: Step, kind: Kind, number: int, m: int, array: Any) -> None:
        """Take the output of the stage before an own one, or the gradient at an own one's output."""
        if kind == "F":
            step.flow[m] = array
        else:
            self._place(step, m, number - 1, array)

    def gather(self, step: Step) -> None:
        """Check all gradients, here and on the other ranks, before any of them is used; clip them."""
        grads = step.grads = {name: step.grads[name] for name in self.names}
        if grads:
            self._look(step, grads)
        self._share(step)
        self._clip(step, grads)


# Whether the stages of a model can be distributed over ranks as a schedule says.


def check_fits_ranks(schedule: Schedule, stages: Stages, transport: Transport, *, predicts: bool) -> None:
    """Refuse a schedule that is not one of this model on these ranks."""
    graph, ranks = schedule.graph, transport.size
    check_of_model(
        schedule, stages,
        (ranks > len(stages), "has more ranks than stages", f"at most {len(stages)} ranks, one a stage", ranks,
         "Start fewer ranks, or train data-parallel, where each rank has all stages"),
        (schedule.workers != ranks, "is for another number of ranks", ranks, schedule.workers,
         f"Build it with workers={ranks}, or start {schedule.workers} ranks"),
        (graph.first != "F", "does not begin with the forwards", "first='F'", repr(graph.first),
         "Use fusion='none' or fusion='backward'"),
        (predicts and graph.weights != "latest", "reads no weights that a predictor could predict",
         "weights='latest', as in dualpipe-2018", repr(graph.weights), "Leave the predictor out"),
        (graph.synchronised, "synchronises gradients between replicas", "no S", "S", "Leave the S out"),
    )  # fmt: skip
    if stages.scans:
        raise OptionError("A scan computes the gradients of all stages at once", expected="backward='bp'",
                          got="stages on several ranks", remedy="Call model.set_backward('bp')")  # fmt: skip
    if graph.updates == "microbatch" and stages.shared():
        raise OptionError("Stages share a parameter that each would update by itself", expected="none",
                          got=", ".join(stages.shared()), remedy="Use a synchronous schedule")  # fmt: skip
    _check_apart(schedule, stages)


def _check_apart(schedule: Schedule, stages: Stages) -> None:
    """Refuse layers with running statistics, and generators, that stages share and no single rank runs in turn."""
    generators: defaultdict[int, set[int]] = defaultdict(set)  # the stages that draw from one
    layers: dict[int, list[str]] = {}
    counting: defaultdict[int, set[int]] = defaultdict(set)  # the stages with a layer with running statistics
    named: dict[int, str] = {}
    for number, stage in enumerate(stages.all):
        for prefix, layer in stage.layer.modules(stage.name) if hasattr(stage.layer, "modules") else ():
            if layer.buffers.keys() - {MASK}:
                counting[id(layer)].add(number)
                named.setdefault(id(layer), prefix)
        drawn = stage.layer.generators() if hasattr(stage.layer, "generators") else {}
        for name, generator in drawn.items():
            generators[id(generator)].add(number)
            layers.setdefault(id(generator), []).append(f"{stage.name}.{name}".strip("."))
    counted = [named[key] for key, several in counting.items() if not _count_in_turn(schedule, several)]
    if counted:
        raise OptionError("A layer with running statistics is in stages on several ranks, or in another order than in "
                          "one worker", expected="all of its stages on one rank, in turn", got=", ".join(counted),
                          remedy=_SINGLE if schedule.replicated else "Use a separate layer in each")  # fmt: skip
    drawn_by = [", ".join(layers[key]) for key, drawing in generators.items() if not _draw_in_turn(schedule, drawing)]
    if drawn_by:
        raise OptionError("Layers on several ranks, or in another order than in one worker, draw from one random "
                          "generator", expected="a generator for each of them", got="; ".join(drawn_by),
                          remedy="Build each with a separate seed: rng=1, rng=2, …")  # fmt: skip


_SINGLE = "Take a schedule with each stage on one rank, as dualpipe-v"


def _count_in_turn(schedule: Schedule, stages: set[int]) -> bool:
    """Return whether running statistics that these stages share change as in one worker."""
    if len(stages) == 1:
        return len(schedule.workers_of(min(stages))) == 1
    return _draw_in_turn(schedule, stages)


def _draw_in_turn(schedule: Schedule, stages: set[int]) -> bool:
    """Return whether one rank runs these stages forward in the order of one worker: a micro-batch after another."""
    if len(stages) == 1 and stages <= schedule.replicated:
        return True  # refused if it draws, which layers with a dropout of 0 do not: see `_undrawn`
    ranks = {rank for number in stages for rank in schedule.workers_of(number)}
    cells = [part for lane in schedule.lanes if lane.worker in ranks for cell in lane.cells for part in parts_of(cell)]
    order = [(part.microbatch, part.stage) for part in cells if part.kind == "F" and part.stage in stages]
    return len(ranks) == 1 and order == sorted(order)


# The arrays that ranks send each other in one step: activations forward, gradients backward.
#
# A receiver must know the size of an array. It follows from the input of the model alone, which every rank has: so both
# ends of a message know whether such an input has occurred before. If not, the array's shape goes first, and is kept.
_MOST_AXES = 32
_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


class _Form(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype


class P2PBuffers:
    """Sends and receives the messages of a rank's steps."""

    # xp: The namespace of the model's arrays.
    # stashed: The names of the arrays that are sent along behind each stage; each is sent as one more array.
    # In a step with an input of a new shape, a receive begins when its array is waited for, after everything that its
    # sender has sent before, and no send is waited for before the step's end. The order of the computations alone then
    # keeps the ranks from a deadlock, and `sparsebp.schedule.schedule` has checked that order.

    def __init__(self, transport: Transport, xp: ModuleType, stashed: Sequence[tuple[str, ...]]) -> None:
        self._transport, self._xp, self._stashed = transport, xp, stashed
        self._carrier = xp if transport.on_device else np
        self._forms: dict[tuple[int, Hashable], tuple[_Form, ...]] = {}
        self._known: set[Hashable] = set()
        self._inputs: Sequence[Hashable] = ()
        self._posted: dict[Message, list[tuple[Handle, Array]]] = {}
        self._due: defaultdict[int, deque[Message]] = defaultdict(deque)  # by sender, in their order: not begun yet
        self._sent: dict[Message, list[tuple[Handle, Array]]] = {}
        self._defers = False

    def begin(self, inputs: Sequence[Hashable]) -> None:
        """Begin a step; `inputs` are equal where the shapes of the micro-batches' inputs are."""
        self._inputs = inputs
        self._defers = not self._known.issuperset(inputs)
        self._posted.clear()
        self._due.clear()
        self._sent.clear()

    def post(self, message: Message) -> None:
        """Begin to receive, if the size is known."""
        if self._defers:
            self._due[message.sender].append(message)
        else:
            self._receive(message, self._forms[self._key(message)])

    def take(self, message: Message) -> Any:
        """Return the activation of a message, or the gradient, when it has arrived."""
        while message not in self._posted:
            first = self._due[message.sender].popleft()
            key = self._key(first)
            if first.source.kind == "F" and key[1] not in self._known:
                self._forms[key] = tuple(self._header(first) for _ in range(1 + len(self._stashed[first.boundary])))
            self._receive(first, self._forms[key])  # a gradient's is the form of the output that this rank has sent
        arrays = []
        for handle, array in self._posted.pop(message):
            handle.wait()
            arrays.append(backend.as_namespace(array, self._xp))
        return packed(self._stashed[message.boundary], tuple(arrays))

    def send(self, message: Message, value: Any) -> None:
        """Begin to send."""
        arrays = arrays_of(value)
        key, forms = self._key(message), tuple(_Form(array.shape, array.dtype) for array in arrays)
        sends = self._sent.setdefault(message, [])
        if message.source.kind == "F" and key[1] not in self._known:
            self._forms[key] = forms
            for header in map(_written, forms):
                sends.append((self._transport.isend(self._carried(header), message.receiver, message.tag), header))
        elif self._forms[key] != forms:
            raise ShapeError(
                f"{message.source} returns another shape than before, or than the output that it is a gradient of",
                expected=", ".join(map(_shown, self._forms[key])), got=", ".join(map(_shown, forms)),
                remedy="Let shapes depend on the input's alone"
            )  # fmt: skip
        for carried in map(self._carried, arrays):
            sends.append((self._transport.isend(carried, message.receiver, message.tag), carried))

    def sent(self, message: Message) -> None:
        """Wait until a message has left, and release its array."""
        if not self._defers:
            self._leave(message)

    def end(self) -> None:
        """Wait until all messages have left: the end of a step."""
        for message in list(self._sent):
            self._leave(message)
        self._known.update(self._inputs)

    def swap(
        self, own: Array | None, like: Array, others: Sequence[int], makers: Sequence[int]
    ) -> Callable[[], list[Array]]:
        """Begin to send `own` to other ranks, and to receive what is like it; the result returns that of `makers`."""
        carried = None if own is None else self._carried(own)
        buffers = {rank: self._carrier.empty(like.shape, like.dtype) for rank in others if rank in makers}
        handles = [] if carried is None else [self._transport.isend(carried, rank, 0) for rank in others]
        handles += [self._transport.irecv(buffer, rank, 0) for rank, buffer in buffers.items()]

        def finish() -> list[Array]:
            for handle in handles:
                handle.wait()
            return [backend.as_namespace(buffers[rank], self._xp) if rank in buffers else own for rank in makers]

        return finish

    def _leave(self, message: Message) -> None:
        for handle, _ in self._sent.pop(message, ()):
            handle.wait()

    def _key(self, message: Message) -> tuple[int, Hashable]:
        return message.boundary, self._inputs[message.source.microbatch or 0]

    def _receive(self, message: Message, forms: Sequence[_Form]) -> None:
        arrays = [self._carrier.empty(*form) for form in forms]
        self._posted[message] = [(self._transport.irecv(out, message.sender, message.tag), out) for out in arrays]

    def _header(self, message: Message) -> _Form:
        header = self._carrier.empty(2 + _MOST_AXES, np.float64)
        self._transport.irecv(header, message.sender, message.tag).wait()
        kind, axes, *shape = map(int, backend.to_host(header))  # synchronize!
        return _Form(tuple(shape[:axes]), _DTYPES[kind])

    def _carried(self, array: Array) -> Array:
        """Return an array in the form that the transport takes."""
        return self._carrier.ascontiguousarray(backend.as_namespace(array, self._carrier))


def _written(form: _Form) -> np.ndarray:
    if form.dtype not in _DTYPES or len(form.shape) > _MOST_AXES:
        raise ShapeError("A stage's output cannot be sent to another rank", got=_shown(form),
                         expected=f"float32 or float64, at most {_MOST_AXES} axes",
                         remedy="Keep this stage and the next one on one rank")  # fmt: skip
    header = np.zeros(2 + _MOST_AXES)
    header[:2] = _DTYPES.index(form.dtype), len(form.shape)
    header[2 : 2 + len(form.shape)] = form.shape
    return header


def _shown(form: _Form) -> str:
    return f"{form.dtype} {form.shape}"


# The weights that asynchronous schedules read: older ones that are kept (stashed), the newest, or predicted ones.
#
# The optimizer updates one set of weights in place, the masters. Other weights are written into their place while an
# action that reads them runs; then the masters come back, bitwise equal.


class Distance(NamedTuple):
    """How far the weights that an action read, and the newest ones by then, were from the weights they stood for.

    Attributes
    ----------
    action
        A forward or backward of a micro-batch of the step.
    ahead
        The number of updates between the version that it read, or predicted from, and W_true.
    predicted, stale
        Root mean squares over the stage's weights: of Ŵ − W_true, and of W_stale − W_true.
    """

    action: Action
    ahead: int
    predicted: float
    stale: float


Note: TypeAlias = Callable[[Distance], None]


class Versions:
    """The versions of the weights of some stages, in the steps of an asynchronous schedule."""

    # names: For every stage the names of its parameters that are trained.
    # live: Those parameters, as the optimizer updates them.
    # stashed: Whether a backward reads the version that its forward read, or the newest one.
    # predictor: Predicts the weights that the actions of its `kinds` read; None: the schedule's.
    # note: Is told each `Distance` as soon as it is known. That takes a copy of the weights that each action reads.
    # reads: For every forward and backward of the last step, how often its stage had been updated when the version that
    # it read, or that was predicted from, was made.

    def __init__(
        self, names: Mapping[int, Sequence[str]], live: Mapping[str, Array], *, stashed: bool,
        predictor: Predictor | None, note: Note | None,
    ) -> None:  # fmt: skip
        self._names, self._live, self._stashed = {k: tuple(some) for k, some in names.items() if some}, live, stashed
        self._predictor, self._note = predictor, note
        self.begin({})

    def ahead(self, schedule: Schedule) -> dict[Action, int]:
        """Return how many updates ahead the weights are that each F and I stands for, by the simulated schedule."""
        # Until its micro-batch's round trip is over, see `Simulation.version_difference`, or as the predictor's
        # `horizon` says. Empty if nothing needs it.
        if self._predictor is None and self._note is None:
            return {}
        found = simulate(schedule, units(schedule))
        of = Simulation.version_difference
        if self._predictor is not None and self._predictor.horizon == "update":
            of = Simulation.staleness
        return {
            action: of(found, action) for stage in self._names for m in range(schedule.graph.microbatches)
            for action in (Action(stage, "F", m), Action(stage, "I", m)) if action in schedule
        }  # fmt: skip

    def begin(self, ahead: Mapping[Action, int]) -> None:
        """Begin a step: no update has been made, nothing is kept."""
        self._ahead = ahead
        self.reads: dict[Action, int] = {}
        self._count = dict.fromkeys(self._names, 0)
        self._stash: dict[tuple[int, int], dict[str, Array]] = {}
        self._open: defaultdict[tuple[int, int], set[int]] = defaultdict(set)  # (stage, version) -> micro-batches
        self._waiting: defaultdict[tuple[int, int], list[tuple[Action, int, dict[str, Array], dict[str, Array]]]]
        self._waiting = defaultdict(list)

    @contextlib.contextmanager
    def reading(self, stage: int, kind: str, m: int) -> Iterator[None]:
        """Let F, I, W or B read its weights; W by itself reads those that an I would read then."""
        if stage not in self._names:
            yield
            return
        action, newest = Action(stage, "F" if kind == "F" else "I", m), self._count[stage]
        version, weights = newest, None
        if self._stashed and action.kind == "F":
            self._open[stage, version].add(m)
        elif self._stashed:
            version = self.reads[Action(stage, "F", m)]
            weights = self._stash.get((stage, version))
        if kind != "W":  # a W by itself is not recorded
            self.reads[action] = version
        if self._predictor is not None and action.kind in self._predictor.kinds:
            s = self._ahead.get(action, 0)
            if s > 0:
                weights = self._predictor.predict(self._names[stage], s)
        if kind != "W" and self._note is not None and action in self._ahead:
            self._expect(action, version, weights)
        if weights is None:
            yield
        else:
            with self._swapped(weights):
                yield

    def release(self, stage: int, m: int) -> None:
        """The backward of a micro-batch is over: release its version, unless another one needs it."""
        if self._stashed and stage in self._names:
            key = stage, self.reads[Action(stage, "F", m)]
            self._open[key].discard(m)
            if not self._open[key]:
                self._stash.pop(key, None)

    def updating(self, stage: int) -> None:
        """Keep the weights that an update is about to overwrite, if a backward is still to read them."""
        key = stage, self._count[stage]
        if self._open[key]:
            self._stash[key] = {name: self._live[name].copy() for name in self._names[stage]}

    def updated(self, stage: int, grads: Mapping[str, Array]) -> None:
        """An update has been made from these gradients."""
        if self._predictor is not None:
            self._predictor.observe(grads, grads)
        self._count[stage] += 1
        for action, ahead, read, stale in self._waiting.pop((stage, self._count[stage]), ()):
            self._measure(action, ahead, read, stale)

    @contextlib.contextmanager
    def _swapped(self, weights: Mapping[str, Array]) -> Iterator[None]:
        masters = {name: self._live[name].copy() for name in weights}
        try:
            for name, values in weights.items():
                self._live[name][...] = values
            yield
        finally:
            for name, values in masters.items():
                self._live[name][...] = values

    def _expect(self, action: Action, version: int, weights: Mapping[str, Array] | None) -> None:
        ahead, stage = self._ahead[action], action.stage
        stale = {name: self._live[name].copy() for name in self._names[stage]}
        read = stale if weights is None else dict(weights)
        if version + ahead <= self._count[stage]:
            self._measure(action, ahead, read, stale)
        else:
            self._waiting[stage, version + ahead].append((action, ahead, read, stale))

    def _measure(self, action: Action, ahead: int, read: Mapping[str, Array], stale: Mapping[str, Array]) -> None:
        if self._note is not None:
            self._note(Distance(action, ahead, self._rms(read), self._rms(stale)))

    def _rms(self, weights: Mapping[str, Array]) -> float:
        """Return the root mean square of the difference to the masters."""
        total = 0.0
        for name, array in weights.items():
            difference = array - self._live[name]
            total += float((difference * difference).sum(dtype=np.float64))  # synchronize!
        return math.sqrt(total / max(1, sum(array.size for array in weights.values())))


def units(schedule: Schedule) -> Costs:
    """Return costs that make every worker's time unit equally long: a forward and a backward of all its stages."""
    # A worker that overlaps them has the whole unit for each; one that runs them in sequence, half of it.
    overlaps = {lane.worker for lane in schedule.lanes if any(isinstance(cell, Overlap) for cell in lane.cells)}
    owners = schedule.allocation

    def duration(action: Action) -> float:
        if action.kind in "US":
            return 0.0
        worker = owners[action.stage]
        share = 1 / owners.count(worker) if worker in overlaps else 0.5 / owners.count(worker)
        apart = action.kind in "IW" and Action(action.stage, "W" if action.kind == "I" else "I", action.microbatch)
        return share / 2 if apart and apart in schedule else share

    return Costs(duration)


def gather_buffers(transport: Transport, stages: Stages, owners: Sequence[int]) -> None:
    """Gather buffers and the states of random generators on every rank; all ranks call it."""
    # owners: The rank of every stage, whose values count.
    arrays: dict[str, tuple[int, Array]] = {}
    generators: dict[str, tuple[int, np.random.Generator]] = {}
    for number, owner in enumerate(owners):
        stage = stages[number]
        for prefix, layer in stage.layer.modules(stage.name) if hasattr(stage.layer, "modules") else ():
            arrays |= {dotted(prefix, key): (owner, array) for key, array in layer.buffers.items()}
            if layer.generator is not None:
                generators[prefix] = owner, layer.generator
    exchange(transport, arrays)
    drawn = {key: made.bit_generator.state for key, (owner, made) in generators.items() if owner == transport.rank}
    for states in transport.share(drawn):
        for key, state in states.items():
            generators[key][1].bit_generator.state = state


def gather_state(
    transport: Transport, stages: Stages, optimizer: Any, owners: Sequence[int], predictor: Any = None
) -> None:
    """Gather parameters and optimizer state on every rank; all ranks call it."""
    # optimizer: `state_dict` and `load_state_dict` as `sparsebp.optim.Optimizer` has them: state of one parameter has a
    # name that ends with the parameter's. The predictor's state is like it.
    # owners: As for `gather_buffers`.
    live = stages.model.parameters()
    arrays = {name: (owner, live[name]) for number, owner in enumerate(owners)
              for name in stages[number].parameters.values()}  # fmt: skip
    state = optimizer.state_dict()
    owner_of = {name: arrays[name][0] for name in stages.names}
    numbers: dict[str, int] = {}
    for key, value in state.items():
        name = _parameter(key, owner_of)
        if name is not None and isinstance(value, np.ndarray | type(live[name])):
            arrays[f"optimizer {key}"] = owner_of[name], value
        elif name is not None:
            numbers[key] = owner_of[name]
    exchange(transport, arrays)
    rank = transport.rank
    for values in transport.share({key: state[key] for key, owner in numbers.items() if owner == rank}):
        state |= values
    optimizer.load_state_dict(state)
    if predictor is not None:
        kept: dict[str, Any] = {}
        for key, value in predictor.state_dict().items():
            name = _parameter(key, owner_of)
            if name is None or owner_of[name] == rank:
                kept[key] = backend.to_host(value) if hasattr(value, "ndim") else value
        predictor.load_state_dict({key: value for part in transport.share(kept) for key, value in part.items()})


def own_stages(schedule: Schedule, rank: int) -> list[int]:
    """Return the stages that a schedule has on a rank."""
    return [stage for stage in range(schedule.graph.stages) if rank in schedule.workers_of(stage)]


def hold_stages(stages: Stages, optimizer: Any, numbers: Iterable[int]) -> None:
    """Make the parameters of some stages, and their optimizer state, of a model that was built without memory."""
    lacking = absent_in(stages[number].layer for number in numbers)
    if not lacking:
        return
    if not isinstance(optimizer, Optimizer):
        raise OptionError("The optimizer cannot be built on parameters without memory", got=type(optimizer).__name__,
                          expected="one of sparsebp.optim", remedy="Call materialize(model) before")  # fmt: skip
    arrays = {id(stand_in): values for stand_in, values in initial_values(lacking)}
    fill(stages.model, arrays)
    stages.model.parameters()  # given out to the optimizer
    optimizer._fill(arrays)


def forget_initial_values(model: Any) -> None:
    """Let nobody take initial values for those of stages that other ranks train."""
    for stand_in in absent_in([model]):
        stand_in.recipe = None


def _parameter(key: str, names: Mapping[str, Any]) -> str | None:
    """Return the parameter that an entry of an optimizer's state belongs to: the longest name that it ends with."""
    for at in range(len(key) + 1):
        if (at == 0 or key[at - 1] == ".") and key[at:] in names:
            return key[at:]
    return None


RankTask: TypeAlias = Callable[[list[Step]], None]
"""Runs for the steps under way: one, or one a micro-batch."""


class _RankTasks(NamedTuple):
    """A rank's tasks of a step, and how many updates ahead the weights are that its actions stand for."""

    tasks: list[RankTask]
    ahead: dict[Action, int]


class PipelineExecutor(Executor):
    """One rank's part of the steps of a model whose stages are on several ranks.

    A rank computes and updates only its own stages. Of a model that was built within `sparsebp.nn.deferred_init` it
    makes and holds only theirs; of a whole model on every rank `flush` brings the others' up to date.
    The gradients equal one worker's, up to the rounding of their sums; bitwise if micro-batches come to every stage in
    their order.

    Parameters
    ----------
    model, loss, optimizer
        As for `sparsebp.runtime.executor.PlainExecutor`; the same on all ranks, from the same seed.
    schedule
        For the model's stages and as many workers as there are ranks; worker and rank have the same number. Without
        updates it gets them at its end.
    transport
        Between the ranks.
    clip_norm
        Largest Euclidean norm of the gradients of all stages together; None does not clip.
    observer
        Is told of losses, on the last stage's rank, and of gradients that are not finite, on their stage's.
    predictor
        Predicts the weights that forwards and backwards read, in an asynchronous schedule with ``weights="latest"``;
        None: they read the newest ones. Built on `optimizer`.
    note
        Is told each `Distance` of an asynchronous schedule's own stages as soon as it is known; None measures none.

    Raises
    ------
    OptionError
        The schedule is not for this model on these ranks; stages on several ranks share a random generator; they share
        a parameter, or `clip_norm` is set, and the schedule updates before all gradients are known; or a predictor is
        given but there is nothing to predict.
    ScheduleError
        The schedule cannot run.

    Notes
    -----
    `times` has begin and end of each action of this rank in the last step with all micro-batches, by
    ``time.perf_counter()``; see `sparsebp.runtime.launch`.

    The gradients of replicated stages (`Schedule.replicated`) are summed over their ranks after the last action, and
    all stages are updated then: these sums are grouped by rank, and equal one worker's up to rounding. So are those of
    a parameter that stages on several ranks share (an embedding and the output layer, say), before the first update:
    each of these ranks makes the same update of it.

    In an asynchronous schedule (``updates="microbatch"``) every micro-batch is a batch by itself: its own mean is its
    loss, whose gradient updates every stage. A step is the stream of the schedule's micro-batches; the pipeline fills
    at its beginning and drains at its end. Its loss is the mean over all that counts, and its squared norm is the mean
    of the micro-batches' squared norms. The learning rate is the one at the step's beginning. The schedule decides
    which version an action reads (`Simulation.version`), whatever the ranks' speeds: results are the same on every run.

    All ranks learn the numbers of a step (losses, scores, sums of squares) once a step, before the first update where
    the schedule has all gradients by then: a number that is not finite then stops all ranks before any parameter has
    changed.
    """

    has_all_stages = False
    uncaptured = ("ranks wait for each other on the host",)

    def __init__(
        self, model: Any, loss: Any, optimizer: Any, schedule: Schedule, transport: Transport, *,
        clip_norm: float | None = None, observer: Observer | None = None, predictor: Predictor | None = None,
        note: Note | None = None,
    ) -> None:  # fmt: skip
        self.stages = Stages(model, trained_parameters(model, optimizer))
        schedule = without_frozen(schedule, self.stages)
        if schedule.graph.updates == "none" and not schedule.replicated:
            schedule = place_updates(schedule)
        check_fits_ranks(schedule, self.stages, transport, predicts=predictor is not None)
        self.schedule, self._transport, self._optimizer = schedule, transport, optimizer
        self.owners = schedule.allocation
        everything = range(schedule.graph.microbatches)
        own = {stage: frozenset(m for m in everything if schedule.worker_of(stage, m) == transport.rank)
               for stage in range(len(self.stages)) if transport.rank in schedule.workers_of(stage)}  # fmt: skip
        self._losses_of = [schedule.worker_of(len(self.stages) - 1, m) for m in everything]  # ranks
        hold_stages(self.stages, optimizer, own)
        self.stages = Stages(model, trained_parameters(model, optimizer))
        self._lacks = any(transport.share(any(map(is_absent, model.parameters().values()))))
        if self._lacks and predictor is not None:
            raise OptionError("A predictor keeps weights of all stages", expected="all parameters on every rank",
                              got="a model built by deferred_init", remedy="Build it without")  # fmt: skip
        self._actions = self._make_actions(loss, optimizer, clip_norm, observer or Observer(), own)
        self._actions.recomputed = schedule.recomputed
        xp = backend.namespace(next(iter(model.parameters().values())))
        self._p2p = P2PBuffers(transport, xp, self.stages.stashed)
        names = {number: tuple(dict.fromkeys(self.stages[number].parameters.values())) for number in own}
        stashed = schedule.graph.weights == "stashed"
        self._predictor = predictor
        self._versions = Versions(names, model.parameters(), stashed=stashed, predictor=predictor, note=note)
        self._asynchronous = schedule.graph.updates == "microbatch"
        self._programs: dict[int, _RankTasks] = {}
        self.times: dict[Action, tuple[float, float]] = {}
        programs = lower(schedule)
        self._gathered = all(_gathers(program) for program in programs)
        if clip_norm is not None and not self._gathered:
            raise OptionError("The norm of all gradients is not known before the first update",
                              expected="all gradients before the first U, on every rank",
                              remedy="Do not clip by the norm",
                              got=f"clip_norm={clip_norm} and the schedule {schedule.name or 'given'!r}")  # fmt: skip
        self._held_by = _held_by(schedule, self.stages)
        several = [name for name, ranks in self._held_by.items() if len(ranks) > 1]
        if several and not self._gathered:
            raise OptionError("A parameter is shared by stages on several ranks, and updated before they all have its "
                              "gradients", expected="all gradients before the first U, on every rank",
                              got=f"{', '.join(several)} and the schedule {schedule.name or 'given'!r}",
                              remedy="Place the updates at the end, or the stages on one rank")  # fmt: skip
        self._programs[schedule.graph.microbatches] = self._program_of(schedule, programs)
        self._failed = False
        self._apart = False  # whether other ranks have updated their stages since these were brought up to date
        self._begun = False
        self._samples: list[str] = []

    def _make_actions(
        self, loss: Any, optimizer: Any, clip_norm: float | None, observer: Observer, own: Mapping[int, Collection[int]]
    ) -> PipelineActions:
        return PipelineActions(
            self.stages, loss, optimizer, clip_norm, observer, own, lambda step: self._share([step])
        )  # fmt: skip

    @property
    def pending(self) -> bool:
        """Whether the parameters of other ranks' stages have changed since they were last brought up to date here."""
        return self._apart

    @property
    def reads(self) -> dict[Action, int]:
        """The version of its stage's weights that each own F and I of the last asynchronous step has read, from 0."""
        return self._versions.reads

    def step(self, batches: Sequence[Batch], tag: Any = None) -> list[Step]:
        """Run one step, on all ranks with the same batches; see `PlainExecutor.step`.

        Returns
        -------
        list of Step
            This one, with its numbers; the rank of the last stage has the predictions.

        Raises
        ------
        TransportError
            Another rank has failed, or a step has failed before; or ranks have other samples, or other options of the
            optimizer.
        Exception
            Any error of an action. Some stages may have been updated then, and no further step is right.
        """
        if self._failed:
            raise TransportError("A step has failed on this rank", expected="no step after it", got="a further step",
                                 remedy="Start all ranks again, from a checkpoint")  # fmt: skip
        self.stages.check_current()
        if not self._begun:
            check_even(self._actions.optimizer, self.stages.names)
            self._begun = True
        check_complete(self._actions.optimizer, self.stages)
        self._failed = True
        steps = self._new(batches, tag)
        # The shapes inside the model follow from these.
        self._p2p.begin([tuple((x.shape, x.dtype.str) for x in (batch[0], *batch[2:])) for batch in batches])
        # The first stage has one rank's inputs, the last one another's targets, which must be of the same samples.
        # Arrays on a device are not read for that.
        self._samples = [checksum(part) for batch in batches for part in batch if isinstance(part, np.ndarray)]
        program = self._compiled(len(batches))
        self._versions.begin(program.ahead)
        self._apart = True
        if self._lacks:
            forget_initial_values(self.stages.model)
        for task in program.tasks:
            task(steps)
        self._p2p.end()
        if not self._gathered:
            self._share(steps)
        self._failed = False
        return [self._joined(steps, batches, tag)]

    def flush(self, *, wait: bool = True) -> list[Step]:
        """Bring all stages' buffers, and the parameters that all ranks hold, up to date; all ranks call it together."""
        if self._apart:
            gather_buffers(self._transport, self.stages, self.owners)
            if self._lacks:
                self._optimizer._count_absent(max(self._transport.share(self._optimizer._most_updates())))
            else:
                gather_state(self._transport, self.stages, self._optimizer, self.owners, self._predictor)
            self._apart = False
        return []

    # ---- one step ----------------------------------------------------------------------------------------------------

    def _new(self, batches: Sequence[Batch], tag: Any) -> list[Step]:
        parts = [[batch] for batch in batches] if self._asynchronous else [batches]
        steps = [Step(part, self.stages, tag) for part in parts]
        for step in steps:
            step.update = self._actions.optimizer.begin()
            self._actions.share(step)
            first = self._actions.own.get(0, ())
            step.flow = [x if m in first else None for m, x in enumerate(step.flow)]
        return steps

    def _joined(self, steps: list[Step], batches: Sequence[Batch], tag: Any) -> Step:
        if not self._asynchronous:
            return steps[0]
        whole = Step(batches, self.stages, tag)
        counts = [step.counted for step in steps]
        whole.set_shares(counts, sum(counts))
        for m, step in enumerate(steps):
            whole.values[m], whole.scores[m], whole.predictions[m] = step.values[0], step.scores[0], step.predictions[0]
            for name, square in step.squares.items():
                whole.squares[name] = whole.squares.get(name, 0.0) + square / len(steps)
        return whole

    def _share(self, steps: Sequence[Step]) -> None:
        """Tell all ranks losses, scores and sums of squares, and check that samples and options are the same."""
        numbers = [(step.values, step.scores) for step in steps] if self._transport.rank in self._losses_of else None
        own = (numbers, [step.squares for step in steps], self._samples, mark_of(options_of(self._optimizer)))
        shared = self._transport.share(own)
        check_marks([mark for _, _, _, mark in shared])
        for rank, (_, _, samples, _) in enumerate(shared):
            if samples != shared[0][2]:
                raise TransportError(f"Rank {rank} has other samples than rank 0",
                                     expected="the same batches on all ranks",
                                     got="inputs or targets of another checksum",
                                     remedy="Give all ranks the same data, in one order")  # fmt: skip
        for number, step in enumerate(steps):
            found = [shared[rank][0][number] for rank, _ in zip(self._losses_of, step.values, strict=False)]
            step.values = [values[m] for m, (values, _) in enumerate(found)]
            step.scores = [scores[m] for m, (_, scores) in enumerate(found)]
            step.squares = {name: value for _, squares, _, _ in shared for name, value in squares[number].items()}

    # ---- programs ----------------------------------------------------------------------------------------------------

    def _compiled(self, count: int) -> _RankTasks:
        if count not in self._programs:
            part = fewer(self.schedule, count)
            self._programs[count] = self._program_of(part, lower(part))
        return self._programs[count]

    def _program_of(self, schedule: Schedule, programs: Sequence[RankProgram]) -> _RankTasks:
        ahead = self._versions.ahead(schedule) if self._asynchronous else {}
        return _RankTasks(self._tasks(programs[self._transport.rank], schedule.graph.microbatches), ahead)

    def _tasks(self, program: RankProgram, count: int) -> list[RankTask]:
        tasks: list[RankTask] = []
        parts = [part for one in program.instructions if isinstance(one, Compute) for part in parts_of(one.cell)]
        ends = {(part.stage, part.microbatch): part for part in parts if part.kind in "IW"}  # the last of each backward
        names = self.stages.updated_at([part.stage for part in parts if part.kind == "U"], last=True)
        gathers, whole = self._gathered, count == self.schedule.graph.microbatches
        gather = in_sequence(partial(self._sum_over_ranks, count), self._actions.gather)
        for one in program.instructions:
            match one:
                case Compute(cell):
                    for action in actions_of(cell):
                        if action.kind == "U" and gathers:
                            tasks.append(_of_the_step(gather))
                            gathers = False
                        run = in_sequence(*(r for part in parts_of(action) for r in self._runs(part, count, names)))
                        last = ends.get((action.stage, action.microbatch)) in parts_of(action)
                        task = self._versioned(action, run, last) if self._asynchronous else _of_the_step(run)
                        tasks.append(self._timed(action, task) if whole else task)
                case Post(message) | Await(message) | Send(message) | Sent(message):
                    if message.source.kind == "F" or message.source.stage > self.stages.first:
                        tasks.append(self._carries(one, message))
                case _:
                    raise OptionError("A pipeline has no replicas", expected="no S", got=str(one))
        if gathers:
            tasks.append(_of_the_step(gather))
        if self.schedule.replicated and self._actions.names:
            tasks.append(_of_the_step(self._actions.update(self._actions.names, gathered=True)))
        return tasks

    def _sum_over_ranks(self, count: int, step: Step) -> None:
        """Sum the gradients of parameters that several ranks hold: by micro-batch, and the last stage's first."""
        under_way, live = {}, self.stages.model.parameters()
        for name in self._actions.names:
            like = self._summed_like(name, live[name])
            others = [rank for rank in self._held_by[name] if rank != self._transport.rank]
            if others and like is not None:
                holders = [number for number, stage in enumerate(self.stages.all) if name in stage.parameters.values()]
                makers = dict.fromkeys(
                    self.schedule.worker_of(number, m) for m in range(count) for number in reversed(holders)
                )
                under_way[name] = self._p2p.swap(step.grads.get(name), like, others, list(makers))
        for name, finish in under_way.items():
            first, *more = finish()
            step.grads[name] = sum(more, first)

    def _summed_like(self, name: str, param: Array) -> Array | None:
        """Return an array like this rank's part of a parameter's gradient: all of it. None: it has no part."""
        return param

    def _runs(self, part: Action, count: int, names: dict[int, list[str]]) -> list[StepFunction]:
        """Return the function that a part of a cell runs, if any."""
        number, m, actions = part.stage, part.microbatch or 0, self._actions
        if self._asynchronous:  # each micro-batch is a separate step
            m, count = 0, 1
        if part.kind == "F":
            forward = actions.forward(number, m, count)
            return [self._undrawn(number, forward) if number in self.schedule.replicated else forward]
        if part.kind == "I":
            return [actions.input_grad(number, m)] if number > self.stages.first else []
        if not self.stages[number].parameters:
            return []
        if part.kind == "W":
            return [actions.weight_grad(number, m)]
        # The update of a shared parameter is with another stage's.
        return [actions.update(names[number], gathered=self._gathered)] if number in names else []

    def _undrawn(self, number: int, forward: StepFunction) -> StepFunction:
        """Return the F of a replicated stage: a draw is refused, for the other ranks would make the same one."""
        stage = self.stages[number]

        def run(step: Step) -> None:
            generators = stage.layer.generators() if hasattr(stage.layer, "generators") else {}
            before = {name: pickle.dumps(generator.bit_generator.state) for name, generator in generators.items()}
            forward(step)
            for name, generator in generators.items():
                if pickle.dumps(generator.bit_generator.state) != before[name]:
                    raise OptionError(f"The layer {stage.name}.{name}".strip(".") + " draws random numbers on several "
                                      "ranks", expected="no dropout", got="draws", remedy=_SINGLE)  # fmt: skip

        return run

    def _timed(self, action: Action, task: RankTask) -> RankTask:
        def timed(steps: list[Step]) -> None:
            begin = time.perf_counter()
            task(steps)
            self.times[action] = begin, time.perf_counter()

        return timed

    def _versioned(self, action: Action, run: StepFunction, last: bool) -> RankTask:
        """Return a task of an asynchronous schedule; with `last` a micro-batch's backward is over after it."""
        versions, number, kind, m = self._versions, action.stage, action.kind, action.microbatch or 0

        def compute(steps: list[Step]) -> None:
            with versions.reading(number, kind, m):
                run(steps[m])
            if last:
                versions.release(number, m)

        def update(steps: list[Step]) -> None:
            grads = {name: steps[m].grads[name] for name in self.stages[number].parameters.values()}
            versions.updating(number)
            run(steps[m])
            versions.updated(number, grads)

        return update if kind == "U" else compute

    def _carries(self, one: Post | Await | Send | Sent, message: Message) -> RankTask:
        p2p, actions, (number, kind, m) = self._p2p, self._actions, message.source
        which, place = (m or 0, 0) if self._asynchronous else (0, m or 0)
        match one:
            case Post():
                return lambda steps: p2p.post(message)
            case Await():
                own = number + 1 if kind == "F" else number
                return lambda steps: actions.receive(steps[which], kind, own, place, p2p.take(message))
            case Send():
                return lambda steps: p2p.send(message, steps[which].outbox.pop((kind, number, place)))
            case Sent():
                return lambda steps: p2p.sent(message)


def _held_by(schedule: Schedule, stages: Stages) -> dict[str, list[int]]:
    """Return the ranks that hold each trained parameter."""
    held: dict[str, set[int]] = {}
    for number, stage in enumerate(stages.all):
        for name in stage.parameters.values():
            held.setdefault(name, set()).update(schedule.workers_of(number))
    return {name: sorted(ranks) for name, ranks in held.items()}


def _of_the_step(run: StepFunction) -> RankTask:
    return lambda steps: run(steps[0])


def _gathers(program: RankProgram) -> bool:
    """Whether a rank has all its gradients, and has sent everything that others need, before its first update."""
    kinds = [part.kind for one in program.instructions if isinstance(one, Compute) for part in parts_of(one.cell)]
    return "U" not in kinds or set(kinds[kinds.index("U") :]) == {"U"}
