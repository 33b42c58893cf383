"""A recorded function's values, and products of vectors with its derivatives, without the matrices.

A forward sweep carries tangents with the numbers; a reverse sweep collects adjoints, and for second derivatives their
tangents: forward over reverse. The loops are those of the matrices, with other roots.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from sparsebp.core.check import Array
from sparsebp.jacobians.tape.chain import CONSTANT, Buffers, Program, Turn, merged, transposed, turn_of
from sparsebp.jacobians.tape.expressions import CHEAP, Expression, gradient, parts_of
from sparsebp.jacobians.tape.loops import VECTORS, Leaf, Root
from sparsebp.jacobians.tape.record import Group, Linear

Kind = Literal["value", "jvp", "vjp", "hvp"]
"""The outputs y, J v, wᵀJ, and the derivative of wᵀJ along v."""


SWEEP, CALL, PRODUCT = 12_000, 800, 5000
"""Nanoseconds of a sweep without its loops, of a function of NumPy without its elements, of a product of SciPy's."""
GATHERED, CHEAPLY, IN_VECTOR, SLOWLY = 0.5, 0.15, 1.3, 15.0
"""Of an element in a loop: read or written, of arithmetic, of functions in vectors, of others."""
BY_NUMPY, FUNCTION_BY_NUMPY, SINE_BY_NUMPY = 0.25, 1.2, 5.5
"""Of an element in NumPy where it is fastest, on processors with AVX-512: arithmetic, functions, sines of float64."""


def pays(program: Program, outputs: tuple[Group, ...]) -> bool:
    """Return whether loops compute the outputs in less time than NumPy's functions probably do, one pass each."""
    by_loops, by_numpy, longest = float(SWEEP), 0.0, dict[int, float]()
    for stage in (*program.stages, *outputs):
        if isinstance(stage, Linear):
            by_numpy += PRODUCT
            continue
        length, parts = len(stage.to), parts_of([stage.expression])
        by_loops += GATHERED * length * (len(stage.leaves) + 1)
        by_numpy += (CALL + BY_NUMPY * length) * stage.adds
        for e in parts:
            if e.op in ("leaf", "number"):
                continue
            by_loops += length * (CHEAPLY if e.op in CHEAP else IN_VECTOR if e.op in VECTORS else SLOWLY)
            sine = e.op in ("sin", "cos") and program.dtype == np.float64
            once = BY_NUMPY if e.op in CHEAP else SINE_BY_NUMPY if sine else FUNCTION_BY_NUMPY
            longest[e.key] = max(longest.get(e.key, 0), CALL + length * once)  # several groups may share it
    return program.device is not None or by_loops < by_numpy + sum(longest.values())


class Sweep:
    """One kind of sweep of a program with outputs.

    Numbers, adjoints and tangents have a place for each number of the program. Behind the adjoints stand those of the
    outputs, w; behind the tangents the results along v: tangents of outputs, or of adjoints.
    """

    def __init__(self, program: Program, outputs: tuple[Group, ...], kind: Kind) -> None:
        self.program, self.kind, self._buffers = program, kind, Buffers(program)
        self.outputs, size = sum(len(group.to) for group in outputs), program.size
        self._forward, self._back = kind in ("jvp", "hvp"), kind in ("vjp", "hvp")
        self._slopes = [*program.slopes, *map(program.slopes_of, outputs)]
        stages: list[Any] = [*program.stages, *outputs]
        read = self._read(stages, len(outputs))
        self._first = len(program.stages)
        turns: list[Turn | Linear] = []
        for number, stage in enumerate(stages):
            output = number >= self._first
            if not output and not read[stage.to].any():
                continue
            if isinstance(stage, Linear):
                turns.append(stage)
            elif not output or not self._back:
                turns.append(self._turn(stage, number, output))
        self.steps: list[Any] = []
        for turn in merged(turns, size):
            if isinstance(turn, Turn):
                self.steps.append(program.loop(*turn))
                continue
            self.steps.append(program.multiplied(turn.whole, turn.places, turn.to))
            if self._forward:
                self.steps.append(program.multiplied(turn.matrix, turn.places, turn.to, "out"))
        self.back = list(self._backwards(stages, read)) if self._back else []
        sums = [stage.to for stage in program.stages if isinstance(stage, Group) and stage.adds]
        self._sums = program.kept(np.unique(np.concatenate([np.zeros(0, np.int64), *sums])))

    def _read(self, stages: list[Any], outputs: int) -> np.ndarray:
        """Return the numbers on which the outputs depend."""
        read = np.zeros(self.program.size, bool)
        for k, stage in enumerate(stages[::-1]):
            if k < outputs or read[stage.to].any():
                for places in [stage.places] if isinstance(stage, Linear) else stage.leaves:
                    read[places] = True
        return read

    def _turn(self, group: Group, number: int, output: bool) -> Turn:
        """Return the loop that stores a group's values, and their tangents."""
        size, slopes = self.program.size, self._slopes[number]
        roots, tangents = [], [Leaf("out", leaf) for leaf in group.leaves] if self._forward else []
        if not output:
            roots.append(Root(group.expression, "numbers", group.to, group.adds))
        elif not self._forward:
            roots.append(Root(group.expression, "out", size + group.to, adds=False))
        if self._forward:
            along = self._along(slopes, len(group.leaves))
            roots.append(Root(along, "out", group.to + size * output, group.adds))
        return turn_of(group, roots, *tangents)

    def _along(self, slopes: dict[int, Expression], leaves: int) -> Expression:
        """Return the derivative along tangents, which are leaves behind those that they belong to."""
        t = self.program.table
        found = t.number(0)
        for k, slope in slopes.items():
            found = t.derived("add", found, t.derived("multiply", slope, t.make("leaf", leaves + k)))
        return found

    def _backwards(self, stages: list[Any], read: np.ndarray) -> Iterable[Any]:
        """Yield what collects adjoints, and their tangents."""
        program, t, size = self.program, self.program.table, self.program.size
        active = program.level > CONSTANT
        nowhere = size + self.outputs
        for number in range(len(stages) - 1, -1, -1):
            stage, output = stages[number], number >= self._first
            if not output and not (read & active)[stage.to].any():
                continue
            if isinstance(stage, Linear):
                places = np.where(active[stage.places], stage.places, -1)
                yield transposed(program, stage.matrix, places, stage.to)
                if self._forward:
                    behind = np.where(places < 0, -1, size + places)
                    yield transposed(program, stage.matrix, behind, size + stage.to, "out")
                continue
            count, slopes, roots = len(stage.leaves), self._slopes[number], []
            of = stage.to + size * output
            others = [Leaf("adjoints", of)]
            weight = t.make("leaf", count)
            if self._forward:
                others = [*(Leaf("out", leaf) for leaf in stage.leaves), Leaf("adjoints", of), Leaf("out", size + of)]
                weight = t.make("leaf", 2 * count)
            for k, slope in slopes.items():
                to = np.where(active[stage.leaves[k]], stage.leaves[k], nowhere)
                roots.append(Root(t.derived("multiply", slope, weight), "adjoints", to, True, nowhere))
                if self._forward:
                    second = self._along(gradient(slope, slopes), count)
                    along = t.derived("multiply", second, weight)
                    if not output:  # whose adjoints are given
                        along = t.derived("add", along,
                                          t.derived("multiply", slope, t.make("leaf", 2 * count + 1)))  # fmt: skip
                    roots.append(Root(along, "out", size + to, True, size + nowhere))
            if roots:
                yield program.loop(*turn_of(stage, roots, *others))

    def __call__(self, args: tuple[Any, ...], *vectors: Array) -> Array:
        """Run the sweep along v (n,), with w (m,), or along v with w."""
        program, size, first, n = self.program, self.program.size, self.program.first, self.program.n
        with self._buffers.taken() as array:
            numbers = program.numbers(args, array)
            out = array("out", 2 * size + self.outputs + 1, lambda found: found.fill(0))
            if self._forward:
                out[self._sums] = 0
                out[first : first + n] = vectors[0]
            for step in self.steps:
                step(numbers, out, out)
            if not self._back:
                return out[size : size + self.outputs].copy()
            adjoints = array("adjoints", size + self.outputs + 1)
            adjoints[:size] = 0
            adjoints[size : size + self.outputs] = vectors[-1]
            if self._forward:
                out[size:] = 0
            for step in self.back:
                step(numbers, adjoints, out)
            found = out[size + first :] if self._forward else adjoints[first:]
            return found[:n].copy()
