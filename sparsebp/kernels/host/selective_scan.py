"""The selective scan on the host: per channel N linear recurrences, whose factors depend on the input.

Bound by arithmetic, most of it exponentials. Channels lie along the SIMD lanes, and a tile of them goes through the
steps together, so that its states stay in the first cache. The way back runs each chunk of steps forward again from
the state before it, which the forward has kept, and then back: no other state is ever in memory.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.check import Array
from sparsebp.kernels.checks import CHUNK
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT, parts_for, span
from sparsebp.kernels.host.engine.math import exp
from sparsebp.kernels.host.engine.simd import (
    advance,
    clear,
    fma,
    keep_alive,
    lanes,
    load,
    load_up_to,
    pointer,
    prefetch,
    store,
    store_up_to,
    zeros,
)
from sparsebp.kernels.host.engine.threads import parallel, team

TILE = 32
"""Channels that go through the steps together: two cache lines in float32."""
MOST_GROUPS, GROUP = 16, 128
"""Channels are cut into groups of at least so many, until samples and groups make so many parts."""
AHEAD = 4
"""Steps that values are asked for before they are read: their rows lie far apart."""


class SelectiveScanKernels:
    """Host side of the selective scan in `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def selective_scan(
        self, x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array, h0: Array, reset: Array | None, y: Array,
        states: Array,
    ) -> None:  # fmt: skip
        """20·T·B·E·N elementary operations."""
        tiles = x.shape[1] * -(-x.shape[2] // TILE)
        parts = min(parts_for(20 * x.size * len(a)), max(tiles, 1))
        _forward(team(parts), parts, x, dt, a, b, c, d, h0, _NO_RESET if reset is None else reset, y, states)

    def selective_scan_grad(
        self, x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array, gy: Array, gh: Array, states: Array,
        reset: Array | None, gx: Array, gdt: Array, ga: Array, gb: Array, gc: Array, gd: Array, gh0: Array,
    ) -> None:  # fmt: skip
        """50·T·B·E·N elementary operations; scratch is a group's sums at b and c."""
        _, batch, channels = x.shape
        groups = max(min(channels // GROUP, MOST_GROUPS // max(batch, 1)), 1)
        sums = [np.empty((groups, *gb.shape), gb.dtype) for _ in range(2)] if groups > 1 else [gb[None], gc[None]]
        parts = min(parts_for(50 * x.size * len(a)), max(batch * groups, 1))
        flags = _NO_RESET if reset is None else reset
        _backward(team(parts), parts, x, dt, a, b, c, d, gy, gh, states, flags, gx, gdt, ga, *sums, gd, gh0)
        if groups > 1:
            sums[0].sum(axis=0, out=gb)
            sums[1].sum(axis=0, out=gc)


_NO_RESET = np.empty((0, 0), bool)

# The functions below are compiled: their arguments are arrays, pointers and bounds.
# mypy: disable-error-code="no-untyped-def"


@parallel(**JIT)
def _forward(part, parts, x, dt, a, b, c, d, h0, reset, y, states):
    steps, batch, channels = x.shape
    order, tiles = len(a), -(-channels // TILE)
    room = np.zeros((2, order, TILE), x.dtype)
    rates = pointer(room)
    state = advance(rates, order * TILE)
    begin, end = span(part, parts, batch * tiles)
    for number in range(begin, end):
        s, first = number // tiles, number % tiles * TILE
        count = min(TILE, channels - first)
        _get(rates, advance(pointer(a), first), order, channels, count)
        _get(state, advance(pointer(h0), s * order * channels + first), order, channels, count)
        for t in range(steps):
            row, at = t * batch + s, (t * batch + s) * channels + first
            if t % CHUNK == 0:
                kept = advance(pointer(states), (t // CHUNK * batch + s) * order * channels + first)
                _set(kept, state, order, channels, count)
            of_x, of_dt = advance(pointer(x), at), advance(pointer(dt), at)
            _ask(of_x, AHEAD * batch * channels, count)
            _ask(of_dt, AHEAD * batch * channels, count)
            coefficients = advance(pointer(b), row * order), advance(pointer(c), row * order)
            anew = len(reset) > 0 and reset[t, s]
            _step(rates, state, of_x, of_dt, *coefficients, advance(pointer(d), first), order, count, anew,
                  advance(pointer(y), at))  # fmt: skip
        last = advance(pointer(states), ((len(states) - 1) * batch + s) * order * channels + first)
        _set(last, state, order, channels, count)
    keep_alive(room)


@numba.njit(**INNER_JIT)
def _step(rates, state, x, dt, b, c, d, order, count, anew, y):
    """``h = exp(dt a) h + dt b x``, or `anew` without h, and ``y = Σ c h + d x``, for the channels of a tile."""
    for i in range(0, count, lanes(state)):
        left = count - i
        v, u = load_up_to(dt, i, left), load_up_to(x, i, left)
        through, total = v * u, load_up_to(d, i, left) * u
        for n in range(order):
            h = through * b[n]
            if not anew:
                h = fma(exp(v * load(rates, n * TILE + i)), load(state, n * TILE + i), h)
            store(state, n * TILE + i, h)
            total = fma(h, c[n], total)
        store_up_to(y, i, total, left)


@parallel(**JIT)
def _backward(part, parts, x, dt, a, b, c, d, gy, gh, states, reset, gx, gdt, ga, gb, gc, gd, gh0):
    """A part has some groups of channels, each of one sample; from the last chunk of steps to the first."""
    steps, batch, channels = x.shape
    order, groups, tiles = len(a), len(gb), -(-channels // TILE)
    vector = lanes(pointer(x))
    most, chunks = -(-tiles // groups), -(-steps // CHUNK)
    room, of_d = np.zeros((2 * CHUNK + 2 + most, order, TILE), x.dtype), np.zeros(TILE, x.dtype)
    befores, total_d = pointer(room), pointer(of_d)
    factors, rates = advance(befores, CHUNK * order * TILE), advance(befores, 2 * CHUNK * order * TILE)
    total, carried = advance(rates, order * TILE), advance(rates, 2 * order * TILE)
    sums = np.empty((2, CHUNK, order, vector), x.dtype)
    sums_b, sums_c = pointer(sums), advance(pointer(sums), CHUNK * order * vector)
    begin, end = span(part, parts, batch * groups)
    for number in range(begin, end):
        s, group = number // groups, number % groups
        low, high = span(group, groups, tiles)
        for tile in range(low, high):
            own, of_state = advance(carried, (tile - low) * order * TILE), s * order * channels + tile * TILE
            _get(own, advance(pointer(gh), of_state), order, channels, min(TILE, channels - tile * TILE))
        _clear_sums(pointer(ga), pointer(gd), s, order, channels, low * TILE, min(high * TILE, channels))
        for chunk in range(chunks - 1, -1, -1):
            start = chunk * CHUNK
            stop = min(start + CHUNK, steps)
            clear(sums_b, 2 * CHUNK * order * vector)
            for tile in range(low, high):
                first = tile * TILE
                count, of_a = min(TILE, channels - first), s * order * channels + first
                _get(rates, advance(pointer(a), first), order, channels, count)
                kept = advance(pointer(states), (chunk * batch + s) * order * channels + first)
                _get(befores, kept, order, channels, count)
                for t in range(start, stop):
                    row, at = t * batch + s, (t * batch + s) * channels + first
                    place = (t - start) * order * TILE
                    values = advance(pointer(x), at), advance(pointer(dt), at), advance(pointer(b), row * order)
                    before, factor, more = advance(befores, place), advance(factors, place), t + 1 < stop
                    anew = len(reset) > 0 and reset[t, s]
                    if anew:
                        clear(before, order * TILE)
                    _again(rates, before, factor, *values, order, count, anew, more)
                own = advance(carried, (tile - low) * order * TILE)
                clear(total, order * TILE)
                clear(total_d, TILE)
                for t in range(stop - 1, start - 1, -1):
                    row, at = t * batch + s, (t * batch + s) * channels + first
                    place, lane = (t - start) * order * TILE, (t - start) * order * vector
                    anew = len(reset) > 0 and reset[t, s]
                    _step_back(
                        rates, advance(befores, place), advance(factors, place), own, total,
                        advance(pointer(x), at), advance(pointer(dt), at), advance(pointer(b), row * order),
                        advance(pointer(c), row * order), advance(pointer(d), first), advance(pointer(gy), at),
                        order, count, anew, advance(pointer(gx), at),
                        advance(pointer(gdt), at), advance(sums_b, lane), advance(sums_c, lane), total_d,
                    )  # fmt: skip
                _add(advance(pointer(ga), of_a), total, order, channels, count)
                _add(advance(pointer(gd), s * channels + first), total_d, 1, channels, count)
            for t in range(start, stop):
                for n in range(order):
                    lane = ((t - start) * order + n) * vector
                    gb[group, t, s, n] = _total(advance(sums_b, lane), vector)
                    gc[group, t, s, n] = _total(advance(sums_c, lane), vector)
        for tile in range(low, high):
            own, of_state = advance(carried, (tile - low) * order * TILE), s * order * channels + tile * TILE
            _set(advance(pointer(gh0), of_state), own, order, channels, min(TILE, channels - tile * TILE))
    keep_alive(room)
    keep_alive(of_d)
    keep_alive(sums)


@numba.njit(**INNER_JIT)
def _again(rates, before, factors, x, dt, b, order, count, anew, more):
    """Run a step of a tile again: keep its factors, and the state, which is `before` the next step if there is one.

    The factors of a step `anew` are zero.
    """
    for i in range(0, count, lanes(before)):
        left = count - i
        v, u = load_up_to(dt, i, left), load_up_to(x, i, left)
        through = v * u
        for n in range(order):
            at = n * TILE + i
            factor = zeros(before) if anew else exp(v * load(rates, at))
            store(factors, at, factor)
            if more:
                store(before, order * TILE + at, fma(factor, load(before, at), through * b[n]))


@numba.njit(**INNER_JIT)
def _step_back(
    rates, before, factors, carried, total, x, dt, b, c, d, gy, order, count, anew, gx, gdt, sums_b, sums_c, total_d
):
    """Take the gradient at y and the one `carried` from the step after back through a step of a tile.

    Through a step `anew`, none passes to its factors and the state before it, not even NaN.
    """
    vector = lanes(before)
    for i in range(0, count, vector):
        left = count - i
        v, u, g_y = load_up_to(dt, i, left), load_up_to(x, i, left), load_up_to(gy, i, left)
        through, of_dt, of_input = v * u, zeros(before), zeros(before)
        for n in range(order):
            at, lane = n * TILE + i, n * vector
            state, factor = load(before, at), load(factors, at)
            g = fma(g_y, c[n], load(carried, at))
            h = fma(factor, state, through * b[n])
            if anew:
                store(carried, at, zeros(before))
            else:
                back = g * state * factor  # at dt a
                store(carried, at, factor * g)
                store(total, at, fma(back, v, load(total, at)))
                of_dt = fma(back, load(rates, at), of_dt)
            # Lanes without a channel keep out of the sums: their zeros times an infinite b or c are not zero.
            store_up_to(sums_b, lane, fma(g, through, load(sums_b, lane)), left)
            store_up_to(sums_c, lane, fma(g_y, h, load(sums_c, lane)), left)
            of_input = fma(g, b[n], of_input)
        store_up_to(gx, i, fma(v, of_input, load_up_to(d, i, left) * g_y), left)
        store_up_to(gdt, i, fma(u, of_input, of_dt), left)
        store(total_d, i, fma(g_y, u, load(total_d, i)))


@numba.njit(**INNER_JIT)
def _get(tile, source, rows, apart, count):
    """Copy rows into a tile, with zeros behind them."""
    clear(tile, rows * TILE)
    for n in range(rows):
        for i in range(count):
            tile[n * TILE + i] = source[n * apart + i]


@numba.njit(**INNER_JIT)
def _set(target, tile, rows, apart, count):
    """Copy a tile into rows."""
    for n in range(rows):
        for i in range(count):
            target[n * apart + i] = tile[n * TILE + i]


@numba.njit(**INNER_JIT)
def _add(target, tile, rows, apart, count):
    """Add a tile to rows."""
    for n in range(rows):
        for i in range(count):
            target[n * apart + i] += tile[n * TILE + i]


@numba.njit(**INNER_JIT)
def _clear_sums(ga, gd, s, order, channels, low, high):
    """Set a sample's sums over the steps to zero, for some channels."""
    clear(advance(gd, s * channels + low), high - low)
    for n in range(order):
        clear(advance(ga, (s * order + n) * channels + low), high - low)


@numba.njit(**INNER_JIT)
def _total(lanes_of, count):
    """Return the sum of a vector's lanes."""
    total = lanes_of[0]
    for i in range(1, count):
        total += lanes_of[i]
    return total


@numba.njit(**INNER_JIT)
def _ask(values, offset, count):
    """Ask for a row that is read some steps later."""
    for i in range(0, count, 16):
        prefetch(values, offset + i)
