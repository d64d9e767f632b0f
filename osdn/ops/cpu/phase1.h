// Phase 1 by any rule: the state that a head carries from token to token, and phase 1 on its own.

#pragma once

#include "newton.h"
#include "squash.h"

namespace {

template <class R>
class Phase1 {
    const Head<R>& head;
    const Call& call;
    const OnlineScale<R> scaling;
    Covariance<R> newton;
    const GramDiagonal<R> squash;
    const int K, Kp;

public:
    const int rows;  // of Kp elements that the state has
    const int kept;  // rows that reversing a token needs: the state before it, and possibly more

    explicit Phase1(const Head<R>& h)
        : head(h), call(h.call), scaling(h), newton(h), squash(h), K(h.K), Kp(h.Kp),
          rows(h.call.rule == NONE     ? 0
               : h.call.rule == NEWTON ? int(h.call.block)
                                       : 1),
          kept(h.call.rule == SQUASH ? 3 : rows) {}

    // The pieces of the owner's scratch memory that it needs.
    int64_t scratch_size() const { return call.rule == NEWTON ? Covariance<R>::ROWS_OF_SCRATCH * Kp : 0; }
    void take(R* memory) {
        if (call.rule == NEWTON) newton.take(memory);
    }
    int64_t size() const { return rows * int64_t(Kp); }        // elements of a state here,
    int64_t tensor_size() const { return rows * int64_t(K); }  // in a tensor,
    int64_t kept_size() const { return kept * int64_t(Kp); }   // and of what is kept of a token

    void load_state(R* d, const void* tensor) const {
        if (call.rule == NEWTON)
            newton.load_blocks(d, head.state(tensor, tensor_size()));
        else if (call.rule)
            copy_row(d, head.state(tensor, K), K, Kp);
    }
    void store_state(const R* d, void* tensor) const {
        if (call.rule == NEWTON)
            newton.store_blocks(d, head.state(tensor, tensor_size()));
        else if (call.rule)
            copy_row(head.state(tensor, K), d, K, K);
    }
    void start(R* d) const {
        if (call.initial_scale)
            load_state(d, call.initial_scale);
        else if (call.rule == NEWTON)
            newton.identity(d);
        else if (call.rule)
            for (int i = 0; i < Kp; i++) d[i] = i < K && call.rule == SCALING;
    }
    // The state at the start of the span of token t.
    void save(const R* d, int64_t t) const {
        for (int j = 0; j < rows; j++)
            copy_row(head.checkpoint(call.scale_checkpoints, t, tensor_size()) + j * int64_t(K), d + j * int64_t(Kp), K,
                     K);
    }
    void restore(R* d, int64_t t) const {
        if (!t) return start(d);
        for (int j = 0; j < rows; j++)
            copy_row(d + j * int64_t(Kp), head.checkpoint(call.scale_checkpoints, t, tensor_size()) + j * int64_t(K), K,
                     Kp);
    }
    void start_back(R* grad_d) const {
        std::memset(grad_d, 0, size() * sizeof(R));
        if (call.grad_final_scale) load_state(grad_d, call.grad_final_scale);
    }
    void finish_back(const R* grad_d) const {
        if (call.grad_initial_scale) store_state(grad_d, call.grad_initial_scale);
        if (call.rule == SQUASH) squash.finish_back();
    }
    // One token: its write key, and the state advanced from d to `next`.  `record`, needed if a reverse follows,
    // begins with d and has room for whatever else is saved.
    INLINE Feedback<R> step(const R* d, R* next, R* record, const R* k, R* w, int64_t t) const {
        if (call.rule == SCALING) return scaling.step(d, next, k, w, t);
        if (call.rule == NEWTON) return newton.step(d, next, k, w, t);
        squash.step(d, next, record ? record + Kp : nullptr, k, w, t);
        return {};
    }
    // The reverse of `step`: on entry grad_d is the gradient of the state after the token, on exit of the
    // state before it; the key's gradient is added to grad_k.
    INLINE void step_back(const Feedback<R>& f, const R* record, const R* k, const R* w, const R* grad_w, R* grad_d,
                          R* grad_k, int64_t t) const {
        if (call.rule == SCALING)
            scaling.step_back(f, record, k, grad_w, grad_d, grad_k, t);
        else if (call.rule == NEWTON)
            newton.step_back(f, record, k, w, grad_w, grad_d, grad_k, t);
        else
            squash.step_back(record, record + Kp, k, grad_w, grad_d, grad_k, t);
    }
};

template <class R>
void precondition_head(const Head<R>& head) {
    const Call& call = head.call;
    const int64_t Kp = head.Kp;
    Phase1<R> phase1(head);
    R *own, *d, *key, *w;
    scratch.divide<R>({{&own, phase1.scratch_size()}, {&d, phase1.size()}, {&key, Kp}, {&w, Kp}});
    phase1.take(own);
    phase1.start(d);
    for (int64_t t = 0; t < head.length; t++) {
        if (t && t % SPAN == 0 && call.scale_checkpoints) phase1.save(d, t);
        copy_row(key, head.key(t), head.K);
        phase1.step(d, d, nullptr, key, w, t);
        stream_row(head.output(t, head.K), w, head.K);
    }
    phase1.store_state(d, call.final_scale);
}

template <class R>
void precondition_back_head(const Head<R>& head) {
    const Call& call = head.call;
    const int K = head.K;
    const int64_t Kp = head.Kp;
    Phase1<R> phase1(head);
    const int64_t kept = phase1.kept_size();
    R *own, *grad_d, *grad_k, *grad_w, *keys, *writes, *records;
    scratch.divide<R>({{&own, phase1.scratch_size()},
                       {&grad_d, phase1.size()},
                       {&grad_k, Kp},
                       {&grad_w, Kp},
                       {&keys, SPAN * Kp},
                       {&writes, SPAN * Kp},
                       {&records, (SPAN + 1) * kept}});
    phase1.take(own);
    Feedback<R> feedbacks[SPAN];
    phase1.start_back(grad_d);
    for (int64_t t = (head.length - 1) / SPAN * SPAN; head.length > 0 && t >= 0; t -= SPAN) {
        const int count = int(std::min<int64_t>(SPAN, head.length - t));
        phase1.restore(records, t);
        for (int c = 0; c < count; c++) {
            R* record = records + c * kept;
            copy_row(keys + c * Kp, head.key(t + c), K);
            feedbacks[c] = phase1.step(record, record + kept, record, keys + c * Kp, writes + c * Kp, t + c);
        }
        for (int c = count - 1; c >= 0; c--) {
            if (call.grad_out)
                copy_row(grad_w, head.grad_output(t + c, K), K);
            else
                std::memset(grad_w, 0, Kp * sizeof(R));
            std::memset(grad_k, 0, Kp * sizeof(R));
            if (call.grad_beta) *head.per_head(call.grad_beta, t + c) = 0;
            phase1.step_back(feedbacks[c], records + c * kept, keys + c * Kp, writes + c * Kp, grad_w, grad_d, grad_k,
                             t + c);
            stream_row(head.gradient(call.grad_k, call.grad_element, t + c, K), grad_k, K);
        }
    }
    phase1.finish_back(grad_d);
}

}  // namespace
