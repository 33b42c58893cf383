"""Loops over elements, written out and compiled: expressions of gathered numbers, added into planned places.

A loop reads and writes three arrays: the numbers of the program, their adjoints, and derivatives. Where an index is
constant or has a constant step it is computed, else it is read from a table. The text depends on the expressions
alone, not on sizes or parameters, so the disk cache also serves other sizes of the same function.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np

from sparsebp.core.errors import SparseBPError
from sparsebp.core.files import cache_folder, write_atomically
from sparsebp.jacobians.tape.expressions import KINKED, Expression, UnrecordedError, parts_of

Where = Literal["numbers", "adjoints", "out", "parts"]

CODE = {
    **{name: f"np.{name}({{0}})" for name in (
        "sqrt", "cbrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "arcsin",
        "arccos", "arctan", "sinh", "cosh", "tanh", "arcsinh", "arccosh", "arctanh", "floor", "ceil", "trunc", "rint",
        "isfinite", "isinf", "isnan", "signbit")},
    **{name: f"np.{name}({{0}}, {{1}})" for name in (
        "arctan2", "hypot", "logaddexp", "logaddexp2", "copysign", "fmod", "remainder", "floor_divide")},
    "add": "{0} + {1}", "subtract": "{0} - {1}", "multiply": "{0} * {1}", "divide": "{0} / {1}", "negative": "-{0}",
    "power": "{0} ** {1}", "absolute": "abs({0})", "sign": "np.sign({0})",
    "heaviside": "kind(0) if {0} < kind(0) else ({1} if {0} == kind(0) else (kind(1) if {0} > kind(0) else {0}))",
    "equal": "{0} == {1}", "not_equal": "{0} != {1}", "less": "{0} < {1}", "less_equal": "{0} <= {1}",
    "greater": "{0} > {1}", "greater_equal": "{0} >= {1}",
    "logical_and": "{0} & {1}", "logical_or": "{0} | {1}", "logical_xor": "{0} ^ {1}", "invert": "not {0}",
    "where": "{1} if {0} else {2}",
    "maximum": "{0} if ({0} >= {1}) | ({0} != {0}) else {1}", "minimum": "{0} if ({0} <= {1}) | ({0} != {0}) else {1}",
    "fmax": "{0} if ({0} >= {1}) | ({1} != {1}) else {1}", "fmin": "{0} if ({0} <= {1}) | ({1} != {1}) else {1}",
    "expit": "kind(1) / (kind(1) + np.exp(-{0}))", "erf": "kind(math.erf({0}))", "erfc": "kind(math.erfc({0}))",
    "logit": "np.log({0} / (kind(1) - {0}))",
    "log_expit": "({0} if {0} < kind(0) else kind(0)) - np.log1p(np.exp(-abs({0})))",
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


class Loop:
    """A compiled loop."""

    def __init__(self, leaves: Sequence[Leaf], roots: Sequence[Root], count: int) -> None:
        self.count = count
        self._table: list[np.ndarray] = []
        self._steps: list[int] = []
        self._run = compiled(self._text(leaves, roots))
        table = np.stack(self._table, axis=1) if self._table else np.zeros((1, 1))
        self._index = np.ascontiguousarray(table, np.uint32)
        self._at = np.array(self._steps or [0], np.int64)

    def __call__(self, numbers: np.ndarray, adjoints: np.ndarray, out: np.ndarray) -> None:
        """Run; all arrays have one dtype."""
        self._run(numbers, adjoints, out, self._index, self._at, self.count)

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
            lines.append(f"    {name} = at[{len(self._steps) - 2}]")
            if step == 1:
                return f"np.uint64({name} + i)", False
            lines.append(f"    b{name} = at[{len(self._steps) - 1}]")
            return f"np.uint64({name} + b{name} * i)", False
        self._table.append(index)
        return f"index[i, {len(self._table) - 1}]", False

    def _condition(self, root: Root, place: str) -> str:
        """Return the condition under which a root is written: always, also where nobody reads it."""
        return ""

    def _text(self, leaves: Sequence[Leaf], roots: Sequence[Root]) -> str:
        order = parts_of(root.expression for root in roots)
        before: list[str] = ["    kind = numbers.dtype.type"]
        inside: list[str] = []
        after: list[str] = []
        name: dict[int, str] = {}
        fixed = set[int]()  # the same at all turns
        for e in order:
            name[e.key] = f"v{len(name)}"
            if e.op == "number":
                number = "math.inf" if e.args[0] == math.inf else "-math.inf" if e.args[0] == -math.inf else (
                    "math.nan" if math.isnan(e.args[0]) else repr(e.args[0]))  # fmt: skip
                code, same = f"kind({number})", True
            elif e.op == "leaf":
                leaf = leaves[e.args[0]]
                place, same = self._place(leaf.places, before)
                code = f"{leaf.where}[{place}]"
            else:
                if e.op not in CODE:
                    raise UnrecordedError(f"numpy.{e.op}")
                code = CODE[e.op].format(*(name[a.key] for a in e.args))
                same = all(a.key in fixed for a in e.args)
            if same:
                fixed.add(e.key)
            (before if same else inside).append(f"{'' if same else '    '}    {name[e.key]} = {code}")
        for turn, root in enumerate(roots):
            value = name[root.expression.key]
            place, same = self._place(root.places, before)
            if same and root.adds and self.count > 1:
                before.append(f"    s{turn} = kind(0)")
                inside.append(f"        s{turn} += {value}")
                after.append(f"    {root.where}[{place}] += s{turn}")
            else:
                sign = "+=" if root.adds else "="
                inside.append(f"        {self._condition(root, place)}{root.where}[{place}] {sign} {value}")
        kinked = any(e.op in KINKED for e in order)
        kind = "kinked" if kinked else "smooth"
        lines = [f"# {kind}, with subnormal numbers", "def run(numbers, adjoints, out, index, at, count):"]
        return "\n".join([*lines, *before, "    for i in range(count):", *inside, *after, ""])


_compiled: dict[str, Callable[..., None]] = {}


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


def translated(text: str) -> Callable[..., None]:
    """Return the function of a loop's text, by Numba."""
    import numba
    from numba.core.typed_passes import NativeLowering

    from sparsebp.kernels.host.engine.compile import JIT, SERIAL, KernelCompiler

    class Compiler(KernelCompiler):
        """As of kernels, but subnormal numbers count: the values are those of NumPy."""

        lowering = NativeLowering

    name = "loop_" + hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    path = _on_disk(name, text)
    options = dict(SERIAL if text.startswith("# smooth") else JIT, cache=path is not None, pipeline_class=Compiler)
    module = ModuleType(f"{__name__}.{name}")
    sys.modules[module.__name__] = module  # where Numba looks for it when it reads machine code
    function = numba.njit(**options)(as_python(text, module, path or f"<{name}>"))
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
