"""A chain of transposed Jacobians in pieces on several ranks: layers across workers, back-propagated in parallel.

Reduce-then-scan with a rank a chunk: every rank multiplies its Jacobians to one product without waiting for another;
then vectors go from rank to rank through those products; then every rank runs its own Jacobians with the vector that
came to it. Rank 0 holds the first piece in the order of back-propagation, the last layers, and knows the gradient.

The products of different ranks have different shapes and patterns, and what an exclusive scan over them yields are
vectors, since the gradient is its first element. So no product ever leaves its rank, and none is multiplied with
another rank's, which would fill in further: B numbers a row of the product are sent, once a rank. What the ranks wait
for one another is a product with a vector each.

`Transport.exscan`, by which `sparsebp.distributed.scans.time_parallel` combines its maps in log2(ranks) turns, is no
way to do that: it combines arrays of one size (as ``MPI_Exscan`` does, elements of one type), and all maps of a
recurrent layer are H × H. Here each would have to be padded to the largest, and become dense: for layers of n values,
n² numbers a turn in place of n · B, and n³ operations in place of the entries of a sparse product times B. That pays
where there are more ranks than n / B, and so does no chain of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sparsebp import backend
from sparsebp.core.arguments import check_choice, check_sequence
from sparsebp.core.errors import OptionError, PatternError, ShapeError
from sparsebp.core.types import Array
from sparsebp.distributed.agreement import check_same
from sparsebp.distributed.transport import Transport, check_transport
from sparsebp.patterns import SparsityPattern
from sparsebp.scan import plan_scan
from sparsebp.scan.planning.cost import sized_seconds
from sparsebp.scan.reduction import plan_reduction
from sparsebp.scan.running.arguments import check_arguments
from sparsebp.scan.running.run import Multiply

WAYS = ("auto", "products", "vectors")


class Piece(NamedTuple):
    """What a rank says of its Jacobians: columns of the first and rows of the last (None: it has none), and seconds.

    Seconds are of going through them with vectors, of their reduction, and of the product with a vector.
    """

    columns: int | None
    rows: int | None
    run: float = 0.0
    reduce: float = 0.0
    apply: float = 0.0


class ChainParallel:
    """A scan over a chain of transposed Jacobians whose pieces are on several ranks. All ranks make it together.

    Parameters
    ----------
    patterns
        The rank's own piece, in the order of back-propagation; it may be empty. Rank 0's piece comes first.
    transport
        Carries vectors between the ranks.
    way
        ``"products"``: every rank reduces its piece before the vector comes. ``"vectors"``: the ranks take turns, as
        back-propagation layer by layer does. ``"auto"``: by their estimated times.
    memory_limit
        Bytes that the rank's own part may need beyond its arguments, as in `plan_scan`.
    batch, dtype, shared, xp
        What the choice is based on, as in `plan_scan`; calls may differ.

    Attributes
    ----------
    way : str
        The one that runs; ``"auto"`` is resolved, and the same on all ranks.
    estimates : dict of str to float
        Seconds that were compared, without what is sent.

    Raises
    ------
    ShapeError, PatternError
        Pieces do not chain, or there is no Jacobian on any rank.
    OptionError, MemoryLimitError
        As `plan_scan`; the ranks disagree on `way`.
    TransportError
        A rank has failed.
    """

    def __init__(
        self, patterns: Sequence[SparsityPattern], transport: Transport, way: str = "auto", *,
        memory_limit: int | None = None, batch: int = 1, dtype: Any = np.float32, shared: Sequence[bool] | None = None,
        xp: ModuleType = np,
    ) -> None:  # fmt: skip
        self.transport = check_transport(transport)
        self._last = transport.size - 1
        check_choice("way", way, WAYS)
        patterns = check_sequence("patterns", patterns, "SparsityPattern")
        options: dict[str, Any] = {"batch": batch, "dtype": dtype, "shared": shared, "xp": xp}
        self._plan = plan_scan(patterns, "linear", memory_limit=memory_limit, **options) if patterns else None
        self._reduction = None
        if self._plan is not None and 0 < transport.rank < self._last and way != "vectors":
            self._reduction = plan_reduction(patterns, memory_limit, **options)
        pieces = check_same(transport, {"way": way}, self._piece())
        self._columns, self._rows = _chained(pieces)[transport.rank]
        self.estimates = way_seconds(pieces)
        self.way = min(self.estimates, key=lambda name: self.estimates[name]) if way == "auto" else way

    def _piece(self) -> Piece:
        """Return what the other ranks have to know of this one."""
        plan, reduction = self._plan, self._reduction
        if plan is None:
            return Piece(None, None)
        chain, m = plan.chain, plan.chain.machine
        ends = plan.patterns[0].shape[1], plan.patterns[-1].shape[0]
        run = sized_seconds(plan.sized, m, chain.sizes.itemsize)
        if reduction is None:
            return Piece(*ends, run)
        apply = m.call + m.products(
            reduction.pattern.nnz * chain.sizes.batch, "matvec", chain.sizes.batch, chain.sizes.itemsize
        )
        return Piece(*ends, run, reduction.seconds, apply)

    def __call__(
        self, g: Array | None, data: Sequence[Array], injections: Sequence[Array | None] | None = None
    ) -> list[Array]:
        """Run the scan over all pieces, a collective call: ``y[i] = J_i @ y[i-1] (+ injections[i])``.

        Parameters
        ----------
        g
            On rank 0 the gradient (n_out, B), or (n_out,) without a batch; None on all others.
        data, injections
            Of the rank's own Jacobians, as `ScanPlan` takes them in lists.

        Returns
        -------
        list of Array
            y of the rank's own Jacobians, (rows, B); without a batch (rows,).

        Raises
        ------
        ShapeError, DTypeError, LayoutError, DeviceError
            An argument does not fit.
        OptionError
            `g` is missing on rank 0, or given on another.
        """
        transport, rank = self.transport, self.transport.rank
        if (g is None) == (rank == 0):
            raise OptionError("The gradient belongs to rank 0", expected="g on rank 0, None on the others",
                              got=f"{'None' if g is None else 'g'} on rank {rank}", remedy="Pass it there")  # fmt: skip
        batch, dtype, device = transport.broadcast(None if g is None else _kind(g, self._columns))
        width, xp = (batch[0] if batch else 1), backend.device_namespace(device)
        incoming = xp.empty((self._columns, width), dtype=dtype) if g is None else g.reshape(-1, width)
        own, added = self._checked(incoming, data, injections, bool(batch))
        received = transport.irecv(incoming, rank - 1, 0) if rank else None
        reduction = self._reduction if self.way == "products" else None
        reduced = None if reduction is None else reduction(own, added, incoming)
        if received is not None:
            received.wait()
        sent = None
        if reduction is not None and reduced is not None:
            matrix, vector = reduced
            sent = transport.isend(Multiply(incoming)(reduction.pattern, matrix, incoming, vector), rank + 1, 0)
        y = [] if self._plan is None else list(self._plan(incoming, own, added))
        if sent is None and rank != self._last:
            sent = transport.isend(y[-1] if y else incoming, rank + 1, 0)
        if sent is not None:
            sent.wait()
        return y if batch else [found.reshape(-1) for found in y]

    def _checked(
        self, incoming: Array, data: Sequence[Array], injections: Sequence[Array | None] | None, batched: bool
    ) -> tuple[list[Array], list[Array | None] | None]:
        """Return data and injections (rows, B) in lists, after checking them before anything is sent."""
        own = check_sequence("data", data, "arrays")
        added = None if injections is None else check_sequence("injections", injections, "arrays or None")
        if self._plan is None:
            for name, values in (("data", own), ("injections", added or [])):
                if values:
                    raise ShapeError(f"{name} has the wrong length", expected=0, got=len(values),
                                     remedy="Pass what belongs to the rank's own Jacobians")  # fmt: skip
            return own, added
        check_arguments(self._plan, incoming if batched else incoming.reshape(-1), own, added)
        if not batched and added is not None:
            added = [None if vector is None else vector.reshape(-1, 1) for vector in added]
        return own, added


def _kind(g: Array, rows: int) -> tuple[tuple[int, ...], str, str]:
    """Return the batch axes, the dtype and the device of a gradient of so many rows."""
    device = backend.device_of(g)
    backend.float_dtype(g.dtype)
    backend.check_array("g", g, shape=(rows, *g.shape[1:2]))
    return g.shape[1:], g.dtype.str, device


def _chained(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Return what comes into and what leaves every rank, an empty one too; refuse pieces that do not chain."""
    first = next((piece.columns for piece in pieces if piece.columns is not None), None)
    if first is None:
        raise PatternError("A scan needs at least one Jacobian", expected="patterns on some rank", got="none",
                           remedy="Pass each rank its piece of the chain")  # fmt: skip
    size, sizes = first, []
    for rank, piece in enumerate(pieces):
        if piece.columns is not None and piece.columns != size:
            raise ShapeError(
                f"The piece of rank {rank} does not chain with the one before", expected=f"{size} columns",
                got=f"{piece.columns} columns",
                remedy="Rank 0 has the last layers: the pieces are in the order of back-propagation",
            )  # fmt: skip
        before, size = size, size if piece.rows is None else piece.rows
        sizes.append((before, size))
    return sizes


def way_seconds(pieces: Sequence[Piece]) -> dict[str, float]:
    """Return about how long either way takes, without what is sent.

    With products the ranks between the first and the last reduce while the first runs; then their products are applied
    one after the other, and the slowest rank runs its Jacobians.
    """
    reduce = max((piece.reduce for piece in pieces[1:-1]), default=0.0)
    apply = sum(piece.apply for piece in pieces[1:-1])
    rest = max((piece.run for piece in pieces[1:]), default=0.0)
    return {
        "vectors": sum(piece.run for piece in pieces),
        "products": max(pieces[0].run, reduce) + apply + rest,
    }
