// The logarithm of a state's decay from the output of a layer's projection, in one pass each way.  Per channel, with
// v = x + bias:
//
//     y = -rate softplus(v)            dx = -rate σ(v) dy            d rate = -Σ softplus(v) dy
//     y = bound σ(rate v)              dx = rate bound σ (1 - σ) dy  d rate = Σ v bound σ (1 - σ) dy
//
// and d bias = Σ dx.  Sums over tokens are taken per item of work, so that they do not depend on the number of
// threads.

#pragma once

#include "normalize.h"

#define DECLARE_DECAY(...) \
    struct Decay {         \
        __VA_ARGS__        \
    };                     \
    extern "C" const char osdn_decay_call[] = #__VA_ARGS__;
// clang-format off
DECLARE_DECAY(
    const void *x, *rate, *bias, *grad_out;  // [rows, C] with a stride, [C], [C] or null, [rows, C]
    void *out, *grad_x, *sums;               // contiguous; sums [items, 2, C]: of the rate and of the bias
    int64_t x_row, rows, C, element, bounded, threads;
    double bound;)
// clang-format on
extern "C" const int64_t osdn_decay_size = sizeof(Decay);

namespace {

constexpr int64_t DECAYS_PER_ITEM = 64;  // rows

// log(1 + e) for e in [0, 1], accurate for tiny e: 2 (z + z³/3 + z⁵/5 + ...) with z = e / (2 + e) <= 1/3.
template <class R>
INLINE Vec<R> log_one_plus(Vec<R> e) {
    constexpr int terms = sizeof(R) == sizeof(float) ? 7 : 17;
    const Vec<R> z = e / (2 + e), z2 = z * z;
    Vec<R> series = splat(R(2) / R(2 * terms + 1));
    UNROLL
    for (int i = terms - 1; i >= 0; i--) series = series * z2 + R(2) / R(2 * i + 1);
    return z * series;
}
template <class R>
INLINE Vec<R> softplus(Vec<R> v) {
    const Vec<R> more = v > 0 ? v : Vec<R>{}, y = more + log_one_plus<R>(exponential<R>(-magnitude<R>(v)));
    return v == v ? y : v;
}

template <class R, class E>
void decay_item(const Decay& call, int64_t item, bool back) {
    const int C = int(call.C), Cp = round_up(C, W<R>);
    const int64_t first = item * DECAYS_PER_ITEM, last = std::min(first + DECAYS_PER_ITEM, call.rows);
    const R bound = R(call.bound);
    R *rates, *biases, *rate_sums, *bias_sums;
    scratch.divide<R>({{&rates, Cp}, {&biases, Cp}, {&rate_sums, Cp}, {&bias_sums, Cp}});
    for (R* piece : {rates, biases, rate_sums, bias_sums}) std::memset(piece, 0, Cp * sizeof(R));
    std::memcpy(rates, call.rate, C * sizeof(R));
    if (call.bias) std::memcpy(biases, call.bias, C * sizeof(R));
    for (int64_t row = first; row < last; row++) {
        const Row<R, E> x{static_cast<const E*>(call.x) + row * call.x_row, C};
        const Row<R, R> grad{static_cast<const R*>(call.grad_out) + row * C, C};
        for (int i = 0; i < C; i += W<R>) {
            const Vec<R> v = x.at(i) + load(biases + i), rate = load(rates + i);
            if (!back) {
                const Vec<R> y = call.bounded ? bound * sigmoid<R>(rate * v) : -rate * softplus<R>(v);
                store_part<R, R>(static_cast<R*>(call.out) + row * C + i, C - i, y);
                continue;
            }
            const Vec<R> g = grad.at(i);
            Vec<R> to_v, to_rate;
            if (call.bounded) {
                const Vec<R> s = sigmoid<R>(rate * v), slope = bound * s * (1 - s) * g;
                to_v = rate * slope;
                to_rate = v * slope;
            } else {
                to_v = -rate * sigmoid<R>(v) * g;
                to_rate = -softplus<R>(v) * g;
            }
            store_part<R, E>(static_cast<E*>(call.grad_x) + row * C + i, C - i, to_v);
            store(rate_sums + i, load(rate_sums + i) + to_rate);
            store(bias_sums + i, load(bias_sums + i) + to_v);
        }
    }
    if (!back) return;
    R* sums = static_cast<R*>(call.sums) + item * 2 * C;
    std::memcpy(sums, rate_sums, C * sizeof(R));
    std::memcpy(sums + C, bias_sums, C * sizeof(R));
}

}  // namespace
