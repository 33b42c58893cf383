// Optimizer updates and clipping: one launch, and one pass over memory, for all arrays of a network.
//
// `addresses` (n, columns): the address of each array, by row parameter, gradient, buffers; 0 where a rule's buffer is
// not there. `layout` (n + 1, 3): size, first chunk, step number; the last row holds the number of chunks. A block works
// on one chunk of one array. `options` (n, count) in the order of kernels/api/optimizers.py. Scalars that come from the step
// number are worked out in double, once a block. The floor is bytes / bandwidth.

#include "common.cuh"

constexpr int64 CHUNK = 4096;
constexpr int LAYOUT = 3;

// The part of one array that this block works on.
struct Piece {
    int64 row, first, last;
    const int64* at;
    __device__ Piece(const int64* addresses, const int64* layout, int64 n, int columns) {
        int64 low = 0, high = n;  // the last row whose first chunk is not behind this one
        while (high - low > 1) {
            const int64 middle = (low + high) / 2;
            if (layout[middle * LAYOUT + 1] <= blockIdx.x) low = middle;
            else high = middle;
        }
        row = low;
        first = (blockIdx.x - layout[row * LAYOUT + 1]) * CHUNK;
        last = min(first + CHUNK, layout[row * LAYOUT]);
        at = addresses + row * columns;
    }
    __device__ real* array(int column) const { return reinterpret_cast<real*>(at[column]); }
};

#define FOR_EACH(i, piece) for (int64 i = piece.first + threadIdx.x; i < piece.last; i += blockDim.x)

// The gradient that a rule sees: negated to go uphill, with the decay added. Without decay, an infinite parameter must
// not turn into NaN through 0 * infinity.
__device__ __forceinline__ real gradient(real grad, real param, real decay, bool uphill) {
    if (uphill) grad = -grad;
    return decay != 0 ? grad + decay * param : grad;
}

// From `old` towards `next`, from the nearer end.
__device__ __forceinline__ real lerp_of(real old, real next, real weight) {
    return weight < real(0.5) ? old + weight * (next - old) : next - (next - old) * (real(1) - weight);
}

// Bytes: parameter and buffer read and written, gradient read. Options: lr, momentum, dampening, weight_decay, nesterov,
// maximize.
extern "C" __global__ void __launch_bounds__(256) sgd_update(
    const int64* __restrict__ addresses, const int64* __restrict__ layout, const double* __restrict__ options,
    int64 n) {
    const Piece piece(addresses, layout, n, 3);
    const double* const o = options + piece.row * 6;
    const real lr = o[0], momentum = o[1], fresh = 1.0 - o[2], decay = o[3];
    const bool nesterov = o[4] != 0, uphill = o[5] != 0, set = layout[piece.row * LAYOUT + 2] > 1;
    real* const param = piece.array(0);
    const real* const grad = piece.array(1);
    real* const buffer = piece.array(2);
    if (!buffer) {
        FOR_EACH(i, piece) param[i] -= lr * gradient(grad[i], param[i], decay, uphill);
        return;
    }
    FOR_EACH(i, piece) {
        const real step = gradient(grad[i], param[i], decay, uphill);
        const real kept = set ? momentum * buffer[i] + fresh * step : step;
        buffer[i] = kept;
        param[i] -= lr * (nesterov ? step + momentum * kept : kept);
    }
}

// Bytes: parameter and two or three buffers read and written, gradient read. Options: lr, beta1, beta2, eps,
// weight_decay, decoupled, maximize.
extern "C" __global__ void __launch_bounds__(256, 2) adam_update(
    const int64* __restrict__ addresses, const int64* __restrict__ layout, const double* __restrict__ options,
    int64 n) {
    __shared__ real corrections[2];
    const Piece piece(addresses, layout, n, 5);
    const double* const o = options + piece.row * 7;
    if (threadIdx.x == 0) {
        const double count = double(layout[piece.row * LAYOUT + 2]);
        corrections[0] = o[0] / (1.0 - pow(o[1], count));
        corrections[1] = sqrt(1.0 - pow(o[2], count));
    }
    __syncthreads();
    const real step_size = corrections[0], root = corrections[1];
    const real rest1 = 1.0 - o[1], beta2 = o[2], rest2 = 1.0 - o[2], eps = o[3];
    const bool decoupled = o[5] != 0, uphill = o[6] != 0;
    const real decay = decoupled ? 0.0 : o[4], keep = decoupled ? 1.0 - o[0] * o[4] : 1.0;
    real* const param = piece.array(0);
    const real* const grad = piece.array(1);
    real *const exp_avg = piece.array(2), *const exp_avg_sq = piece.array(3), *const largest = piece.array(4);
    FOR_EACH(i, piece) {
        const real weight = param[i] * keep, slope = gradient(grad[i], weight, decay, uphill);
        const real mean = lerp_of(exp_avg[i], slope, rest1);
        real square = beta2 * exp_avg_sq[i] + rest2 * slope * slope;
        exp_avg[i] = mean;
        exp_avg_sq[i] = square;
        if (largest) {
            square = largest[i] > square ? largest[i] : square;
            largest[i] = square;
        }
        param[i] = weight - step_size * mean / (sqrt_of(square) / root + eps);
    }
}

// Bytes: parameter and buffer read and written, gradient read. Options: lr, lr_decay, eps, weight_decay, maximize.
extern "C" __global__ void __launch_bounds__(256) adagrad_update(
    const int64* __restrict__ addresses, const int64* __restrict__ layout, const double* __restrict__ options,
    int64 n) {
    const Piece piece(addresses, layout, n, 3);
    const double* const o = options + piece.row * 5;
    const real lr = o[0] / (1.0 + double(layout[piece.row * LAYOUT + 2] - 1) * o[1]), eps = o[2], decay = o[3];
    const bool uphill = o[4] != 0;
    real* const param = piece.array(0);
    const real* const grad = piece.array(1);
    real* const sum = piece.array(2);
    FOR_EACH(i, piece) {
        const real slope = gradient(grad[i], param[i], decay, uphill), total = sum[i] + slope * slope;
        sum[i] = total;
        param[i] -= lr * slope / (sqrt_of(total) + eps);
    }
}

// Bytes: parameter and two buffers read and written, gradient read. Options: lr, rho, eps, weight_decay, maximize.
extern "C" __global__ void __launch_bounds__(256) adadelta_update(
    const int64* __restrict__ addresses, const int64* __restrict__ layout, const double* __restrict__ options,
    int64 n) {
    const Piece piece(addresses, layout, n, 4);
    const double* const o = options + piece.row * 5;
    const real lr = o[0], rho = o[1], rest = 1.0 - o[1], eps = o[2], decay = o[3];
    const bool uphill = o[4] != 0;
    real* const param = piece.array(0);
    const real* const grad = piece.array(1);
    real *const square_avg = piece.array(2), *const acc_delta = piece.array(3);
    FOR_EACH(i, piece) {
        const real slope = gradient(grad[i], param[i], decay, uphill);
        const real square = rho * square_avg[i] + rest * slope * slope, moved = acc_delta[i];
        const real delta = sqrt_of(moved + eps) / sqrt_of(square + eps) * slope;
        square_avg[i] = square;
        acc_delta[i] = rho * moved + rest * delta * delta;
        param[i] -= lr * delta;
    }
}

// Bytes: parameter and one to three buffers read and written, gradient read. Options: lr, alpha, eps, weight_decay,
// momentum, maximize.
extern "C" __global__ void __launch_bounds__(256) rmsprop_update(
    const int64* __restrict__ addresses, const int64* __restrict__ layout, const double* __restrict__ options,
    int64 n) {
    const Piece piece(addresses, layout, n, 5);
    const double* const o = options + piece.row * 6;
    const real lr = o[0], alpha = o[1], rest = 1.0 - o[1], eps = o[2], decay = o[3], momentum = o[4];
    const bool uphill = o[5] != 0;
    real* const param = piece.array(0);
    const real* const grad = piece.array(1);
    real *const square_avg = piece.array(2), *const buffer = piece.array(3), *const grad_avg = piece.array(4);
    FOR_EACH(i, piece) {
        const real slope = gradient(grad[i], param[i], decay, uphill);
        real square = alpha * square_avg[i] + rest * slope * slope;
        square_avg[i] = square;
        if (grad_avg) {  // centered: the variance
            const real mean = lerp_of(grad_avg[i], slope, rest);
            grad_avg[i] = mean;
            square -= mean * mean;
        }
        const real root = sqrt_of(square) + eps;
        if (buffer) {
            const real kept = momentum * buffer[i] + slope / root;
            buffer[i] = kept;
            param[i] -= lr * kept;
        } else {
            param[i] -= lr * slope / root;
        }
    }
}

// ---- clipping --------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(256) scale_arrays(
    const int64* __restrict__ addresses, const int64* __restrict__ layout, int64 n, real factor) {
    const Piece piece(addresses, layout, n, 1);
    real* const values = piece.array(0);
    FOR_EACH(i, piece) values[i] *= factor;
}

// NaN stays NaN: both comparisons are false.
extern "C" __global__ void __launch_bounds__(256) clamp_arrays(
    const int64* __restrict__ addresses, const int64* __restrict__ layout, int64 n, real limit) {
    const Piece piece(addresses, layout, n, 1);
    real* const values = piece.array(0);
    FOR_EACH(i, piece) {
        const real value = values[i];
        values[i] = value > limit ? limit : value < -limit ? -limit : value;
    }
}

__device__ __forceinline__ double warp_total(double value) {
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
    return value;
}

// The sum of the squares of each chunk.
extern "C" __global__ void __launch_bounds__(256) chunk_squares(
    const int64* __restrict__ addresses, const int64* __restrict__ layout, int64 n, double* __restrict__ sums) {
    __shared__ double warps[8];
    const Piece piece(addresses, layout, n, 1);
    const real* const values = piece.array(0);
    double total = 0;
    FOR_EACH(i, piece) total += double(values[i]) * double(values[i]);
    total = warp_total(total);
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = total;
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = 0;
        for (int w = 0; w < 8; ++w) sum += warps[w];
        sums[blockIdx.x] = sum;
    }
}

// A warp an array: the sums of its chunks, added in a fixed order.
extern "C" __global__ void __launch_bounds__(256) sum_chunks(
    const int64* __restrict__ layout, int64 n, const double* __restrict__ sums, double* __restrict__ out) {
    const int64 row = int64(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= n) return;
    const int64 end = layout[(row + 1) * LAYOUT + 1];
    double total = 0;
    for (int64 chunk = layout[row * LAYOUT + 1] + threadIdx.x; chunk < end; chunk += WARP) total += sums[chunk];
    total = warp_total(total);
    if (threadIdx.x == 0) out[row] = total;
}
