// Second phase of reduce-then-scan: combine the chunks' maps, vectors only, from the last chunk to the first.
// u[c - 1] = P[c] u[c] + v[c] for c = chunks - 2 ... 1. `carry` (chunks - 1, B, H) comes with its last entry set, the
// gradient that leaves the last chunk, and is filled downwards. Bytes: every map once. Bound by the latency of a product
// with a vector, times the number of chunks.

#include "common.cuh"
#include "maps.cuh"

#ifdef HIDDEN
constexpr int BLOCK = 256;
constexpr int FITS = 20480 / (MAP * int(sizeof(real)));
constexpr int ROUND = FITS > 8 ? 8 : FITS / 2 * 2;  // even: two copies of the state alternate, and a round begins with the first
static_assert(ROUND > 0, "two maps fit");
constexpr int PIECES = MAP / WIDTH, SHARE = (ROUND * PIECES + BLOCK - WARP - 1) / (BLOCK - WARP);

// A block a sample: its first warp follows the chain of chunks and finds their maps in shared memory, where the others
// bring the next ROUND of them meanwhile. `maps` (chunks - 2, B, MAP), from 16 bytes on.
extern "C" __global__ void __launch_bounds__(BLOCK, 1) scan_combine(
    const real* __restrict__ maps, real* __restrict__ carry, int batch, int hidden, int64 chunks) {
    constexpr int H = HIDDEN;
    __shared__ __align__(16) real rounds[2][ROUND * MAP];
    __shared__ __align__(16) real state[2][WARP];
    const int lane = threadIdx.x % WARP, unit = min(lane, H - 1);
    const bool follows = threadIdx.x < WARP;
    const int64 stride = int64(batch) * H, at = int64(blockIdx.x) * H + unit;

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
    const auto row_of = [&](const real* map, real(&row)[PITCH]) {
#pragma unroll
        for (int k = 0; k <= H; k += WIDTH) load_wide(map + unit * PITCH + k, *reinterpret_cast<real(*)[WIDTH]>(row + k));
    };

    if (follows)
        state[0][lane] = carry[(chunks - 2) * stride + at];
    else
        bring(rounds[0], chunks - 2);
    __syncthreads();
    real* out = carry + (chunks - 3) * stride + at;
    int now = 0;
    for (int64 last = chunks - 2; last >= 1; last -= ROUND, now ^= 1) {
        if (!follows)
            bring(rounds[now ^ 1], last - ROUND);
        else {
            const int count = int(min(last, int64(ROUND)));
            real row[PITCH];
            row_of(rounds[now], row);
#pragma unroll
            for (int i = 0; i < ROUND; ++i) {
                if (i == count) break;
                real sums[4] = {row[H]};
#pragma unroll
                for (int k = 0; k < H; k += WIDTH) {
                    real piece[WIDTH];
                    load_wide(state[i % 2] + k, piece);
#pragma unroll
                    for (int q = 0; q < WIDTH; ++q)
                        if (k + q < H) sums[(k + q) % 4] += row[k + q] * piece[q];
                }
                const real value = (sums[0] + sums[1]) + (sums[2] + sums[3]);
                state[(i + 1) % 2][lane] = value;
                if (i + 1 < ROUND) row_of(rounds[now] + (i + 1) * MAP, row);
                __syncwarp();
                if (lane < H) *out = value;
                out -= stride;
            }
        }
        __syncthreads();
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
