// Stacks of small dense blocks (n, n, B), batch last: a whole level of a scan in one launch.
//
// Neighbouring lanes are neighbouring samples, so every access is a run of the batch. `*_step` is 0 for values that the
// batch shares, else 1. Matrices are streamed once and are far larger than the vectors: matvec and chain are bound by
// memory (bytes of `a` / bandwidth); matmul does n operations a loaded value and is bound by arithmetic from n = 32 on.

#include "common.cuh"

constexpr int TILE = 4;  // a thread of the matrix products owns TILE x TILE entries of one sample

// A level of products. Operations: 2 m k n B each; bytes: (m k + k n + m n) B values each.
extern "C" __global__ void __launch_bounds__(128) dense_matmul(
    const real* __restrict__ a, const int64* __restrict__ a_index, int a_step, const real* __restrict__ b,
    const int64* __restrict__ b_index, int b_step, real* __restrict__ out, const int64* __restrict__ out_index,
    int64 tiles, int m, int k, int n, int batch) {
    const int64 tile = int64(blockIdx.x) * blockDim.y + threadIdx.y;
    if (tile >= tiles) return;
    const int column_tiles = (n + TILE - 1) / TILE, row_tiles = (m + TILE - 1) / TILE;
    const int j0 = int(tile % column_tiles) * TILE, i0 = int(tile / column_tiles % row_tiles) * TILE;
    const int64 s = tile / column_tiles / row_tiles;
    const int a_width = a_step ? batch : 1, b_width = b_step ? batch : 1;
    const real* const left = a + a_index[s] * m * k * a_width;
    const real* const right = b + b_index[s] * k * n * b_width;
    real* const target = out + out_index[s] * m * n * batch;

    for (int sample = threadIdx.x; sample < batch; sample += blockDim.x) {
        real sums[TILE][TILE] = {};
        for (int q = 0; q < k; ++q) {
            real rows[TILE], columns[TILE];
#pragma unroll
            for (int i = 0; i < TILE; ++i)  // entries past the edge repeat the last one and are not stored
                rows[i] = left[(int64(min(i0 + i, m - 1)) * k + q) * a_width + sample * a_step];
#pragma unroll
            for (int j = 0; j < TILE; ++j)
                columns[j] = right[(int64(q) * n + min(j0 + j, n - 1)) * b_width + sample * b_step];
#pragma unroll
            for (int i = 0; i < TILE; ++i)
#pragma unroll
                for (int j = 0; j < TILE; ++j) sums[i][j] += rows[i] * columns[j];
        }
#pragma unroll
        for (int i = 0; i < TILE; ++i)
#pragma unroll
            for (int j = 0; j < TILE; ++j)
                if (i0 + i < m && j0 + j < n) target[(int64(i0 + i) * n + j0 + j) * batch + sample] = sums[i][j];
    }
}

// A level of matrix-vector products, a thread an entry and sample. `out` may be the array `x` or `add`: other entries of it.
extern "C" __global__ void __launch_bounds__(256) dense_matvec(
    const real* __restrict__ a, const int64* __restrict__ a_index, int a_step, const real* x,
    const int64* __restrict__ x_index, const real* add, const int64* __restrict__ add_index, real* out,
    const int64* __restrict__ out_index, int64 rows, int m, int k, int batch) {
    const int64 row = int64(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const int64 s = row / m;
    const int i = int(row % m), width = a_step ? batch : 1;
    const real* const left = a + (a_index[s] * m + i) * k * width;
    const real* const right = x + x_index[s] * k * batch;
    for (int sample = threadIdx.x; sample < batch; sample += blockDim.x) {
        real sum = add ? add[(add_index[s] * m + i) * batch + sample] : real(0);
#pragma unroll 4
        for (int q = 0; q < k; ++q) sum += left[int64(q) * width + sample * a_step] * right[int64(q) * batch + sample];
        out[(out_index[s] * m + i) * batch + sample] = sum;
    }
}

// The same for one sample: a warp an entry, lanes along the row of the matrix.
extern "C" __global__ void __launch_bounds__(256) dense_matvec_single(
    const real* __restrict__ a, const int64* __restrict__ a_index, const real* x, const int64* __restrict__ x_index,
    const real* add, const int64* __restrict__ add_index, real* out, const int64* __restrict__ out_index, int64 rows,
    int m, int k) {
    const int64 row = int64(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const int64 s = row / m;
    const int i = int(row % m);
    const real* const left = a + (a_index[s] * m + i) * k;
    const real* const right = x + x_index[s] * k;
    real sum = 0;
    for (int q = threadIdx.x; q < k; q += WARP) sum += left[q] * right[q];
    sum = warp_sum(sum);
    if (threadIdx.x == 0) out[out_index[s] * m + i] = add ? add[add_index[s] * m + i] + sum : sum;
}

// v = a[s] @ v + add[s] along one chunk, for COLUMNS vectors of the same samples at once. The block holds the vectors in
// shared memory, twice: one is read while the other is written, so a step needs a single barrier. Returns which of the
// two holds the result, of which each thread may read what it wrote itself. Vectors lie as [entry][column][sample]; x of the
// block runs along samples, y along entries.
template <int COLUMNS>
__device__ __forceinline__ const real* run_chain(
    const real* __restrict__ a, int a_step, const real* __restrict__ add, real* every_step, real* vectors, int64 begin,
    int64 end, int n, int batch, int sample) {
    const int tile = blockDim.x, width = a_step ? batch : 1, size = n * COLUMNS * tile;
    const bool active = sample < batch;
    real* current = vectors;
    real* next = vectors + size;
    for (int64 s = begin; s < end; ++s) {
        __syncthreads();
        for (int i = threadIdx.y; i < n; i += blockDim.y) {
            real sums[COLUMNS] = {};
            if (active) {
                const real* const row = a + (s * n + i) * n * width + sample * a_step;
                if (add) sums[0] = add[(s * n + i) * batch + sample];
#pragma unroll 4
                for (int q = 0; q < n; ++q) {
                    const real value = row[int64(q) * width];
#pragma unroll
                    for (int c = 0; c < COLUMNS; ++c) sums[c] += value * current[(q * COLUMNS + c) * tile + threadIdx.x];
                }
                if (every_step) every_step[(s * n + i) * batch + sample] = sums[0];
            }
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) next[(i * COLUMNS + c) * tile + threadIdx.x] = sums[c];
        }
        real* const swap = current;
        current = next;
        next = swap;
    }
    return current;
}

// Chains of matrix-vector products, a block a chunk and tile of samples. `start` null: from zero. `every_step` gets each
// vector, `last` the chunk's last one; either may be null.
extern "C" __global__ void __launch_bounds__(256) dense_chain(
    const real* __restrict__ a, int a_step, const int64* __restrict__ chunk_ptr, const real* __restrict__ start,
    const real* __restrict__ add, real* every_step, real* last, int n, int batch, int tiles) {
    extern __shared__ __align__(16) real vectors[];
    const int64 chunk = blockIdx.x / tiles;
    const int sample = (blockIdx.x % tiles) * blockDim.x + threadIdx.x;
    for (int i = threadIdx.y; i < n; i += blockDim.y)
        vectors[i * blockDim.x + threadIdx.x] =
            start && sample < batch ? start[(chunk * n + i) * batch + sample] : real(0);
    const real* const result =
        run_chain<1>(a, a_step, add, every_step, vectors, chunk_ptr[chunk], chunk_ptr[chunk + 1], n, batch, sample);
    if (last && sample < batch)
        for (int i = threadIdx.y; i < n; i += blockDim.y)
            last[(chunk * n + i) * batch + sample] = result[i * blockDim.x + threadIdx.x];
}

// P = a[last] @ ... @ a[first]: every column of the identity goes through the chunk by itself, TILE of them in a block,
// so that a value of `a` serves TILE columns. Operations: 2 n^3 B a step; bytes of `a`: n / TILE times, from L2.
extern "C" __global__ void __launch_bounds__(256) dense_reduce(
    const real* __restrict__ a, int a_step, const int64* __restrict__ chunk_ptr, real* __restrict__ out, int n,
    int batch, int tiles) {
    extern __shared__ __align__(16) real vectors[];
    const int column_tiles = (n + TILE - 1) / TILE;
    const int sample = (blockIdx.x % tiles) * blockDim.x + threadIdx.x;
    const int j0 = int(blockIdx.x / tiles % column_tiles) * TILE;
    const int64 chunk = blockIdx.x / tiles / column_tiles;
    for (int i = threadIdx.y; i < n; i += blockDim.y)
        for (int c = 0; c < TILE; ++c) vectors[(i * TILE + c) * blockDim.x + threadIdx.x] = i == j0 + c ? real(1) : real(0);
    const real* const result = run_chain<TILE>(
        a, a_step, nullptr, nullptr, vectors, chunk_ptr[chunk], chunk_ptr[chunk + 1], n, batch, sample);
    if (sample < batch)
        for (int i = threadIdx.y; i < n; i += blockDim.y)
            for (int c = 0; c < TILE && j0 + c < n; ++c)
                out[((chunk * n + i) * n + j0 + c) * batch + sample] = result[(i * TILE + c) * blockDim.x + threadIdx.x];
}

// Linear layers of a few rows: y = x W' + b and its gradients, a launch each, where a library's product would take longer to
// begin than to run. A thread an entry; what it reads, the others of its warp read too, or lies beside it.
extern "C" __global__ void __launch_bounds__(256) affine(
    const real* __restrict__ x, const real* __restrict__ weight, const real* __restrict__ bias, real* __restrict__ out,
    int rows, int inputs, int outputs) {
    const int e = blockIdx.x * blockDim.x + threadIdx.x, row = e / outputs, o = e % outputs;
    if (row >= rows) return;
    real sum = 0;
#pragma unroll 8
    for (int i = 0; i < inputs; ++i) sum += x[row * inputs + i] * weight[o * inputs + i];
    out[e] = bias ? sum + bias[o] : sum;
}

// The bias (null: none) is a column more of the weight, of an input that is 1.
extern "C" __global__ void __launch_bounds__(256) affine_grad(
    const real* __restrict__ gy, const real* __restrict__ x, real* __restrict__ weight, real* __restrict__ bias, int rows,
    int inputs, int outputs) {
    const int e = blockIdx.x * blockDim.x + threadIdx.x, o = e / (inputs + 1), i = e % (inputs + 1);
    if (o >= outputs || (i == inputs && !bias)) return;
    real sum = 0;
#pragma unroll 8
    for (int row = 0; row < rows; ++row) sum += gy[row * outputs + o] * (i < inputs ? x[row * inputs + i] : real(1));
    *(i < inputs ? weight + o * inputs + i : bias + o) = sum;
}

// To every row, a warp each. Bytes: `out` read and written.
extern "C" __global__ void __launch_bounds__(256) add_bias(
    real* __restrict__ out, const real* __restrict__ bias, int64 rows, int columns) {
    const int64 row = int64(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    for (int c = threadIdx.x; c < columns; c += WARP) out[row * columns + c] += bias[c];
}
