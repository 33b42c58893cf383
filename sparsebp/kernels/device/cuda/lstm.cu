// Long short-term memory: backward, and materialised Jacobians; forward is in lstm_forward.cu; with -DROWS the first phase of
// the backward by reduce-then-scan alone.
//
// A block a sample (and chunk), a thread a hidden unit; see recurrent.cuh. Bound by the latency of a step: about 30 cycles for
// the state and 4 H multiply-adds a thread. Operations: 8 H^2 a step and sample; bytes: 10 H values, loaded a round ahead.
//
// The state is (h, c), in this order where both lie side by side. c' = f c + i g, h' = o tanh(c'); tanh(c') is not kept.

#define STATES 2
#include "common.cuh"
#include "recurrent.cuh"

constexpr int LOADED = 6;  // values of a unit that a step loads: four gates, the cell, the gradient
#include "reduction.cuh"
#include "weight_sums.cuh"

// Rows of the affine map of a chunk of an LSTM, whose state is (h, c): see reduction.cuh.
//
// The transposed Jacobian of a step has four blocks,
//   from h to h: A diag(q) + W_o' diag(e)     from h to c: A
//   from c to h: diag(f q)                    from c to c: diag(f)
// with A = W_i' diag(of_i) + W_f' diag(of_f) + W_g' diag(of_g). So a row (p, c) of P becomes
//   c' = p A + c diag(f),   p' = c' diag(q) + p W_o' diag(e):
// two products with H x H matrices, half of what one with 2 H x 2 H takes, and c' can lie where c was.

#if defined(HIDDEN) && defined(ROWS)
static_assert(WAITING > 0, "all columns are unrolled");
constexpr int FACTORS = 8;  // of a unit: of_i, of_f, of_g, none; f, q, e, none. In wide pieces

// Behind which column what was loaded is passed on: where ptxas does not spill.
constexpr int STAGE_AT = REAL_WORDS == 1 ? HIDDEN * 3 / 4 : STORED > 0 ? HIDDEN / 2 : HIDDEN - 1;

// f, q and e of one unit.
struct Diagonals {
    real f, q, e;

    __device__ __forceinline__ Diagonals(const real* factors) {
        real pieces[4];
#pragma unroll
        for (int k = 0; k < 4; k += WIDTH) load_wide(factors + 4 + k, *reinterpret_cast<real(*)[WIDTH]>(pieces + k));
        f = pieces[0], q = pieces[1], e = pieces[2];
    }
};

// The columns of h are those of ChunkRows, `p`; those of c are beside them. Row j of `matrix` holds column j of A, row j of
// `outputs` column j of W_o'; `factors` are those of this sample's units.
struct LstmRows : ChunkRows<0> {
    real c[ROWS][HIDDEN];

    // P <- P J; `exchange` and stage() as in ChunkRows::multiply.
    template <class Stage>
    __device__ __forceinline__ void multiply(
        const real* matrix, const real* outputs, const real* factors, real* exchange, int lane, const Stage& stage) {
        real next[ROWS][WAITING];
        exchange += lane;
#pragma unroll
        for (int j = 0; j < HIDDEN; ++j) {
            if (j == STAGE_AT) stage();
            const Diagonals of(factors + j * FACTORS);
            real to_c[ROWS] = {}, to_output[ROWS] = {};
            column(nullptr, matrix + j * HIDDEN_PADDED, to_c);
            column(nullptr, outputs + j * HIDDEN_PADDED, to_output);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                c[r][j] = c[r][j] * of.f + to_c[r];
                const real value = c[r][j] * of.q + to_output[r] * of.e;
                if (j < STORED)
                    exchange[(r * STORED + j) * WARP] = value;
                else
                    next[r][j < STORED ? 0 : j - STORED] = value;
            }
        }
        take([](int) { return real(1); }, [&](int r, int k) {
            return k < STORED ? exchange[(r * STORED + k) * WARP] : next[r][k < STORED ? 0 : k - STORED];
        });
    }

    // P = J.
    __device__ __forceinline__ void start(const real* matrix, const real* outputs, const real* factors, int row) {
#pragma unroll
        for (int j = 0; j < HIDDEN; ++j) {
            const Diagonals of(factors + j * FACTORS);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int i = row + r, e = j * HIDDEN_PADDED + min(i, HIDDEN - 1);
                c[r][j] = i < HIDDEN ? matrix[e] : i == HIDDEN + j ? of.f : real(0);
                p[r][j] = c[r][j] * of.q + (i < HIDDEN ? outputs[e] * of.e : real(0));
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) v[r] = 0;
    }

    // To a map as common.cuh describes it, columns of h first.
    __device__ __forceinline__ void store(real* map, int row) const {
        store_rows(map, row, [&](int r, int k) { return k < HIDDEN ? p[r][min(k, HIDDEN - 1)] : c[r][max(k - HIDDEN, 0)]; });
    }
};
#endif

// Steps that the backward loads at once, a round ahead: as many as registers allow beside the weights.
#ifdef HIDDEN
constexpr int ROUND = LONGEST_STEPS ? 1 : SUMS || LONG_STEPS || 4 * HIDDEN * sizeof(real) > 96 * 4 ? 2 : 4;
#else
constexpr int ROUND = 1;
#endif

// What a step leaves to be written is read again from where the product finds it, for want of registers.
constexpr bool IN_PLACE = sizeof(real) > 4;

// What one step's derivatives are made of, at one unit: d(c', h') by the pre-activations is (of_i, of_f, of_g, e at o), where
// what comes to c' also comes to h' by q; c' by c is f.
struct LstmFactors {
    real of_i, of_f, of_g, f, q, e;
};

__device__ __forceinline__ LstmFactors lstm_factors(real i, real f, real g, real o, real cell, real before) {
    const real output = tanh_of(cell);
    return LstmFactors{g * (i * (1 - i)), before * (f * (1 - f)), i * (1 - g * g), f, o * (1 - output * output),
                       output * (o * (1 - o))};
}

// Two vectors for every sample, rows `pitch` values apart; either pointer may be null.
template <class T> struct LstmState {
    T *h, *c;
    int pitch;

    __device__ __forceinline__ LstmState row(int64 number) const {
        return {h ? h + number * pitch : nullptr, c ? c + number * pitch : nullptr, pitch};
    }
};

// What the backward reads at one step: the gates, the cell before, the gradient that arrives; with sums h before and an input.
struct LstmStep {
    real i, f, g, o, before, gy, h, input;
};

// For t = end - 1 ... begin; ga and sums as in rnn_run_chunk. `carry` are the rows that come from later steps, `carry_out`
// gets those that go on to earlier ones (both null: nowhere).
template <bool ARRIVING>
__device__ __forceinline__ void lstm_run_chunk(
    const real* __restrict__ c, const real* __restrict__ c0, const real* __restrict__ gates,
    const real* __restrict__ weights, const real* __restrict__ gy, LstmState<const real> carry, real* __restrict__ ga,
    LstmState<real> carry_out, int64 begin, int64 end, int sample, int batch, int hidden, const SumOperands& operands,
    int64 part, real* shared) {
    HIDDEN_SIZE(hidden);
    const bool active = is_writer(H), writes = active && ga;
    const int unit = unit_of(H);
    const int64 stride = int64(batch) * H, at = int64(sample) * H + unit, gate_at = int64(sample) * H * 4 + unit;
    UnitWeights<1, 4> w;
    real* const state = w.load(weights, BACKWARD_STRIDES, unit, shared);
    WeightSums<4, 4> sums(operands, end, sample, batch);

    // Pointers walk and stores stand behind the loads of the product, as in rnn_run_chunk.
    const int64 last = at + (end - 1) * stride, last_gate = gate_at + (end - 1) * stride * 4;
    Walk<const real> kept{gates + last_gate}, before{c + last - stride};
    Walk<const real> next_gy{(ARRIVING ? gy : c) + last}, next_h{(SUMS ? operands.before : c) + last};
    Walk<real> out{ga + last_gate};
    real cell = c[last];  // of the step to come
    real u[1] = {carry.h ? carry.h[unit] : real(0)}, to_cell = carry.c ? carry.c[unit] : real(0);
    const auto load = [&](LstmStep& x, bool valid) {
        x = LstmStep{};
        if (valid) {
            x.i = kept[0], x.f = kept[H], x.g = kept[2 * H], x.o = kept[3 * H];
            x.before = (before.at >= c ? before : Walk<const real>{c0 + at})[0];  // one load, not one of two
            if (ARRIVING) x.gy = next_gy[0];
            if (SUMS) x.h = next_h[0];
        }
        x.input = sums.input(valid);
        kept += -4 * stride, before += -stride, next_gy += -stride, next_h += -stride;
    };
    const auto start = [&](const LstmStep& first) {
        u[0] += first.gy;
        unit_barrier();
    };
    in_rounds<ROUND, LstmStep>(end - begin, batch, load, start, [&](int turn, const LstmStep& x, const LstmStep& following) {
        real* const place = state + turn * (4 * SEGMENT + SUM_PLACE);
        const LstmFactors f = lstm_factors(x.i, x.f, x.g, x.o, cell, x.before);
        cell = x.before;
        to_cell += u[0] * f.q;
        const real at_gates[4] = {to_cell * f.of_i, to_cell * f.of_f, to_cell * f.of_g, u[0] * f.e};
#pragma unroll
        for (int q = 0; q < 4; ++q) put(place + q * SEGMENT, at_gates[q]);
        sums.put(place + 4 * SEGMENT, x.h, x.input);
        unit_barrier();
        to_cell *= f.f;
        u[0] = following.gy;  // zero behind the last step
        w.add(place, u);
        if (writes)
#pragma unroll
            for (int q = 0; q < 4; ++q) out[q * H] = IN_PLACE ? place[q * SEGMENT + unit_place()] : at_gates[q];
        out += -4 * stride;
        sums.add(place + 4 * SEGMENT, at_gates);
    });
    if (!active) return;
    if (carry_out.h) carry_out.h[unit] = u[0], carry_out.c[unit] = to_cell;
    sums.store(operands, part, unit);
}

#ifndef ROWS
// Back-propagation through chunks, as rnn_backward; what comes from later steps and goes on to earlier ones are rows of h and
// of c, as LstmState has them. `ga` gets the gradients at i, f, g, o.
extern "C" __global__ void __launch_bounds__(UNIT_BLOCK, 1) lstm_backward(
    const real* __restrict__ c, const real* __restrict__ c0, const real* __restrict__ gates,
    const real* __restrict__ weights, const real* __restrict__ gy, const real* __restrict__ carry_h,
    const real* __restrict__ carry_c, int carry_pitch, real* __restrict__ ga, real* __restrict__ out_h,
    real* __restrict__ out_c, int out_pitch, const real* __restrict__ x, const real* __restrict__ before,
    real* __restrict__ parts, int features, int64 steps, int batch, int hidden, int64 first_chunk, int64 chunks) {
    extern __shared__ __align__(16) real shared[];
    const int64 chunk = first_chunk + blockIdx.x / batch;
    const int sample = blockIdx.x % batch;
    const LstmState<real> out{out_h, out_c, out_pitch}, nowhere{nullptr, nullptr, 0};
    if_arriving(gy, [&](auto arriving) {
        lstm_run_chunk<decltype(arriving)::value>(
            c, c0, gates, weights, gy, LstmState<const real>{carry_h, carry_c, carry_pitch}.row(blockIdx.x), ga,
            chunk == first_chunk ? out.row(sample) : nowhere, chunk_begin(chunk, chunks, steps),
            chunk_begin(chunk + 1, chunks, steps), sample, batch, hidden, SumOperands{x, before, parts, features},
            chunk * batch + sample, shared);
    });
}

// The four blocks of these rows at unit j. Of a step: H rows of h, in each the H columns of h and those of c, then H rows of
// c with two entries each; the batch last. A block a (t, j); x of the block runs along the batch, y along rows. Bytes: out
// written once, T 2 H (H + 1) B values.
extern "C" __global__ void __launch_bounds__(256, 1) lstm_jacobians(
    const real* __restrict__ c, const real* __restrict__ c0, const real* __restrict__ gates, const real* __restrict__ w,
    real* __restrict__ out, int batch, int hidden) {
    const int64 t = blockIdx.x / hidden, square = int64(hidden) * hidden;
    const int j = blockIdx.x % hidden;
    for (int b = threadIdx.x; b < batch; b += blockDim.x) {
        const real* const kept = gates + (t * batch + b) * hidden * 4 + j;
        const int64 at = (t * batch + b) * hidden + j;
        const real before = t > 0 ? c[at - int64(batch) * hidden] : c0[int64(b) * hidden + j];
        const LstmFactors f = lstm_factors(kept[0], kept[hidden], kept[2 * hidden], kept[3 * hidden], c[at], before);
        real* const step = out + t * 2 * (square + hidden) * batch + b;
        for (int i = threadIdx.y; i < hidden; i += blockDim.y) {
            const int64 e = int64(j) * hidden + i;
            const real to_c = w[e] * f.of_i + w[square + e] * f.of_f + w[2 * square + e] * f.of_g;
            real* const row = step + (2 * int64(i) * hidden + j) * batch;
            row[0] = to_c * f.q + w[3 * square + e] * f.e;
            row[int64(hidden) * batch] = to_c;
        }
        if (threadIdx.y == 0) {
            real* const diagonals = step + 2 * (square + j) * batch;
            diagonals[0] = f.f * f.q;
            diagonals[batch] = f.f;
        }
    }
}
#else
// First phase of back-propagation through an LSTM by reduce-then-scan: every chunk's affine map, from the blocks of the
// Jacobian by rows, as above. It is never stored.
#ifdef HIDDEN
constexpr int TOGETHER = MATRICES < 4 ? MATRICES : 4, ENTRIES = 8 / TOGETHER;  // samples, entries that a lane has in hand
// Samples of a warp read their matrices at once, 16 bytes each: an odd number of such pieces apart, no bank is hit twice.
constexpr int MATRIX = HIDDEN * HIDDEN_PADDED + (HIDDEN * HIDDEN_PADDED / WIDTH % 2 ? 0 : WIDTH);

// Warps are shared out as in rnn_reduce. The block from h to c of the current step is put together in shared memory (3 H^2
// multiply-adds a sample) and serves all rows of P; that of the outputs is the weights, scaled behind the product.
// Operations: 2 (4 H^3 + 3 H^2) a step and sample; bytes: gates, c and gy once.
extern "C" __global__ void __launch_bounds__(32, 1) lstm_reduce(
    const real* __restrict__ c, const real* __restrict__ c0, const real* __restrict__ gates,
    const real* __restrict__ weights, const real* __restrict__ gy, real* __restrict__ maps,
    const real* __restrict__ carry_h, const real* __restrict__ carry_c, int carry_pitch, real* __restrict__ ga,
    real* __restrict__ out_h, real* __restrict__ out_c, int out_pitch, const real* __restrict__ x,
    const real* __restrict__ before, real* __restrict__ parts, int features, int64 steps, int batch, int hidden,
    int64 first_chunk, int64 chunks, int groups) {
    extern __shared__ __align__(16) real shared[];
    constexpr int H = HIDDEN, SQUARE = HIDDEN * HIDDEN;
    const int running = first_chunk > 0 ? batch : 0;
    if (int(blockIdx.x) < running) {
        const int sample = blockIdx.x;
        if_arriving(gy, [&](auto arriving) {
            lstm_run_chunk<decltype(arriving)::value>(
                c, c0, gates, weights, gy, LstmState<const real>{carry_h, carry_c, carry_pitch}.row(sample), ga,
                LstmState<real>{out_h, out_c, out_pitch}.row(sample), chunk_begin(chunks - 1, chunks, steps), steps,
                sample, batch, H, SumOperands{x, before, parts, features}, (chunks - 1) * batch + sample, shared);
        });
        return;
    }
    const int block = blockIdx.x - running;
    const int lane = threadIdx.x, slot = lane / GROUP < MATRICES ? lane / GROUP : 0, row = lane % GROUP * ROWS;
    const int64 chunk = first_chunk + block / groups;
    const int first_sample = block % groups * MATRICES;
    const int count = min(MATRICES, batch - first_sample) * H;
    const int64 begin = chunk_begin(chunk, chunks, steps), stride = int64(batch) * H;
    real* const matrices = shared;
    real* const outputs = matrices + MATRICES * MATRIX;
    real* const exchange = outputs + H * HIDDEN_PADDED;
    real* const factors = exchange + ROWS * H * WARP;
    real* const incoming = factors + STAGES * WARP * FACTORS;
    real* const w = incoming + STAGES * WARP;
    real* const loaded = w + 3 * SQUARE + lane;            // places of this lane alone
    real* const last_cells = loaded + STAGES * LOADED * WARP;
    for (int e = lane; e < 3 * SQUARE; e += WARP) w[e] = weights[e];
    for (int e = lane; e < H * HIDDEN_PADDED; e += WARP) {
        const int j = e / HIDDEN_PADDED, k = e % HIDDEN_PADDED;
        outputs[e] = k < H ? weights[3 * SQUARE + j * H + k] : real(0);
    }
    clear(matrices, MATRICES * MATRIX);

    int64 left = chunk_begin(chunk + 1, chunks, steps) - begin, at = begin * stride + int64(first_sample) * H;
    const real* const earlier = begin > 0 ? c + at - stride : c0 + int64(first_sample) * H;
    real ahead[STAGES][LOADED];
    const auto fetch = [&] {
#pragma unroll
        for (int s = 0; s < STAGES; ++s) {
            const int e = min(lane + s * WARP, count - 1);  // lanes without a value repeat one: nobody reads it
            const real* const kept = gates + (at + e / H * H) * 4 + e % H;
#pragma unroll
            for (int q = 0; q < 4; ++q) ahead[s][q] = kept[q * H];
            ahead[s][4] = c[at + e];
            ahead[s][5] = gy ? gy[at + e] : real(0);
        }
    };
    // Stored as they are: arithmetic on them would be moved ahead, and wait for them.
    const auto stage = [&] {
        __syncwarp();
#pragma unroll
        for (int s = 0; s < STAGES; ++s)
#pragma unroll
            for (int q = 0; q < LOADED; ++q) loaded[(s * LOADED + q) * WARP] = ahead[s][q];
    };
    // Entry (j, k) of every sample's block from h to c, as gru_reduce puts its Jacobian together. Then the loads of the next
    // step begin.
    const auto put_together = [&] {
        __syncwarp();
#pragma unroll
        for (int s = 0; s < STAGES; ++s) {
            const real* const x = loaded + s * LOADED * WARP;
            const real cell = x[4 * WARP];
            const LstmFactors f = lstm_factors(x[0], x[WARP], x[2 * WARP], x[3 * WARP], cell, last_cells[s * WARP]);
            last_cells[s * WARP] = cell;
            real* const place = factors + (lane + s * WARP) * FACTORS;
            place[0] = f.of_i, place[1] = f.of_f, place[2] = f.of_g, place[3] = 0;
            place[4] = f.f, place[5] = f.q, place[6] = f.e, place[7] = 0;
            incoming[lane + s * WARP] = x[5 * WARP];
        }
        __syncwarp();
        for (int first = lane; first < SQUARE; first += ENTRIES * WARP) {
            real by_entry[ENTRIES][3];
#pragma unroll
            for (int i = 0; i < ENTRIES; ++i)
#pragma unroll
                for (int q = 0; q < 3; ++q) by_entry[i][q] = w[q * SQUARE + min(first + i * WARP, SQUARE - 1)];
#pragma unroll
            for (int m = 0; m < MATRICES; m += TOGETHER) {
                real values[ENTRIES][TOGETHER];
#pragma unroll
                for (int i = 0; i < ENTRIES; ++i)
#pragma unroll
                    for (int s = 0; s < TOGETHER; ++s) {
                        const int j = min(first + i * WARP, SQUARE - 1) / H;
                        const real* const f = factors + (min(m + s, MATRICES - 1) * H + j) * FACTORS;
                        values[i][s] = by_entry[i][0] * f[0] + by_entry[i][1] * f[1] + by_entry[i][2] * f[2];
                    }
#pragma unroll
                for (int i = 0; i < ENTRIES; ++i) {
                    const int e = first + i * WARP;
#pragma unroll
                    for (int s = 0; s < TOGETHER; ++s)
                        if (e < SQUARE && m + s < MATRICES)
                            matrices[(m + s) * MATRIX + e / H * HIDDEN_PADDED + e % H] = values[i][s];
                }
            }
        }
        __syncwarp();
        if (--left > 0) at += stride;
        fetch();
    };
    const real *const matrix = matrices + slot * MATRIX, *const own = factors + slot * H * FACTORS;
    LstmRows rows;
#pragma unroll
    for (int s = 0; s < STAGES; ++s) last_cells[s * WARP] = earlier[min(lane + s * WARP, count - 1)];
    fetch();
    stage();
    put_together();
    rows.start(matrix, outputs, own, row);
    stage();
    if (gy) rows.add(incoming + slot * H);
    while (left > 0) {
        put_together();
        rows.multiply(matrix, outputs, own, exchange, lane, stage);
        if (gy) rows.add(incoming + slot * H);
    }
    if (lane / GROUP < MATRICES && slot * H < count)
        rows.store(maps + ((chunk - first_chunk) * batch + first_sample + slot) * MAP, row);
}
#else
// A block a chunk, sample and `rows` rows of P; `weights` is W', (H, 4 H). Four products: a block of the Jacobian would not fit.
extern "C" __global__ void __launch_bounds__(256, 1) lstm_reduce(
    const real* __restrict__ c, const real* __restrict__ c0, const real* __restrict__ gates,
    const real* __restrict__ weights, const real* __restrict__ gy, real* __restrict__ matrices, real* __restrict__ vectors,
    int64 steps, int batch, int hidden, int64 first_chunk, int64 chunks, int groups) {
    extern __shared__ __align__(16) real shared[];
    const int rows = blockDim.x / WARP * ROWS, side = 2 * hidden;
    const int64 map = blockIdx.x / groups, chunk = first_chunk + map / batch, at = map % batch * hidden;
    const int64 stride = int64(batch) * hidden;
    reduce_rows<4, 6>(
        weights, gy ? gy + at : nullptr, matrices + map * side * side, gy ? vectors + map * side : nullptr,
        [&](int64 t, int j, real(&out)[6]) {
            const real* const kept = gates + (t * stride + at) * 4 + j;
            const real* const cell = c + at + t * stride + j;
            const LstmFactors f = lstm_factors(
                kept[0], kept[hidden], kept[2 * hidden], kept[3 * hidden], *cell, t > 0 ? cell[-stride] : c0[at + j]);
            out[0] = f.of_i, out[1] = f.of_f, out[2] = f.of_g, out[3] = f.e, out[4] = f.f, out[5] = f.q;
        },
        chunk_begin(chunk, chunks, steps), chunk_begin(chunk + 1, chunks, steps), stride, blockIdx.x % groups * rows,
        hidden, shared);
}
#endif
#endif
