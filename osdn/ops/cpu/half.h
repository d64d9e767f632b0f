// 16-bit numbers: bfloat16 and float16 tensors are widened as rows are read and rounded as results are written,
// with no copies around the kernels.  All arithmetic in between is in float32.

#pragma once

#include "simd.h"

// How the elements of a tensor are stored.
enum { WIDE = 0, BFLOAT16 = 1, FLOAT16 = 2 };  // wide: the type the library computes in

namespace {

struct Bfloat16 {  // the upper half of a float
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};
typedef uint16_t HalfVec __attribute__((vector_size(BYTES / 2)));
typedef uint16_t LooseHalf __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));
typedef uint32_t Unsigned __attribute__((vector_size(BYTES)));

INLINE Unsigned bits_of(Vec<float> x) {
    Unsigned bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
INLINE Vec<float> of_bits(Unsigned bits) {
    Vec<float> x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE Vec<float> widen_bits(Bfloat16, HalfVec x) { return of_bits(__builtin_convertvector(x, Unsigned) << 16); }
// Rounds to nearest, ties to even; NaN stays NaN.
INLINE HalfVec narrow_bits(Bfloat16, Vec<float> x) {
    const Unsigned bits = bits_of(x), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector(x == x ? rounded : Unsigned{} + 0x7fc0, HalfVec);
}

#if defined(__AVX512F__)
INLINE Vec<float> widen_bits(Float16, HalfVec x) { return (Vec<float>)_mm512_cvtph_ps((__m256i)x); }
INLINE HalfVec narrow_bits(Float16, Vec<float> x) {
    return (HalfVec)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
}
#elif defined(__F16C__)
INLINE Vec<float> widen_bits(Float16, HalfVec x) { return (Vec<float>)_mm256_cvtph_ps((__m128i)x); }
INLINE HalfVec narrow_bits(Float16, Vec<float> x) {
    return (HalfVec)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
}
#else
// The exponents' biases differ by 112: a product corrects that, and normalises subnormals.
INLINE Vec<float> widen_bits(Float16, HalfVec x) {
    const Unsigned bits = __builtin_convertvector(x, Unsigned), magnitude = (bits & 0x7fff) << 13;
    const Unsigned finite = bits_of(of_bits(magnitude) * 0x1p112f), other = magnitude | 0x7f800000;
    return of_bits((magnitude < 0x0f800000 ? finite : other) | (bits & 0x8000) << 16);
}
INLINE HalfVec narrow_bits(Float16, Vec<float> x) {
    const Unsigned bits = bits_of(x), magnitude = bits & 0x7fffffff;
    const Unsigned normal = (magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const Unsigned small = bits_of(of_bits(magnitude) + 0.5f) - 0x3f000000;  // adding a half rounds to 2^-24
    const Unsigned infinite = Unsigned{} + 0x7c00, nan = Unsigned{} + 0x7e00;
    Unsigned half = magnitude < 0x38800000 ? small : normal;
    half = magnitude >= 0x477ff000 ? infinite : half;  // 65520 and beyond
    half = magnitude > 0x7f800000 ? nan : half;
    return __builtin_convertvector(half | (bits >> 16 & 0x8000), HalfVec);
}
#endif

template <class E>
constexpr bool HALF = std::is_same_v<E, Bfloat16> || std::is_same_v<E, Float16>;

// Loads one vector.
template <class E>
INLINE auto load_wide(const E* p) {
    if constexpr (HALF<E>)
        return widen_bits(E{}, *reinterpret_cast<const LooseHalf*>(p));
    else
        return load(p);
}
template <class E>
INLINE auto widen(E x) {
    if constexpr (HALF<E>)
        return widen_bits(E{}, HalfVec{x.bits})[0];
    else
        return x;
}
// Stores one vector; with STREAM past the caches, for results that are not read again soon.  Half a vector does not
// fill a cache line, and partial lines are better collected in the cache.
template <bool STREAM = false, class E, class V>
INLINE void store_narrow(E* p, V x) {
    if constexpr (HALF<E>)
        *reinterpret_cast<LooseHalf*>(p) = narrow_bits(E{}, x);
    else if constexpr (STREAM)
        stream(p, x);
    else
        store(p, x);
}
// What is left of x once it has been stored as E.
template <class E, class V>
INLINE V rounded(V x) {
    if constexpr (HALF<E>)
        return widen_bits(E{}, narrow_bits(E{}, x));
    else
        return x;
}
// The first n of a vector's elements; the rest read as zero and are not written.
template <class R, class E>
INLINE Vec<R> load_part(const E* p, int n) {
    if (n >= W<R>) return load_wide(p);
    E buffer[W<R>] = {};
    std::memcpy(buffer, p, n * sizeof(E));
    return load_wide(buffer);
}
template <class R, class E, bool STREAM = false>
INLINE void store_part(E* p, int n, Vec<R> x) {
    if (n >= W<R>) return store_narrow<STREAM>(p, x);
    E buffer[W<R>];
    store_narrow(buffer, x);
    std::memcpy(p, buffer, n * sizeof(E));
}
// Calls f(E{}), where E is the type in which elements of this kind are stored.
template <class R, class F>
INLINE void with_element(int64_t kind, F&& f) {
    if constexpr (std::is_same_v<R, float>) {
        if (kind == BFLOAT16) return f(Bfloat16{});
        if (kind == FLOAT16) return f(Float16{});
    }
    f(R{});
}
template <class R>
INLINE int64_t element_size(int64_t kind) {
    return kind == WIDE ? sizeof(R) : 2;
}

// A position in a tensor of any element kind, for reading (const void) or for writing.
template <class R, class Void>
struct Place {
    Void* at;
    int64_t kind;
    Place operator+(int64_t elements) const {
        using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
        return {static_cast<Byte*>(at) + elements * element_size<R>(kind), kind};
    }
};
template <class R>
using Source = Place<R, const void>;
template <class R>
using Target = Place<R, void>;

// Like load_some, store_some and stream_some in simd.h.
template <class R, int NV>
INLINE void load_some(Source<R> from, int n, Vec<R> (&x)[NV]) {
    with_element<R>(from.kind, [&](auto element) {
        using E = decltype(element);
        const E* p = static_cast<const E*>(from.at);
        if (n == NV * W<R>) {
            UNROLL
            for (int i = 0; i < NV; i++) x[i] = load_wide(p + i * W<R>);
        } else {
            E buffer[NV * W<R>] = {};
            std::memcpy(buffer, p, n * sizeof(E));
            UNROLL
            for (int i = 0; i < NV; i++) x[i] = load_wide(buffer + i * W<R>);
        }
    });
}
template <class R, int NV, bool STREAM = false>
INLINE void store_some(Target<R> to, int n, const Vec<R> (&x)[NV]) {
    with_element<R>(to.kind, [&](auto element) {
        using E = decltype(element);
        E* p = static_cast<E*>(to.at);
        if (n == NV * W<R>) {
            UNROLL
            for (int i = 0; i < NV; i++) store_narrow<STREAM>(p + i * W<R>, x[i]);
        } else {
            E buffer[NV * W<R>];
            UNROLL
            for (int i = 0; i < NV; i++) store_narrow(buffer + i * W<R>, x[i]);
            std::memcpy(p, buffer, n * sizeof(E));
        }
    });
}
template <class R, int NV>
INLINE void stream_some(Target<R> to, int n, const Vec<R> (&x)[NV]) {
    store_some<R, NV, true>(to, n, x);
}

}  // namespace
