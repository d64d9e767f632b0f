// Phase 2, and both phases at once: the forward of one head.

#pragma once

#include "tile.h"

namespace {

// One tile on one block of columns: errors, outputs, and the state advanced from `in` to `out`.
template <class R, int C, int NV>
INLINE void run_tile(const Tile<R, C>& tile, const Head<R>& head, int64_t t, int count, int v0, int columns,
                     const R* in, R* out, int64_t ld) {
    const Call& call = head.call;
    Vec<R> read[2 * C][NV];
    read_state<R, 2 * C, NV>(in, ld, head.K, tile.rows, head.Kp, read);
    alignas(BYTES) R writes[C * NV * W<R>] = {};
    Vec<R> u[C][NV];
    UNROLL
    for (int c = 0; c < C; c++) {
        if (c >= count) break;
        Vec<R> e[NV], o[NV];
        load_some<R, NV>(head.value(t + c) + v0, columns, e);
        UNROLL
        for (int n = 0; n < NV; n++) {
            e[n] -= read[c][n];
            o[n] = read[C + c][n];
            UNROLL
            for (int i = 0; i < c; i++) {
                e[n] -= u[i][n] * tile.A[c][i];
                o[n] += u[i][n] * tile.Q[c][i];
            }
            u[c][n] = e[n] * tile.beta[c];
            o[n] += u[c][n] * tile.Q[c][c];
            store(writes + (c * NV + n) * W<R>, u[c][n]);
        }
        if constexpr (C == 1)  // decoding: it is read again immediately
            store_some<R, NV>(head.output(t + c, head.V) + v0, columns, o);
        else
            stream_some<R, NV>(head.output(t + c, head.V) + v0, columns, o);
        if (call.errors) stream_some<R, NV>(head.per_value(call.errors, t + c) + v0, columns, e);
    }
    write_state<R, C, NV>(in, out, ld, head.K, call.decay_kind ? tile.decay : nullptr, tile.w(0, head.Kp), head.Kp,
                          writes);
}

// Columns [first, last) of one head.  The columns of a head are independent of each other: several threads
// may share it, and the `owner` writes what belongs to the head as a whole.
template <class R, int C>
void forward_head(const Head<R>& head, int first, int last, bool owner) {
    const Call& call = head.call;
    const int K = head.K, Kp = head.Kp, V = head.V;
    constexpr int TILES = C == 1 ? 1 : SPAN / C;  // a single token is a span of its own
    Phase1<R> phase1(head);
    R *S, *d, *rows, *own;
    scratch.divide<R>({{&S, int64_t(K) * round_up(last - first, W<R>)},
                       {&d, phase1.size()},
                       {&rows, TILES * Tile<R, C>::size(Kp)},
                       {&own, phase1.scratch_size()}});
    phase1.take(own);
    Tile<R, C> tiles[TILES];
    for (int i = 0; i < TILES; i++) tiles[i].place(rows + i * Tile<R, C>::size(Kp), Kp);

    const R* initial = call.initial_state ? head.state(call.initial_state, int64_t(K) * V) : nullptr;
    R* final = head.state(call.final_state, int64_t(K) * V);
    constexpr int WIDEST = C == 1 ? 8 : 2;
    // A single tile of whole vectors goes from the initial to the final state with no copy in between.
    const bool direct = initial && head.length > 0 && head.length <= C && V % W<R> == 0;
    if (!direct)
        each_block<R, WIDEST>(first, last, [&](auto nv, int v0, int columns) {
            pack_state<R, nv>(initial ? initial + v0 : nullptr, S + int64_t(K) * (v0 - first), K, V, columns);
        });
    phase1.start(d);

    for (int64_t t = 0; t < head.length; t += SPAN) {
        const int count = int(std::min<int64_t>(SPAN, head.length - t));
        if (t && call.scale_checkpoints && owner) phase1.save(d, t);
        for (int c = 0; c < count; c += C)
            fill_tile<R, C>(tiles[c / C], head, phase1, t + c, std::min(C, count - c), d, nullptr);
        each_block<R, WIDEST>(first, last, [&](auto nv, int v0, int columns) {
            if (direct) {
                run_tile<R, C, nv>(tiles[0], head, 0, count, v0, columns, initial + v0, final + v0, V);
                return;
            }
            R* block = S + int64_t(K) * (v0 - first);
            if (t && call.state_checkpoints)
                unpack_state<R, nv>(block, head.checkpoint(call.state_checkpoints, t, int64_t(K) * V) + v0, K, V,
                                    columns);
            for (int c = 0; c < count; c += C) {
                if (v0 == first)
                    for (int64_t next = t + c + SPAN; next < std::min(t + c + SPAN + C, head.length); next++) {
                        prefetch_token(head, next);
                        prefetch(head.value(next) + first, last - first);
                    }
                run_tile<R, C, nv>(tiles[c / C], head, t + c, std::min(C, count - c), v0, columns, block, block,
                                   nv * W<R>);
            }
        });
    }
    if (!direct)
        each_block<R, WIDEST>(first, last, [&](auto nv, int v0, int columns) {
            unpack_state<R, nv>(S + int64_t(K) * (v0 - first), final + v0, K, V, columns);
        });
    if (owner) phase1.store_state(d, call.final_scale);
}

}  // namespace
