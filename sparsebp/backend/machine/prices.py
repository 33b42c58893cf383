"""The price list of the host: what everything that is estimated costs, one number each.

Every price is the seconds of one unit on one thread, in float32: of a call, a byte, a multiply-add. Estimates count
units and multiply; where two estimates count the same, they read the same price. The list that comes with the package
(``shipped.json``) was measured by ``sparsebp info --calibrate``, where and when it says itself; the user's own,
measured by the same command, takes its place (`sparsebp.backend.machine.price_file`). Prices choose between algorithms,
and change no result otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

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
