"""Residual: the input added to what a body makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from sparsebp import backend
from sparsebp.backend import memory
from sparsebp.core.arguments import forward_of
from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array
from sparsebp.nn.chain.container import Container, Link
from sparsebp.nn.gradients import Gradients, gradients_of
from sparsebp.nn.layer import Layer, check_gy, check_input, check_layer, input_grad_work
from sparsebp.nn.work import Work, total_work


class Residual(Container):
    """``y = x + body(x)`` (He et al., "Deep Residual Learning for Image Recognition", 2016, Eq. 1).

    Parameters
    ----------
    body
        A layer whose output has the shape of its input. Its parameters appear under ``"body."``.
    """

    def __init__(self, body: Layer) -> None:
        super().__init__()
        self.children["body"] = check_layer("body", body)

    @property
    def stepwise(self) -> bool:
        """Whether the body works on each step of a sequence by itself."""
        return self._all_stepwise()

    def forward(self, x: Array) -> tuple[Array, tuple[Array, Any]]:
        """Return x + body(x); `saved` is x and what the body saved.

        Raises
        ------
        ShapeError
            The body changes the shape.
        """
        check_input(x)
        y, saved = forward_of(self.children["body"], x)
        if y.shape != x.shape:
            raise ShapeError(
                "The body of Residual changes the shape", expected=f"an output of the input's shape {x.shape}",
                got=y.shape, remedy="Choose a body that keeps the shape",
            )  # fmt: skip
        return _sum(x, y), (x, saved)

    def gradients(self, gy: Array, saved: tuple[Array, Any]) -> Gradients:
        """Return the gradients: at the input gy plus the body's."""
        x, body_saved = saved
        check_gy(gy, x.shape, x.dtype, x)
        body = gradients_of(self.children["body"], gy, body_saved)
        return Gradients(self, gy, saved, lambda: _sum(gy, body.input_grad()), lambda: {"body": body})

    def input_grad_work(self, shape: tuple[int, ...], saved: tuple[Array, Any]) -> Work:
        """Return the body's cost and that of a sum."""
        body = input_grad_work(self.children["body"], shape, saved[1])
        return total_work((body._replace(entries=0), Work(prod(shape), 3 * prod(shape), 1)))

    def jacobian_t(self, saved: tuple[Array, Any]) -> Any:
        """Return I + J of the body, on the union of their patterns."""
        from sparsebp.jacobians import TransposedJacobian
        from sparsebp.patterns import pointwise_pattern
        from sparsebp.products import plan_addition

        (jacobian,) = (body.jacobian_t(saved[0]) for body in self._parts(saved))
        size = jacobian.shape[0]
        ones = backend.namespace(jacobian.data).ones(size, dtype=jacobian.dtype)
        plan = plan_addition(jacobian.pattern, pointwise_pattern(size))
        return TransposedJacobian(plan.pattern, plan(jacobian.data, ones))

    @property
    def batch_axes(self) -> tuple[int, int]:  # type: ignore[override]
        """As the body has it."""
        return self.children["body"].batch_axes

    def _parts(self, saved: tuple[Array, Any]) -> Iterator[Link]:
        x, body_saved = saved
        yield Link(self.children["body"], body_saved, x.shape, x.shape)


def _sum(a: Array, b: Array) -> Array:
    """Return the sum of two large arrays of one shape and dtype, whose memory is used again by the next step."""
    xp = backend.namespace(a, b)
    return xp.add(a, b, out=memory.empty(xp, a.shape, a.dtype))
