// What a call from Python looks like, and where one sequence and head of it lies in memory.

#pragma once

#include <cstdlib>
#include <initializer_list>
#include <new>

#include "half.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

// What Python packs for a call: native 8-byte fields in this order.  A null pointer is an absent tensor.  The
// declaration is also kept as text, which Python compares with its own list of fields.
#define DECLARE_CALL(...) \
    struct Call {         \
        __VA_ARGS__       \
    };                    \
    extern "C" const char osdn_call[] = #__VA_ARGS__;
// clang-format off
DECLARE_CALL(
    // inputs
    const void *q, *k, *v, *beta, *write_keys, *log_decay, *retention, *initial_scale, *initial_state, *gain, *center;
    const int64_t* cu_seqlens;  // [N + 1] on the host, or null: N sequences of T tokens each
    // outputs of the forward
    void *out, *final_state, *final_scale;
    // what the forward saves for the backward (absent if no gradient is needed)
    void *errors, *state_checkpoints, *scale_checkpoints;
    // gradients that come in
    const void *grad_out, *grad_final_state, *grad_final_scale;
    // gradients that go out; those of q and k have one head per value head
    void *grad_q, *grad_k, *grad_v, *grad_beta, *grad_write_keys, *grad_log_decay, *grad_retention,
        *grad_initial_scale, *grad_initial_state, *grad_gain, *grad_center;
    int64_t N, T, H, HV, K, V;
    int64_t decay_kind, retention_kind;  // 0: none or a constant, 1: per head, 2: per channel (or block)
    int64_t rule, block, beta_aware, threads;
    // how q, k, v, the outputs and their gradients are stored; write keys; and the gradients of q and k
    int64_t element, write_element, grad_element;
    double eta, low, high, eps, prior, log_squash, constant_retention, scale;)
// clang-format on
extern "C" const int64_t osdn_size = sizeof(Call);
// The rule of phase 1; "scale" stands for the state that any of them carries.
enum { NONE = 0, SCALING = 1, NEWTON = 2, SQUASH = 3 };

namespace {

constexpr int SPAN = 64;  // tokens between two checkpoints; also how long a column block stays in L1

// Thread-local memory, divided into aligned pieces and reused from call to call.
class Scratch {
    static constexpr size_t GAP = 64, KEPT = 8 << 20;  // more than KEPT is freed when the call ends
    char* base = nullptr;
    size_t size = 0;

    static size_t room(size_t bytes) { return (bytes + 63) / 64 * 64 + GAP; }
    void release() {
#ifdef __SANITIZE_ADDRESS__
        if (base) ASAN_UNPOISON_MEMORY_REGION(base, size);
#endif
        std::free(base);
        base = nullptr;
        size = 0;
    }
    void reserve(size_t bytes) {
        if (bytes <= size) return;
        release();
        bytes = (bytes + 4095) / 4096 * 4096;
        base = static_cast<char*>(std::aligned_alloc(4096, bytes));
        if (!base) throw std::bad_alloc();
        size = bytes;
    }

public:
    ~Scratch() { release(); }
    void trim() {
        if (size > KEPT) release();
    }
    template <class R>
    struct Piece {
        R** place;
        int64_t count;
    };
    // Gives each pointer as many elements as it asks for; earlier pieces become invalid.
    template <class R>
    void divide(std::initializer_list<Piece<R>> pieces) {
        size_t bytes = 0;
        for (const auto& piece : pieces) bytes += room(piece.count * sizeof(R));
        reserve(bytes);
        char* next = base;
        for (const auto& piece : pieces) {
            *piece.place = reinterpret_cast<R*>(next);
            next += room(piece.count * sizeof(R));
#ifdef __SANITIZE_ADDRESS__  // a poisoned gap, so that running past the end of a piece is caught
            ASAN_UNPOISON_MEMORY_REGION(*piece.place, piece.count * sizeof(R));
            ASAN_POISON_MEMORY_REGION(next - GAP, GAP);
#endif
        }
    }
};
thread_local Scratch scratch;

// One sequence and value head of a call: where its tokens' rows lie.
template <class R>
struct Head {
    const Call& call;
    int64_t n, hv, h, begin, length;
    int K, Kp, V;  // Kp: K rounded up to whole vectors

    Head(const Call& c, int64_t sequence, int64_t value_head)
        : call(c), n(sequence), hv(value_head), h(value_head / (c.HV / c.H)), K(int(c.K)), Kp(round_up(c.K, W<R>)),
          V(int(c.V)) {
        begin = c.cu_seqlens ? c.cu_seqlens[n] : n * c.T;
        length = (c.cu_seqlens ? c.cu_seqlens[n + 1] : begin + c.T) - begin;
    }
    // Row of token t in a tensor [tokens, heads, width].
    const R* row(const void* x, int64_t t, int64_t heads, int64_t head, int64_t width) const {
        return static_cast<const R*>(x) + ((begin + t) * heads + head) * width;
    }
    R* row(void* x, int64_t t, int64_t heads, int64_t head, int64_t width) const {
        return static_cast<R*>(x) + ((begin + t) * heads + head) * width;
    }
    // The same for any element kind: where token t is read or written.
    template <class Void>
    Place<R, Void> place(Void* x, int64_t kind, int64_t t, int64_t heads, int64_t head, int64_t width) const {
        return Place<R, Void>{x, kind} + ((begin + t) * heads + head) * width;
    }
    Source<R> query(int64_t t) const { return place(call.q, call.element, t, call.H, h, K); }
    Source<R> key(int64_t t) const { return place(call.k, call.element, t, call.H, h, K); }
    Source<R> value(int64_t t) const { return place(call.v, call.element, t, call.HV, hv, V); }
    Source<R> write_key(int64_t t) const { return place(call.write_keys, call.write_element, t, call.HV, hv, K); }
    // Outputs are as wide as values in phase 2, and as keys in phase 1 alone; so are their gradients.
    Target<R> output(int64_t t, int width) const { return place(call.out, call.element, t, call.HV, hv, width); }
    Source<R> grad_output(int64_t t, int width) const {
        return place(call.grad_out, call.element, t, call.HV, hv, width);
    }
    // Where the gradient of a token's row of q, k, ... goes.
    Target<R> gradient(void* x, int64_t kind, int64_t t, int width) const {
        return place(x, kind, t, call.HV, hv, width);
    }
    template <class P>
    auto per_head(P x, int64_t t) const {
        return row(x, t, call.HV, hv, 1);
    }
    template <class P>
    auto per_key(P x, int64_t t) const {
        return row(x, t, call.HV, hv, K);
    }
    template <class P>
    auto per_value(P x, int64_t t) const {
        return row(x, t, call.HV, hv, V);
    }
    // This head's part of a tensor [N, HV, size].
    const R* state(const void* x, int64_t size) const { return static_cast<const R*>(x) + (n * call.HV + hv) * size; }
    R* state(void* x, int64_t size) const { return static_cast<R*>(x) + (n * call.HV + hv) * size; }
    // Checkpoint of the span that starts at token t > 0.  begin / SPAN never collides: a sequence of L
    // tokens needs ceil(L / SPAN) - 1 checkpoints, and at least as many multiples of SPAN lie inside it.
    R* checkpoint(void* x, int64_t t, int64_t size) const {
        return static_cast<R*>(x) + ((begin / SPAN + t / SPAN - 1) * call.HV + hv) * size;
    }
};

// Stores a finished row of K elements in the results.
template <class R>
INLINE void stream_row(Target<R> to, const R* from, int K) {
    with_element<R>(to.kind, [&](auto element) {
        auto* p = static_cast<decltype(element)*>(to.at);
        for (int i = 0; i < K; i += W<R>) store_part<R, decltype(element), true>(p + i, K - i, load(from + i));
    });
}

// Copies a row of K elements, times a factor, and pads it with zeros to Kp.
template <class R>
INLINE void copy_row(R* to, const R* from, int K, int Kp, R factor = 1) {
    int i = 0;
    for (; i + W<R> <= K; i += W<R>) store(to + i, load(from + i) * factor);
    for (; i < K; i++) to[i] = from[i] * factor;
    for (; i < Kp; i++) to[i] = 0;
}
template <class R>
INLINE void copy_row(R* to, Source<R> from, int K, R factor = 1) {
    with_element<R>(from.kind, [&](auto element) {
        auto* p = static_cast<const decltype(element)*>(from.at);
        for (int i = 0; i < K; i += W<R>) store(to + i, load_part<R>(p + i, K - i) * factor);
    });
}

}  // namespace
