// The backward of one head: spans from last to first, each recomputed from its checkpoint.

#pragma once

#include "tile.h"

namespace {

template <class R>
struct BackwardSpan {
    static constexpr int C = W<R>, TILES = (SPAN + C - 1) / C;
    enum Row { KEY, QUERY, WRITE, ROWS };        // a tile's rows per token, k̂, q̂ and ŵ; gradients come in this order
    enum Score { A, Q, SCORES };                 // of two tokens
    enum Value { READ, OUTPUT, ERROR, VALUES };  // gradients dp of reads and do of outputs; e, finally replaced by dv
    const Head<R>& head;
    int64_t t = 0;
    int count = 0;
    Tile<R, C> tiles[TILES];
    Feedback<R> feedbacks[SPAN];
    R* grad_state;               // [K, V] in packed blocks: of the state after the current tile
    R* grad_d;                   // the gradient of phase 1's state
    R *keys, *queries, *writes;  // [SPAN, Kp]: without decays, queries times the output's scale
    R* kept;                     // [SPAN + 1, ...]: what phase 1 saves per token, starting with the state before it
    R *grad_keys, *grad_writes;  // [SPAN, Kp]
    R* grad_rows;                // [TILES, ROWS, Kp, C]: transposed
    R* grad_scores;              // [TILES, SCORES, C, C]
    R* grad_decay;               // [TILES, K, W]: partial sums of S * dS over the columns
    R* grad_beta;                // [SPAN, W]: partial sums of du * e over the columns
    R* states;                   // [TILES, K, BLOCK]: the state before each tile, one block of columns
    R* values;                   // [V] in blocks of [TILES, VALUES, C, BLOCK]
    R* u;                        // [C, BLOCK]
    R* read_columns;             // [2, BLOCK, C]: dp and do of a tile, transposed
    R* write_columns;            // [BLOCK, C]: u, transposed

    BackwardSpan(const Head<R>& h, Phase1<R>& phase1) : head(h) {
        const int64_t K = h.K, Kp = h.Kp, Vp = round_up(h.V, BLOCK<R>), tile = Tile<R, C>::size(h.Kp);
        R *rows, *own;
        scratch.divide<R>({{&grad_state, K * Vp},
                           {&own, phase1.scratch_size()},
                           {&grad_d, phase1.size()},
                           {&keys, SPAN * Kp},
                           {&queries, SPAN * Kp},
                           {&writes, SPAN * Kp},
                           {&kept, (SPAN + 1) * phase1.kept_size()},
                           {&grad_keys, SPAN * Kp},
                           {&grad_writes, SPAN * Kp},
                           {&grad_rows, TILES * ROWS * Kp * C},
                           {&grad_scores, TILES * SCORES * C * C},
                           {&grad_decay, TILES * K * C},
                           {&grad_beta, SPAN * C},
                           {&states, TILES * K * BLOCK<R>},
                           {&values, TILES * VALUES * C * Vp},
                           {&u, C * BLOCK<R>},
                           {&read_columns, 2 * C * BLOCK<R>},
                           {&write_columns, C * BLOCK<R>},
                           {&rows, TILES * tile}});
        for (int i = 0; i < TILES; i++) tiles[i].place(rows + i * tile, h.Kp);
        phase1.take(own);
    }

    // Token c's key and write key; without decays, the tile's own rows.
    const R* key(int c) const {
        return head.call.decay_kind ? keys + c * int64_t(head.Kp) : tiles[c / C].k(c % C, head.Kp);
    }
    const R* write(int c) const {
        return head.call.decay_kind ? writes + c * int64_t(head.Kp) : tiles[c / C].w(c % C, head.Kp);
    }
    R* grad_row(int i, Row which) const { return grad_rows + (int64_t(i) * ROWS + which) * head.Kp * C; }
    R* grad_score(int i, Score which) const { return grad_scores + (int64_t(i) * SCORES + which) * C * C; }
    // Of tile i, [C, NV vectors], on the block of columns from v0.
    R* value(int i, Value which, int v0, int NV) const {
        return values + C * (VALUES * int64_t(TILES) * v0 + (i * VALUES + which) * NV * W<R>);
    }

    // The span's output gradients and errors into blocks of columns, zero beyond the last token.
    void load_values() {
        const Call& call = head.call;
        for (int c = 0; c < round_up(count, C); c++)
            each_block<R>(0, head.V, [&](auto nv, int v0, int columns) {
                const int64_t row = c % C * nv * W<R>;
                R *to_grad = value(c / C, OUTPUT, v0, nv) + row, *to_error = value(c / C, ERROR, v0, nv) + row;
                Vec<R> grad[nv] = {}, error[nv] = {};
                if (c < count) {
                    load_some<R, nv>(head.grad_output(t + c, head.V) + v0, columns, grad);
                    load_some<R, nv>(head.per_value(call.errors, t + c) + v0, columns, error);
                }
                for (int m = 0; m < nv; m++) {
                    store(to_grad + m * W<R>, grad[m]);
                    store(to_error + m * W<R>, error[m]);
                }
            });
    }
    void store_grad_v() const {
        for (int c = 0; c < count; c++)
            each_block<R>(0, head.V, [&](auto nv, int v0, int columns) {
                Vec<R> row[nv];
                for (int m = 0; m < nv; m++) row[m] = load(value(c / C, ERROR, v0, nv) + (c % C * nv + m) * W<R>);
                stream_some<R, nv>(head.gradient(head.call.grad_v, head.call.element, t + c, head.V) + v0, columns,
                                   row);
            });
    }
    template <int NV>
    INLINE void load_writes(int i, const R* errors) {
        for (int c = 0; c < C; c++)
            for (int m = 0; m < NV; m++)
                store(u + (c * NV + m) * W<R>, load(errors + (c * NV + m) * W<R>) * tiles[i].beta[c]);
    }

    // Prefetches the share of the preceding span's inputs that corresponds to tile i and block v0.
    INLINE void prefetch_span(int i, int v0, int width) const {
        const Call& call = head.call;
        const int64_t token = t - SPAN + i * C;
        for (int c = (v0 * C + head.V - 1) / head.V; c < C && c * head.V < (v0 + width) * C; c++) {
            prefetch_token(head, token + c);
            prefetch(head.per_value(call.errors, token + c), head.V);
            prefetch(head.grad_output(token + c, head.V), head.V);
        }
        const R* state = start(t - SPAN);
        if (state)
            for (int k = head.K * i / TILES; k < head.K * (i + 1) / TILES; k++)
                prefetch(state + int64_t(k) * head.V + v0, std::min(width, head.V - v0));
    }
    // The state before token t, a multiple of SPAN; null is zero.
    const R* start(int64_t t) const {
        const int64_t size = int64_t(head.K) * head.V;
        if (t) return head.checkpoint(head.call.state_checkpoints, t, size);
        return head.call.initial_state ? head.state(head.call.initial_state, size) : nullptr;
    }

    // All tiles of the span on one block of columns, in reverse.
    template <int NV>
    void run_columns(int v0, int columns) {
        const Call& call = head.call;
        const int K = head.K, Kp = head.Kp;
        constexpr int L = NV * W<R>;
        const int last = (count - 1) / C;
        R* dS = grad_state + int64_t(K) * v0;

        const R* S0 = start(t);
        pack_state<R, NV>(S0 ? S0 + v0 : nullptr, states, K, head.V, columns);
        for (int i = 0; i < last; i++) {
            load_writes<NV>(i, value(i, ERROR, v0, NV));
            write_state<R, C, NV>(states + int64_t(i) * K * L, states + int64_t(i + 1) * K * L, L, K,
                                  call.decay_kind ? tiles[i].decay : nullptr, tiles[i].w(0, Kp), Kp, u);
        }
        for (int i = last; i >= 0; i--) {
            const Tile<R, C>& tile = tiles[i];
            R* dp = value(i, READ, v0, NV);
            R *dout = value(i, OUTPUT, v0, NV), *errors = value(i, ERROR, v0, NV);
            const R* S = states + int64_t(i) * K * L;
            if (t) prefetch_span(i, v0, L);
            load_writes<NV>(i, errors);
            constexpr int G = C < 8 ? C : 8;
            for (int c0 = 0; c0 < C; c0 += G) {
                Vec<R> read[G][NV];
                read_state<R, G, NV>(dS, L, K, tile.w(c0, Kp), Kp, read);
                for (int c = 0; c < G; c++)
                    for (int m = 0; m < NV; m++) store(dp + ((c0 + c) * NV + m) * W<R>, read[c][m]);
            }
            solve<NV>(i, dp, dout, errors);

            transpose(dp, L, L, read_columns, C);
            transpose(dout, L, L, read_columns + C * L, C);
            transpose(u, L, L, write_columns, C);
            // Keys and queries lie side by side, as do the scores, and the values that they come from.
            contract<R, 2>(S, L, K, L, read_columns, C * L, grad_row(i, KEY), int64_t(Kp) * C);
            contract<R, 1>(dS, L, K, L, write_columns, 0, grad_row(i, WRITE), 0);
            contract<R, 1>(dp, L, SCORES * C, L, write_columns, 0, grad_score(i, A), 0);
            if (call.decay_kind) {
                R* partial = grad_decay + int64_t(i) * K * C;
                for (int k = 0; k < K; k++) {
                    Vec<R> sum = load(partial + k * C);
                    for (int m = 0; m < NV; m++) sum += load(S + k * L + m * W<R>) * load(dS + k * L + m * W<R>);
                    store(partial + k * C, sum);
                }
            }
            write_state<R, 2 * C, NV>(dS, dS, L, K, call.decay_kind ? tile.decay : nullptr, tile.rows, Kp, dp);
        }
    }

    // From the part of the writes' gradients that comes through the state (in dp) to the gradients of the reads,
    // last token first: du_i = dp_i + Σ_j Q_ji do_j + Σ_j A_ji dp_j, then dp_i = -beta_i du_i; beta_i du_i is also v_i's
    // gradient and takes the place of e_i.  Beyond the last token all of A, Q and beta are zero.
    template <int NV>
    INLINE void solve(int i, R* dp, const R* dout, R* errors) {
        const Tile<R, C>& tile = tiles[i];
        for (int c = C - 1; c >= 0; c--) {
            Vec<R> du[NV], by_output[NV];  // two sums, to halve the chain of dependent additions
            for (int m = 0; m < NV; m++) {
                du[m] = load(dp + (c * NV + m) * W<R>);
                by_output[m] = load(dout + (c * NV + m) * W<R>) * tile.Q[c][c];
            }
            for (int j = c + 1; j < C; j++)
                for (int m = 0; m < NV; m++) {
                    du[m] += load(dp + (j * NV + m) * W<R>) * tile.A[j][c];
                    by_output[m] += load(dout + (j * NV + m) * W<R>) * tile.Q[j][c];
                }
            Vec<R> sum = load(grad_beta + (i * C + c) * C);
            for (int m = 0; m < NV; m++) {
                du[m] += by_output[m];
                sum += du[m] * load(errors + (c * NV + m) * W<R>);
                const Vec<R> dv = du[m] * tile.beta[c];
                store(errors + (c * NV + m) * W<R>, dv);
                store(dp + (c * NV + m) * W<R>, -dv);
            }
            store(grad_beta + (i * C + c) * C, sum);
        }
    }

    // The key side of tile i: from the gradients of rows and scores to those of q, k, w and the decay, one
    // vector of key channels at a time.  With r_ji = Γ_j / Γ_i, reader j owes Σ_i dA_ji r_ji w_i to k_j and
    // write i owes Σ_j r_ji (dA_ji k_j + dQ_ji q_j) to w_i: both by Horner's rule over the decays.
    void run_rows(int i) {
        const Call& call = head.call;
        const int n = std::min(C, count - i * C), Kp = head.Kp;
        const int64_t token = t + i * C;
        const R *dA = grad_score(i, A), *dQ = grad_score(i, Q);
        const bool decays = call.decay_kind != 0;
        Vec<R> whole[C] = {};  // the decay's gradients, summed over the channels
        for (int b = 0; b < Kp; b += W<R>) {
            const int width = std::min(head.K - b, W<R>);
            const int64_t at = int64_t(i) * C * Kp + b;
            Vec<R> k[C], q[C], w[C], a[C], g_k[C], g_q[C], g_w[C], pairs[C];
            load_columns(grad_row(i, KEY) + b * C, g_k);
            load_columns(grad_row(i, QUERY) + b * C, g_q);
            load_columns(grad_row(i, WRITE) + b * C, g_w);
            for (int c = 0; c < n; c++) {
                k[c] = load((decays ? keys + i * C * Kp : tiles[i].k(0, Kp)) + c * Kp + b);
                q[c] = load((decays ? queries + i * C * Kp : tiles[i].q(0, Kp)) + c * Kp + b);
                w[c] = load((decays ? writes + i * C * Kp : tiles[i].w(0, Kp)) + c * Kp + b);
                a[c] = decays ? load(tiles[i].factor + c * Kp + b) : splat<R>(1);
            }
            Vec<R> gamma = splat<R>(1);
            for (int c = 0; c < n; c++) {
                Vec<R> to_k = {}, to_q = {};
                for (int j = 0; j < c; j++) {
                    if (decays) {
                        to_k *= a[j];
                        to_q *= a[j];
                    }
                    to_k += w[j] * dA[c * C + j];
                    to_q += w[j] * dQ[c * C + j];
                }
                if (decays) {
                    to_k *= a[c];
                    to_q *= a[c];
                    gamma *= a[c];
                    pairs[c] = k[c] * to_k + q[c] * to_q;
                }
                store(grad_keys + at + c * Kp, to_k + gamma * g_k[c]);
                const Vec<R> out[1] = {(to_q + gamma * g_q[c] + w[c] * dQ[c * C + c]) * R(call.scale)};
                stream_some<R, 1>(head.gradient(call.grad_q, call.grad_element, token + c, head.K) + b, width, out);
            }
            gamma = splat<R>(1);  // from here on Γ_C / Γ_c
            for (int c = n - 1; c >= 0; c--) {
                Vec<R> later = {};
                for (int j = n - 1; j > c; j--) {
                    later += k[j] * dA[j * C + c] + q[j] * dQ[j * C + c];
                    if (decays) later *= a[j];
                }
                store(grad_writes + at + c * Kp, gamma * g_w[c] + later + q[c] * dQ[c * C + c]);
                if (decays) {
                    pairs[c] -= w[c] * later;
                    gamma *= a[c];
                }
            }
            if (decays) run_decay(i, b, n, width, g_k, g_q, g_w, pairs, whole);
        }
        if (call.decay_kind == 1)
            for (int c = 0; c < n; c++) *head.per_head(call.grad_log_decay, token + c) = total<R>(whole[c]);
    }

    // Token c's log decay multiplies whatever passes over it: the state itself, writes before c on their way
    // to the end of the tile, the state on its way to readers at or after c, and pairs of the two that
    // straddle c.  Every term carries its own decay, so strong decays lose no digits.
    INLINE void run_decay(int i, int b, int n, int width, const Vec<R>* g_k, const Vec<R>* g_q, const Vec<R>* g_w,
                          const Vec<R>* pairs, Vec<R>* whole) const {
        const Call& call = head.call;
        const Tile<R, C>& tile = tiles[i];
        const int Kp = head.Kp;
        Vec<R> g[C], sum = {};
        for (int m = 0; m < width; m++) sum[m] = total<R>(load(grad_decay + (int64_t(i) * head.K + b + m) * C));
        sum *= load(tile.decay + b);
        for (int c = 0; c < n; c++) {
            g[c] = sum;
            sum += load(tile.w(c, Kp) + b) * g_w[c];
        }
        sum = Vec<R>{};
        for (int c = n - 1; c >= 0; c--) {
            sum += load(tile.k(c, Kp) + b) * g_k[c] + load(tile.q(c, Kp) + b) * g_q[c] + pairs[c];
            g[c] += sum;
            whole[c] += g[c];
            if (call.decay_kind == 2) {
                const Vec<R> out[1] = {g[c]};
                stream_some<R, 1>(head.per_key(call.grad_log_decay, t + i * C + c) + b, width, out);
            }
        }
    }

    // Rows of a [W, W] matrix as its columns.
    static INLINE void load_columns(const R* x, Vec<R> (&out)[C]) {
        for (int c = 0; c < C; c++) out[c] = load(x + c * C);
        exchange<R, 1>(out);
    }

    void clear_sums() {
        const int64_t K = head.K, Kp = head.Kp;
        std::memset(grad_rows, 0, TILES * ROWS * Kp * C * sizeof(R));
        std::memset(grad_scores, 0, TILES * SCORES * C * C * sizeof(R));
        std::memset(grad_decay, 0, TILES * K * C * sizeof(R));
        std::memset(grad_beta, 0, SPAN * C * sizeof(R));
    }
};

template <class R>
void backward_head(const Head<R>& head) {
    const Call& call = head.call;
    const int K = head.K, V = head.V;
    const int64_t Kp = head.Kp, size = int64_t(K) * V;
    Phase1<R> phase1(head);
    BackwardSpan<R> span(head, phase1);
    constexpr int C = BackwardSpan<R>::C;

    each_block<R>(0, V, [&](auto nv, int v0, int columns) {
        const R* g = call.grad_final_state ? head.state(call.grad_final_state, size) + v0 : nullptr;
        pack_state<R, nv>(g, span.grad_state + int64_t(K) * v0, K, V, columns);
    });
    phase1.start_back(span.grad_d);

    for (int64_t t = (head.length - 1) / SPAN * SPAN; head.length > 0 && t >= 0; t -= SPAN) {
        span.t = t;
        span.count = int(std::min<int64_t>(SPAN, head.length - t));
        const int tiles = (span.count + C - 1) / C;
        phase1.restore(span.kept, t);
        for (int i = 0; i < tiles; i++) {
            const int64_t at = i * C * Kp;
            const Record<R> record{span.keys + at, span.queries + at, span.writes + at,
                                   span.kept + i * C * phase1.kept_size(), span.feedbacks + i * C};
            fill_tile<R, C>(span.tiles[i], head, phase1, t + i * C, std::min(C, span.count - i * C), nullptr, &record);
        }
        span.load_values();
        span.clear_sums();
        each_block<R>(0, V, [&](auto nv, int v0, int columns) { span.template run_columns<nv>(v0, columns); });
        span.store_grad_v();
        for (int i = 0; i < tiles; i++) span.run_rows(i);

        for (int c = span.count - 1; c >= 0; c--) {
            R* grad_k = span.grad_keys + c * Kp;
            const R* grad_w = span.grad_writes + c * Kp;
            *head.per_head(call.grad_beta, t + c) = total<R>(load(span.grad_beta + c * C));
            if (call.rule)
                phase1.step_back(span.feedbacks[c], span.kept + c * phase1.kept_size(), span.key(c), span.write(c),
                                 grad_w, span.grad_d, grad_k, t + c);
            else if (call.write_keys)
                stream_row(head.gradient(call.grad_write_keys, call.write_element, t + c, K), grad_w, K);
            else
                for (int64_t b = 0; b < Kp; b += W<R>) store(grad_k + b, load(grad_k + b) + load(grad_w + b));
            stream_row(head.gradient(call.grad_k, call.grad_element, t + c, K), grad_k, K);
        }
    }
    if (call.grad_initial_state)
        each_block<R>(0, V, [&](auto nv, int v0, int columns) {
            unpack_state<R, nv>(span.grad_state + int64_t(K) * v0, head.state(call.grad_initial_state, size) + v0, K, V,
                                columns);
        });
    phase1.finish_back(span.grad_d);
}

}  // namespace
