"""Parameters that a process does not hold: shape and dtype without memory, and how to make their initial values."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from sparsebp.core.check import Array
from sparsebp.core.errors import OptionError


class Absent(np.ndarray):
    """Stands for a parameter, or a part of an optimizer's state, that this process does not hold.

    Shape and dtype are right; it takes no memory, cannot be written to, and holds NaN.
    """

    # key: Its name in the layer that `recipe` builds anew. crc: A checksum of its initial values.
    recipe: Recipe | None = None  # None: of no use any more, or none of a layer
    key: str = ""
    crc: int = 0
    writes: tuple[tuple[np.random.Generator | None, Callable[[Any], Any]], ...] = ()  # after it was built

    @classmethod
    def like(cls, array: Array) -> Absent:
        """Return a stand-in for an array."""
        return np.broadcast_to(np.array(np.nan, array.dtype), array.shape).view(cls)

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        refuse("written to")

    def copy(self, order: Any = "C") -> Absent:
        """Return another stand-in, for an array of the same initial values."""
        other = Absent.like(self)
        other.__dict__.update(self.__dict__)
        return other

    def __deepcopy__(self, memo: Any) -> Absent:
        return self.copy()


def initial_values(stand_ins: Iterable[Absent]) -> Iterator[tuple[Absent, np.ndarray]]:
    """Yield stand-ins and their initial values, in new arrays: a layer is built once for all of its parameters."""
    by_layer: dict[int, list[Absent]] = {}
    for one in stand_ins:
        by_layer.setdefault(id(one.recipe), []).append(one)
    for some in by_layer.values():
        recipe = some[0].recipe
        params = {} if recipe is None else dict(recipe.make().params)
        uses = Counter(one.key for one in some)  # of copies
        for one in some:
            values = params.get(one.key)
            if values is not None:
                values = values.copy() if uses[one.key] > 1 else values
                for generator, draw in one.writes:
                    values[...] = draw(copy.deepcopy(generator))
            if values is None or values.shape != one.shape or crc_of(values) != one.crc:
                raise OptionError(
                    "The initial values of a parameter cannot be made again", expected="a layer whose initial values "
                    "follow from its arguments, before its first update", got=f"others for {one.key or 'a buffer'}",
                    remedy="Pass rng=, a seed or a generator; after training, gather the model"
                )  # fmt: skip
            yield one, values


def write(array: Array, draw: Callable[[Any], Any], generator: np.random.Generator | None = None) -> None:
    """Write ``draw(generator)`` into a parameter: into one that is absent when it is made, with the same draws."""
    if not isinstance(array, Absent):
        array[...] = draw(generator)
        return
    array.writes = (*array.writes, (copy.deepcopy(generator), draw))
    values = np.empty(array.shape, array.dtype)
    values[...] = draw(generator)
    array.crc = crc_of(values)


def crc_of(array: np.ndarray) -> int:
    """Return a checksum of an array's values."""
    if isinstance(array, Absent):
        return array.crc
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def is_absent(array: Any) -> bool:
    """Whether an array stands for one that this process does not hold."""
    return isinstance(array, Absent)


def held(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays that this process holds."""
    return {name: array for name, array in arrays.items() if not isinstance(array, Absent)}


def refuse(done: str) -> NoReturn:
    """Raise the error for a parameter without memory."""
    raise OptionError(f"A parameter is {done} that this process does not hold", expected="a model with all parameters",
                      got="one built by deferred_init, or a pipeline's, with its own stages alone",
                      remedy="Call materialize(model) before training; on ranks, gather_model() of the trainer, or its "
                      "evaluate and predict")  # fmt: skip


# Layers are built as usual, drawing from their generators as usual; then their parameters are dropped. Whoever needs
# them builds the layer again, from the same arguments and with generators in the states of that time.


class Recipe:
    """The arguments of a layer, with copies of its generators before it was built."""

    def __init__(self, kind: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        self.kind = kind
        self.args, self.options = tuple(map(_as_it_was, args)), {k: _as_it_was(v) for k, v in options.items()}

    def make(self) -> Any:
        """Build the layer again."""
        args, options = tuple(map(_as_it_was, self.args)), {k: _as_it_was(v) for k, v in self.options.items()}
        with _deferring(False):
            return self.kind(*args, **options)

    def drop(self, layer: Any) -> None:
        """Drop the parameters of the layer that was built: its own, not those of layers inside."""
        for name, array in layer.params.items():
            if not isinstance(array, Absent):
                stand_in = Absent.like(array)
                stand_in.recipe, stand_in.key, stand_in.crc = self, name, crc_of(array)
                layer.params.replace(name, stand_in)


def _as_it_was(value: Any) -> Any:
    return copy.deepcopy(value) if isinstance(value, np.random.Generator) else value


class _Within(threading.local):
    deferred = False


_within = _Within()


@contextlib.contextmanager
def _deferring(deferred: bool) -> Iterator[None]:
    before, _within.deferred = _within.deferred, deferred
    try:
        yield
    finally:
        _within.deferred = before


def recipe_of(kind: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Recipe | None:
    """Return the recipe of a layer that is about to be built within `deferred_init`, None elsewhere."""
    return Recipe(kind, args, options) if _within.deferred else None


@contextlib.contextmanager
def deferred_init() -> Iterator[None]:
    """Build layers whose parameters take no memory until they are needed.

    A pipeline's rank then holds the parameters, gradients and optimizer state of its own stages alone: `Trainer` and
    `PipelineExecutor` make them when the schedule is known, with the values that they would have had at once. A layer
    is built as usual, one after the other, and its parameters are dropped; each must take its random numbers from its
    arguments: ``rng=`` a seed, or a generator, also one that layers share. `nn.init.he_convolutions` and `lecun_linear`
    may follow; whatever else writes into a parameter needs it, see `materialize`.

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> with sb.nn.deferred_init():
    ...     model = sb.nn.Sequential(sb.nn.Linear(3, 4, rng=0), sb.nn.ReLU(), sb.nn.Linear(4, 2, rng=1))
    >>> sb.nn.materialize(model)
    >>> bool((model[0].weight == sb.nn.Linear(3, 4, rng=0).weight).all())
    True
    """
    with _deferring(True):
        yield


def guard(layer: Any) -> None:
    """Let a layer refuse its forward as long as it lacks a parameter."""
    # Not by assignments, which would be a forward of the layer's own. No shortcut may run it in another way either.
    own = layer.__dict__
    if isinstance(own.get("forward"), _Guard):
        del own["forward"], own["valid_shortcuts"]
    if "forward" not in own and any(isinstance(array, Absent) for array in layer.params.values()):
        own["forward"], own["valid_shortcuts"] = _Guard(layer), _NoShortcuts(layer)


class _NoShortcuts:
    """The shortcuts of such a layer: none."""

    def __init__(self, layer: Any) -> None:
        pass

    def __contains__(self, shortcut: str) -> bool:
        return False


class _Guard:
    """Takes the place of the forward of a layer that lacks a parameter."""

    def __init__(self, layer: Any) -> None:
        functools.update_wrapper(self, type(layer).forward.__get__(layer))
        self.__func__ = type(layer).forward  # as a bound method has it, for whoever asks what it takes

    def __call__(self, *args: Any, **options: Any) -> NoReturn:
        refuse("needed in a forward")
