"""Concat: parallel branches on one input, their outputs side by side."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from math import prod
from typing import Any

from sparsebp import backend
from sparsebp.errors import OptionError, ShapeError
from sparsebp.nn.layer import Layer, check_gy, check_input
from sparsebp.nn.work import Work, together
from sparsebp.types import Array


@dataclass
class ConcatSaved:
    """What the branches saved, the shapes of their outputs, and the parts of the gy that was last asked for.

    `input_grad` and `weight_grad` of the same gy give a branch the same part, so that it computes what both need once.

    Attributes
    ----------
    lock
        Held while gy is split: the two may run in two threads at once.
    mark
        On a GPU, the event of the split, for which the other stream waits.
    """

    shapes: list[tuple[int, ...]]
    branches: list[Any]
    gy: Array | None = None
    parts: list[Array] | None = None
    mark: Any = None
    lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)


class Concat(Layer):
    """``y = [branch₀(x), branch₁(x), …]`` along the channels, the axis after the batch, as in Inception modules.

    Parameters
    ----------
    branches
        Layers whose outputs differ in the channels alone. Children are named ``"0"``, ``"1"``, …

    Raises
    ------
    OptionError
        There is no branch.
    """

    replayable = True

    def __init__(self, *branches: Layer) -> None:
        super().__init__()
        if not branches:
            raise OptionError(
                "Concat has no branches", expected="at least one", got="none", remedy="Use Identity() for no change"
            )
        self.children = {str(i): branch for i, branch in enumerate(branches)}

    def forward(self, x: Array) -> tuple[Array, ConcatSaved]:
        """Return the branches' outputs side by side; `saved` is what each one saved, and more.

        Raises
        ------
        ShapeError
            The outputs differ in more than the channels.
        """
        xp = check_input(x)
        outputs, saved = zip(*(branch.forward(x) for branch in self.children.values()), strict=True)
        if outputs[0].ndim < 2 or len({(y.shape[0], *y.shape[2:]) for y in outputs}) > 1:
            raise ShapeError(
                "The outputs of the branches do not stand side by side",
                expected="(B, channels, …) that differ in the channels alone",
                got=", ".join(str(y.shape) for y in outputs),
                remedy="Choose strides and paddings that give every branch the same positions",
            )
        y = xp.concatenate(outputs, axis=1)
        return y, ConcatSaved([out.shape for out in outputs], list(saved))

    def input_grad(self, gy: Array, saved: ConcatSaved) -> Array:
        """Return the sum of the branches' input gradients."""
        grads = [
            branch.input_grad(part, kept)
            for branch, part, kept in zip(self.children.values(), self._split(gy, saved), saved.branches, strict=True)
        ]
        total = grads[0]
        for grad in grads[1:]:
            total = total + grad  # a new array: a branch may have returned gy itself
        return total

    def weight_grad(self, gy: Array, saved: ConcatSaved) -> dict[str, Array]:
        """Return every branch's weight gradients under dotted names."""
        branches = zip(self.children.items(), self._split(gy, saved), saved.branches, strict=True)
        grads = {
            f"{name}.{key}": grad
            for (name, branch), part, kept in branches
            for key, grad in branch.weight_grad(part, kept).items()
        }
        return self._summed(grads)

    def input_grad_work(self, shape: tuple[int, ...], saved: ConcatSaved) -> Work:
        """Return the branches' costs, of parts of the gradient, and those of a sum."""
        parts = (b.input_grad_work(shape, kept) for b, kept in zip(self.children.values(), saved.branches, strict=True))
        copies = [Work(prod(shape), 3 * prod(shape) + 2 * prod(out), 2) for out in saved.shapes]
        return together((*parts, *copies))._replace(entries=0)

    def couples_samples(self, saved: ConcatSaved) -> bool:
        """Whether any of the branches does."""
        return any(b.couples_samples(kept) for b, kept in zip(self.children.values(), saved.branches, strict=True))

    def jacobian_t(self, saved: ConcatSaved) -> Any:
        """Return the branches' transposed Jacobians side by side."""
        from sparsebp.jacobians import TransposedJacobian
        from sparsebp.patterns import plan_concatenation

        branches = zip(self.children.values(), saved.branches, strict=True)
        jacobians = [branch.jacobian_t(kept) for branch, kept in branches]
        plan = plan_concatenation(*(jacobian.pattern for jacobian in jacobians))
        return TransposedJacobian(plan.pattern, plan(*(jacobian.data for jacobian in jacobians)))

    def _split(self, gy: Array, saved: ConcatSaved) -> list[Array]:
        """Return each branch's part of gy, contiguous; the same arrays for the same gy."""
        shapes = saved.shapes
        xp = check_gy(gy, (shapes[0][0], sum(shape[1] for shape in shapes), *shapes[0][2:]), None)
        with saved.lock:
            if saved.gy is not gy or saved.parts is None:
                parts, first = [], 0
                for shape in shapes:
                    parts.append(xp.ascontiguousarray(gy[:, first : first + shape[1]]))
                    first += shape[1]
                saved.gy, saved.parts, saved.mark = gy, parts, backend.record(xp)
            else:
                backend.wait(xp, saved.mark)
            return saved.parts
