"""What is known of the machine: workers, memory and rates, and the price list that estimates count with.

The price list. Every price is the seconds of one unit on one thread, in float32: of a call, a byte, a multiply-add.
Estimates count units and multiply; where two estimates count the same, they read the same price. The list that comes
with the package (``shipped.json``) was measured by ``python -m benchmarks.calibrate``, where and when it says
itself; the user's own, measured by the same command, takes its place. Prices choose between
algorithms, and change no result otherwise.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from sparsebp.core import backend, threads
from sparsebp.core.errors import FileFormatError
from sparsebp.core.files import cache_folder, parse_json, prepare_folder, read_file, write_atomically

STRATEGIES = (
    "identity", "scale_rows", "scale_columns", "scale_runs", "select_rows", "select_columns", "gather", "dense", "runs",
    "blocks", "filled", "pairs", "positions", "accumulate", "matvec",
)  # fmt: skip
"""What `Prices.products` has a price for: the strategies of `ProductPlan`, and a matrix times a vector."""

CELLS = ("rnn", "gru", "lstm")
"""Recurrent cells that `Prices.recurrent` has prices for."""


@dataclass(frozen=True)
class CellPrices:
    """Seconds of one unit of a recurrent cell's backward.

    Attributes
    ----------
    call
        Of a layer's backward, whatever its size.
    step
        Of a step of a block of samples in the recursion, beside what follows.
    tail
        Of a sample's hidden units in a step, where they do not fill whole vectors.
    unit
        Of a hidden unit of a sample and step: gates, their derivatives, reading and writing.
    multiply_add
        Of the recursion's products: a vector times the weights, the weights in the cache.
    map_multiply_add
        Of a chunk's products: matrices of a chunked scan.
    """

    call: float
    step: float
    tail: float
    unit: float
    multiply_add: float
    map_multiply_add: float


@dataclass(frozen=True, eq=False)
class Prices:
    """Seconds of one unit each, on one thread, in float32.

    Attributes
    ----------
    call
        Of a kernel call: the Python launcher with its checks.
    plan_call
        Of a product plan's call beside its kernel: checks of the caller's arrays.
    step
        Of one dependent step inside a kernel, at least.
    near, far
        Of a byte that is read or written: within the cache, and beyond it.
    blas
        Of a multiply-add in a layer's matrix product by the BLAS.
    operation
        Of one NumPy operation with the indexing around it, at least.
    array
        Of a byte in NumPy's passes over large arrays, new memory for the result included.
    value
        Of a byte in writing a Jacobian's values: gathered, or turned to have the batch last.
    stream
        Of a byte of saved states and their gradients that a recurrent layer's backward moves beyond the cache.
    gradient
        Of a multiply-add in the gradients of a recurrent layer's weights: tall products with small results.
    gradient_value
        Of a value that these read, the cache's misses apart.
    gradient_weight
        Of a weight whose gradient is put together.
    products
        Of one product of a sample, by strategy: without a batch, and in a batch. What it reads is counted apart.
    recurrent
        By cell.
    cache
        Bytes: what a call reads beyond that many comes from memory.
    states_cache
        The same of the saved states and their gradients in a recurrent layer's backward.
    sharing
        How many times the rate of one thread all threads together read from memory.
    double
        What arithmetic in float64 costs over float32.
    calibrated
        Whether this is the user's own list.
    measured
        On what and when: ``cpu``, ``threads``, ``vector_bytes``, ``package``, ``date``.
    """

    call: float
    plan_call: float
    step: float
    near: float
    far: float
    blas: float
    operation: float
    array: float
    value: float
    stream: float
    gradient: float
    gradient_value: float
    gradient_weight: float
    products: Mapping[str, tuple[float, float]]
    recurrent: Mapping[str, CellPrices]
    cache: float
    states_cache: float
    sharing: float
    double: float
    calibrated: bool
    measured: Mapping[str, Any]

    def product(self, strategy: str, width: int) -> float:
        """Return the price of one product with this strategy, of an entry that has `width` values."""
        one, many = self.products[strategy]
        return one if width == 1 else many

    def moved(self, size: float, threads: int = 1) -> float:
        """Return the seconds in which so many bytes are read or written, each once."""
        beyond = max(size - self.cache, 0.0)
        return self.near * (size - beyond) / threads + self.far * beyond / min(threads, self.sharing)

    def states_beyond(self, size: float) -> float:
        """Return the share of so many bytes of states that is no longer in the cache when a backward reads it."""
        return max(0.0, 1.0 - self.states_cache / size)

    def to_json(self) -> dict[str, Any]:
        """Return the prices, without where they come from, as types of JSON."""
        found: dict[str, Any] = {name: getattr(self, name) for name in _NUMBERS}
        found["products"] = {name: list(pair) for name, pair in self.products.items()}
        found["recurrent"] = {cell: vars(prices) for cell, prices in self.recurrent.items()}
        return found


_MOST = 1e18
"""No price is more, and no number of bytes."""
_DIVISORS = ("far", "sharing", "double", "dense")
"""What a rate is one over: not 0."""
_NUMBERS = tuple(f.name for f in fields(Prices) if f.type == "float")
_OF_CELLS = tuple(f.name for f in fields(CellPrices))


def parse(found: Any, *, calibrated: bool, measured: Mapping[str, Any]) -> Prices:
    """Return the prices that `Prices.to_json` gave.

    Raises
    ------
    ValueError
        It is something else: what is missing, unknown, or no number.
    """
    found = _named("prices", found, (*_NUMBERS, "products", "recurrent"))
    products = found["products"]
    if isinstance(products, dict) and "positions" in products:  # a list from before there were other ways for these
        products = {"pairs": products["positions"], "filled": products["positions"]} | products
    if isinstance(products, dict) and "scale_columns" in products:
        products = {"scale_runs": products["scale_columns"]} | products
    products = _named("prices.products", products, STRATEGIES)
    recurrent = found["recurrent"]
    if isinstance(recurrent, dict) and "gru" in recurrent:  # a list from before there was an LSTM has its like
        recurrent = {"lstm": recurrent["gru"]} | recurrent
    recurrent = _named("prices.recurrent", recurrent, CELLS)
    return Prices(
        **{name: _number(f"prices.{name}", found[name], name in _DIVISORS) for name in _NUMBERS},
        products={name: _pair(f"prices.products.{name}", pair, name in _DIVISORS) for name, pair in products.items()},
        recurrent={cell: _cell(f"prices.recurrent.{cell}", recurrent[cell]) for cell in CELLS},
        calibrated=calibrated,
        measured=dict(measured),
    )


def _cell(name: str, found: Any) -> CellPrices:
    found = _named(name, found, _OF_CELLS)
    return CellPrices(**{key: _number(f"{name}.{key}", value) for key, value in found.items()})


def _named(name: str, found: Any, keys: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError(f"{name} is no JSON object")
    if wrong := sorted(set(keys) ^ set(found)):
        raise ValueError(f"{name}: {', '.join(wrong)[:200]} missing or unknown")
    return found


def _pair(name: str, found: Any, positive: bool) -> tuple[float, float]:
    if not isinstance(found, list | tuple) or len(found) != 2:
        raise ValueError(f"{name} is no pair of numbers")
    return _number(name, found[0], positive), _number(name, found[1], positive)


def _number(name: str, found: Any, positive: bool = False) -> float:
    number = isinstance(found, int | float) and not isinstance(found, bool) and 0 <= found < _MOST
    if not number or (positive and found == 0):
        raise ValueError(f"{name} is no number {'above 0' if positive else 'from 0 on'}")
    return float(found)


# Where the price list is kept: the one that comes with the package, and the user's own.
#
# The user's is ``prices.json`` in the cache folder: ``$XDG_CACHE_HOME/sparsebp`` or ``~/.cache/sparsebp``, on Windows
# ``%LOCALAPPDATA%\sparsebp``. The environment variable ``SPARSEBP_PRICES`` names another file; empty, none is read.

VARIABLE = "SPARSEBP_PRICES"
SHIPPED = Path(__file__).with_name("shipped.json")
_FORMAT = 1
_HERE = ("cpu", "threads", "vector_bytes", "package")
"""What must be as it was where a list was measured."""


def price_path() -> Path | None:
    """Return the path of the user's list, which may not exist; None where the environment, or no home, leaves none."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    folder = cache_folder()
    return None if folder is None else folder / "prices.json"


@cache
def prices() -> Prices:
    """Return the price list of this process: the user's if it was measured on this machine, else the shipped one.

    Read once, when the first estimate asks.

    Warns
    -----
    RuntimeWarning
        The user's file is there and cannot be read.
    """
    path = price_path()
    if path is not None and os.path.exists(path):  # not where it cannot be looked at, as in another user's folder
        try:
            found = load(path, calibrated=True)
        except FileFormatError as error:
            warnings.warn(f"{error} Until then the shipped prices count.", RuntimeWarning, stacklevel=2)
        else:
            here = this_machine()
            if all(found.measured.get(name) == here[name] for name in _HERE):
                return found
    return shipped()


@cache
def shipped() -> Prices:
    """Return the price list that comes with the package."""
    return load(SHIPPED, calibrated=False)


def load(path: Path, *, calibrated: bool) -> Prices:
    """Return a list that `save` wrote.

    Raises
    ------
    FileFormatError
        The file is something else.
    """
    problem, expected = f"{path} is no list of prices", "a file that python -m benchmarks.calibrate wrote"
    remedy = "Run python -m benchmarks.calibrate, or remove the file"
    content = read_file(path, problem, expected=expected, remedy=remedy, regular=True)
    try:
        found = parse_json(content)
        if not isinstance(found, dict) or found.get("format") != _FORMAT or not isinstance(found.get("measured"), dict):
            raise ValueError(f"no JSON object of format {_FORMAT}")
        return parse(found.get("prices"), calibrated=calibrated, measured=found["measured"])
    except ValueError as error:
        raise FileFormatError(problem, expected=expected, got=error, remedy=remedy) from error


def save(found: Prices, path: Path) -> None:
    """Write a list in one atomic step, in a folder that is made if need be; later estimates of the process read it.

    Raises
    ------
    OutputError
        It cannot be written.
    """
    prepare_folder(path.parent)
    content = {"format": _FORMAT, "measured": dict(found.measured), "prices": found.to_json()}
    write_atomically(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
    prices.cache_clear()


def this_machine() -> dict[str, Any]:
    """Return what a price list is bound to."""
    package = importlib.import_module("sparsebp").__version__  # by name: the package itself imports all rooms
    return {"cpu": cpu_model(), "threads": os.cpu_count(), "vector_bytes": _vector_bytes(), "package": package}


def now_and_here() -> Mapping[str, Any]:
    """Return what a list that is measured now says of itself."""
    return this_machine() | {"date": datetime.now(UTC).isoformat(timespec="seconds")}


@cache
def cpu_model() -> str:
    """Return the processor's name as the system gives it."""
    return _cpu_line("model name") or platform.processor() or platform.machine()


def _vector_bytes() -> int:
    """Return the width of vectors: 64 with AVX-512, else 32, as the kernels have it."""
    return 64 if "avx512f" in _cpu_line("flags").split() else 32


@cache
def _cpu_line(key: str) -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(key):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return ""


# What the cost model knows of a machine: workers, memory, and rates, the host's from its price list.
#
# The host's prices are measured (`sparsebp.core.machine`); a device's are told from what its driver says.


@dataclass(frozen=True)
class Machine:
    """Rates of the machine that a scan runs on.

    Attributes
    ----------
    name
        Shown in explanations.
    workers
        Workers that can each run a product at the same time: CPU threads, or a GPU's warp schedulers.
    flops
        Floating-point operations a second of one worker in float32.
    double
        Rate of float64 over float32.
    bandwidth
        Bytes a second of all workers together.
    vector_bytes
        Bytes of the vector that a worker holds samples in; 0 where every sample is a task of its own.
    call
        Seconds for one kernel call: the Python launcher with its checks, on a GPU the launch too.
    step
        Seconds that one dependent step inside a kernel takes at least.
    is_device
        Whether it is a GPU.
    source
        Where the numbers come from.
    memory
        Bytes; a scan that needs more is not planned.
    issuers
        Steps that can be started at the same time. 1: one thread calls one kernel after the other, which then has all
        workers; as many as workers where each works for itself, as on the machine of BPPSA §3.6.
    prices
        The host's price list; None for a device.
    """

    name: str
    workers: int
    flops: float
    double: float
    bandwidth: float
    vector_bytes: int
    call: float
    step: float
    is_device: bool
    source: str
    memory: int = 2**63
    issuers: int = 1
    prices: Prices | None = None

    def rate(self, itemsize: int) -> float:
        """Return one worker's operations a second for values of `itemsize` bytes."""
        return self.flops * (self.double if itemsize == 8 else 1.0)

    def products(self, count: float, strategy: str, width: int, itemsize: int) -> float:
        """Return the seconds in which one worker does so many products of a strategy, each with `width` values."""
        if self.prices is None:
            return 2.0 * count / self.rate(itemsize)
        return count * self.prices.product(strategy, width) * (self.prices.double if itemsize == 8 else 1.0)

    def moved(self, size: float) -> float:
        """Return the seconds in which one worker, the others beside it, reads or writes so many bytes."""
        far = size / (self.bandwidth / self.workers)
        return far if self.prices is None or size > self.prices.cache else size * self.prices.near

    def lanes(self, itemsize: int) -> int:
        """Return how many samples one task takes."""
        return max(1, self.vector_bytes // itemsize)


def machine(xp: ModuleType, workers: int | None = None) -> Machine:
    """Return the machine behind the array module `xp`, with its stated rates.

    Parameters
    ----------
    xp
        ``numpy`` or ``cupy``.
    workers
        Replaces the number of workers: then each brings its share of the bandwidth and starts steps by itself.
    """
    number = backend.device_number(xp)
    found = _host(threads.get_threads(), prices(), host_memory()) if number is None else _device(xp, number)
    if workers is None:
        return found
    return replace(found, workers=workers, issuers=workers, bandwidth=found.bandwidth * workers / found.workers)


@lru_cache(maxsize=8)  # asked for at every forward of a recurrent layer
def _host(workers: int, p: Prices, memory: int) -> Machine:
    return Machine(
        name=f"CPU with {workers} thread{'s' if workers != 1 else ''}",
        workers=workers,
        flops=2.0 / p.product("dense", 2),
        double=1.0 / p.double,
        bandwidth=min(workers, p.sharing) / p.far,
        vector_bytes=64,
        call=p.call,
        step=p.step,
        is_device=False,
        source=f"{'calibrated' if p.calibrated else 'shipped'} prices, "
        f"measured on {p.measured.get('cpu')}, {p.measured.get('date')}",
        memory=memory,
        prices=p,
    )


def host_memory() -> int:
    """Return the bytes of physical memory."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2**63


@cache
def _device(xp: ModuleType, number: int) -> Machine:
    attributes = backend.device_attributes(xp)  # asks the driver for each: slow, hence kept by device number
    processors = int(attributes["MultiProcessorCount"])
    # clocks are given in kHz; where a driver keeps them to itself, those of an H100
    clock = (attributes.get("ClockRate") or 1_755_000) * 1e3
    memory_clock = (attributes.get("MemoryClockRate") or 2_619_000) * 1e3
    bandwidth = 2 * memory_clock * (attributes.get("GlobalMemoryBusWidth") or 5120) / 8
    return Machine(
        name=f"GPU with {processors} multiprocessors",
        workers=4 * processors,
        flops=2 * 32 * clock * 0.5,
        double=1 / (attributes.get("SingleToDoublePrecisionPerfRatio") or 2),
        bandwidth=0.8 * bandwidth,
        vector_bytes=0,
        call=8e-6,
        step=0.1e-6,
        is_device=True,
        source="the device's clock, multiprocessors and memory bus; half of the peak; launch and step time predicted",
        memory=backend.device_memory(xp),
    )
