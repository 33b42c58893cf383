// Numeric phase of C = A @ B where A consists of dense blocks (m, k) and B of blocks (k, n): as `spgemm_positions`, with
// one position for all products of two blocks. The m rows of C that have the same columns read the same positions.
//
// Floors, per product and sample: 2 operations; one value of B, and sizeof(POSITION) / (m k n B) bytes of index.

#include "common.cuh"

extern "C" __global__ void __launch_bounds__(32) spgemm_blocks(
    const INDEX* __restrict__ a_indptr, const INDEX* __restrict__ a_indices, const INDEX* __restrict__ b_indptr,
    const INDEX* __restrict__ c_indptr, const int64* __restrict__ product_ptr,
    const POSITION* __restrict__ positions, int m, int k, int n, const real* __restrict__ a_data, int a_step,
    const real* __restrict__ b_data, int b_step, real* out, int batch, int tiles) {
    const int64 row = blockIdx.x / tiles;
    const int sample = (blockIdx.x % tiles) * blockDim.x + threadIdx.x;
    const bool active = sample < batch;
    const int64 c_begin = c_indptr[row], c_count = c_indptr[row + 1] - c_begin;
    const int64 a_width = a_step ? batch : 1, b_width = b_step ? batch : 1;
    real* const target = out + c_begin * batch + sample;
    if (active)
        for (int64 c = threadIdx.y; c < c_count; c += blockDim.y) target[c * batch] = 0;
    __syncwarp();

    int64 product = product_ptr[row / m];
    const int64 end = a_indptr[row + 1];
    for (int64 e = a_indptr[row]; e < end; e += k) {
        const int64 column = a_indices[e], b_begin = b_indptr[column], b_count = b_indptr[column + 1] - b_begin;
        if (active)
            for (int64 q = threadIdx.y; q < b_count; q += blockDim.y) {
                real* const place = target + (int64(positions[product + q / n]) * n + q % n) * batch;
                real sum = *place;
                for (int u = 0; u < k; ++u)
                    sum += a_data[(e + u) * a_width + sample * a_step] *
                           b_data[(b_begin + u * b_count + q) * b_width + sample * b_step];
                *place = sum;
            }
        product += b_count / n;
        __syncwarp();
    }
}
