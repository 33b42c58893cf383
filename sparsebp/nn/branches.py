"""Parallel branches on one input: `Concat` puts their outputs side by side, `Sum` and `Residual` add them up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sparsebp.core import backend, host_pool
from sparsebp.core.check import Array
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.shortcuts import forward_of, is_unbatched
from sparsebp.nn.basic import Identity
from sparsebp.nn.gradients import Gradients, Shared, gradients_of
from sparsebp.nn.layer import Layer, check_gy, check_input, check_layer, input_grad_work
from sparsebp.nn.sequential import Container, Link, coupled_now, taking_lengths
from sparsebp.nn.work import Work, total_work


class Branches(Container):
    """Base of layers whose children all get the input."""

    def __init__(self, branches: Mapping[str, Layer]) -> None:
        super().__init__()
        if not branches:
            raise OptionError(f"{type(self).__name__} has no branches", expected="at least one", got="none",
                              remedy="Use Identity() for no change")  # fmt: skip
        self.children = {name: check_layer(f"branch {name}", branch) for name, branch in branches.items()}


def add_up(arrays: Sequence[Array]) -> Array:
    """Return the sum of large arrays of one shape and dtype, whose memory is used again by the next step."""
    total, *others = arrays
    xp = backend.namespace(*arrays)
    if others:
        out = host_pool.empty(xp, total.shape, total.dtype)  # a branch may have returned x or gy itself
        for array in others:
            total = xp.add(total, array, out=out)
    return total


# Concat: the outputs side by side.


class ConcatSaved(NamedTuple):
    """The input, the shapes of the branches' outputs, each branch's saved value, and which may have coupled samples."""

    x: Array
    shapes: list[tuple[int, ...]]
    branches: list[Any]
    coupled: frozenset[int]


class Concat(Branches):
    """``y = [branch₀(x), branch₁(x), …]`` along the channels, the axis after the batch, as in Inception modules.

    Parameters
    ----------
    branches
        Layers whose outputs differ only in the number of channels. Children are named ``"0"``, ``"1"``, …
    """

    stepwise = False  # it joins the outputs along the axis of the steps

    def __init__(self, *branches: Layer) -> None:
        super().__init__({f"{i}": branch for i, branch in enumerate(branches)})

    def forward(self, x: Array) -> tuple[Array, ConcatSaved]:
        """Return the branches' outputs side by side."""
        xp = check_input(x)
        outputs, saved = zip(*(forward_of(branch, x) for branch in self.children.values()), strict=True)
        if any(is_unbatched(branch, each, x.shape) for branch, each in zip(self.children.values(), saved, strict=True)):
            raise ShapeError("x is an unbatched sample, so the channels are not its second axis",
                             expected="(B, channels, …)", got=x.shape, remedy="Pass x[None]")  # fmt: skip
        if outputs[0].ndim < 2 or len({(y.shape[0], *y.shape[2:]) for y in outputs}) > 1:
            raise ShapeError("The outputs of the branches do not stand side by side",
                             expected="(B, channels, …) that differ in the channels alone",
                             got=", ".join(str(y.shape) for y in outputs))  # fmt: skip
        shapes, coupled = [out.shape for out in outputs], coupled_now(self.children.values())
        return side_by_side(xp, outputs), ConcatSaved(x, shapes, list(saved), coupled)

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
        return Gradients(
            self, gy, saved, lambda: add_up([branch.input_grad() for branch in branches().values()]), branches
        )

    def input_grad_work(self, shape: tuple[int, ...], saved: ConcatSaved) -> Work:
        """Return the branches' costs, with slices of the gradient and a sum."""
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
        branches = zip(self.children.values(), saved.branches, saved.shapes, strict=True)
        for number, (branch, branch_saved, shape) in enumerate(branches):
            yield Link(branch, branch_saved, saved.x.shape, shape, number in saved.coupled)


def side_by_side(xp: ModuleType, arrays: Sequence[Array]) -> Array:
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


# Sum: the outputs added up; and Residual, with a shortcut as the other branch.


class SumSaved(NamedTuple):
    """The input, the shape of the output, each branch's saved value, and which may have coupled samples."""

    x: Array
    shape: tuple[int, ...]
    branches: list[Any]
    coupled: frozenset[int]


class Sum(Branches):
    """``y = branch₀(x) + branch₁(x) + …``; `Identity` as a branch adds x itself.

    Parameters
    ----------
    *branches
        Layers whose outputs have one shape. Children are named ``"0"``, ``"1"``, …

    See Also
    --------
    Residual : the block of a ResNet.
    """

    def __init__(self, *branches: Layer) -> None:
        super().__init__({f"{i}": branch for i, branch in enumerate(branches)})

    def forward(self, x: Array, lengths: Any = None) -> tuple[Array, SumSaved]:
        """Return the sum of the branches' outputs.

        Parameters
        ----------
        x
            The input of every branch.
        lengths
            Of sequences padded at the end, valid steps of each, for the branches that take them; or None.

        Raises
        ------
        OptionError
            There are lengths, and a branch neither takes them nor works on each step by itself.
        """
        check_input(x)
        taking = [] if lengths is None else self._taking_lengths()
        outputs, saved = [], []
        for name, branch in self.children.items():
            y, branch_saved = forward_of(branch, x, **({"lengths": lengths} if name in taking else {}))
            outputs.append(y)
            saved.append(branch_saved)
        if len({(y.shape, y.dtype) for y in outputs}) > 1:
            raise ShapeError(f"The outputs of the branches of {type(self).__name__} do not fit each other",
                             expected="one shape and dtype",
                             got=", ".join(f"{name}: {y.shape} {y.dtype}" for name, y in
                                           zip(self.children, outputs, strict=True)),
                             remedy="Let a branch project: a convolution of width 1, or Linear")  # fmt: skip
        return add_up(outputs), SumSaved(x, outputs[0].shape, saved, coupled_now(self.children.values()))

    def gradients(self, gy: Array, saved: SumSaved) -> Gradients:
        """Return the gradients: each branch's of gy, those at the input added up."""
        check_gy(gy, saved.shape, saved.x.dtype, saved.x)
        links = zip(self.children.items(), saved.branches, strict=True)
        branches = {name: gradients_of(branch, gy, kept) for (name, branch), kept in links}
        return Gradients(
            self, gy, saved, lambda: add_up([branch.input_grad() for branch in branches.values()]), lambda: branches
        )

    def input_grad_work(self, shape: tuple[int, ...], saved: SumSaved) -> Work:
        """Return the branches' costs, and the sums'."""
        branches = total_work(input_grad_work(link.layer, shape, link.saved) for link in self._parts(saved))
        sums = len(self.children) - 1
        return total_work((branches._replace(entries=0), Work(sums * prod(shape), 3 * sums * prod(shape), sums)))

    def jacobian_t(self, saved: SumSaved) -> Any:
        """Return the sum of the branches' transposed Jacobians, on the union of their patterns."""
        from sparsebp.jacobians import TransposedJacobian
        from sparsebp.products import plan_addition

        total, *others = (link.jacobian_t(saved.x) for link in self._parts(saved))
        for other in others:
            plan = plan_addition(total.pattern, other.pattern)
            total = TransposedJacobian(plan.pattern, plan(total.data, other.data))
        return total

    @property
    def batch_axes(self) -> tuple[int, int]:  # type: ignore[override]
        """The branches' axes; a branch that works on each step by itself takes those of the others.

        Raises
        ------
        OptionError
            The branches have the batch on different axes.
        """
        branches = list(self.children.values())
        found = {branch.batch_axes for branch in branches if not getattr(branch, "stepwise", False)}
        if len(found) > 1:
            raise OptionError("The branches put the batch on different axes", expected="one axis",
                              got=f"axes {sorted(found)} (of input and output)",
                              remedy="Build recurrent layers with batch_first=True")  # fmt: skip
        return found.pop() if found else branches[0].batch_axes

    @property
    def joins_steps(self) -> bool:  # type: ignore[override]
        """Whether the branches make one vector of all steps."""
        return all(taking_lengths(branch.stages(name))[1] for name, branch in self.children.items())

    def _taking_lengths(self) -> list[str]:
        """Return the names of the branches that take lengths."""
        return [name for name, branch in self.children.items() if taking_lengths(branch.stages(name))[0]]

    def _parts(self, saved: SumSaved) -> Iterator[Link]:
        for number, (branch, branch_saved) in enumerate(zip(self.children.values(), saved.branches, strict=True)):
            yield Link(branch, branch_saved, saved.x.shape, saved.shape, number in saved.coupled)


class Residual(Sum):
    """``y = body(x) + shortcut(x)`` (He et al., "Deep Residual Learning for Image Recognition", 2016, Eq. 1 and 2).

    Parameters
    ----------
    body
        A layer whose output has the shape of the shortcut's. Its parameters appear under ``"body."``.
    shortcut
        A projection, where the body changes the shape; its parameters appear under ``"shortcut."``. None: x itself.

    Examples
    --------
    A block of a ResNet, with half the pixels and twice the channels:

    >>> from sparsebp import nn
    >>> body = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
    ...                      nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32))
    >>> projection = nn.Sequential(nn.Conv2d(16, 32, 1, 2, bias=False), nn.BatchNorm2d(32))
    >>> block = nn.Sequential(nn.Residual(body, projection), nn.ReLU())
    """

    def __init__(self, body: Layer, shortcut: Layer | None = None) -> None:
        Branches.__init__(self, {"body": body, "shortcut": Identity() if shortcut is None else shortcut})
