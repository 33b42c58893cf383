// Second phase of reduce-then-scan: combine the chunks' maps, vectors only, from the last chunk to the first.
// u[c - 1] = P[c] u[c] + v[c] for c = chunks - 2 ... 1. `carry` (chunks - 1, B, H) comes with its last entry set, the
// gradient that leaves the last chunk, and is filled downwards. Bytes: every map once. Bound by the latency of a product
// with a vector, times the number of chunks.

#include "common.cuh"

#ifdef HIDDEN
constexpr int BLOCK = 256;
constexpr int FITS = 20480 / (MAP * int(sizeof(real)));
// Even, so that a round begins with the first of two copies of the state that alternate; or a single chunk.
constexpr int ROUND = FITS > 8 ? 8 : FITS > 1 ? FITS / 2 * 2 : FITS;
static_assert(ROUND > 0, "two maps fit");
constexpr int OWN = (HIDDEN + WARP - 1) / WARP;  // rows of a lane
constexpr int PIECES = MAP / WIDTH, SHARE = (ROUND * PIECES + BLOCK - WARP - 1) / (BLOCK - WARP);

// A block a sample: its first warp follows the chain of chunks and finds their maps in shared memory, where the others
// bring the next ROUND of them meanwhile. `maps` (chunks - 2, B, MAP), from 16 bytes on.
extern "C" __global__ void __launch_bounds__(BLOCK, 1) scan_combine(
    const real* __restrict__ maps, real* __restrict__ carry, int batch, int hidden, int64 chunks) {
    constexpr int H = HIDDEN;
    __shared__ __align__(16) real rounds[2][ROUND * MAP];
    __shared__ __align__(16) real state[2][OWN * WARP];
    const int lane = threadIdx.x % WARP;
    const bool follows = threadIdx.x < WARP;
    const int64 stride = int64(batch) * H, at = int64(blockIdx.x) * H;
    const auto unit = [&](int o) { return min(lane + o * WARP, H - 1); };

    // The maps of ROUND chunks: `last`, last - 1 ..., where there is none that of chunk 1.
    const auto bring = [&](real* to, int64 last) {
        if (last < 1) return;
        typedef typename Wide<real>::type Piece;
        Piece pieces[SHARE];
#pragma unroll
        for (int s = 0; s < SHARE; ++s) {
            const int p = threadIdx.x - WARP + s * (BLOCK - WARP), i = p / PIECES;
            const real* const map = maps + ((max(last - i, int64(1)) - 1) * batch + blockIdx.x) * MAP;
            if (i < ROUND) pieces[s] = reinterpret_cast<const Piece*>(map)[p % PIECES];
        }
#pragma unroll
        for (int s = 0; s < SHARE; ++s) {
            const int p = threadIdx.x - WARP + s * (BLOCK - WARP);
            if (p < ROUND * PIECES) reinterpret_cast<Piece*>(to)[p] = pieces[s];
        }
    };
    const auto rows_of = [&](const real* map, real(&rows)[OWN][PITCH]) {
#pragma unroll
        for (int o = 0; o < OWN; ++o)
#pragma unroll
            for (int k = 0; k <= H; k += WIDTH)
                load_wide(map + unit(o) * PITCH + k, *reinterpret_cast<real(*)[WIDTH]>(rows[o] + k));
    };

    if (follows)
#pragma unroll
        for (int o = 0; o < OWN; ++o) state[0][lane + o * WARP] = carry[(chunks - 2) * stride + at + unit(o)];
    else
        bring(rounds[0], chunks - 2);
    __syncthreads();
    real* out = carry + (chunks - 3) * stride + at + unit(0);
    int now = 0;
    for (int64 last = chunks - 2; last >= 1; last -= ROUND, now ^= 1) {
        if (!follows)
            bring(rounds[now ^ 1], last - ROUND);
        else {
            const int count = int(min(last, int64(ROUND))), odd = ROUND % 2 ? now : 0;
            real rows[OWN][PITCH];
            rows_of(rounds[now], rows);
#pragma unroll
            for (int i = 0; i < ROUND; ++i) {
                if (i == count) break;
                real sums[OWN][4] = {};
#pragma unroll
                for (int o = 0; o < OWN; ++o) sums[o][0] = rows[o][H];
#pragma unroll
                for (int k = 0; k < H; k += WIDTH) {
                    real piece[WIDTH];
                    load_wide(state[(i + odd) % 2] + k, piece);
#pragma unroll
                    for (int q = 0; q < WIDTH; ++q)
#pragma unroll
                        for (int o = 0; o < OWN; ++o)
                            if (k + q < H) sums[o][(k + q) % 4] += rows[o][k + q] * piece[q];
                }
                real values[OWN];
#pragma unroll
                for (int o = 0; o < OWN; ++o) {
                    values[o] = (sums[o][0] + sums[o][1]) + (sums[o][2] + sums[o][3]);
                    state[(i + 1 + odd) % 2][lane + o * WARP] = values[o];
                }
                if (i + 1 < ROUND) rows_of(rounds[now] + (i + 1) * MAP, rows);
                __syncwarp();
#pragma unroll
                for (int o = 0; o < OWN; ++o)
                    if (lane + o * WARP < H) out[o * WARP] = values[o];
                out -= stride;
            }
        }
        __syncthreads();
    }
}
#else
// A block a sample, any size: a thread a unit, or several.
extern "C" __global__ void __launch_bounds__(1024, 1) scan_combine(
    const real* __restrict__ matrices, const real* __restrict__ vectors, real* __restrict__ carry, int batch, int hidden,
    int64 chunks) {
    extern __shared__ __align__(16) real state[];
    const int64 stride = int64(batch) * hidden, at = int64(blockIdx.x) * hidden;
    real *now = state, *next = state + hidden;
    for (int unit = threadIdx.x; unit < hidden; unit += blockDim.x) now[unit] = carry[(chunks - 2) * stride + at + unit];
    for (int64 c = chunks - 2; c >= 1; --c) {
        __syncthreads();
        for (int unit = threadIdx.x; unit < hidden; unit += blockDim.x) {
            const real* const map = matrices + ((c - 1) * batch + blockIdx.x) * hidden * hidden + unit;
            real value = vectors ? vectors[(c - 1) * stride + at + unit] : real(0);
#pragma unroll 8
            for (int k = 0; k < hidden; ++k) value += map[int64(k) * hidden] * now[k];
            carry[(c - 1) * stride + at + unit] = next[unit] = value;
        }
        real* const swap = now;
        now = next;
        next = swap;
    }
}
#endif
