// Numeric phase of C = A @ B on a kept structure: values only, nothing is searched and nothing is sorted.
//
// One warp owns one row of C for one tile of the batch: x runs along the batch, y along the entries q of a row of B, z
// along the rows that a block has. The products of one entry of A land on different entries of C (columns of B differ), so
// they go in parallel; the entries of A follow one another. Hence no atomics, and each sum has one fixed order.
//
// Floors, per product and sample: 2 operations; one value of B, 1/cf of a value of C (cf = products an entry of C), and
// sizeof(POSITION) / B bytes of index. At B = 16, float32, cf = 1.25 that is about 3.7 bytes an operation: memory-bound.

#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128) spgemm_positions(
    const INDEX* __restrict__ a_indptr, const INDEX* __restrict__ a_indices, const INDEX* __restrict__ b_indptr,
    const INDEX* __restrict__ c_indptr, const int64* __restrict__ product_ptr,
    const POSITION* __restrict__ positions, const real* __restrict__ a_data, int a_step,
    const real* __restrict__ b_data, int b_step, real* out, int batch, int tiles, int64 rows, int capacity) {
    extern __shared__ __align__(16) real sums[];
    const int64 row = int64(blockIdx.x / tiles) * blockDim.z + threadIdx.z;
    if (row >= rows) return;
    const int sample = (blockIdx.x % tiles) * blockDim.x + threadIdx.x;
    const bool active = sample < batch;
    const int64 c_begin = c_indptr[row], c_count = c_indptr[row + 1] - c_begin;
    const int64 a_width = a_step ? batch : 1, b_width = b_step ? batch : 1;

    // A long row does not fit in shared memory; then its place in `out`, which this warp alone touches, holds the sums.
    const bool inside = c_count * int64(blockDim.x) <= capacity;
    real* const target = inside ? sums + threadIdx.z * capacity + threadIdx.x : out + c_begin * batch + sample;
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

// B has at most one entry a row, so product p belongs to one entry of A. Entries of a row of A may meet in one entry of C
// (pixels of one pooling window): of the products that the warp holds together, the first thread with a position adds
// those of the others, in their order. Floor: two values and two indices read a product, C written once.
extern "C" __global__ void __launch_bounds__(128) spgemm_select_columns(
    const INDEX* __restrict__ product_ptr, const INDEX* __restrict__ a_index, const INDEX* __restrict__ b_index,
    const INDEX* __restrict__ c_indptr, const POSITION* __restrict__ positions, const real* __restrict__ a_data, int a_step,
    const real* __restrict__ b_data, int b_step, real* out, int batch, int tiles, int64 rows) {
    const int64 row = int64(blockIdx.x / tiles) * blockDim.z + threadIdx.z;
    if (row >= rows) return;
    const int sample = (blockIdx.x % tiles) * blockDim.x + threadIdx.x;
    const bool active = sample < batch;
    const int64 c_begin = c_indptr[row], c_count = c_indptr[row + 1] - c_begin;
    const int64 a_width = a_step ? batch : 1, b_width = b_step ? batch : 1;
    real* const target = out + c_begin * batch + sample;
    if (active)
        for (int64 c = threadIdx.y; c < c_count; c += blockDim.y) target[c * batch] = 0;
    __syncwarp();

    const int64 end = product_ptr[row + 1];
    for (int64 first = product_ptr[row]; first < end; first += blockDim.y) {
        const int64 p = first + threadIdx.y;
        const bool present = active && p < end;
        int position = -1;
        real product = 0;
        if (present) {
            const int64 k = a_index ? int64(a_index[p]) : p;
            position = positions[p];
            product = a_data[k * a_width + sample * a_step] * b_data[int64(b_index[p]) * b_width + sample * b_step];
        }
        bool leads = present;
        real sum = present ? target[int64(position) * batch] : real(0);
        for (int y = 0; y < blockDim.y; ++y) {
            const int source = y * blockDim.x + threadIdx.x;
            const int other = __shfl_sync(ALL_LANES, position, source);
            const real value = __shfl_sync(ALL_LANES, product, source);
            if (present && other == position) {
                sum += value;
                if (y < threadIdx.y) leads = false;
            }
        }
        __syncwarp();
        if (leads) target[int64(position) * batch] = sum;
        __syncwarp();
    }
}

// The rows of B are runs of neighbouring columns; a block owns a row of C for one tile of the batch, x along the batch, y
// along a run. Sums stay in a register while the entries of A that name rows of one shape follow one another. Floor, per
// product and sample: 2 operations and one value of B, which neighbouring rows of C find in cache.
extern "C" __global__ void __launch_bounds__(256, 5) spgemm_runs(
    const INDEX* __restrict__ a_indptr, const INDEX* __restrict__ a_indices, const INDEX* __restrict__ b_indptr,
    const INDEX* __restrict__ c_indptr, const INDEX* __restrict__ b_shape,
    const INDEX* __restrict__ run_ptr, const INDEX* __restrict__ run_lengths, const int64* __restrict__ start_ptr,
    const POSITION* __restrict__ starts, const real* __restrict__ a_data, int a_step, const real* __restrict__ b_data,
    int b_step, real* out, int batch, int tiles) {
    const int64 row = blockIdx.x / tiles;
    const int sample = (blockIdx.x % tiles) * blockDim.x + threadIdx.x;
    const bool active = sample < batch;
    const int64 c_begin = c_indptr[row], c_count = c_indptr[row + 1] - c_begin;
    const int64 a_width = a_step ? batch : 1, b_width = b_step ? batch : 1;
    real* const target = out + c_begin * batch + sample;
    if (active)
        for (int64 c = threadIdx.y; c < c_count; c += blockDim.y) target[c * batch] = 0;
    __syncthreads();

    int64 start = start_ptr[row];
    const int64 end = a_indptr[row + 1];
    for (int64 k = a_indptr[row]; k < end;) {
        const INDEX shape = b_shape[a_indices[k]];
        int64 stop = k + 1;
        while (stop < end && b_shape[a_indices[stop]] == shape) ++stop;
        int64 begin = 0;
        for (int64 u = run_ptr[shape]; u < run_ptr[shape + 1]; ++u, ++start) {
            const int64 length = run_lengths[u], place = starts[start];
            if (active)
                for (int64 q = threadIdx.y; q < length; q += blockDim.y) {
                    real sum = target[(place + q) * batch];
#pragma unroll 1
                    for (int64 e = k; e < stop; ++e)
                        sum += a_data[e * a_width + sample * a_step] *
                               b_data[(int64(b_indptr[a_indices[e]]) + begin + q) * b_width + sample * b_step];
                    target[(place + q) * batch] = sum;
                }
            begin += length;
        }
        k = stop;
        __syncthreads();
    }
}

// Numeric phase of C = A @ B where A consists of dense blocks (m, k) and B of blocks (k, n): as `spgemm_positions`, with
// one position for all products of two blocks. The m rows of C that have the same columns read the same positions.
//
// Floors, per product and sample: 2 operations; one value of B, and sizeof(POSITION) / (m k n B) bytes of index.

extern "C" __global__ void __launch_bounds__(128) spgemm_blocks(
    const INDEX* __restrict__ a_indptr, const INDEX* __restrict__ a_indices, const INDEX* __restrict__ b_indptr,
    const INDEX* __restrict__ c_indptr, const int64* __restrict__ product_ptr,
    const POSITION* __restrict__ positions, int m, int k, int n, const real* __restrict__ a_data, int a_step,
    const real* __restrict__ b_data, int b_step, real* out, int batch, int tiles, int64 rows) {
    const int64 row = int64(blockIdx.x / tiles) * blockDim.z + threadIdx.z;
    if (row >= rows) return;
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
