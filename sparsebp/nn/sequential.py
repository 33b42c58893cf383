"""Chains of layers: `Sequential` and `Stage`, whose backward runs layer by layer or by a scan."""

from __future__ import annotations

import abc
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import lru_cache
from itertools import groupby, pairwise, repeat
from math import prod
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array, Backward, ScanAlgorithm, check_scan_options
from sparsebp.core.errors import DTypeError, MemoryLimitError, OptionError, ShapeError
from sparsebp.core.packed import arrays_of, no_scan
from sparsebp.core.shortcuts import batch_axes_of, forward_of, is_unbatched, may_be_unbatched
from sparsebp.nn import fused
from sparsebp.nn.gradients import Gradients, Shared, gradients_of
from sparsebp.nn.layer import Layer, check_gy, check_layer, dotted, inherits_coupling, input_grad_work, may_couple
from sparsebp.nn.recurrent.runs import BackwardOptions
from sparsebp.nn.work import Work, total_work

# ``backward="auto"`` of a chain: layer by layer, or a scan, by a rule over shapes and masks alone.


class ChainChoice(NamedTuple):
    """Whether a segment is scanned, and why."""

    scans: bool
    reason: str


ON_A_HOST = (
    "Layer by layer: on a host a scan over Jacobians did not pay for any network measured, pruned or not (benchmark "
    "pruned); workers= weighs it for a machine with that many workers."
)


def choose_chain_backward(
    works: Sequence[Work], batch: int, dtype: np.dtype, xp: ModuleType, options: BackwardOptions,
    jacobians: Callable[[], list[Any]], plan: Callable[[list[Any]], Any],
) -> ChainChoice:  # fmt: skip
    """On a GPU, or with `workers`, compare the parallel times, as `plan_scan` does."""
    # works: costs of the layers' `input_grad`.
    # jacobians: returns the transposed Jacobians other than the identity; called only if a scan may pay, since
    # patterns may be large.
    # plan: plans the scan over them.
    from sparsebp.core.machine import machine
    from sparsebp.scan.cost import amount
    from sparsebp.scan.rules import MARGIN, layers_time, parallel_values

    if backend.is_host(xp) and options.workers is None:
        return ChainChoice(False, ON_A_HOST)
    m, limit, entries = machine(xp, options.workers), options.memory_limit, sum(work.entries for work in works)
    fewest = min((work.values for work in works if work.flops), default=0)
    if parallel_values(m) <= fewest:
        return ChainChoice(False, f"Layer by layer: the workers of a {m.name} share the values of each layer, {fewest} "
                           "at least, and a scan saves nothing.")  # fmt: skip
    layerwise = layers_time(((w.flops, w.values, w.calls) for w in works), m)
    counted = f"{amount(layerwise, 'FLOP')} layer by layer"
    least = 2 * entries * batch / parallel_values(m)  # as if all workers shared all entries
    if least > MARGIN * layerwise:
        return ChainChoice(False, f"Layer by layer: the parallel time is {counted}, and at least "
                           f"{amount(least, 'FLOP')} by a scan over {entries} entries of Jacobians.")  # fmt: skip
    beyond = ChainChoice(False, f"Layer by layer: no scan keeps to memory_limit, {limit} bytes.")
    if limit is not None and entries * np.dtype(dtype).itemsize > limit:
        return beyond
    moving = jacobians()
    if not moving:
        return ChainChoice(False, "Layer by layer: no layer changes a gradient, there is nothing to scan.")
    if limit is not None and sum(j.data.nbytes for j in moving) > limit:
        return beyond
    try:
        scan = plan(moving)
    except MemoryLimitError:
        return beyond
    wait = min(scan.compared.values(), default=layerwise)
    if scan.algorithm == "linear" or wait > MARGIN * layerwise:
        return ChainChoice(False, f"Layer by layer: the parallel time is {counted}; {scan.algorithm} does not take "
                           f"less than {MARGIN:.0%} of that.")  # fmt: skip
    return ChainChoice(True, f"By scan: the parallel time is {amount(wait, 'FLOP')}, and {counted}.")


# Layers that contain others.


class Link(NamedTuple):
    """A layer inside another, its saved value, and the shapes of its input and output, batch first."""

    layer: Layer
    saved: Any
    shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    coupled: bool = False  # Whether it may have coupled samples in the mode of the forward; its saved value may not say

    def work(self) -> Work:
        """Return the cost of the layer's `input_grad` and the entries of its Jacobian, dense if it has none."""
        work = input_grad_work(self.layer, self.shape, self.saved)
        if "jacobian_t" in self.layer.valid_shortcuts:
            return work
        return work._replace(entries=prod(self.shape) * prod(self.out_shape[1:]))

    def couples_samples(self) -> bool:
        """Whether the layer couples the samples, or may do so."""
        known = "couples_samples" in self.layer.valid_shortcuts and not self.coupled
        return not known or self.layer.couples_samples(self.saved)

    def unbatched(self) -> bool:
        """Whether the layer's forward had an unbatched sample."""
        return is_unbatched(self.layer, self.saved, self.shape)

    def may_be_unbatched(self) -> bool:
        """Whether it may have had one, or a layer inside."""
        if isinstance(self.layer, Container) and "unbatched" in self.layer.valid_shortcuts:
            return any(link.may_be_unbatched() for link in self.layer._parts(self.saved))
        return may_be_unbatched(self.layer, self.shape)

    def choices(self, prefix: str) -> Iterator[tuple[str, str, str]]:
        """Yield the layer's choices under that name."""
        if "choices" in self.layer.valid_shortcuts:
            yield from self.layer.choices(self.saved, prefix)

    def jacobian_t(self, like: Array) -> Any:
        """Return the layer's `TransposedJacobian`: its own, or the dense one from its input gradient."""
        # `like` is an array of the dtype of input and output, on their device.
        if "jacobian_t" in self.layer.valid_shortcuts:
            return self.layer.jacobian_t(self.saved)
        from sparsebp.jacobians.jacobian import jacobian_of

        return jacobian_of(self.layer, self.saved, self.shape, self.out_shape, like, self.coupled)

    def times(self, product: Any, like: Array) -> Any:
        """Return the layer's `TransposedJacobian` times one of the layers behind.

        Branches fill in: the product that they add up to has more entries than theirs. Where the other factor is a full
        matrix, its columns go back through the layers inside instead, as gradients at the output.
        """
        full = product.pattern.kind == "dense" and isinstance(self.layer, Container)
        if not full or self.couples_samples() or self.may_be_unbatched() or self.layer.batch_axes != (0, 0):
            return self.jacobian_t(like) @ product
        from sparsebp.jacobians.jacobian import dense_product

        return dense_product(lambda gy: gradients_of(self.layer, gy, self.saved).input_grad(), product, self.shape,
                             self.out_shape)  # fmt: skip


class Container(Layer):
    """Base of `Sequential`, `Sum` and `Concat`: properties that hold if they hold for a layer inside."""

    replayable = True

    @abc.abstractmethod
    def _parts(self, saved: Any) -> Iterator[Link]:
        """Yield a link for each of the children, in their order."""

    def choices(self, saved: Any, prefix: str = "") -> Iterator[tuple[str, str, str]]:
        """Yield the choices of the layers inside."""
        for name, link in zip(self.children, self._parts(saved), strict=True):
            yield from link.choices(dotted(prefix, name))

    def couples_samples(self, saved: Any) -> bool:
        """Whether any layer inside couples the samples."""
        return any(link.couples_samples() for link in self._parts(saved))

    def may_couple_samples(self) -> bool:
        """Whether any layer inside may couple the samples."""
        return any(map(may_couple, self.children.values()))

    def unbatched(self, saved: Any) -> bool:
        """Whether any layer inside had an unbatched sample."""
        return any(link.unbatched() for link in self._parts(saved))

    @property
    def stepwise(self) -> bool:
        """Whether all of the layers inside work on each step of a sequence by itself."""
        return all(getattr(child, "stepwise", False) for child in self.children.values())


def coupled_now(layers: Iterable[Layer]) -> frozenset[int]:
    """Return the numbers of layers whose samples the layers inside may couple in their present mode.

    A class that says of a saved value whether it coupled samples is asked later.
    """
    found = [
        number for number, layer in enumerate(layers)
        if layer.children and inherits_coupling(layer) and layer.may_couple_samples()
    ]  # fmt: skip
    return frozenset(found) if found else NONE


NONE: frozenset[int] = frozenset()


# Back-propagation through a chain of layers: one input gradient after the other, or a scan over Jacobians.
#
# The scan takes the place of the chain of I (BPPSA §3.1): the layers' transposed Jacobians are its elements, their
# values new at every step, while patterns and plans are made once. The rest of the package has the batch first, a scan
# has it last; gradients are turned around here and nowhere else.

KEPT = 8
"""Choices that a chain keeps: of a segment for each batch size, and as long as no mask changes."""


class ChainBackward:
    """Runs one chain backward, by its options and the choices of ``"auto"`` for its segments."""

    # Stretches of layers are scanned each by itself; a layer between them that couples the samples has no Jacobian and
    # runs its `input_grad`, and so does one that stands alone, for which there is nothing to scan.

    def __init__(self, options: BackwardOptions) -> None:
        self.options = options
        self._chosen: dict[Any, ChainChoice] = {}

    def gradients(self, links: Sequence[Link], last: Gradients) -> tuple[Array, list[Gradients]]:
        """Return the gradient at the input of the first link, and the `Gradients` of every link."""
        # links: In the order of forward.
        # last: The gradients of the last one.
        gy, found = last.gy, list[Gradients]()  # from the last link to the first
        for scannable, segment in self._segments(links):
            if scannable and self._choice(segment, gy).scans:
                for link, at_input in zip(segment, self._scan(segment, gy), strict=True):
                    found.append(gradients_of(link.layer, gy, link.saved) if found else last)
                    gy = at_input
                continue
            ahead: Gradients | None = None  # of the link before, where both go in one pass
            for link, before in zip(segment, (*segment[1:], None), strict=True):
                at = ahead or (gradients_of(link.layer, gy, link.saved) if found else last)
                found.append(at)
                ahead = None
                if before is not None and fused.together(before.layer, link.layer):
                    ahead = fused.gradients(before.layer, link.layer, gy, before.saved, link.saved)
                if ahead is None:
                    gy = at.input_grad()
        return gy, found[::-1]

    def plans(self, links: Sequence[Link], like: Array) -> list[Any]:
        """Return a `ScanPlan` or `LayerByLayer` for every segment that could be scanned, from the last to the first."""
        # `like` is an array of the gradient's dtype, on its device. There is nothing to return for `"bp"`.
        from sparsebp.scan.report import LayerByLayer

        plans: list[Any] = []
        for scannable, segment in self._segments(links):
            if not scannable:
                continue
            choice = self._choice(segment, like)
            if not choice.scans:
                plans.append(LayerByLayer(choice.reason))
            elif moving := _moving(_jacobians(segment, like)):
                plan = self._plan_within(moving, segment[0].shape[0])
                if self.options.algorithm == "auto":  # the plan may serve another chain, for another reason
                    plan = copy(plan)
                    plan.reason = f"{choice.reason} {plan.reason}"
                plans.append(plan)
        return plans

    def _segments(self, links: Sequence[Link]) -> Iterator[tuple[bool, Sequence[Link]]]:
        """Yield ``(whether it can be scanned, links from last to first)`` from the last segment to the first."""
        skips = self.options.algorithm != "bp" and any(getattr(link.layer, "takes_stashed", False) for link in links)
        if skips and self.options.algorithm != "auto":
            raise no_scan()
        if self.options.algorithm == "bp" or skips:
            yield False, links[::-1]
            return
        for alone, group in groupby(reversed(links), _stands_alone):
            segment = list(group)
            yield not alone and len(segment) > 1 and segment[0].shape[0] > 0, segment

    def _choice(self, segment: Sequence[Link], like: Array) -> ChainChoice:
        """Return the choice for a segment, from the last layer to the first; all options but ``"auto"`` are scans."""
        if self.options.algorithm != "auto":
            return ChainChoice(True, f"backward={self.options.algorithm!r} was asked for.")
        xp, batch = backend.namespace(like), segment[0].shape[0]
        layers = tuple((link.layer, link.shape, link.layer.training) for link in segment)
        key = (layers, _masks(segment), like.dtype, xp.__name__)  # modules cannot be copied
        if key not in self._chosen:
            choice = choose_chain_backward(
                [link.work() for link in segment], batch, like.dtype, xp, self.options,
                lambda: _moving(_jacobians(segment, like)), lambda moving: self._plan_within(moving, batch),
            )  # fmt: skip
            while len(self._chosen) >= KEPT:
                del self._chosen[next(iter(self._chosen))]
            self._chosen[key] = choice
        return self._chosen[key]

    def _scan(self, segment: Sequence[Link], gy: Array) -> list[Array]:
        """Return the gradients at the inputs of `segment`, which goes from the last layer to the first."""
        batch, limit = gy.shape[0], self.options.memory_limit
        if limit is not None and (least := sum(link.work().entries for link in segment) * gy.dtype.itemsize) > limit:
            raise self._too_large(len(segment), batch, f"{least} bytes of Jacobians, or more", "Use")
        y = backend.namespace(gy).ascontiguousarray(gy.reshape(batch, -1).T)
        jacobians = _jacobians(segment, gy)
        moving = _moving(jacobians)
        results = iter(self._plan_within(moving, batch)(y, [j.data for j in moving]) if moving else [])
        gradients = []
        for link, jacobian in zip(segment, jacobians, strict=True):
            if not _is_identity(jacobian):
                y = next(results)
            gradients.append(y.T.reshape(link.shape))
        return gradients

    def _plan_within(self, moving: Sequence[Any], batch: int) -> Any:
        """Return the plan for these Jacobians, none an identity, if they and the scan fit into the memory limit."""
        first = moving[0].data
        stored = sum(j.data.nbytes for j in moving)
        limit = self.options.memory_limit
        try:
            return _plan(
                tuple(j.pattern for j in moving), tuple(j.batch is None for j in moving), batch, first.dtype,
                backend.namespace(first), self.options, None if limit is None else max(limit - stored, 0),
            )  # fmt: skip
        except MemoryLimitError as error:
            got = f"{stored} bytes of Jacobians, and for the scan {error.got}"
            more = f"{error.remedy} (memory_limit less the Jacobians), or use"
            raise self._too_large(len(moving), batch, got, more) from error

    def _too_large(self, layers: int, batch: int, got: str, more: str) -> MemoryLimitError:
        return MemoryLimitError(
            f"backward={self.options.algorithm!r} needs too much memory for {layers} layers and B = {batch}",
            expected=f"at most {self.options.memory_limit} bytes (memory_limit)", got=got,
            remedy=f"{more} backward='bp', which stores none",
        )  # fmt: skip


def _stands_alone(link: Link) -> bool:
    """Whether a layer has no Jacobian a sample that a scan could chain: its samples meet, or are not on axis 0."""
    axes = batch_axes_of(link.layer)
    return link.couples_samples() or axes != (0, 0) or link.unbatched() or link.may_be_unbatched()


def _masks(segment: Sequence[Link]) -> tuple[bytes, ...]:
    """Return the masks of pruned weights, packed: with the layers they determine the patterns."""
    masks = (mask for link in segment for _, layer in link.layer.modules() for mask in layer.masks())
    return tuple(np.packbits(backend.to_host(mask)).tobytes() for mask in masks)  # synchronize!


def _jacobians(segment: Sequence[Link], like: Array) -> list[Any]:
    return [link.jacobian_t(like) for link in segment]


def _moving(jacobians: Sequence[Any]) -> list[Any]:
    """Return the Jacobians that change a gradient."""
    return [j for j in jacobians if not _is_identity(j)]


def _is_identity(jacobian: Any) -> bool:
    return jacobian.pattern.kind == "identity"


@lru_cache(maxsize=8)  # a plan keeps its buffers, gigabytes for large nets; one for each segment and batch size
def _plan(
    patterns: tuple[Any, ...], shared: tuple[bool, ...], batch: int, dtype: np.dtype, xp: ModuleType,
    options: BackwardOptions, memory_limit: int | None,
) -> Any:  # fmt: skip
    from sparsebp.scan import plan_scan

    return plan_scan(
        patterns, algorithm=cast(ScanAlgorithm, options.algorithm), workers=options.workers,
        up_levels=options.up_levels, chunks=options.chunks, memory_limit=memory_limit, batch=batch, dtype=dtype,
        shared=shared, xp=xp,
    )  # fmt: skip


# Which layers of a chain get the lengths of sequences that are padded at the end.


@lru_cache(maxsize=1024)  # chains ask at every step, and a signature takes as long as a small kernel
def _takes_lengths(forward: Callable[..., Any]) -> bool:
    return "lengths" in inspect.signature(forward).parameters


def taking_lengths(stages: Sequence[tuple[str, Any]]) -> tuple[list[int], bool]:
    """Return the numbers of the layers whose forward takes lengths, and whether one of them joins all steps."""
    # After a layer that makes one vector of all steps (`joins_steps = True`, as `MeanOverSteps`) there are no steps
    # left. Before it, a layer either takes lengths or works on each step by itself (`stepwise = True`, as `Linear`).
    # stages: Names and layers, as `Layer.stages` returns them.
    found = []
    for number, (name, layer) in enumerate(stages):
        if is_group(layer):
            inside, joins = taking_lengths(layer._named(name))
            found += [number] if inside else []
            if joins:
                return found, True
        elif _takes_lengths(getattr(layer.forward, "__func__", layer.forward)):
            found.append(number)
            if getattr(layer, "joins_steps", False):
                return found, True
        elif not getattr(layer, "stepwise", False):
            raise OptionError(
                f"Layer {name or 'of the model'} does not take lengths, and may mix steps with padding",
                expected="forward(x, lengths=...), or stepwise = True in the class if it works on each step by itself",
                got=f"{type(layer).__name__}.forward({', '.join(inspect.signature(layer.forward).parameters)})",
            )
    return found, False


class SequentialSaved(NamedTuple):
    """The layers' saved values, the shapes of their inputs, and the output's shape, dtype and device."""

    layers: list[Any]
    shapes: list[tuple[int, ...]]
    output_shape: tuple[int, ...]  # Shape of the output
    like: Array  # An empty array of the output's dtype, on its device
    coupled: frozenset[int]  # The numbers of layers that may have coupled samples, by the mode of layers inside


def _numbered(layers: Sequence[Layer]) -> dict[str, Layer]:
    if not layers:
        raise OptionError(
            "Sequential has no layers", expected="at least one", got="none", remedy="Use Identity() for no change"
        )
    return {str(i): check_layer(f"layer {i}", layer) for i, layer in enumerate(layers)}


class Sequential(Container):
    """Layers one after the other, as `torch.nn.Sequential`; children are named ``"0"``, ``"1"``, …

    The gradients between the layers are computed once for all of `gradients`. The weights alone need neither the input
    gradient nor the Jacobian of the first layer with parameters.

    Parameters
    ----------
    *layers
        The chain. Layers of inner Sequentials are links of the same chain; the outermost decides how backward runs.
        An inner `Stage` is one link. ``chain[1] = layer`` replaces a layer, ``del chain[1]`` takes it out.
    backward
        ``"bp"``: the layers' `input_grad`, one after the other. Else a scan over the layers' transposed Jacobians
        (BPPSA §3.1), by the algorithm of that name of `sparsebp.plan_scan`. ``"auto"``: on a host layer by layer; on
        a GPU, or with `workers`, a scan if it has the least parallel time, given shapes, pruned weights, workers and
        memory limit; `scan_plans` says why. Patterns and plans are made at the first step with a batch size, values at
        every step.
    up_levels, chunks, workers, memory_limit
        Levels of the up-sweep of ``"hybrid"``, number of chunks of ``"chunked"``, workers to count with, and most
        bytes that the Jacobians and the scan of a segment may take (beyond it, ``"auto"`` runs layer by layer); None:
        the algorithm chooses, and no limit.

    Notes
    -----
    A layer that couples the samples, `BatchNorm2d` while training, has no Jacobian of one sample. It splits the chain:
    the segments before and after it are scanned, and it runs its `input_grad`. So does a sum around one.
    """

    def __init__(
        self, *layers: Layer, backward: Backward = "bp", up_levels: int | None = None, chunks: int | None = None,
        workers: int | None = None, memory_limit: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.children = _numbered(layers)
        self.set_backward(backward, up_levels, chunks, workers, memory_limit)

    def set_backward(
        self, backward: Backward, up_levels: int | None = None, chunks: int | None = None,
        workers: int | None = None, memory_limit: int | None = None,
    ) -> None:  # fmt: skip
        """Choose how backward runs from now on; arguments as for the class."""
        options = BackwardOptions(backward, up_levels, chunks, workers, memory_limit)
        check_scan_options("backward", backward, up_levels, chunks)
        self._backward = ChainBackward(options)

    @property
    def backward(self) -> Backward:
        """The requested `backward`."""
        return self._backward.options.algorithm

    def stages(self, prefix: str = "") -> list[tuple[str, Layer]]:
        """Return the links with their dotted names: the layers, inner Sequentials replaced by their layers.

        A subclass with another forward or backward is one stage.
        """
        self.modules()
        return self._named(prefix) if self._opens() else [(prefix, self)]

    @property
    def takes_stashed(self) -> bool:
        """Whether a layer inside stashes an activation, or joins one."""
        return any(getattr(layer, "takes_stashed", False) for layer in self.children.values())

    def _opens(self) -> bool:
        """Whether the layers inside are links of a chain around this one."""
        return "stages" in self.valid_shortcuts

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
            Of the stages from `first` on: the saved values, and the shapes of the inputs.
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

    def __setitem__(self, index: int, layer: Layer) -> None:
        self.children[list(self.children)[operator.index(index)]] = layer

    def __delitem__(self, index: int) -> None:
        left = list(self.children.values())
        del left[operator.index(index)]
        self.children = _numbered(left)

    def forward(self, x: Array, lengths: Any = None) -> tuple[Array, SequentialSaved]:
        """Run the chain.

        Parameters
        ----------
        x
            The first layer's input.
        lengths
            Of sequences padded at the end, valid steps of each (B integers), for the layers that take them; or None.
            Values of x past an end must be finite if other layers see them first: 0 · NaN is NaN.

        Raises
        ------
        OptionError
            There are lengths, and a layer neither takes them nor works on each step by itself.
        ShapeError, DTypeError
            A layer does not take its input's shape or dtype; the message names the layer and the shape of x.
        """
        backend.namespace(arrays_of(x)[0])
        shapes: list[tuple[int, ...]] = []
        saved: list[Any] = []
        options = {} if lengths is None else self._lengths_of(lengths)
        children = list((self.children or _numbered(())).items())
        for number, (name, layer) in enumerate(children):
            if len(saved) > number:  # it has run with the one before
                continue
            shapes.append(x.shape)
            behind = children[number + 1][1] if number + 1 < len(children) else None
            try:
                found = None
                if behind is not None and fused.together(layer, behind):
                    found = fused.forward(layer, behind, x)
                x, layer_saved = forward_of(layer, x, **options.get(name, {})) if found is None else found
            except (ShapeError, DTypeError) as error:
                if not saved:  # x itself, of which the layer speaks
                    raise
                raise type(error)(f"x of shape {shapes[0]} does not fit the chain at layer {name} "
                                  f"({type(layer).__name__}): {error.problem}", expected=error.expected,
                                  got=error.got) from error  # fmt: skip
            saved.append(layer_saved)
            if found is not None:
                shapes.append(x.shape)
                saved.append(x)
        like = backend.namespace(arrays_of(x)[0]).empty(0, x.dtype)
        return x, SequentialSaved(saved, shapes, x.shape, like, coupled_now(self.children.values()))

    def _lengths_of(self, lengths: Any) -> dict[str, dict[str, Any]]:
        """Return keyword arguments of children by name: lengths, if they or layers inside take them."""
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
        xp = check_gy(arrays_of(gy)[0], saved.output_shape, saved.like.dtype, saved.like)
        names, links = self._links(saved)
        behind = self._behind_first(links, _has_parameters)
        last = gradients_of(links[-1].layer, gy, links[-1].saved)

        def of_tail(behind: int) -> list[Gradients]:
            """From the link before number `behind` on; layers before it do not affect the weights' gradients."""
            if behind == len(links):
                return [last]
            at, found = self._backward.gradients(links[behind:], last)
            before = links[behind - 1]
            return [gradients_of(before.layer, at, before.saved), *found]

        def some(holds: Callable[[Layer], bool]) -> dict[str, Gradients]:
            behind = self._behind_first(links, holds)
            return dict(zip(names[behind - 1 :], of_tail(behind), strict=True))

        tail = Shared(lambda: of_tail(behind), xp)
        return Gradients(
            self, gy, saved, lambda: self._backward.gradients(links[:behind], tail()[0])[0],
            lambda: {
                name: grads
                for name, grads in zip(names[behind - 1 :], tail(), strict=True)
                if grads.layer.params or grads.layer.children
            },
            some,
        )  # fmt: skip

    def scan_plans(self, saved: SequentialSaved) -> list[Any]:
        """Return how the gradients of weights run each segment that could be scanned, from the output on; not ``"bp"``.

        Each is a `ScanPlan`, or a `LayerByLayer` if ``"auto"`` takes no scan, each with its reason: ``algorithm``,
        ``reason``, ``describe()``.

        Raises
        ------
        MemoryLimitError
            A segment needs more than `memory_limit`; not with ``"auto"``.
        """
        _, links = self._links(saved)
        return self._backward.plans(links[self._behind_first(links, _has_parameters) :], saved.like)

    def choices(self, saved: SequentialSaved, prefix: str = "") -> Iterator[tuple[str, str, str]]:
        """Yield how every segment that could be scanned runs, from the output on, and the layers' choices."""
        for plan in self.scan_plans(saved):
            yield prefix, plan.algorithm, plan.reason
        for name, link in zip(*self._links(saved, prefix), strict=True):
            yield from link.choices(name)

    def input_grad_work(self, shape: tuple[int, ...], saved: SequentialSaved) -> Work:
        """Return the sum of the layers' costs."""
        return total_work(input_grad_work(link.layer, link.shape, link.saved) for link in self._parts(saved))

    def jacobian_t(self, saved: SequentialSaved) -> Any:
        """Return J₁ J₂ … J_L, the product of the layers' transposed Jacobians (its plans are cached by pattern)."""
        links = self._links(saved)[1]
        product = links[-1].jacobian_t(saved.like)
        for link in reversed(links[:-1]):  # outputs are usually fewer than inputs, so start at the output
            product = link.times(product, saved.like)
        return product

    @property
    def batch_axes(self) -> tuple[int, int]:  # type: ignore[override]
        """The first layer's axis in the input, the last one's in the output.

        Raises
        ------
        OptionError
            A layer takes the batch on another axis than the one before it returns it on.
        """
        axes = [layer.batch_axes for layer in self.children.values()]
        for (_, given), (taken, _) in pairwise(axes):
            if given != taken:
                raise OptionError("The layers put the batch on different axes", expected="one axis from layer to layer",
                                  got=f"an output with the batch on axis {given}, then an input with it on axis "
                                  f"{taken}", remedy="Build recurrent layers with batch_first=True")  # fmt: skip
        return axes[0][0], axes[-1][1]

    @property
    def input_dtype(self) -> np.dtype | None:
        """The parameters' dtype, unless the first layer takes integers."""
        first = self[0].input_dtype
        return first if first is not None and first.kind == "i" else self.dtype

    def _parts(self, saved: SequentialSaved) -> Iterator[Link]:
        ends = [*saved.shapes[1:], saved.output_shape]
        coupled = [number in saved.coupled for number in range(len(ends))] if saved.coupled else repeat(False)
        return map(Link, self.children.values(), saved.layers, saved.shapes, ends, coupled)

    # ---- links: the layers, inner Sequentials replaced by their layers -----------------------------------------------

    def _links(self, saved: SequentialSaved, prefix: str = "") -> tuple[list[str], list[Link]]:
        names: list[str] = []
        links: list[Link] = []
        for own, link in zip(self.children, self._parts(saved), strict=True):
            name = f"{prefix}.{own}" if prefix else own
            if isinstance(link.layer, Sequential) and link.layer._opens():
                inner_names, inner = link.layer._links(link.saved, name)
                names += inner_names
                links += inner
            else:
                names.append(name)
                links.append(link)
        return names, links

    def _behind_first(self, links: Sequence[Link], holds: Callable[[Layer], bool]) -> int:
        """Return the number of the link behind the first layer for which `holds` is true, or of none."""
        return next((number for number, link in enumerate(links, 1) if holds(link.layer)), len(links))


def _has_parameters(layer: Layer) -> bool:
    return bool(layer.params or (layer.children and layer.parameters()))


class Stage(Sequential):
    """A `Sequential` that a schedule takes as one stage: its layers stay together, on one worker.

    Schedules of a training step place and order stages, see `stages`. By default every layer is one. Group layers
    to balance a pipeline, to cut it where little has to be sent, or to have fewer actions than layers. F, I, W and U
    of a Stage run those of all its layers. Arguments, and the names of parameters and buffers, are those of
    `Sequential`: ``Sequential(Stage(a, b), c)`` has the `state_dict` of ``Sequential(Sequential(a, b), c)``.

    Notes
    -----
    In a chain around it, a Stage is one link: a scan of that chain takes the product of its layers' Jacobians.
    Otherwise its own `backward` says how gradients go through it, so a pipeline, which runs its stages one after the
    other, can have a scan within each of them.

    Examples
    --------
    >>> import sparsebp as sb
    >>> nn = sb.nn
    >>> model = nn.Sequential(
    ...     nn.Stage(nn.Flatten(), nn.Linear(64, 32, rng=0), nn.ReLU()),
    ...     nn.Stage(nn.Linear(32, 32, rng=1), nn.ReLU(), nn.Linear(32, 10, rng=2)),
    ... )
    >>> [name for name, _ in model.stages()]
    ['0', '1']
    >>> list(model.parameters())[:2]
    ['0.1.weight', '0.1.bias']
    """

    def _opens(self) -> bool:
        return False


def is_group(layer: Any) -> bool:
    """Whether a layer is a `Stage` that runs its layers one after the other, and no subclass that does otherwise."""
    return isinstance(layer, Stage) and "stages" in layer.valid_shortcuts
