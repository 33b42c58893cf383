// Gated recurrent unit (BPPSA Eq. 10): backward, and materialised Jacobians; forward is in gru_forward.cu;
// with -DROWS the first phase of the backward by reduce-then-scan alone.
//
// A block a sample (and chunk), a thread a hidden unit; see recurrent.cuh. Bound by the latency of a step: about 30 cycles for
// the state, 3 H multiply-adds a thread, and forward two exponentials with their divisions in a row. Operations: 6 H^2 a
// step and sample; bytes: 8 H values forward, 10 H backward, loaded DEPTH steps ahead.

#include "common.cuh"
#include "recurrent.cuh"

constexpr int LOADED = 6;  // values of a unit that a step loads: four gates, the state before, the gradient
#include "reduction.cuh"
#include "weight_sums.cuh"

constexpr int DEPTH = STREAMED ? 2 : 4;  // steps that values are loaded ahead; even: two copies of the state alternate
// Steps that the backward loads at once, a round ahead: as many as registers allow beside the weights.
#ifdef HIDDEN
constexpr bool FEW = LONG_STEPS || 3 * HIDDEN * sizeof(real) > 96 * 4;
constexpr int ROUND = SUMS ? (INPUT_SLOTS > 4 ? 2 : 3) : LONGEST_STEPS ? 1 : FEW ? 2 : 4;
#else
constexpr int ROUND = 1;
#endif

// What the backward reads at one step: the gates, the state before, the gradient that arrives, and an input.
struct GruStep {
    real r, z, n, m, before, gy, input;
};

// For t = end - 1 ... begin; carries, ga and sums as in rnn_run_chunk. Of the gradients at n, r, z, m the last three are what
// the transposed weights multiply.
template <bool ARRIVING>
__device__ __forceinline__ void gru_run_chunk(
    const real* __restrict__ h, const real* __restrict__ h0, const real* __restrict__ gates,
    const real* __restrict__ weights, const real* __restrict__ gy, const real* __restrict__ carry, real* __restrict__ ga,
    real* __restrict__ carry_out, int64 begin, int64 end, int sample, int batch, int hidden, const SumOperands& operands,
    int64 part, real* shared) {
    HIDDEN_SIZE(hidden);
    const bool active = is_writer(H), writes = active && ga;
    const int unit = unit_of(H);
    const int64 stride = int64(batch) * H, at = int64(sample) * H + unit, gate_at = int64(sample) * H * 4 + unit;
    UnitWeights<1, 3> w;
    real* const state = w.load(weights, BACKWARD_STRIDES, unit, shared);
    WeightSums<4, 3> sums(operands, end, sample, batch);

    // Pointers walk and stores stand behind the loads of the product, as in rnn_run_chunk.
    const int64 last = at + (end - 1) * stride, last_gate = gate_at + (end - 1) * stride * 4;
    Walk<const real> kept{gates + last_gate}, before{SUMS ? operands.before + last : h + last - stride};
    Walk<const real> next_gy{(ARRIVING ? gy : h) + last};
    Walk<real> out{ga + last_gate};
    int64 waiting = end;  // steps from the begin of the sequence that are not loaded yet
    real u[1] = {carry ? carry[unit] : real(0)};
    const auto load = [&](GruStep& x, bool valid) {
        x = GruStep{};
        if (valid) {
            x.r = kept[0], x.z = kept[H], x.n = kept[2 * H], x.m = kept[3 * H];
            x.before = (SUMS || --waiting > 0 ? before : Walk<const real>{h0 + at})[0];  // one load, not one of two
            if (ARRIVING) x.gy = next_gy[0];
        }
        x.input = sums.input(valid);
        kept += -4 * stride, before += -stride, next_gy += -stride;
    };
    const auto start = [&](const GruStep& first) {
        u[0] += first.gy;
        unit_barrier();
    };
    in_rounds<ROUND, GruStep>(end - begin, batch, load, start, [&](int turn, const GruStep& x, const GruStep& following) {
        real* const place = state + turn * (3 * SEGMENT + SUM_PLACE);
        const GruFactors f = gru_factors(x.r, x.z, x.n, x.m, x.before);
        const real g = u[0], at_n = g * ((1 - x.z) * (1 - x.n * x.n));
        const real at_gates[4] = {at_n, g * f.of_r, g * f.of_z, g * f.of_n};
#pragma unroll
        for (int q = 0; q < 3; ++q) put(place + q * SEGMENT, at_gates[1 + q]);
        sums.put(place + 3 * SEGMENT, x.before, x.input);
        unit_barrier();
        u[0] = x.z * g + following.gy;  // nothing arrives behind the last step
        w.add(place, u);
        if (writes)
#pragma unroll
            for (int q = 0; q < 4; ++q) out[q * H] = at_gates[q];
        out += -4 * stride;
        sums.add(place + 3 * SEGMENT, at_gates);
    });
    if (!active) return;
    if (carry_out) carry_out[at] = u[0];
    sums.store(operands, part, unit);
}

#ifndef ROWS
// Back-propagation through chunks, as rnn_backward. `ga` gets the gradients at n, r, z, m.
extern "C" __global__ void __launch_bounds__(UNIT_BLOCK, 1) gru_backward(
    const real* __restrict__ h, const real* __restrict__ h0, const real* __restrict__ gates,
    const real* __restrict__ weights, const real* __restrict__ gy, const real* __restrict__ carry, real* __restrict__ ga,
    real* __restrict__ carry_out, const real* __restrict__ x, const real* __restrict__ before, real* __restrict__ parts,
    int features, int64 steps, int batch, int hidden, int64 first_chunk, int64 chunks) {
    extern __shared__ __align__(16) real shared[];
    const int64 chunk = first_chunk + blockIdx.x / batch;
    const int sample = blockIdx.x % batch;
    if_arriving(gy, [&](auto arriving) {
        gru_run_chunk<decltype(arriving)::value>(
            h, h0, gates, weights, gy, carry ? carry + int64(blockIdx.x) * hidden : nullptr, ga,
            chunk == first_chunk ? carry_out : nullptr, chunk_begin(chunk, chunks, steps),
            chunk_begin(chunk + 1, chunks, steps), sample, batch, hidden, SumOperands{x, before, parts, features},
            chunk * batch + sample, shared);
    });
}

// Eq. 11: out[t, i, j, b] = W_hn[j, i] r j6 j7 + W_hr[j, i] j2 j3 j6 j7 + W_hz[j, i] j9 j10 + (i == j) z, at unit j. A block
// a (t, j); x of the block runs along the batch, y along i. Bytes: out written once, T H^2 B values.
extern "C" __global__ void __launch_bounds__(256, 1) gru_jacobians(
    const real* __restrict__ h, const real* __restrict__ h0, const real* __restrict__ gates, const real* __restrict__ w,
    real* __restrict__ out, int batch, int hidden) {
    const int64 t = blockIdx.x / hidden, square = int64(hidden) * hidden;
    const int j = blockIdx.x % hidden;
    for (int b = threadIdx.x; b < batch; b += blockDim.x) {
        const real* const kept = gates + (t * batch + b) * hidden * 4 + j;
        const real r = kept[0], z = kept[hidden], n = kept[2 * hidden], m = kept[3 * hidden];
        const real before = t > 0 ? h[((t - 1) * batch + b) * hidden + j] : h0[int64(b) * hidden + j];
        const GruFactors f = gru_factors(r, z, n, m, before);
        for (int i = threadIdx.y; i < hidden; i += blockDim.y) {
            const int64 e = int64(j) * hidden + i;
            out[((t * hidden + i) * hidden + j) * batch + b] =
                w[e] * f.of_r + w[square + e] * f.of_z + w[2 * square + e] * f.of_n + (i == j ? z : real(0));
        }
    }
}
#else
// First phase of back-propagation through a GRU by reduce-then-scan: every chunk's affine map, from the factored Jacobian
// J[t] = W_hr' diag(of_r) + W_hz' diag(of_z) + W_hn' diag(of_n) + diag(z) (BPPSA Eq. 11). It is never stored.
#ifdef HIDDEN
constexpr int FACTORS = 4;
constexpr int TOGETHER = MATRICES < 4 ? MATRICES : 4, ENTRIES = 8 / TOGETHER;  // samples, entries that a lane has in hand
// Samples of a warp read their Jacobians at once, 16 bytes each: an odd number of such pieces apart, no bank is hit twice.
constexpr int JACOBIAN = HIDDEN * HIDDEN_PADDED + (HIDDEN * HIDDEN_PADDED / WIDTH % 2 ? 0 : WIDTH);

// Warps are shared out as in rnn_reduce. The Jacobian of the current step is put together in shared
// memory (3 H^2 multiply-adds a sample) and serves all rows of P, which costs H^3 instead of 3 H^3 for three products.
// Operations: 2 (H^3 + 3 H^2) a step and sample; bytes: gates, h and gy once.
extern "C" __global__ void __launch_bounds__(32, 1) gru_reduce(
    const real* __restrict__ h, const real* __restrict__ h0, const real* __restrict__ gates,
    const real* __restrict__ weights, const real* __restrict__ gy, real* __restrict__ maps,
    const real* __restrict__ carry, real* __restrict__ ga, real* __restrict__ carry_out, const real* __restrict__ x,
    const real* __restrict__ before, real* __restrict__ parts, int features, int64 steps, int batch, int hidden,
    int64 first_chunk, int64 chunks, int groups) {
    extern __shared__ __align__(16) real shared[];
    constexpr int H = HIDDEN, SQUARE = HIDDEN * HIDDEN;
    const int running = first_chunk > 0 ? batch : 0;
    if (int(blockIdx.x) < running) {
        const int sample = blockIdx.x;
        if_arriving(gy, [&](auto arriving) {
            gru_run_chunk<decltype(arriving)::value>(
                h, h0, gates, weights, gy, carry ? carry + sample * H : nullptr, ga, carry_out,
                chunk_begin(chunks - 1, chunks, steps), steps, sample, batch, H,
                SumOperands{x, before, parts, features}, (chunks - 1) * batch + sample, shared);
        });
        return;
    }
    const int block = blockIdx.x - running;
    const int lane = threadIdx.x, slot = lane / GROUP < MATRICES ? lane / GROUP : 0, row = lane % GROUP * ROWS;
    const int64 chunk = first_chunk + block / groups;
    const int first_sample = block % groups * MATRICES;
    const int count = min(MATRICES, batch - first_sample) * H;
    const int64 begin = chunk_begin(chunk, chunks, steps), stride = int64(batch) * H;
    real* const jacobians = shared;
    real* const exchange = jacobians + MATRICES * JACOBIAN;
    real* const factors = exchange + ROWS * H * WARP;  // four of a unit side by side
    real* const incoming = factors + STAGES * WARP * FACTORS;
    real* const w = incoming + STAGES * WARP;
    real* const loaded = w + 3 * SQUARE + lane;  // places of this lane alone
    for (int e = lane; e < 3 * SQUARE; e += WARP) w[e] = weights[e];
    clear(jacobians, MATRICES * JACOBIAN);

    int64 left = chunk_begin(chunk + 1, chunks, steps) - begin, at = begin * stride + int64(first_sample) * H;
    const real* earlier = begin > 0 ? h + at - stride : h0 + int64(first_sample) * H;
    real ahead[STAGES][LOADED];
    const auto fetch = [&] {
#pragma unroll
        for (int s = 0; s < STAGES; ++s) {
            const int e = min(lane + s * WARP, count - 1);  // lanes without a value repeat one: nobody reads it
            const real* const kept = gates + (at + e / H * H) * 4 + e % H;
#pragma unroll
            for (int q = 0; q < 4; ++q) ahead[s][q] = kept[q * H];
            ahead[s][4] = earlier[e];
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
    // Entry (j, k) of every sample's transposed Jacobian; a lane loads its weights once for all samples, and what several
    // entries need before it stores the first. Then the loads of the next step begin.
    const auto put_together = [&] {
        __syncwarp();
#pragma unroll
        for (int s = 0; s < STAGES; ++s) {
            const real* const x = loaded + s * LOADED * WARP;
            const GruFactors f = gru_factors(x[0], x[WARP], x[2 * WARP], x[3 * WARP], x[4 * WARP]);
            real* const place = factors + (lane + s * WARP) * FACTORS;
            place[0] = f.of_r, place[1] = f.of_z, place[2] = f.of_n, place[3] = f.z;
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
                        const int e = min(first + i * WARP, SQUARE - 1), j = e / H;
                        const real* const f = factors + (min(m + s, MATRICES - 1) * H + j) * FACTORS;
                        values[i][s] = by_entry[i][0] * f[0] + by_entry[i][1] * f[1] + by_entry[i][2] * f[2] +
                                       (j == e % H ? f[3] : real(0));
                    }
#pragma unroll
                for (int i = 0; i < ENTRIES; ++i) {
                    const int e = first + i * WARP;
#pragma unroll
                    for (int s = 0; s < TOGETHER; ++s)
                        if (e < SQUARE && m + s < MATRICES)
                            jacobians[(m + s) * JACOBIAN + e / H * HIDDEN_PADDED + e % H] = values[i][s];
                }
            }
        }
        __syncwarp();
        if (--left > 0) earlier = h + at, at += stride;
        fetch();
    };
    const auto unscaled = [](int) { return real(1); };
    ChunkRows<0> rows;
    fetch();
    stage();
    put_together();
    rows.start(jacobians + slot * JACOBIAN, unscaled, row);
    stage();
    if (gy) rows.add(incoming + slot * H);
    while (left > 0) {
        put_together();
        rows.multiply(jacobians + slot * JACOBIAN, unscaled, exchange, lane, stage);
        if (gy) rows.add(incoming + slot * H);
    }
    if (lane / GROUP < MATRICES && slot * H < count)
        rows.store(maps + ((chunk - first_chunk) * batch + first_sample + slot) * MAP, row);
}
#else
// A block a chunk, sample and `rows` rows of P; `weights` is W', (H, 3 H). Three products: a Jacobian would not fit.
extern "C" __global__ void __launch_bounds__(256, 1) gru_reduce(
    const real* __restrict__ h, const real* __restrict__ h0, const real* __restrict__ gates,
    const real* __restrict__ weights, const real* __restrict__ gy, real* __restrict__ matrices, real* __restrict__ vectors,
    int64 steps, int batch, int hidden, int64 first_chunk, int64 chunks, int groups) {
    extern __shared__ __align__(16) real shared[];
    const int rows = blockDim.x / WARP * ROWS;
    const int64 map = blockIdx.x / groups, chunk = first_chunk + map / batch, at = map % batch * hidden;
    const int64 stride = int64(batch) * hidden;
    reduce_rows<3, 4>(
        weights, gy ? gy + at : nullptr, matrices + map * hidden * hidden, gy ? vectors + map * hidden : nullptr,
        [&](int64 t, int j, real(&out)[4]) {
            const real* const kept = gates + (t * stride + at) * 4 + j;
            const real before = t > 0 ? h[at + (t - 1) * stride + j] : h0[at + j];
            const GruFactors f = gru_factors(kept[0], kept[hidden], kept[2 * hidden], kept[3 * hidden], before);
            out[0] = f.of_r, out[1] = f.of_z, out[2] = f.of_n, out[3] = f.z;
        },
        chunk_begin(chunk, chunks, steps), chunk_begin(chunk + 1, chunks, steps), stride, blockIdx.x % groups * rows,
        hidden, shared);
}
#endif
#endif
