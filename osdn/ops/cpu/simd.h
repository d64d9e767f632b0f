// Vectors of whatever width the CPU has, and the four inner loops where all of the time is spent.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#ifdef __AVX__
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif

template <class R>
struct Simd {
    static constexpr int W = BYTES / sizeof(R);
    typedef R vec __attribute__((vector_size(BYTES)));
    typedef R loose __attribute__((vector_size(BYTES), aligned(sizeof(R)), may_alias));
};
template <class R>
using Vec = typename Simd<R>::vec;
template <class R>
constexpr int W = Simd<R>::W;

template <class R>
struct Bits;
template <>
struct Bits<float> {
    typedef int32_t element;
    typedef int32_t type __attribute__((vector_size(BYTES)));
    static constexpr int mantissa = 23, bias = 127, terms = 7;
    static constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    static constexpr float least = -87.0f, most = 88.0f;
    static constexpr int32_t root_half = 0x3f3504f3;  // the bits of sqrt(1/2)
    static constexpr int log_terms = 4;
};
template <>
struct Bits<double> {
    typedef int64_t element;
    typedef int64_t type __attribute__((vector_size(BYTES)));
    static constexpr int mantissa = 52, bias = 1023, terms = 13;
    static constexpr double magic = 6755399441055744.0;  // 1.5 * 2^52
    static constexpr double ln2_high = 0.693145751953125, ln2_low = 1.42860682030941723212e-6;
    static constexpr double least = -708.0, most = 709.0;
    static constexpr int64_t root_half = 0x3fe6a09e667f3bcd;
    static constexpr int log_terms = 10;
};

template <class R>
INLINE Vec<R> load(const R* p) {
    return *reinterpret_cast<const typename Simd<R>::loose*>(p);
}
template <class R>
INLINE void store(R* p, Vec<R> x) {
    *reinterpret_cast<typename Simd<R>::loose*>(p) = x;
}
template <class R>
INLINE Vec<R> splat(R x) {
    return Vec<R>{} + x;
}
// The first n of NV vectors' elements; the rest read as zero and are not written.
template <class R, int NV>
INLINE void load_some(const R* p, int n, Vec<R> (&x)[NV]) {
    if (n == NV * W<R>) {
        UNROLL
        for (int i = 0; i < NV; i++) x[i] = load(p + i * W<R>);
    } else {
        alignas(BYTES) R buffer[NV * W<R>] = {};
        std::memcpy(buffer, p, n * sizeof(R));
        UNROLL
        for (int i = 0; i < NV; i++) x[i] = load(buffer + i * W<R>);
    }
}
template <class R, int NV>
INLINE void store_some(R* p, int n, const Vec<R> (&x)[NV]) {
    if (n == NV * W<R>) {
        UNROLL
        for (int i = 0; i < NV; i++) store(p + i * W<R>, x[i]);
    } else {
        alignas(BYTES) R buffer[NV * W<R>];
        UNROLL
        for (int i = 0; i < NV; i++) store(buffer + i * W<R>, x[i]);
        std::memcpy(p, buffer, n * sizeof(R));
    }
}
// A store that bypasses the caches, for results that are not read again soon: fetching a line only to overwrite it
// would double the traffic.  `drain` makes such stores visible to other threads.
template <class R>
INLINE void stream(R* p, Vec<R> x) {
    if (reinterpret_cast<uintptr_t>(p) % BYTES) {
        store(p, x);
        return;
    }
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    store(p, x);  // the sanitizers do not see streaming stores
#elif defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)x);
#elif defined(__AVX__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)x);
#else
    store(p, x);
#endif
}
INLINE void drain() {
#ifdef __AVX__
    _mm_sfence();
#endif
}
// Like store_some, but streaming.
template <class R, int NV>
INLINE void stream_some(R* p, int n, const Vec<R> (&x)[NV]) {
    if (n == NV * W<R>) {
        UNROLL
        for (int i = 0; i < NV; i++) stream(p + i * W<R>, x[i]);
    } else {
        store_some<R, NV>(p, n, x);
    }
}
// The elements with the numbers I, which count through a and then b.
template <class R, int... I>
INLINE Vec<R> shuffle(Vec<R> a, Vec<R> b) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, I...);
#else  // GCC has __builtin_shufflevector only since version 12
    return __builtin_shuffle(a, b, typename Bits<R>::type{I...});
#endif
}
// The elements of x at places between 0 and W - 1 that only the running program knows.
template <class R>
INLINE Vec<R> pick(Vec<R> x, typename Bits<R>::type places) {
#ifdef __clang__
    Vec<R> out;
    for (int i = 0; i < W<R>; i++) out[i] = x[places[i]];
    return out;
#else
    return __builtin_shuffle(x, places);
#endif
}
// With a and b cut into blocks of N elements: the even or the odd blocks of both in turn, a0 b0 a2 b2 or a1 b1 a3 b3.
template <class R, int N, int... I>
INLINE Vec<R> evens(Vec<R> a, Vec<R> b, std::integer_sequence<int, I...>) {
    return shuffle<R, (I & N ? W<R> + I - N : I)...>(a, b);
}
template <class R, int N, int... I>
INLINE Vec<R> odds(Vec<R> a, Vec<R> b, std::integer_sequence<int, I...>) {
    return shuffle<R, (I & N ? W<R> + I : I + N)...>(a, b);
}
template <class R, class V, int... I>
INLINE auto add_halves(V x, std::integer_sequence<int, I...>) {
    constexpr int half = sizeof...(I);
    typedef R Half __attribute__((vector_size(half * sizeof(R))));
    return Half{x[I]...} + Half{x[half + I]...};
}
// Sum of the elements.
template <class R, int N = W<R>, class V = Vec<R>>
INLINE R total(V x) {
    if constexpr (N == 2)
        return x[0] + x[1];
    else
        return total<R, N / 2>(add_halves<R>(x, std::make_integer_sequence<int, N / 2>{}));
}
// The sums of four vectors, for little more than the cost of one.
template <class R, int N, class V>
INLINE void store_pairs(V x, R (&out)[4]) {
    if constexpr (N > 4)
        store_pairs<R, N / 2>(add_halves<R>(x, std::make_integer_sequence<int, N / 2>{}), out);
    else {
        UNROLL
        for (int i = 0; i < 4; i++) out[i] = x[i];
    }
}
template <class R>
INLINE void totals(const Vec<R> (&x)[4], R (&out)[4]) {
    if constexpr (W<R> >= 8) {
        constexpr auto all = std::make_integer_sequence<int, W<R>>{};
        const Vec<R> ab = evens<R, 1>(x[0], x[1], all) + odds<R, 1>(x[0], x[1], all);  // a b a b ...
        const Vec<R> cd = evens<R, 1>(x[2], x[3], all) + odds<R, 1>(x[2], x[3], all);
        store_pairs<R, W<R>>(evens<R, 2>(ab, cd, all) + odds<R, 2>(ab, cd, all), out);  // a b c d ...
    } else {
        UNROLL
        for (int i = 0; i < 4; i++) out[i] = total<R>(x[i]);
    }
}

INLINE int round_up(int64_t n, int multiple) { return int((n + multiple - 1) / multiple * multiple); }

template <class R>
constexpr R inverse_factorial(int n) {
    double x = 1;
    for (int i = 2; i <= n; i++) x /= i;
    return R(x);
}

// exp by a power of two and a Taylor series on [-ln2/2, ln2/2]; below `least` it is zero.
template <class R>
INLINE Vec<R> exponential(Vec<R> x) {
    using B = Bits<R>;
    const Vec<R> shifted = x * R(1.4426950408889634) + B::magic;
    const Vec<R> n = shifted - B::magic;
    const Vec<R> r = (x - n * B::ln2_high) - n * B::ln2_low;
    Vec<R> series = splat(inverse_factorial<R>(B::terms));
    UNROLL
    for (int i = B::terms - 1; i >= 0; i--) series = series * r + inverse_factorial<R>(i);
    typename B::type power;
    std::memcpy(&power, &shifted, sizeof power);
    power = (power + B::bias) << B::mantissa;
    Vec<R> two_n;
    std::memcpy(&two_n, &power, sizeof two_n);
    const Vec<R> result = series * two_n;
    const Vec<R> large = splat(std::numeric_limits<R>::infinity());
    return x < B::least ? Vec<R>{} : (x > B::most ? large : result);
}

template <class R>
INLINE Vec<R> magnitude(Vec<R> x) {
    typename Bits<R>::type bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits &= std::numeric_limits<typename Bits<R>::element>::max();  // all but the sign
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// 1 / x: in float32 by an estimate and a step of Newton's method, in a fraction of the time of a division.
template <class R>
INLINE Vec<R> reciprocal(Vec<R> x) {
#ifdef __AVX512F__
    if constexpr (std::is_same_v<R, float>) {
        const Vec<R> rough = (Vec<R>)_mm512_rcp14_ps((__m512)x);
        return rough * (2 - x * rough);
    }
#endif
    return 1 / x;
}

// log of normal positive numbers: with x = 2^n m and z = (m - 1) / (m + 1), n log 2 + 2 (z + z³/3 + z⁵/5 + ...),
// m between sqrt(1/2) and sqrt(2).  What is not positive and finite gives NaN.
template <class R>
INLINE Vec<R> logarithm(Vec<R> x) {
    using B = Bits<R>;
    typename B::type bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits -= B::root_half;
    const auto exponent = bits >> B::mantissa;
    bits = (bits & ((typename B::element(1) << B::mantissa) - 1)) + B::root_half;
    Vec<R> m;
    std::memcpy(&m, &bits, sizeof m);
    const Vec<R> n = __builtin_convertvector(exponent, Vec<R>);
    const Vec<R> z = (m - 1) * reciprocal<R>(m + 1), z2 = z * z;
    Vec<R> series = splat(R(2) / R(2 * B::log_terms + 1));
    UNROLL
    for (int i = B::log_terms - 1; i >= 0; i--) series = series * z2 + R(2) / R(2 * i + 1);
    const Vec<R> result = n * B::ln2_high + (n * B::ln2_low + z * series);
    const auto valid = (x > 0) & (x <= std::numeric_limits<R>::max());
    return valid ? result : splat(std::numeric_limits<R>::quiet_NaN());
}

// --------------------------------------------------------------------------------- the four inner loops
// acc[r] = Σ_i x[r][i] S[i]: ROWS key-side vectors read the state.
template <class R, int ROWS, int NV>
INLINE void read_state(const R* S, int64_t ld, int K, const R* x, int64_t xs, Vec<R> (&acc)[ROWS][NV]) {
    for (auto& row : acc)
        for (auto& a : row) a = Vec<R>{};
    for (int i = 0; i < K; i++) {
        Vec<R> s[NV];
        UNROLL
        for (int n = 0; n < NV; n++) s[n] = load(S + i * ld + n * W<R>);
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            UNROLL
            for (int n = 0; n < NV; n++) acc[r][n] += s[n] * x[r * xs + i];
        }
    }
}

// out[i] = decay[i] in[i] + Σ_c x[c][i] z[c]: RANK writes at once, M rows of the state in registers.
template <class R, int RANK, int NV, int M>
INLINE void write_rows(const R* in, R* out, int64_t ld, const R* decay, const R* x, int64_t xs, const R* z) {
    Vec<R> s[M][NV];
    UNROLL
    for (int m = 0; m < M; m++) {
        UNROLL
        for (int n = 0; n < NV; n++) s[m][n] = load(in + m * ld + n * W<R>);
    }
    if (decay) {
        UNROLL
        for (int m = 0; m < M; m++) {
            UNROLL
            for (int n = 0; n < NV; n++) s[m][n] *= decay[m];
        }
    }
    for (int c = 0; c < RANK; c++) {
        Vec<R> row[NV];
        UNROLL
        for (int n = 0; n < NV; n++) row[n] = load(z + (c * NV + n) * W<R>);
        UNROLL
        for (int m = 0; m < M; m++) {
            UNROLL
            for (int n = 0; n < NV; n++) s[m][n] += row[n] * x[c * xs + m];
        }
    }
    UNROLL
    for (int m = 0; m < M; m++) {
        UNROLL
        for (int n = 0; n < NV; n++) store(out + m * ld + n * W<R>, s[m][n]);
    }
}
template <class R, int RANK, int NV>
INLINE void write_state(const R* in, R* out, int64_t ld, int K, const R* decay, const R* x, int64_t xs, const R* z) {
    constexpr int M = NV <= 2 ? 8 : 16 / NV;  // M x NV vectors must fit the registers
    int i = 0;
    for (; i + M <= K; i += M)
        write_rows<R, RANK, NV, M>(in + i * ld, out + i * ld, ld, decay ? decay + i : nullptr, x + i, xs, z);
    for (; i < K; i++)
        write_rows<R, RANK, NV, 1>(in + i * ld, out + i * ld, ld, decay ? decay + i : nullptr, x + i, xs, z);
}

// out[i][j] += Σ_v X[i][v] z[j][v] for rows i of X and J groups of W columns z, given transposed.
template <class R, int J, int M>
INLINE void contract_rows(const R* X, int64_t ld, int columns, const R* z, int64_t zs, R* out, int64_t os) {
    Vec<R> acc[M][J];
    UNROLL
    for (int m = 0; m < M; m++) {
        UNROLL
        for (int j = 0; j < J; j++) acc[m][j] = load(out + j * os + m * W<R>);
    }
    for (int v = 0; v < columns; v++) {
        Vec<R> row[J];
        UNROLL
        for (int j = 0; j < J; j++) row[j] = load(z + j * zs + v * W<R>);
        UNROLL
        for (int m = 0; m < M; m++) {
            UNROLL
            for (int j = 0; j < J; j++) acc[m][j] += row[j] * X[m * ld + v];
        }
    }
    UNROLL
    for (int m = 0; m < M; m++) {
        UNROLL
        for (int j = 0; j < J; j++) store(out + j * os + m * W<R>, acc[m][j]);
    }
}
template <class R, int J>
INLINE void contract(const R* X, int64_t ld, int rows, int columns, const R* z, int64_t zs, R* out, int64_t os) {
    constexpr int M = J == 1 ? 16 : 8;
    int i = 0;
    for (; i + M <= rows; i += M) contract_rows<R, J, M>(X + i * ld, ld, columns, z, zs, out + i * W<R>, os);
    for (; i < rows; i++) contract_rows<R, J, 1>(X + i * ld, ld, columns, z, zs, out + i * W<R>, os);
}

// W x W transpose: exchange the off-diagonal blocks of size 1, 2, 4, ... in turn.
template <class R, int HALF>
INLINE void exchange(Vec<R> (&x)[W<R>]) {
    constexpr auto all = std::make_integer_sequence<int, W<R>>{};
    UNROLL
    for (int i = 0; i < W<R>; i++)
        if (!(i & HALF)) {
            const Vec<R> a = x[i], b = x[i + HALF];
            x[i] = evens<R, HALF>(a, b, all);
            x[i + HALF] = odds<R, HALF>(a, b, all);
        }
    if constexpr (HALF * 2 < W<R>) exchange<R, HALF * 2>(x);
}
// out[v][c] = in[c][v] for W rows c and `columns` columns v, a multiple of W.
template <class R>
INLINE void transpose(const R* in, int64_t ld, int columns, R* out, int64_t os) {
    for (int v = 0; v < columns; v += W<R>) {
        Vec<R> x[W<R>];
        UNROLL
        for (int c = 0; c < W<R>; c++) x[c] = load(in + c * ld + v);
        exchange<R, 1>(x);
        UNROLL
        for (int c = 0; c < W<R>; c++) store(out + (v + c) * os, x[c]);
    }
}

}  // namespace
