// Many kernels in one call, as in decoding: a list of instructions that all threads work through together.
//
// One token of a model takes hundreds of kernels of a few microseconds each.  Called one by one, each costs more to
// prepare than to run, and has to wake the threads.  Here they are prepared once and run for every token; only the
// addresses of the states change.

#pragma once

#include "decode_step.h"
#include "row_product.h"

#define DECLARE_INSTRUCTION(...) \
    struct Instruction {         \
        __VA_ARGS__              \
    };                           \
    extern "C" const char osdn_program_call[] = #__VA_ARGS__;
// clang-format off
DECLARE_INSTRUCTION(
    int64_t kind;       // as below; END marks the end of the list
    const void* call;)  // a Product with those that follow it, a Step or an Elementwise
// clang-format on
extern "C" const int64_t osdn_program_size = sizeof(Instruction);
enum { END = 0, PRODUCTS = 1, STEP = 2, NORM = 3, GLU = 4 };

#define DECLARE_ELEMENTWISE(...) \
    struct Elementwise {         \
        __VA_ARGS__              \
    };                           \
    extern "C" const char osdn_elementwise_call[] = #__VA_ARGS__;
// NORM: out = x / rms(x) * weight.  GLU: out = silu(x) * other.
// clang-format off
DECLARE_ELEMENTWISE(
    const void *x, *other, *weight;  // [M, D], [M, D], [D]
    void* out;                       // [M, D]
    int64_t M, D, element, weight_element;
    double eps;)
// clang-format on
extern "C" const int64_t osdn_elementwise_size = sizeof(Elementwise);

namespace {

template <class R, class E>
void norm_row(const Elementwise& call, int64_t row) {
    const int D = int(call.D);
    const Row<R, E> x{static_cast<const E*>(call.x) + row * D, D};
    E* out = static_cast<E*>(call.out) + row * D;
    const Source<R> weights{call.weight, call.weight_element};
    const R s = inverse_rms<R, E>(x, call.eps);
    for (int i = 0; i < D; i += W<R>) {
        const int count = std::min(D - i, W<R>);
        Vec<R> weight[1];
        load_some<R, 1>(weights + i, count, weight);
        store_part<R, E>(out + i, count, x.at(i) * s * weight[0]);
    }
}
template <class R, class E>
void glu_row(const Elementwise& call, int64_t row) {
    const int D = int(call.D);
    const Row<R, E> gate{static_cast<const E*>(call.x) + row * D, D};
    const Row<R, E> up{static_cast<const E*>(call.other) + row * D, D};
    E* out = static_cast<E*>(call.out) + row * D;
    for (int i = 0; i < D; i += W<R>)
        store_part<R, E>(out + i, D - i, rounded<E>(gate.at(i) * sigmoid<R>(gate.at(i))) * up.at(i));
}

inline int64_t counters_of(const Instruction& x) {
    return x.kind == PRODUCTS ? static_cast<const Product*>(x.call)->more + 1 : 1;
}
// A thread's share of an instruction; `next` counts how much of each part has been taken.
template <class R>
void run_instruction(const Instruction& x, int64_t threads, std::atomic<int64_t>* next) {
    if (x.kind == PRODUCTS)
        return product_thread<R>(static_cast<const Product*>(x.call), PIECES * threads,
                                 [&](int64_t i) { return next[i].fetch_add(1, std::memory_order_relaxed); });
    if (x.kind == STEP) {
        const Step& call = *static_cast<const Step*>(x.call);
        for (int64_t i; (i = next->fetch_add(1, std::memory_order_relaxed)) < call.N * call.H;) step_item<R>(call, i);
        return;
    }
    const Elementwise& call = *static_cast<const Elementwise*>(x.call);
    with_element<R>(call.element, [&](auto element) {
        using E = decltype(element);
        for (int64_t row; (row = next->fetch_add(1, std::memory_order_relaxed)) < call.M;)
            x.kind == NORM ? norm_row<R, E>(call, row) : glu_row<R, E>(call, row);
    });
}

}  // namespace
