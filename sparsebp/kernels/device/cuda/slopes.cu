// Slopes of pointwise operators: what a forward kept, batch first, becomes a diagonal's values, batch last. Bound by
// memory: read once, written once.

#include "common.cuh"

constexpr int TILE = 32;

// 0: the slope itself was kept; 1: relu, 2: tanh, 3: sigmoid, from y.
__device__ __forceinline__ real slope_of(int function, real y) {
    if (function == 1) return y <= real(0) ? real(0) : real(1);  // 1 at a NaN
    if (function == 2) return real(1) - y * y;
    return function == 3 ? y * (real(1) - y) : y;
}

extern "C" __global__ void __launch_bounds__(256) pointwise_slopes_single(
    const real* __restrict__ kept, int function, real* __restrict__ out, int64 size) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < size) out[i] = slope_of(function, kept[i]);
}

// A tile goes through shared memory, so that both sides are read and written in whole segments. Blocks number the tiles
// along the elements first.
extern "C" __global__ void __launch_bounds__(256) pointwise_slopes(
    const real* __restrict__ kept, int function, real* __restrict__ out, int64 size, int64 batch, int64 tiles) {
    __shared__ real tile[TILE][TILE + 1];
    const int64 first = blockIdx.x % tiles * TILE, sample = blockIdx.x / tiles * TILE;
    for (int b = threadIdx.y; b < TILE; b += blockDim.y)
        if (sample + b < batch && first + threadIdx.x < size)
            tile[b][threadIdx.x] = slope_of(function, kept[(sample + b) * size + first + threadIdx.x]);
    __syncthreads();
    for (int i = threadIdx.y; i < TILE; i += blockDim.y)
        if (first + i < size && sample + threadIdx.x < batch)
            out[(first + i) * batch + sample + threadIdx.x] = tile[threadIdx.x][i];
}
