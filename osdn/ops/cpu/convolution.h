// The short convolution: causal, depthwise, a few taps wide, optionally followed by SiLU.
//
// All of the time is memory traffic, so the inputs are read once, as they lie: a tile of tokens and channels
// is brought into the L1 cache in float32, one row per token, whether its channels or its tokens lie side by
// side and whether or not it is stored in 16 bits.  Outputs are written with channels side by side, as the heads
// after the convolution expect them.  Work is divided into segments of a
// sequence and blocks of channels; the gradients of the taps are summed per segment, so that the result does
// not depend on the number of threads.

#pragma once

#include "heads.h"

// As `struct Call`: native 8-byte fields, and the declaration as text for Python to compare.
#define DECLARE_CONVOLUTION(...) \
    struct Convolution {         \
        __VA_ARGS__              \
    };                           \
    extern "C" const char osdn_convolution_call[] = #__VA_ARGS__;
// clang-format off
DECLARE_CONVOLUTION(
    const void *x, *taps, *bias, *tail;  // taps [W, D], the newest input's first; tail [N, W - 1, D] or null
    const int64_t *cu_seqlens, *segments;  // [N + 1] or null: N sequences of T; [S, 2], sequence and first token
    void* out;  // [tokens, D]
    const void* grad_out;
    void *grad_x, *grad_taps, *grad_tail;  // [tokens, D], [S, W + 1, D] with the bias last, [N, W - 1, D] or null
    void* state;  // of a single step: [N, D, state_length], shifted by one input
    int64_t x_batch, x_token, x_channel, grad_batch, grad_token, grad_channel;  // strides in elements
    int64_t N, T, D, W, S, state_length, element, silu, threads;)
// clang-format on
extern "C" const int64_t osdn_convolution_size = sizeof(Convolution);

namespace {

constexpr int CHANNELS = 64, TOKENS = 64;  // a tile
constexpr int64_t SEGMENT = 1024;          // tokens that one thread handles together

// A tensor [N or 1, tokens, channels] with any strides.
template <class E>
struct View {
    const E* data;
    int64_t batch, token, channel;
    const E* at(const Convolution& call, int64_t n, int64_t t, int64_t c) const {
        return data + (call.cu_seqlens ? (call.cu_seqlens[n] + t) * token : n * batch + t * token) + c * channel;
    }
};

// Copies rows t to t + rows of a sequence, `count` channels starting at c, into rows of CHANNELS elements.
template <class R, class E>
void load_tile(const Convolution& call, const View<E>& x, int64_t n, int64_t t, int rows, int64_t c, int count, R* to) {
    if (rows <= 0) return;
    const E* from = x.at(call, n, t, c);
    if (count < CHANNELS) std::memset(to, 0, rows * CHANNELS * sizeof(R));
    int row = 0;
    if (x.token == 1 && x.channel != 1 && count == CHANNELS)  // tokens side by side: transpose squares
        for (; row + W<R> <= rows; row += W<R>)
            for (int i = 0; i < CHANNELS; i += W<R>) {
                Vec<R> square[W<R>];
                for (int j = 0; j < W<R>; j++) square[j] = load_wide(from + (i + j) * x.channel + row);
                exchange<R, 1>(square);
                for (int j = 0; j < W<R>; j++) store(to + (row + j) * CHANNELS + i, square[j]);
            }
    for (; row < rows; row++) {
        const E* source = from + row * x.token;
        R* target = to + row * CHANNELS;
        int i = 0;
        if (x.channel == 1)
            for (; i + W<R> <= count; i += W<R>) store(target + i, load_wide(source + i));
        for (; i < count; i++) target[i] = widen(source[i * x.channel]);
    }
}

// Stores a finished row of CHANNELS elements, of which `count` exist.
template <class R, class E>
INLINE void store_row(E* to, const R* from, int count) {
    for (int i = 0; i < count; i += W<R>) store_part<R, E, true>(to + i, count - i, load(from + i));
}

// One segment and block of channels of a call: its taps, and its inputs tile by tile.
template <class R, class E>
struct Segment {
    const Convolution& call;
    int64_t index, n, begin, length, first, c;
    int count, width, past;
    R *taps, *bias;  // [W, CHANNELS], [CHANNELS]

    Segment(const Convolution& call, int64_t index, int64_t block)
        : call(call), index(index), n(call.segments[2 * index]), first(call.segments[2 * index + 1]),
          c(block * CHANNELS), count(int(std::min<int64_t>(CHANNELS, call.D - c))), width(int(call.W)),
          past(width - 1) {
        begin = call.cu_seqlens ? call.cu_seqlens[n] : n * call.T;
        length = (call.cu_seqlens ? call.cu_seqlens[n + 1] : begin + call.T) - begin;
    }
    int64_t last() const { return std::min(first + SEGMENT, length); }
    void load_taps() {
        for (int lag = 0; lag < width; lag++) load_row(call.taps, lag, taps + lag * CHANNELS);
        load_row(call.bias, 0, bias);
    }
    // This block's channels of a row of [rows, D]; zeros if the tensor is absent.
    void load_row(const void* from, int64_t row, R* to) const {
        std::memset(to, 0, CHANNELS * sizeof(R));
        if (from) std::memcpy(to, static_cast<const R*>(from) + row * call.D + c, count * sizeof(R));
    }
    // Inputs from token t - past up to `end`; before the sequence its tail, or zeros.
    void load_inputs(int64_t t, int64_t end, R* to) const {
        const int missing = int(std::max<int64_t>(0, past - t));
        for (int i = past - missing; i < past; i++, to += CHANNELS) load_row(call.tail, n * past + i, to);
        const View<E> x{static_cast<const E*>(call.x), call.x_batch, call.x_token, call.x_channel};
        const int64_t start = t - past + missing;
        load_tile(call, x, n, start, int(end - start), c, count, to);
    }
    // The sum over the taps, for W channels; x points to the row of the newest input.
    template <int WIDTH>
    INLINE Vec<R> convolve(const R* x, int i) const {
        Vec<R> sum = load(bias + i);
        const int lags = WIDTH ? WIDTH : width;
        UNROLL
        for (int lag = 0; lag < lags; lag++) sum += load(x - lag * CHANNELS + i) * load(taps + lag * CHANNELS + i);
        return sum;
    }
};

template <class R>
INLINE Vec<R> sigmoid(Vec<R> x) {
    return R(1) / (R(1) + exponential<R>(-x));
}

template <class R, class E, int WIDTH>
void convolve_segment(const Convolution& call, int64_t index, int64_t block) {
    Segment<R, E> segment(call, index, block);
    const int past = segment.past;
    R *inputs, *row;
    scratch.divide<R>({{&inputs, (TOKENS + past) * CHANNELS},
                       {&segment.taps, (past + 1) * CHANNELS},
                       {&segment.bias, CHANNELS},
                       {&row, CHANNELS}});
    segment.load_taps();
    for (int64_t t = segment.first; t < segment.last(); t += TOKENS) {
        const int tokens = int(std::min<int64_t>(TOKENS, segment.last() - t));
        segment.load_inputs(t, t + tokens, inputs);
        E* out = static_cast<E*>(call.out) + (segment.begin + t) * call.D + segment.c;
        for (int j = 0; j < tokens; j++, out += call.D) {
            UNROLL
            for (int i = 0; i < CHANNELS; i += W<R>) {
                const Vec<R> y = segment.template convolve<WIDTH>(inputs + (j + past) * CHANNELS, i);
                store(row + i, call.silu ? y * sigmoid<R>(y) : y);
            }
            store_row(out, row, segment.count);
        }
    }
}

template <class R, class E, int WIDTH>
void convolve_segment_back(const Convolution& call, int64_t index, int64_t block) {
    Segment<R, E> segment(call, index, block);
    const int past = segment.past, width = WIDTH ? WIDTH : segment.width;
    R *inputs, *grads, *row, *sums;
    scratch.divide<R>({{&inputs, (TOKENS + 2 * past) * CHANNELS},
                       {&grads, (TOKENS + past) * CHANNELS},
                       {&segment.taps, width * CHANNELS},
                       {&segment.bias, CHANNELS},
                       {&row, CHANNELS},
                       {&sums, (width + 1) * CHANNELS}});
    segment.load_taps();
    std::memset(sums, 0, (width + 1) * CHANNELS * sizeof(R));
    const View<E> grad_out{static_cast<const E*>(call.grad_out), call.grad_batch, call.grad_token, call.grad_channel};
    // The gradient of input j of the tile, from those of the outputs j to j + past that are not before it.
    auto input_gradient = [&](int j) {
        UNROLL
        for (int i = 0; i < CHANNELS; i += W<R>) {
            Vec<R> sum = {};
            for (int lag = std::max(0, -j); lag < width; lag++)
                sum += load(grads + (j + lag) * CHANNELS + i) * load(segment.taps + lag * CHANNELS + i);
            store(row + i, sum);
        }
    };
    for (int64_t t = segment.first; t < segment.last(); t += TOKENS) {
        const int tokens = int(std::min<int64_t>(TOKENS, segment.last() - t));
        const int rows = int(std::min<int64_t>(tokens + past, segment.length - t));  // outputs that depend on them
        segment.load_inputs(t, t + rows, inputs);
        load_tile(call, grad_out, segment.n, t, rows, segment.c, segment.count, grads);
        std::memset(grads + rows * CHANNELS, 0, (TOKENS + past - rows) * CHANNELS * sizeof(R));
        for (int j = 0; j < rows; j++) {
            const R* x = inputs + (j + past) * CHANNELS;
            UNROLL
            for (int i = 0; i < CHANNELS; i += W<R>) {
                Vec<R> g = load(grads + j * CHANNELS + i);
                if (call.silu) {
                    const Vec<R> y = segment.template convolve<WIDTH>(x, i), s = sigmoid<R>(y);
                    g *= s * (1 + y * (1 - s));
                    store(grads + j * CHANNELS + i, g);
                }
                if (j < tokens) {
                    for (int lag = 0; lag < width; lag++) {
                        R* sum = sums + lag * CHANNELS + i;
                        store(sum, load(sum) + g * load(x - lag * CHANNELS + i));
                    }
                    store(sums + width * CHANNELS + i, load(sums + width * CHANNELS + i) + g);
                }
            }
        }
        E* grad_x = static_cast<E*>(call.grad_x) + (segment.begin + t) * call.D + segment.c;
        for (int j = 0; j < tokens; j++, grad_x += call.D) {
            input_gradient(j);
            store_row(grad_x, row, segment.count);
        }
        if (t == 0 && call.grad_tail)
            for (int j = 0; j < past; j++) {
                input_gradient(j - past);
                R* to = static_cast<R*>(call.grad_tail) + (segment.n * past + j) * call.D + segment.c;
                store_row(to, row, segment.count);
            }
    }
    R* to = static_cast<R*>(call.grad_taps) + index * (width + 1) * call.D + segment.c;
    for (int lag = 0; lag <= width; lag++) store_row(to + lag * call.D, sums + lag * CHANNELS, segment.count);
}

// One input per sequence, as in decoding: `state` [N, D, L] holds the last L inputs, and this one is shifted in.
template <class R, class E>
void convolve_step(const Convolution& call, int64_t n, int64_t block) {
    const int64_t c = block * CHANNELS, L = call.state_length;
    const int count = int(std::min<int64_t>(CHANNELS, call.D - c)), width = int(call.W);
    R *sums, *row;
    scratch.divide<R>({{&sums, CHANNELS}, {&row, CHANNELS}});
    std::memset(sums, 0, CHANNELS * sizeof(R));
    const E* x = static_cast<const E*>(call.x) + n * call.x_batch + c * call.x_channel;
    const E* taps = static_cast<const E*>(call.taps) + c * width;  // [D, W], the newest input's last
    E* state = static_cast<E*>(call.state) + (n * call.D + c) * L;
    for (int i = 0; i < count; i++, state += L, taps += width) {
        std::memmove(state, state + 1, (L - 1) * sizeof(E));
        state[L - 1] = x[i * call.x_channel];
        R sum = call.bias ? widen(static_cast<const E*>(call.bias)[c + i]) : R(0);
        for (int lag = 0; lag < width; lag++) sum += widen(state[L - 1 - lag]) * widen(taps[width - 1 - lag]);
        sums[i] = sum;
    }
    for (int i = 0; i < CHANNELS; i += W<R>) {
        const Vec<R> y = load(sums + i);
        store(row + i, call.silu ? y * sigmoid<R>(y) : y);
    }
    store_row(static_cast<E*>(call.out) + n * call.D + c, row, count);
}

// Runs one item of work, for the dtype and the width of a call.
template <class R>
void convolve_item(const Convolution& call, int64_t item, bool back) {
    const int64_t blocks = (call.D + CHANNELS - 1) / CHANNELS;
    with_element<R>(call.element, [&](auto element) {
        using E = decltype(element);
        const auto run = call.W == 4 ? (back ? convolve_segment_back<R, E, 4> : convolve_segment<R, E, 4>)
                                     : (back ? convolve_segment_back<R, E, 0> : convolve_segment<R, E, 0>);
        run(call, item / blocks, item % blocks);
    });
}
template <class R>
void convolve_step_item(const Convolution& call, int64_t item) {
    const int64_t blocks = (call.D + CHANNELS - 1) / CHANNELS;
    with_element<R>(call.element,
                    [&](auto element) { convolve_step<R, decltype(element)>(call, item / blocks, item % blocks); });
}

}  // namespace
