// The cross-entropy of rows of logits x with a label each, and its gradient, which takes the place of the logits:
//
//     loss = log Σ exp(x_i) - x_label          dx_i = exp(x_i) / Σ exp(x_i) - [i = label]
//
// A row is read from memory and written once; what happens in between stays in the caches.  A row with an ignored
// label is not read: its loss and its gradient are zero.

#pragma once

#include <cmath>

#include "normalize.h"

#define DECLARE_CROSS_ENTROPY(...) \
    struct CrossEntropy {          \
        __VA_ARGS__                \
    };                             \
    extern "C" const char osdn_cross_entropy_call[] = #__VA_ARGS__;
// clang-format off
DECLARE_CROSS_ENTROPY(
    void *logits;           // [rows, C], contiguous; with `gradient` they are overwritten by it
    const int64_t *labels;  // [rows], from 0 to C - 1 or ignored
    void *losses;           // [rows]
    int64_t rows, C, ignored, element, gradient, threads;)
// clang-format on
extern "C" const int64_t osdn_cross_entropy_size = sizeof(CrossEntropy);

namespace {

constexpr int64_t LOGITS_PER_ITEM = 4;  // rows

template <class R, class E>
void cross_entropy_row(const CrossEntropy& call, int64_t row, R* powers) {
    const int C = int(call.C);
    E* logits = static_cast<E*>(call.logits) + row * C;
    const Row<R, E> x{logits, C};
    const int64_t label = call.labels[row];
    R& loss = static_cast<R*>(call.losses)[row];
    if (label == call.ignored) {
        loss = 0;
        if (call.gradient) std::memset(logits, 0, C * sizeof(E));
        return;
    }
    const R answer = R(widen(logits[label]));
    Vec<R> most = splat(answer);
    int i = 0;
    for (; i + W<R> <= C; i += W<R>) {
        const Vec<R> v = x.at(i);
        most = v > most ? v : most;
    }
    R peak = answer;
    for (int j = 0; j < W<R>; j++) peak = std::max(peak, most[j]);
    for (; i < C; i++) peak = std::max(peak, R(widen(logits[i])));
    Vec<R> sums = {};
    for (i = 0; i + W<R> <= C; i += W<R>) {
        const Vec<R> power = exponential<R>(x.at(i) - peak);
        store(powers + i, power);
        sums += power;
    }
    if (i < C) {  // what lies beyond the row counts nothing
        store(powers + i, exponential<R>(x.at(i) - peak));
        for (int j = C; j < i + W<R>; j++) powers[j] = 0;
        sums += load(powers + i);
    }
    const R sum = total<R>(sums);
    loss = peak - answer + std::log(sum);
    if (!call.gradient) return;
    const R share = 1 / sum;
    powers[label] -= sum;
    for (i = 0; i < C; i += W<R>) store_part<R, E>(logits + i, C - i, load(powers + i) * share);
}

template <class R, class E>
void cross_entropy_item(const CrossEntropy& call, int64_t item) {
    R* powers;
    scratch.divide<R>({{&powers, round_up(call.C, W<R>)}});
    const int64_t end = std::min((item + 1) * LOGITS_PER_ITEM, call.rows);
    for (int64_t row = item * LOGITS_PER_ITEM; row < end; row++) cross_entropy_row<R, E>(call, row, powers);
}

}  // namespace
