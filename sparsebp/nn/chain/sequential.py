"""Sequential: a chain of layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from sparsebp import backend
from sparsebp.core.arguments import forward_of
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.shortcuts import belongs
from sparsebp.core.types import Array, Backward
from sparsebp.nn.chain.backward import ChainBackward
from sparsebp.nn.chain.container import Container, Link
from sparsebp.nn.chain.lengths import taking_lengths
from sparsebp.nn.gradients import Gradients, Shared, gradients_of
from sparsebp.nn.layer import Layer, check_gy, check_layer, dotted, input_grad_work
from sparsebp.nn.norms import clamped
from sparsebp.nn.recurrent.back.backward import BackwardOptions
from sparsebp.nn.work import Work, total_work


class SequentialSaved(NamedTuple):
    """What the layers saved, the shapes of their inputs, and what the output is like.

    Attributes
    ----------
    layers, shapes
        One each layer.
    output_shape
        Shape of the output.
    like
        An empty array of the output's dtype, on its device.
    """

    layers: list[Any]
    shapes: list[tuple[int, ...]]
    output_shape: tuple[int, ...]
    like: Array


class Sequential(Container):
    """Layers one after the other, as `torch.nn.Sequential`; children are named ``"0"``, ``"1"``, …

    The gradients between the layers are computed once for all of `gradients`. Those of the weights alone do without the
    input gradient of the first layer that has parameters, and without its Jacobian.

    Parameters
    ----------
    *layers
        The chain. The layers of Sequentials inside are links of the same chain; it is the outermost that says how
        backward runs.
    backward
        ``"bp"``: the layers' `input_grad`, one after the other. Else a scan over the layers' transposed Jacobians
        (BPPSA §3.1), by the algorithm of that name of `sparsebp.plan_scan`. ``"auto"``: a cost model compares layer by
        layer with all scans, the values of their Jacobians included, by shapes, pruned weights, workers and memory
        limit; `scan_plans` says what it took and why. Patterns and plans are made at the first step with a batch size,
        values at every step.
    up_levels, chunks, workers, memory_limit
        Levels of the up-sweep of ``"hybrid"``, number of chunks of ``"chunked"``, workers of the cost model, and most
        bytes that the Jacobians and the scan of a stretch may take (beyond it, ``"auto"`` runs layer by layer); None:
        the algorithm chooses, and no limit.

    Raises
    ------
    OptionError
        There are no layers, or `backward` or an option of it is not one of those above.

    Notes
    -----
    A layer that couples the samples, `BatchNorm2d` while training, has no Jacobian of one sample. It splits the chain:
    the stretches before and behind it are scanned, and it runs its `input_grad`. So does a `Residual` around one.
    """

    def __init__(
        self, *layers: Layer, backward: Backward = "bp", up_levels: int | None = None, chunks: int | None = None,
        workers: int | None = None, memory_limit: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if not layers:
            raise OptionError(
                "Sequential has no layers", expected="at least one", got="none", remedy="Use Identity() for no change"
            )
        self.children = {str(i): check_layer(f"layer {i}", layer) for i, layer in enumerate(layers)}
        self.set_backward(backward, up_levels, chunks, workers, memory_limit)

    def set_backward(
        self, backward: Backward, up_levels: int | None = None, chunks: int | None = None,
        workers: int | None = None, memory_limit: int | None = None,
    ) -> None:  # fmt: skip
        """Choose how backward runs from now on; the arguments are those of the class.

        Raises
        ------
        OptionError
            One of them is invalid.
        """
        self._backward = ChainBackward(BackwardOptions(backward, up_levels, chunks, workers, memory_limit))

    @property
    def stepwise(self) -> bool:
        """Whether all layers work on each step of a sequence by itself."""
        return self._all_stepwise()

    @property
    def backward(self) -> Backward:
        """The way of backward asked for."""
        return self._backward.options.algorithm

    def stages(self, prefix: str = "") -> list[tuple[str, Layer]]:
        """Return the links with their dotted names: the layers, with those of Sequentials inside in their place.

        A subclass with a forward or a way back of its own is one stage: whoever ran its layers would go past these.

        Raises
        ------
        OptionError
            A layer is inside itself.
        """
        self.modules()
        return self._named(prefix) if belongs(self, "stages") else [(prefix, self)]

    def _named(self, prefix: str = "") -> list[tuple[str, Layer]]:
        return [stage for name, layer in self.children.items() for stage in layer.stages(dotted(prefix, name))]

    def stage_gradients(
        self, first: int, saved: Sequence[Any], shapes: Sequence[tuple[int, ...]], last: Gradients
    ) -> tuple[Array, list[Gradients]]:
        """Return the gradient at the input of stage number `first`, and the `Gradients` of the stages from there on.

        Parameters
        ----------
        first
            Number of the first stage, see `stages`.
        saved, shapes
            What each of the stages from `first` on saved, and the shape of its input.
        last
            The gradients of the last stage.
        """
        stages = self.stages()[first:]
        ends = [*shapes[1:], last.gy.shape]
        links = [Link(layer, *rest) for (_, layer), *rest in zip(stages, saved, shapes, ends, strict=True)]
        return self._backward.gradients(links, last)

    def __len__(self) -> int:
        return len(self.children)

    def __getitem__(self, index: int) -> Layer:
        return list(self.children.values())[index]

    def forward(self, x: Array, lengths: Any = None) -> tuple[Array, SequentialSaved]:
        """Run the chain.

        Parameters
        ----------
        x
            The first layer's input.
        lengths
            Of sequences padded at the end, valid steps of each (B integers), for the layers that take them; or None.
            What x holds behind an end must be finite where other layers meet it first: 0 · NaN is NaN.

        Raises
        ------
        OptionError
            There are lengths, and a layer neither takes them nor works on each step by itself.
        ShapeError
            A layer does not take the shape that comes to it; the message names the layer and the shape of x.
        """
        backend.namespace(x)
        shapes: list[tuple[int, ...]] = []
        saved: list[Any] = []
        options = self._lengths_of(lengths)
        children = list(self.children.items())
        for number, (name, layer) in enumerate(children):
            if len(saved) > number:  # it has run with the one before
                continue
            shapes.append(x.shape)
            behind = children[number + 1][1] if number + 1 < len(children) else None
            try:
                found = None
                if behind is not None and clamped.together(layer, behind):
                    found = clamped.forward(layer, behind, x)
                x, layer_saved = forward_of(layer, x, **options.get(name, {})) if found is None else found
            except ShapeError as error:
                if not saved:  # x itself, of which the layer speaks
                    raise
                raise ShapeError(
                    f"x of shape {shapes[0]} does not fit the chain at layer {name} ({type(layer).__name__}): "
                    f"{error.problem}", expected=error.expected, got=error.got,
                    remedy="Pass x of the size that the model is made for, or make the layers fit",
                ) from error  # fmt: skip
            saved.append(layer_saved)
            if found is not None:
                shapes.append(x.shape)
                saved.append(x)
        return x, SequentialSaved(saved, shapes, x.shape, backend.namespace(x).empty(0, x.dtype))

    def _lengths_of(self, lengths: Any) -> dict[str, dict[str, Any]]:
        """Return what children get beside x, by name: lengths where they, or layers inside them, take some."""
        if lengths is None:
            return {}
        taking, _ = taking_lengths(self._named())
        found, number = {}, 0
        for name, layer in self.children.items():
            own = range(number, number + len(layer.stages()))
            if any(one in own for one in taking):
                found[name] = {"lengths": lengths}
            number = own.stop
        return found

    def gradients(self, gy: Array, saved: SequentialSaved) -> Gradients:
        """Return the gradients: through the chain of I, or the scan in its place."""
        xp = check_gy(gy, saved.output_shape, saved.like.dtype, saved.like)
        links, names = self._links(saved), [name for name, _ in self._named()]
        behind = self._behind_first_weights(links)
        last = gradients_of(links[-1].layer, gy, links[-1].saved)

        def of_tail() -> list[Gradients]:
            """From the first layer with parameters on; what comes before has no part in the gradients of weights."""
            if behind == len(links):
                return [last]
            at, found = self._backward.gradients(links[behind:], last)
            before = links[behind - 1]
            return [gradients_of(before.layer, at, before.saved), *found]

        tail = Shared(of_tail, xp)
        return Gradients(
            self, gy, saved, lambda: self._backward.gradients(links[:behind], tail()[0])[0],
            lambda: dict(zip(names[behind - 1 :], tail(), strict=True)),
        )  # fmt: skip

    def scan_plans(self, saved: SequentialSaved) -> list[Any]:
        """Return how the gradients of weights run each stretch that could be scanned, from the output on; not ``"bp"``.

        Each is a `ScanPlan`, or a `LayerByLayer` where ``"auto"`` takes no scan, and says what it does and why:
        ``algorithm``, ``reason``, ``estimates``, ``describe()``.

        Raises
        ------
        MemoryLimitError
            A stretch needs more than `memory_limit`; not with ``"auto"``.
        """
        links = self._links(saved)
        return self._backward.plans(links[self._behind_first_weights(links) :], saved.like)

    def choices(self, saved: SequentialSaved, prefix: str = "") -> Iterator[tuple[str, str, str]]:
        """Yield how every stretch that could be scanned runs, from the output on, and what the layers choose."""
        for plan in self.scan_plans(saved):
            yield prefix, plan.algorithm, plan.reason
        for (name, _), link in zip(self._named(prefix), self._links(saved), strict=True):
            yield from link.choices(name)

    def input_grad_work(self, shape: tuple[int, ...], saved: SequentialSaved) -> Work:
        """Return the sum of the layers' costs."""
        return total_work(input_grad_work(link.layer, link.shape, link.saved) for link in self._parts(saved))

    def jacobian_t(self, saved: SequentialSaved) -> Any:
        """Return J₁ J₂ … J_L, the product of the layers' transposed Jacobians (its plans are cached by pattern)."""
        jacobians = [link.jacobian_t(saved.like) for link in self._links(saved)]
        product = jacobians[-1]
        for jacobian in reversed(jacobians[:-1]):  # outputs are usually fewer than inputs, so start at the output
            product = jacobian @ product
        return product

    @property
    def batch_axes(self) -> tuple[int, int]:  # type: ignore[override]
        """The first layer's in the input, the last one's in the output.

        Raises
        ------
        OptionError
            A layer takes the batch on another axis than the one before it returns it on.
        """
        axes = [layer.batch_axes for layer in self.children.values()]
        for (_, given), (taken, _) in pairwise(axes):
            if given != taken:
                raise OptionError(
                    "The layers put the batch on different axes", expected="one axis from layer to layer",
                    got=f"an output with the batch on axis {given}, then an input with it on axis {taken}",
                    remedy="Build recurrent layers with batch_first=True",
                )  # fmt: skip
        return axes[0][0], axes[-1][1]

    @property
    def input_dtype(self) -> np.dtype | None:
        """The parameters' dtype, unless the first layer takes integers."""
        first = self[0].input_dtype
        return first if first is not None and first.kind == "i" else self.dtype

    def _parts(self, saved: SequentialSaved) -> Iterator[Link]:
        ends = [*saved.shapes[1:], saved.output_shape]
        return map(Link, self.children.values(), saved.layers, saved.shapes, ends)

    # ---- links: the layers, with those of inner Sequentials in their place -------------------------------------------

    def _links(self, saved: SequentialSaved) -> list[Link]:
        links: list[Link] = []
        for link in self._parts(saved):
            whole = not isinstance(link.layer, Sequential) or not belongs(link.layer, "stages")
            links += [link] if whole else link.layer._links(link.saved)  # type: ignore[attr-defined]
        return links

    def _behind_first_weights(self, links: Sequence[Link]) -> int:
        """Return the number of the first link whose input gradient some weights need."""
        return next((i + 1 for i, link in enumerate(links) if link.layer.parameters()), len(links))
