// Convolutions as products of matrices. The right factor, all windows side by side, is never laid out in memory: it is gathered
// from what the windows slide over while it is multiplied. Columns of a result, and what a product sums over, are
//
//     convolve    out[o, (b, position)] = sum of weight[o, (c, tap)] x[(c, tap), (b, position)]
//     convolve_t  out[c, (b, position)] = sum of weight[(o, tap), c] y[(o, tap), (b, position)]
//     correlate   out[o, (c, tap)]      = sum of y[o, (b, position)] x[(b, position), (c, tap)]
//
// of one group. Under a stride, neighbours in the result of `convolve_t` meet different taps, and elements a stride apart the
// same ones. So a block has such elements only, those of one phase, and the taps that they meet.
//
// A block has ROWS x COLUMNS numbers of a part of the sum, a thread UP x ACROSS of them; where these are few, threads share
// what is summed over as well. While a slice of both factors is multiplied in shared memory, the next one is loaded into
// registers. Sums are in a fixed order; those of parts lie behind each other and are added up afterwards.

#include "common.cuh"

constexpr int QUADS = ROWS * COLUMNS > 4096 ? 2 : 1;  // of a thread's columns
constexpr int THREADS = 32 * sizeof(real) * QUADS, UP = 32 / sizeof(real), ACROSS = 4 * QUADS;
constexpr int SHARES = THREADS * UP * ACROSS / (ROWS * COLUMNS);
constexpr int SLICE = SHARES > 1 ? 2 * SHARES : ROWS == 64 ? 16 : 8, OWN = SLICE / SHARES;
constexpr int LEFT = ROWS + WIDTH, RIGHT = COLUMNS + WIDTH;  // from one line of a slice to the next: other banks
constexpr int TILES = 2 * SLICE * (LEFT + RIGHT), PARTS = SHARES > 1 ? SHARES * ROWS * COLUMNS : 0;

template <int COUNT> __device__ __forceinline__ void load_all(const real* source, real (&out)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i += WIDTH) {
        real piece[WIDTH];
        load_wide(source + i, piece);
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) out[i + j] = piece[j];
    }
}

// Division by a number that the host knows, of numbers below 2^31 (Granlund and Montgomery, 1994).
struct Divider {
    int by;
    unsigned magic, shift;

    __device__ __forceinline__ int divide(int n, int& rest) const {
        const unsigned quotient = (unsigned((unsigned long long)(unsigned(n)) * magic >> 32) + n) >> shift;
        rest = n - int(quotient) * by;
        return int(quotient);
    }
};

// Of what is gathered from, `source` elements; of the result, `target`; positions of the largest phase. Taps that meet the
// same elements lie `apart`, and `back` elements of the source.
struct Axis {
    int source, target, positions, taps, stride, before, dilation, apart, back;
};

// rows, columns: of a group's result. channels: of a group, and what is gathered from. sources, others: planes of a sample of
// that, and of the third array. inner: what is summed over, by `part`. Axes are depth, height and width; a number of what is
// summed over has digits of one of two lengths on each.
struct Shape {
    Axis axes[3];
    Divider columns_of[3], inner_of[3], fewer_of[3], row_tiles, column_tiles, groups, phases;
    int rows, columns, channels, sources, others, inner, part, wide;
};

// An axis in one phase: which elements of the source taps and positions meet, which taps of the weights these are, and which
// elements of the result.
struct Line {
    int source, positions, first, stride, taps, dilation, tap, tap_apart, out, out_apart;
};

// A window begins at `at` in memory, at d, h and w on the axes; a tap lies so much further. `beside` is the place in the third
// array (the left factor, or the result), -1 for windows and taps beyond the last one.
struct __align__(16) Window {
    int64 at, beside;
    int d, h, w, unused;
};
struct __align__(16) Tap {
    int at, d, h, w, beside, unused[3];
};
constexpr int NOWHERE = -2147483647 - 1;

// A pointer that the compiler takes as it is: it would otherwise add all offsets anew for every element.
__device__ __forceinline__ const real* kept(const real* at) {
#ifndef SPARSEBP_ON_CPU
    asm("" : "+l"(at));
    __builtin_assume(__isGlobal(at));
#endif
    return at;
}

// What a window meets through a tap; `begin` is where the window begins.
__device__ __forceinline__ real met(const real* begin, const Axis (&axes)[3], const Window& window, const Tap& tap) {
    const bool there = (unsigned(window.d) + unsigned(tap.d) < unsigned(axes[0].source)) &
        (unsigned(window.h) + unsigned(tap.h) < unsigned(axes[1].source)) &
        (unsigned(window.w) + unsigned(tap.w) < unsigned(axes[2].source));
    return there ? begin[tap.at] : real(0);
}

// Of windows and taps, the one that is meant.
__device__ __forceinline__ const Window* windows_of(const Window* windows, const Tap*) { return windows; }
__device__ __forceinline__ const Window* windows_of(const Tap*, const Window* windows) { return windows; }
__device__ __forceinline__ const Tap* taps_of(const Window*, const Tap* taps) { return taps; }
__device__ __forceinline__ const Tap* taps_of(const Tap* taps, const Window*) { return taps; }

// A number's digits: w on the last axis counts fastest.
struct Digits {
    int outer, d, h, w;
};

__device__ __forceinline__ Digits digits_of(int n, const Divider (&of)[3]) {
    Digits found;
    n = of[2].divide(n, found.w);
    n = of[1].divide(n, found.h);
    found.outer = of[0].divide(n, found.d);
    return found;
}

__device__ __forceinline__ Window window_of(const Line (&lines)[3], const Digits& n, int64 sample, int64 beside) {
    const int d = lines[0].first + n.d * lines[0].stride, h = lines[1].first + n.h * lines[1].stride;
    const int w = lines[2].first + n.w * lines[2].stride;
    return {n.outer * sample + ((d * lines[1].source + h) * lines[2].source + w), beside, d, h, w, 0};
}

__device__ __forceinline__ Tap tap_of(const Line (&lines)[3], const Digits& n, int beside) {
    const int d = n.d * lines[0].dilation, h = n.h * lines[1].dilation, w = n.w * lines[2].dilation;
    const int plane = lines[0].source * lines[1].source * lines[2].source;
    return {n.outer * plane + (d * lines[1].source + h) * lines[2].source + w, d, h, w, beside, {0, 0, 0}};
}

// Where a block's numbers begin, and its part of what is summed over.
struct Block {
    int row, column, group, phase, part;

    __device__ __forceinline__ explicit Block(const Shape& shape) {
        int n = shape.row_tiles.divide(int(blockIdx.x), row);
        n = shape.column_tiles.divide(n, column);
        n = shape.groups.divide(n, group);
        part = shape.phases.divide(n, phase);
        row *= ROWS, column *= COLUMNS;
    }
};

// Writes the block's numbers. From one row to the next, left (rows, …) has `left_pitch` numbers and out (rows, …) `out_pitch`;
// they, x, which is gathered from, and the bias begin with the block's group. of_inner(number), with -1 behind the last one,
// and of_column(number) give taps and windows, or windows and taps.
template <class Inner, class Column, class OfInner, class OfColumn>
__device__ __forceinline__ void multiply(
    const Shape& shape, const Block& block, int inner_count, const real* left, int left_pitch,
    const real* x, const real* bias, real* out, int out_pitch, const OfInner& of_inner, const OfColumn& of_column) {
    __shared__ __align__(16) real tiles[TILES > PARTS ? TILES : PARTS];
    __shared__ Inner inner[2][SLICE];
    __shared__ Column columns[COLUMNS];
    // A thread gathers what TAPS taps meet in WINDOWS windows; neighbouring lanes have neighbouring windows.
    constexpr bool INSIDE = sizeof(Inner::at) == 8;  // windows are what is summed over
    constexpr int LANES = INSIDE ? SLICE : COLUMNS < THREADS ? COLUMNS : THREADS, STEP = THREADS / LANES;
    constexpr int WINDOWS = (INSIDE ? SLICE : COLUMNS) / LANES, TAPS = (INSIDE ? COLUMNS : SLICE) / STEP;
    constexpr int OF_TAP = INSIDE ? 1 : RIGHT, OF_WINDOW = INSIDE ? RIGHT : 1;
    constexpr int AT_ONCE = THREADS / SLICE, OF_LEFT = (ROWS + AT_ONCE - 1) / AT_ONCE;
    constexpr bool WHOLE = ROWS % AT_ONCE == 0;
    real* const lefts = tiles;
    real* const rights = tiles + 2 * SLICE * LEFT;
    const unsigned thread = threadIdx.x;
    const int first = block.part * shape.part, end = min(inner_count, first + shape.part);

    int number = first + thread;
    const auto describe = [&](int turn) {
        if (thread < SLICE) inner[turn][thread] = of_inner(number < end ? number : -1);
        number += SLICE;
    };
    real next_left[OF_LEFT], next_right[WINDOWS][TAPS];
    const unsigned own_row = thread / SLICE, own_tap = thread / LANES, own_window = thread % LANES;
    const auto load = [&](int turn) {
        const auto place = inner[turn][thread % SLICE].beside;
        const real* const from = INSIDE ? kept(left + place) : left;
        const int offset = INSIDE ? 0 : int(place);
#pragma unroll
        for (int i = 0; i < OF_LEFT; ++i) {
            const int row = min(int(block.row + own_row + i * AT_ONCE), shape.rows - 1);  // the last one again: not stored
            const bool there = (place >= 0) & (WHOLE || own_row + i * AT_ONCE < ROWS);
            next_left[i] = there ? from[offset + row * left_pitch] : real(0);
        }
        const Window* const windows = windows_of(inner[turn], columns) + own_window;
        const Tap* const taps = taps_of(inner[turn], columns) + own_tap;
#pragma unroll
        for (int w = 0; w < WINDOWS; ++w) {
            const real* const begin = kept(x + windows[w * LANES].at);
#pragma unroll
            for (int t = 0; t < TAPS; ++t) next_right[w][t] = met(begin, shape.axes, windows[w * LANES], taps[t * STEP]);
        }
    };
    const auto store = [&](int turn) {
        real* const l = lefts + turn * (SLICE * LEFT) + thread % SLICE * LEFT + own_row;
        real* const r = rights + turn * (SLICE * RIGHT) + own_tap * OF_TAP + own_window * OF_WINDOW;
#pragma unroll
        for (int i = 0; i < OF_LEFT; ++i)
            if (WHOLE || own_row + i * AT_ONCE < ROWS) l[i * AT_ONCE] = next_left[i];
#pragma unroll
        for (int w = 0; w < WINDOWS; ++w)
#pragma unroll
            for (int t = 0; t < TAPS; ++t) r[t * STEP * OF_TAP + w * LANES * OF_WINDOW] = next_right[w][t];
    };

    left = kept(left), x = kept(x);
    describe(0), describe(1);
    for (unsigned n = thread; n < COLUMNS; n += THREADS) columns[n] = of_column(block.column + n);
    __syncthreads();
    load(0), store(0);
    __syncthreads();
    constexpr int SIDE = COLUMNS / ACROSS;
    const unsigned share = thread / (THREADS / SHARES), place = thread % (THREADS / SHARES);
    const unsigned row = place / SIDE * UP, column = place % SIDE * 4;  // of its first four
    const auto column_of = [&](int a) { return column + a / 4 * (COLUMNS / QUADS) + a % 4; };
    real sums[UP][ACROSS] = {};
    for (int k = first, turn = 0; k < end; k += SLICE, turn ^= 1) {
        const bool more = k + SLICE < end;
        if (more) load(turn ^ 1);
        describe(turn);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            real up[UP], across[QUADS][4];
            const unsigned line = turn * SLICE + share * OWN + i;
            load_all(lefts + line * LEFT + row, up);
#pragma unroll
            for (int q = 0; q < QUADS; ++q) load_all(rights + line * RIGHT + column_of(4 * q), across[q]);
#pragma unroll
            for (int u = 0; u < UP; ++u)
#pragma unroll
                for (int a = 0; a < ACROSS; ++a) sums[u][a] += up[u] * across[a / 4][a % 4];
        }
        if (more) store(turn ^ 1);
        __syncthreads();
    }

    if (SHARES > 1) {
#pragma unroll
        for (int u = 0; u < UP; ++u)
#pragma unroll
            for (int a = 0; a < ACROSS; ++a) tiles[(share * ROWS + row + u) * COLUMNS + column_of(a)] = sums[u][a];
        __syncthreads();
        for (unsigned e = thread; e < ROWS * COLUMNS; e += THREADS) {
            const int r = block.row + e / COLUMNS;
            const int64 beside = columns[e % COLUMNS].beside;
            if (r >= shape.rows || beside < 0) continue;
            real sum = bias ? bias[r] : real(0);
            for (int s = 0; s < SHARES; ++s) sum += tiles[s * (ROWS * COLUMNS) + e];
            out[int64(r) * out_pitch + beside] = sum;
        }
        return;
    }
    const bool wide = shape.wide && size_t(out) % (WIDTH * sizeof(real)) == 0;
#pragma unroll
    for (int u = 0; u < UP; ++u) {
        const int r = block.row + row + u;
        if (r >= shape.rows) break;
        real* const line = out + int64(r) * out_pitch;
        const real more = bias ? bias[r] : real(0);
#pragma unroll
        for (int a = 0; a < ACROSS; a += WIDTH) {
            real values[WIDTH];
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[i] = sums[u][a + i] + more;
            const int64 beside = columns[column_of(a)].beside;
            if (wide) {
                if (beside >= 0) store_wide(line + beside, values);
                continue;
            }
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                const int64 each = columns[column_of(a + i)].beside;
                if (each >= 0) line[each] = values[i];
            }
        }
    }
}

__device__ __forceinline__ int volume(const Shape& shape, int Axis::*length) {
    return shape.axes[0].*length * (shape.axes[1].*length) * (shape.axes[2].*length);
}

__device__ __forceinline__ Line line_of(const Axis& axis) {
    return {axis.source, axis.positions, -axis.before, axis.stride, axis.taps, axis.dilation, 0, 1, 0, 1};
}

// One of the phases of `convolve_t`: elements phase, phase + stride, … of the result meet every `apart`-th tap from the first
// one with (phase + before - tap * dilation) % stride == 0, if there is one.
__device__ __forceinline__ Line line_of(const Axis& axis, int phase) {
    int tap = 0;
    while (tap < axis.taps && (phase + axis.before - tap * axis.dilation) % axis.stride) ++tap;
    const int first = (phase + axis.before - tap * axis.dilation) / axis.stride;
    const int positions = (axis.target - phase + axis.stride - 1) / axis.stride;
    const int taps = (axis.taps - tap + axis.apart - 1) / axis.apart;
    return {axis.source, positions, first, 1, taps, -axis.back, tap, axis.apart, phase, axis.stride};
}

// What `convolve` and `convolve_t` do, with weights (rows, channels, taps) of these pitches.
__device__ __forceinline__ void slide(
    const Shape& shape, const Line (&lines)[3], const Divider (&inner_of)[3], const Block& block, const real* weight,
    int row_pitch, int channel_pitch, const real* x, const real* bias, real* out) {
    const int source = volume(shape, &Axis::source), target = volume(shape, &Axis::target);
    const int64 sample = int64(shape.sources) * source, out_sample = int64(shape.others) * target;
    const auto of_inner = [&](int number) {
        if (number < 0) return Tap{0, 0, 0, NOWHERE, -1, {0, 0, 0}};
        const Digits n = digits_of(number, inner_of);
        const int d = lines[0].tap + n.d * lines[0].tap_apart, h = lines[1].tap + n.h * lines[1].tap_apart;
        const int w = lines[2].tap + n.w * lines[2].tap_apart;
        const int place = n.outer * channel_pitch + (d * shape.axes[1].taps + h) * shape.axes[2].taps + w;
        return tap_of(lines, n, place);
    };
    const auto of_column = [&](int number) {
        const Digits n = digits_of(number, shape.columns_of);
        const bool there = number < shape.columns && n.d < lines[0].positions && n.h < lines[1].positions &&
            n.w < lines[2].positions;
        if (!there) return Window{0, -1, NOWHERE, 0, 0, 0};
        const int d = lines[0].out + n.d * lines[0].out_apart, h = lines[1].out + n.h * lines[1].out_apart;
        const int w = lines[2].out + n.w * lines[2].out_apart;
        const int place = (d * shape.axes[1].target + h) * shape.axes[2].target + w;
        return window_of(lines, n, sample, n.outer * out_sample + place);
    };
    const int group = block.group;
    multiply<Tap, Window>(
        shape, block, shape.channels * lines[0].taps * lines[1].taps * lines[2].taps, weight, row_pitch,
        x + int64(group) * shape.channels * source, bias && block.part == 0 ? bias + group * shape.rows : nullptr,
        out + int64(group) * shape.rows * target, target, of_inner, of_column);
}

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS) convolve(
    const real* __restrict__ weight, const real* __restrict__ x, const real* __restrict__ bias, real* __restrict__ out,
    int64 size, Shape shape) {
    const Block block(shape);
    const Line lines[3] = {line_of(shape.axes[0]), line_of(shape.axes[1]), line_of(shape.axes[2])};
    const int taps = volume(shape, &Axis::taps), pitch = shape.channels * taps;
    slide(shape, lines, shape.inner_of, block, weight + int64(block.group) * shape.rows * pitch, pitch, taps, x, bias,
          out + block.part * size);
}

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS) convolve_t(
    const real* __restrict__ weight, const real* __restrict__ y, const real* __restrict__ bias, real* __restrict__ out,
    int64 size, Shape shape) {
    const Block block(shape);
    __shared__ Line lines[3];
    __shared__ Divider inner_of[3];
    if (threadIdx.x == 0) {
        int phase = block.phase;
        for (int a = 2; a >= 0; --a) {
            const int phases = min(shape.axes[a].stride, shape.axes[a].target);
            lines[a] = line_of(shape.axes[a], phase % phases);
            inner_of[a] = lines[a].taps == shape.inner_of[a].by ? shape.inner_of[a] : shape.fewer_of[a];
            phase /= phases;
        }
    }
    __syncthreads();
    const int taps = volume(shape, &Axis::taps), pitch = shape.rows * taps;
    slide(shape, lines, inner_of, block, weight + int64(block.group) * shape.channels * pitch, taps, pitch, y, bias,
          out + block.part * size);
}

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS) correlate(
    const real* __restrict__ y, const real* __restrict__ x, real* __restrict__ out, int64 size, Shape shape) {
    const Block block(shape);
    const Line lines[3] = {line_of(shape.axes[0]), line_of(shape.axes[1]), line_of(shape.axes[2])};
    const int source = volume(shape, &Axis::source), positions = volume(shape, &Axis::positions);
    const int64 sample = int64(shape.sources) * source, y_sample = int64(shape.others) * positions;
    const auto of_inner = [&](int number) {
        if (number < 0) return Window{0, -1, NOWHERE, 0, 0, 0};
        const Digits n = digits_of(number, shape.inner_of);
        return window_of(lines, n, sample, n.outer * y_sample + (number - n.outer * positions));
    };
    const auto of_column = [&](int number) {
        if (number >= shape.columns) return Tap{0, 0, 0, NOWHERE, -1, {0, 0, 0}};
        return tap_of(lines, digits_of(number, shape.columns_of), number);
    };
    const int64 group = block.group;
    multiply<Window, Tap>(
        shape, block, shape.inner, y + group * shape.rows * positions, positions,
        x + group * shape.channels * source, nullptr, out + block.part * size + group * shape.rows * shape.columns,
        shape.columns, of_inner, of_column);
}
