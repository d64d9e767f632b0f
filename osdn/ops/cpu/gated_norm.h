// The norm and the gate of a layer's outputs, in one pass each way.  For a row x of D elements:
//
//     n = x s,   s = (|x|² / D + eps)^-½         y = n w a(z)         a: SiLU, sigmoid, or 1 without a gate
//     dn = dy w a        dx = s (dn - n (n · dn) / D)        dz = dy n w a'        dw = Σ dy n a
//
// The gradients of the weight w are summed per item of work, so that they do not depend on the number of threads.

#pragma once

#include "normalize.h"

#define DECLARE_GATED_NORM(...) \
    struct GatedNorm {          \
        __VA_ARGS__             \
    };                          \
    extern "C" const char osdn_gated_norm_call[] = #__VA_ARGS__;
// clang-format off
DECLARE_GATED_NORM(
    const void *x, *gate, *weight, *grad_out;  // [rows, D] with these strides, gate may be null; weight [D]
    void *out, *grad_x, *grad_gate, *grad_weight;  // contiguous; grad_weight [items, D]
    int64_t x_row, gate_row, grad_row, rows, D, element, activation, threads;
    double eps;)
// clang-format on
extern "C" const int64_t osdn_gated_norm_size = sizeof(GatedNorm);

namespace {

constexpr int64_t ROWS_PER_ITEM = 128;
enum { UNGATED = 0, SILU = 1, SIGMOID = 2 };

// The gate's value, and its derivative if requested.
template <class R, int ACTIVATION>
INLINE Vec<R> gate_value(Vec<R> z) {
    const Vec<R> more = R(1) + exponential<R>(-z);
    return (ACTIVATION == SILU ? z : splat(R(1))) / more;
}
template <class R, int ACTIVATION>
INLINE Vec<R> gate_value(Vec<R> z, Vec<R>& derivative) {
    const Vec<R> s = sigmoid<R>(z);
    derivative = ACTIVATION == SILU ? s * (1 + z * (1 - s)) : s * (1 - s);
    return ACTIVATION == SILU ? z * s : s;
}
template <class R, class E>
INLINE R inverse_rms(const Row<R, E>& x, double eps) {
    Vec<R> sum = {};
    for (int i = 0; i < x.K; i += W<R>) sum += x.at(i) * x.at(i);
    return R(1 / std::sqrt(double(total<R>(sum)) / x.K + eps));
}

template <class R, class E, int ACTIVATION>
void gated_norm_rows(const GatedNorm& call, int64_t first, int64_t last) {
    const int D = int(call.D);
    const Row<R, R> weight{static_cast<const R*>(call.weight), D};
    for (int64_t row = first; row < last; row++) {
        const Row<R, E> x{static_cast<const E*>(call.x) + row * call.x_row, D};
        const Row<R, E> gate{static_cast<const E*>(call.gate) + row * call.gate_row, D};
        E* out = static_cast<E*>(call.out) + row * D;
        const R s = inverse_rms<R, E>(x, call.eps);
        for (int i = 0; i < D; i += W<R>) {
            Vec<R> y = x.at(i) * s * weight.at(i);
            if constexpr (ACTIVATION != UNGATED) y *= gate_value<R, ACTIVATION>(gate.at(i));
            store_part<R, E>(out + i, D - i, y);
        }
    }
}

template <class R, class E, int ACTIVATION>
void gated_norm_rows_back(const GatedNorm& call, int64_t first, int64_t last) {
    const int D = int(call.D), Dp = round_up(D, W<R>);
    const Row<R, R> weight{static_cast<const R*>(call.weight), D};
    R *grad_n, *sums;
    scratch.divide<R>({{&grad_n, Dp}, {&sums, Dp}});
    std::memset(sums, 0, Dp * sizeof(R));
    for (int64_t row = first; row < last; row++) {
        const Row<R, E> x{static_cast<const E*>(call.x) + row * call.x_row, D};
        const Row<R, E> gate{static_cast<const E*>(call.gate) + row * call.gate_row, D};
        const Row<R, E> grad{static_cast<const E*>(call.grad_out) + row * call.grad_row, D};
        E *grad_x = static_cast<E*>(call.grad_x) + row * D, *grad_gate = static_cast<E*>(call.grad_gate) + row * D;
        const R s = inverse_rms<R, E>(x, call.eps);
        Vec<R> along = {};
        for (int i = 0; i < D; i += W<R>) {
            const Vec<R> n = x.at(i) * s, g = grad.at(i), gw = g * weight.at(i);
            Vec<R> a = splat(R(1)), slope;
            if constexpr (ACTIVATION != UNGATED) {
                a = gate_value<R, ACTIVATION>(gate.at(i), slope);
                store_part<R, E>(grad_gate + i, D - i, gw * n * slope);
            }
            store(grad_n + i, gw * a);
            store(sums + i, load(sums + i) + g * n * a);
            along += gw * a * n;
        }
        const R mean = total<R>(along) / R(D);
        for (int i = 0; i < D; i += W<R>)
            store_part<R, E>(grad_x + i, D - i, s * (load(grad_n + i) - x.at(i) * (s * mean)));
    }
    std::memcpy(static_cast<R*>(call.grad_weight) + first / ROWS_PER_ITEM * D, sums, D * sizeof(R));
}

template <class R, class E>
void gated_norm_item(const GatedNorm& call, int64_t item, bool back) {
    const int64_t first = item * ROWS_PER_ITEM, last = std::min(first + ROWS_PER_ITEM, call.rows);
    const auto forward = call.activation == SILU      ? gated_norm_rows<R, E, SILU>
                         : call.activation == SIGMOID ? gated_norm_rows<R, E, SIGMOID>
                                                      : gated_norm_rows<R, E, UNGATED>;
    const auto backward = call.activation == SILU      ? gated_norm_rows_back<R, E, SILU>
                          : call.activation == SIGMOID ? gated_norm_rows_back<R, E, SIGMOID>
                                                       : gated_norm_rows_back<R, E, UNGATED>;
    (back ? backward : forward)(call, first, last);
}

}  // namespace
