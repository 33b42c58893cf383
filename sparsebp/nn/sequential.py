"""Sequential: a chain of layers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sparsebp import backend
from sparsebp.errors import OptionError, ShapeError
from sparsebp.nn.backward import BackwardOptions
from sparsebp.nn.chain import Link, chain_gradients, chain_plans
from sparsebp.nn.layer import Layer, check_gy
from sparsebp.nn.verdict import Verdicts
from sparsebp.nn.work import Work, together
from sparsebp.types import Array, ChainBackward


@dataclass
class SequentialSaved:
    """What the layers saved, shapes of their inputs and of the output, and the gradients for the last gy.

    Attributes
    ----------
    like
        An empty array of the output's dtype, on its device.
    gradients
        At the input of every link (see `Sequential`) and, last, at the output; None where it was not yet needed.
    lock
        Held while they are computed: `input_grad` and `weight_grad` may run in two threads at once.
    mark
        On a GPU, the event of their computation, for which the other stream waits.
    """

    layers: list[Any]
    shapes: list[tuple[int, ...]]
    like: Array = None
    mark: Any = None
    output_shape: tuple[int, ...] = ()
    gy: Array | None = None
    gradients: list[Array | None] | None = None
    lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)


class Sequential(Layer):
    """Layers one after the other, as `torch.nn.Sequential`; children are named ``"0"``, ``"1"``, …

    The gradients between the layers are computed once and shared by `input_grad` and `weight_grad` of the same `gy`
    object. `weight_grad` does not compute the input gradient of the first layer that has parameters, nor its Jacobian.

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

    replayable = True

    def __init__(
        self, *layers: Layer, backward: ChainBackward = "bp", up_levels: int | None = None, chunks: int | None = None,
        workers: int | None = None, memory_limit: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if not layers:
            raise OptionError(
                "Sequential has no layers", expected="at least one", got="none", remedy="Use Identity() for no change"
            )
        self.children = {str(i): layer for i, layer in enumerate(layers)}
        self.set_backward(backward, up_levels, chunks, workers, memory_limit)

    def set_backward(
        self, backward: ChainBackward, up_levels: int | None = None, chunks: int | None = None,
        workers: int | None = None, memory_limit: int | None = None,
    ) -> None:  # fmt: skip
        """Choose how backward runs from now on; the arguments are those of the class.

        Raises
        ------
        OptionError
            One of them is invalid.
        """
        options = BackwardOptions("linear" if backward == "bp" else backward, up_levels, chunks, workers, memory_limit)
        self.options = None if backward == "bp" else options
        self.verdicts = Verdicts()

    @property
    def backward(self) -> ChainBackward:
        """The way of backward asked for."""
        return "bp" if self.options is None else self.options.algorithm

    def stages(self, prefix: str = "") -> list[tuple[str, Layer]]:
        """Return the links with their dotted names: the layers, with those of Sequentials inside in their place."""
        return [
            stage
            for name, layer in self.children.items()
            for stage in layer.stages(f"{prefix}.{name}" if prefix else name)
        ]

    def stage_gradients(
        self, first: int, saved: Sequence[Any], shapes: Sequence[tuple[int, ...]], gy: Array
    ) -> list[Array]:
        """Return the gradients at the inputs of the stages from number `first` on, by the chosen way of backward.

        Parameters
        ----------
        first
            Number of the first stage, see `stages`.
        saved, shapes
            What each of the stages from `first` on saved, and the shape of its input.
        gy
            Gradient at the output of the last stage.
        """
        stages = self.stages()[first:]
        links = [Link(layer, s, shape) for (_, layer), s, shape in zip(stages, saved, shapes, strict=True)]
        return chain_gradients(links, gy, self.options, self.verdicts)

    def __len__(self) -> int:
        return len(self.children)

    def __getitem__(self, index: int) -> Layer:
        return list(self.children.values())[index]

    def forward(self, x: Array) -> tuple[Array, SequentialSaved]:
        """Run the chain.

        Raises
        ------
        ShapeError
            A layer does not take the shape that comes to it; the message names the layer and the shape of x.
        """
        saved = SequentialSaved([], [])
        for name, layer in self.children.items():
            saved.shapes.append(x.shape)
            try:
                x, layer_saved = layer.forward(x)
            except ShapeError as error:
                if not saved.layers:  # x itself, of which the layer speaks
                    raise
                raise ShapeError(
                    f"x of shape {saved.shapes[0]} does not fit the chain at layer {name} ({type(layer).__name__}): "
                    f"{error.problem}", expected=error.expected, got=error.got,
                    remedy="Pass x of the size that the model is made for, or make the layers fit",
                ) from error  # fmt: skip
            saved.layers.append(layer_saved)
        saved.output_shape = x.shape
        saved.like = backend.namespace(x).empty(0, x.dtype)
        return x, saved

    def input_grad(self, gy: Array, saved: SequentialSaved) -> Array:
        """Run the chain of I, or the scan in its place."""
        return self._gradients(0, gy, saved)[0]

    def weight_grad(self, gy: Array, saved: SequentialSaved) -> dict[str, Array]:
        """Return every layer's weight gradients under dotted names."""
        gradients = self._gradients(self._behind_first_weights(saved), gy, saved)
        grads: dict[str, Array] = {}
        start = 0
        for (name, layer), layer_saved in zip(self.children.items(), saved.layers, strict=True):
            start += self._length(layer)
            if layer.parameters():
                own = layer.weight_grad(gradients[start], layer_saved)
                grads.update({f"{name}.{key}": grad for key, grad in own.items()})
        return self._summed(grads)

    def scan_plans(self, saved: SequentialSaved) -> list[Any]:
        """Return how `weight_grad` runs every stretch that could be scanned, from the output on; nothing with ``"bp"``.

        Each is a `ScanPlan`, or a `LayerByLayer` where ``"auto"`` takes no scan, and says what it does and why:
        ``algorithm``, ``reason``, ``estimates``, ``describe()``.

        Raises
        ------
        MemoryLimitError
            A stretch needs more than `memory_limit`; not with ``"auto"``.
        """
        links = self._links(saved)[self._behind_first_weights(saved) :]
        return chain_plans(links, saved.like, self.options, self.verdicts)

    def input_grad_work(self, shape: tuple[int, ...], saved: SequentialSaved) -> Work:
        """Return the sum of the layers' costs."""
        parts = zip(self.children.values(), saved.shapes, saved.layers, strict=True)
        return together(layer.input_grad_work(shape, kept) for layer, shape, kept in parts)

    def couples_samples(self, saved: SequentialSaved) -> bool:
        """Whether any of the layers does."""
        return any(layer.couples_samples(s) for layer, s in zip(self.children.values(), saved.layers, strict=True))

    def jacobian_t(self, saved: SequentialSaved) -> Any:
        """Return J₁ J₂ … J_L, the product of the layers' transposed Jacobians (its plans are cached by pattern)."""
        jacobians = [layer.jacobian_t(s) for layer, s in zip(self.children.values(), saved.layers, strict=True)]
        product = jacobians[-1]
        for jacobian in reversed(jacobians[:-1]):  # outputs are usually fewer than inputs, so start at the output
            product = jacobian @ product
        return product

    # ---- links: the layers, with those of inner Sequentials in their place -------------------------------------------

    def _length(self, layer: Layer) -> int:
        """Return how many links `layer` is."""
        return sum(map(self._length, layer.children.values())) if isinstance(layer, Sequential) else 1

    def _links(self, saved: SequentialSaved) -> list[Link]:
        links: list[Link] = []
        for layer, layer_saved, shape in zip(self.children.values(), saved.layers, saved.shapes, strict=True):
            links += layer._links(layer_saved) if isinstance(layer, Sequential) else [Link(layer, layer_saved, shape)]
        return links

    def _behind_first_weights(self, saved: SequentialSaved) -> int:
        """Return the number of the first link whose input gradient some weights need."""
        links = self._links(saved)
        return next((i + 1 for i, link in enumerate(links) if link.layer.parameters()), len(links))

    def _gradients(self, first: int, gy: Array, saved: SequentialSaved) -> list[Array]:
        """Return the gradients at the inputs of the links and at the output, known from that of link `first` on."""
        links = self._links(saved)
        xp = backend.namespace(gy)
        with saved.lock:
            backend.wait(xp, saved.mark)
            if saved.gy is not gy or saved.gradients is None:
                check_gy(gy, saved.output_shape, saved.like.dtype, saved.like)
                saved.gy, saved.gradients = gy, [*(None for _ in links), gy]
            gradients = saved.gradients
            known = next(i for i in range(first, len(gradients)) if gradients[i] is not None)
            if known > first:
                gradients[first:known] = chain_gradients(
                    links[first:known], gradients[known], self.options, self.verdicts
                )
                saved.mark = backend.record(xp)
                self._share(gradients, saved)
        return gradients

    def _share(self, gradients: list[Array | None], saved: SequentialSaved) -> None:
        """Give inner Sequentials their part of the gradients, so that they need not compute them again."""
        start = 0
        for layer, layer_saved in zip(self.children.values(), saved.layers, strict=True):
            stop = start + self._length(layer)
            if isinstance(layer, Sequential) and gradients[stop] is not None:
                layer_saved.gy, layer_saved.gradients = gradients[stop], gradients[start : stop + 1]
                layer_saved.mark = saved.mark
                layer._share(layer_saved.gradients, layer_saved)
            start = stop
