"""The compiled tape: a function of NumPy's, recorded once, whose derivatives are loops, chained by planned products."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend, host_pool
from sparsebp.core.check import Array
from sparsebp.core.errors import PatternError, SparseBPError
from sparsebp.jacobians.tape.chain import HessianTape, JacobianTape, Program, keys_of
from sparsebp.jacobians.tape.environment import Environment
from sparsebp.jacobians.tape.expressions import UnrecordedError
from sparsebp.jacobians.tape.loops import LANES, WIDEST, finite
from sparsebp.jacobians.tape.record import Group, Recorder
from sparsebp.jacobians.tape.sweeps import Kind, Sweep, pays
from sparsebp.jacobians.trees import replaced
from sparsebp.patterns.pattern import SparsityPattern

__all__ = ["TapeDerivatives", "UnrecordedError", "plan_tape"]

MOST_CHANGES = 3
"""How often the environment of a function may change, and the record is made anew."""


def plan_tape(
    f: Callable[..., Any], args: tuple[Any, ...], argnum: int, floats: list[int], pattern: SparsityPattern,
    scalar: bool, device: Any = None,
) -> JacobianTape | HessianTape:  # fmt: skip
    """Record a function, and plan its Jacobian, or the Hessian of a scalar one, on a pattern.

    Parameters
    ----------
    f
        The function, of all arguments.
    args, argnum, floats
        Arguments, the place of x, and the places of all that may have other values later.
    pattern
        Where derivatives may be: all others are zero.
    scalar
        Whether f returns a scalar.
    device
        The launchers of the device on which the tape runs (`sparsebp.kernels.on_device`), or None: on the host.

    Raises
    ------
    UnrecordedError, TracingError
        Something in it has no local form.
    """
    recorder = Recorder(args[argnum].dtype)
    given = list(args)
    with np.errstate(all="ignore"):
        for place in sorted(floats, key=lambda place: place != argnum):  # x first
            given[place] = recorder.input(place, args[place])
        elements = recorder.output(f(*given))
        stored = recorder.stored(elements) if scalar else None
    program = Program(recorder, argnum, device)
    if stored is not None and stored.places is not None:
        return HessianTape(program, int(stored.places[0]), pattern)
    every = np.arange(elements.size)
    outputs = tuple(Group(p.expression, p.leaves, every if p.at is None else p.at, False) for p in elements.pieces)
    return JacobianTape(program, outputs, pattern)


class _Record:
    """A tape for x of one dtype and device, its sweeps, and the environment in which it was recorded."""

    def __init__(self, tape: JacobianTape | HessianTape, environment: Environment) -> None:
        self.tape, self.environment = tape, environment
        self.trusted = set[str]()  # kinds of results that were compared
        self._sweeps: dict[str, Sweep] = {}

    def run(self, kind: Kind | Literal["values"], args: tuple[Any, ...], *vectors: Array) -> Array:
        """Return values on the pattern, or the result of a sweep, which is planned and compiled the first time."""
        if kind == "values":
            return self.tape.values(args)
        sweep = self._sweeps.get(kind)
        if sweep is None:
            with _said_if_it_takes_long():
                sweep = Sweep(self.tape.program, self.tape.outputs, kind)
                sweep(args, *vectors)
            self._sweeps[kind] = sweep
        return sweep(args, *vectors)


class TapeDerivatives:
    """Derivatives of a function by tapes; None where there is none, and the function is interpreted.

    A tape is used for arguments of the same shapes and dtypes, where all derivatives are finite (the rules for 0 times
    infinity are the interpreter's), and while what the function finds outside of its arguments is as it was, so far as
    that can be seen: the caller has said that it depends on nothing else. Its values are compared with the
    interpreter's until most derivatives have been other than 0.

    Attributes
    ----------
    reason
        Why there is no tape, or none yet.
    """

    def __init__(self, f: Callable[..., Any], of: Callable[..., Any], argnum: int, varies: Callable[[int, Any], bool],
                 pattern: SparsityPattern, scalar: bool, traced: Callable[..., SparsityPattern]) -> None:  # fmt: skip
        self._given = f, of, argnum, varies, pattern, scalar, traced
        self._records: dict[Any, _Record | None] = {}  # by dtype and device of x; None: it cannot be recorded
        self._waiting: Environment | None = None
        self._changes = 0
        self.reason = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy what it was made of: tapes stay behind."""
        return type(self), self._given

    def plan(self, args: tuple[Any, ...]) -> None:
        """Record and compile."""
        error = self._record(args)
        if isinstance(error, UnrecordedError):
            raise UnrecordedError(
                error.problem, expected="a function of its arguments alone, of what the reference lists as compiled",
                remedy="Leave compiled=True out, and its derivatives are interpreted",
            ) from error  # fmt: skip
        if error is not None:
            raise error

    def gives_values(self, args: tuple[Any, ...]) -> bool:
        """Return whether the function's values, too, are computed sooner by loops."""
        record = self._records[self._key(args)]
        return record is not None and pays(record.tape.program, record.tape.outputs)

    def describe(self) -> str:
        """Say which way is used, and why."""
        found: dict[bool, str] = {}  # of arrays of NumPy, and of CuPy
        for key, record in sorted(self._records.items(), key=lambda item: item[1] is None):
            there = isinstance(key, tuple)
            if record is None:
                found.setdefault(there, f"interpreted{' on the host, of CuPy' * there}: {self.reason}")
            else:
                found.setdefault(there, f"compiled{' as CUDA kernels' * there}, {record.tape.describe()}")
        return "; ".join(found.values()) or f"interpreted: {self.reason}"

    def run(self, kind: Kind | Literal["values"], args: tuple[Any, ...], *vectors: Array) -> tuple[Array | None, bool]:
        """Return the values on the pattern, or what a sweep gives, if the tape does; and whether it was compared.

        Parameters
        ----------
        kind
            ``"values"``, or that of a `Sweep`.
        args
            The arguments.
        *vectors
            Of the sweep.
        """
        record = self._current(args)
        if record is None or not record.tape.program.takes(args) or any(
                getattr(v, "dtype", None) != record.tape.program.dtype for v in vectors):  # fmt: skip
            return None, False
        found = record.run(kind, args, *vectors)
        return (found, kind in record.trusted) if _finite(found) else (None, False)

    def batch(self, args: tuple[Any, ...], xs: Array, first: Callable[[], Array]) -> Array | None:
        """Return the values at the columns of xs, (nnz, B), by loops over several of them; None where there are none.

        Values that are not finite are NaN: `run` has to see to them. `first` gives the values at the first column.
        """
        record, argnum = self._current(args), self._given[2]
        if record is None or "values" not in record.trusted or not record.tape.program.takes(args):
            return None
        count, xp = xs.shape[1], record.tape.program.xp
        found: Any = None
        for begin in range(0, count, WIDEST):
            part = xs[:, begin : begin + WIDEST]
            own = part.shape[1]
            if missing := -own % LANES if backend.is_host(xp) else 0:
                part = np.concatenate([part, np.repeat(part[:, -1:], missing, axis=1)], axis=1)
            with _said_if_it_takes_long():
                values = record.tape.values(replaced(args, [argnum], [part]))
            if "batch" not in record.trusted:
                self.compare("batch", args, values[:, 0], first())
                if "batch" not in record.trusted:
                    return None
            if count == values.shape[1]:
                found = values
                break
            if found is None:
                found = host_pool.empty(xp, (len(values), count), values.dtype)
            found[:, begin : begin + own] = values[:, :own]
        if not _finite(found.reshape(-1)):
            found = xp.where(xp.isfinite(found).all(axis=0), found, found.dtype.type(np.nan))
        return found

    def _key(self, args: tuple[Any, ...]) -> Any:
        """Return where the record for these arguments is: by the dtype of x, and its device."""
        x = args[self._given[2]]
        return (x.dtype, backend.device_number(backend.namespace(x))) if backend.is_on_device(x) else x.dtype

    def _current(self, args: tuple[Any, ...]) -> _Record | None:
        """Return the record for x of this dtype and device, if there is one whose environment is as it was."""
        key = self._key(args)
        if key not in self._records:
            self._record(args)
        record = self._records[key]
        return self._changed(args) if record is not None and not record.environment.holds() else record

    def compare(self, kind: str, args: tuple[Any, ...], values: Array, expected: Array) -> None:
        """Trust results of this kind if they are the interpreter's and most are not 0, or use the tape no more."""
        key, values, expected = self._key(args), backend.to_host(values), backend.to_host(expected)
        room = np.sqrt(np.finfo(values.dtype).eps)
        scale = np.abs(expected).max(initial=0)
        if np.allclose(values, expected, rtol=room, atol=room * scale):
            record = self._records[key]
            if record is not None and 2 * np.count_nonzero(expected) >= expected.size:
                record.trusted.add(kind)
        else:
            self._refuse(key, "its values differ from the interpreter's")

    def _refuse(self, key: Any, reason: str) -> None:
        self._records[key], self.reason = None, reason

    def _changed(self, args: tuple[Any, ...]) -> _Record | None:
        """Record anew, once the environment is as it was at the call before.

        Raises
        ------
        PatternError
            The function has derivatives now where it had none.
        """
        key, here = self._key(args), backend.from_device(args)
        if self._waiting is not None and self._waiting.holds():
            self._record(args)
            return self._records[key]
        pattern, found = self._given[4], self._given[6](here)
        if found.shape != pattern.shape or not np.isin(keys_of(found), keys_of(pattern), assume_unique=True).all():
            raise PatternError("What the function finds outside of its arguments has changed, and its pattern with it",
                               expected=f"entries of {pattern}", got=repr(found),
                               remedy="Prepare it again")  # fmt: skip
        self._changes += 1
        if self._changes > MOST_CHANGES:
            self._refuse(key, "what it finds outside of its arguments changes again and again")
            return None
        try:
            self._waiting = self._environment(here)
        except SparseBPError as error:
            self._refuse(key, str(error))
        return None

    def _environment(self, args: tuple[Any, ...]) -> Environment:
        """Return the environment of the function, and of arguments that are no floats."""
        f, _, _, varies, *_ = self._given
        return Environment(f, *(arg for place, arg in enumerate(args) if not varies(place, arg)))

    def _record(self, args: tuple[Any, ...]) -> Exception | None:
        """Record and compile; return an error instead, if there is one."""
        _, of, argnum, varies, pattern, scalar, _ = self._given
        key, here, xp = self._key(args), backend.from_device(args), backend.namespace(args[argnum])
        try:
            environment = self._environment(here)
            floats = [place for place, arg in enumerate(here) if varies(place, arg)]
            device = None if backend.is_host(xp) else kernels.on_device(xp)
            tape = plan_tape(of, here, argnum, floats, pattern, scalar, device)
            if not environment.holds():
                raise UnrecordedError("The function changes what it finds outside, and cannot be compiled")
            with np.errstate(all="ignore"), _said_if_it_takes_long():
                tape.values(args)  # compiles
        except Exception as error:  # whatever a compiler raises: the function can be interpreted
            self._refuse(key, str(error) if isinstance(error, SparseBPError) else repr(error))
            return error
        self.reason = ""
        self._records[key] = _Record(tape, environment)
        return None


def _finite(values: Array) -> bool:
    """Return whether all numbers are finite; the host waits for those of a device."""
    if type(values) is np.ndarray:
        return finite(values)
    return bool(backend.namespace(values).isfinite(values).all())  # synchronize!


PATIENCE = 2.0
"""Seconds of compilation about which nothing is said."""


@contextlib.contextmanager
def _said_if_it_takes_long() -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    if seconds > PATIENCE and sys.stderr is not None:
        print(f"sparsebp: compiled derivatives of a function in {seconds:.0f} s; the machine code is kept on disk",
              file=sys.stderr, flush=True)  # fmt: skip
