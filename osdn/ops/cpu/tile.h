// A tile of C tokens as small matrices (see kernels.cpp), and the blocks of columns it is applied to.

#pragma once

#include "phase1.h"

namespace {

template <class R, int C>
struct Tile {
    R* rows;    // [3 C, Kp]: k̂, q̂, ŵ
    R* decay;   // [Kp]: Γ_C
    R* factor;  // [C, Kp]: exp(log_decay) of each token; kept for the backward
    R A[C][C], Q[C][C];
    R beta[C];

    static int64_t size(int Kp) { return (3 * C + 1 + C) * int64_t(Kp); }
    void place(R* memory, int Kp) {
        rows = memory;
        decay = rows + 3 * C * int64_t(Kp);
        factor = decay + Kp;
    }
    R* k(int c, int Kp) const { return rows + c * int64_t(Kp); }
    R* q(int c, int Kp) const { return rows + (C + c) * int64_t(Kp); }
    R* w(int c, int Kp) const { return rows + (2 * C + c) * int64_t(Kp); }
};

// exp(log_decay) of token t as a row of Kp.
template <class R>
INLINE void decay_row(const Head<R>& head, int64_t t, R* to) {
    const Call& call = head.call;
    if (call.decay_kind == 1) {
        const R a = exponential<R>(splat(*head.per_head(call.log_decay, t)))[0];
        for (int i = 0; i < head.Kp; i += W<R>) store(to + i, splat(a));
    } else {
        copy_row(to, head.per_key(call.log_decay, t), head.K, head.Kp);
        for (int i = 0; i < head.Kp; i += W<R>) store(to + i, exponential<R>(load(to + i)));
    }
}

// x[i] *= a[i]
template <class R>
INLINE void scale_row(R* x, const R* a, int Kp) {
    for (int i = 0; i < Kp; i += W<R>) store(x + i, load(x + i) * load(a + i));
}

// Scores of one token against the (decayed) write keys 0 .. c of its tile, four at a time.
template <class R, int C>
INLINE void score(const R* k, const R* q, const R* w, int c, int Kp, R* A, R* Q) {
    constexpr int G = C < 4 ? C : 4;
    for (int i = 0; i <= c; i += G) {
        Vec<R> a[4] = {}, s[4] = {};
        for (int b = 0; b < Kp; b += W<R>) {
            const Vec<R> k_b = load(k + b), q_b = load(q + b);
            UNROLL
            for (int m = 0; m < G; m++) {
                const Vec<R> w_b = load(w + (i + m) * int64_t(Kp) + b);
                a[m] += k_b * w_b;
                s[m] += q_b * w_b;
            }
        }
        R a_sum[4], s_sum[4];
        totals<R>(a, a_sum);
        totals<R>(s, s_sum);
        for (int m = 0; m < G; m++) {
            A[i + m] = i + m < c ? a_sum[m] : R(0);
            Q[i + m] = i + m <= c ? s_sum[m] : R(0);
        }
    }
}

// What the backward needs again: rows [C, Kp] of keys, queries and write keys without their decays, and per token
// what phase 1 saves and what was fed back to it.
template <class R>
struct Record {
    R *keys, *queries, *writes, *phase1;
    Feedback<R>* feedbacks;
};

// Fills a tile from tokens t .. t + count; tokens beyond count leave the state unchanged.  If the call
// includes phase 1, its state advances by as many tokens: d, or the first state in the record.
template <class R, int C>
INLINE void fill_tile(Tile<R, C>& tile, const Head<R>& head, const Phase1<R>& phase1, int64_t t, int count, R* d,
                      const Record<R>* record) {
    const Call& call = head.call;
    const int K = head.K, Kp = head.Kp;
    for (int c = 0; c < C; c++) {
        R *k = tile.k(c, Kp), *q = tile.q(c, Kp), *w = tile.w(c, Kp);
        if (c >= count) {
            for (R* row : {k, q, w}) std::memset(row, 0, Kp * sizeof(R));
            tile.beta[c] = 0;
            continue;
        }
        copy_row(q, head.query(t + c), K, R(call.scale));
        copy_row(k, head.key(t + c), K);
        tile.beta[c] = *head.per_head(call.beta, t + c);
        if (call.rule) {
            R* kept = record ? record->phase1 + c * phase1.kept_size() : nullptr;
            const Feedback<R> f = phase1.step(kept ? kept : d, kept ? kept + phase1.kept_size() : d, kept, k, w, t + c);
            if (record) record->feedbacks[c] = f;
        } else {
            copy_row(w, call.write_keys ? head.write_key(t + c) : head.key(t + c), K);
        }
        if (record && call.decay_kind) {
            copy_row(record->keys + c * int64_t(Kp), k, Kp, Kp);
            copy_row(record->queries + c * int64_t(Kp), q, Kp, Kp);
            copy_row(record->writes + c * int64_t(Kp), w, Kp, Kp);
        }
    }
    for (int c = 0; c < count; c++) {
        if (call.decay_kind) {
            R* a = tile.factor + c * int64_t(Kp);
            decay_row(head, t + c, a);
            for (int i = 0; i < c; i++) scale_row(tile.w(i, Kp), a, Kp);
            if (c == 0)
                copy_row(tile.decay, a, Kp, Kp);
            else
                scale_row(tile.decay, a, Kp);
        }
        score<R, C>(tile.k(c, Kp), tile.q(c, Kp), tile.rows + 2 * C * int64_t(Kp), c, Kp, tile.A[c], tile.Q[c]);
        if (call.decay_kind) {
            scale_row(tile.k(c, Kp), tile.decay, Kp);
            scale_row(tile.q(c, Kp), tile.decay, Kp);
        }
    }
    for (int c = count; c < C; c++)
        for (int i = 0; i < C; i++) tile.A[c][i] = tile.Q[c][i] = 0;
}

// Columns are processed in blocks of NV vectors.  A tile of several tokens keeps two vectors of each in registers;
// a single token reads whole rows instead, as they lie in memory.
template <class R, int NV = 2>
constexpr int BLOCK = NV * W<R>;

// f(NV, v0, columns) for the blocks of columns [first, last): the widest ones first, then narrower ones for the rest.
template <class R, int NV = 2, class F>
INLINE void each_block(int first, int last, F&& f) {
    int v0 = first;
    for (; last - v0 > (NV - 1) * W<R>; v0 += BLOCK<R, NV>)
        f(std::integral_constant<int, NV>{}, v0, std::min(last - v0, BLOCK<R, NV>));
    if constexpr (NV > 1)
        if (v0 < last) each_block<R, NV / 2>(v0, last, f);
}

// Converts a block of a state [K, V] to and from its packed form [K, NV W].
template <class R, int NV>
INLINE void unpack_state(const R* packed, R* state, int K, int V, int columns) {
    for (int i = 0; i < K; i++) {
        Vec<R> x[NV];
        for (int n = 0; n < NV; n++) x[n] = load(packed + (i * NV + n) * W<R>);
        stream_some<R, NV>(state + i * int64_t(V), columns, x);
    }
}
template <class R, int NV>
INLINE void pack_state(const R* state, R* packed, int K, int V, int columns) {
    for (int i = 0; i < K; i++) {
        Vec<R> x[NV] = {};
        if (state) load_some<R, NV>(state + i * int64_t(V), columns, x);
        for (int n = 0; n < NV; n++) store(packed + (i * NV + n) * W<R>, x[n]);
    }
}

// Prefetches the key-side rows of a token and its part of a tensor [tokens, HV, V], well before their use: tokens
// lie a whole row of heads apart, which is further than the hardware prefetches.
template <class R>
INLINE void prefetch(const R* row, int width) {
    for (int i = 0; i < width; i += 64 / int(sizeof(R))) __builtin_prefetch(row + i, 0, 2);
}
template <class R>
INLINE void prefetch(Source<R> row, int width) {
    prefetch(static_cast<const char*>(row.at), int(width * element_size<R>(row.kind)));
}
template <class R>
INLINE void prefetch_token(const Head<R>& head, int64_t t) {
    const Call& call = head.call;
    prefetch(head.query(t), head.K);
    prefetch(head.key(t), head.K);
    if (call.write_keys) prefetch(head.write_key(t), head.K);
    if (call.decay_kind == 2) prefetch(head.per_key(call.log_decay, t), head.K);
    if (call.retention_kind == 2 && call.block == 1) prefetch(head.per_key(call.retention, t), head.K);
}

}  // namespace
