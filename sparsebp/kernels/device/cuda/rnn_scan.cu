// First phase of back-propagation through an Elman recurrence by reduce-then-scan: every chunk's affine map. The Jacobian
// J[t] = W' diag(f'(h[t])) is applied in its factored form and never stored.

#include "common.cuh"
#include "recurrent.cuh"
#include "reduction.cuh"
#include "rnn_chunk.cuh"

#ifdef HIDDEN
// The last chunk knows its incoming gradient and needs no map: the first `batch` warps run it at once, each a sample.
// The others take a chunk 1 ... chunks - 2 and MATRICES samples each; the map of chunk 0 is not used.
// Operations: 2 H^3 a step and sample, in ROWS multiply-adds a loaded word; bytes: h and gy once.
extern "C" __global__ void __launch_bounds__(32, 1) rnn_reduce(
    const real* __restrict__ h, const real* __restrict__ weights, const real* __restrict__ gy, real* __restrict__ matrices,
    real* __restrict__ vectors, const real* __restrict__ carry, real* __restrict__ gz, real* __restrict__ carry_out,
    int64 steps, int batch, int hidden, int64 chunks, int groups) {
    extern __shared__ __align__(16) real shared[];
    constexpr int H = HIDDEN;
    if (int(blockIdx.x) < batch) {
        const int sample = blockIdx.x;
        rnn_run_chunk(
            h, weights, gy, carry ? carry + sample * H : nullptr, gz, carry_out,
            chunk_begin(chunks - 1, chunks, steps), steps, sample, batch, H, shared);
        return;
    }
    const int block = blockIdx.x - batch;
    const int lane = threadIdx.x, slot = lane / GROUP < MATRICES ? lane / GROUP : 0, row = lane % GROUP * ROWS;
    const int64 chunk = 1 + block / groups;
    const int first_sample = block % groups * MATRICES;
    const int count = min(MATRICES, batch - first_sample) * H;  // values of this warp's samples at one step
    const int64 begin = chunk_begin(chunk, chunks, steps), end = chunk_begin(chunk + 1, chunks, steps);
    const int64 stride = int64(batch) * H, at = int64(first_sample) * H;
    real* const matrix = shared;
    real* const slopes = matrix + H * HIDDEN_PADDED;
    real* const incoming = slopes + MATRICES * H;
    real* const exchange = incoming + MATRICES * H;

    for (int e = lane; e < H * HIDDEN_PADDED; e += WARP) {
        const int j = e / HIDDEN_PADDED, k = e % HIDDEN_PADDED;
        matrix[e] = k < H ? weights[j * H + k] : real(0);
    }
    real ahead_h[STAGES], ahead_g[STAGES];
    const auto fetch = [&](int64 t) {
#pragma unroll
        for (int s = 0; s < STAGES; ++s) {
            const int e = lane + s * WARP;
            ahead_h[s] = e < count && t < end ? h[at + t * stride + e] : real(0);
            ahead_g[s] = gy && e < count && t < end ? gy[at + t * stride + e] : real(0);
        }
    };
    fetch(begin);
    ChunkRows rows;
    for (int64 t = begin; t < end; ++t) {
        __syncwarp();
#pragma unroll
        for (int s = 0; s < STAGES; ++s) {
            const int e = lane + s * WARP;
            if (e < MATRICES * H) slopes[e] = slope(ahead_h[s]), incoming[e] = ahead_g[s];
        }
        __syncwarp();
        fetch(t + 1);
        if (t == begin)
            rows.start<true>(matrix, slopes + slot * H, exchange, lane, row);
        else
            rows.multiply<true>(matrix, slopes + slot * H, exchange, lane);
        if (gy) rows.add(incoming + slot * H);
    }
    if (lane / GROUP < MATRICES && slot * H < count) {
        const int64 map = (chunk - 1) * batch + first_sample + slot;
        rows.store(matrices + map * H * H, gy ? vectors + map * H : nullptr, row);
    }
}
#else
// A block a chunk, sample and `rows` rows of P; `weights` is W', (H, H).
extern "C" __global__ void __launch_bounds__(256, 1) rnn_reduce(
    const real* __restrict__ h, const real* __restrict__ weights, const real* __restrict__ gy, real* __restrict__ matrices,
    real* __restrict__ vectors, int64 steps, int batch, int hidden, int64 chunks, int groups) {
    extern __shared__ __align__(16) real shared[];
    const int rows = blockDim.x / WARP * ROWS;
    const int64 map = blockIdx.x / groups, chunk = 1 + map / batch, at = map % batch * hidden;
    const int64 stride = int64(batch) * hidden;
    reduce_rows<1, 1>(
        weights, gy ? gy + at : nullptr, matrices + map * hidden * hidden, gy ? vectors + map * hidden : nullptr,
        [&](int64 t, int j, real(&out)[1]) { out[0] = slope(h[at + t * stride + j]); },
        chunk_begin(chunk, chunks, steps), chunk_begin(chunk + 1, chunks, steps), stride, blockIdx.x % groups * rows,
        hidden, shared);
}
#endif
