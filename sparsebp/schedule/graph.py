"""The graph of one training step: which actions there are, and what each needs (the table of actions in the docs)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from sparsebp.core.arguments import check_choice, check_flag, check_integer, check_sequence
from sparsebp.core.errors import OptionError
from sparsebp.schedule.actions import Action, trusted

First: TypeAlias = Literal["F", "I", "U"]
Updates: TypeAlias = Literal["none", "step", "microbatch"]
Weights: TypeAlias = Literal["current", "stashed", "latest"]
MOST = 10_000_000
"""Forwards of a step: more would take minutes and gigabytes."""


@dataclass(frozen=True)
class StepGraph:
    """What one training step of a chain of stages consists of; a schedule says where and in which order.

    Training repeats F, I, W, S, U for ever, and a step may be cut out of that anywhere. `first` says where it begins:

    - ``"F"``: forward, backward, update.
    - ``"I"``: the backward of one batch, then the forward of the next with the new weights: F needs U (without U: S;
      without both: W). This is how the out-of-order paper states the problem (§2).
    - ``"U"``: the update from the gradients of the batch before, then forward and backward: F needs U.

    Parameters
    ----------
    stages, microbatches
        Their numbers, 1 or more.
    unweighted
        Stages without parameters: they have no W, S, U.
    updates
        ``"none"``: the step ends with the gradients. ``"step"``: one U a stage, from all micro-batches.
        ``"microbatch"``: one U after every micro-batch (asynchronous pipelines: PipeDream, the 2018 DualPipe).
    synchronised
        Whether the gradients of every stage are synchronised (one S each) before its U.
    first
        See above. Only ``"F"`` goes with updates after every micro-batch.
    weights
        Which version of its stage's weights a backward reads. ``"current"``: that of its forward, and there is just
        one in memory: an update waits for every I that reads the old one. ``"stashed"``: that of its forward, kept
        beside newer ones. ``"latest"``: whatever is there. The last two only with updates after every micro-batch.

    Raises
    ------
    OptionError
        A number is below 1, a stage is unknown, or the options exclude each other.
    """

    stages: int
    microbatches: int = 1
    unweighted: frozenset[int] = frozenset()
    updates: Updates = "none"
    synchronised: bool = False
    first: First = "F"
    weights: Weights = "current"

    def __post_init__(self) -> None:
        for name in ("stages", "microbatches"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), 1))
        if self.stages * self.microbatches > MOST:
            raise OptionError("A step has too many forwards", expected=f"{MOST} stages times micro-batches at most",
                              got=self.stages * self.microbatches, remedy="Join stages or micro-batches")  # fmt: skip
        for name, choices in (("first", First), ("updates", Updates), ("weights", Weights)):
            check_choice(name, getattr(self, name), get_args(choices))
        check_flag("synchronised", self.synchronised)
        stages = check_sequence("unweighted", self.unweighted, "numbers of stages")
        numbers = frozenset(check_integer("a stage of unweighted", stage, -1) for stage in stages)
        object.__setattr__(self, "unweighted", numbers)
        unknown = sorted(self.unweighted.difference(range(self.stages)))
        if unknown:
            raise OptionError("Unknown stages are unweighted", expected=f"0 to {self.stages - 1}", got=unknown,
                              remedy="Leave them out")  # fmt: skip
        asynchronous = self.updates == "microbatch"
        if asynchronous == (self.weights == "current") or (asynchronous and self.first != "F"):
            raise OptionError(
                "updates, weights and first exclude each other",
                expected='updates="microbatch", weights "stashed" or "latest" and first="F", or others with "current"',
                got=f"updates={self.updates!r}, weights={self.weights!r}, first={self.first!r}",
                remedy="Change one of them",
            )  # fmt: skip
        if self.first == "U" and self.updates != "step":
            raise OptionError("A step that begins with updates has none", expected='updates="step"',
                              got=repr(self.updates), remedy='Pass updates="step"')  # fmt: skip

    def weighted(self, stage: int) -> bool:
        """Whether the stage has parameters."""
        return stage not in self.unweighted

    def required(self) -> Iterator[Action]:
        """Yield the actions that every schedule must have, B as I and W. I of stage 0 may be left out."""
        for stage in range(self.stages):
            for m in range(self.microbatches):
                yield trusted(stage, "F", m)
                if stage > 0:
                    yield trusted(stage, "I", m)
                if self.weighted(stage):
                    yield trusted(stage, "W", m)
            if self.weighted(stage):
                if self.synchronised:
                    yield from self._at_ends(stage, "S")
                if self.updates != "none":
                    yield from self._at_ends(stage, "U")

    def optional(self) -> Iterator[Action]:
        """Yield the actions that a schedule may have: the gradients with respect to the input of the model."""
        for m in range(self.microbatches):
            yield trusted(0, "I", m)

    def predecessors(self, action: Action) -> Iterator[Action]:
        """Yield what `action` (not B) needs of the same step; an optional action among them counts if it is there."""
        yield from self.inputs(action)
        if action.kind == "F" and self.first != "F":
            yield from self.newest_weights(action.stage)

    def inputs(self, action: Action) -> Iterator[Action]:
        """Yield the predecessors of `action` except for, of F, what makes the stage's weights."""
        stage, m = action.stage, action.microbatch
        if action.kind == "F":
            if stage > 0:
                yield trusted(stage - 1, "F", m)
        elif action.kind in "IW":
            if stage + 1 < self.stages:
                yield trusted(stage + 1, "I", m)
            if self.first != "I":
                yield trusted(stage, "F", m)
        elif action.kind == "S":
            yield from self._of(stage, "W", m)
        elif self.first != "U":
            if self.synchronised:
                yield trusted(stage, "S", m)
            yield from self._of(stage, "W", m)
            if self.weights == "current":
                yield from self._of(stage, "I", m)

    def newest_weights(self, stage: int) -> Iterator[Action]:
        """Yield what a forward of the stage waits for to read the newest weights, in this step or the one before."""
        if not self.weighted(stage) or self.updates == "microbatch":
            return
        if self.updates == "step":
            yield trusted(stage, "U")
        elif self.synchronised:
            yield trusted(stage, "S")
        else:
            yield from self._of(stage, "W", None)

    def carried(self, action: Action) -> Iterator[Action]:
        """Yield what `action` (not B) needs of the step before, where steps follow each other.

        Weights that are updated after every micro-batch are read as they are: nothing is waited for.
        """
        stage, m = action.stage, action.microbatch
        if action.kind == "F" and self.first == "F":
            yield from self.newest_weights(stage)
        elif action.kind in "IW" and self.first == "I":
            yield trusted(stage, "F", m)
        elif action.kind == "U" and self.first == "U":
            if self.synchronised:
                yield trusted(stage, "S")
            yield from self._of(stage, "W", None)
            yield from self._of(stage, "I", None)

    def _at_ends(self, stage: int, kind: Literal["S", "U"]) -> Iterator[Action]:
        """Yield one action a stage, or one a micro-batch."""
        if self.updates == "microbatch":
            for m in range(self.microbatches):
                yield trusted(stage, kind, m)
        else:
            yield trusted(stage, kind)

    def _of(self, stage: int, kind: Literal["I", "W"], microbatch: int | None) -> Iterator[Action]:
        """Yield the gradients of one micro-batch, or of all if it is None."""
        for m in range(self.microbatches) if microbatch is None else (microbatch,):
            yield trusted(stage, kind, m)
