// Gated recurrent unit (BPPSA Eq. 10): forward with every gate kept, sequential backward, and materialised Jacobians.
//
// A block a sample (and chunk), a thread a hidden unit; see recurrent.cuh. Bound by the latency of a step: about 30 cycles for
// the state, 3 H multiply-adds a thread, and forward two exponentials with their divisions in a row. Operations: 6 H^2 a
// step and sample; bytes: 8 H values forward, 10 H backward, loaded DEPTH steps ahead.

#include "common.cuh"
#include "recurrent.cuh"
#include "gru_chunk.cuh"

extern "C" __global__ void __launch_bounds__(UNIT_BLOCK, 1) gru_forward(
    const real* __restrict__ gx, const real* __restrict__ weights, const real* __restrict__ b_hn,
    const real* __restrict__ h0, real* __restrict__ h, real* __restrict__ gates, int64 steps, int batch, int hidden) {
    extern __shared__ __align__(16) real shared[];
    HIDDEN_SIZE(hidden);
    const bool active = int(threadIdx.x) < H;
    const int unit = min(int(threadIdx.x), H - 1);
    const int64 stride = int64(batch) * H, at = int64(blockIdx.x) * H + unit, wide = int64(blockIdx.x) * H * 3 + unit;
    UnitWeights<3, 1> w;
    real* const state = w.load(weights, FORWARD_STRIDES(3), unit, shared);
    const real bias = b_hn[unit];
    real before = h0[at];
    state[threadIdx.x] = before;

    real ahead[DEPTH][3];
#pragma unroll
    for (int s = 0; s < DEPTH; ++s)
#pragma unroll
        for (int q = 0; q < 3; ++q) ahead[s][q] = gx[wide + min(int64(s), steps - 1) * stride * 3 + q * H];
    unit_barrier();
    const auto step = [&](int s, int64 t) {
        real sums[3];
        w.apply(state + s % 2 * SEGMENT, sums);
        const real r = sigmoid_of(ahead[s][0] + sums[0]), z = sigmoid_of(ahead[s][1] + sums[1]);
        const real m = sums[2] + bias, n = tanh_of(ahead[s][2] + r * m);
        before = (1 - z) * n + z * before;
        state[(s + 1) % 2 * SEGMENT + threadIdx.x] = before;
        if (active) {
            h[at + t * stride] = before;
            real* const kept = gates + (t * stride + int64(blockIdx.x) * H) * 4 + unit;
            kept[0] = r, kept[H] = z, kept[2 * H] = n, kept[3 * H] = m;
        }
        if (t + DEPTH < steps)
#pragma unroll
            for (int q = 0; q < 3; ++q) ahead[s][q] = gx[wide + (t + DEPTH) * stride * 3 + q * H];
        unit_barrier();
    };
    int64 first = 0;
    for (; first + DEPTH <= steps; first += DEPTH)
#pragma unroll
        for (int s = 0; s < DEPTH; ++s) step(s, first + s);
#pragma unroll
    for (int s = 0; s < DEPTH; ++s)
        if (first + s < steps) step(s, first + s);
}

// Back-propagation through chunks, as rnn_backward. `ga` gets the gradients at n, r, z, m.
extern "C" __global__ void __launch_bounds__(UNIT_BLOCK, 1) gru_backward(
    const real* __restrict__ h, const real* __restrict__ h0, const real* __restrict__ gates,
    const real* __restrict__ weights, const real* __restrict__ gy, const real* __restrict__ carry, real* __restrict__ ga,
    real* __restrict__ carry_out, int64 steps, int batch, int hidden, int64 first_chunk, int64 chunks) {
    extern __shared__ __align__(16) real shared[];
    const int64 chunk = first_chunk + blockIdx.x / batch;
    gru_run_chunk(
        h, h0, gates, weights, gy, carry ? carry + int64(blockIdx.x) * hidden : nullptr, ga,
        chunk == first_chunk ? carry_out : nullptr, chunk_begin(chunk, chunks, steps),
        chunk_begin(chunk + 1, chunks, steps), blockIdx.x % batch, batch, hidden, shared);
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
