"""The functions behind each action of a schedule: stages of a model, and the state of a step between them."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend, parts
from sparsebp.core.check import Array, ProductFactors
from sparsebp.core.errors import OptionError
from sparsebp.core.locks import cached_property
from sparsebp.core.shortcuts import forward_of, shortcuts_of
from sparsebp.nn import fused
from sparsebp.nn.branches import add_up
from sparsebp.nn.gradients import Gradients, PassingGradients, gradients_of, undisturbed
from sparsebp.nn.loss import check_counts, check_mean, count_of, summed
from sparsebp.nn.recurrent.carried import CarriedState
from sparsebp.nn.sequential import taking_lengths
from sparsebp.nn.skips import stashed_after
from sparsebp.nn.steps import OutputSteps, ValidSteps, class_steps, output_steps
from sparsebp.optim.optimizer import clip_grad_norm, clip_on_device, square_sums, squared_norms, total_norm
from sparsebp.schedule import Kind

# The stages of a model for an executor, and the parameters that an optimizer trains.


@dataclass(frozen=True)
class Stage:
    """A part of a model that runs by itself."""

    name: str
    layer: Any
    # The model's name of every trained parameter by the name in the layer's `weight_grad`. Two names map to one where
    # the layer, or the model, shares the parameter.
    parameters: dict[str, str]
    frozen: bool = False  # Whether it has parameters and none of them is trained


class Stages:
    """All stages of a model, in the order of forward."""

    # model: A `Layer`, or one stage: anything with `forward`, `weight_grad` and `parameters`.
    # trained: The trained parameters by name, or their names alone, in the model's order; None: all.
    # stashed: The names of the arrays that go past the end of each stage, see `sparsebp.nn.Stash`.
    # first: The number of the first stage with trained parameters: no gradient is needed at its input, nor before it.

    def __init__(self, model: Any, trained: Iterable[str] | None = None) -> None:
        self.model = model
        self.names = tuple(model.parameters() if trained is None else trained)
        self._trained = trained if isinstance(trained, Mapping) else {}
        self._changes = parts.changes
        shared = model.shared_names() if hasattr(model, "shared_names") else {name: name for name in self.names}
        self.all = [_stage(name, layer, shared, frozenset(self.names)) for name, layer in _stages_of(model)]
        self.stashed = stashed_after([stage.layer for stage in self.all])
        self.first = min((number for number, stage in enumerate(self.all) if stage.parameters), default=len(self.all))

    def check_current(self) -> None:
        """Refuse to go on with a model whose stages, or trained parameters, have been replaced."""
        if self._changes == parts.changes:  # nothing has changed anywhere
            return
        check_live(self.model, self._trained)
        now = _stages_of(self.model)
        others = [(name, one) for (name, one), stage in zip(now, self.all, strict=False) if stage.layer is not one]
        if others or len(now) != len(self.all):
            raise OptionError("The model's layers have been replaced during a run", expected="those that it began with",
                              got=", ".join(f"{name} ({type(one).__name__})" for name, one in others[:8])
                              or f"{len(now)} stages, not {len(self.all)}",
                              remedy="Replace layers between two runs: a new fit, or a new executor")  # fmt: skip
        self._changes = parts.changes

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, number: int) -> Stage:
        return self.all[number]

    @property
    def unweighted(self) -> frozenset[int]:
        """The stages without trained parameters."""
        return frozenset(number for number, stage in enumerate(self.all) if not stage.parameters)

    @property
    def frozen(self) -> frozenset[int]:
        """The stages with parameters none of which is trained."""
        return frozenset(number for number, stage in enumerate(self.all) if stage.frozen)

    @property
    def scans(self) -> bool:
        """Whether the gradients between the stages come from a scan, all at once."""
        return len(self.all) > 1 and getattr(self.model, "backward", "bp") != "bp"

    @property
    def ours(self) -> bool:
        """Whether all layers of the model are this package's, none of the user's own."""
        modules = getattr(self.model, "modules", None)
        return modules is not None and is_ours(self.model) and all(is_ours(layer) for _, layer in modules())

    @cached_property
    def taking_lengths(self) -> frozenset[int]:
        """The stages whose forward takes the lengths of padded sequences; a single stage is assumed to."""
        if len(self.all) == 1:
            return frozenset({0})
        return frozenset(taking_lengths([(stage.name, stage.layer) for stage in self.all])[0])

    @cached_property
    def output_steps(self) -> OutputSteps:
        """Whether the model's output has steps."""
        return output_steps(self.model)

    def shared(self) -> list[str]:
        """Return the parameters that several stages hold."""
        held = Counter(name for stage in self.all for name in set(stage.parameters.values()))
        return [name for name in self.names if held[name] > 1]

    def updated_at(self, order: Iterable[int], *, last: bool) -> dict[int, list[str]]:
        """Return the parameters that each stage's update takes, if stages are updated in this order."""
        # A shared parameter is updated with the last of its stages, or else with the first.
        place: dict[str, int] = {}
        for number in order:
            for name in self.all[number].parameters.values():
                if last or name not in place:
                    place[name] = number
        taken: dict[int, list[str]] = {}
        for name in self.names:
            if name in place:
                taken.setdefault(place[name], []).append(name)
        return taken


def _stages_of(model: Any) -> list[tuple[str, Any]]:
    return model.stages() if hasattr(model, "stages") else [("", model)]


def _stage(prefix: str, layer: Any, shared: dict[str, str], trained: frozenset[str]) -> Stage:
    own = layer.shared_names() if hasattr(layer, "shared_names") else layer.parameters()
    parameters = {name: shared[f"{prefix}.{name}" if prefix else name] for name in own}
    mine = {key: name for key, name in parameters.items() if name in trained}
    return Stage(prefix, layer, mine, frozen=bool(parameters) and not mine)


def trained_parameters(model: Any, optimizer: Any) -> dict[str, Array]:
    """Return the parameters that `optimizer` trains, by name, in the model's order."""
    # Its `params` say so, arrays by name; a user's optimizer without `params` trains all.
    live = model.parameters()
    if not live:
        raise OptionError("The model has no parameters", expected="at least one", got="none")
    params = getattr(optimizer, "params", None)
    if not isinstance(params, Mapping):
        return dict(live)
    check_live(model, params)
    return {name: array for name, array in live.items() if name in params}


def is_ours(part: Any) -> bool:
    """Return whether a layer, loss or optimizer is of a class of this package."""
    return type(part).__module__.partition(".")[0] == __name__.partition(".")[0]


def check_live(model: Any, params: Mapping[str, Array]) -> None:
    """Raise `OptionError` unless all `params` are the arrays that `model` computes with."""
    live = model.parameters()
    wrong = [name for name, array in params.items() if live.get(name) is not array]
    if not wrong:
        return
    replaced = [name for name in wrong if name in live]
    unknown = [name for name in wrong if name not in live]
    raise OptionError("The optimizer would train arrays that the model does not use",
                      expected="the arrays of model.parameters(), by those names, or some of them", got="; ".join(
                      f"{what}: {_shown(names)}" for what, names in (("other arrays than the model's", replaced), (
                      "not in the model", unknown)) if names), remedy="Build the optimizer on model.parameters() once "
                      "the model is what it is to be: to(...) and a new array in layer.params replace parameters; "
                      "assign into them (param[...] = values) to keep them")  # fmt: skip


def check_complete(optimizer: Any, stages: Stages) -> None:
    """Raise `OptionError` if groups of parameters have been added to the optimizer since the stages were made."""
    params = getattr(optimizer, "params", None)
    if isinstance(params, Mapping) and len(params) != len(stages.names):
        raise OptionError("Parameters have been added to the optimizer, and this executor does not train them",
                          expected=_shown(list(stages.names)), got=_shown(list(params)),
                          remedy="Make a new executor; a Trainer does so by itself")  # fmt: skip


def check_even(optimizer: Any, names: Iterable[str]) -> None:
    """Raise `OptionError` if some parameters have had fewer updates than others, by the optimizer's own counts."""
    steps = getattr(optimizer, "last_update", getattr(optimizer, "steps", None))
    counts = {name: steps[name] for name in names if name in steps} if isinstance(steps, Mapping) else {}
    if len(set(counts.values())) < 2:
        return
    most = max(counts.values())
    behind = [name for name, count in counts.items() if count < most]
    raise OptionError("An update was interrupted: some parameters are a step behind the others",
                      expected=f"{most} updates of every parameter", got=f"fewer of {_shown(behind)}",
                      remedy="Load model and optimizer as they were before it (fit(resume=True) takes the last "
                      "checkpoint), or build a new optimizer to go on from the parameters as they are")  # fmt: skip


def _shown(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def buffers_of(model: Any) -> dict[str, Any]:
    """Return the buffers of all layers by name: running statistics, masks."""
    layers = list(model.modules()) if hasattr(model, "modules") else []
    return {f"{name}.{key}": array for name, layer in layers for key, array in layer.buffers.items()}


# The state of one training step between its actions.
#
# Each reader of an action's result has a separate slot, which it empties: an array is freed as soon as its last reader
# is done, in whichever order and on whichever thread they run.

Batch: TypeAlias = tuple[Array, ...]
"""Input, target and, of sequences padded at the end, their lengths; the `CarriedState` that layers begin with.

Lengths may be None.
"""


@dataclass
class DeferredMetrics:
    """Metrics of a step on the device, which the host reads after giving the next step to the device."""

    # losses, scores: The loss of every micro-batch and, where the `Observer` has one, its score, of shape ().
    losses: dict[int, Array] = field(default_factory=dict)
    scores: dict[int, tuple[Array, Any]] = field(default_factory=dict)
    # Names of gradients, and the sums of their squares.
    sums: list[tuple[list[str], Array]] = field(default_factory=list)
    # By how much each micro-batch's loss divides, of shape (), where the host does not know it.
    counts: dict[int, Array] = field(default_factory=dict)

    def packed(self, xp: ModuleType) -> Array:
        """Return all numbers in one float64 array."""
        scores = [part for score in self.scores.values() for part in score if hasattr(part, "ndim")]
        given = [*self.losses.values(), *scores, *self.counts.values(), *(sums for _, sums in self.sums)]
        parts = [xp.ascontiguousarray(part, dtype=np.float64) for part in given]
        packed = xp.empty(sum(part.size for part in parts), np.float64)
        kernels.get(xp).join_arrays(parts, packed)
        return packed

    def unpack(self, packed: np.ndarray, step: Step) -> None:
        """Write the numbers of `packed` to their places in `step`."""
        numbers = iter(packed.tolist())
        for m in self.losses:
            step.values[m] = next(numbers)
        for m, score in self.scores.items():
            right, positions = (next(numbers) if hasattr(part, "ndim") else float(part) for part in score)
            step.scores[m] = right, positions
        if self.counts:
            counts = [0.0] * len(step.values)
            for m in self.counts:
                counts[m] = next(numbers)
            step.set_shares(counts, sum(counts))
        for m, share in enumerate(step.shares):
            step.values[m] = _known(step.values[m], share, step.counted)
        for names, _ in self.sums:
            step.squares.update((name, next(numbers)) for name in names)


class Step:
    """The state of one training step: activations, gradients, the update, and its metrics."""

    # tag: Any value of the caller's choice.
    # shares: What each micro-batch's loss is multiplied by in the step's: of a mean, the share of what it divides by.
    # counted: What the step's loss divides by. On a GPU these may be arrays until the host has read the step's numbers.
    # sums: Whether the micro-batches' losses are sums, not means.
    # options: Arguments of the forwards in addition to the input, for every micro-batch: lengths, or nothing.
    # carried: The states that recurrent layers carry from step to step, one for every micro-batch; or None.
    # targets, valid: What the loss sees of each target, and which steps these are if it sees rows of steps; else None.
    # saved, shapes: The saved state of each stage's forward, and its input's shape, until the gradient arrives.
    # for_input, for_weights: From then on the stage's `Gradients`, for I and for W.
    # values, predictions: Loss and output of every micro-batch; a replayed step does not keep the output. The loss is 0
    # where nothing counts, and NaN if nothing does in the whole step.
    # scores: The `Observer`'s score of every micro-batch, and how much it counts; None until there is one.
    # grads, own: Gradients by the name of the parameter, until they are used; and the names of those that are sums made
    # in this step, which may be added to in place.
    # uses: Gradients at shared parameters, by name and micro-batch, then by stage, until all stages have theirs.
    # squares: The sum of squares of each gradient that has been checked.
    # update: The optimizer's update, from the last loss on.
    # outbox: In a pipeline, messages to send: the output of F, or the gradient of I, of a stage and micro-batch.
    # events, aborted: Signals between streams: an action is done, or the step has failed.
    # marks: On a GPU, the device's events for them.
    # held: On a GPU with two streams, arrays in a stream's queue: their memory must not be reused by the stream that
    # allocated them before the other is done with them.
    # later: On a GPU, the deferred metrics; None: the host reads them at once. packed: Their numbers, from a graph.
    # resumed: Whether leftovers are done outside a further step; an interrupted one may have done part of them.

    __slots__ = ("aborted", "batches", "carried", "counted", "events", "flow", "for_input", "for_weights", "grads",
                 "held", "later", "marks", "options", "outbox", "own", "packed", "predictions", "resumed", "saved",
                 "scores", "shapes", "shares", "squares", "sums", "tag", "targets", "update", "uses", "valid",
                 "values")  # fmt: skip

    def __init__(self, batches: Sequence[Batch], stages: Stages, tag: Any) -> None:
        count = len(batches)
        self.batches, self.tag = batches, tag
        self.carried: list[CarriedState | None] = [batch[3] if len(batch) > 3 else None for batch in batches]
        self.valid, self.targets = targets_of(stages, batches)
        self.shares: list[Any] = []
        self.counted: Any = math.nan
        self.sums = False
        self.flow: list[Any] = [batch[0] for batch in batches]
        self.options = [options_of(batch) for batch in batches]
        self.values = [math.nan] * count
        self.scores: list[tuple[float, float] | None] = [None] * count
        self.predictions: list[Any] = [None] * count
        self.saved, self.shapes, self.for_input, self.for_weights = (_table(count, len(stages)) for _ in range(4))
        self.grads: dict[str, Array] = {}
        self.own: set[str] = set()
        self.uses: dict[tuple[str, int], dict[int, Array]] = {}
        self.squares: dict[str, float] = {}
        self.update: Any = None
        self.outbox: dict[tuple[Kind, int, int], Array] = {}
        self.events: list[bool] = []
        self.aborted = self.resumed = False
        self.marks: list[Any] = []
        self.held: list[Any] | None = None
        self.later: DeferredMetrics | None = None
        self.packed: Array = None

    @property
    def loss(self) -> float:
        """The mean loss over all of the step that counts."""
        if len(self.values) == 1:
            return self.values[0]
        return sum(share * value for share, value in zip(self.shares, self.values, strict=True))

    @property
    def score(self) -> tuple[float, float]:
        """The mean score of the step, and how much it counts: NaN and 0 if there is none."""
        scores = [score for score in self.scores if score is not None]
        whole = sum(count for _, count in scores)
        return (sum(right for right, _ in scores) / whole, whole) if whole else (math.nan, 0.0)

    def set_score(self, m: int, score: tuple[Any, Any] | None) -> None:
        """Write down the score of a micro-batch, read from the device."""
        self.scores[m] = None if score is None else (float(score[0]), float(score[1]))  # synchronize!

    def set_shares(self, counts: Sequence[Any], total: Any) -> None:
        """Write down the shares of micro-batches that count so much, of `total` in the whole step."""
        self.counted = total
        if self.sums:
            counts = [1.0] * len(counts)
        if hasattr(total, "ndim") or total:
            self.shares = [count / total for count in counts]
        else:
            self.shares = [math.nan] * len(counts)

    def norm(self, names: Sequence[str]) -> float:
        """Return the Euclidean norm of all gradients before clipping, summed in the order of `names`."""
        return total_norm(self.squares[name] for name in names)


class Observer:
    """Checks an executor's results, and raises where training must stop. This base class raises nothing."""

    # On a GPU it is told when the next step has been given to the device, see `sparsebp.runtime.executor`.

    def score(self, prediction: Array, target: Array) -> tuple[Array, Any] | None:
        """Return one more metric of a micro-batch: its sum, of shape (), and how many it is the sum of; or None.

        Nothing is read from the device.
        """
        return None

    def loss(self, step: Step, m: int, value: float) -> None:
        """The loss of micro-batch `m` is known."""

    def gradients(self, step: Step, grads: dict[str, Array]) -> None:
        """The sum of squares of one of these gradients is not finite."""


def options_of(batch: Batch) -> dict[str, Any]:
    """Return the arguments of the model's forward in addition to the input."""
    return {"lengths": batch[2]} if len(batch) > 2 and batch[2] is not None else {}


def targets_of(stages: Stages, batches: Sequence[Batch]) -> tuple[list[ValidSteps | None], list[Array]]:
    """Return the valid steps of each batch with lengths, if the model's output has steps, and what a loss sees."""
    valid, targets = [], []
    for batch in batches:
        padded = len(batch) > 2 and batch[2] is not None and len(batch[2]) > 0
        steps = ValidSteps.of(stages.model, stages.output_steps, *batch[:3]) if padded else None
        valid.append(steps)
        targets.append(batch[1] if steps is None else steps.rows("target", batch[1]))
    return valid, targets


def _table(count: int, stages: int) -> list[list[Any]]:
    """Return an empty slot for every micro-batch and stage."""
    return [[None] * stages for _ in range(count)]


StepFunction: TypeAlias = Callable[[Step], None]


def in_sequence(*runs: StepFunction) -> StepFunction:
    """Return a function that calls `runs`, one after the other."""

    def run(step: Step) -> None:
        for one in runs:
            one(step)

    return run


class _Ahead(NamedTuple):
    """The flow from a stage to the next one where one pass has run both: the next one's output."""

    y: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The gradient of either's output."""
        return tuple(self.y.shape)

    @property
    def nbytes(self) -> int:
        """The same."""
        return int(self.y.nbytes)


@dataclass(frozen=True)
class Recomputed:
    """What is kept of a forward that is run again for its gradients: its arguments, and where its draws began."""

    x: Array
    options: Mapping[str, Any]
    states: Mapping[str, Any]


class Actions:
    """Makes the functions of a schedule's actions; only `gather` clips by `clip_norm`."""

    recomputed: frozenset[int] = frozenset()
    """The stages that keep their inputs alone, and run their forwards again when the gradients arrive."""

    def __init__(self, stages: Stages, loss: Any, optimizer: Any, clip_norm: float | None, observer: Observer) -> None:
        check_mean(loss)
        self.stages, self.loss, self.optimizer = stages, loss, optimizer
        self.summed = summed(loss)  # for a part of a step
        self.clip_norm, self.observer = clip_norm, observer
        self.names: Sequence[str] = stages.names
        """The parameters whose gradients are computed on this rank."""
        self._shared = frozenset(stages.shared())

    def runs(self, number: int, m: int) -> bool:
        """Return whether a stage runs here for a micro-batch."""
        return True

    def forward(self, number: int, m: int, count: int) -> StepFunction:
        """F. The last stage's computes the loss and its gradient, and the last micro-batch's opens the update."""
        layer, wanted = self.stages[number].layer, number >= self.stages.first
        scans, last = self.stages.scans, number == len(self.stages) - 1
        stages, behind = self.stages, self._behind(number)
        finish = self._loss(m, count) if last else None
        again = wanted and number in self.recomputed

        def run(step: Step) -> None:
            x, options = step.flow[m], step.options[m]
            if again:
                states = {name: generator.bit_generator.state for name, generator in layer.generators().items()}
            found = None if behind is None else fused.forward(layer, behind, x)
            if isinstance(x, _Ahead):
                y = saved = x.y
            elif found is not None:
                y, saved = _Ahead(found[0]), found[1]
            else:
                given = options if options and number in stages.taking_lengths else {}
                carried = step.carried[m]
                if again and carried is not None:
                    raise OptionError("A forward that begins with a carried state cannot run again",
                                      expected="stateful=False", got="a schedule that recomputes stages")  # fmt: skip
                if carried is None:
                    y, saved = forward_of(layer, x, **given)
                else:
                    with carried:
                        y, saved = forward_of(layer, x, **given)
            step.flow[m] = y
            if wanted:
                step.saved[m][number] = Recomputed(x, given, states) if again else saved
                if scans:
                    step.shapes[m][number] = x.shape
            if finish is not None:
                del x, saved
                finish(step)

        return run

    def _behind(self, number: int) -> Any:
        """Return the next stage's layer if one pass over memory runs it together with this one; else None."""
        if number + 1 >= len(self.stages) or not self.recomputed.isdisjoint((number, number + 1)):
            return None
        layer, behind = self.stages[number].layer, self.stages[number + 1].layer
        return behind if fused.together(layer, behind) else None

    def share(self, step: Step) -> None:
        """Find the share that each micro-batch has of the step's loss: its mean weights their means by it."""
        counts = self.counts(step.targets, deferred=step.later is not None)
        if len(counts) == 1:
            step.counted, step.shares = counts[0], [1.0]
        else:
            step.sums = self.summed is not None
            step.set_shares(counts, sum(counts))
        if step.later is not None and hasattr(step.counted, "ndim"):
            step.later.counts = dict(enumerate(counts))

    def counts(self, targets: Sequence[Array], *, deferred: bool) -> list[Any]:
        """Return by how much the loss of each micro-batch divides, see `count_of`."""
        if len(targets) > 1:
            check_counts(self.loss)
        return [count_of(self.loss, target, on_device=deferred) for target in targets]

    def _loss(self, m: int, count: int) -> StepFunction:
        loss, place = self.loss, self._place

        def run(step: Step) -> None:
            if not step.shares:
                self.share(step)
            prediction, target, step.flow[m] = step.flow[m], step.targets[m], None
            valid = step.valid[m] or class_steps(loss, self.stages.model, prediction, target)
            if valid is not None:
                prediction = valid.rows("The model's output", prediction)
                if step.valid[m] is None:
                    step.valid[m], step.targets[m] = valid, (target := valid.rows("target", target))
            step.predictions[m] = prediction
            measure = self.summed if step.sums else loss
            if step.later is None:
                value, saved = measure.forward(prediction, target)
                step.values[m] = _known(float(value), step.shares[m], step.counted)  # synchronize!
                self.observer.loss(step, m, step.values[m])
            else:
                step.later.losses[m], saved = measure.on_device(prediction, target)
                score = self.observer.score(prediction, target)
                if score is not None:
                    step.later.scores[m] = score
            gy = _scaled(measure.input_grad(saved), step.shares[m])
            gy = gy if valid is None else valid.spread(gy)
            place(step, m, len(self.stages) - 1, gy)
            if m == count - 1 and step.update is None:
                step.update = self.optimizer.begin()

        return run

    def _place(self, step: Step, m: int, number: int, gy: Array) -> None:
        """Make the gradients of a stage from the gradient at its output."""
        layer, saved = self.stages[number].layer, step.saved[m][number]
        if isinstance(saved, Recomputed):
            saved = self._run_again(layer, saved, m)
        self._offer(step, m, number, gradients_of(layer, gy, saved))

    def _run_again(self, layer: Any, kept: Recomputed, m: int) -> Any:
        """Run a forward once more, with its draws; return what it saves. Statistics and generators stay as they are."""
        with undisturbed(layer), self.draws_of(m):
            for name, generator in layer.generators().items():
                generator.bit_generator.state = kept.states[name]
            return forward_of(layer, kept.x, **kept.options)[1]

    def draws_of(self, m: int) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which layers draw their numbers of a micro-batch."""
        return contextlib.nullcontext()

    def _offer(self, step: Step, m: int, number: int, gradients: Gradients) -> None:
        step.saved[m][number] = None
        if number > self.stages.first:
            step.for_input[m][number] = gradients
        if self.stages[number].parameters:
            passing = isinstance(gradients, PassingGradients)
            step.for_weights[m][number] = gradients.of_layer if passing else gradients  # type: ignore[attr-defined]

    def input_grad(self, number: int, m: int) -> StepFunction:
        """I, of a stage after the first one with parameters."""
        place, layer = self._place, self.stages[number - 1].layer
        behind = self._behind(number - 1)

        def run(step: Step) -> None:
            gradients = step.for_input[m][number]
            if gradients is None and step.resumed:  # done before an interruption
                return
            at = (gradients.gy, step.saved[m][number - 1], gradients.saved) if behind is not None else None
            through = None if at is None else fused.gradients(layer, behind, *at)
            if through is None:
                place(step, m, number - 1, gradients.input_grad())
            else:
                self._offer(step, m, number - 1, through)
            _hold(step, gradients)
            step.for_input[m][number] = None

        return run

    def scan(self, m: int) -> StepFunction:
        """All I of a micro-batch at once: a scan in their place."""
        stages, begin = self.stages, self.stages.first + 1

        def run(step: Step) -> None:
            last = step.for_input[m][-1]
            if last is None and step.resumed:  # done before an interruption
                return
            saved = [*step.saved[m][begin:-1], last.saved]
            gy, found = stages.model.stage_gradients(begin, saved, step.shapes[m][begin:], last)
            for number, gradients in enumerate(found[:-1], begin):
                self._offer(step, m, number, gradients)
            self._place(step, m, begin - 1, gy)
            step.for_input[m] = [None] * len(stages)

        return run

    def weight_grad(self, number: int, m: int) -> StepFunction:
        """W: gradients of further micro-batches are added.

        Those of a shared parameter wait for all of a micro-batch's, and are summed from the last stage to the first, as
        a backward pass does it: whatever the order of the schedule, the sums are the same bits.
        """
        stage = self.stages[number]
        users = {
            name: [n for n, other in enumerate(self.stages.all)
                   if name in other.parameters.values() and self.runs(n, m)]
            for name in self._shared.intersection(stage.parameters.values())
        }  # fmt: skip

        def run(step: Step) -> None:
            gradients = step.for_weights[m][number]
            if gradients is None and step.resumed:  # done before an interruption
                return
            grads = gradients.weight_grad()
            _hold(step, gradients)
            step.for_weights[m][number] = None
            for key, grad in grads.items():
                name = stage.parameters.get(key)
                if name is None:  # not trained
                    continue
                if name in users:
                    arrived = step.uses.setdefault((name, m), {})
                    arrived[number] = grad
                    if len(arrived) < len(users[name]):
                        continue
                    grad, *others = (arrived[n] for n in reversed(users[name]))  # noqa: PLW2901
                    for other in others:
                        grad = grad + other  # noqa: PLW2901
                    del step.uses[name, m]
                if name in step.own:
                    step.grads[name] += grad
                elif name in step.grads:  # the layer's array may be part of another one
                    step.grads[name] = add_up([step.grads[name], grad])
                    step.own.add(name)
                else:
                    step.grads[name] = grad

        return run

    def are_products(self, number: int) -> bool:
        """Whether W of a stage is one matrix product per parameter, judging by its class."""
        layer = self.stages[number].layer
        return is_ours(layer) and "weight_grad_products" in layer.valid_shortcuts

    def weight_grads(self, step: Step, numbers: Sequence[int]) -> bool:
        """W of several stages for which `are_products`, in one call; False, with nothing done, if one differs."""
        # On the host, for one micro-batch, and for parameters that stages do not share.
        products: dict[str, tuple[ProductFactors, tuple[int, ...]]] = {}
        for number in numbers:
            stage, at = self.stages[number], step.for_weights[0][number]
            found = None
            if at is not None and self.are_products(number):  # methods may have been replaced since
                found = stage.layer.weight_grad_products(at.gy, at.saved)
            if found is None:
                return False
            for key, name in stage.parameters.items():
                products[name] = found[key], stage.layer.params[key].shape
        grads = kernels.on_host().matmul_many([factors for factors, _ in products.values()])
        if grads is None:
            return False
        for number in numbers:
            step.for_weights[0][number] = None
        for (name, (_, shape)), grad in zip(products.items(), grads, strict=True):
            step.grads[name] = grad.reshape(shape)
        return True

    def weight_grad_and_update(self, number: int, m: int, names: Sequence[str]) -> StepFunction:
        """W and U of a stage in one: large gradients are used row by row as they are made."""
        stage, name_of = self.stages[number], self.stages[number].parameters
        separately = in_sequence(self.weight_grad(number, m), self.update(names, gathered=False))
        refused: set[tuple[int, ...]] = set()  # shapes of output gradients that the optimizer cannot take

        def run(step: Step) -> None:
            at = step.for_weights[m][number]
            if at is None or at.gy.shape in refused:
                separately(step)
                return
            takes: Any = getattr(step.update, "takes_product", None)  # a user's optimizer may not have it
            factored = step.later is None and takes is not None and "weight_grad_factors" in shortcuts_of(stage.layer)
            found = stage.layer.weight_grad_factors(at.gy, at.saved) if factored else None
            products = {} if found is None else {key: pair for key, pair in found[0].items() if key in name_of}
            if found is None or not all(takes(name_of[key], factors) for key, factors in products.items()):
                if found is not None:
                    refused.add(at.gy.shape)
                separately(step)
                return
            step.for_weights[m][number] = None
            for key, factors in products.items():
                name = name_of[key]
                step.squares[name] = step.update.apply_product(name, factors)
                if not math.isfinite(step.squares[name]):
                    self.observer.gradients(step, {name: factors[0] @ factors[1]})
            step.grads |= {name_of[key]: grad for key, grad in found[1].items() if key in name_of}
            self.apply_update(step, [name for name in names if name in step.grads], gathered=False)

        return run

    def gather(self, step: Step) -> None:
        """Check all gradients together, before any of them is used, and clip them."""
        later = step.later
        if step.resumed and (step.squares if later is None else later.sums):  # done before an interruption
            return
        grads = step.grads = {name: step.grads[name] for name in self.names}
        self._look(step, grads)
        self._clip(step, grads)

    def _clip(self, step: Step, grads: dict[str, Array]) -> None:
        if self.clip_norm is None or not grads:
            return
        if step.later is None:
            clip_grad_norm(grads, self.clip_norm, norm=step.norm(self.stages.names))
        else:
            clip_on_device(grads, self.clip_norm, [sums for _, sums in step.later.sums])

    def update(self, names: Sequence[str], *, gathered: bool) -> StepFunction:
        """U: update some parameters, and free their gradients. Without `gather` each gradient is checked here."""
        return lambda step: self.apply_update(step, names, gathered=gathered)

    def finish(self, step: Step, *, gathered: bool) -> None:
        """Do a step's remaining updates."""
        names = [name for name in step.update.remaining if name in step.grads]
        if names:
            self.apply_update(step, names, gathered=gathered)

    def apply_update(self, step: Step, names: Sequence[str], *, gathered: bool) -> None:
        """Update some parameters, and free their gradients."""
        grads = {name: step.grads[name] for name in names}
        if not gathered:
            self._look(step, grads)
        step.update.apply(grads)
        _hold(step, *grads.values())
        for name in names:
            del step.grads[name]

    def _look(self, step: Step, grads: dict[str, Array]) -> None:
        if step.later is not None:
            step.later.sums += list(square_sums(grads))  # at once: the other stream may add its own
            return
        squares = squared_norms(grads)
        step.squares.update(squares)
        if not all(map(math.isfinite, squares.values())):
            self.observer.gradients(step, grads)


def _known(value: float, share: float, counted: float) -> float:
    """Return the loss of a micro-batch, which may be 0 / 0."""
    if counted == 0:
        return math.nan
    return 0.0 if share == 0 else value


def _scaled(gy: Array, share: Any) -> Array:
    """Return a gradient times its micro-batch's share; 0 where nothing counts, as the gradient of 0 / 0 may be NaN."""
    xp = backend.namespace(gy)
    if hasattr(share, "ndim"):
        return xp.where(share != 0, gy * share.astype(gy.dtype), gy.dtype.type(0))
    if share == 1:
        return gy
    return gy * gy.dtype.type(share) if share else xp.zeros_like(gy)


def _hold(step: Step, *arrays: Any) -> None:
    """Hold arrays until both device streams are done with them."""
    if step.held is not None:
        step.held.append(arrays)
