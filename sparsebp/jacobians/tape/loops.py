"""Loops over elements, written out and compiled: expressions of gathered numbers, added into planned places.

A loop reads and writes three arrays: the numbers of the program, their adjoints, and derivatives. Where an index is
constant or has a constant step it is computed, else it is read from a table. The text depends on the expressions
alone, not on sizes or parameters, so the disk cache also serves other sizes of the same function.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np

from sparsebp.core.errors import SparseBPError
from sparsebp.core.files import cache_folder, write_atomically
from sparsebp.jacobians.tape.expressions import CHEAP, KINKED, Expression, UnrecordedError, parts_of

Where = Literal["numbers", "adjoints", "out", "parts"]
Way = Literal["alone", "parts", "lanes"]
"""Of a loop: on one thread, in parts for several, or in parts and for several samples."""
LANES, WIDEST = 8, 64
"""Samples of a batch that are computed together, a cache line of float64; most samples of a call, a multiple of it."""
GRAIN, MOST_PARTS = 1 << 17, 32
"""Operations that one part should at least have, some 60 microseconds; parts of a loop."""
COSTLY, IN_VECTORS = 16, 4
"""Operations that a power, or another such function, takes as long as; and a function that is computed in vectors."""
VECTORS = frozenset({"exp", "expm1", "expit", "tanh", "log", "log1p", "sin", "cos"})
"""Functions that loops on the host compute in vectors, for a block of turns: see `functions`."""
BLOCK = 64
"""Turns of a block."""
OF_BOOLS = {"equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "logical_and", "logical_or",
            "logical_xor", "invert", "isfinite", "isinf", "isnan", "signbit"}  # fmt: skip
ALONE = "def run(numbers, adjoints, out, index, at, count):"
BODY = """def body(part, parts, phase, phases, stride, numbers, adjoints, out, room, sums, index, at, cuts):
    chunk = phase + part * phases"""
ENTRY = """
def run(team, *args):
    in_parts(body, team, args[0], args)
"""

CODE = {
    **{name: f"np.{name}({{0}})" for name in (
        "sqrt", "cbrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "arcsin",
        "arccos", "arctan", "sinh", "cosh", "tanh", "arcsinh", "arccosh", "arctanh", "floor", "ceil", "trunc", "rint",
        "isfinite", "isinf", "isnan", "signbit")},
    **{name: f"np.{name}({{0}}, {{1}})" for name in (
        "arctan2", "hypot", "logaddexp", "logaddexp2", "copysign", "fmod")},
    "remainder": "np.copysign(np.remainder({0}, {1}), {1})",  # Numba's zeros have another sign
    "floor_divide": "{0} / {1} if {1} == kind(0) else np.copysign(np.rint(({0} - np.fmod({0}, {1})) / {1})"
                    " - kind(np.fmod({0}, {1}) != np.remainder({0}, {1})), {0} / {1})",
    "add": "{0} + {1}", "subtract": "{0} - {1}", "multiply": "{0} * {1}", "divide": "{0} / {1}", "negative": "-{0}",
    "power": "{0} ** {1}", "absolute": "abs({0})", "sign": "np.sign({0}) if {0} != kind(0) else kind(0)",
    "heaviside": "kind(0) if {0} < kind(0) else ({1} if {0} == kind(0) else (kind(1) if {0} > kind(0) else {0}))",
    "equal": "{0} == {1}", "not_equal": "{0} != {1}", "less": "{0} < {1}", "less_equal": "{0} <= {1}",
    "greater": "{0} > {1}", "greater_equal": "{0} >= {1}",
    "logical_and": "{0} & {1}", "logical_or": "{0} | {1}", "logical_xor": "{0} ^ {1}", "invert": "not {0}",
    "where": "{1} if {0} else {2}",
    "maximum": "{0} if ({0} >= {1}) | ({0} != {0}) else {1}", "minimum": "{0} if ({0} <= {1}) | ({0} != {0}) else {1}",
    "fmax": "{0} if ({0} >= {1}) | ({1} != {1}) else {1}", "fmin": "{0} if ({0} <= {1}) | ({1} != {1}) else {1}",
    "expit": "kind(1) / (kind(1) + np.exp(-{0}))", "erf": "kind(math.erf({0}))", "erfc": "kind(math.erfc({0}))",
    "logit": "np.log({0} / (kind(1) - {0}))",
    "log_expit": "({0} if {0} < kind(0) else kind(-0.0)) - np.log1p(np.exp(-abs({0})))",
    "xlogy": "kind(0) if ({0} == kind(0)) & ({1} == {1}) else {0} * np.log({1})",
    "ndtr": "kind(0.5) * kind(math.erfc({0} * kind(-0.7071067811865476)))",
}  # fmt: skip
"""Operations of loops, in Python, as Numba takes it: {0} and so on are operands."""


class Leaf(NamedTuple):
    """What an expression reads: an array, and a place in it for each turn of the loop."""

    where: Where
    places: np.ndarray


class Root(NamedTuple):
    """An expression, and where its value goes at each turn: added to what is there, or in place of it.

    Values at the place `nowhere` are never read.
    """

    expression: Expression
    where: Where
    places: np.ndarray
    adds: bool
    nowhere: int = -1


Parts = tuple[Callable[..., None], np.ndarray, int, tuple[int, int]]
"""Of a loop: what runs it, where its parts begin and end, their phases, and the room for each and for its samples."""


class Loop:
    """A compiled loop: of the numbers of one x, (size,), or of a batch of x, (size, B), B a multiple of LANES.

    Long ones are cut into parts for threads, by their length alone: results do not depend on the number of threads.
    Parts that add to the same places, next to each other, run in two phases.
    """

    _vectors: Container[str] = VECTORS

    def __init__(self, leaves: Sequence[Leaf], roots: Sequence[Root], count: int) -> None:
        self.count, self._given = count, (leaves, roots)
        work = count * sum(1 if e.op in CHEAP else IN_VECTORS if e.op in self._vectors else COSTLY
                           for e in parts_of(root.expression for root in roots))  # fmt: skip
        self._cuts, self._phases = cuts_of(roots, count, work // GRAIN)
        self._in_lanes: Parts | None = None  # what a batch needs, made at the first one
        self._work = work
        way: Way = "alone" if len(self._cuts) == 2 else "parts"
        self._run: Parts = compiled(self._text(leaves, roots, way)), self._cuts, self._phases, self._room
        table = np.stack(self._table, axis=1) if self._table else np.zeros((1, 1))
        self._index = np.ascontiguousarray(table, np.uint32)
        self._at = np.array(self._steps or [0], np.int64)

    def __call__(self, numbers: np.ndarray, adjoints: np.ndarray, out: np.ndarray) -> None:
        """Run; all arrays have one dtype."""
        if numbers.ndim == 2:
            self._run_batch(numbers, adjoints, out)
        elif len(self._cuts) == 2:
            self._run[0](numbers, adjoints, out, self._index, self._at, self.count)
        else:
            self._run_parts(*self._run, numbers, adjoints, out)

    def _run_batch(self, numbers: np.ndarray, adjoints: np.ndarray, out: np.ndarray) -> None:
        if self._in_lanes is None:
            text = self._text(*self._given, "lanes")  # has the same places, in the same order
            cuts, phases = cuts_of(self._given[1], self.count, self._work * WIDEST // GRAIN)
            self._in_lanes = compiled(text), cuts, phases, self._room
        self._run_parts(*self._in_lanes, numbers, adjoints, out)

    def _run_parts(self, run: Callable[..., None], cuts: np.ndarray, phases: int, room_of_part: tuple[int, int],
                   numbers: np.ndarray, adjoints: np.ndarray, out: np.ndarray) -> None:  # fmt: skip
        from sparsebp.kernels.host.engine.threads import team

        parts, batch = len(cuts) - 1, numbers.shape[1:]
        sums = np.zeros((parts, max(len(self._sums), 1), *batch), numbers.dtype)
        size, fixed = room_of_part
        room = np.empty(parts * (size + fixed * math.prod(batch)), numbers.dtype)
        flat = [array.reshape(-1) for array in (numbers, adjoints, out, room, sums)]
        for phase in range(phases):
            own = len(range(phase, parts, phases))
            run(team(own), own, phase, phases, *(batch or (1,)), *flat, self._index, self._at, cuts)
        arrays = {"numbers": numbers, "adjoints": adjoints, "out": out}
        for k, (where, place) in enumerate(self._sums):
            arrays[where][place] += sums[:, k].sum(axis=0)

    def _place(self, index: np.ndarray, lines: list[str]) -> tuple[str, bool]:
        """Return the index at turn i as text, and whether it is the same at all turns."""
        first = int(index[0])
        step = int(index[1]) - first if len(index) > 1 else 0
        if (index == first).all():
            self._steps.append(first)
            return f"np.uint64(at[{len(self._steps) - 1}])", True
        if (np.diff(index) == step).all():
            self._steps += [first, step]
            name = f"a{len(self._steps) - 2}"
            lines.append(f"{name} = at[{len(self._steps) - 2}]")
            if step == 1:
                return f"np.uint64({name} + i)", False
            lines.append(f"b{name} = at[{len(self._steps) - 1}]")
            return f"np.uint64({name} + b{name} * i)", False
        self._table.append(index)
        return f"index[i, {len(self._table) - 1}]", False

    def _condition(self, root: Root, place: str) -> str:
        """Return the condition under which a root is written: always, also where nobody reads it."""
        return ""

    def _text(self, leaves: Sequence[Leaf], roots: Sequence[Root], way: Way = "alone") -> str:
        self._table: list[np.ndarray] = []
        self._steps: list[int] = []
        self._sums: list[tuple[Where, int]] = []  # roots that are summed over all turns
        order = parts_of(root.expression for root in roots)
        lanes = way == "lanes"
        before: list[str] = ["kind = numbers.dtype.type"]
        starts: list[str] = []  # of lanes, at each turn
        fixed_lines: list[str] = []  # of each lane, before the turns
        after: list[str] = []
        name: dict[int, str] = {}
        code: dict[int, str] = {}  # what differs between turns, or lanes
        varying = set[int]()  # what differs between turns
        fixed = 0  # numbers of each sample that are kept for all turns
        base = "" if way == "alone" else "base + "

        def at_lane(where: str, place: str, same: bool) -> str:
            """Return the element of a lane."""
            if not lanes:
                return f"{where}[{place}]"
            lines = before if same else starts
            lines.append(f"p{len(before) + len(starts)} = np.int64({place}) * stride")
            return f"{where}[np.uint64({lines[-1].split()[0]} + lane + b)]"

        for e in order:
            name[e.key] = f"v{len(name)}"
            if e.op == "number":
                number = "math.inf" if e.args[0] == math.inf else "-math.inf" if e.args[0] == -math.inf else (
                    "math.nan" if math.isnan(e.args[0]) else repr(e.args[0]))  # fmt: skip
                before.append(f"{name[e.key]} = kind({number})")
                continue
            if e.op == "leaf":
                leaf = leaves[e.args[0]]
                place, same = self._place(leaf.places, before)
                text = at_lane(leaf.where, place, same)
            else:
                if e.op not in CODE:
                    raise UnrecordedError(f"{e.op} cannot be compiled")
                text = CODE[e.op].format(*(name[a.key] for a in e.args))
                same = varying.isdisjoint(a.key for a in e.args) and not (lanes and e.op in OF_BOOLS)
            if not same:
                varying.add(e.key)
                code[e.key] = text
            elif lanes:
                code[e.key] = f"room[np.uint64(base + ROOM + {fixed} * stride + lane + b)]"
                fixed_lines += [f"{name[e.key]} = {text}", f"{code[e.key]} = {name[e.key]}"]
                fixed += 1
            else:
                before.append(f"{name[e.key]} = {text}")
        passes, rows = passes_of(order, varying, self._vectors)
        pitch, size = (2 * LANES, len(roots) * LANES) if lanes else (BLOCK, 0)  # vectors of float32 have 2 * LANES
        at = {key: f"{base}{size + row * pitch}" for key, row in rows.items()}
        in_room = {key: f"room[np.uint64({place} + {'b' if lanes else 'i - begin'})]" for key, place in at.items()}
        size += len(rows) * pitch
        self._room = size, fixed
        each = f"for b in range({LANES}):" if lanes else "for i in range(begin, end):"
        inside: list[str] = []
        known = set[int]()  # in the room
        for operands, functions in passes:
            lines = [f"{name[e.key]} = {in_room[e.key] if e.key in known else code[e.key]}"
                     for e in parts_of(operands, known) if e.key in code]  # fmt: skip
            lines += [f"{in_room[e.key]} = {name[e.key]}" for e in operands]
            inside += [each, *indented(lines)] if operands else []
            known |= {e.key for e in (*operands, *functions)}
            inside += [f"rows_of_{e.op}(room, {at[e.args[0].key]}, {at[e.key]}, {LANES if lanes else 'end - begin'})"
                       for e in functions]  # fmt: skip
        lines = [f"{name[e.key]} = {in_room[e.key] if e.key in known else code[e.key]}"
                 for e in parts_of((root.expression for root in roots), known) if e.key in code]  # fmt: skip
        ends: list[str] = []
        for turn, root in enumerate(roots):
            value, kept = name[root.expression.key], f"room[np.uint64(base + {turn * LANES} + b)]"
            place, same = self._place(root.places, before)
            summed = same and root.adds and self.count > 1
            nth = len(self._sums)
            if summed:
                self._sums.append((root.where, int(root.places[0])))
            if lanes:
                lines.append(f"{kept} = {value}")
                to = (f"sums[np.uint64((chunk * SUMS + {nth}) * stride + lane + b)]" if summed
                      else at_lane(root.where, place, same))  # fmt: skip
                ends += [each, *indented([f"{to} {'+' * root.adds}= {kept}"])]
            elif summed:
                before.append(f"s{turn} = kind(0)")
                lines.append(f"s{turn} += {value}")
                to = f"{root.where}[{place}] +" if way == "alone" else f"sums[chunk * SUMS + {nth}] "
                after.append(f"{to}= s{turn}")
            else:
                sign = "+=" if root.adds else "="
                lines.append(f"{self._condition(root, place)}{root.where}[{place}] {sign} {value}")
        kind = "kinked" if any(e.op in KINKED for e in order) else "smooth"
        first, last = ("0", "count") if way == "alone" else ("cuts[chunk]", "cuts[chunk + 1]")
        if lanes:
            samples = f"for lane in range(0, stride, {LANES}):"
            before.append(f"base = chunk * (ROOM + {fixed} * stride)")
            before += [samples, *indented([each, *indented(fixed_lines)])] if fixed else []
            inside += [each, *indented(lines), *ends]
            turns = [f"for i in range({first}, {last}):", *indented([*starts, samples, *indented(inside)])]
        elif passes:
            before.append(f"room = np.empty({size}, numbers.dtype)" if way == "alone" else "base = chunk * ROOM")
            inside = [f"end = min(begin + {BLOCK}, {last})", *inside, each, *indented(lines)]
            turns = [f"for begin in range({first}, {last}, {BLOCK}):", *indented(inside)]
        else:
            turns = [f"for i in range({'' if way == 'alone' else first + ', '}{last}):", *indented(lines)]
        body = indented([*before, *turns, *after])
        if way == "alone":
            lines = [
                f"# {kind}, with subnormal numbers",
                "def run(numbers, adjoints, out, index, at, count):",
                *body,
                "",
            ]
        else:
            lines = [f"# {kind}, with subnormal numbers in all parts", BODY, *body, ENTRY]
        return "\n".join(lines).replace("SUMS", str(max(len(self._sums), 1))).replace("ROOM", str(size))


def indented(lines: Iterable[str]) -> list[str]:
    """Return lines of Python, one level deeper."""
    return [f"    {line}" for line in lines]


Pass = tuple[list[Expression], list[Expression]]
"""Of a block of turns: what is computed and kept, operands among it, and the functions of vectors that follow."""


def passes_of(
    order: Sequence[Expression], varying: set[int], vectors: Container[str]
) -> tuple[list[Pass], dict[int, int]]:
    """Return the passes over a block before the last one, and the row in which each of their numbers is kept.

    What takes long is kept, too, rather than computed again.
    """
    level: dict[int, int] = {}
    for e in order:
        below = (level.get(a.key, 0) for a in e.args if isinstance(a, Expression))
        level[e.key] = max(below, default=0) + (e.op in vectors and e.key in varying)
    passes: list[Pass] = []
    rows: dict[int, int] = {}
    for number in range(1, 1 + max(level.values(), default=0)):
        functions = [e for e in order if e.op in vectors and e.key in varying and level[e.key] == number]
        operands = {e.args[0].key for e in functions}
        kept = [e for e in parts_of((e.args[0] for e in functions), rows) if e.key in varying and e.key not in rows
                and (e.key in operands or not (e.op in CHEAP or e.op in OF_BOOLS))]  # fmt: skip
        for e in (*kept, *functions):
            rows[e.key] = len(rows)
        passes.append((kept, functions))
    return passes, rows


_compiled: dict[str, Callable[..., None]] = {}


def cuts_of(roots: Sequence[Root], count: int, parts: int) -> tuple[np.ndarray, int]:
    """Return where the parts of a loop begin and end, and in how many phases they run.

    One part, if others than neighbours write to the same place.
    """
    parts = min(parts, MOST_PARTS, count)
    cuts = np.arange(parts + 1) * count // max(parts, 1)
    phases, part = 1, np.repeat(np.arange(parts), np.diff(cuts))
    for where in ("numbers", "adjoints", "out") if parts > 1 else ():
        mine = [root for root in roots if root.where == where and not (root.adds and _same_at_all(root.places))]
        if not mine:
            continue
        size = 1 + max(int(root.places.max()) for root in mine)
        first, last = np.full(size, parts), np.full(size, -1)
        for root in mine:
            inside = root.places != root.nowhere
            np.minimum.at(first, root.places[inside], part[inside])
            np.maximum.at(last, root.places[inside], part[inside])
        phases = max(phases, 1 + int((last - first).max()))
    return (cuts, phases) if parts > 1 and phases <= 2 else (np.array([0, count]), 1)


def _same_at_all(places: np.ndarray) -> bool:
    return bool((places == places[0]).all())


def compiled(text: str) -> Callable[..., None]:
    """Return the function of a loop's text, compiled at its first call, or read from the disk."""
    found = _compiled.get(text)
    if found is None:
        found = _compiled[text] = translated(text)
    return found


FINITE = """# smooth
def run(numbers, adjoints, out, index, at, count):
    wrong = False
    for i in range(count):
        wrong |= (numbers[i] - numbers[i]) != 0
    at[0] = wrong
"""
_NO_INDEX = np.zeros((1, 1), np.uint32)


def finite(values: np.ndarray) -> bool:
    """Return whether all numbers are finite, in half the time of their sum."""
    wrong = np.zeros(1, np.int64)
    compiled(FINITE)(values, values, values, _NO_INDEX, wrong, len(values))
    return not wrong[0]


SAME = """# smooth
def run(one, other, found):
    wrong = False
    for i in range(len(one)):
        wrong |= one[i] != other[i]
    found[0] = wrong
"""


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two arrays of one shape and dtype hold the same bytes, without an array in between."""
    wrong = np.zeros(1, np.bool_)
    compiled(SAME)(*(np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (one, other)), wrong)
    return not wrong[0]


def translated(text: str) -> Callable[..., None]:
    """Return the function of a loop's text, by Numba."""
    import numba
    from numba.core.typed_passes import NativeLowering

    from sparsebp.kernels.host.engine.compile import JIT, SERIAL, ExactLowering, KernelCompiler, _InnerCompiler
    from sparsebp.kernels.host.engine.threads import in_parts

    functions: dict[str, Any] = {}
    if "rows_of_" in text:
        from sparsebp.jacobians.tape.functions import ROWS, version

        functions, text = ROWS, f"{text}# {version()}\n"

    class Compiler(KernelCompiler):
        """As of kernels, but subnormal numbers count: the values are those of NumPy."""

        lowering = NativeLowering

    class Body(_InnerCompiler):
        """Of what runs in parts: numbers, derivatives and what is kept in between are different arrays."""

        lowering = ExactLowering

        def _compile_core(self) -> Any:
            self.state.flags.noalias = True
            return super()._compile_core()

    name = "loop_" + hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    path = _on_disk(name, text)
    options = dict(SERIAL if text.startswith("# smooth") else JIT, cache=path is not None, pipeline_class=Compiler)
    module = ModuleType(f"{__name__}.{name}")
    sys.modules[module.__name__] = module  # where Numba looks for it when it reads machine code
    scope = vars(module)
    scope |= functions
    function = as_python(text, module, path or f"<{name}>")
    if "body" in scope:
        inner = dict(options, cache=False, no_cpython_wrapper=True, pipeline_class=Body)
        scope |= {"body": numba.njit(**inner)(scope["body"]), "in_parts": in_parts}
    function = numba.njit(**options)(function)
    if path is not None:
        _compile_unreadable(function._cache)
    return function


def _compile_unreadable(cache: Any) -> None:
    """Let Numba compile anew where machine code on the disk cannot be read, such as a file that was cut off."""
    read = cache.load_overload

    def load(*args: Any) -> Any:
        try:
            return read(*args)
        except Exception:  # whatever a pickle raises that is none
            cache.flush()
            return None

    cache.load_overload = load


def as_python(text: str, module: ModuleType, path: str = "<loop>") -> Callable[..., None]:
    """Return the function of a loop's text, as Python runs it."""
    scope = vars(module)
    scope |= {"np": np, "math": math}
    exec(compile(text, path, "exec"), scope)
    function: Callable[..., None] = scope["run"]
    return function


def _on_disk(name: str, text: str) -> str | None:
    """Return a file that holds the text, next to which Numba keeps the machine code; None: there can be none."""
    folder = cache_folder()
    if folder is None:
        return None
    path = folder / "tape" / f"{name}.py"
    try:
        if not path.exists():  # its time is a part of Numba's key
            _say()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text.encode())
    except (OSError, SparseBPError):  # a home that cannot be written to
        return None
    return str(path)


_said: list[bool] = []


def _say() -> None:
    """Say once, where somebody looks, why nothing seems to happen."""
    if not _said and ("ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())):
        _said.append(True)
        print("sparsebp: compiling derivatives of functions, once; they are kept on disk.", file=sys.stderr, flush=True)
