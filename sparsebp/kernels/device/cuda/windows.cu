// Sliding windows: laid side by side (unfold), added up again (fold), and their maxima. One thread an element of what is
// written, and every element is written by one thread: no atomics. Bound by memory; neighbouring lanes hold neighbouring
// positions of the last axis.

#include "common.cuh"

__device__ __forceinline__ int64 number_of_thread() { return int64(blockIdx.x) * blockDim.x + threadIdx.x; }

// What an output meets through a tap, and back: -1 where there is none.
__device__ __forceinline__ int64 input_at(int64 output, int tap, int stride, int before, int dilation, int64 length) {
    const int64 at = output * stride + int64(tap) * dilation - before;
    return at >= 0 && at < length ? at : -1;
}

__device__ __forceinline__ int64 output_at(int64 input, int tap, int stride, int before, int dilation, int64 outputs) {
    const int64 start = input + before - int64(tap) * dilation;
    return start >= 0 && start % stride == 0 && start / stride < outputs ? start / stride : -1;
}

// columns (channels, taps_d, taps_h, taps_w, batch, out_d, out_h, out_w); x (batch, channels, depth, height, width).
extern "C" __global__ void __launch_bounds__(256) unfold(
    const real* __restrict__ x, real* __restrict__ columns, int64 size, int64 batch, int64 channels, int64 depth,
    int64 height, int64 width, int taps_d, int taps_h, int taps_w, int64 out_d, int64 out_h, int64 out_w, int stride_d,
    int stride_h, int stride_w, int before_d, int before_h, int before_w, int dilation_d, int dilation_h,
    int dilation_w) {
    int64 rest = number_of_thread();
    if (rest >= size) return;
    const int64 element = rest;
    const int64 ow = rest % out_w;
    rest /= out_w;
    const int64 oh = rest % out_h;
    rest /= out_h;
    const int64 od = rest % out_d;
    rest /= out_d;
    const int64 b = rest % batch;
    rest /= batch;
    const int64 w = input_at(ow, int(rest % taps_w), stride_w, before_w, dilation_w, width);
    rest /= taps_w;
    const int64 h = input_at(oh, int(rest % taps_h), stride_h, before_h, dilation_h, height);
    rest /= taps_h;
    const int64 d = input_at(od, int(rest % taps_d), stride_d, before_d, dilation_d, depth);
    const int64 c = rest / taps_d;
    const bool inside = d >= 0 && h >= 0 && w >= 0;
    columns[element] = inside ? x[(((b * channels + c) * depth + d) * height + h) * width + w] : real(0);
}

extern "C" __global__ void __launch_bounds__(256) fold(
    const real* __restrict__ columns, real* __restrict__ x, int64 size, int64 batch, int64 channels, int64 depth,
    int64 height, int64 width, int taps_d, int taps_h, int taps_w, int64 out_d, int64 out_h, int64 out_w, int stride_d,
    int stride_h, int stride_w, int before_d, int before_h, int before_w, int dilation_d, int dilation_h,
    int dilation_w) {
    int64 rest = number_of_thread();
    if (rest >= size) return;
    const int64 element = rest;
    const int64 w = rest % width;
    rest /= width;
    const int64 h = rest % height;
    rest /= height;
    const int64 d = rest % depth;
    rest /= depth;
    const int64 c = rest % channels, b = rest / channels;
    real sum = 0;
    for (int kd = 0; kd < taps_d; ++kd) {
        const int64 od = output_at(d, kd, stride_d, before_d, dilation_d, out_d);
        if (od < 0) continue;
        for (int kh = 0; kh < taps_h; ++kh) {
            const int64 oh = output_at(h, kh, stride_h, before_h, dilation_h, out_h);
            if (oh < 0) continue;
            for (int kw = 0; kw < taps_w; ++kw) {
                const int64 ow = output_at(w, kw, stride_w, before_w, dilation_w, out_w);
                if (ow < 0) continue;
                const int64 row = ((c * taps_d + kd) * taps_h + kh) * taps_w + kw;
                sum += columns[(((row * batch + b) * out_d + od) * out_h + oh) * out_w + ow];
            }
        }
    }
    x[element] = sum;
}

// x (planes, height, width); y, winner (planes, out_h, out_w). The first maximum wins, of several NaN the last.
extern "C" __global__ void __launch_bounds__(256) max_pool(
    const real* __restrict__ x, real* __restrict__ y, WINNER* __restrict__ winner, int64 size, int64 height,
    int64 width, int64 out_h, int64 out_w, int taps_h, int taps_w, int stride_h, int stride_w, int before_h,
    int before_w, int dilation_h, int dilation_w) {
    const int64 element = number_of_thread();
    if (element >= size) return;
    const int64 ow = element % out_w, oh = element / out_w % out_h, plane = element / out_w / out_h;
    real best = 0;
    int place = -1;
    for (int kh = 0; kh < taps_h; ++kh) {
        const int64 h = input_at(oh, kh, stride_h, before_h, dilation_h, height);
        if (h < 0) continue;
        for (int kw = 0; kw < taps_w; ++kw) {
            const int64 w = input_at(ow, kw, stride_w, before_w, dilation_w, width);
            if (w < 0) continue;
            const real value = x[(plane * height + h) * width + w];
            if (place < 0 || value > best || value != value) best = value, place = kh * taps_w + kw;
        }
    }
    y[element] = best;
    winner[element] = static_cast<WINNER>(place);
}

extern "C" __global__ void __launch_bounds__(256) max_pool_grad(
    const real* __restrict__ gy, const WINNER* __restrict__ winner, real* __restrict__ gx, int64 size, int64 height,
    int64 width, int64 out_h, int64 out_w, int taps_h, int taps_w, int stride_h, int stride_w, int before_h,
    int before_w, int dilation_h, int dilation_w) {
    const int64 element = number_of_thread();
    if (element >= size) return;
    const int64 w = element % width, h = element / width % height, plane = element / width / height;
    real sum = 0;
    for (int kh = taps_h - 1; kh >= 0; --kh) {  // so that windows come in their order, as on the host
        const int64 oh = output_at(h, kh, stride_h, before_h, dilation_h, out_h);
        if (oh < 0) continue;
        for (int kw = taps_w - 1; kw >= 0; --kw) {
            const int64 ow = output_at(w, kw, stride_w, before_w, dilation_w, out_w);
            if (ow < 0) continue;
            const int64 window = (plane * out_h + oh) * out_w + ow;
            if (int(winner[window]) == kh * taps_w + kw) sum += gy[window];
        }
    }
    gx[element] = sum;
}
