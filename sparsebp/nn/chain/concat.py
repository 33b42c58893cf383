"""Concat: parallel branches on one input, their outputs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sparsebp import backend
from sparsebp.core.arguments import forward_of
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.shortcuts import is_lone
from sparsebp.core.types import Array
from sparsebp.nn.chain.container import Container, Link
from sparsebp.nn.gradients import Gradients, Shared, gradients_of
from sparsebp.nn.layer import Layer, check_gy, check_input, check_layer, input_grad_work
from sparsebp.nn.work import Work, total_work


class ConcatSaved(NamedTuple):
    """The input, the shapes of the branches' outputs, and what each branch saved."""

    x: Array
    shapes: list[tuple[int, ...]]
    branches: list[Any]


class Concat(Container):
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

    def __init__(self, *branches: Layer) -> None:
        super().__init__()
        if not branches:
            raise OptionError(
                "Concat has no branches", expected="at least one", got="none", remedy="Use Identity() for no change"
            )
        self.children = {str(i): check_layer(f"branch {i}", branch) for i, branch in enumerate(branches)}

    def forward(self, x: Array) -> tuple[Array, ConcatSaved]:
        """Return the branches' outputs side by side; `saved` is what each one saved, and more.

        Raises
        ------
        ShapeError
            The outputs differ in more than the channels.
        """
        xp = check_input(x)
        outputs, saved = zip(*(forward_of(branch, x) for branch in self.children.values()), strict=True)
        if any(is_lone(branch, each, x.shape) for branch, each in zip(self.children.values(), saved, strict=True)):
            raise ShapeError("x is a lone sample, of which the channels are not the second axis",
                             expected="(B, channels, …)", got=x.shape, remedy="Pass x[None]")  # fmt: skip
        if outputs[0].ndim < 2 or len({(y.shape[0], *y.shape[2:]) for y in outputs}) > 1:
            raise ShapeError(
                "The outputs of the branches do not stand side by side",
                expected="(B, channels, …) that differ in the channels alone",
                got=", ".join(str(y.shape) for y in outputs),
                remedy="Choose strides and paddings that give every branch the same positions",
            )
        return _side_by_side(xp, outputs), ConcatSaved(x, [out.shape for out in outputs], list(saved))

    def gradients(self, gy: Array, saved: ConcatSaved) -> Gradients:
        """Return the gradients: each branch's of its part of gy, those at the input added up."""
        shapes = saved.shapes
        xp = check_gy(gy, (shapes[0][0], sum(shape[1] for shape in shapes), *shapes[0][2:]), None)

        def of_branches() -> dict[str, Gradients]:
            found, first = {}, 0
            for (name, branch), branch_saved, shape in zip(self.children.items(), saved.branches, shapes, strict=True):
                part = xp.ascontiguousarray(gy[:, first : first + shape[1]])
                found[name] = gradients_of(branch, part, branch_saved)
                first += shape[1]
            return found

        branches = Shared(of_branches, xp)

        def at_input() -> Array:
            total, *others = (branch.input_grad() for branch in branches().values())
            for grad in others:
                total = total + grad  # a new array: a branch may have returned gy itself
            return total

        return Gradients(self, gy, saved, at_input, branches)

    def input_grad_work(self, shape: tuple[int, ...], saved: ConcatSaved) -> Work:
        """Return the branches' costs, of parts of the gradient, and those of a sum."""
        parts = (input_grad_work(link.layer, shape, link.saved) for link in self._parts(saved))
        copies = [Work(prod(shape), 3 * prod(shape) + 2 * prod(out), 2) for out in saved.shapes]
        return total_work((*parts, *copies))._replace(entries=0)

    def jacobian_t(self, saved: ConcatSaved) -> Any:
        """Return the branches' transposed Jacobians side by side."""
        from sparsebp.jacobians import TransposedJacobian
        from sparsebp.patterns import plan_concatenation

        jacobians = [link.jacobian_t(saved.x) for link in self._parts(saved)]
        plan = plan_concatenation(*(jacobian.pattern for jacobian in jacobians))
        return TransposedJacobian(plan.pattern, plan(*(jacobian.data for jacobian in jacobians)))

    def _parts(self, saved: ConcatSaved) -> Iterator[Link]:
        for branch, branch_saved, shape in zip(self.children.values(), saved.branches, saved.shapes, strict=True):
            yield Link(branch, branch_saved, saved.x.shape, shape)


def _side_by_side(xp: ModuleType, arrays: Sequence[Array]) -> Array:
    """Return arrays (B, channels, …) along the channels."""
    if backend.is_host(xp):
        return xp.concatenate(arrays, axis=1)
    # CuPy's concatenate sends the addresses of more than eight arrays from the host: that cannot be captured.
    shape = arrays[0].shape
    y, first = (
        xp.empty((shape[0], sum(a.shape[1] for a in arrays), *shape[2:]), np.result_type(*(a.dtype for a in arrays))),
        0,
    )
    for array in arrays:
        y[:, first : first + array.shape[1]] = array
        first += array.shape[1]
    return y
