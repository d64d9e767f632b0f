// Phase 1 of Preconditioned Gated DeltaNet: the Gram diagonal A, its step at a token, and the reverse of it.

#pragma once

#include "scale.h"

namespace {

template <class R>
class GramDiagonal {
    const Head<R>& head;
    const Call& call;
    const int K, Kp;
    const Retention<R> retention{head};
    const R center;
    mutable R grad_center = 0;

public:
    explicit GramDiagonal(const Head<R>& h)
        : head(h), call(h.call), K(h.K), Kp(h.Kp),
          center(h.call.center ? static_cast<const R*>(h.call.center)[h.hv] : R(0)) {}

    // A <- r A + gain k², then w = M k with M = exp(-log_squash softsign(log(A + eps) - center)).  For the reverse,
    // `kept` [2, Kp] receives M and dM / dA.
    INLINE void step(const R* A, R* next, R* kept, const R* k, R* w, int64_t t) const {
        const R r = retention.at(t), rest = retention.rest(), gain = *head.per_head(call.gain, t);
        const R strength = -R(call.log_squash);
        for (int i = 0; i < Kp; i += W<R>) {
            const Vec<R> k_i = load(k + i), A_i = load(A + i);
            const Vec<R> after = retention.at(t, i, r) * A_i + (rest * A_i + gain * (k_i * k_i));
            const Vec<R> sum = after + R(call.eps), often = logarithm<R>(sum) - center;
            const Vec<R> inverse = reciprocal<R>(1 + magnitude<R>(often));
            const Vec<R> M = exponential<R>(strength * often * inverse);
            store(next + i, after);
            store(w + i, M * k_i);
            if (kept) {  // null if no reverse follows
                store(kept + i, call.grad_out ? M : Vec<R>{});
                store(kept + Kp + i, call.grad_out ? strength * M * inverse * inverse / sum : Vec<R>{});
            }
        }
    }
    INLINE void step_back(const R* A, const R* kept, const R* k, const R* grad_w, R* grad_A, R* grad_k,
                          int64_t t) const {
        const R r = retention.at(t), rest = retention.rest(), gain = *head.per_head(call.gain, t);
        Vec<R> to_gain = {}, to_r = {}, to_center = {};
        for (int i = 0; i < Kp; i += W<R>) {
            const Vec<R> k_i = load(k + i), k2 = k_i * k_i, gw = load(grad_w + i), A_i = load(A + i);
            const Vec<R> r_i = retention.at(t, i, r), through = gw * k_i * load(kept + Kp + i);
            const Vec<R> g = load(grad_A + i) + through;
            to_center -= through * (r_i * A_i + gain * k2 + R(call.eps));
            to_gain += g * k2;
            to_r += g * A_i;
            if (call.grad_retention && call.retention_kind == 2) {
                const Vec<R> out[1] = {g * A_i};
                stream_some<R, 1>(head.per_key(call.grad_retention, t) + i, std::min(K - i, W<R>), out);
            }
            store(grad_A + i, r_i * g + rest * g);
            store(grad_k + i, load(grad_k + i) + gw * load(kept + i) + 2 * gain * k_i * g);
        }
        if (call.grad_retention && call.retention_kind == 1) *head.per_head(call.grad_retention, t) = total<R>(to_r);
        *head.per_head(call.grad_gain, t) = total<R>(to_gain);
        grad_center += total<R>(to_center);
    }
    void finish_back() const {
        if (call.grad_center) *head.state(call.grad_center, 1) = grad_center;
    }
};

}  // namespace
