// A few rows times a matrix, as in decoding: y = x W' + bias with x [M, K] and W [N, K], M small.  One call may
// multiply several matrices; threads then synchronise once, at its end.
//
// All of the time is spent reading W, and memory is fastest when read in order: a thread reads a piece of W from
// beginning to end, with all rows of x in its L1 or L2 cache.  16-bit numbers are widened on the way.  A shift and a
// mask turn a vector of bfloat16 pairs into two vectors, one of the elements at even positions and one of those at odd
// ones; x is arranged in the same way beforehand.
//
// 8-bit weights have one scale per row.  Of 4-bit weights, 32 neighbours share a scale and a zero and occupy 16 bytes:
// the first 16 in the low halves, the others in the high ones.  Their product with x is scale Σ code x + zero Σ x.

#pragma once

#include "heads.h"

#define DECLARE_PRODUCT(...) \
    struct Product {         \
        __VA_ARGS__          \
    };                       \
    extern "C" const char osdn_product_call[] = #__VA_ARGS__;
// clang-format off
DECLARE_PRODUCT(
    const void *x, *weight, *bias;  // [M, K], [N, K], [N] or null
    const void *scales, *zeros;     // 8-bit weights: [N] in float32; 4-bit: [N, K / 32] each in bfloat16
    const void* add;                // [M, N] or null: added to the rounded product; may be `out`
    void* out;                      // [M, N]
    int64_t M, N, K, element, bits, threads;  // bits of quantized weights; 0: they are stored as x is
    int64_t more;)  // how many further products follow this one in memory; they share the element and the threads
// clang-format on
extern "C" const int64_t osdn_product_size = sizeof(Product);

namespace {

constexpr int64_t PIECES = 4;  // of W per thread, so that others can take over from one that is held up
constexpr int GROUP = 32;      // 4-bit weights that share a scale and a zero

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
    // U independent pairs of sums, because additions to one sum wait for each other.
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
    for (; i + U * PAIR <= K; i += U * PAIR)  // explicit prefetching only slows this down
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

// Loads as many bytes as a float32 vector has elements, as integers.
typedef Bits<float>::type Integers;
template <class B>
INLINE Integers load_bytes(const B* p) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return Integers(std::is_signed_v<B> ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return Integers(std::is_signed_v<B> ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    Integers x;
    for (int i = 0; i < W<float>; i++) x[i] = p[i];
    return x;
#endif
}
// The same for a row of 8-bit weights, without its scale; K is a multiple of GROUP.
template <class R, int M>
INLINE void multiply_int8(const int8_t* w, int64_t K, const R* x, int64_t Kp, R (&out)[M]) {
    constexpr int U = GROUP / W<R>;
    Vec<R> sum[M][U] = {};
    for (int64_t i = 0; i < K; i += GROUP) {
        UNROLL
        for (int u = 0; u < U; u++) {
            const Vec<R> a = __builtin_convertvector(load_bytes(w + i + u * W<R>), Vec<R>);
            UNROLL
            for (int m = 0; m < M; m++) sum[m][u] += a * load(x + m * Kp + i + u * W<R>);
        }
    }
    UNROLL
    for (int m = 0; m < M; m++) {
        UNROLL
        for (int u = 1; u < U; u++) sum[m][0] += sum[m][u];
        out[m] = total<R>(sum[m][0]);
    }
}
// For a row of 4-bit weights; the elements of a row of x are followed by their sums over groups, zero past the last.
template <class R, int M>
INLINE void multiply_int4(const uint8_t* w, const Bfloat16* scales, const Bfloat16* zeros, int64_t K, const R* x,
                          int64_t Kp, R (&out)[M]) {
    const int64_t groups = K / GROUP;
    Vec<R> sum[2][M] = {};  // one for every other group, because additions to one sum wait for each other
    for (int64_t g0 = 0; g0 < groups; g0 += W<R>) {
        const int count = int(std::min<int64_t>(groups - g0, W<R>));
        alignas(BYTES) R scale[W<R>];
        store(scale, load_part<R>(scales + g0, count));
        const Vec<R> zero = load_part<R>(zeros + g0, count);
        UNROLL
        for (int m = 0; m < M; m++) sum[1][m] += zero * load(x + m * Kp + K + g0);
        const auto add_group = [&](int g, Vec<R>* sums) {
            const uint8_t* codes = w + (g0 + g) * (GROUP / 2);
            const R* at = x + (g0 + g) * GROUP;
            Vec<R> part[M] = {};
            UNROLL
            for (int i = 0; i < GROUP / 2; i += W<R>) {
                const Integers both = load_bytes(codes + i);
                const Vec<R> low = __builtin_convertvector(both & 15, Vec<R>);
                const Vec<R> high = __builtin_convertvector(both >> 4, Vec<R>);
                UNROLL
                for (int m = 0; m < M; m++)
                    part[m] += low * load(at + m * Kp + i) + high * load(at + m * Kp + GROUP / 2 + i);
            }
            UNROLL
            for (int m = 0; m < M; m++) sums[m] += part[m] * splat(scale[g]);
        };
        int g = 0;
        for (; g + 2 <= count; g += 2) {
            add_group(g, sum[0]);
            add_group(g + 1, sum[1]);
        }
        if (g < count) add_group(g, sum[0]);
    }
    UNROLL
    for (int m = 0; m < M; m++) out[m] = total<R>(sum[0][m] + sum[1][m]);
}

// The product of one row of W with M rows of x.
template <class R, class E, int M>
INLINE void multiply_any(const Product& call, int64_t n, const R* x, int64_t Kp, R (&out)[M]) {
    const int64_t K = call.K, groups = K / GROUP;
    if constexpr (std::is_same_v<R, float>) {
        if (call.bits == 8) {
            multiply_int8<R, M>(static_cast<const int8_t*>(call.weight) + n * K, K, x, Kp, out);
            const R scale = static_cast<const float*>(call.scales)[n];
            for (int m = 0; m < M; m++) out[m] *= scale;
            return;
        }
        if (call.bits == 4)
            return multiply_int4<R, M>(static_cast<const uint8_t*>(call.weight) + n * K / 2,
                                       static_cast<const Bfloat16*>(call.scales) + n * groups,
                                       static_cast<const Bfloat16*>(call.zeros) + n * groups, K, x, Kp, out);
    }
    multiply<R, E, M>(static_cast<const E*>(call.weight) + n * K, K, x, Kp, out);
}
// Products of rows [first, last) of W, at most a vector's worth, with M rows of x and out starting at m.
template <class R, class E, int M>
void multiply_rows(const Product& call, const R* x, int64_t Kp, int64_t first, int64_t last, int64_t m) {
    const int count = int(last - first);
    alignas(BYTES) R results[M][W<R>] = {};
    for (int r = 0; r < count; r++) {
        R sums[M];
        multiply_any<R, E, M>(call, first + r, x + m * Kp, Kp, sums);
        for (int j = 0; j < M; j++) results[j][r] = sums[j];
    }
    Vec<R> bias = {};
    if (call.bias) bias = load_part<R>(static_cast<const E*>(call.bias) + first, count);
    for (int j = 0; j < M; j++) {
        const int64_t at = (m + j) * call.N + first;
        Vec<R> y = load(results[j]) + bias;
        if (call.add) y = rounded<E>(y) + load_part<R>(static_cast<const E*>(call.add) + at, count);
        store_part<R, E>(static_cast<E*>(call.out) + at, count, y);
    }
}
// Products of rows [first, last) of W with all rows of x; a few rows of W at a time stay in the L1 cache.
template <class R, class E>
void multiply_piece(const Product& call, const R* x, int64_t Kp, int64_t first, int64_t last) {
    for (int64_t n = first; n < last; n += W<R>) {
        const int64_t end = std::min<int64_t>(n + W<R>, last);
        int64_t m = 0;
        for (; m + 4 <= call.M; m += 4) multiply_rows<R, E, 4>(call, x, Kp, n, end, m);
        if (call.M - m >= 2) {
            multiply_rows<R, E, 2>(call, x, Kp, n, end, m);
            m += 2;
        }
        if (m < call.M) multiply_rows<R, E, 1>(call, x, Kp, n, end, m);
    }
}

// Elements of a row of x as they are laid out for a product.
template <class R>
int64_t arranged_size(const Product& call) {
    const int64_t K = round_up(call.K, 2 * W<R>);
    return call.bits == 4 ? call.K + round_up(call.K / GROUP, W<R>) : K;
}
template <class R, class E>
void arrange_row(const Product& call, const E* x, int64_t Kp, R* to) {
    if (!call.bits) return arrange<R, E>(x, call.K, Kp, to);
    for (int64_t i = 0; i < call.K; i += W<R>) store(to + i, load_wide(x + i));
    if (call.bits == 8) return;
    std::memset(to + call.K, 0, (Kp - call.K) * sizeof(R));
    for (int64_t i = 0; i < call.K; i++) to[call.K + i / GROUP] += to[i];
}

// What one thread does: pieces of every matrix, until none are left.  next(i) is the next piece of the i-th matrix.
template <class R, class F>
void product_thread(const Product* calls, int64_t pieces, F&& next) {
    with_element<R>(calls->element, [&](auto element) {
        using E = decltype(element);
        int64_t largest = 0;
        for (int64_t i = 0; i <= calls->more; i++) largest = std::max(largest, calls[i].M * arranged_size<R>(calls[i]));
        R* x;
        scratch.divide<R>({{&x, largest}});
        const Product* arranged = nullptr;
        for (int64_t i = 0; i <= calls->more; i++) {
            const Product& call = calls[i];
            const int64_t Kp = arranged_size<R>(call), own = std::min(pieces, call.N);
            if (!arranged || call.x != arranged->x || call.K != arranged->K || call.bits != arranged->bits)
                for (int64_t m = 0; m < call.M; m++)
                    arrange_row<R, E>(call, static_cast<const E*>(call.x) + m * call.K, Kp, x + m * Kp);
            arranged = &call;
            for (int64_t p; (p = next(i)) < own;)
                multiply_piece<R, E>(call, x, Kp, p * call.N / own, (p + 1) * call.N / own);
        }
    });
}

}  // namespace
