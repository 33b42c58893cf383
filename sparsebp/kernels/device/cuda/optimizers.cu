// Optimizer updates and clipping: one launch, and one pass over memory, for all arrays of a network that fit into one.
//
// What a launch knows of its arrays comes by value, in its arguments: nothing is sent to the device before it, and there
// is no memory that it might find changed. A block works on one chunk of one array. Options, in the order of
// `UPDATE_OPTIONS` in kernels/spec.py, and step numbers come by value too, unless pointers say where they are on the device: a
// captured step finds the ones of its own time there. Scalars that come from the step number are worked out in double,
// once a block. The floor is bytes / bandwidth.

#include "common.cuh"

constexpr int64 CHUNK = 4096;

// The arguments that tell of arrays, a row each: the addresses of a parameter, its gradient and its buffers (0 where a
// rule's buffer is not there), its size, first chunk and step number, and its options. `first` has one entry more than
// rows: the number of chunks. With the pointers, they fit into the 4 KiB that all versions of CUDA allow.
template <int COLUMNS, int OPTIONS>
struct Table {
    static constexpr int rows = 3968 / (8 * (COLUMNS + 3 + OPTIONS)), options = OPTIONS;
    struct Addresses { int64 of[rows][COLUMNS]; };
    struct Layout { int64 size[rows], first[rows + 1], step[rows]; };
    struct Options { double of[rows][OPTIONS]; };
};
typedef Table<3, 6> Sgd;
typedef Table<5, 7> Adam;
typedef Table<4, 8> Nadam;
typedef Table<4, 7> Radam;
typedef Table<4, 6> Adamax;
typedef Table<3, 5> Adagrad;
typedef Table<4, 5> Adadelta;
typedef Table<5, 6> Rmsprop;
typedef Table<1, 0> Plain;

// The part of one array that this block works on, of `n` arrays.
template <class T>
struct Piece {
    int row, count;
    int64 first;
    const typename T::Addresses& addresses;
    __device__ __forceinline__ Piece(
        const typename T::Addresses& addresses, const typename T::Layout& layout, int n) : addresses(addresses) {
        int low = 0, high = n;  // the last row whose first chunk is not behind this one
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (layout.first[middle] <= blockIdx.x) low = middle;
            else high = middle;
        }
        row = low;
        first = (blockIdx.x - layout.first[row]) * CHUNK;
        count = int(min(CHUNK, layout.size[row] - first));
    }
    __device__ __forceinline__ real* array(int column) const {
        return reinterpret_cast<real*>(addresses.of[row][column]) + first;
    }
    __device__ __forceinline__ real* optional(int column) const {
        return addresses.of[row][column] ? array(column) : nullptr;
    }
};

// Brings the options of one row into shared memory, for all threads of the block.
template <class T>
__device__ __forceinline__ void choose(
    double (&chosen)[T::options], const typename T::Options& options, const double* own, int row) {
    const int i = threadIdx.x;
    if (i < T::options) chosen[i] = own ? own[row * T::options + i] : options.of[row][i];
    __syncthreads();
}

// The number of this update of one row.
template <class Layout>
__device__ __forceinline__ int64 step_of(const Layout& layout, const int64* own, int row) {
    return own ? own[row] : layout.step[row];
}

// The arguments of every rule's kernel.
#define UPDATE_ARGUMENTS(Rule) \
    const __grid_constant__ Rule::Addresses addresses, const __grid_constant__ Rule::Layout layout, \
    const __grid_constant__ Rule::Options options, const double* __restrict__ own_options, \
    const int64* __restrict__ own_steps, int n

#define FOR_EACH(i, piece) for (int i = threadIdx.x; i < piece.count; i += blockDim.x)

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

__device__ __forceinline__ double warp_total(double value) {
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
    return value;
}

// Bytes: parameter and buffer read and written, gradient read. Options: lr, momentum, dampening, weight_decay, nesterov,
// maximize.
extern "C" __global__ void __launch_bounds__(256, 4) sgd_update(UPDATE_ARGUMENTS(Sgd)) {
    __shared__ double o[Sgd::options];
    const Piece<Sgd> piece(addresses, layout, n);
    choose<Sgd>(o, options, own_options, piece.row);
    const real lr = o[0], momentum = o[1], fresh = 1.0 - o[2], decay = o[3];
    const bool nesterov = o[4] != 0, uphill = o[5] != 0, set = step_of(layout, own_steps, piece.row) > 1;
    real* const param = piece.array(0);
    const real* const grad = piece.array(1);
    real* const buffer = piece.optional(2);
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
extern "C" __global__ void __launch_bounds__(256, 4) adam_update(UPDATE_ARGUMENTS(Adam)) {
    __shared__ real corrections[2];
    __shared__ double o[Adam::options];
    const Piece<Adam> piece(addresses, layout, n);
    choose<Adam>(o, options, own_options, piece.row);
    if (threadIdx.x == 0) {
        const double count = double(step_of(layout, own_steps, piece.row));
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
    real *const exp_avg = piece.array(2), *const exp_avg_sq = piece.array(3), *const largest = piece.optional(4);
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

// NAdam's factors of the gradient and of the mean, by one warp; the closed form of the product of its momenta is derived
// in kernels/operands.py. Lane i has the terms i + 1 and i + 33 of the series; those from the 53rd on are below
// the rounding of the sum.
__device__ __forceinline__ void nadam_factors(
    const double (&o)[8], double count, real (&factors)[2]) {
    const double slope = o[7] * log(0.96), q = exp(slope), last = exp(slope * count);
    double total = 0;
    for (int k = threadIdx.x + 1; k <= 2 * WARP; k += WARP) {
        const double gap = expm1(slope * k);
        total -= exp(k * (slope - log(2.0))) / k * (gap != 0 ? expm1(slope * count * k) / gap : count);
    }
    total = warp_total(total);
    if (threadIdx.x == 0) {
        const double product = pow(o[1], count) * exp(total);
        const double now = o[1] * (1.0 - 0.5 * last), then = o[1] * (1.0 - 0.5 * last * q);
        factors[0] = -o[0] * (1.0 - now) / (1.0 - product);
        factors[1] = -o[0] * then / (1.0 - product * then);
    }
}

// Bytes: parameter and two buffers read and written, gradient read. Options: lr, beta1, beta2, eps, weight_decay,
// decoupled, maximize, momentum_decay.
extern "C" __global__ void __launch_bounds__(256, 4) nadam_update(UPDATE_ARGUMENTS(Nadam)) {
    __shared__ real factors[2], correction;
    __shared__ double o[Nadam::options];
    const Piece<Nadam> piece(addresses, layout, n);
    choose<Nadam>(o, options, own_options, piece.row);
    if (threadIdx.x < WARP) {
        const double count = double(step_of(layout, own_steps, piece.row));
        nadam_factors(o, count, factors);
        if (threadIdx.x == 0) correction = 1.0 - pow(o[2], count);
    }
    __syncthreads();
    const real of_grad = factors[0], of_mean = factors[1], known = correction;
    const real rest1 = 1.0 - o[1], beta2 = o[2], rest2 = 1.0 - o[2], eps = o[3];
    const bool decoupled = o[5] != 0, uphill = o[6] != 0;
    const real decay = decoupled ? 0.0 : o[4], keep = decoupled ? 1.0 - o[0] * o[4] : 1.0;
    real* const param = piece.array(0);
    const real* const grad = piece.array(1);
    real *const exp_avg = piece.array(2), *const exp_avg_sq = piece.array(3);
    FOR_EACH(i, piece) {
        const real weight = param[i] * keep, slope = gradient(grad[i], weight, decay, uphill);
        const real mean = lerp_of(exp_avg[i], slope, rest1), square = beta2 * exp_avg_sq[i] + rest2 * slope * slope;
        exp_avg[i] = mean;
        exp_avg_sq[i] = square;
        const real root = sqrt_of(square / known) + eps;
        param[i] = weight + of_grad * slope / root + of_mean * mean / root;
    }
}

// Bytes: parameter and two buffers read and written, gradient read. Options: lr, beta1, beta2, eps, weight_decay,
// decoupled, maximize.
extern "C" __global__ void __launch_bounds__(256, 4) radam_update(UPDATE_ARGUMENTS(Radam)) {
    __shared__ real corrections[2];
    __shared__ double o[Radam::options];
    const Piece<Radam> piece(addresses, layout, n);
    choose<Radam>(o, options, own_options, piece.row);
    if (threadIdx.x == 0) {
        const double count = double(step_of(layout, own_steps, piece.row)), left = pow(o[2], count);
        const double longest = 2.0 / (1.0 - o[2]) - 1.0, length = longest - 2.0 * count * left / (1.0 - left);
        const double part = (length - 4.0) * (length - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * length);
        corrections[0] = o[0] / (1.0 - pow(o[1], count));
        corrections[1] = length > 5.0 ? sqrt((1.0 - left) * part) : 0.0;  // 0: the variance is not known well enough
    }
    __syncthreads();
    const real step_size = corrections[0], rectifier = corrections[1];
    const real rest1 = 1.0 - o[1], beta2 = o[2], rest2 = 1.0 - o[2], eps = o[3];
    const bool decoupled = o[5] != 0, uphill = o[6] != 0;
    const real decay = decoupled ? 0.0 : o[4], keep = decoupled ? 1.0 - o[0] * o[4] : 1.0;
    real* const param = piece.array(0);
    const real* const grad = piece.array(1);
    real *const exp_avg = piece.array(2), *const exp_avg_sq = piece.array(3);
    FOR_EACH(i, piece) {
        const real weight = param[i] * keep, slope = gradient(grad[i], weight, decay, uphill);
        const real mean = lerp_of(exp_avg[i], slope, rest1), square = beta2 * exp_avg_sq[i] + rest2 * slope * slope;
        exp_avg[i] = mean;
        exp_avg_sq[i] = square;
        const real change = step_size * mean;
        param[i] = weight - (rectifier > 0 ? change * (rectifier / (sqrt_of(square) + eps)) : change);
    }
}

// Bytes: parameter and two buffers read and written, gradient read. Options: lr, beta1, beta2, eps, weight_decay,
// maximize.
extern "C" __global__ void __launch_bounds__(256, 4) adamax_update(UPDATE_ARGUMENTS(Adamax)) {
    __shared__ real correction;
    __shared__ double o[Adamax::options];
    const Piece<Adamax> piece(addresses, layout, n);
    choose<Adamax>(o, options, own_options, piece.row);
    if (threadIdx.x == 0) correction = o[0] / (1.0 - pow(o[1], double(step_of(layout, own_steps, piece.row))));
    __syncthreads();
    const real step_size = correction, rest1 = 1.0 - o[1], beta2 = o[2], eps = o[3], decay = o[4];
    const bool uphill = o[5] != 0;
    real* const param = piece.array(0);
    const real* const grad = piece.array(1);
    real *const exp_avg = piece.array(2), *const exp_inf = piece.array(3);
    FOR_EACH(i, piece) {
        const real slope = gradient(grad[i], param[i], decay, uphill), mean = lerp_of(exp_avg[i], slope, rest1);
        const real old = beta2 * exp_inf[i], size = (slope < 0 ? -slope : slope) + eps;
        const real largest = old > size ? old : size;
        exp_avg[i] = mean;
        exp_inf[i] = largest;
        param[i] -= step_size * mean / largest;
    }
}

// Bytes: parameter and buffer read and written, gradient read. Options: lr, lr_decay, eps, weight_decay, maximize.
extern "C" __global__ void __launch_bounds__(256, 4) adagrad_update(UPDATE_ARGUMENTS(Adagrad)) {
    __shared__ double o[Adagrad::options];
    const Piece<Adagrad> piece(addresses, layout, n);
    choose<Adagrad>(o, options, own_options, piece.row);
    const real lr = o[0] / (1.0 + double(step_of(layout, own_steps, piece.row) - 1) * o[1]), eps = o[2], decay = o[3];
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
extern "C" __global__ void __launch_bounds__(256, 4) adadelta_update(UPDATE_ARGUMENTS(Adadelta)) {
    __shared__ double o[Adadelta::options];
    const Piece<Adadelta> piece(addresses, layout, n);
    choose<Adadelta>(o, options, own_options, piece.row);
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
extern "C" __global__ void __launch_bounds__(256, 4) rmsprop_update(UPDATE_ARGUMENTS(Rmsprop)) {
    __shared__ double o[Rmsprop::options];
    const Piece<Rmsprop> piece(addresses, layout, n);
    choose<Rmsprop>(o, options, own_options, piece.row);
    const real lr = o[0], alpha = o[1], rest = 1.0 - o[1], eps = o[2], decay = o[3], momentum = o[4];
    const bool uphill = o[5] != 0;
    real* const param = piece.array(0);
    const real* const grad = piece.array(1);
    real* const square_avg = piece.array(2);
    real *const buffer = piece.optional(3), *const grad_avg = piece.optional(4);
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

// By a number, or by one that is on the device.
extern "C" __global__ void __launch_bounds__(256) scale_arrays(
    const __grid_constant__ Plain::Addresses addresses, const __grid_constant__ Plain::Layout layout, int n, real factor,
    const double* __restrict__ own) {
    const Piece<Plain> piece(addresses, layout, n);
    const real by = own ? real(*own) : factor;
    real* const values = piece.array(0);
    FOR_EACH(i, piece) values[i] *= by;
}

// NaN stays NaN: both comparisons are false.
extern "C" __global__ void __launch_bounds__(256) clamp_arrays(
    const __grid_constant__ Plain::Addresses addresses, const __grid_constant__ Plain::Layout layout, int n, real limit) {
    const Piece<Plain> piece(addresses, layout, n);
    real* const values = piece.array(0);
    FOR_EACH(i, piece) {
        const real value = values[i];
        values[i] = value > limit ? limit : value < -limit ? -limit : value;
    }
}

// The sum of the squares of each chunk.
extern "C" __global__ void __launch_bounds__(256) chunk_squares(
    const __grid_constant__ Plain::Addresses addresses, const __grid_constant__ Plain::Layout layout, int n,
    double* __restrict__ sums) {
    __shared__ double warps[8];
    const Piece<Plain> piece(addresses, layout, n);
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
    const __grid_constant__ Plain::Layout layout, int n, const double* __restrict__ sums, double* __restrict__ out) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= n) return;
    const int64 end = layout.first[row + 1];
    double total = 0;
    for (int64 chunk = layout.first[row] + threadIdx.x; chunk < end; chunk += WARP) total += sums[chunk];
    total = warp_total(total);
    if (threadIdx.x == 0) out[row] = total;
}
