// Products C = A @ B that need nothing kept per product. x runs along the batch, y along the entries of a row, z along
// the rows of a block, a warp each.

#include "common.cuh"

// No row of A has more than one entry: rows of B, picked and scaled. Floor: B's values read, C's written.
extern "C" __global__ void __launch_bounds__(128) spgemm_select_rows(
    const INDEX* __restrict__ a_indptr, const INDEX* __restrict__ a_indices, const INDEX* __restrict__ b_indptr,
    const INDEX* __restrict__ c_indptr, const real* __restrict__ a_data, int a_step,
    const real* __restrict__ b_data, int b_step, real* __restrict__ out, int batch, int tiles, int64 rows) {
    const int64 row = int64(blockIdx.x / tiles) * blockDim.z + threadIdx.z;
    if (row >= rows) return;
    const int64 k = a_indptr[row];
    const int sample = (blockIdx.x % tiles) * blockDim.x + threadIdx.x;
    if (sample >= batch || k == a_indptr[row + 1]) return;
    const int64 a_width = a_step ? batch : 1, b_width = b_step ? batch : 1;
    const int64 begin = b_indptr[a_indices[k]], count = b_indptr[a_indices[k] + 1] - begin, c_begin = c_indptr[row];
    const real factor = a_data[k * a_width + sample * a_step];
    for (int64 q = threadIdx.y; q < count; q += blockDim.y)
        out[(c_begin + q) * batch + sample] = factor * b_data[(begin + q) * b_width + sample * b_step];
}

// Gustavson's algorithm without an index of the products: the columns of a row of C are sorted, so each product's place
// is found by bisection, some ten steps in the cache. A dense row of sums for every block, as on the host, would need
// memory for all columns times all blocks. The products of one entry of A land on different entries of C; the entries of
// A follow one another: no atomics, one order of sums.
extern "C" __global__ void __launch_bounds__(128, 12) spgemm_accumulate(
    const INDEX* __restrict__ a_indptr, const INDEX* __restrict__ a_indices, const INDEX* __restrict__ b_indptr,
    const INDEX* __restrict__ c_indptr, const INDEX* __restrict__ b_indices,
    const INDEX* __restrict__ c_indices, const real* __restrict__ a_data, int a_step, const real* __restrict__ b_data,
    int b_step, real* out, int batch, int tiles, int64 rows) {
    const int64 row = int64(blockIdx.x / tiles) * blockDim.z + threadIdx.z;
    if (row >= rows) return;
    const int sample = (blockIdx.x % tiles) * blockDim.x + threadIdx.x;
    const bool active = sample < batch;
    const int64 c_begin = c_indptr[row], c_end = c_indptr[row + 1];
    const int64 a_width = a_step ? batch : 1, b_width = b_step ? batch : 1;
    if (active)
        for (int64 c = c_begin + threadIdx.y; c < c_end; c += blockDim.y) out[c * batch + sample] = 0;
    __syncwarp();

    for (int64 k = a_indptr[row]; k < a_indptr[row + 1]; ++k) {
        const int64 column = a_indices[k], b_end = b_indptr[column + 1];
        if (active) {
            const real left = a_data[k * a_width + sample * a_step];
            int64 from = c_begin;  // columns of B ascend, so each search begins where the last one ended
            for (int64 q = b_indptr[column] + threadIdx.y; q < b_end; q += blockDim.y) {
                if (c_begin == c_end) break;
                const INDEX wanted = b_indices[q];
                int64 low = from + (wanted - c_indices[from]), high = c_end - 1;  // where no column is missing
                if (low < from || low > high || c_indices[low] != wanted) low = from;
                else high = low;
                while (low < high) {
                    const int64 middle = (low + high) / 2;
                    if (c_indices[middle] < wanted)
                        low = middle + 1;
                    else
                        high = middle;
                }
                from = low;
                if (c_indices[low] == wanted)  // C may be a part of the product, in a mask
                    out[low * batch + sample] += left * b_data[q * b_width + sample * b_step];
            }
        }
        __syncwarp();
    }
}
