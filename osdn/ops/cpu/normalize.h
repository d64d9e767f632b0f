// Rows of keys and queries to unit length and into the precision of the recurrence, in one pass each way:
//
//     y = x s,   s = (|x|² + eps)^-½          dx = s (dy - y (y · dy))
//
// x may have any strides, as long as the K elements of a row are contiguous.

#pragma once

#include <cmath>

#include "convolution.h"

#define DECLARE_ROWS(...) \
    struct Rows {         \
        __VA_ARGS__       \
    };                    \
    extern "C" const char osdn_rows_call[] = #__VA_ARGS__;
// clang-format off
DECLARE_ROWS(
    const void *x, *grad_out;  // [B, T, H, K] with these strides; contiguous
    void *out, *grad_x;        // contiguous
    int64_t x_batch, x_token, x_head, B, T, H, K, element, unit, threads;  // unit: whether to normalise
    double eps;)
// clang-format on
extern "C" const int64_t osdn_rows_size = sizeof(Rows);

namespace {

template <class R, class E>
struct Row {
    const E* x;
    int K;
    INLINE Vec<R> at(int i) const { return load_part<R>(x + i, K - i); }
};
template <class R, class E>
INLINE R dot(const Row<R, E>& a, const Row<R, R>& b) {
    Vec<R> sum = {};
    for (int i = 0; i < a.K; i += W<R>) sum += a.at(i) * b.at(i);
    return total<R>(sum);
}
template <class R, class E>
INLINE R inverse_norm(const Row<R, E>& x, double eps) {
    Vec<R> sum = {};
    for (int i = 0; i < x.K; i += W<R>) sum += x.at(i) * x.at(i);
    return R(1) / std::sqrt(total<R>(sum) + R(eps));
}
// All heads of a token.
template <class R, class E>
void normalize_token(const Rows& call, int64_t token, bool back) {
    const int K = int(call.K);
    const E* from = static_cast<const E*>(call.x) + token / call.T * call.x_batch + token % call.T * call.x_token;
    for (int64_t h = 0; h < call.H; h++) {
        const int64_t place = (token * call.H + h) * K;
        const Row<R, E> x{from + h * call.x_head, K};
        const R s = call.unit ? inverse_norm<R, E>(x, call.eps) : R(1);
        if (!back) {
            R* out = static_cast<R*>(call.out) + place;
            for (int i = 0; i < K; i += W<R>) store_part<R, R, true>(out + i, K - i, x.at(i) * s);
            continue;
        }
        const Row<R, R> grad{static_cast<const R*>(call.grad_out) + place, K};
        E* grad_x = static_cast<E*>(call.grad_x) + place;
        const R along = call.unit ? dot<R, E>(x, grad) * s * s : R(0);
        for (int i = 0; i < K; i += W<R>) store_part<R, E, true>(grad_x + i, K - i, s * (grad.at(i) - x.at(i) * along));
    }
}

constexpr int64_t TOKENS_PER_ITEM = 16;

template <class R>
void normalize_item(const Rows& call, int64_t item, bool back) {
    const int64_t end = std::min((item + 1) * TOKENS_PER_ITEM, call.B * call.T);
    with_element<R>(call.element, [&](auto element) {
        for (int64_t token = item * TOKENS_PER_ITEM; token < end; token++)
            normalize_token<R, decltype(element)>(call, token, back);
    });
}

}  // namespace
