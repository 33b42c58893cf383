// Second phase of reduce-then-scan: combine the chunks' maps, vectors only, from the last chunk to the first.
// u[c - 1] = P[c] u[c] + v[c] for c = chunks - 2 ... 1. `carry` (chunks - 1, B, H) comes with its last entry set, the
// gradient that leaves the last chunk, and is filled downwards. P lies column by column: `matrices` (chunks - 2, B, H, H).
// Bytes: every map once; the chain of chunks is bound by latency, so maps are loaded several chunks ahead.

#include "common.cuh"

#ifdef HIDDEN
constexpr int WORDS = sizeof(real) / 4;
constexpr int DEPTH = HIDDEN * WORDS <= 16 ? 8 : HIDDEN * WORDS <= 32 ? 4 : 2;  // about 128 registers of maps

// A warp a sample.
extern "C" __global__ void __launch_bounds__(32, 1) scan_combine(
    const real* __restrict__ matrices, const real* __restrict__ vectors, real* __restrict__ carry, int batch, int hidden,
    int64 chunks) {
    constexpr int H = HIDDEN, pitch = padded(H);
    __shared__ __align__(16) real state[2 * pitch];
    const int unit = threadIdx.x;
    const bool active = unit < H;
    const int64 stride = int64(batch) * H, at = int64(blockIdx.x) * H + unit;
    real columns[DEPTH][H], constant[DEPTH];
    const auto fetch = [&](real(&column)[H], real& value, int64 c) {
        if (!active || c < 1) return;
        const real* const map = matrices + ((c - 1) * batch + blockIdx.x) * H * H + unit;
#pragma unroll
        for (int k = 0; k < H; ++k) column[k] = map[k * H];
        value = vectors ? vectors[(c - 1) * stride + at] : real(0);
    };
    clear(state, 2 * pitch);
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) {
        constant[s] = 0;
#pragma unroll
        for (int k = 0; k < H; ++k) columns[s][k] = 0;
        fetch(columns[s], constant[s], chunks - 2 - s);
    }
    __syncwarp();
    if (active) state[unit] = carry[(chunks - 2) * stride + at];
    __syncwarp();
    for (int64 last = chunks - 2; last >= 1; last -= DEPTH)
#pragma unroll
        for (int s = 0; s < DEPTH; ++s) {
            const int64 c = last - s;
            if (c < 1) break;
            const real* const from = state + s % 2 * pitch;
            real sums[WIDTH] = {};
#pragma unroll
            for (int k = 0; k < H; k += WIDTH) {
                real piece[WIDTH];
                load_wide(from + k, piece);
#pragma unroll
                for (int q = 0; q < WIDTH; ++q)
                    if (k + q < H) sums[q] += columns[s][k + q] * piece[q];
            }
            real value = constant[s];
#pragma unroll
            for (int q = 0; q < WIDTH; ++q) value += sums[q];
            if (active) {
                state[(s + 1) % 2 * pitch + unit] = value;
                carry[(c - 1) * stride + at] = value;
            }
            fetch(columns[s], constant[s], c - DEPTH);
            __syncwarp();
        }
}
#else
// A block a sample, any size: a thread a unit.
extern "C" __global__ void __launch_bounds__(1024, 1) scan_combine(
    const real* __restrict__ matrices, const real* __restrict__ vectors, real* __restrict__ carry, int batch, int hidden,
    int64 chunks) {
    extern __shared__ __align__(16) real state[];
    const int unit = threadIdx.x;
    const bool active = unit < hidden;
    const int64 stride = int64(batch) * hidden, at = int64(blockIdx.x) * hidden + unit;
    real value = active ? carry[(chunks - 2) * stride + at] : real(0);
    for (int64 c = chunks - 2; c >= 1; --c) {
        real* const place = state + c % 2 * hidden;
        if (active) place[unit] = value;
        __syncthreads();
        if (!active) continue;
        const real* const map = matrices + ((c - 1) * batch + blockIdx.x) * hidden * hidden + unit;
        value = vectors ? vectors[(c - 1) * stride + at] : real(0);
#pragma unroll 8
        for (int k = 0; k < hidden; ++k) value += map[int64(k) * hidden] * place[k];
        carry[(c - 1) * stride + at] = value;
    }
}
#endif
