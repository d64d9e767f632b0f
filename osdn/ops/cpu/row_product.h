// A few rows times a matrix, as in decoding: y = x W' + bias with x [M, K] and W [N, K], M small.  Several matrices may
// be multiplied by one call: threads then meet once, at its end.
//
// All of the time is reading W, once, and one row after the other is what memory is fastest at: a thread reads a piece
// of W from its beginning to its end, with all rows of x at hand in its L1 or L2 cache.  Numbers of 16 bits are widened
// on the way.  Of bfloat16, two lie in 32 bits and are a shift and a mask away from two vectors, one of the elements at
// even places and one of those at odd ones; x is laid out in the same way beforehand.

#pragma once

#include "heads.h"

#define DECLARE_PRODUCT(...)      \
    struct Product {              \
        __VA_ARGS__               \
    };                            \
    extern "C" const char osdn_product_call[] = #__VA_ARGS__;
DECLARE_PRODUCT(
    const void *x, *weight, *bias;  // [M, K], [N, K], [N] or null
    const void* add;                // [M, N] or null: added to the rounded product; may be `out`
    void* out;                      // [M, N]
    int64_t M, N, K, element, threads;
    int64_t more;)  // how many further products follow this one in memory; they share M, element and threads
extern "C" const int64_t osdn_product_size = sizeof(Product);

namespace {

constexpr int64_t PIECES = 4;  // of W per thread: one that is held up leaves some to the others

// Two vectors of W from memory: E at p, the first 2 W elements in the order of `arrange`.
template <class R, class E>
INLINE void load_pair(const E* p, Vec<R>& a, Vec<R>& b) {
    if constexpr (std::is_same_v<E, Bfloat16>) {
        typedef uint32_t Loose __attribute__((vector_size(BYTES), aligned(2), may_alias));
        const Unsigned both = *reinterpret_cast<const Loose*>(p);
        a = of_bits(both << 16);
        b = of_bits(both & 0xffff0000);
    } else {
        a = load_wide(p);
        b = load_wide(p + W<R>);
    }
}
// A row of x, widened and padded to Kp with zeros, its pairs of vectors in the order of `load_pair`.
template <class R, class E>
void arrange(const E* x, int64_t K, int64_t Kp, R* to) {
    for (int64_t i = 0; i < Kp; i += 2 * W<R>) {
        E part[2 * W<R>] = {};
        std::memcpy(part, x + i, std::min<int64_t>(K - i, 2 * W<R>) * sizeof(E));
        Vec<R> a, b;
        load_pair<R, E>(part, a, b);
        store(to + i, a);
        store(to + i + W<R>, b);
    }
}

// The products of a row of W with M rows of x.
template <class R, class E, int M>
INLINE void multiply(const E* w, int64_t K, const R* x, int64_t Kp, R (&out)[M]) {
    // U pairs of sums at once: the additions of one wait for each other.
    constexpr int PAIR = 2 * W<R>, U = M == 1 ? 4 : 2;
    Vec<R> sum[M][2 * U] = {};
    const auto step = [&](const E* p, int64_t i, int u) {
        Vec<R> a, b;
        load_pair<R, E>(p, a, b);
        UNROLL
        for (int m = 0; m < M; m++) {
            sum[m][2 * u] += a * load(x + m * Kp + i);
            sum[m][2 * u + 1] += b * load(x + m * Kp + i + W<R>);
        }
    };
    int64_t i = 0;
    for (; i + U * PAIR <= K; i += U * PAIR)  // asking for the next lines by hand would only slow it down
        UNROLL
        for (int u = 0; u < U; u++) step(w + i + u * PAIR, i + u * PAIR, u);
    for (; i < K; i += PAIR) {
        E rest[PAIR] = {};
        std::memcpy(rest, w + i, std::min<int64_t>(K - i, PAIR) * sizeof(E));
        step(rest, i, 0);
    }
    UNROLL
    for (int m = 0; m < M; m++) {
        UNROLL
        for (int u = 1; u < 2 * U; u++) sum[m][0] += sum[m][u];
        out[m] = total<R>(sum[m][0]);
    }
}

// Rows [first, last) of W with all rows of x, arranged, and rows of zeros up to M.
template <class R, class E, int M>
void multiply_rows(const Product& call, const R* x, int64_t Kp, int64_t first, int64_t last) {
    constexpr int64_t WIDTH = W<R>;
    E* out = static_cast<E*>(call.out);
    for (int64_t n = first; n < last; n += WIDTH) {  // as many results as a vector has elements leave together
        const int count = int(std::min(WIDTH, last - n));
        alignas(BYTES) R results[M][WIDTH] = {};
        for (int r = 0; r < count; r++) {
            R sums[M];
            multiply<R, E, M>(static_cast<const E*>(call.weight) + (n + r) * call.K, call.K, x, Kp, sums);
            for (int j = 0; j < M; j++) results[j][r] = sums[j];
        }
        Vec<R> bias = {};
        if (call.bias) bias = load_part<R>(static_cast<const E*>(call.bias) + n, count);
        for (int j = 0; j < call.M; j++) {
            const int64_t at = j * call.N + n;
            Vec<R> y = load(results[j]) + bias;
            if (call.add) y = rounded<E>(y) + load_part<R>(static_cast<const E*>(call.add) + at, count);
            store_part<R, E>(out + at, count, y);
        }
    }
}

// What one thread does: pieces of every matrix, until none are left.  next(i) is the next piece of the i-th matrix.
template <class R, class E, int M, class F>
void product_pieces(const Product* calls, int64_t pieces, F&& next) {
    int64_t longest = 0;
    for (int64_t i = 0; i <= calls->more; i++) longest = std::max(longest, calls[i].K);
    R* x;
    scratch.divide<R>({{&x, M * round_up(longest, 2 * W<R>)}});
    const Product* arranged = nullptr;
    for (int64_t i = 0; i <= calls->more; i++) {
        const Product& call = calls[i];
        const int64_t Kp = round_up(call.K, 2 * W<R>);
        if (!arranged || call.x != arranged->x || call.K != arranged->K) {
            for (int64_t m = 0; m < call.M; m++)
                arrange<R, E>(static_cast<const E*>(call.x) + m * call.K, call.K, Kp, x + m * Kp);
            std::memset(x + call.M * Kp, 0, (M - call.M) * Kp * sizeof(R));
            arranged = &call;
        }
        const int64_t own = std::min(pieces, call.N);
        for (int64_t p; (p = next(i)) < own;)
            multiply_rows<R, E, M>(call, x, Kp, p * call.N / own, (p + 1) * call.N / own);
    }
}
// For at most 4 rows of x.
template <class R, class F>
void product_thread(const Product* calls, int64_t pieces, F&& next) {
    with_element<R>(calls->element, [&](auto element) {
        using E = decltype(element);
        if (calls->M <= 1) return product_pieces<R, E, 1>(calls, pieces, next);
        if (calls->M <= 2) return product_pieces<R, E, 2>(calls, pieces, next);
        product_pieces<R, E, 4>(calls, pieces, next);
    });
}

}  // namespace
