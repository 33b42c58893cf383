// Loss and optimizer updates: one pass over memory each, so the floor is bytes / bandwidth.

#include "common.cuh"

// A warp a row. Bytes: logits read (twice, the second time from cache), grad written. Operations: about 10 an entry.
extern "C" __global__ void __launch_bounds__(256) softmax_cross_entropy(
    const real* __restrict__ logits, const int64* __restrict__ target, real* __restrict__ losses,
    real* __restrict__ grad, int64 rows, int64 classes) {
    const int64 row = int64(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const int lane = threadIdx.x;
    const real* const in = logits + row * classes;
    real* const out = grad + row * classes;

    const int64 wanted = target[row];
    if (wanted < 0 || wanted >= classes) {  // as on the host: the row shows the mistake, nothing is read elsewhere
        for (int64 c = lane; c < classes; c += WARP) out[c] = real(nan(""));
        if (lane == 0) losses[row] = real(nan(""));
        return;
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
    for (int64 c = lane; c < classes; c += WARP) out[c] = out[c] / total - (c == wanted ? real(1) : real(0));
    if (lane == 0) losses[row] = log_of(total) - (in[wanted] - largest);
}

// Bytes: param and buffer read and written, grad read.
extern "C" __global__ void __launch_bounds__(256) sgd_update(
    real* __restrict__ param, const real* __restrict__ grad, real* __restrict__ buffer, int64 count, real lr,
    real momentum, real undampened, real weight_decay, int nesterov, int first) {
    const int64 stride = int64(gridDim.x) * blockDim.x;
    for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
        // without decay, an infinite parameter must not turn into NaN through 0 * infinity
        real step = weight_decay != 0 ? grad[i] + weight_decay * param[i] : grad[i];
        if (buffer) {
            const real kept = first ? step : momentum * buffer[i] + undampened * step;
            buffer[i] = kept;
            step = nesterov ? step + momentum * kept : kept;
        }
        param[i] -= lr * step;
    }
}

// Bytes: param, m and v read and written, grad read. The launcher works out the bias corrections in float64:
// step_size = lr / (1 - beta1^step), root_factor = 1 / sqrt(1 - beta2^step), keep = 1 - lr * weight_decay for AdamW, else 1.
extern "C" __global__ void __launch_bounds__(256) adam_update(
    real* __restrict__ param, const real* __restrict__ grad, real* __restrict__ m, real* __restrict__ v, int64 count,
    real step_size, real root_factor, real beta1, real rest1, real beta2, real rest2, real eps, real weight_decay,
    real keep) {
    const int64 stride = int64(gridDim.x) * blockDim.x;
    for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
        const real weight = param[i] * keep;
        const real slope = weight_decay != 0 ? grad[i] + weight_decay * weight : grad[i];
        const real mean = beta1 * m[i] + rest1 * slope, square = beta2 * v[i] + rest2 * slope * slope;
        m[i] = mean;
        v[i] = square;
        param[i] = weight - step_size * mean / (sqrt_of(square) * root_factor + eps);
    }
}
