"""Time-parallel back-propagation: a long sequence is split over time, and every rank holds a shard of its steps.

Forward is sequential in time: a rank begins a layer with the last state of the shard before it. Backward, the gradient
at a shard's beginning is an affine function of the gradient at its end. So every rank reduces its shard to one map
without waiting, an exclusive scan combines the ranks' maps, and every rank then knows the gradient at its end and runs
its steps with vectors: reduce-then-scan (BPPSA §3) with a rank a chunk.

The scan runs in the order of back-propagation, and ranks are numbered in that order: **rank 0 keeps the end of the
sequence**. Its gradient is known, so its map is a constant, and the others receive vectors from the scan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from sparsebp import kernels
from sparsebp.comm.transport import Handle, Transport, check_transport
from sparsebp.core import backend
from sparsebp.core.check import Array, check_choice, check_integer, check_sequence
from sparsebp.core.errors import OptionError, PatternError, ShapeError
from sparsebp.core.machine import machine
from sparsebp.nn.gradients import Back, NamedGradients, Shared
from sparsebp.nn.layer import check_gy, check_input
from sparsebp.nn.recurrent import runs
from sparsebp.nn.recurrent.gated import GatedMath
from sparsebp.nn.recurrent.layers import Recurrent
from sparsebp.nn.recurrent.runs import choose
from sparsebp.nn.recurrent.saved import RunGradients, SavedRun, State, Weights, joined, pair, split
from sparsebp.patterns import SparsityPattern
from sparsebp.runtime.agreement import check_same, checksums
from sparsebp.scan import algorithms, plan_scan
from sparsebp.scan.plan import plan_reduction
from sparsebp.scan.rules import phases
from sparsebp.scan.run import Multiply, check_arguments

# A chain of transposed Jacobians over several ranks: layers across workers, back-propagated in parallel.
#
# Reduce-then-scan with a rank a chunk: every rank multiplies its Jacobians to one product without waiting for another;
# then vectors go from rank to rank through those products; then every rank runs its own Jacobians with its vector. Rank
# 0 holds the first shard in the order of back-propagation, the last layers, and knows the gradient.
#
# No product leaves its rank, and none is multiplied with another rank's, which would fill in further: a rank sends B
# numbers per row of the product, once, and ranks wait only for products with a vector. `Transport.exscan` would combine
# the maps in log2(ranks) turns, but needs arrays of one size (as ``MPI_Exscan``): each product, of its own shape and
# pattern, would be padded to the largest and dense. For layers of n values that is n² numbers per turn, not n · B,
# and n³ operations in place of the entries of a sparse product times B. It pays with more ranks than n / B: never here.

CHAIN_WAYS = ("auto", "products", "vectors")


class Piece(NamedTuple):
    """A rank's Jacobians: columns of the first and rows of the last (None: it has none), and FLOPs."""

    # FLOPs of running them with vectors, of their reduction, and of the product with a vector.

    columns: int | None
    rows: int | None
    run: float = 0.0
    reduce: float = 0.0
    apply: float = 0.0


class ChainParallel:
    """A scan over a chain of transposed Jacobians that several ranks hold. All ranks make it together.

    Parameters
    ----------
    patterns
        The rank's own Jacobians, in the order of back-propagation; may be empty. Rank 0's come first.
    transport
        Carries vectors between the ranks.
    way
        ``"products"``: every rank reduces its Jacobians before the vector comes. ``"vectors"``: the ranks take turns,
        as back-propagation layer by layer does. ``"auto"``: the way with fewer sequential FLOPs.
    memory_limit
        Bytes that the rank's own part may need in addition to its arguments, as in `plan_scan`.
    batch, dtype, shared, xp
        For the choice of the way, as in `plan_scan`; calls may differ.

    Attributes
    ----------
    way : str
        The one that runs; ``"auto"`` is resolved, and the same on all ranks.
    compared : dict of str to float
        Sequential FLOPs of either way, by which ``"auto"`` chooses.

    Raises
    ------
    ShapeError, PatternError
        The Jacobians do not chain, or there is none on any rank.
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
        check_choice("way", way, CHAIN_WAYS)
        patterns = check_sequence("patterns", patterns, "SparsityPattern")
        options: dict[str, Any] = {"batch": batch, "dtype": dtype, "shared": shared, "xp": xp}
        self._plan = plan_scan(patterns, "linear", memory_limit=memory_limit, **options) if patterns else None
        self._reduction = None
        if self._plan is not None and 0 < transport.rank < self._last and way != "vectors":
            self._reduction = plan_reduction(patterns, memory_limit, **options)
        pieces = check_same(transport, {"way": way}, self._piece())
        self._columns, self._rows = _chained(pieces)[transport.rank]
        self.compared = chain_way_flops(pieces)
        self.way = min(self.compared, key=lambda name: self.compared[name]) if way == "auto" else way

    def _piece(self) -> Piece:
        """Return this rank's entry for the other ranks."""
        plan, reduction = self._plan, self._reduction
        if plan is None:
            return Piece(None, None)
        ends = plan.patterns[0].shape[1], plan.patterns[-1].shape[0]
        if reduction is None:
            return Piece(*ends, plan.flops)
        return Piece(*ends, plan.flops, reduction.flops, 2 * reduction.pattern.nnz * plan.batch)

    def __call__(
        self, g: Array | None, data: Sequence[Array], injections: Sequence[Array | None] | None = None
    ) -> list[Array]:
        """Run the scan over all ranks, a collective call: ``y[i] = J_i @ y[i-1] (+ injections[i])``.

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
                              got=f"{'None' if g is None else 'g'} on rank {rank}")  # fmt: skip
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
    """Return the batch axes, the dtype and the device of a gradient."""
    device = backend.device_of(g)
    backend.float_dtype(g.dtype)
    backend.check_array("g", g, shape=(rows, *g.shape[1:2]))
    return g.shape[1:], g.dtype.str, device


def _chained(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Return the sizes of the vectors into and out of every rank; refuse Jacobians that do not chain."""
    first = next((piece.columns for piece in pieces if piece.columns is not None), None)
    if first is None:
        raise PatternError("A scan needs at least one Jacobian", expected="patterns on some rank", got="none")
    size, sizes = first, []
    for rank, piece in enumerate(pieces):
        if piece.columns is not None and piece.columns != size:
            raise ShapeError(f"The Jacobians of rank {rank} do not chain with the ones before",
                             expected=f"{size} columns", got=f"{piece.columns} columns",
                             remedy="Rank 0 has the last layers: ranks are in the order of back-propagation"
                             )  # fmt: skip
        before, size = size, size if piece.rows is None else piece.rows
        sizes.append((before, size))
    return sizes


def chain_way_flops(pieces: Sequence[Piece]) -> dict[str, float]:
    """Return the sequential FLOPs of either way."""
    # With products the ranks between the first and the last reduce while the first runs; then their products are
    # applied one after the other, and the slowest rank runs its Jacobians.
    reduce = max((piece.reduce for piece in pieces[1:-1]), default=0.0)
    apply = sum(piece.apply for piece in pieces[1:-1])
    rest = max((piece.run for piece in pieces[1:]), default=0.0)
    return {"vectors": sum(piece.run for piece in pieces), "products": max(pieces[0].run, reduce) + apply + rest}


# A rank's time shard of a sequence.


Way: TypeAlias = Literal["auto", "maps", "vectors"]
STRETCH_WAYS: tuple[Way, ...] = ("auto", "maps", "vectors")


@dataclass
class ShardSaved:
    """The saved state of `TimeParallel.forward`."""

    # The states (num_layers, B, n) at the end of the rank's shard: on rank 0 the sequence's last. n is H; of an LSTM
    # 2H, h before c.
    last: Array
    way: Way  # `"maps"` or `"vectors"`: how gradients get from rank to rank
    reason: str
    inner: Any  # the `scan.Choice` of how the rank goes back through its own steps
    chunks: int  # into which it cuts them for the reduction
    runs: list[SavedRun]  # one run per layer, without steps if the shard is empty

    @property
    def h_n(self) -> Array:
        """The h (num_layers, B, H) at the end of the rank's shard."""
        return self.last[..., : self.runs[0].h.shape[2]]

    @property
    def c_n(self) -> Array:
        """An LSTM's c there."""
        return self.last[..., self.runs[0].h.shape[2] :]


class Stretch(NamedTuple):
    """A rank's steps, and its reduction in units of a step."""

    run: float
    reduce: float


def stretch_way_steps(stretches: list[Stretch], layers: int = 1) -> dict[Way, float]:
    """Return the sequential steps of either way."""
    # By vectors a rank continues with the next layer while the others have this one: the ranks' turns and one more for
    # each further layer. By maps a layer is finished when the slowest rank has its map, or rank 0 its vector, and the
    # slowest has gone back through its steps.
    run = max(one.run for one in stretches)
    reduce = max((one.reduce for one in stretches[1:-1]), default=0.0)
    return {
        "vectors": sum(one.run for one in stretches) + (layers - 1) * run,
        "maps": layers * (max(stretches[0].run, reduce) + max((one.run for one in stretches[1:]), default=0.0)),
    }


def stretch(steps: int, transport: Transport) -> slice:
    """Return this rank's part of the steps: equal but for one step, the last ones on rank 0; it may be empty."""
    steps, place = check_integer("steps", steps, 0), transport.size - 1 - transport.rank
    return slice(place * steps // transport.size, (place + 1) * steps // transport.size)


class TimeParallel:
    """Runs a recurrent layer over a sequence whose steps are on several ranks; each rank has all weights.

    Parameters
    ----------
    layer
        An `RNN`, `GRU`, `LSTM`, `MinGRU` or `MinLSTM` of one direction and without proj_size, with the same weights on
        all ranks; how a rank goes back through its own steps is the layer's choice (``backward=``).
    transport
        Carries states and gradients between the ranks. Rank 0 keeps the end of the sequence, see `stretch`.
    way
        ``"maps"``: every rank reduces its shard to one affine map, and an exclusive scan combines them.
        ``"vectors"``: the gradient goes from rank to rank, each of which waits for the one before. ``"auto"``: the way
        with fewer sequential steps.

    Raises
    ------
    OptionError
        `layer` is another, has two directions, or a projection; `way` is unknown; the ranks' layers differ.

    Notes
    -----
    Every rank must make the same calls in the same order, and either all ranks or none read ``weights``: reading the
    first gradient, and reading the weight gradients, are collective calls. Gradients equal one worker's for the whole
    sequence, to rounding.

    A map of states of n values (H, or an LSTM's 2H) has B·n·(n + 1) values; each rank sends one per layer, however long
    the sequence is, in addition to states and weight gradients. Reducing a shard takes n + 1 times the operations of
    going back through it, but less than n + 1 times as long, since they wait less for each other. With two ranks maps
    gain nothing (the first and last rank need none); with more, they pay off if there are enough ranks to make up for
    the extra work. ``"vectors"`` does no work twice, but the ranks take turns: it holds longer sequences without being
    faster, except that gradients of weights, and of other layers, are computed meanwhile.

    A `MinGRU` or a `MinLSTM` forgets the state before its shard. So a rank runs its shard at once, from a state of
    zero, and likewise back, and again from the state, or gradient, that arrives, as far as the two runs differ: a few
    hundred steps, unless a gate stays shut. The ranks then work at the same time, and send one vector a layer each way;
    ``"auto"`` means ``"vectors"``.
    """

    def __init__(self, layer: Recurrent, transport: Transport, way: Way = "auto") -> None:
        if not isinstance(layer, Recurrent):
            raise OptionError("Only recurrent layers run over time", expected="an RNN, GRU, LSTM, MinGRU or MinLSTM",
                              got=type(layer).__name__)  # fmt: skip
        if any(name not in layer.valid_shortcuts for name in ("forward_time_major", "gradients_at_last")):
            raise OptionError("The layer overrides methods, which would not be called",
                              expected="forward and gradients of an RNN, a GRU or an LSTM",
                              got=type(layer).__name__, remedy="Pass a layer that overrides none of them")  # fmt: skip
        if layer.bidirectional:
            raise OptionError("The second direction begins where the first one ends", expected="bidirectional=False",
                              got="bidirectional=True", remedy="Use a layer of one direction")  # fmt: skip
        if layer.output_size != layer.hidden_size:
            raise OptionError("States that are projections are not handed on", expected="proj_size=0",
                              got=layer.output_size, remedy="Use an LSTM without proj_size")  # fmt: skip
        self.layer, self.transport, self.way = layer, check_transport(transport), check_choice("way", way, STRETCH_WAYS)
        self._last = transport.size - 1
        kind = {"cell": layer.cell.name, "nonlinearity": getattr(layer, "nonlinearity", None), "way": way}
        check_same(transport, kind | checksums(layer.params))

    # ---- forward -------------------------------------------------------------------------------------------------

    def vjp(self, x: Array, h0: Any = None) -> tuple[Array, Back]:
        """Run forward; return the output of the rank's steps and the way back, as `Layer.vjp`.

        ``g = back(gy)``, or ``back(gy, grad_h_n=…)`` on rank 0; then ``g.input`` (the rank's steps), ``g.weights`` (of
        the whole sequence, on all ranks) and ``g.h0``. `x` is copied; `forward` documents the arguments.
        """
        backend.namespace(x)
        y, saved = self.forward(x.copy(), h0)
        return y.copy(), Back(self, saved)

    def forward(self, x: Array, h0: Any = None, lengths: None = None) -> tuple[Array, ShardSaved]:
        """Run all layers over the rank's steps.

        Parameters
        ----------
        x
            The rank's steps (T, B, input_size), or (B, T, input_size) with ``batch_first``. T may be 0, and differ
            between ranks; B may not.
        h0
            The states before the whole sequence (num_layers, B, H), of an LSTM a pair, on the last rank, where None is
            zeros. None on all others.
        lengths
            Not supported: None.

        Returns
        -------
        y
            The last layer's states (T, B, H), batch first if asked for. It may be a view of saved arrays.
        saved
            For `gradients`.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            An argument does not fit; the batch, or on all ranks the shard, is empty.
        OptionError
            Lengths are given, or h0 on another rank than the last; dropout between layers is on; the batch, dtype or
            device differs between ranks.
        TransportError
            A rank has failed.
        """
        layer, weight = self.layer, self.layer.params["weight_ih_l0"]
        if lengths is not None:
            raise OptionError("Lengths are not supported here", expected="sequences of one length", got="lengths",
                              remedy="Group sequences by length, or mask the gradients that arrive")  # fmt: skip
        if layer.training and layer.dropout > 0 and layer.num_layers > 1:
            raise OptionError("Dropout between layers draws on each rank by itself", expected="dropout=0",
                              got=layer.dropout, remedy="Turn it off, or call layer.eval()")  # fmt: skip
        xp = check_input(x, dtype=weight.dtype, shape=(None, None, layer.input_size), like=weight)
        inputs = self._swap_batch_time(x)
        steps, batch, _ = inputs.shape
        if batch == 0:
            raise ShapeError("x is empty", expected="at least one sample", got=x.shape, remedy="Skip empty batches")
        states, k = self._initial(h0, batch, xp), kernels.get(xp).unchecked
        saved = self._plan(steps, batch, xp)
        received = [
            None if self.transport.rank == self._last
            else self.transport.irecv(states[number], self.transport.rank + 1, number)
            for number in range(layer.num_layers)
        ]  # fmt: skip
        sent: list[Handle] = []
        for number, handle in enumerate(received):
            finish = self._begin(k, inputs, self._weights(number))  # the projection, which waits for no state
            if handle is not None and isinstance(layer.cell, GatedMath) and steps:
                run = finish(xp.zeros_like(states[number]))  # while the rank waits for the state
                handle.wait()
                layer.cell.resume(k, run, states[number])
            else:
                if handle is not None:
                    handle.wait()
                run = finish(states[number])
            saved.runs.append(run)
            saved.last[number] = joined(run.last)
            if self.transport.rank:
                sent.append(self.transport.isend(saved.last[number], self.transport.rank - 1, number))
            inputs = run.h
        for handle in sent:
            handle.wait()
        return self._swap_batch_time(inputs), saved

    def _initial(self, h0: Any, batch: int, xp: ModuleType) -> Array:
        """Return the states before the rank's shard, which only the last rank knows."""
        weight, names = self.layer.params["weight_ih_l0"], self.layer.cell.states
        if h0 is None:
            return xp.zeros((self.layer.num_layers, batch, self._size), dtype=weight.dtype)
        if self.transport.rank != self._last:
            raise OptionError("The sequence begins on the last rank", expected=f"h0 on rank {self._last} alone",
                              got=f"h0 on rank {self.transport.rank}")  # fmt: skip
        given = (h0,) if len(names) == 1 else pair("h0", h0) or ()
        for name, array, shape in zip(names, given, self.layer.state_shapes(batch), strict=True):
            check_input(array, name=f"{name}0", dtype=weight.dtype, shape=shape, like=weight)
        return joined(given).copy()

    @property
    def _size(self) -> int:
        """Values of a state."""
        return len(self.layer.cell.states) * self.layer.hidden_size

    def _begin(self, k: Any, x: Array, weights: Weights) -> Callable[[Array], SavedRun]:
        cell, parts = self.layer.cell, len(self.layer.cell.states)
        begun = runs.begin(k, cell, x, weights)
        return lambda state: runs.forward(k, cell, x, weights, split(state, parts), begun=begun)

    def _plan(self, steps: int, batch: int, xp: ModuleType) -> ShardSaved:
        """Agree with the other ranks on the way, and choose how to go back through the rank's own steps."""
        layer, dtype = self.layer, self.layer.params["weight_ih_l0"].dtype
        shape, workers = (max(steps, 1), batch, layer.hidden_size), layer.options.workers
        on = machine(xp, workers)
        count = on.workers
        # Workers that outnumber the samples reduce chunks of the steps at the same time.
        step = 0.0  # where the way is known
        if not layer.cell.diagonal:
            step = max(phases(layer.cell.name, batch, layer.hidden_size, dtype.itemsize, on)[:2])
        own = Stretch(steps, steps * step / max(1.0, count / batch))
        chunks = 1 if count == 1 else max(1, min(steps, -(-4 * count // batch)))  # some per worker: none waits long
        facts = {"batch": batch, "dtype": str(dtype), "device": "cpu" if backend.is_host(xp) else "cuda"}
        found = check_same(self.transport, facts, own)
        if not any(one.run for one in found):
            raise ShapeError("The sequence is empty", expected="at least one step", got="none on any rank",
                             remedy="Skip empty sequences")  # fmt: skip
        way, reason = self._choose(found)
        inner = choose(layer.options, layer.cell, shape, dtype, xp, input_size=layer.input_size,
                       layers=layer.num_layers, directions=1)  # fmt: skip
        return ShardSaved(xp.empty((layer.num_layers, batch, self._size), dtype=dtype), way, reason, inner, chunks, [])

    def _choose(self, stretches: list[Stretch]) -> tuple[Way, str]:
        if self.way != "auto":
            return self.way, f"way={self.way!r} was asked for"
        if self.layer.cell.diagonal:
            return "vectors", "a memory that fades: ranks start before the state and the gradient arrive"
        counts = stretch_way_steps(stretches, self.layer.num_layers)
        way: Way = "maps" if counts["maps"] < counts["vectors"] else "vectors"
        shown = ", ".join(f"{name} {count:.3g}" for name, count in counts.items())
        return way, f"sequential steps on {len(stretches)} ranks: {shown}"

    # ---- backward ------------------------------------------------------------------------------------------------

    def gradients(
        self, gy: Array | None, saved: ShardSaved, grad_h_n: Array | None = None, grad_c_n: Array | None = None
    ) -> NamedGradients:
        """Return the gradients from `gy`, of y's shape, and on rank 0 `grad_h_n`, of h_n's; None stands for zero.

        ``weights`` are summed over all ranks; ``input`` are the rank's own steps'; ``h0`` is the gradient at the state
        before the rank's shard, on the last rank the whole sequence's. An LSTM takes `grad_c_n` as well, and
        there is ``c0``.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            A gradient does not fit.
        OptionError
            `grad_h_n` or `grad_c_n` is given on another rank than 0, or `grad_c_n` without there being a c.
        """
        layer, like = self.layer, saved.last
        xp = backend.namespace(like)
        arriving = gy
        if gy is not None:
            steps, batch, width = saved.runs[0].h.shape
            check_gy(gy, (batch, steps, width) if layer.batch_first else (steps, batch, width), like.dtype, like)
            arriving = self._swap_batch_time(gy)
        last = self._checked_last({"grad_h_n": grad_h_n, "grad_c_n": grad_c_n}, saved)
        found = Shared(lambda: self._back(arriving, last, saved), xp)

        def at_initial() -> State:
            return tuple(xp.stack(arrays) for arrays in zip(*(run.initial for run in found()), strict=True))

        return NamedGradients(
            layer, gy, saved, lambda: self._swap_batch_time(self._input_grad(0, found()[0])),
            lambda: self._summed(found(), saved.runs),
            names=("h0", "c0")[: len(layer.cell.states)], more=at_initial,
        )  # fmt: skip

    def _checked_last(self, named: dict[str, Array | None], saved: ShardSaved) -> Array | None:
        """Return the gradient at the sequence's last states, (num_layers, B, n), as far as it is known."""
        if not any(array is not None for array in named.values()):
            return None
        xp, found = backend.namespace(saved.last), backend.namespace(saved.last).zeros_like(saved.last)
        parts = split(found, len(self.layer.cell.states))
        for number, (name, array) in enumerate(named.items()):
            if array is None:
                continue
            if self.transport.rank:
                raise OptionError("The sequence ends on rank 0", expected=f"{name} on rank 0 alone",
                                  got=f"{name} on rank {self.transport.rank}")  # fmt: skip
            if number >= len(parts):
                raise OptionError(f"{type(self.layer).__name__} has no c", expected=f"{name}=None", got="a gradient")
            check_input(array, name=name, dtype=found.dtype, shape=parts[number].shape, like=found)
            parts[number][...] = xp.asarray(array)
        return found

    def _back(self, arriving: Array | None, last: Array | None, saved: ShardSaved) -> list[RunGradients]:
        """Take the gradients through all layers, from the last to the first."""
        found: list[RunGradients] = []
        sent: list[Handle] = []
        for number in reversed(range(self.layer.num_layers)):
            run, known = saved.runs[number], None if last is None else last[number]
            if saved.way == "maps":
                found.append(self._by_maps(number, run, arriving, known, saved))
            else:
                found.append(self._by_vectors(number, run, arriving, known, saved, sent))
            if number:
                arriving = self._input_grad(number, found[-1])
        for handle in sent:
            handle.wait()
        return found[::-1]

    def _by_vectors(
        self, number: int, run: SavedRun, gy: Array | None, known: Array | None, saved: ShardSaved, sent: list[Handle]
    ) -> RunGradients:
        """Go back when the gradient at the shard's end has arrived, and send the gradient at its beginning."""
        rank, incoming, cell = self.transport.rank, known, self.layer.cell
        if rank:
            incoming = backend.namespace(run.h).empty((len(run.h0), self._size), dtype=run.h.dtype)
            received = self.transport.irecv(incoming, rank - 1, self.layer.num_layers + number)
            if isinstance(cell, GatedMath) and len(run.x):
                grads = self._run_back(number, run, gy, None, saved)  # while the rank waits for the gradient
                received.wait()
                grads = cell.resume_back(_kernels(run), run, gy, incoming, grads)
            else:
                received.wait()
                grads = self._run_back(number, run, gy, incoming, saved)
        else:
            grads = self._run_back(number, run, gy, incoming, saved)
        if rank != self._last:
            sent.append(self.transport.isend(joined(grads.initial), rank + 1, self.layer.num_layers + number))
        return grads

    def _by_maps(
        self, number: int, run: SavedRun, gy: Array | None, known: Array | None, saved: ShardSaved
    ) -> RunGradients:
        """Reduce the shard, and go back through it with the scanned map of all ranks before it."""
        rank, xp = self.transport.rank, backend.namespace(run.h)
        if rank == 0:
            grads = self._run_back(number, run, gy, known, saved)
            self._scan(algorithms.constant(joined(grads.initial)))
            return grads
        size = self._size
        own = xp.zeros((len(run.h0), size + 1, size), dtype=run.h.dtype)  # the last rank's: nobody needs it
        if rank != self._last:
            cell, w_hh = self.layer.cell, self._weights(number).weight_hh
            k, empty = _kernels(run), len(run.x) == 0
            own = algorithms.identity(own) if empty else cell.reduced(k, run, w_hh, gy, saved.chunks)
        return self._run_back(number, run, gy, xp.ascontiguousarray(self._scan(own)[:, size]), saved)

    def _scan(self, own: Array) -> Array:
        """Return the map of all ranks before this one: a constant, as rank 0's is."""
        shape = own.shape

        def combine(earlier: Array, later: Array) -> Array:
            return algorithms.join(earlier.reshape(shape), later.reshape(shape)).reshape(-1)

        found = self.transport.exscan(own.reshape(-1), combine)
        return own if found is None else found.reshape(shape)

    def _run_back(
        self, number: int, run: SavedRun, gy: Array | None, incoming: Array | None, saved: ShardSaved
    ) -> RunGradients:
        layer, xp = self.layer, backend.namespace(run.h)
        if incoming is None:
            incoming = xp.zeros((len(run.h0), self._size), dtype=run.h.dtype)
        last = tuple(xp.ascontiguousarray(part) for part in split(incoming, len(run.states)))
        weights = self._weights(number)
        return runs.backward(
            _kernels(run), layer.cell, run, weights, gy, last, choice=saved.inner, options=layer.options
        )

    def _input_grad(self, number: int, grads: RunGradients) -> Array:
        return runs.input_grad(self.layer.cell, grads, self._weights(number))

    def _summed(self, found: list[RunGradients], saved: list[SavedRun]) -> dict[str, Array]:
        """Return the gradients of all weights, summed over the ranks in one call."""
        params, named = self.layer.params, dict[str, Array]()
        for number, (grads, run) in enumerate(zip(found, saved, strict=True)):
            weights = runs.weight_grad(_kernels(run), self.layer.cell, grads, run, self._weights(number))
            named |= weights.named(f"_l{number}")
        xp = backend.namespace(*named.values())
        flat = xp.concatenate([named[name].reshape(-1) for name in params])
        self.transport.allreduce(flat).wait()
        parts = xp.split(flat, list(accumulate(array.size for array in params.values()))[:-1])
        return {name: part.reshape(array.shape) for (name, array), part in zip(params.items(), parts, strict=True)}

    # ---- the rest ------------------------------------------------------------------------------------------------

    def _swap_batch_time(self, array: Array) -> Array:
        """Return an array (T, B, n) from one in the layer's order of axes, or the other way round."""
        swapped = array.transpose(1, 0, 2) if self.layer.batch_first else array
        return backend.namespace(array).ascontiguousarray(swapped)

    def backward_arrays(self) -> list[Array]:
        """Return the arrays that the way back reads in addition to the saved ones: the layer's parameters."""
        return self.layer.backward_arrays()

    def _weights(self, number: int) -> Weights:
        return Weights.of(self.layer.params, f"_l{number}")


def _kernels(run: SavedRun) -> Any:
    return kernels.get(backend.namespace(run.x)).unchecked
