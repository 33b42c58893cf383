"""Derivatives of a recorded program: local ones by loops, straight into planned places, chained by planned products.

Numbers that depend on x are *stored* by stages; a stage that reads x alone has level 0, one that reads level 0 level 1,
and so on. The rows of a level's Jacobian are J_d = L_dx + Σ L_de J_e, with local derivatives L by the columns of x and
of lower levels. A Hessian is J'ᵀ S J' with the local Hessians S = Σ λ ∇²φ, weighted by adjoints λ, and J' = (1; J).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from sparsebp.jacobians.tape.expressions import Expression, evaluated, gradient, leaves_of
from sparsebp.jacobians.tape.loops import Leaf, Loop, Root
from sparsebp.jacobians.tape.record import Group, Linear, Recorder, used
from sparsebp.patterns.pattern import SparsityPattern
from sparsebp.products.product import ProductPlan, plan_product

X, CONSTANT = -1, -2
"""Levels of x, and of numbers that do not depend on it."""


class Program:
    """A record, and how its numbers depend on x."""

    def __init__(self, recorder: Recorder, argnum: int) -> None:
        self.dtype, self.size, self.table = recorder.dtype, recorder.size, recorder.table
        self.inputs, self.constants = recorder.inputs, recorder.constants
        self.stages: list[Any] = [used(stage) if isinstance(stage, Group) else stage for stage in recorder.stages]
        ((self.first, self.n),) = ((start, shape[0]) for place, start, shape in self.inputs if place == argnum)
        self.level = np.full(self.size, CONSTANT)
        self.level[self.first : self.first + self.n] = X
        self.slopes = [self._leveled(stage) for stage in self.stages]
        self.fixed = np.zeros(self.size, bool)  # constants, whatever the arguments
        for start, values in self.constants:
            self.fixed[start : start + len(values)] = True
        self._behind = np.zeros(self.size - sum(math.prod(shape) for *_, shape in self.inputs), self.dtype)
        for start, values in self.constants:
            first = start - self.size + len(self._behind)
            self._behind[first : first + len(values)] = values

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

    def numbers(self, args: tuple[Any, ...]) -> np.ndarray:
        """Return the numbers, with arguments and constants in place, and zeros for sums."""
        found = np.empty(self.size, self.dtype)
        for place, start, shape in self.inputs:
            found[start : start + math.prod(shape)] = np.ravel(args[place])
        found[len(found) - len(self._behind) :] = self._behind
        return found

    def takes(self, args: tuple[Any, ...]) -> bool:
        """Return whether the arguments have the shapes and dtypes of the record."""
        return all(
            np.shape(args[place]) == shape
            and (isinstance(args[place], float) or getattr(args[place], "dtype", None) == self.dtype)
            for place, _, shape in self.inputs
        )


class Entries(NamedTuple):
    """Elements of a derivative: the row (-1: none) and the place in the numbers of each, and their values."""

    rows: np.ndarray
    places: np.ndarray
    value: Expression | np.ndarray
    stage: int


class Out:
    """Planned places, one behind the other, in an array that loops add to; the last is for what nobody needs."""

    def __init__(self, program: Program) -> None:
        self.program, self.size = program, 0
        self.writes: list[tuple[Expression, np.ndarray, int]] = []  # value, places, stage
        self.fixed: list[tuple[np.ndarray, np.ndarray]] = []  # places, values

    def block(self, keys: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """Make places for sorted keys; return a function that finds the place of each, or -1."""
        first = self.size
        self.size += len(keys)

        def find(wanted: np.ndarray) -> np.ndarray:
            if not len(keys):
                return np.full(len(wanted), -1)
            at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            return np.where(keys[at] == wanted, first + at, -1)

        return find

    def write(self, value: Expression | np.ndarray, places: np.ndarray, stage: int) -> None:
        """Plan that values are added at places; -1 is nowhere."""
        if not (places >= 0).any():
            return
        if isinstance(value, Expression):
            group = self.program.stages[stage] if stage >= 0 else self.outputs[-1 - stage]
            needs = leaves_of([value])
            if any(not self.program.fixed[group.leaves[k]].all() for k in needs):
                self.writes.append((value, places, stage))
                return
            value = evaluated(value, [self.constant_at(leaf) for leaf in group.leaves])
        self.fixed.append((places, np.broadcast_to(value, places.shape)))

    outputs: tuple[Group, ...] = ()

    def constant_at(self, leaf: np.ndarray) -> np.ndarray:
        """Return the constants that a leaf reads."""
        known = np.full(self.program.size, np.nan, self.program.dtype)
        for start, values in self.program.constants:
            known[start : start + len(values)] = values
        return known[leaf]

    def finish(self) -> None:
        """Plan where the array begins, and which values are stored rather than added."""
        self.start = np.zeros(self.size + 1, self.program.dtype)
        for places, values in self.fixed:
            np.add.at(self.start, places, values)  # -1 is the last
        self.start[-1] = 0
        writers = np.bincount(np.concatenate([np.zeros(0, int), *(p for _, p, _ in self.writes)]) + 1,
                              minlength=self.size + 1)[1:]  # fmt: skip
        alone = np.append((writers == 1) & (self.start[:-1] == 0), True)
        self.roots: dict[int, list[Root]] = {}
        stored = np.zeros(self.size + 1, bool)
        for value, places, stage in self.writes:
            adds = not alone[places].all()
            stored[places] |= not adds
            root = Root(value, "out", np.where(places < 0, self.size, places), adds)
            self.roots.setdefault(stage, []).append(root)
        self.empty = bool(stored[:-1].all())

    def array(self) -> np.ndarray:
        """Return the array, to be filled."""
        return np.empty_like(self.start) if self.empty else self.start.copy()


class Added(NamedTuple):
    """A loop that adds values in planned places."""

    loop: Loop | None

    def __call__(self, values: np.ndarray, out: np.ndarray) -> None:
        """Add values to an array."""
        if self.loop is not None:
            self.loop(values, out, out)


def added(program: Program, places: np.ndarray) -> Added:
    """Plan a sum of values at places of an array; -1 is nowhere."""
    mine = np.flatnonzero(places >= 0)
    if not len(mine):
        return Added(None)
    root = Root(program.table.make("leaf", 0), "out", places[mine], adds=True)
    return Added(Loop([Leaf("numbers", mine)], [root], len(mine)))


def keys_of(pattern: SparsityPattern) -> np.ndarray:
    """Return row · columns + column of each entry."""
    return pattern.row_of_entry.astype(np.int64) * pattern.shape[1] + pattern.indices


def pattern_of(keys: np.ndarray, shape: tuple[int, int]) -> SparsityPattern:
    """Return a pattern of sorted keys."""
    ends = np.searchsorted(keys, np.arange(shape[0] + 1) * shape[1])
    return SparsityPattern(ends, keys % max(shape[1], 1), shape)


class Level:
    """Rows of the chain's Jacobian that only read x and lower levels."""

    def __init__(self, pattern: SparsityPattern, first: int) -> None:
        self.pattern, self.part = pattern, slice(first, first + pattern.nnz)
        self.products: list[tuple[int, slice, ProductPlan, Added]] = []


class Chain:
    """The Jacobian of the numbers that are `needed`, and of the output if there is one, by levels."""

    def __init__(self, program: Program, needed: np.ndarray, outputs: tuple[Group, ...] = (),
                 pattern: SparsityPattern | None = None) -> None:  # fmt: skip
        self.program, self.out, level = program, Out(program), program.level
        self.out.outputs = outputs
        needed = needed & (level > X)
        slopes = [program.slopes_of(group) for group in outputs]
        for group, own in zip(outputs, slopes, strict=True):
            for k in own:
                needed[group.leaves[k]] = True
        needed &= level > X
        for stage, own in zip(program.stages[::-1], program.slopes[::-1], strict=True):
            mine = needed[stage.to]
            if isinstance(stage, Linear):
                needed[stage.places[np.unique(stage.matrix[mine].indices)]] = True
            for k in own:
                needed[stage.leaves[k][mine]] = True
            needed &= level > X
        depth = int(level[needed].max(initial=X)) + 1
        self.row = np.full(program.size, -1)  # of each number, in its level
        self.rows = []
        for d in range(depth):
            mine = np.flatnonzero(needed & (level == d))
            self.row[mine] = np.arange(len(mine))
            self.rows.append(mine)
        entries: list[list[Entries]] = [[] for _ in range(depth)]
        for number, (stage, own) in enumerate(zip(program.stages, program.slopes, strict=True)):
            for e in self._entries(stage, own, number):
                for d in np.unique(level[e.rows]):
                    if 0 <= d < depth:
                        entries[d].append(e._replace(rows=np.where(level[e.rows] == d, self.row[e.rows], -1)))
        self.levels: list[Level] = []
        for d in range(depth):
            self.levels.append(self._level(entries[d], len(self.rows[d]), None))
        if pattern is not None:
            last = [Entries(group.to, group.leaves[k], slope, -1 - number)
                    for number, (group, own) in enumerate(zip(outputs, slopes, strict=True))
                    for k, slope in own.items()]  # fmt: skip
            self.levels.append(self._level(last, pattern.shape[0], pattern))
        self.out.finish()

    def _entries(self, stage: Group | Linear, slopes: dict[int, Expression], number: int) -> Iterable[Entries]:
        """Yield derivatives of a stage; rows are places in the numbers."""
        if isinstance(stage, Group):
            for k, slope in slopes.items():
                yield Entries(stage.to, stage.leaves[k], slope, number)
        else:
            matrix = stage.matrix
            rows = np.repeat(stage.to, np.diff(matrix.indptr))
            yield Entries(rows, stage.places[matrix.indices], matrix.data, number)

    def _level(self, entries: list[Entries], rows: int, given: SparsityPattern | None) -> Level:
        program, n = self.program, self.program.n
        below = len(self.levels)
        wide = [n, *(len(self.rows[e]) for e in range(below))]

        def keys(e: Entries, source: int) -> np.ndarray:
            """Return row · columns + column by x (0) or a level (from 1); -1 of others."""
            column = e.places.astype(np.int64) - program.first if source == 0 else self.row[e.places]
            mine = (program.level[e.places] == source - 1) & (e.rows >= 0) & (column >= 0)
            return np.where(mine, e.rows.astype(np.int64) * wide[source] + column, -1)

        found = [[keys(e, source) for e in entries] for source in range(below + 1)]
        sets = []
        for of_source in found:
            every = np.unique(np.concatenate([np.zeros(0, np.int64), *of_source]))
            sets.append(every[every >= 0])
        plans: list[tuple[int, ProductPlan]] = []
        for e in range(below):
            if len(sets[e + 1]):
                left = pattern_of(sets[e + 1], (rows, wide[e + 1]))
                plans.append((e, plan_product(left, self.levels[e].pattern)))
        if given is None:
            whole = np.unique(np.concatenate([sets[0], *(keys_of(plan.pattern) for _, plan in plans)]))
            given = pattern_of(whole, (rows, n))
        level = Level(given, self.out.size)
        whole = keys_of(given)
        find = self.out.block(whole)
        finds = [find, *(self.out.block(sets[e + 1]) for e in range(below))]
        for source, of_source in enumerate(found):
            for entry, wanted in zip(entries, of_source, strict=True):
                if (wanted >= 0).any():
                    self.out.write(entry.value, np.where(wanted < 0, -1, finds[source](wanted)), entry.stage)
        starts = np.cumsum([level.part.stop, *(len(s) for s in sets[1:])])
        for e, plan in plans:
            block = slice(int(starts[e]), int(starts[e]) + len(sets[e + 1]))
            places = find(keys_of(plan.pattern))
            level.products.append((e, block, plan, added(program, np.where(places < 0, -1, places - level.part.start))))
        return level

    def run(self, out: np.ndarray) -> list[np.ndarray]:
        """Return the values of each level, from local derivatives."""
        found: list[np.ndarray] = []
        for level in self.levels:
            data = out[level.part]
            for e, block, plan, add in level.products:
                add(plan(out[block], found[e]), data)
            found.append(data)
        return found


def steps_of(program: Program, roots: dict[int, list[Root]], read: np.ndarray,
             outputs: tuple[Group, ...] = ()) -> list[Loop | Linear]:  # fmt: skip
    """Return what to run, in order: loops that write roots, and store the numbers that these, or later ones, read.

    `roots`: by the number of their stage; -1 and below are outputs. `read`: numbers that others read.
    """
    read = read.copy()
    for number, group in enumerate(outputs):
        _note(read, group, roots.get(-1 - number, []))
    steps: list[Loop | Linear] = [
        _loop(group, roots[-1 - number]) for number, group in enumerate(outputs) if -1 - number in roots]  # fmt: skip
    for number in range(len(program.stages) - 1, -1, -1):
        stage = program.stages[number]
        stored = bool(read[stage.to].any())
        if isinstance(stage, Linear):
            if stored:
                read[stage.places] = True
                steps.insert(0, stage)
            continue
        own = list(roots.get(number, []))
        if stored:
            own.append(Root(stage.expression, "numbers", stage.to, stage.adds))
        if own:
            _note(read, stage, own)
            steps.insert(0, _loop(stage, own))
    return steps


def _note(read: np.ndarray, group: Group, roots: list[Root]) -> None:
    for k in leaves_of(root.expression for root in roots):
        if k < len(group.leaves):
            read[group.leaves[k]] = True


def _loop(group: Group, roots: list[Root], adjoint: np.ndarray | None = None) -> Loop:
    leaves = [Leaf("numbers", leaf) for leaf in group.leaves]
    if adjoint is not None:
        leaves.append(Leaf("adjoints", adjoint))
    return Loop(leaves, roots, len(group.to))


def run_steps(steps: list[Loop | Linear], numbers: np.ndarray, out: np.ndarray) -> None:
    """Run loops and products with matrices."""
    for step in steps:
        if isinstance(step, Linear):
            numbers[step.to] = step.whole @ numbers[step.places]
        else:
            step(numbers, out, out)


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
        outputs = tuple(used(group) for group in outputs)
        self.chain = Chain(program, np.zeros(program.size, bool), outputs, pattern)
        self.steps = steps_of(program, self.chain.out.roots, np.zeros(program.size, bool), outputs)

    def values(self, args: tuple[Any, ...]) -> np.ndarray:
        """Return the values on the pattern."""
        numbers, out = self.program.numbers(args), self.chain.out.array()
        run_steps(self.steps, numbers, out)
        return self.chain.run(out)[-1]

    def describe(self) -> str:
        """Say of what the tape consists."""
        return described(self.program, self.steps, sum(len(level.products) for level in self.chain.levels))


class HessianTape:
    """The Hessian of a recorded scalar, (n, n), on a symmetric pattern: equal to its transpose to the last bit."""

    def __init__(self, program: Program, output: int, pattern: SparsityPattern) -> None:
        self.program, n = program, program.n
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
        wx, ww = [], []
        for _, _, i, j in pairs:
            wx.append(np.where((level[i] > X) & (level[j] == X), stacked[i].astype(np.int64) * n + of_x(j), -1))
            ww.append(np.where((level[i] > X) & (level[j] > X), stacked[i].astype(np.int64) * w + stacked[j], -1))
        sets = [np.unique(np.concatenate([np.zeros(0, np.int64), *keys])) for keys in (wx, ww)]
        sets = [keys[keys >= 0] for keys in sets]
        finds = [self.out.block(keys) for keys in (keys_of(pattern), *sets)]
        lam: dict[int, Expression] = {}
        for (number, second, i, j), of_wx, of_ww in zip(pairs, wx, ww, strict=True):
            stage = stages[number]
            xx = np.where((level[i] == X) & (level[j] == X), of_x(i) * n + of_x(j), -1)
            places = np.full(len(i), -1)
            for find, keys in zip(finds, (xx, of_wx, of_ww), strict=True):
                places = np.where(keys >= 0, find(keys), places)
            lam[number] = program.table.make("leaf", len(stage.leaves))
            if (places >= 0).any():
                weighted = program.table.derived("multiply", second, lam[number])
                self.out.writes.append((weighted, places, number))
        self.out.finish()
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
        nnz = self.pattern.nnz
        self.parts = [slice(nnz, nnz + len(sets[0])), slice(nnz + len(sets[0]), nnz + len(sets[0]) + len(sets[1]))]
        if not w or not (len(sets[0]) or len(sets[1])):
            return
        program = self.program
        stacked = np.concatenate([keys_of(level.pattern) + first * n for level, first in zip(
            self.chain.levels, np.cumsum([0, *(len(rows) for rows in self.chain.rows)]), strict=False)])  # fmt: skip
        jacobian = pattern_of(stacked, (w, n))
        inner = plan_product(pattern_of(sets[1], (w, w)), jacobian) if len(sets[1]) else None
        keys = sets[0] if inner is None else np.unique(np.concatenate([sets[0], keys_of(inner.pattern)]))
        add_wx = added(program, np.searchsorted(keys, sets[0]))
        add_ww = None if inner is None else added(program, np.searchsorted(keys, keys_of(inner.pattern)))
        outer = plan_product(jacobian.T, pattern_of(keys, (w, n)))
        of_p, both = keys_of(outer.pattern), keys_of(self.pattern)
        mirrored = self.pattern.indices.astype(np.int64) * n + self.pattern.row_of_entry
        places = [np.minimum(np.searchsorted(of_p, k), max(len(of_p) - 1, 0)) for k in (both, mirrored)]
        if len(of_p):
            places = [np.where(of_p[at] == k, at, len(of_p)) for at, k in zip(places, (both, mirrored), strict=True)]
        mine = np.flatnonzero((places[0] < len(of_p)) | (places[1] < len(of_p)))
        make = program.table.make
        spread = Loop([Leaf("numbers", at[mine]) for at in places],
                      [Root(make("add", make("leaf", 0), make("leaf", 1)), "out", mine, adds=True)], len(mine),
                      ) if len(mine) else None  # fmt: skip
        self.products = jacobian.transpose_permutation, inner, len(keys), add_wx, add_ww, outer, spread

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
                    mine = np.flatnonzero(wants[stage.places])
                    self.back.append((stage.matrix.T.tocsr()[mine], self.adjoint[stage.to],
                                      self.adjoint[stage.places[mine]]))  # fmt: skip
                continue
            lam = program.table.make("leaf", len(stage.leaves))
            roots = list(self.out.roots.get(number, []))
            for k, slope in program.slopes[number].items():
                to = self.adjoint[stage.leaves[k]]
                if (to >= 0).any():
                    to = np.where(to < 0, self.adjoints, to)
                    roots.append(Root(make("multiply", slope, lam), "adjoints", to, adds=True))
            if roots:
                _note(read, stage, roots)
                self.back.append(_loop(stage, roots, self.adjoint[stage.to]))
        self.steps = steps_of(program, self.chain.out.roots, read)

    def values(self, args: tuple[Any, ...]) -> np.ndarray:
        """Return the values on the pattern."""
        program = self.program
        numbers, local, out = program.numbers(args), self.chain.out.array(), self.out.array()
        run_steps(self.steps, numbers, local)
        adjoints = np.zeros(self.adjoints + 1, program.dtype)
        adjoints[self.adjoint[self.output]] = 1
        for step in self.back:
            if isinstance(step, Loop):
                step(numbers, adjoints, out)
            else:
                matrix, source, to = step
                np.add.at(adjoints, to, matrix @ adjoints[source])
        found = out[: self.pattern.nnz]
        if self.products is not None:
            transposed, inner, size, add_wx, add_ww, outer, spread = self.products
            jacobian = np.concatenate(self.chain.run(local))
            q = np.zeros(size, program.dtype)
            add_wx(out[self.parts[0]], q)
            if inner is not None:
                add_ww(inner(0.5 * out[self.parts[1]], jacobian), q)
            if spread is not None:
                spread(np.append(outer(jacobian[transposed], q), program.dtype.type(0)), found, found)
        return found

    def describe(self) -> str:
        """Say of what the tape consists."""
        products = sum(len(level.products) for level in self.chain.levels)
        if self.products is not None:
            products += 1 + (self.products[1] is not None)
        return described(self.program, [*self.steps, *self.back], products)
