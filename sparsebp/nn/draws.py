"""Random numbers of layers: on a replica, which sees a share of the samples, the rows of what one worker draws."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.errors import ShapeError

__all__ = ["Rows", "draw_rows", "rows_of"]


class Rows(NamedTuple):
    """Which samples of a batch a forward sees: `own` of them from number `begin` on, of `total`."""

    begin: int
    own: int
    total: int


class _Within(threading.local):
    rows: Callable[[], Rows] | None = None
    drawn: set[int] = set()  # noqa: RUF012 (replaced, never changed)


_within = _Within()


@contextlib.contextmanager
def rows_of(rows: Callable[[], Rows]) -> Iterator[set[int]]:
    """Let forwards of this thread draw the rows of a larger batch; yields the identities of generators that did."""
    # `rows` is called when a layer draws: a model that draws nothing need not know.
    before = _within.rows, _within.drawn
    _within.rows, _within.drawn = rows, set()
    try:
        yield _within.drawn
    finally:
        _within.rows, _within.drawn = before


def draw_rows(
    generator: np.random.Generator,
    shape: tuple[int, ...],
    make: Callable[[np.random.Generator, tuple[int, ...]], Array],
    axis: int | None = 0,
) -> Array:
    """Return ``make(generator, shape)``; on one of several replicas, its samples' rows of what one worker would draw.

    A replica draws for the batches of all replicas, so that all generators go on alike, and keeps its own rows. A layer
    of one's own that draws by itself would draw the same for the samples of every replica.

    Parameters
    ----------
    generator
        The layer's ``generator``.
    shape
        Of what is drawn for the samples at hand.
    make
        Draws an array of a shape.
    axis
        The axis of `shape` with the samples, or with as many entries for each of them. None: what is drawn is the same
        for any batch, as for a mask of weights.

    Raises
    ------
    ShapeError
        On a replica: the axis has no equal number of entries for each sample.

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> rng = np.random.default_rng(0)
    >>> sb.nn.draw_rows(rng, (2, 3), np.random.Generator.standard_normal).shape
    (2, 3)
    """
    if _within.rows is None:
        return make(generator, shape)
    _within.drawn.add(id(generator))
    if axis is None:
        return make(generator, shape)
    begin, own, total = _within.rows()
    each, rest = divmod(shape[axis], own)
    if rest:
        raise ShapeError(
            "Random numbers have no rows for each sample", expected=f"a multiple of {own} samples on axis {axis}",
            got=shape, remedy="Say on which axis the samples are; None, if what is drawn is the same for any batch"
        )  # fmt: skip
    whole = make(generator, (*shape[:axis], total * each, *shape[axis + 1 :]))
    at: tuple[Any, ...] = (slice(None),) * axis + (slice(begin * each, (begin + own) * each),)
    return backend.namespace(whole).ascontiguousarray(whole[at])
