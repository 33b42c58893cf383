"""Derivatives of a recorded program: local ones by loops, straight into planned places, chained by planned products.

Numbers that depend on x are *stored* by stages; a stage that reads x alone has level 0, one that reads level 0 level 1,
and so on. The rows of a level's Jacobian are J_d = L_dx + Σ L_de J_e, with local derivatives L by the columns of x and
of lower levels. A Hessian is J'ᵀ S J' with the local Hessians S = Σ λ ∇²φ, weighted by adjoints λ, and J' = (1; J).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from sparsebp.core import graphs, host_pool
from sparsebp.core.check import Array
from sparsebp.jacobians.tape.device import DeviceLoop, DeviceMultiplied
from sparsebp.jacobians.tape.expressions import Expression, evaluated, gradient, leaves_of, renumbered
from sparsebp.jacobians.tape.loops import Leaf, Loop, Root, Where, compiled
from sparsebp.jacobians.tape.record import Group, Linear, Recorder, used
from sparsebp.patterns.pattern import SparsityPattern
from sparsebp.products.product import ProductPlan, plan_product

X, CONSTANT = -1, -2
"""Levels of x, and of numbers that do not depend on it."""
MOST_SIZES = 2
"""Sizes of batches for which arrays are kept, next to the newest: one x, and the parts of a long batch."""


class Buffers:
    """Arrays between the steps of a call, used again by later ones: new pages take longer than loops that fill them."""

    def __init__(self, program: Program) -> None:
        self._dtype, self._xp = program.dtype, program.xp
        self._free: dict[tuple[int, ...], list[dict[Any, np.ndarray]]] = {}

    @contextlib.contextmanager
    def taken(self, batch: tuple[int, ...] = ()) -> Iterator[Arrays]:
        """Lend arrays by name and size, of a batch (B,) with B columns; no two calls at one time get the same."""
        if self._xp is not np:  # whose pool keeps memory, by streams
            yield lambda name, size, fill=None: self._new((size, *batch), fill)
            return
        for old in [*self._free][:-MOST_SIZES] if batch not in self._free else ():
            self._free.pop(old, None)
        free = self._free.setdefault(batch, [])
        try:
            arrays = free.pop()
        except IndexError:
            arrays = {}

        def array(name: Any, size: int, fill: Callable[[np.ndarray], None] | None = None) -> np.ndarray:
            found = arrays.get(name)
            if found is None:
                found = arrays[name] = np.empty((size, *batch), self._dtype)
                if fill is not None:  # numbers that later calls leave as they are
                    fill(found)
            return found

        yield array
        free.append(arrays)

    def _new(self, shape: tuple[int, ...], fill: Callable[[Array], None] | None) -> Array:
        found = self._xp.empty(shape, self._dtype)
        if fill is not None:
            fill(found)
        return found


Arrays = Callable[..., Array]
"""Of `Buffers`: name, size, and what fills a new array; one is (size,), or of a batch (size, B)."""


def empty_like(xp: Any, numbers: Array, size: int) -> Array:
    """Return a new array with rows as in `numbers`; pages of batches, which are large, are used again."""
    if numbers.ndim == 1:
        return xp.empty(size, numbers.dtype)
    return host_pool.empty(xp, (size, numbers.shape[1]), numbers.dtype)


def columns(values: Array, like: Array) -> Array:
    """Return values that all samples of a batch share, if there is one."""
    return values if like.ndim == 1 else values[:, None]


class Program:
    """A record, and how its numbers depend on x.

    Parameters
    ----------
    recorder
        Of the function.
    argnum
        The place of x among the arguments.
    device
        The launchers of the device whose kernels the loops become, or None: they run on the host.
    """

    def __init__(self, recorder: Recorder, argnum: int, device: Any = None) -> None:
        self.device, self.xp = device, np if device is None else device.xp
        self.dtype, self.size, self.table = recorder.dtype, recorder.size, recorder.table
        self.inputs, self.constants = recorder.inputs, recorder.constants
        self.stages: list[Any] = [used(stage) if isinstance(stage, Group) else stage for stage in recorder.stages]
        ((self.first, self.n),) = ((start, shape[0]) for place, start, shape in self.inputs if place == argnum)
        self.level = np.full(self.size, CONSTANT)
        self.level[self.first : self.first + self.n] = X
        self.slopes = [self._leveled(stage) for stage in self.stages]
        self.argnum = argnum
        added = [stage.to for stage in self.stages if isinstance(stage, Group) and stage.adds]
        self._sums = [np.unique(np.concatenate(added))] if added and device is None else []
        self.fixed = np.zeros(self.size, bool)  # constants, whatever the arguments
        for start, values in self.constants:
            self.fixed[start : start + len(values)] = True
        self._behind = np.zeros(self.size - sum(math.prod(shape) for *_, shape in self.inputs), self.dtype)
        for start, values in self.constants:
            first = start - self.size + len(self._behind)
            self._behind[first : first + len(values)] = values
        self._kept_behind = self.kept(self._behind)

    def _leveled(self, stage: Group | Linear) -> dict[int, Expression]:
        """Set the level of what a stage stores, and return its derivatives by the leaves that depend on x."""
        if isinstance(stage, Linear):
            below = self.level[stage.places]
            depends = (abs(stage.matrix) > 0).astype(np.int8) @ (below > CONSTANT).astype(np.int8) > 0
            self.level[stage.to[depends]] = below.max(initial=X) + 1
            return {}
        slopes = self.slopes_of(stage)
        depends, most = np.zeros(len(stage.to), bool), X
        for k in slopes:
            below = self.level[stage.leaves[k]]
            depends |= below > CONSTANT
            most = max(most, int(below.max()))
        mine = stage.to[depends]
        self.level[mine] = np.maximum(self.level[mine], most + 1)
        return slopes

    def slopes_of(self, group: Group) -> dict[int, Expression]:
        """Return derivatives by the leaves that depend on x."""
        mine = [k for k, leaf in enumerate(group.leaves) if (self.level[leaf] > CONSTANT).any()]
        return gradient(group.expression, mine)

    def kept(self, array: np.ndarray) -> Array:
        """Return a constant array where the tape runs."""
        return graphs.kept(self.xp, array)

    def loop(self, leaves: Sequence[Leaf], roots: Sequence[Root], count: int) -> Loop:
        """Return a loop that runs where the tape does."""
        return Loop(leaves, roots, count) if self.device is None else DeviceLoop(self.device, leaves, roots, count)

    def multiplied(self, matrix: Any, places: np.ndarray, to: np.ndarray, where: Where = "numbers",
                   *, adds: bool = False) -> Multiplied | DeviceMultiplied:  # fmt: skip
        """Return a product with a constant matrix that runs where the tape does."""
        if self.device is None:
            return Multiplied(matrix, places, to, where, adds=adds)
        return DeviceMultiplied(self.device, matrix, places, to, where, adds=adds)

    def numbers(self, args: tuple[Any, ...], array: Arrays) -> Array:
        """Return the numbers: arguments and constants in place, and zeros for sums. x of a batch is (n, B)."""
        found = array("numbers", self.size, self._fill)
        for place, start, shape in self.inputs:
            value = args[place] if place == self.argnum or not shape else columns(args[place].ravel(), found)
            found[start : start + math.prod(shape)] = value
        for places in self._sums:
            found[places] = 0
        return found

    def _fill(self, found: Array) -> None:
        found[len(found) - len(self._behind) :] = columns(self._kept_behind, found)

    def constants_at(self, leaf: np.ndarray) -> np.ndarray:
        """Return the constants that a leaf reads."""
        found: np.ndarray = self._behind[leaf - (self.size - len(self._behind))]
        return found

    def takes(self, args: tuple[Any, ...]) -> bool:
        """Return whether the arguments have the shapes and dtypes of the record."""
        return all(
            getattr(args[place], "shape", ()) == shape
            and (type(args[place]) is float or getattr(args[place], "dtype", None) == self.dtype)
            for place, _, shape in self.inputs
        )


class Entries(NamedTuple):
    """Elements of a derivative: the row (-1: none) and the place in the numbers of each, and their values."""

    rows: np.ndarray
    places: np.ndarray
    value: Expression | np.ndarray
    stage: int


class Block(NamedTuple):
    """Planned places of a matrix's entries: where in the array, and the sorted keys of the entries."""

    part: slice
    keys: np.ndarray

    def find(self, wanted: np.ndarray) -> np.ndarray:
        """Return the place of each key in the array, or -1."""
        if not len(self.keys):
            return np.full(len(wanted), -1)
        at = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return np.where((self.keys[at] == wanted) & (wanted >= 0), self.part.start + at, -1)


class Out:
    """Blocks, one behind the other, in an array that loops add to; the last place is for what nobody needs."""

    def __init__(self, program: Program, outputs: tuple[Group, ...] = ()) -> None:
        self.program, self.outputs, self.size = program, outputs, 0
        self._writes: list[tuple[Expression, np.ndarray, int]] = []  # value, places, stage
        self._fixed: list[tuple[np.ndarray, np.ndarray]] = []  # places, values
        self._blocks: list[Block] = []

    def block(self, keys: np.ndarray) -> Block:
        """Make places for sorted keys."""
        self._blocks.append(Block(slice(self.size, self.size + len(keys)), keys))
        self.size += len(keys)
        return self._blocks[-1]

    def write(self, value: Expression | np.ndarray, places: np.ndarray, stage: int) -> None:
        """Plan that values are added at places; -1 is nowhere. What never changes is computed now."""
        if not (places >= 0).any():
            return
        if isinstance(value, Expression):
            group = self.program.stages[stage] if stage >= 0 else self.outputs[-1 - stage]
            reads = leaves_of([value])
            if any(k >= len(group.leaves) or not self.program.fixed[group.leaves[k]].all() for k in reads):
                self._writes.append((value, places, stage))
                return
            value = evaluated(value, {k: self.program.constants_at(group.leaves[k]) for k in reads})
        self._fixed.append((places, np.broadcast_to(value, places.shape)))

    def finish(self, targets: Iterable[Block], overwritten: Iterable[Block] = ()) -> None:
        """Plan where the array begins, and which values are stored rather than added.

        `targets` are added to later, and `overwritten` written to.
        """
        self.start = np.zeros(self.size + 1, self.program.dtype)
        for places, values in self._fixed:
            np.add.at(self.start, places, values)  # -1 is the last
        self.start[-1] = 0
        self._kept_start = self.program.kept(self.start)
        writers = np.bincount(np.concatenate([np.zeros(0, int), *(p for _, p, _ in self._writes)]) + 1,
                              minlength=self.size + 1)[1:]  # fmt: skip
        alone = np.append((writers == 1) & (self.start[:-1] == 0), True)
        self.roots: dict[int, list[Root]] = {}
        stored = np.zeros(self.size + 1, bool)
        for value, places, stage in self._writes:
            adds = not alone[places].all()
            stored[places] |= not adds
            root = Root(value, "out", np.where(places < 0, self.size, places), adds, self.size)
            self.roots.setdefault(stage, []).append(root)
        final = {block.part.start for block in targets}
        later = {block.part.start for block in overwritten if len(block.keys)}
        self._copied = []
        self.constant: dict[int, Array] = {}  # blocks that nothing is written to
        for block in self._blocks:
            if not writers[block.part].any() and block.part.start not in final and len(block.keys):
                self.constant[block.part.start] = self._kept_start[block.part]
            elif not stored[block.part].all() and not (block.part.start in later and len(block.keys)):
                self._copied.append((block.part, not self.start[block.part].any()))

    def begin(self, found: Array) -> Array:
        """Return an array, ready for loops to add to."""
        for part, zero in self._copied:
            found[part] = 0 if zero else columns(self._kept_start[part], found)
        return found

    def part(self, array: Array, block: Block) -> Array:
        """Return the values of a block."""
        constant = self.constant.get(block.part.start) if len(block.keys) else None
        return array[block.part] if constant is None else constant


class Added(NamedTuple):
    """Adds values in planned places: all of them one behind the other, or by a loop."""

    whole: bool
    loop: Loop | None

    def __call__(self, values: Array, out: Array) -> None:
        """Add values to an array."""
        if self.whole:
            out += values
        elif self.loop is not None:
            self.loop(values, out, out)


def added(program: Program, places: np.ndarray, size: int) -> Added:
    """Plan a sum of values at places of an array of this size; -1 is nowhere."""
    mine = np.flatnonzero(places >= 0)
    whole = len(places) == size and bool((places == np.arange(size)).all())
    if whole or not len(mine):
        return Added(whole, None)
    root = Root(program.table.make("leaf", 0), "out", places[mine], adds=True)
    return Added(False, program.loop([Leaf("numbers", mine)], [root], len(mine)))


def keys_of(pattern: SparsityPattern) -> np.ndarray:
    """Return row · columns + column of each entry."""
    return pattern.row_of_entry.astype(np.int64) * pattern.shape[1] + pattern.indices


def pattern_of(keys: np.ndarray, shape: tuple[int, int]) -> SparsityPattern:
    """Return a pattern of sorted keys."""
    ends = np.searchsorted(keys, np.arange(shape[0] + 1) * shape[1])
    return SparsityPattern(ends, keys % max(shape[1], 1), shape)


Plan = tuple[dict[tuple[int, int], np.ndarray], list[tuple[Any, Any, Any, ProductPlan]]]
"""Keys of each block, by level and source; and products: the block that is added to, left, right, the plan."""


class Chain:
    """The Jacobian of the numbers that are `needed`, by levels, or of outputs on a pattern.

    Blocks (d, e) are the derivatives of level d by level e; outputs are the last level. Products are either forward,
    J_d += L_de J_e from below, or in reverse, M_s += M_e L_es for the outputs' derivatives M from above.
    """

    def __init__(self, program: Program, needed: np.ndarray, outputs: tuple[Group, ...] = (),
                 pattern: SparsityPattern | None = None) -> None:  # fmt: skip
        self.program, level = program, program.level
        slopes = [program.slopes_of(group) for group in outputs]
        self._note_needed(needed, [leaf for group, own in zip(outputs, slopes, strict=True)
                                   for leaf in (group.leaves[k] for k in own)])  # fmt: skip
        needed &= level > X
        self.depth = int(level[needed].max(initial=X)) + 1
        self.row = np.full(program.size, -1)  # of each number, in its level
        self.rows = []
        for d in range(self.depth):
            mine = np.flatnonzero(needed & (level == d))
            self.row[mine] = np.arange(len(mine))
            self.rows.append(mine)
        entries: list[list[Entries]] = [[] for _ in range(self.depth)]
        for number, (stage, own) in enumerate(zip(program.stages, program.slopes, strict=True)):
            for e in self._entries(stage, own, number):
                for d in np.unique(level[e.rows]):
                    if 0 <= d < self.depth:
                        entries[d].append(e._replace(rows=np.where(level[e.rows] == d, self.row[e.rows], -1)))
        if pattern is not None:
            entries.append([Entries(group.to, group.leaves[k], slope, -1 - number)
                            for number, (group, own) in enumerate(zip(outputs, slopes, strict=True))
                            for k, slope in own.items()])  # fmt: skip
        self._heights = [*map(len, self.rows), *([pattern.shape[0]] if pattern is not None else [])]
        keys = {(d, e): [self._keys(entry, e) for entry in own] for d, own in enumerate(entries) for e in range(X, d)}
        final = (self.depth, X)  # if there are outputs: their pattern is given
        local = {at: _distinct(found) for at, found in keys.items() if at != final}
        plans = [self._forward(local, pattern)]
        if pattern is not None and self.depth:
            plans.append(self._reverse(local, pattern))
        sets, products = min(plans, key=lambda plan: sum(p.products for *_, p in plan[1]))
        self.out = Out(program, outputs)
        top = range(self.depth) if pattern is None else [self.depth]
        order = [*((d, X) for d in top), *(at for at in sets if at[1] != X or at[0] not in top)]
        self.blocks = {at: self.out.block(sets[at]) for at in order}  # results one behind the other
        first: dict[tuple[int, int], int | None] = {}  # the number of each target's first product, if that is all of it
        for number, (at, *_, plan) in enumerate(products):
            first.setdefault(at, number if np.array_equal(keys_of(plan.pattern), sets[at]) else None)
        starting = {at for at, number in first.items() if number is not None}
        local_at = {at: self.out.block(_distinct(keys[at])) if at in starting else self.blocks[at] for at in keys}
        for at, found in keys.items():
            for entry, wanted in zip(entries[at[0]], found, strict=True):
                self.out.write(entry.value, local_at[at].find(wanted), entry.stage)
        results = [self.blocks[d, X] for d in top]
        whole = [self.blocks[at] for at in starting]
        self.out.finish([*results, *(self.blocks[at] for at, *_ in products)], whole)
        self.products = []
        for number, (at, left, right, plan) in enumerate(products):  # plans of equal patterns are one object
            target = self.blocks[at]
            block = local_at[at] if first[at] == number else None
            of = keys_of(plan.pattern) if block is None else block.keys
            places = target.find(of)
            add = added(program, np.where(places < 0, -1, places - target.part.start), len(target.keys))
            self.products.append(Product(target, self.blocks[left], self.blocks[right], plan, block, add))
        self.most = max((plan.pattern.nnz for *_, plan, _, _ in self.products), default=0)
        self.size = sum(len(block.keys) for block in results)
        self.apart = pattern is not None and bool(final in starting)

    def _note_needed(self, needed: np.ndarray, read: list[np.ndarray]) -> None:
        """Add the numbers on which the needed ones depend."""
        for places in read:
            needed[places] = True
        for stage, own in zip(self.program.stages[::-1], self.program.slopes[::-1], strict=True):
            needed &= self.program.level > X
            mine = needed[stage.to]
            if isinstance(stage, Linear):
                needed[stage.places[np.unique(stage.matrix[mine].indices)]] = True
            for k in own:
                needed[stage.leaves[k][mine]] = True

    @staticmethod
    def _entries(stage: Any, slopes: dict[int, Expression], number: int) -> Iterable[Entries]:
        """Yield derivatives of a stage; rows are places in the numbers."""
        if isinstance(stage, Linear):
            rows = np.repeat(stage.to, np.diff(stage.matrix.indptr))
            yield Entries(rows, stage.places[stage.matrix.indices], stage.matrix.data, number)
        for k, slope in slopes.items():
            yield Entries(stage.to, stage.leaves[k], slope, number)

    def _width(self, level: int) -> int:
        return self.program.n if level == X else len(self.rows[level])

    def _keys(self, entry: Entries, source: int) -> np.ndarray:
        """Return row · columns + column of the entries by x or a level; -1 of others."""
        column = entry.places.astype(np.int64) - self.program.first if source == X else self.row[entry.places]
        mine = (self.program.level[entry.places] == source) & (entry.rows >= 0) & (column >= 0)
        return np.where(mine, entry.rows.astype(np.int64) * self._width(source) + column, -1)

    def _pattern(self, keys: np.ndarray, at: tuple[int, int]) -> SparsityPattern:
        return pattern_of(keys, (self._heights[at[0]], self._width(at[1])))

    def _forward(self, local: dict[tuple[int, int], np.ndarray], given: SparsityPattern | None) -> Plan:
        sets = dict(local)
        products: list[Any] = []
        for d in range(len(self._heights)):
            plans = [((d, X), (d, e), (e, X), plan_product(self._pattern(local[d, e], (d, e)),
                                                           self._pattern(sets[e, X], (e, X))))
                     for e in range(d) if len(local[d, e])]  # fmt: skip
            whole = given is not None and d == self.depth
            sets[d, X] = keys_of(given) if given is not None and whole else _union(local[d, X], plans)
            products += sorted(plans, key=lambda plan: plan[-1].pattern.nnz < len(sets[plan[0]]))
        return sets, products

    def _reverse(self, local: dict[tuple[int, int], np.ndarray], given: SparsityPattern) -> Plan:
        sets, top = dict(local), self.depth
        products: list[Any] = []
        sets[top, X] = keys_of(given)
        for e in range(top - 1, X, -1):
            sets[top, e] = _union(local[top, e], [p for p in products if p[0] == (top, e)])
            products += [((top, s), (top, e), (e, s), plan_product(self._pattern(sets[top, e], (top, e)),
                                                                   self._pattern(local[e, s], (e, s))))
                         for s in range(X, e) if len(local[e, s]) and len(sets[top, e])]  # fmt: skip
        return sets, products

    def run(self, out: Array, array: Arrays, result: Array | None = None) -> Array:
        """Return the values of all levels, one behind the other, or of the outputs, from local derivatives.

        These are a part of `out`, or where the last block is a product of its own (`apart`), in `result`.
        """
        for target, left, right, plan, block, add in self.products:
            a, b = self.out.part(out, left), self.out.part(out, right)
            to = result if self.apart and target.part.start == 0 and result is not None else self.out.part(out, target)
            product = array("product", self.most)[: plan.pattern.nnz] if block is None else to
            if a.ndim == b.ndim == 1 < to.ndim:  # of constants
                product[:] = plan.form("c", a, b)[:, None]
            else:
                plan.form("c", a, b, product)
            local = product if block is None else self.out.part(out, block)
            add(local if local.ndim == to.ndim else np.repeat(local[:, None], to.shape[1], axis=1), to)
        return out[: self.size] if result is None or not self.apart else result


class Product(NamedTuple):
    """A planned product: added to its target, or where `block` is given all of it, to which that is added."""

    target: Block
    left: Block
    right: Block
    plan: ProductPlan
    block: Block | None
    add: Added


def _distinct(keys: list[np.ndarray]) -> np.ndarray:
    """Return all keys but -1, sorted, each once."""
    found = np.unique(np.concatenate([np.zeros(0, np.int64), *keys]))
    return found[found >= 0]


def _union(keys: np.ndarray, plans: list[Any]) -> np.ndarray:
    return np.unique(np.concatenate([keys, *(keys_of(plan.pattern) for *_, plan in plans)]))


class Turn(NamedTuple):
    """A loop to be compiled: what it reads and writes, and how often it turns."""

    leaves: tuple[Leaf, ...]
    roots: tuple[Root, ...]
    length: int

    def numbers(self, *, written: bool) -> list[np.ndarray]:
        """Return the places in the numbers that are written, or read."""
        return [one.places for one in (self.roots if written else self.leaves) if one.where == "numbers"]


def turn_of(group: Group, roots: list[Root], *others: Leaf) -> Turn:
    """Return the loop of a group, whose roots read `others` too, behind its own leaves."""
    return Turn((*(Leaf("numbers", leaf) for leaf in group.leaves), *others), tuple(roots), len(group.to))


def steps_of(program: Program, roots: dict[int, list[Root]], read: np.ndarray,
             outputs: tuple[Group, ...] = ()) -> list[Any]:  # fmt: skip
    """Return what to run, in order: loops that write roots, and store the numbers that these, or later ones, read.

    `roots`: by the number of their stage; -1 and below are outputs. `read`: numbers that others read.
    """
    read = read.copy()
    turns: list[Turn | Linear] = []
    for number, group in enumerate(outputs):
        if -1 - number in roots:
            note_read(read, group, roots[-1 - number])
            turns.append(turn_of(group, roots[-1 - number]))
    for number in range(len(program.stages) - 1, -1, -1):
        stage = program.stages[number]
        stored = bool(read[stage.to].any())
        if isinstance(stage, Linear):
            if stored:
                read[stage.places] = True
                turns.insert(0, stage)
            continue
        own = list(roots.get(number, []))
        if stored:
            own.append(Root(stage.expression, "numbers", stage.to, stage.adds))
        if own:
            note_read(read, stage, own)
            turns.insert(0, turn_of(stage, own))
    return [program.loop(*turn) if isinstance(turn, Turn) else program.multiplied(turn.whole, turn.places, turn.to)
            for turn in merged(turns, program.size)]  # fmt: skip


MULTIPLY = """# smooth, with subnormal numbers
def run(data, indices, indptr, x, to, adds):
    for i in range(len(to)):
        total = x[np.uint64(to[i])] if adds else data.dtype.type(0)
        for k in range(indptr[i], indptr[i + 1]):
            total += data[np.uint64(k)] * x[np.uint64(indices[k])]
        x[np.uint64(to[i])] = total
"""


class Multiplied:
    """A constant matrix times what stands at `places` of an array; the products are stored, or added, at others."""

    def __init__(self, matrix: Any, places: np.ndarray, to: np.ndarray, where: Where = "numbers",
                 *, adds: bool = False) -> None:  # fmt: skip
        self._matrix, self._places, self._where, self._adds = matrix, _range(places), where, adds
        self._indices = places[matrix.indices].astype(np.uint32)
        self._indptr, self._to = matrix.indptr.astype(np.int64), to.astype(np.uint32)

    def __call__(self, numbers: np.ndarray, adjoints: np.ndarray, out: np.ndarray) -> None:
        """Multiply, in the array that it is for."""
        x = numbers if self._where == "numbers" else adjoints if self._where == "adjoints" else out
        if x.ndim == 1:
            compiled(MULTIPLY)(self._matrix.data, self._indices, self._indptr, x, self._to, self._adds)
        else:
            products = self._matrix @ x[self._places]
            x[self._to] = x[self._to] + products if self._adds else products


def transposed(program: Program, matrix: Any, places: np.ndarray, to: np.ndarray, where: Where = "adjoints") -> Any:
    """Return the product with a transposed matrix, of what stands at `to`; -1 among `places` is nowhere."""
    from scipy.sparse import csr_array

    inside = np.flatnonzero(places >= 0)
    rows, row = np.unique(places[inside], return_inverse=True)  # numbers may be read several times
    spread = csr_array((np.ones(len(inside), matrix.dtype), (row, inside)), (len(rows), len(places)))
    return program.multiplied((spread @ matrix.T.tocsr()).tocsr(), to, rows, where, adds=True)


def _range(places: np.ndarray) -> Any:
    """Return places as a slice if they are one behind the other."""
    first = int(places[0]) if len(places) else 0
    return slice(first, first + len(places)) if (places == first + np.arange(len(places))).all() else places


MOST_ROOTS = 24
"""Of a loop that was made of two: a longer one gains little and compiles longer."""


def merged(turns: list[Turn | Linear], size: int) -> list[Turn | Linear]:
    """Return loops with those made one that have operands in common: what both compute is computed once."""
    found: list[Turn | Linear] = []
    for turn in turns:
        place = len(found)
        if isinstance(turn, Turn):
            read = np.zeros(size, bool)
            for places in turn.numbers(written=False):
                read[places] = True
            for k in range(len(found) - 1, -1, -1):
                other = found[k]
                if isinstance(other, Turn) and _alike(other, turn):
                    place = k
                if any(read[to].any() for to in ([other.to] if isinstance(other, Linear)
                                                 else other.numbers(written=True))):  # fmt: skip
                    place = place if place > k else len(found)
                    break
        if place == len(found):
            found.append(turn)
        else:
            found[place] = _united(found[place], turn)
    return found


def _alike(one: Turn, other: Turn) -> bool:
    """Return whether all that one of two loops reads the other reads, too."""
    if one.length != other.length or len(one.roots) + len(other.roots) > MOST_ROOTS:
        return False
    few, many = sorted((one.leaves, other.leaves), key=len)
    return all(any(_same(leaf, also) for also in many) for leaf in few)


def _same(one: Leaf, other: Leaf) -> bool:
    return one.where == other.where and (one.places is other.places or np.array_equal(one.places, other.places))


def _united(one: Any, other: Any) -> Turn:
    leaves, number = list(one.leaves), []
    for leaf in other.leaves:
        same = next((k for k, also in enumerate(leaves) if _same(leaf, also)), len(leaves))
        if same == len(leaves):
            leaves.append(leaf)
        number.append(same)
    roots = (root._replace(expression=renumbered(root.expression, number)) for root in other.roots)
    return Turn(tuple(leaves), (*one.roots, *roots), one.length)


def note_read(read: np.ndarray, group: Group, roots: list[Root]) -> None:
    """Note the numbers that roots of a group read."""
    for k in leaves_of(root.expression for root in roots):
        if k < len(group.leaves):
            read[group.leaves[k]] = True


def described(program: Program, steps: Iterable[Any], products: int) -> str:
    """Say of what a tape consists."""
    loops = sum(isinstance(step, Loop) for step in steps)
    matrices = sum(isinstance(stage, Linear) for stage in program.stages)
    parts = [f"{loops} loop{'s' * (loops != 1)}"]
    parts += [f"{matrices} constant matri{'ces' if matrices > 1 else 'x'}"] * bool(matrices)
    return ", ".join(parts + [f"{products} planned product{'s' * (products > 1)}"] * bool(products))


class JacobianTape:
    """The Jacobian of a recorded function, (m, n), on a pattern; entries outside of it are zero."""

    def __init__(self, program: Program, outputs: tuple[Group, ...], pattern: SparsityPattern) -> None:
        self.program = program
        self.outputs = outputs = tuple(used(group) for group in outputs)
        self.chain = Chain(program, np.zeros(program.size, bool), outputs, pattern)
        self.steps = steps_of(program, self.chain.out.roots, np.zeros(program.size, bool), outputs)
        self._buffers = Buffers(program)

    def values(self, args: tuple[Any, ...]) -> Array:
        """Return the values on the pattern, or of a batch, x (n, B), with as many columns."""
        program, local = self.program, self.chain.out
        with self._buffers.taken(args[program.argnum].shape[1:]) as array:
            numbers = program.numbers(args, array)
            if not self.chain.products:  # what the loops fill is the result
                out = local.begin(empty_like(program.xp, numbers, len(local.start)))
                for step in self.steps:
                    step(numbers, out, out)
                return self.chain.run(out, array)
            out = local.begin(array("local", len(local.start)))
            for step in self.steps:
                step(numbers, out, out)
            result = empty_like(program.xp, numbers, self.chain.size)
            found = self.chain.run(out, array, result)
            return found if found is result else found.copy()

    def describe(self) -> str:
        """Say of what the tape consists."""
        return described(self.program, self.steps, len(self.chain.products))


class HessianTape:
    """The Hessian of a recorded scalar, (n, n), on a symmetric pattern: equal to its transpose to the last bit."""

    def __init__(self, program: Program, output: int, pattern: SparsityPattern) -> None:
        self.program, n, self._buffers = program, program.n, Buffers(program)
        self.outputs = (Group(program.table.make("leaf", 0), (np.array([output]),), np.zeros(1, np.int64), False),)
        self.output, level, stages = output, program.level, program.stages
        self.pattern = pattern
        alive = np.zeros(program.size, bool)  # whose adjoints are not zero
        alive[output] = True
        seconds: list[dict[tuple[int, int], Expression]] = [{} for _ in stages]
        curved = np.zeros(program.size, bool)  # numbers in second derivatives
        for number in range(len(stages) - 1, -1, -1):
            stage, slopes = stages[number], program.slopes[number]
            if not alive[stage.to].any():
                continue
            if isinstance(stage, Linear):
                alive[stage.places] = True
                continue
            for k in slopes:
                alive[stage.leaves[k]] = True
            for a, slope in slopes.items():
                for b, second in gradient(slope, [k for k in slopes if k <= a]).items():
                    seconds[number][a, b] = second
                    curved[stage.leaves[a]] = curved[stage.leaves[b]] = True
        curved &= level > X
        self.chain = Chain(program, curved, (), None)
        # rows of the stacked Jacobian, and the blocks of S
        starts = np.cumsum([0, *(len(rows) for rows in self.chain.rows)])
        stacked = np.full(program.size, -1)
        for d, rows in enumerate(self.chain.rows):
            stacked[rows] = starts[d] + np.arange(len(rows))
        w = int(starts[-1])
        wants = self._wanted(seconds)
        self.adjoint = np.full(program.size, -1)
        self.adjoint[wants] = np.arange(int(wants.sum()))
        self.adjoints = int(wants.sum())
        of_x = lambda places: places.astype(np.int64) - program.first  # noqa: E731
        pairs = []
        for number, mine in enumerate(seconds):
            for (a, b), second in mine.items():
                one, two = stages[number].leaves[a], stages[number].leaves[b]
                both = [(one, two)] if a == b else [(one, two), (two, one)]
                pairs += [(number, second, i, j) for i, j in both]
        self.out = Out(program)
        of_w = lambda places: stacked[places].astype(np.int64)  # noqa: E731
        in_x, in_w = (level == X, of_x, n), (level > X, of_w, w)

        def keys(rows: Any, columns: Any, i: np.ndarray, j: np.ndarray) -> np.ndarray:
            """Return row · columns + column of second derivatives by x or stored numbers; -1 of others."""
            return np.where(rows[0][i] & columns[0][j], rows[1](i) * columns[2] + columns[1](j), -1)

        ways = [(in_x, in_x), (in_w, in_x), (in_w, in_w)][: 3 if w else 1]
        found = [[keys(*way, i, j) for *_, i, j in pairs] for way in ways]
        sets = [*map(_distinct, found[1:]), *([np.zeros(0, np.int64)] * (0 if w else 2))]
        self.blocks = [self.out.block(own) for own in (keys_of(pattern), *sets)]
        for k, (number, second, i, _) in enumerate(pairs):
            places = np.full(len(i), -1)
            for block, of_way in zip(self.blocks, found, strict=False):
                places = np.maximum(places, block.find(of_way[k]))
            weight = program.table.make("leaf", len(stages[number].leaves))
            self.out.write(program.table.derived("multiply", second, weight), places, number)
        self.out.finish(self.blocks)
        self._plan_products(sets, w, n)
        self._plan_steps(wants)

    def _wanted(self, seconds: list[dict[tuple[int, int], Expression]]) -> np.ndarray:
        """Return the numbers whose adjoints are read: their stage is curved, or reads such numbers."""
        wants = np.zeros(self.program.size, bool)
        for stage, slopes, own in zip(self.program.stages, self.program.slopes, seconds, strict=True):
            reads = [stage.places] if isinstance(stage, Linear) else [stage.leaves[k] for k in slopes]
            wants[stage.to] |= bool(own) or any(wants[places].any() for places in reads)
        wants[self.output] = True
        return wants

    def _plan_products(self, sets: list[np.ndarray], w: int, n: int) -> None:
        """Plan H = S_xx + P + Pᵀ with P = Jᵀ Q and Q = S_wx + S_ww J / 2."""
        self.products: Any = None
        if not w or not (len(sets[0]) or len(sets[1])):
            return
        program = self.program
        starts = np.cumsum([0, *map(len, self.chain.rows)])
        stacked = np.concatenate([self.chain.blocks[d, X].keys + starts[d] * n for d in range(self.chain.depth)])
        jacobian = pattern_of(stacked, (w, n))
        inner = plan_product(pattern_of(sets[1], (w, w)), jacobian) if len(sets[1]) else None
        keys = sets[0] if inner is None else np.unique(np.concatenate([sets[0], keys_of(inner.pattern)]))
        add_wx = added(program, np.searchsorted(keys, sets[0]), len(keys))
        add_ww = None if inner is None else added(program, np.searchsorted(keys, keys_of(inner.pattern)), len(keys))
        outer = plan_product(jacobian.T, pattern_of(keys, (w, n)))
        of_p, both = keys_of(outer.pattern), keys_of(self.pattern)
        mirrored = self.pattern.indices.astype(np.int64) * n + self.pattern.row_of_entry
        places = [np.minimum(np.searchsorted(of_p, k), max(len(of_p) - 1, 0)) for k in (both, mirrored)]
        if len(of_p):
            places = [np.where(of_p[at] == k, at, len(of_p)) for at, k in zip(places, (both, mirrored), strict=True)]
        mine = np.flatnonzero((places[0] < len(of_p)) | (places[1] < len(of_p)))
        make = program.table.make
        both_sides = Root(make("add", make("leaf", 0), make("leaf", 1)), "out", mine, adds=True)
        leaves = [Leaf("numbers", at[mine]) for at in places]
        spread = program.loop(leaves, [both_sides], len(mine)) if len(mine) else None
        moved = Root(make("leaf", 0), "out", np.arange(jacobian.nnz), adds=False)
        turn = program.loop([Leaf("numbers", jacobian.transpose_permutation)], [moved], jacobian.nnz)
        self.products = turn, inner, len(keys), add_wx, add_ww, outer, spread

    def _plan_steps(self, wants: np.ndarray) -> None:
        program = self.program
        read = np.zeros(program.size, bool)
        self.back: list[Any] = []
        make = program.table.derived
        for number in range(len(program.stages) - 1, -1, -1):
            stage = program.stages[number]
            if not wants[stage.to].any():
                continue
            if isinstance(stage, Linear):
                if wants[stage.places].any():
                    self.back.append(
                        transposed(program, stage.matrix, self.adjoint[stage.places], self.adjoint[stage.to])
                    )
                continue
            lam = program.table.make("leaf", len(stage.leaves))
            roots = list(self.out.roots.get(number, []))
            for k, slope in program.slopes[number].items():
                to = self.adjoint[stage.leaves[k]]
                if (to >= 0).any():
                    to = np.where(to < 0, self.adjoints, to)
                    roots.append(Root(make("multiply", slope, lam), "adjoints", to, True, self.adjoints))
            if roots:
                note_read(read, stage, roots)
                self.back.append(program.loop(*turn_of(stage, roots, Leaf("adjoints", self.adjoint[stage.to]))))
        self.steps = steps_of(program, self.chain.out.roots, read)

    def values(self, args: tuple[Any, ...]) -> Array:
        """Return the values on the pattern, or of a batch, x (n, B), with as many columns."""
        with self._buffers.taken(args[self.program.argnum].shape[1:]) as array:
            return self._values(args, array)

    def _values(self, args: tuple[Any, ...], array: Arrays) -> Array:
        program, of_chain = self.program, self.chain.out
        numbers = program.numbers(args, array)
        local = of_chain.begin(array("local", len(of_chain.start)))
        out = self.out.begin(empty_like(program.xp, numbers, len(self.out.start)))
        for step in self.steps:
            step(numbers, local, local)
        adjoints = array("adjoints", self.adjoints + 1)
        adjoints[:] = 0
        adjoints[self.adjoint[self.output]] = 1
        for step in self.back:
            step(numbers, adjoints, out)
        found = out[: self.pattern.nnz]
        if self.products is None:
            return found
        turn, inner, size, add_wx, add_ww, outer, spread = self.products
        jacobian = self.chain.run(local, array)
        q = array("q", size)
        q[:] = 0
        add_wx(out[self.blocks[1].part], q)
        if inner is not None:
            half = program.xp.multiply(out[self.blocks[2].part], 0.5, out=array("half", len(self.blocks[2].keys)))
            add_ww(inner.form("c", half, jacobian, array("inner", inner.pattern.nnz)), q)
        if spread is not None:
            both = array("both", outer.pattern.nnz + 1)
            both[-1] = 0  # read where there is no entry
            turned = array("turned", len(jacobian))
            turn(jacobian, turned, turned)
            outer.form("c", turned, q, both[:-1])
            spread(both, found, found)
        return found

    def describe(self) -> str:
        """Say of what the tape consists."""
        products = len(self.chain.products)
        if self.products is not None:
            products += 1 + (self.products[1] is not None)
        return described(self.program, [*self.steps, *self.back], products)
