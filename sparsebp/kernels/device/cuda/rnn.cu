// Elman recurrence h[t] = f(gx[t] + W h[t-1]): backward, and the materialised Jacobians; forward is in rnn_forward.cu;
// with -DROWS the first phase of the backward by reduce-then-scan alone.
//
// RELU picks f: 0 is tanh, 1 is relu. A block a sample (and chunk), a thread a hidden unit; see recurrent.cuh. These kernels
// are bound by the latency of a step, not by operations (2 H^2 a step and sample) or bytes (2 or 3 H values): about
// 2 * (30 + H) cycles. Values of later steps are loaded DEPTH steps ahead, which hides memory altogether.

#include "common.cuh"
#include "recurrent.cuh"

constexpr int LOADED = 2;  // values of a unit that a step loads: the state, the gradient
#include "reduction.cuh"
#include "weight_sums.cuh"

constexpr int DEPTH = STREAMED ? 2 : 8;  // steps that values are loaded ahead; even: two copies of the state alternate
// Steps that the backward loads at once, a round ahead.
constexpr int ROUND = LONGEST_STEPS ? 1 : LONG_STEPS ? 2 : SUMS ? 4 : 6;

// What the backward reads at one step: the state behind it (with sums the one before it), what arrives, and an input.
struct RnnStep {
    real h, gy, input;
};

// g[t] = gy[t] + W' gz[t + 1], gz[t] = g[t] * f'(t), for t = end - 1 ... begin. `carry` (H) comes from later steps (null:
// zero), what goes on to earlier ones is left at sample `sample` of `carry_out` (B, H; null: nowhere). gz is written unless it
// is null; with sums the weight gradients of these steps become part `part`.
template <bool ARRIVING>
__device__ __forceinline__ void rnn_run_chunk(
    const real* __restrict__ h, const real* __restrict__ weights, const real* __restrict__ gy,
    const real* __restrict__ carry, real* __restrict__ gz, real* __restrict__ carry_out, int64 begin, int64 end,
    int sample, int batch, int hidden, const SumOperands& operands, int64 part, real* shared) {
    HIDDEN_SIZE(hidden);
    const bool active = is_writer(H), writes = active && gz;
    const int unit = unit_of(H);
    const int64 stride = int64(batch) * H, at = int64(sample) * H + unit;
    UnitWeights<1, 1> w;
    real* const state = w.load(weights, BACKWARD_STRIDES, unit, shared);
    WeightSums<1, 1> sums(operands, end, sample, batch);

    // Pointers walk, and what the chain of steps does not wait for stands behind the loads of the product: instructions
    // are issued in order.
    const int64 last = at + (end - 1) * stride;
    Walk<const real> next_h{(SUMS ? operands.before : h) + last}, next_gy{(ARRIVING ? gy : h) + last};
    Walk<real> out{gz + last};
    real behind = h[last];  // h[t] of the step to come
    real u[1] = {carry ? carry[unit] : real(0)};
    const auto load = [&](RnnStep& x, bool valid) {
        x = RnnStep{};
        if (valid) {
            x.h = next_h[0];
            if (ARRIVING) x.gy = next_gy[0];
        }
        x.input = sums.input(valid);
        next_h += -stride, next_gy += -stride;
    };
    const auto start = [&](const RnnStep& first) {
        u[0] += first.gy;
        unit_barrier();
    };
    in_rounds<ROUND, RnnStep>(end - begin, batch, load, start, [&](int turn, const RnnStep& x, const RnnStep& following) {
        real* const place = state + turn * (SEGMENT + SUM_PLACE);
        const real value = u[0] * slope(SUMS ? behind : x.h), ga[1] = {value};
        behind = x.h;
        put(place, value);
        sums.put(place + SEGMENT, x.h, x.input);
        unit_barrier();
        u[0] = following.gy;  // zero behind the last step
        w.add(place, u);
        if (writes) out[0] = value;
        out += -stride;
        sums.add(place + SEGMENT, ga);
    });
    if (!active) return;
    if (carry_out) carry_out[at] = u[0];
    sums.store(operands, part, unit);
}

#ifndef ROWS
// Back-propagation through chunks: block x is chunk first_chunk + x / batch, sample x % batch. `carry` (chunks of this
// launch, B, H; null: zero) comes from later steps; the first chunk of the launch hands its own on to `carry_out` (B, H).
// Sequential back-propagation is the case of one chunk. x ... parts: see SumOperands.
extern "C" __global__ void __launch_bounds__(UNIT_BLOCK, 1) rnn_backward(
    const real* __restrict__ h, const real* __restrict__ weights, const real* __restrict__ gy,
    const real* __restrict__ carry, real* __restrict__ gz, real* __restrict__ carry_out, const real* __restrict__ x,
    const real* __restrict__ before, real* __restrict__ parts, int features, int64 steps, int batch, int hidden,
    int64 first_chunk, int64 chunks) {
    extern __shared__ __align__(16) real shared[];
    const int64 chunk = first_chunk + blockIdx.x / batch;
    const int sample = blockIdx.x % batch;
    if_arriving(gy, [&](auto arriving) {
        rnn_run_chunk<decltype(arriving)::value>(
            h, weights, gy, carry ? carry + int64(blockIdx.x) * hidden : nullptr, gz,
            chunk == first_chunk ? carry_out : nullptr, chunk_begin(chunk, chunks, steps),
            chunk_begin(chunk + 1, chunks, steps), sample, batch, hidden, SumOperands{x, before, parts, features},
            chunk * batch + sample, shared);
    });
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
#else
// First phase of back-propagation through an Elman recurrence by reduce-then-scan: every chunk's affine map. The Jacobian
// J[t] = W' diag(f'(h[t])) is applied in its factored form and never stored.
#ifdef HIDDEN
// The last chunk knows its incoming gradient and needs no map: the first `batch` warps run it at once, each a sample.
// The others take a chunk 1 ... chunks - 2 and MATRICES samples each; the map of chunk 0 is not used. With `first_chunk` 0
// nothing is run, and the maps of all chunks are made.
// Operations: 2 H^3 a step and sample, in ROWS multiply-adds a loaded word; bytes: h and gy once.
extern "C" __global__ void __launch_bounds__(32, 1) rnn_reduce(
    const real* __restrict__ h, const real* __restrict__ weights, const real* __restrict__ gy, real* __restrict__ maps,
    const real* __restrict__ carry, real* __restrict__ gz, real* __restrict__ carry_out, const real* __restrict__ x,
    const real* __restrict__ before, real* __restrict__ parts, int features, int64 steps, int batch, int hidden,
    int64 first_chunk, int64 chunks, int groups) {
    extern __shared__ __align__(16) real shared[];
    constexpr int H = HIDDEN;
    const int running = first_chunk > 0 ? batch : 0;
    if (int(blockIdx.x) < running) {
        const int sample = blockIdx.x;
        if_arriving(gy, [&](auto arriving) {
            rnn_run_chunk<decltype(arriving)::value>(
                h, weights, gy, carry ? carry + sample * H : nullptr, gz, carry_out,
                chunk_begin(chunks - 1, chunks, steps), steps, sample, batch, H,
                SumOperands{x, before, parts, features}, (chunks - 1) * batch + sample, shared);
        });
        return;
    }
    const int block = blockIdx.x - running;
    const int lane = threadIdx.x, slot = lane / GROUP < MATRICES ? lane / GROUP : 0, row = lane % GROUP * ROWS;
    const int64 chunk = first_chunk + block / groups;
    const int first_sample = block % groups * MATRICES;
    const int count = min(MATRICES, batch - first_sample) * H;  // values of this warp's samples at one step
    const int64 begin = chunk_begin(chunk, chunks, steps), stride = int64(batch) * H;
    real* const matrix = shared;
    real* const outputs = matrix + H * HIDDEN_PADDED;  // of a step
    real* const incoming = outputs + STAGES * WARP;
    real* const exchange = incoming + STAGES * WARP;

    for (int e = lane; e < H * HIDDEN_PADDED; e += WARP) {
        const int j = e / HIDDEN_PADDED, k = e % HIDDEN_PADDED;
        matrix[e] = k < H ? weights[j * H + k] : real(0);
    }
    int64 left = chunk_begin(chunk + 1, chunks, steps) - begin, at = begin * stride + int64(first_sample) * H;
    real ahead_h[STAGES], ahead_g[STAGES];
    const auto fetch = [&] {
#pragma unroll
        for (int s = 0; s < STAGES; ++s) {
            const int e = min(lane + s * WARP, count - 1);  // lanes without a value repeat one: nobody reads it
            ahead_h[s] = h[at + e];
            ahead_g[s] = gy ? gy[at + e] : real(0);
        }
    };
    // A step's values, for all lanes; then the loads of the next one begin. What is loaded is stored as it is: arithmetic
    // on it would be moved ahead, and wait for it.
    const auto stage = [&] {
        __syncwarp();
#pragma unroll
        for (int s = 0; s < STAGES; ++s)
            outputs[lane + s * WARP] = ahead_h[s], incoming[lane + s * WARP] = ahead_g[s];
        __syncwarp();
        if (--left > 0) at += stride, fetch();
    };
    const auto scale = [&](int j) { return slope(outputs[slot * H + j]); };
    ChunkRows<KEPT_ROWS> rows;
    fetch();
    stage();
    rows.start(matrix, scale, row);
    if (gy) rows.add(incoming + slot * H);
    while (left > 0) {
        rows.multiply(matrix, scale, exchange, lane, stage);
        if (gy) rows.add(incoming + slot * H);
    }
    if (lane / GROUP < MATRICES && slot * H < count)
        rows.store(maps + ((chunk - first_chunk) * batch + first_sample + slot) * MAP, row);
}
#else
// A block a chunk, sample and `rows` rows of P; `weights` is W', (H, H).
extern "C" __global__ void __launch_bounds__(256, 1) rnn_reduce(
    const real* __restrict__ h, const real* __restrict__ weights, const real* __restrict__ gy, real* __restrict__ matrices,
    real* __restrict__ vectors, int64 steps, int batch, int hidden, int64 first_chunk, int64 chunks, int groups) {
    extern __shared__ __align__(16) real shared[];
    const int rows = blockDim.x / WARP * ROWS;
    const int64 map = blockIdx.x / groups, chunk = first_chunk + map / batch, at = map % batch * hidden;
    const int64 stride = int64(batch) * hidden;
    reduce_rows<1, 1>(
        weights, gy ? gy + at : nullptr, matrices + map * hidden * hidden, gy ? vectors + map * hidden : nullptr,
        [&](int64 t, int j, real(&out)[1]) { out[0] = slope(h[at + t * stride + j]); },
        chunk_begin(chunk, chunks, steps), chunk_begin(chunk + 1, chunks, steps), stride, blockIdx.x % groups * rows,
        hidden, shared);
}
#endif
#endif
