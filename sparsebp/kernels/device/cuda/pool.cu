// Values of pooling's transposed Jacobian, batch last. Bound by memory: the values are written once; winners are read
// once for every row of the kernel.

#include "common.cuh"

// A block is (lanes along the batch, entries). `taps` entries beside each other belong to one window, `windows` windows
// beside each other to one line.
extern "C" __global__ void __launch_bounds__(256) max_pool_values(
    const WINNER* __restrict__ winner, int64 columns, const INDEX* __restrict__ window, const int* __restrict__ offset,
    int64 windows, int64 taps, real* __restrict__ out, int64 entries, int batch) {
    const int64 entry = int64(blockIdx.x) * blockDim.y + threadIdx.y;
    if (entry >= entries) return;
    const int64 nth = entry / taps, line = nth / windows;
    const int64 column = window[line] + nth % windows;
    const int place = offset[line] + int(entry % taps);
    for (int b = threadIdx.x; b < batch; b += blockDim.x)
        out[entry * batch + b] = int(winner[b * columns + column]) == place ? real(1) : real(0);
}
