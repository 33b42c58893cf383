"""Every operation of loops, and awkward numbers for them: of the host's loops, and of kernels."""

from types import ModuleType

import numpy as np
from scipy import special

from sparsebp.jacobians.tape import loops
from sparsebp.jacobians.tape.expressions import Table, evaluated
from sparsebp.jacobians.tape.loops import CODE, OF_BOOLS, Leaf, Root

BOOLS = ("logical_and", "logical_or", "logical_xor", "invert")
MOST = {np.float32: 3e38, np.float64: 1.7e308}


def awkward(dtype, least):
    """Return all pairs: NaN, zeros of both signs, infinity, ties, numbers that are huge, and not smaller than this."""
    some = [0, 0.1, 0.3, 0.5, 1, 1.5, 2, 3, 7, 20, 100, 800, 2**53 - 1, 1e30, MOST[dtype], 1e-3, least, np.inf]
    some = np.array([*some, np.nan, *(-number for number in some)], dtype)
    return tuple(side.ravel() for side in np.meshgrid(some, some))


def in_python(text):
    """Return the function of a loop's text as Python runs it, with NumPy's functions in place of those of vectors."""
    module = ModuleType("loop")
    function = loops.as_python(text, module)
    module.in_parts = lambda body, team, parts, args: [body(part, *args) for part in range(parts)]

    def over_rows(of):
        def run(room, source, to, count):
            room[to : to + count] = of(room[source : source + count])

        return run

    vars(module).update({f"rows_of_{name}": over_rows(getattr(np, name, special.expit)) for name in loops.VECTORS})
    return np.errstate(all="ignore")(function)


def check_every_operation(make_loop, a, b, *, exact):
    """Compare a loop, made of leaves, roots and a length, with NumPy and SciPy; `exact`: zeros have their signs."""
    dtype, size, table, values = a.dtype, len(a), Table(), []
    one, other = table.make("leaf", 0), table.make("leaf", 1)
    less, unknown = table.make("less", one, other), table.make("isnan", one)
    for op, code in CODE.items():
        operands = [less, unknown] if op in BOOLS else [less, one, other] if op == "where" else [one, other]
        value = table.make(op, *operands[: 3 if "{2}" in code else 2 if "{1}" in code else 1])
        values.append(table.make("where", value, table.number(2), table.number(-1.5)) if op in OF_BOOLS else value)
    leaves = [Leaf("numbers", size * k + np.arange(size)) for k in (0, 1)]
    loop = make_loop(leaves, [Root(value, "out", size * k + np.arange(size), False) for k, value in enumerate(values)],
                     size)  # fmt: skip
    out = np.zeros(size * len(values), dtype)
    loop(np.concatenate([a, b]), out, out)
    info = np.finfo(dtype)
    for value, found in zip(values, out.reshape(-1, size), strict=True):
        expected = evaluated(value, {0: a, 1: b}).astype(dtype)
        room = 4 * info.smallest_subnormal if exact else info.tiny
        np.testing.assert_allclose(found, expected, 100 * info.eps, room, err_msg=value.op)
        if exact and value.op not in ("maximum", "minimum", "fmax", "fmin"):  # of zeros NumPy, too, gives any
            wrong = (np.signbit(found) != np.signbit(expected)) & ~np.isnan(expected)
            assert not wrong.any(), (value.op, a[wrong], b[wrong], found[wrong])
    return loop
