// CSR kernels with values (nnz, B), batch last. All are bound by memory: their floor is bytes / bandwidth, stated at each.
//
// A block is (lanes, entries): x runs along the batch, so neighbouring lanes read neighbouring addresses and an index is
// read once for the batch; y runs along entries or rows. `*_step` is 0 for values that the batch shares, else 1, and the
// row length of such an array is 1 or B accordingly.

#include "common.cuh"

__device__ __forceinline__ int64 entry_of_thread() { return int64(blockIdx.x) * blockDim.y + threadIdx.y; }

// Bytes: B* values and one index an entry, plus the rows of x, add and out. Operations: 2 B an entry.
extern "C" __global__ void __launch_bounds__(256) csr_matvec(
    const INDEX* __restrict__ indptr, const INDEX* __restrict__ indices, const real* __restrict__ data, int data_step,
    const real* __restrict__ x, const real* __restrict__ add, real* __restrict__ out, int64 rows, int batch) {
    const int64 row = entry_of_thread();
    if (row >= rows) return;
    const int64 begin = indptr[row], end = indptr[row + 1], width = data_step ? batch : 1;
    for (int b = threadIdx.x; b < batch; b += blockDim.x) {
        real sum = add ? add[row * batch + b] : real(0);
        for (int64 k = begin; k < end; ++k)
            sum += data[k * width + b * data_step] * x[int64(indices[k]) * batch + b];
        out[row * batch + b] = sum;
    }
}

// The same for one sample: a warp a row, lanes along the entries, so that values and indices are read in whole segments.
extern "C" __global__ void __launch_bounds__(256) csr_matvec_single(
    const INDEX* __restrict__ indptr, const INDEX* __restrict__ indices, const real* __restrict__ data,
    const real* __restrict__ x, const real* __restrict__ add, real* __restrict__ out, int64 rows) {
    const int64 row = entry_of_thread();
    if (row >= rows) return;
    const int64 end = indptr[row + 1];
    real sum = 0;
    for (int64 k = indptr[row] + threadIdx.x; k < end; k += WARP) sum += data[k] * x[indices[k]];
    sum = warp_sum(sum);
    if (threadIdx.x == 0) out[row] = add ? add[row] + sum : sum;
}

// A row a line of y, so that its scale is found without a search. Bytes: data read and out written once.
extern "C" __global__ void __launch_bounds__(256) scale_rows(
    const INDEX* __restrict__ indptr, const real* __restrict__ data, int data_step, const real* __restrict__ scale,
    int scale_step, real* __restrict__ out, int64 rows, int batch) {
    const int64 row = entry_of_thread();
    if (row >= rows) return;
    const int64 begin = indptr[row], end = indptr[row + 1];
    const int64 data_width = data_step ? batch : 1, scale_width = scale_step ? batch : 1;
    for (int b = threadIdx.x; b < batch; b += blockDim.x) {
        const real factor = scale[row * scale_width + b * scale_step];
        for (int64 k = begin; k < end; ++k) out[k * batch + b] = factor * data[k * data_width + b * data_step];
    }
}

// The same where nothing is per sample: lanes along the entries.
extern "C" __global__ void __launch_bounds__(256) scale_rows_single(
    const INDEX* __restrict__ indptr, const real* __restrict__ data, const real* __restrict__ scale,
    real* __restrict__ out, int64 rows) {
    const int64 row = entry_of_thread();
    if (row >= rows) return;
    const int64 end = indptr[row + 1];
    const real factor = scale[row];
    for (int64 k = indptr[row] + threadIdx.x; k < end; k += WARP) out[k] = factor * data[k];
}

// Bytes: data read and out written once, an index an entry; `scale` is small and stays in cache.
extern "C" __global__ void __launch_bounds__(256) scale_columns(
    const INDEX* __restrict__ indices, const real* __restrict__ data, int data_step, const real* __restrict__ scale,
    int scale_step, real* __restrict__ out, int64 entries, int batch) {
    const int64 k = entry_of_thread();
    if (k >= entries) return;
    const int64 data_start = k * (data_step ? batch : 1), scale_start = int64(indices[k]) * (scale_step ? batch : 1);
    for (int b = threadIdx.x; b < batch; b += blockDim.x)
        out[k * batch + b] = data[data_start + b * data_step] * scale[scale_start + b * scale_step];
}

// Bytes: the named values read, all of out written, an index an entry.
extern "C" __global__ void __launch_bounds__(256) gather(
    const real* __restrict__ data, const INDEX* __restrict__ index, real* __restrict__ out, int64 entries, int batch) {
    const int64 k = entry_of_thread();
    if (k >= entries) return;
    const int64 start = int64(index[k]) * batch;
    for (int b = threadIdx.x; b < batch; b += blockDim.x) out[k * batch + b] = data[start + b];
}

// Bytes: two values and two indices read, one value written an entry. Operations: B an entry.
extern "C" __global__ void __launch_bounds__(256) gather_multiply(
    const real* __restrict__ a, int a_step, const INDEX* __restrict__ a_index, const real* __restrict__ b, int b_step,
    const INDEX* __restrict__ b_index, real* __restrict__ out, int64 entries, int batch) {
    const int64 k = entry_of_thread();
    if (k >= entries) return;
    const int64 a_start = int64(a_index[k]) * (a_step ? batch : 1), b_start = int64(b_index[k]) * (b_step ? batch : 1);
    for (int s = threadIdx.x; s < batch; s += blockDim.x)
        out[k * batch + s] = a[a_start + s * a_step] * b[b_start + s * b_step];
}
