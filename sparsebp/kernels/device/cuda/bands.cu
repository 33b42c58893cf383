// A banded matrix along an axis. One thread an element that is written: no atomics. Bound by memory; neighbouring lanes
// hold neighbouring positions behind the axis, or along the last one.

#include "common.cuh"

// x (planes, length, behind), out (planes, rows, behind). Row r has the entries indptr[r] to indptr[r + 1] of data, at
// first[r] and beside it.
extern "C" __global__ void __launch_bounds__(256) band_product(
    const real* __restrict__ x, const int64* __restrict__ first, const int64* __restrict__ indptr,
    const real* __restrict__ data, real* __restrict__ out, int64 size, int64 length, int64 rows, int64 behind) {
    const int64 element = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (element >= size) return;
    const int64 line = element / behind, row = line % rows;
    const int64 begin = indptr[row], end = indptr[row + 1];
    const real* source = x + (line / rows * length + first[row]) * behind + element % behind;
    real sum = begin < end ? source[0] * data[begin] : real(0);  // no zero is added: -0 stays
    for (int64 k = begin + 1; k < end; ++k) sum += source[(k - begin) * behind] * data[k];
    out[element] = sum;
}
