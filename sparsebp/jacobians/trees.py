"""Functions of trees of arrays (dictionaries, lists and tuples of them) as functions of one vector that return one."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import shown
from sparsebp.core.errors import DTypeError, OptionError, ShapeError

LEAF = "array"


def flattened(tree: Any) -> tuple[list[Any], Any]:
    """Return the arrays of a tree, those of a dictionary by its sorted keys, and how they stand in it."""
    if tree is None:
        return [], None
    if not isinstance(tree, (dict, list, tuple)):
        return [tree], LEAF
    keys = sorted(tree) if isinstance(tree, dict) else range(len(tree))
    parts = [flattened(tree[key]) for key in keys]
    return [leaf for leaves, _ in parts for leaf in leaves], (type(tree), (*keys,), tuple(inner for _, inner in parts))


def unflattened(structure: Any, leaves: Iterator[Any]) -> Any:
    """Return a tree with other leaves."""
    if structure is None:
        return None
    if structure == LEAF:
        return next(leaves)
    kind, keys, inner = structure
    parts = [unflattened(one, leaves) for one in inner]
    if issubclass(kind, dict):
        return dict(zip(keys, parts, strict=True))
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape) if hasattr(leaf, "shape") else np.shape(leaf)


class Layout:
    """Where the elements of a tree's arrays stand in a vector: one array behind the other, each in C order."""

    def __init__(self, tree: Any) -> None:
        leaves, self.structure = flattened(tree)
        self.shapes = [_shape(leaf) for leaf in leaves]
        self.ends = [0, *itertools.accumulate(map(math.prod, self.shapes))]

    @property
    def plain(self) -> bool:
        """Whether the tree is a vector."""
        return self.structure == LEAF and len(self.shapes[0]) == 1

    def vector(self, name: str, tree: Any, batch: bool = False) -> Any:
        """Return a tree of these shapes as a vector; `batch`: its arrays have an axis more, the last."""
        leaves, structure = flattened(tree)
        shapes = [_shape(leaf) for leaf in leaves]
        own = [shape[: len(shape) - batch] for shape in shapes]
        if (
            structure != self.structure
            or own != self.shapes
            or len({shape[len(shape) - batch :] for shape in shapes}) > 1
        ):
            raise ShapeError(f"{name} has other arrays than before", expected=self.shapes, got=shapes)
        return joined(leaves, shapes[0][-1:] if batch else ())

    def tree(self, vector: Any) -> Any:
        """Return the tree of the parts of a vector."""
        if self.plain:
            return vector
        parts = (vector[a:b].reshape(shape) for shape, (a, b) in zip(
            self.shapes, itertools.pairwise(self.ends), strict=True))  # fmt: skip
        return unflattened(self.structure, parts)

    def blocks(self, matrix: Any, others: Layout) -> Any:
        """Return the tree of the rows of a matrix, each the tree of its columns."""
        return unflattened(self.structure, (
            unflattened(others.structure, (matrix[a:b, c:d] for c, d in itertools.pairwise(others.ends)))
            for a, b in itertools.pairwise(self.ends)))  # fmt: skip


def joined(leaves: list[Any], batch: tuple[int, ...] = ()) -> Any:
    """Return the elements of arrays as one vector; those of `batch`, as its columns."""
    if len(leaves) == 1 and np.ndim(leaves[0]) == 1 + len(batch):
        return leaves[0]
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")

    def columns(leaf: Any) -> Any:
        shape = _shape(leaf)
        if not hasattr(leaf, "reshape"):
            raise DTypeError(
                "The function does not return arrays", expected="arrays, or a tree of them", got=shown(leaf)
            )
        return leaf.reshape((math.prod(shape[: len(shape) - len(batch)]), *batch))

    if torch is not None and (tensors := [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]):
        like = {"dtype": tensors[0].dtype, "device": tensors[0].device}
        return torch.cat([columns(leaf if isinstance(leaf, torch.Tensor) else torch.as_tensor(leaf, **like))
                          for leaf in leaves])  # fmt: skip
    if jax is not None and any(isinstance(leaf, jax.Array) for leaf in leaves):
        return jax.numpy.concatenate([columns(jax.numpy.asarray(leaf)) for leaf in leaves])
    if any(map(backend.is_on_device, leaves)):
        return backend.namespace(*leaves).concatenate([columns(leaf) for leaf in leaves])
    if not leaves:
        return np.zeros((0, *batch))
    dtype = next((leaf.dtype for leaf in leaves if getattr(leaf, "dtype", np.dtype(int)).kind == "f"), None)
    return np.concatenate([columns(np.asarray(leaf, dtype) if isinstance(leaf, (int, float)) else leaf)
                           for leaf in leaves])  # fmt: skip


def replaced(args: Sequence[Any], places: Iterable[int], values: Iterable[Any]) -> tuple[Any, ...]:
    """Return arguments with these values in some places."""
    found = list(args)
    for place, value in zip(places, values, strict=True):
        found[place] = value
    return tuple(found)


class FlatFunction:
    """A function f of trees as one of a vector, which stands for f's arguments `places` in place of the first of them.

    Attributes
    ----------
    x, y
        Layouts of these arguments, and of what f returned last.
    argnum
        The place of the vector among the arguments.
    """

    def __init__(self, f: Callable[..., Any], places: tuple[int, ...], args: tuple[Any, ...], has_aux: bool,
                 scalar: bool) -> None:  # fmt: skip
        self.f, self.places, self.has_aux, self.scalar = f, places, has_aux, scalar
        self.argnum = places[0] - sum(place < places[0] for place in places)
        self.x, self.y = Layout(self._trees(args)), Layout(np.zeros(0))

    def __call__(self, *args: Any) -> Any:
        """Return what f returns as a vector; a scalar, or what is no array, as it is."""
        y = self.outcome(*args)
        if self.has_aux:
            y = _pair(y)[0]
        if self.scalar or y is None or (not isinstance(y, (dict, list, tuple)) and not getattr(y, "shape", ())):
            return y
        self.y = Layout(y)
        return y if self.y.plain else joined(flattened(y)[0])

    @property
    def rows(self) -> Layout:
        """The layout of the derivative's rows: of a scalar function, whose Hessian it is, that of x."""
        return self.x if self.scalar else self.y

    @property
    def plain(self) -> bool:
        """Whether x is one vector, and the arguments are f's."""
        return len(self.places) == 1 and self.x.plain

    def outcome(self, *args: Any) -> Any:
        """Return what f returns."""
        vector, rest = self.x.tree(args[self.argnum]), [*args]
        del rest[self.argnum]
        trees = [vector] if len(self.places) == 1 else vector
        for place, tree in sorted(zip(self.places, trees, strict=True), key=lambda pair: pair[0]):
            rest.insert(place, tree)
        return self.f(*rest)

    def flat(self, args: tuple[Any, ...], batch: bool = False) -> tuple[Any, ...]:
        """Return the arguments that stand for those of f; `batch`: x has an axis more, the last."""
        if self.plain:
            return args
        rest = [arg for place, arg in enumerate(args) if place not in self.places]
        rest.insert(self.argnum, self.x.vector("x", self._trees(args), batch))
        return tuple(rest)

    def _trees(self, args: tuple[Any, ...]) -> Any:
        return args[self.places[0]] if len(self.places) == 1 else tuple(args[place] for place in self.places)


def _pair(y: Any) -> Any:
    if not isinstance(y, tuple) or len(y) != 2:
        raise OptionError("The function does not return two things", expected="(output, other data), by has_aux=True",
                          got=shown(y))  # fmt: skip
    return y
