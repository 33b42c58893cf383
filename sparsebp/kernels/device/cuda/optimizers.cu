// Optimizer updates and clipping: one launch, and one pass over memory, for all arrays of a network that fit into one.
//
// What a launch knows of its arrays comes by value, in its arguments: nothing is sent to the device before it, and there
// is no memory that it might find changed. A block works on one chunk of one array. Options, in the order of
// `UPDATE_OPTIONS` in kernels/spec.py, and step numbers come by value too, unless pointers say where they are on the device: a
// captured step finds the ones of its own time there. Scalars that come from the step number are worked out in double,
// once a block. The floor is bytes / bandwidth: a thread has 16 bytes of every array in flight, in one access each where
// the array begins at a multiple of 16 bytes, as views into a flat buffer may not.

#include "common.cuh"

constexpr int64 CHUNK = 4096;

// The arguments that tell of arrays, a row each: the addresses of a parameter, its gradient and its buffers (0 where a
// rule's buffer is not there), its size, first chunk and step number, and its options. `first` has one entry more than
// rows: the number of chunks. With the pointers, they fit into the 4 KiB that all versions of CUDA allow.
template <int COLUMNS, int OPTIONS>
struct Table {
    static constexpr int rows = 3968 / (8 * (COLUMNS + 3 + OPTIONS)), columns = COLUMNS, options = OPTIONS;
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

// Blocks that a multiprocessor should hold: double precision calls functions for roots and quotients, and would spill.
constexpr int BLOCKS = sizeof(real) == 8 ? 2 : 4;

// The arguments of every rule's kernel.
#define UPDATE_ARGUMENTS(Rule) \
    const __grid_constant__ Rule::Addresses addresses, const __grid_constant__ Rule::Layout layout, \
    const __grid_constant__ Rule::Options options, const double* __restrict__ own_options, \
    const int64* __restrict__ own_steps, int n

__device__ __forceinline__ bool is_aligned(const real* array) {
    return reinterpret_cast<unsigned long long>(array) % sizeof(typename Wide<real>::type) == 0;
}

// The first `left` of WIDTH values, in one access if they are all there and `aligned`; the others are zero.
__device__ __forceinline__ void load_some(const real* source, bool aligned, int left, real (&out)[WIDTH]) {
    if (aligned && left >= WIDTH) return load_wide(source, out);
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) out[k] = k < left ? source[k] : real(0);
}

__device__ __forceinline__ void store_some(real* target, bool aligned, int left, const real (&values)[WIDTH]) {
    if (aligned && left >= WIDTH) return store_wide(target, values);
#pragma unroll
    for (int k = 0; k < WIDTH; ++k)
        if (k < left) target[k] = values[k];
}

// Applies `rule` to the values of all columns at each place, and stores those that are not a gradient's. Both kinds of
// access share the arithmetic: where an array begins does not change a bit.
constexpr int GRADIENT = 1;

template <class T, class Rule>
__device__ __forceinline__ void update_each(const Piece<T>& piece, const Rule& rule) {
    real* arrays[T::columns];
    bool aligned = true;
#pragma unroll
    for (int c = 0; c < T::columns; ++c) arrays[c] = piece.optional(c), aligned = aligned && is_aligned(arrays[c]);
    for (int i = threadIdx.x * WIDTH; i < piece.count; i += blockDim.x * WIDTH) {
        real values[T::columns][WIDTH] = {};
#pragma unroll
        for (int c = 0; c < T::columns; ++c)
            if (arrays[c]) load_some(arrays[c] + i, aligned, piece.count - i, values[c]);
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            real one[T::columns];
#pragma unroll
            for (int c = 0; c < T::columns; ++c) one[c] = values[c][k];
            rule(one);
#pragma unroll
            for (int c = 0; c < T::columns; ++c) values[c][k] = one[c];
        }
#pragma unroll
        for (int c = 0; c < T::columns; ++c)
            if (c != GRADIENT && arrays[c]) store_some(arrays[c] + i, aligned, piece.count - i, values[c]);
    }
}

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
extern "C" __global__ void __launch_bounds__(256, BLOCKS) sgd_update(UPDATE_ARGUMENTS(Sgd)) {
    __shared__ double o[Sgd::options];
    const Piece<Sgd> piece(addresses, layout, n);
    choose<Sgd>(o, options, own_options, piece.row);
    const real lr = o[0], momentum = o[1], fresh = 1.0 - o[2], decay = o[3];
    const bool nesterov = o[4] != 0, uphill = o[5] != 0, set = step_of(layout, own_steps, piece.row) > 1;
    const bool buffered = piece.optional(2);
    update_each(piece, [&](real (&v)[3]) {  // parameter, gradient, buffer
        const real step = gradient(v[1], v[0], decay, uphill);
        const real kept = set ? momentum * v[2] + fresh * step : step;
        v[2] = kept;
        v[0] -= lr * (!buffered ? step : nesterov ? step + momentum * kept : kept);
    });
}

// Bytes: parameter and two or three buffers read and written, gradient read. Options: lr, beta1, beta2, eps,
// weight_decay, decoupled, maximize.
extern "C" __global__ void __launch_bounds__(256, BLOCKS) adam_update(UPDATE_ARGUMENTS(Adam)) {
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
    const bool amsgrad = piece.optional(4);
    update_each(piece, [&](real (&v)[5]) {  // parameter, gradient, both means, the largest of the second one
        const real weight = v[0] * keep, slope = gradient(v[1], weight, decay, uphill);
        const real mean = lerp_of(v[2], slope, rest1);
        real square = beta2 * v[3] + rest2 * slope * slope;
        v[2] = mean;
        v[3] = square;
        if (amsgrad) v[4] = square = v[4] > square ? v[4] : square;
        v[0] = weight - step_size * mean / (sqrt_of(square) / root + eps);
    });
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
extern "C" __global__ void __launch_bounds__(256, BLOCKS) nadam_update(UPDATE_ARGUMENTS(Nadam)) {
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
    update_each(piece, [&](real (&v)[4]) {  // parameter, gradient, both means
        const real weight = v[0] * keep, slope = gradient(v[1], weight, decay, uphill);
        const real mean = lerp_of(v[2], slope, rest1), square = beta2 * v[3] + rest2 * slope * slope;
        v[2] = mean;
        v[3] = square;
        const real root = sqrt_of(square / known) + eps;
        v[0] = weight + of_grad * slope / root + of_mean * mean / root;
    });
}

// Bytes: parameter and two buffers read and written, gradient read. Options: lr, beta1, beta2, eps, weight_decay,
// decoupled, maximize.
extern "C" __global__ void __launch_bounds__(256, BLOCKS) radam_update(UPDATE_ARGUMENTS(Radam)) {
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
    update_each(piece, [&](real (&v)[4]) {  // parameter, gradient, both means
        const real weight = v[0] * keep, slope = gradient(v[1], weight, decay, uphill);
        const real mean = lerp_of(v[2], slope, rest1), square = beta2 * v[3] + rest2 * slope * slope;
        v[2] = mean;
        v[3] = square;
        const real change = step_size * mean;
        v[0] = weight - (rectifier > 0 ? change * (rectifier / (sqrt_of(square) + eps)) : change);
    });
}

// Bytes: parameter and two buffers read and written, gradient read. Options: lr, beta1, beta2, eps, weight_decay,
// maximize.
extern "C" __global__ void __launch_bounds__(256, BLOCKS) adamax_update(UPDATE_ARGUMENTS(Adamax)) {
    __shared__ real correction;
    __shared__ double o[Adamax::options];
    const Piece<Adamax> piece(addresses, layout, n);
    choose<Adamax>(o, options, own_options, piece.row);
    if (threadIdx.x == 0) correction = o[0] / (1.0 - pow(o[1], double(step_of(layout, own_steps, piece.row))));
    __syncthreads();
    const real step_size = correction, rest1 = 1.0 - o[1], beta2 = o[2], eps = o[3], decay = o[4];
    const bool uphill = o[5] != 0;
    update_each(piece, [&](real (&v)[4]) {  // parameter, gradient, mean, largest
        const real slope = gradient(v[1], v[0], decay, uphill), mean = lerp_of(v[2], slope, rest1);
        const real old = beta2 * v[3], size = (slope < 0 ? -slope : slope) + eps;
        const real largest = old > size ? old : size;
        v[2] = mean;
        v[3] = largest;
        v[0] -= step_size * mean / largest;
    });
}

// Bytes: parameter and buffer read and written, gradient read. Options: lr, lr_decay, eps, weight_decay, maximize.
extern "C" __global__ void __launch_bounds__(256, BLOCKS) adagrad_update(UPDATE_ARGUMENTS(Adagrad)) {
    __shared__ double o[Adagrad::options];
    const Piece<Adagrad> piece(addresses, layout, n);
    choose<Adagrad>(o, options, own_options, piece.row);
    const real lr = o[0] / (1.0 + double(step_of(layout, own_steps, piece.row) - 1) * o[1]), eps = o[2], decay = o[3];
    const bool uphill = o[4] != 0;
    update_each(piece, [&](real (&v)[3]) {  // parameter, gradient, sum of squares
        const real slope = gradient(v[1], v[0], decay, uphill), total = v[2] + slope * slope;
        v[2] = total;
        v[0] -= lr * slope / (sqrt_of(total) + eps);
    });
}

// Bytes: parameter and two buffers read and written, gradient read. Options: lr, rho, eps, weight_decay, maximize.
extern "C" __global__ void __launch_bounds__(256, BLOCKS) adadelta_update(UPDATE_ARGUMENTS(Adadelta)) {
    __shared__ double o[Adadelta::options];
    const Piece<Adadelta> piece(addresses, layout, n);
    choose<Adadelta>(o, options, own_options, piece.row);
    const real lr = o[0], rho = o[1], rest = 1.0 - o[1], eps = o[2], decay = o[3];
    const bool uphill = o[4] != 0;
    update_each(piece, [&](real (&v)[4]) {  // parameter, gradient, means of squared gradients and of squared changes
        const real slope = gradient(v[1], v[0], decay, uphill);
        const real square = rho * v[2] + rest * slope * slope, moved = v[3];
        const real delta = sqrt_of(moved + eps) / sqrt_of(square + eps) * slope;
        v[2] = square;
        v[3] = rho * moved + rest * delta * delta;
        v[0] -= lr * delta;
    });
}

// Bytes: parameter and one to three buffers read and written, gradient read. Options: lr, alpha, eps, weight_decay,
// momentum, maximize.
extern "C" __global__ void __launch_bounds__(256, BLOCKS) rmsprop_update(UPDATE_ARGUMENTS(Rmsprop)) {
    __shared__ double o[Rmsprop::options];
    const Piece<Rmsprop> piece(addresses, layout, n);
    choose<Rmsprop>(o, options, own_options, piece.row);
    const real lr = o[0], alpha = o[1], rest = 1.0 - o[1], eps = o[2], decay = o[3], momentum = o[4];
    const bool uphill = o[5] != 0;
    const bool buffered = piece.optional(3), centered = piece.optional(4);
    update_each(piece, [&](real (&v)[5]) {  // parameter, gradient, mean square, buffer, mean
        const real slope = gradient(v[1], v[0], decay, uphill);
        real square = alpha * v[2] + rest * slope * slope;
        v[2] = square;
        if (centered) {  // the variance
            const real mean = lerp_of(v[4], slope, rest);
            v[4] = mean;
            square -= mean * mean;
        }
        const real root = sqrt_of(square) + eps;
        if (buffered) {
            const real kept = momentum * v[3] + slope / root;
            v[3] = kept;
            v[0] -= lr * kept;
        } else {
            v[0] -= lr * slope / root;
        }
    });
}

// ---- clipping --------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(256) scale_arrays(
    const __grid_constant__ Plain::Addresses addresses, const __grid_constant__ Plain::Layout layout, int n, real factor) {
    const Piece<Plain> piece(addresses, layout, n);
    update_each(piece, [&](real (&v)[1]) { v[0] *= factor; });
}

// To a norm of `most`; the squares of the norm before are a few numbers, which every warp adds up for itself.
extern "C" __global__ void __launch_bounds__(256) clip_arrays(
    const __grid_constant__ Plain::Addresses addresses, const __grid_constant__ Plain::Layout layout, int n,
    const double* __restrict__ squares, int count, double most) {
    const Piece<Plain> piece(addresses, layout, n);
    double total = 0;
    for (int i = threadIdx.x % WARP; i < count; i += WARP) total += squares[i];
    total = warp_total(total);
    const double factor = most / (sqrt(total) + 1e-6);
    if (total - total != 0 || !(factor < 1)) return;  // not finite, or short enough
    const real by = real(factor);
    update_each(piece, [&](real (&v)[1]) { v[0] *= by; });
}

// NaN stays NaN: both comparisons are false.
extern "C" __global__ void __launch_bounds__(256) clamp_arrays(
    const __grid_constant__ Plain::Addresses addresses, const __grid_constant__ Plain::Layout layout, int n, real limit) {
    const Piece<Plain> piece(addresses, layout, n);
    update_each(piece, [&](real (&v)[1]) { v[0] = v[0] > limit ? limit : v[0] < -limit ? -limit : v[0]; });
}

// The sum of the squares of each chunk.
extern "C" __global__ void __launch_bounds__(256) chunk_squares(
    const __grid_constant__ Plain::Addresses addresses, const __grid_constant__ Plain::Layout layout, int n,
    double* __restrict__ sums) {
    __shared__ double warps[8];
    const Piece<Plain> piece(addresses, layout, n);
    const real* const array = piece.array(0);
    const bool aligned = is_aligned(array);
    double total = 0;
    for (int i = threadIdx.x * WIDTH; i < piece.count; i += blockDim.x * WIDTH) {
        real values[WIDTH];
        load_some(array + i, aligned, piece.count - i, values);
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) total += double(values[k]) * double(values[k]);
    }
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

// ---- one behind the other --------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(256) join_arrays(
    const __grid_constant__ Plain::Addresses addresses, const __grid_constant__ Plain::Layout layout, int n,
    real* __restrict__ out) {
    const Piece<Plain> piece(addresses, layout, n);
    const real* const array = piece.array(0);
    for (int row = 0; row < piece.row; ++row) out += layout.size[row];
    for (int i = threadIdx.x; i < piece.count; i += blockDim.x) out[piece.first + i] = array[i];
}
