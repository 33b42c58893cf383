// Numeric phase of C = A @ B on a kept structure: values only, nothing is searched and nothing is sorted.
//
// One warp owns one row of C for one tile of the batch: x runs along the batch, y along the entries q of a row of B. The
// products of one entry of A land on different entries of C (columns of B differ), so they go in parallel; the entries
// of A follow one another. Hence no atomics, and each sum has one fixed order.
//
// Floors, per product and sample: 2 operations; one value of B, 1/cf of a value of C (cf = products an entry of C), and
// sizeof(POSITION) / B bytes of index. At B = 16, float32, cf = 1.25 that is about 3.7 bytes an operation: memory-bound.

#include "common.cuh"

extern "C" __global__ void __launch_bounds__(32) spgemm_numeric(
    const INDEX* __restrict__ a_indptr, const INDEX* __restrict__ a_indices, const real* __restrict__ a_data, int a_step,
    const INDEX* __restrict__ b_indptr, const real* __restrict__ b_data, int b_step, const INDEX* __restrict__ c_indptr,
    const int64* __restrict__ product_ptr, const POSITION* __restrict__ positions, real* out, int batch, int tiles,
    int capacity) {
    extern __shared__ __align__(16) real sums[];
    const int64 row = blockIdx.x / tiles;
    const int sample = (blockIdx.x % tiles) * blockDim.x + threadIdx.x;
    const bool active = sample < batch;
    const int64 c_begin = c_indptr[row], c_count = c_indptr[row + 1] - c_begin;
    const int64 a_width = a_step ? batch : 1, b_width = b_step ? batch : 1;

    // A long row does not fit in shared memory; then its place in `out`, which this warp alone touches, holds the sums.
    const bool inside = c_count * int64(blockDim.x) <= capacity;
    real* const target = inside ? sums + threadIdx.x : out + c_begin * batch + sample;
    const int64 stride = inside ? blockDim.x : batch;
    if (active)
        for (int64 c = threadIdx.y; c < c_count; c += blockDim.y) target[c * stride] = 0;
    __syncwarp();

    int64 product = product_ptr[row];
    for (int64 k = a_indptr[row]; k < a_indptr[row + 1]; ++k) {
        const int64 column = a_indices[k], b_begin = b_indptr[column], b_count = b_indptr[column + 1] - b_begin;
        if (active) {
            const real left = a_data[k * a_width + sample * a_step];
            for (int64 q = threadIdx.y; q < b_count; q += blockDim.y)
                target[int64(positions[product + q]) * stride] += left * b_data[(b_begin + q) * b_width + sample * b_step];
        }
        product += b_count;
        __syncwarp();
    }

    if (active && inside)
        for (int64 c = threadIdx.y; c < c_count; c += blockDim.y) out[(c_begin + c) * batch + sample] = target[c * stride];
}
