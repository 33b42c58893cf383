"""The way back from a forward: gradients that are computed when they are asked for, and the work that they share.

I and W of a layer stay apart, because schedules reorder them. Shared work (the scan of a recurrent layer, the chain
inside a Sequential) lives in one `Gradients` object, one for each gradient at the output. Nothing is cached by
the identity of an array: callers may write into their arrays between two calls.
"""

from __future__ import annotations

import contextlib
import operator
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Generic, TypeVar

import numpy as np

from sparsebp.core import backend, graphs, parts
from sparsebp.core import masks as masking
from sparsebp.core.check import Array
from sparsebp.core.errors import OptionError, StaleError
from sparsebp.core.locks import forkable_lock
from sparsebp.core.packed import Packed, packed, passes_by
from sparsebp.core.shortcuts import shortcuts_of

T = TypeVar("T")


class Shared(Generic[T]):
    """A value that is computed when it is first asked for, once, by whichever thread asks."""

    # compute: Returns the value. If it raises, the next call tries again.
    # xp: On a GPU, another stream waits for the computation.

    __slots__ = ("_compute", "_lock", "_mark", "_value", "_xp")

    def __init__(self, compute: Callable[[], T], xp: ModuleType) -> None:
        self._compute: Callable[[], T] | None = compute
        self._xp, self._lock = xp, forkable_lock()
        self._mark: Any = None
        self._value: Any = None

    def __call__(self) -> T:
        """Return the value."""
        with self._lock:
            if self._compute is None:
                graphs.wait(self._xp, self._mark)
            else:
                self._value = self._compute()
                self._mark = graphs.record(self._xp)
                self._compute = None
            value: T = self._value
            return value


class Gradients:
    """Gradients of one layer, from one gradient at the output of one forward.

    Made by a layer's `gradients`. A custom layer that contains others returns one whose parts ask its children's
    gradients; see the how-to guide "Write a layer".

    Parameters
    ----------
    layer, gy, saved
        The layer, the gradient at its output, and its forward's saved value.
    input
        Returns the gradient at the input; by default ``layer.input_grad(gy, saved)``.
    weights
        Returns the gradients at the parameters: a mapping whose values are arrays, or `Gradients` of the child of that
        name, whose names get the prefix. By default ``layer.weight_grad(gy, saved)``.
    some
        Returns the `Gradients` of children by name, at least of those for which a function given to it is true, where
        those of some cost less than those of all. By default they are taken from `weights`.

    Attributes
    ----------
    check
        Called before `input` or `weights` is computed, to raise an error if that is no longer possible; or None.
    """

    __slots__ = ("__weakref__", "_input", "_kept", "_lock", "_some", "_weights", "check", "gy", "layer", "saved")

    def __init__(
        self, layer: Any, gy: Array, saved: Any, input: Callable[[], Array] | None = None,
        weights: Callable[[], Mapping[str, Any]] | None = None,
        some: Callable[[Callable[[Any], bool]], Mapping[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        self.layer, self.gy, self.saved = layer, gy, saved
        self._input, self._weights, self._some = input, weights, some
        self._kept: dict[str, Any] = {}
        self._lock: Any = None
        self.check: Callable[[], None] | None = None

    @property
    def input(self) -> Array:
        """The gradient with respect to the input, of its shape; computed once."""
        return self._once("input", self._own_input_grad)

    def _own_input_grad(self) -> Array:
        """Return an array that the caller may write to: some return `gy`, which `weights` needs as it is, or a view."""
        found = self.input_grad()
        if isinstance(found, np.ndarray) and not found.flags.writeable:
            return found.copy()
        shares = self.gy is not None and backend.namespace(found, self.gy).may_share_memory(found, self.gy)
        return found.copy() if shares else found

    @property
    def weights(self) -> dict[str, Array]:
        """The gradients with respect to the parameters, named like `Layer.parameters`; computed once."""
        return dict(self._once("weights", self.weight_grad))

    def input_grad(self) -> Array:
        """I: compute the gradient with respect to the input; work shared with W is kept, the result is not."""
        return self.layer.input_grad(self.gy, self.saved) if self._input is None else self._input()

    def weight_grad(self) -> dict[str, Array]:
        """W: compute the gradients with respect to the parameters; work shared with I is kept, the result is not.

        Raises
        ------
        OptionError
            The names differ from the layer's parameters.
        """
        layer = self.layer
        if self._weights is None:
            grads: dict[str, Array] = layer.weight_grad(self.gy, self.saved)
            grads = checked_grads(layer, grads) if hasattr(layer, "params") else grads
        else:
            grads = {}
            for name, value in self._weights().items():
                if isinstance(value, Gradients):
                    for key, grad in value.weight_grad().items():
                        grads[f"{name}.{key}"] = grad
                else:
                    grads[name] = value
            grads = layer.summed(grads) if layer.children else checked_grads(layer, grads)
        return without_pruned(layer, grads) if masking.owners else grads

    def uses(self, wanted: Collection[int]) -> dict[str, Array]:
        """W of some parameters, those of the identities `wanted`: a gradient for each use, by its name in the layer."""
        if self._weights is None or type(self).weight_grad is not Gradients.weight_grad:
            params = self.layer.parameters()
            return {name: grad for name, grad in self.weight_grad().items() if id(params[name]) in wanted}

        def holds(layer: Any) -> bool:
            return any(id(array) in wanted for array in layer.parameters().values())

        found: dict[str, Array] = {}
        for name, value in (self._weights() if self._some is None else self._some(holds)).items():
            if not isinstance(value, Gradients):
                found[name] = value
            elif holds(value.layer):
                found |= {f"{name}.{key}": grad for key, grad in value.uses(wanted).items()}
        return found

    def _once(self, name: str, compute: Callable[[], T]) -> T:
        with _making:
            self._lock = lock = self._lock or forkable_lock()
        with lock:
            if name not in self._kept:
                if self.check is not None:
                    self.check()
                self._kept[name] = compute()
            value: T = self._kept[name]
            return value


class NamedGradients(Gradients):
    """`Gradients` of a layer with further inputs: also with respect to those, by name; computed together, once.

    A recurrent layer has `h0`, the state before the first step, and an LSTM `c0` as well; a cell `hidden` and `cell`;
    an attention `key` and `value`.
    """

    __slots__ = ("_more", "_names")

    def __init__(self, *args: Any, names: tuple[str, ...], more: Callable[[], Sequence[Array]] | None = None) -> None:
        super().__init__(*args)
        self._names, self._more = names, more

    def others(self) -> Sequence[Array]:
        """Compute the gradients with respect to the further inputs: by default by `more`."""
        return self._more() if self._more is not None else ()

    def __getattr__(self, name: str) -> Array:
        if name.startswith("_") or name not in self._names:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self._once("more", self.others)[self._names.index(name)]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._names]


class PassingGradients(Gradients):
    """`Gradients` of a layer that stashed arrays have passed by; their gradients pass it by too."""

    __slots__ = ("of_layer",)

    def __init__(self, of_layer: Gradients, gy: Packed) -> None:
        super().__init__(of_layer.layer, gy, of_layer.saved)
        self.of_layer = of_layer

    def input_grad(self) -> Any:
        """I, with the gradients that pass by."""
        return packed(self.gy.names, (self.of_layer.input_grad(), *self.gy.stashed))

    def weight_grad(self) -> dict[str, Array]:
        """W of the layer."""
        return self.of_layer.weight_grad()

    def uses(self, wanted: Collection[int]) -> dict[str, Array]:
        """W of some parameters of the layer."""
        return self.of_layer.uses(wanted)


_making = forkable_lock()
"""Held while a `Gradients` makes its own lock: most need none, since a training step asks each for one thing, once."""


def without_pruned(layer: Any, grads: dict[str, Array]) -> dict[str, Array]:
    """Return gradients with 0 where parameters are pruned."""
    params = layer.parameters() if hasattr(layer, "parameters") else {}
    masks = {name: masking.mask_of(params[name]) for name in grads if name in params}
    return grads | {name: masking.kept(grads[name], mask) for name, mask in masks.items() if mask is not None}


def checked_grads(layer: Any, grads: Any) -> dict[str, Array]:
    """Return gradients after checking their names, shapes and dtypes against the layer's parameters."""
    # With children, names are dotted; a shared parameter may have a gradient for each use.
    params = layer.params
    if getattr(layer, "children", None):
        params = layer.parameters()
        if isinstance(grads, Mapping) and params.keys() < grads.keys() <= layer.shared_names().keys():
            grads = layer.summed(grads)
    if not (isinstance(grads, (dict, Mapping)) and grads.keys() == params.keys()):
        names = ", ".join(map(str, grads)) or "none" if isinstance(grads, Mapping) else type(grads).__name__
        raise OptionError(f"{type(layer).__name__} does not give the gradients of its parameters",
                          expected=", ".join(params) or "none", got=names,
                          remedy="Let weight_grad return one array a parameter, named as in parameters()")  # fmt: skip
    for name, grad in grads.items():
        param = params[name]
        if getattr(grad, "shape", None) != param.shape or grad.dtype != param.dtype:
            what = f"the gradient of {name}"
            backend.namespace(**{what: grad})
            backend.check_array(what, grad, dtype=param.dtype, shape=param.shape, contiguous=False)
    return layer.summed(grads) if is_tied(layer.params) else dict(grads)


def is_tied(params: Mapping[str, Array]) -> bool:
    """Whether one of a layer's own parameters has several names."""
    return len({*map(id, params.values())}) < len(params)


def gradients_of(layer: Any, gy: Array | None, saved: Any, **options: Any) -> Gradients:
    """Return ``layer.gradients(gy, saved, **options)``."""
    # A layer that overrides `input_grad` or `weight_grad` and inherits a parent's own `gradients` gets the default
    # ones.
    if passes_by(layer, gy):
        at: Any = gy
        return PassingGradients(gradients_of(layer, at.x, saved, **options), at)
    if "gradients" in (getattr(layer, "valid_shortcuts", None) or shortcuts_of(layer)):
        found = layer.gradients(gy, saved, **options)
        return found
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise OptionError(
            f"{type(layer).__name__} overrides input_grad or weight_grad, which take no more than gy and saved",
            expected="gradients(gy, saved, …) overridden as well", got=f"gradients at {', '.join(given)}",
            remedy="Override gradients; see the how-to guide 'Write a layer'"
        )  # fmt: skip
    return Gradients(layer, gy, saved)


class Back:
    """The backward function of one forward: call it with the gradient at the output. Returned by `Layer.vjp`.

    Attributes
    ----------
    saved
        The forward's saved value, for example ``saved.h_n`` of a recurrent layer.
    """

    def __init__(self, layer: Any, saved: Any) -> None:
        self.layer, self.saved = layer, saved
        self._weights = _digests(layer.backward_arrays())
        self._parts, self._changes = _parts_of(layer), parts.changes

    def __call__(self, gy: Array, **options: Any) -> Gradients:
        """Return the `Gradients` of a gradient at the output: ``g.input`` and ``g.weights``.

        Parameters
        ----------
        gy
            Of the shape and dtype of the output. It is copied: the caller may use its memory again at once.
        **options
            Passed to the layer's `gradients`, for example ``grad_h_n=`` of recurrent layers; arrays are copied.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            It does not fit; with some layers not before a gradient is asked for.
        StaleError
            A parameter has changed since the forward: the gradients would mix old activations with new weights. Also
            raised when a gradient is asked for too late.
        """
        self._check()
        own = {name: _copied(value) for name, value in options.items()}
        found: Gradients = gradients_of(self.layer, _copied(gy), self.saved, **own)
        found.check = self._check
        return found

    def _check(self) -> None:
        if self._changes != parts.changes:
            now = _parts_of(self.layer)
            if len(now) != len(self._parts) or any(map(operator.is_not, now, self._parts)):
                raise StaleError("A layer has been replaced since the forward", expected="the layers that ran then",
                                 got="others", remedy="Ask for all gradients before, or run vjp again")  # fmt: skip
            self._changes = parts.changes
        if _digests(self.layer.backward_arrays()) != self._weights:
            raise StaleError(
                "The parameters have changed since the forward", expected="the weights that the forward ran with",
                got="others: an update, or load_state_dict, came in between",
                remedy="Ask for all gradients (g.input, g.weights) before the update, or run vjp again"
            )  # fmt: skip


def _parts_of(layer: Any) -> list[Any]:
    return [part for _, part in layer.modules()] if hasattr(layer, "modules") else []


@contextlib.contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Restore a model's running statistics and random generators afterwards."""
    buffers = [(layer, name, array.copy()) for _, layer in model.modules() for name, array in layer.buffers.items()]
    generators = [(generator, generator.bit_generator.state) for generator in model.generators().values()]
    try:
        yield
    finally:
        for layer, name, array in buffers:
            layer.buffers[name][...] = array
        for generator, state in generators:
            generator.bit_generator.state = state


def _copied(value: Any) -> Any:
    """Return a copy of an array; anything else unchanged, for a later check to refuse."""
    is_array = hasattr(value, "__array_interface__") or backend.has_device_memory(value)
    return value.copy() if is_array else value


def _digests(arrays: Sequence[Array]) -> list[tuple[Any, ...]]:
    """Return each array's shape, dtype and a checksum of all its bytes, to detect changes."""
    # Callers may write into a parameter without a word, so only its bytes tell.
    xp = backend.namespace(*arrays)
    if backend.is_host(xp):
        sums = [zlib.crc32(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data) for array in arrays]
    else:
        found = xp.empty(len(arrays), np.uint64)
        for place, array in enumerate(arrays):
            words = xp.ascontiguousarray(array).reshape(-1)
            words = words.view(np.uint32 if array.dtype.itemsize % 4 == 0 else np.uint8)
            factors = xp.arange(1, 2 * words.size + 1, 2, dtype=np.uint64)
            factors *= np.uint64(0x9E3779B97F4A7C15)  # odd and odd again: no change to one word goes unnoticed
            factors *= words
            factors.sum(out=found[place])
        sums = backend.to_host(found).tolist()  # synchronize!
    return [(array.shape, array.dtype, number) for array, number in zip(arrays, sums, strict=True)]
