// Elman recurrence h[t] = f(gx[t] + W h[t-1]): forward, sequential backward, and the materialised Jacobians.
//
// RELU picks f: 0 is tanh, 1 is relu. A block a sample (and chunk), a thread a hidden unit; see recurrent.cuh. These kernels
// are bound by the latency of a step, not by operations (2 H^2 a step and sample) or bytes (2 or 3 H values): about
// 2 * (30 + H) cycles. Values of later steps are loaded DEPTH steps ahead, which hides memory altogether.

#include "common.cuh"
#include "recurrent.cuh"
#include "rnn_chunk.cuh"

__device__ __forceinline__ real activation(real x) {
#if RELU
    return x < 0 ? real(0) : x;  // written so that NaN stays NaN
#else
    return tanh_of(x);
#endif
}

extern "C" __global__ void __launch_bounds__(UNIT_BLOCK, 1) rnn_forward(
    const real* __restrict__ gx, const real* __restrict__ weights, const real* __restrict__ h0, real* __restrict__ h,
    int64 steps, int batch, int hidden) {
    extern __shared__ __align__(16) real shared[];
    HIDDEN_SIZE(hidden);
    const bool active = int(threadIdx.x) < H;
    const int unit = min(int(threadIdx.x), H - 1);
    const int64 stride = int64(batch) * H, at = int64(blockIdx.x) * H + unit;
    UnitWeights<1, 1> w;
    real* const state = w.load(weights, FORWARD_STRIDES(1), unit, shared);
    state[threadIdx.x] = h0[at];

    real ahead[DEPTH];
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) ahead[s] = gx[at + min(int64(s), steps - 1) * stride];
    unit_barrier();
    const auto step = [&](int s, int64 t) {
        real sum[1];
        w.apply(state + s % 2 * SEGMENT, sum);
        const real value = activation(ahead[s] + sum[0]);
        state[(s + 1) % 2 * SEGMENT + threadIdx.x] = value;
        if (active) h[at + t * stride] = value;
        if (t + DEPTH < steps) ahead[s] = gx[at + (t + DEPTH) * stride];
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

// Back-propagation through chunks: block x is chunk first_chunk + x / batch, sample x % batch. `carry` (chunks of this
// launch, B, H; null: zero) comes from later steps; the first chunk of the launch hands its own on to `carry_out` (B, H).
// Sequential back-propagation is the case of one chunk.
extern "C" __global__ void __launch_bounds__(UNIT_BLOCK, 1) rnn_backward(
    const real* __restrict__ h, const real* __restrict__ weights, const real* __restrict__ gy,
    const real* __restrict__ carry, real* __restrict__ gz, real* __restrict__ carry_out, int64 steps, int batch,
    int hidden, int64 first_chunk, int64 chunks) {
    extern __shared__ __align__(16) real shared[];
    const int64 chunk = first_chunk + blockIdx.x / batch;
    rnn_run_chunk(
        h, weights, gy, carry ? carry + int64(blockIdx.x) * hidden : nullptr, gz,
        chunk == first_chunk ? carry_out : nullptr, chunk_begin(chunk, chunks, steps),
        chunk_begin(chunk + 1, chunks, steps), blockIdx.x % batch, batch, hidden, shared);
}

// out[t, i, j, b] = w[j, i] * f'(h[t, b, j]). A block a (t, j); x of the block runs along the batch, y along i. Bytes: out
// written once, T H^2 B values; everything else is small.
extern "C" __global__ void __launch_bounds__(256, 1) rnn_jacobians(
    const real* __restrict__ h, const real* __restrict__ w, real* __restrict__ out, int batch, int hidden) {
    const int64 t = blockIdx.x / hidden;
    const int j = blockIdx.x % hidden;
    for (int b = threadIdx.x; b < batch; b += blockDim.x) {
        const real factor = slope(h[(t * batch + b) * hidden + j]);
        for (int i = threadIdx.y; i < hidden; i += blockDim.y)
            out[((t * hidden + i) * hidden + j) * batch + b] = w[int64(j) * hidden + i] * factor;
    }
}
