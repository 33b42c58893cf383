// Pointwise operators and channels' statistics: one or two passes over memory, so the floor is bytes / bandwidth.

#include "common.cuh"

// Slopes of pointwise operators: what a forward kept, batch first, becomes a diagonal's values, batch last. Bound by
// memory: read once, written once.

constexpr int TILE = 32;

// 0: the slope itself was kept; 1: relu, 2: tanh, 3: sigmoid, from y.
__device__ __forceinline__ real slope_of(int function, real y) {
    if (function == 1) return y <= real(0) ? real(0) : real(1);  // 1 at a NaN
    if (function == 2) return real(1) - y * y;
    return function == 3 ? y * (real(1) - y) : y;
}

extern "C" __global__ void __launch_bounds__(256) pointwise_slopes_single(
    const real* __restrict__ kept, int function, real* __restrict__ out, int64 size) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < size) out[i] = slope_of(function, kept[i]);
}

// A tile goes through shared memory, so that both sides are read and written in whole segments. Blocks number the tiles
// along the elements first.
extern "C" __global__ void __launch_bounds__(256) pointwise_slopes(
    const real* __restrict__ kept, int function, real* __restrict__ out, int64 size, int64 batch, int64 tiles) {
    __shared__ real tile[TILE][TILE + 1];
    const int64 first = blockIdx.x % tiles * TILE, sample = blockIdx.x / tiles * TILE;
    for (int b = threadIdx.y; b < TILE; b += blockDim.y)
        if (sample + b < batch && first + threadIdx.x < size)
            tile[b][threadIdx.x] = slope_of(function, kept[(sample + b) * size + first + threadIdx.x]);
    __syncthreads();
    for (int i = threadIdx.y; i < TILE; i += blockDim.y)
        if (first + i < size && sample + threadIdx.x < batch)
            out[(first + i) * batch + sample + threadIdx.x] = tile[threadIdx.x][i];
}

// Channels' statistics, and maps with a few numbers a channel: arrays (batch, channels, size) and (channels,). For sums, a
// block has a piece of a channel, its elements counted over the batch, and then a warp adds up the pieces of a channel: the
// tree of additions is fixed. Bound by memory: a thread has EACH elements in flight. The elements of a channel are fewer
// than 2^31.

constexpr int THREADS = 256, EACH = 8, PIECE = THREADS * EACH;

// The sum over the block, for all of its threads.
__device__ __forceinline__ real block_sum(real value) {
    __shared__ real sums[THREADS / WARP];
    value = warp_sum(value);
    __syncthreads();  // the sums of a call before have been read
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = value;
    __syncthreads();
    real total = 0;
    for (int warp = 0; warp < THREADS / WARP; ++warp) total += sums[warp];
    return total;
}

// A place in planes of `size` elements, counted modulo `planes`, that goes on by THREADS without a division.
struct Place {
    const int planes, size, planes_on, on;
    int plane, at;
    __device__ __forceinline__ Place(int64 element, int planes, int size)
        : planes(planes), size(size), planes_on(THREADS / size % planes), on(THREADS % size) {
        const int64 nth = element / size;
        plane = int(nth % planes);
        at = int(element - nth * size);
    }
    __device__ __forceinline__ void go_on() {
        at += on, plane += planes_on;
        if (at >= size) at -= size, ++plane;
        if (plane >= planes) plane -= planes;
    }
};

// What a block has of a channel, and a thread of that: place(k) is where its element k lies, -1 behind the end.
struct ChannelPiece {
    const int channel, channels, first, count;
    Place place;
    __device__ __forceinline__ ChannelPiece(int batch, int channels, int size, int pieces)
        : channel(blockIdx.x / pieces), channels(channels), first(blockIdx.x % pieces * PIECE),
          count(min(PIECE, batch * size - first)), place(first + threadIdx.x, batch, size) {}
    __device__ __forceinline__ int64 next(int k) {
        const int64 found = (int64(place.plane) * channels + channel) * place.size + place.at;
        place.go_on();
        return k * THREADS + int(threadIdx.x) < count ? found : -1;
    }
};

// sums, squares (channels, pieces): the sum of a piece, and that of the squared differences from the piece's own mean.
extern "C" __global__ void __launch_bounds__(256) piece_moments(
    const real* __restrict__ x, real* __restrict__ sums, real* __restrict__ squares, int batch, int channels, int size,
    int pieces) {
    ChannelPiece piece(batch, channels, size, pieces);
    real values[EACH], sum = 0, square = 0;
    int64 at[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) at[k] = piece.next(k), values[k] = at[k] < 0 ? real(0) : x[at[k]];
#pragma unroll
    for (int k = 0; k < EACH; ++k) sum += values[k];
    sum = block_sum(sum);
    const real middle = sum / real(piece.count);
#pragma unroll
    for (int k = 0; k < EACH; ++k)
        if (at[k] >= 0) square += (values[k] - middle) * (values[k] - middle);
    square = block_sum(square);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum, squares[blockIdx.x] = square;
}

// A piece's squared differences from the mean of all are those from its own mean, and its elements' times the squared
// difference of the two.
extern "C" __global__ void __launch_bounds__(256) channel_moments(
    const real* __restrict__ sums, const real* __restrict__ squares, real* __restrict__ mean, real* __restrict__ var,
    int channels, int count, int pieces) {
    const int channel = blockIdx.x * blockDim.y + threadIdx.y;
    if (channel >= channels) return;
    real sum = 0, square = 0;
    for (int p = threadIdx.x; p < pieces; p += WARP) sum += sums[int64(channel) * pieces + p];
    const real middle = warp_sum(sum) / real(count);
    for (int p = threadIdx.x; p < pieces; p += WARP) {
        const real own = real(min(PIECE, count - p * PIECE));
        const real apart = sums[int64(channel) * pieces + p] / own - middle;
        square += squares[int64(channel) * pieces + p] + own * apart * apart;
    }
    square = warp_sum(square);
    if (threadIdx.x == 0) mean[channel] = middle, var[channel] = square / real(count);
}

extern "C" __global__ void __launch_bounds__(256) piece_products(
    const real* __restrict__ gy, const real* __restrict__ x, const real* __restrict__ mean, real* __restrict__ sums,
    real* __restrict__ products, int batch, int channels, int size, int pieces) {
    ChannelPiece piece(batch, channels, size, pieces);
    const real middle = mean[piece.channel];
    real sum = 0, product = 0;
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const int64 at = piece.next(k);
        if (at < 0) continue;
        sum += gy[at];
        product += gy[at] * (x[at] - middle);
    }
    sum = block_sum(sum);
    product = block_sum(product);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum, products[blockIdx.x] = product;
}

extern "C" __global__ void __launch_bounds__(256) channel_products(
    const real* __restrict__ piece_sums, const real* __restrict__ piece_products, real* __restrict__ sums,
    real* __restrict__ products, int channels, int pieces) {
    const int channel = blockIdx.x * blockDim.y + threadIdx.y;
    if (channel >= channels) return;
    real sum = 0, product = 0;
    for (int p = threadIdx.x; p < pieces; p += WARP) {
        sum += piece_sums[int64(channel) * pieces + p];
        product += piece_products[int64(channel) * pieces + p];
    }
    sum = warp_sum(sum);
    product = warp_sum(product);
    if (threadIdx.x == 0) sums[channel] = sum, products[channel] = product;
}

// x may be out
extern "C" __global__ void __launch_bounds__(256) channel_scale(
    const real* x, const real* __restrict__ mean, const real* __restrict__ factor,
    const real* __restrict__ offset, real* out, int batch, int channels, int size) {
    const int64 end = int64(batch) * channels * size;
    int64 element = int64(blockIdx.x) * PIECE + threadIdx.x;
    Place place(element, channels, size);
#pragma unroll
    for (int k = 0; k < EACH; ++k, element += THREADS, place.go_on()) {
        if (element >= end) return;
        const int channel = place.plane;
        const real scaled = (mean ? x[element] - mean[channel] : x[element]) * (factor ? factor[channel] : real(1));
        out[element] = offset ? scaled + offset[channel] : scaled;
    }
}

extern "C" __global__ void __launch_bounds__(256) channel_centre(
    const real* __restrict__ gy, const real* __restrict__ x, const real* __restrict__ mean,
    const real* __restrict__ offset, const real* __restrict__ slope, const real* __restrict__ factor,
    real* __restrict__ out, int batch, int channels, int size) {
    const int64 end = int64(batch) * channels * size;
    int64 element = int64(blockIdx.x) * PIECE + threadIdx.x;
    Place place(element, channels, size);
#pragma unroll
    for (int k = 0; k < EACH; ++k, element += THREADS, place.go_on()) {
        if (element >= end) return;
        const int channel = place.plane;
        const real gradient = gy[element] - offset[channel] - (x[element] - mean[channel]) * slope[channel];
        out[element] = gradient * factor[channel];
    }
}

// Running statistics, `momentum` towards new ones; keep = 1 - momentum.
extern "C" __global__ void __launch_bounds__(256) channel_track(
    const real* __restrict__ mean, const real* __restrict__ var, real momentum, real keep, real correction,
    real* __restrict__ running_mean, real* __restrict__ running_var, int channels) {
    const int channel = blockIdx.x * THREADS + threadIdx.x;
    if (channel >= channels) return;
    running_mean[channel] = running_mean[channel] * keep + momentum * mean[channel];
    running_var[channel] = running_var[channel] * keep + momentum * (var[channel] * correction);
}

// Without a weight (null), factor is scale.
extern "C" __global__ void __launch_bounds__(256) channel_factors(
    const real* __restrict__ var, real eps, const real* __restrict__ weight, real* __restrict__ scale,
    real* __restrict__ factor, int channels) {
    const int channel = blockIdx.x * THREADS + threadIdx.x;
    if (channel >= channels) return;
    const real found = real(1) / sqrt_of(var[channel] + eps);
    scale[channel] = found;
    factor[channel] = weight ? found * weight[channel] : found;
}

extern "C" __global__ void __launch_bounds__(256) channel_slopes(
    const real* __restrict__ sums, const real* __restrict__ products, const real* __restrict__ scale, real count,
    real* __restrict__ offset, real* __restrict__ slope, int channels) {
    const int channel = blockIdx.x * THREADS + threadIdx.x;
    if (channel >= channels) return;
    offset[channel] = sums[channel] / count;
    slope[channel] = products[channel] * scale[channel] * scale[channel] / count;
}

// Normalisation of rows of `channels` times `size` elements, each row by itself; a block a row, whose second pass reads from
// cache. Element i of row r has the weight number (r * channels + i / size) % weights; a null one is 1, a null bias 0.

// Below LEAST, squares that are flushed are a part of a variance, above MOST it is infinite: differences are then multiplied
// by FAR, or divided.
constexpr bool WIDE = sizeof(real) == 8;
constexpr real LEAST = real(WIDE ? 0x1p-970 : 0x1p-103), MOST = real(WIDE ? 0x1.fffffffffffffp1023 : 0x1.fffffep127);
constexpr real FAR = real(WIDE ? 0x1p700 : 0x1p90);

extern "C" __global__ void __launch_bounds__(256) row_normalise(
    const real* __restrict__ x, const real* __restrict__ weight, const real* __restrict__ bias, real eps, int centre,
    real* __restrict__ mean, real* __restrict__ scale, real* __restrict__ out, int64 rows, int64 channels, int64 size,
    int64 weights) {
    const int64 count = channels * size, begin = int64(blockIdx.x) * count, own = blockIdx.x * channels % weights;
    real sum = 0, square = 0;
    for (int64 i = threadIdx.x; centre && i < count; i += THREADS) sum += x[begin + i] - x[begin];
    sum = block_sum(sum);
    const real middle = centre ? x[begin] + sum / real(count) : real(0);
    for (int64 i = threadIdx.x; i < count; i += THREADS) square += (x[begin + i] - middle) * (x[begin + i] - middle);
    const real var = block_sum(square) / real(count);
    real found = real(1) / sqrt_of(var + eps);
    if (var + eps < LEAST || var > MOST) {
        const real factor = var < real(1) ? FAR : real(1) / FAR;
        square = 0;
        for (int64 i = threadIdx.x; i < count; i += THREADS) {
            const real difference = (x[begin + i] - middle) * factor;
            square += difference * difference;
        }
        found = factor / sqrt_of(block_sum(square) / real(count) + eps * factor * factor);
    }
    if (threadIdx.x == 0) mean[blockIdx.x] = middle, scale[blockIdx.x] = found;
    for (int64 i = threadIdx.x; i < count; i += THREADS) {
        const real unit = (x[begin + i] - middle) * found;
        out[begin + i] = unit * (weight ? weight[own + i / size] : real(1)) + (bias ? bias[own + i / size] : real(0));
    }
}

extern "C" __global__ void __launch_bounds__(256) row_back(
    const real* __restrict__ gy, const real* __restrict__ x, const real* __restrict__ weight, int centre,
    const real* __restrict__ mean, const real* __restrict__ scale, real* __restrict__ out, int64 rows, int64 channels,
    int64 size, int64 weights) {
    const int64 count = channels * size, begin = int64(blockIdx.x) * count, own = blockIdx.x * channels % weights;
    const real middle = mean[blockIdx.x], found = scale[blockIdx.x];
    real sum = 0, product = 0;
    for (int64 i = threadIdx.x; i < count; i += THREADS) {
        const real g = weight ? gy[begin + i] * weight[own + i / size] : gy[begin + i];
        sum += g, product += g * (x[begin + i] - middle);
    }
    sum = block_sum(sum);
    product = block_sum(product);
    const real offset = centre ? sum / real(count) * found : real(0);
    const real slope = product / real(count) * found * found;
    for (int64 i = threadIdx.x; i < count; i += THREADS) {
        const real g = weight ? gy[begin + i] * weight[own + i / size] : gy[begin + i];
        out[begin + i] = g * found - offset - (x[begin + i] - middle) * found * slope;
    }
}

// A block a weight.
extern "C" __global__ void __launch_bounds__(256) row_products(
    const real* __restrict__ gy, const real* __restrict__ x, const real* __restrict__ mean,
    const real* __restrict__ scale, real* __restrict__ sums, real* __restrict__ products, int64 rows, int64 channels,
    int64 size, int64 weights) {
    const int64 groups = weights / channels, group = blockIdx.x / channels, channel = blockIdx.x % channels;
    const int64 own = group < rows ? (rows - group + groups - 1) / groups : 0;  // rows with this weight
    real sum = 0, product = 0;
    for (int64 i = threadIdx.x; i < own * size; i += THREADS) {
        const int64 row = group + i / size * groups, at = (row * channels + channel) * size + i % size;
        sum += gy[at], product += gy[at] * (x[at] - mean[row]) * scale[row];
    }
    sum = block_sum(sum);
    product = block_sum(product);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum, products[blockIdx.x] = product;
}

// Cutting off at two values, and its gradient: one pass over memory each, a thread an element.

extern "C" __global__ void __launch_bounds__(256) clamp(
    const real* __restrict__ x, real low, real high, real* __restrict__ out, int64 size) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= size) return;
    const real above = x[i] < low ? low : x[i];  // a NaN stays
    out[i] = above > high ? high : above;
}

extern "C" __global__ void __launch_bounds__(256) clamp_grad(
    const real* __restrict__ gy, const real* __restrict__ y, real low, real high, real* __restrict__ out, int64 size) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < size) out[i] = y[i] <= low || y[i] > high ? real(0) : gy[i];  // a NaN lets it through
}

extern "C" __global__ void __launch_bounds__(256) channel_slope(
    const real* __restrict__ values, const real* __restrict__ x, const real* __restrict__ weight, int64 channels,
    int64 each, real* __restrict__ out, int64 size) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < size) out[i] = x[i] > real(0) ? values[i] : values[i] * weight[i / each % channels];
}

extern "C" __global__ void __launch_bounds__(256) channel_slope_terms(
    const real* __restrict__ gy, const real* __restrict__ x, real* __restrict__ out, int64 size) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < size) out[i] = x[i] > real(0) ? real(0) : gy[i] * x[i];
}

// Activations and their gradients: one pass over memory each, a thread an element.

constexpr real ROOT = real(0.7978845608028654), CUBE = real(0.044715);  // sqrt(2 / pi)
constexpr real HALF_ROOT = real(0.7071067811865476), DENSITY = real(0.3989422804014327);

__device__ __forceinline__ float tail_of(float z) { return erfcf(z); }
__device__ __forceinline__ double tail_of(double z) { return erfc(z); }
__device__ __forceinline__ float steep_of(float x) { return tanhf(x); }
__device__ __forceinline__ double steep_of(double x) { return tanh(x); }
__device__ __forceinline__ float growth_of(float x) { return expm1f(x); }
__device__ __forceinline__ double growth_of(double x) { return expm1(x); }
__device__ __forceinline__ float log1p_of(float x) { return log1pf(x); }
__device__ __forceinline__ double log1p_of(double x) { return log1p(x); }
__device__ __forceinline__ real size_of(real x) { return x < real(0) ? -x : x; }
__device__ __forceinline__ real decay_of(real x) { return exp_of(-size_of(x)); }

__device__ __forceinline__ real probability(real x, bool approximate) {
    if (approximate) return real(0.5) + real(0.5) * steep_of(ROOT * (x + CUBE * x * x * x));
    return real(0.5) * tail_of(-HALF_ROOT * x);
}

__device__ __forceinline__ real sigmoid_at(real x) {
    const real z = decay_of(x);
    return (x > real(0) ? real(1) : z) / (real(1) + z);
}

// t = tanh(log(1 + exp(x))), or its slope, as ratios of polynomials in z = exp(-|x|).
__device__ __forceinline__ real mish_gate(real x, bool slope) {
    const real z = decay_of(x), top = x > real(0) ? real(1) + real(2) * z : z * (z + real(2));
    const real bottom = top + real(2) * (x > real(0) ? z * z : real(1));
    return slope ? real(4) * z * (real(1) + z) * (x > real(0) ? z : real(1)) / (bottom * bottom) : top / bottom;
}

__device__ __forceinline__ real hard_sigmoid_at(real x) {
    const real above = x + real(3) < real(0) ? real(0) : x + real(3);  // a NaN stays
    return (above > real(6) ? real(6) : above) / real(6);
}

enum Function { GELU, GELU_TANH, TANH, SIGMOID, SILU, LOG_SIGMOID, SOFTPLUS, MISH, ELU, LEAKY_RELU, HARD_SIGMOID,
                HARD_SWISH, SOFTSIGN };

__device__ __forceinline__ real value_of(int function, real x, real a, real b, real c) {
    switch (function) {
        case GELU: return x * probability(x, false);
        case GELU_TANH: return x * probability(x, true);
        case TANH: return steep_of(x);
        case SIGMOID: return sigmoid_at(x);
        case SILU: return x * sigmoid_at(x);
        case LOG_SIGMOID: return (x > real(0) ? real(0) : x) - log1p_of(decay_of(x));
        case SOFTPLUS: {
            const real s = x * a;
            return s > b ? x : ((s < real(0) ? real(0) : s) + log1p_of(decay_of(s))) / a;
        }
        case MISH: return x * mish_gate(x, false);
        case ELU: return x < real(0) ? a * growth_of(x / c) : b * x;
        case LEAKY_RELU: return x > real(0) ? x : a * x;
        case HARD_SIGMOID: return hard_sigmoid_at(x);
        case HARD_SWISH: return x * hard_sigmoid_at(x);
        default: return x / (real(1) + size_of(x));
    }
}

// kept is x, of a tanh and a sigmoid y.
__device__ __forceinline__ real grad_of(int function, real g, real kept, real a, real b, real c) {
    const real x = kept;
    switch (function) {
        case GELU: return g * (probability(x, false) + x * DENSITY * exp_of(real(-0.5) * x * x));
        case GELU_TANH: {
            const real p = probability(x, true);
            const real square = real(1e4) < x * x ? real(1e4) : x * x;  // from there on p is 0 or 1 to the last digit
            return g * (p + x * (real(2) * p * (real(1) - p) * ROOT * (real(1) + real(3) * CUBE * square)));
        }
        case TANH: return g * (real(1) - kept * kept);
        case SIGMOID: return g * (kept * (real(1) - kept));
        case SILU: return g * (sigmoid_at(x) * (real(1) + x * sigmoid_at(-x)));
        case LOG_SIGMOID: return g * sigmoid_at(-x);
        case SOFTPLUS: return x * a > b ? g : g * sigmoid_at(x * a);
        case MISH: return g * (mish_gate(x, false) + x * mish_gate(x, true));
        case ELU: return g * (x > real(0) ? b : a / c * exp_of(x / c));
        case LEAKY_RELU: return x > real(0) ? g : g * a;
        case HARD_SIGMOID: return size_of(x) < real(3) ? g * (real(1) / real(6)) : real(0);
        case HARD_SWISH: return x <= real(-3) ? real(0) : x >= real(3) ? g : g * (x / real(3) + real(0.5));
        default: {
            const real root = real(1) / (real(1) + size_of(x));
            return g * (root * root);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) pointwise(
    const real* __restrict__ x, int function, real a, real b, real c, real* __restrict__ out, int64 size) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < size) out[i] = value_of(function, x[i], a, b, c);
}

extern "C" __global__ void __launch_bounds__(256) pointwise_grad(
    const real* __restrict__ gy, const real* __restrict__ kept, int function, real a, real b, real c,
    real* __restrict__ out, int64 size) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < size) out[i] = grad_of(function, gy[i], kept[i], a, b, c);
}

// Softmax along the middle one of three axes, of `size` numbers that lie `inner` apart. `together` threads, a warp or one,
// have a row; a warp's read it in whole segments, and neighbouring threads that have one each read neighbouring rows.

struct SoftmaxRow {
    int64 row, begin;
    int lane, together;
    __device__ __forceinline__ SoftmaxRow(int64 size, int64 inner, int together)
        : row((int64(blockIdx.x) * blockDim.x + threadIdx.x) / together), begin(row / inner * size * inner + row % inner),
          lane(threadIdx.x % together), together(together) {}
    __device__ __forceinline__ real sum(real value) const { return together == 1 ? value : warp_sum(value); }
    __device__ __forceinline__ real most(real value) const { return together == 1 ? value : warp_max(value); }
};

extern "C" __global__ void __launch_bounds__(256) softmax(
    const real* __restrict__ x, real* __restrict__ out, int log, int64 rows, int64 size, int64 inner, int together) {
    const SoftmaxRow at(size, inner, together);
    if (at.row >= rows) return;  // all of a warp
    const int64 first = at.begin + at.lane * inner, end = at.begin + size * inner, step = together * inner;
    real top = x[at.begin], total = 0;
    for (int64 i = first; i < end; i += step) top = x[i] > top ? x[i] : top;
    top = at.most(top);
    for (int64 i = first; i < end; i += step) {
        const real value = exp_of(x[i] - top);
        out[i] = value;  // read again below by the same thread
        total += value;
    }
    total = at.sum(total);  // an entry that is NaN makes this NaN
    if (log) {
        total = log_of(total);
        for (int64 i = first; i < end; i += step) out[i] = x[i] - top - total;
    } else {
        total = real(1) / total;
        for (int64 i = first; i < end; i += step) out[i] *= total;
    }
}

extern "C" __global__ void __launch_bounds__(256) softmax_grad(
    const real* __restrict__ gy, const real* __restrict__ y, real* __restrict__ out, int log, int64 rows, int64 size,
    int64 inner, int together) {
    const SoftmaxRow at(size, inner, together);
    if (at.row >= rows) return;
    const int64 first = at.begin + at.lane * inner, end = at.begin + size * inner, step = together * inner;
    real total = 0;
    for (int64 i = first; i < end; i += step) total += log ? gy[i] : gy[i] * y[i];
    total = at.sum(total);
    for (int64 i = first; i < end; i += step)
        out[i] = log ? gy[i] - exp_of(y[i]) * total : y[i] * (gy[i] - total);
}

// Losses of elements and their slopes: one pass over memory, a thread an element.

enum Loss { SQUARED, DISTANCE, SMOOTH_L1, HUBER, BCE_WITH_LOGITS };

__device__ __forceinline__ real sign_of(real d) { return d > real(0) ? real(1) : d < real(0) ? real(-1) : d; }

extern "C" __global__ void __launch_bounds__(256) element_loss(
    const real* __restrict__ prediction, const real* __restrict__ target, const real* __restrict__ weight,
    const real* __restrict__ counts, int function, real a, real factor, real* __restrict__ losses,
    real* __restrict__ slopes, int64 size) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= size) return;
    const real x = prediction[i], t = target[i], d = x - t, length = size_of(d);
    real loss = length, slope = sign_of(d);
    if (function == SQUARED) loss = d * d, slope = d + d;
    if (function == SMOOTH_L1) {
        const bool near = length < a;
        loss = near ? real(0.5) * length * length / a : length - real(0.5) * a;
        slope = near ? d / a : slope;
    }
    if (function == HUBER) {
        loss = length < a ? real(0.5) * length * length : a * (length - real(0.5) * a);
        const real above = d < -a ? -a : d;  // a NaN stays
        slope = above > a ? a : above;
    }
    if (function == BCE_WITH_LOGITS) {
        const real z = decay_of(x), rest = real(1) - t, w = counts ? counts[i] : real(1);
        loss = rest * x + ((x > real(0) ? real(0) : -x) + log1p_of(z)) * w;
        slope = rest - (x > real(0) ? z : real(1)) / (real(1) + z) * w;
    }
    const real own = weight ? weight[i] : real(1);
    losses[i] = loss * own;
    slopes[i] = slope * own * factor;
}

// Cross-entropy: one pass over memory, so the floor is bytes / bandwidth.

// By a warp; returns the loss. Bytes: logits read (twice, the second time from cache), grad written. Operations: about 10 an
// entry.
__device__ __forceinline__ real row_loss(const real* in, int64 wanted, real* out, int64 classes, real scale) {
    const int lane = threadIdx.x;
    if (wanted < 0 || wanted >= classes) {  // as on the host: the row shows the mistake, nothing is read elsewhere
        for (int64 c = lane; c < classes; c += WARP) out[c] = real(nan(""));
        return real(nan(""));
    }

    real largest = in[0];
    for (int64 c = lane; c < classes; c += WARP) largest = in[c] > largest ? in[c] : largest;
    largest = warp_max(largest);
    real total = 0;  // an entry that is NaN or infinite makes this NaN, and with it the loss
    for (int64 c = lane; c < classes; c += WARP) {
        const real value = exp_of(in[c] - largest);
        out[c] = value;  // read again below by the same lane
        total += value;
    }
    total = warp_sum(total);
    for (int64 c = lane; c < classes; c += WARP) out[c] = (out[c] / total - (c == wanted ? real(1) : real(0))) * scale;
    return log_of(total) - (in[wanted] - largest);
}

// A warp a row; where the mean is asked for (else null), one block has all rows, and adds up their losses.
extern "C" __global__ void __launch_bounds__(512) softmax_cross_entropy(
    const real* __restrict__ logits, const int64* __restrict__ target, real* __restrict__ losses,
    real* __restrict__ grad, double* __restrict__ mean, int64 rows, int64 classes, real scale) {
    __shared__ double sums[16];  // of a block's warps
    double sum = 0;
    for (int64 row = int64(blockIdx.x) * blockDim.y + threadIdx.y; row < rows; row += int64(gridDim.x) * blockDim.y) {
        const real loss = row_loss(logits + row * classes, target[row], grad + row * classes, classes, scale);
        if (threadIdx.x == 0) losses[row] = loss;
        sum += double(loss);
    }
    if (!mean) return;
    if (threadIdx.x == 0) sums[threadIdx.y] = sum;
    __syncthreads();
    if (threadIdx.x > 0 || threadIdx.y > 0) return;
    double total = 0;
    for (int warp = 0; warp < int(blockDim.y); ++warp) total += sums[warp];
    *mean = total / double(rows);
}
