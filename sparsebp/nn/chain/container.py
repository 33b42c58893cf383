"""Layers that consist of others, and what they know of each of them."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from sparsebp.core.shortcuts import belongs, is_lone
from sparsebp.core.types import Array
from sparsebp.nn.gradients import gradients_of
from sparsebp.nn.layer import Layer, dotted, input_grad_work
from sparsebp.nn.work import Work


class Link(NamedTuple):
    """A layer inside another, what it saved, and the shapes of its input and output, batch first."""

    layer: Layer
    saved: Any
    shape: tuple[int, ...]
    out_shape: tuple[int, ...]

    def work(self) -> Work:
        """Return what the layer's `input_grad` costs, and the entries of its Jacobian, which may be a dense one."""
        work = input_grad_work(self.layer, self.shape, self.saved)
        if belongs(self.layer, "jacobian_t"):
            return work
        return work._replace(entries=prod(self.shape) * prod(self.out_shape[1:]))

    def couples_samples(self) -> bool:
        """Whether the layer couples the samples, or may do so."""
        return not belongs(self.layer, "couples_samples") or self.layer.couples_samples(self.saved)

    def lone(self) -> bool:
        """Whether the layer's forward had a lone sample."""
        return is_lone(self.layer, self.saved, self.shape)

    def choices(self, prefix: str) -> Iterator[tuple[str, str, str]]:
        """Yield the layer's choices under that name."""
        if belongs(self.layer, "choices"):
            yield from self.layer.choices(self.saved, prefix)

    def jacobian_t(self, like: Array) -> Any:
        """Return the layer's `TransposedJacobian`: its own, or the dense one from its input gradient.

        `like` is an array of the dtype of input and output, on their device.
        """
        if belongs(self.layer, "jacobian_t"):
            return self.layer.jacobian_t(self.saved)
        from sparsebp.jacobians import dense_jacobian_t

        return dense_jacobian_t(
            lambda gy: gradients_of(self.layer, gy, self.saved).input_grad(), self.shape[1:], self.out_shape[1:],
            self.shape[0], like,
        )  # fmt: skip


class Container(Layer):
    """The base of `Sequential`, `Residual` and `Concat`: what is so if it is so of a layer inside."""

    replayable = True

    @abc.abstractmethod
    def _parts(self, saved: Any) -> Iterator[Link]:
        """Yield a link for each of the children, in their order."""

    def choices(self, saved: Any, prefix: str = "") -> Iterator[tuple[str, str, str]]:
        """Yield those of the layers inside."""
        for name, link in zip(self.children, self._parts(saved), strict=True):
            yield from link.choices(dotted(prefix, name))

    def couples_samples(self, saved: Any) -> bool:
        """Whether any of the layers inside does."""
        return any(link.couples_samples() for link in self._parts(saved))

    def lone(self, saved: Any) -> bool:
        """Whether any of the layers inside had a lone sample."""
        return any(link.lone() for link in self._parts(saved))

    def _all_stepwise(self) -> bool:
        """Whether all of the layers inside work on each step of a sequence by itself."""
        return all(getattr(child, "stepwise", False) for child in self.children.values())
