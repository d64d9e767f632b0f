// Phase 1 by online gradient descent: the scale d, its step at a token, and the reverse of that step.

#pragma once

#include "heads.h"

namespace {

// What is saved of a token to reverse its step.  Scaling: d <- clip(r d + step k²); Newton: n and k · Pk.
template <class R>
struct Feedback {
    R b, n, dot, step;
    bool norm_counts;  // false where eps stands in for the squared norm
};

// The retention of a channel's state at token t.
template <class R>
struct Retention {
    const Head<R>& head;
    const Call& call = head.call;

    INLINE R at(int64_t t) const {
        return call.retention_kind == 1 ? *head.per_head(call.retention, t) : R(call.constant_retention);
    }
    // What R cannot hold of a constant: thousands of tokens would add it up.  It counts before a sum is rounded.
    INLINE R rest() const {
        return call.retention_kind ? R(0) : R(call.constant_retention - double(R(call.constant_retention)));
    }
    INLINE Vec<R> at(int64_t t, int i, R constant) const {
        if (call.retention_kind < 2) return splat(constant);
        Vec<R> r[1];
        load_some<R, 1>(head.per_key(call.retention, t) + i, std::min(head.K - i, W<R>), r);
        return r[0];
    }
};

template <class R>
class OnlineScale {
    const Head<R>& head;
    const Call& call;
    const int K, Kp;
    const Retention<R> retention{head};

    INLINE Vec<R> clip(Vec<R> d) const {  // a NaN stays a NaN
        const Vec<R> low = splat(R(call.low)), high = splat(R(call.high));
        d = d < low ? low : d;
        return d > high ? high : d;
    }
    INLINE Feedback<R> feedback(const R* d, const R* k, R beta) const {
        Vec<R> norm[2] = {}, dot[2] = {};
        int i = 0;
        for (; i + 2 * W<R> <= Kp; i += 2 * W<R>)
            for (int m = 0; m < 2; m++) {
                const Vec<R> x = load(k + i + m * W<R>), x2 = x * x;
                norm[m] += x2;
                dot[m] += load(d + i + m * W<R>) * x2;
            }
        for (; i < Kp; i += W<R>) {
            const Vec<R> x = load(k + i), x2 = x * x;
            norm[0] += x2;
            dot[0] += load(d + i) * x2;
        }
        Feedback<R> f;
        f.b = call.beta_aware ? beta : R(1);
        f.n = total<R>(norm[0] + norm[1]);
        f.norm_counts = f.n >= R(call.eps);
        f.n = f.n < R(call.eps) ? R(call.eps) : f.n;
        f.dot = total<R>(dot[0] + dot[1]);
        f.step = R(call.eta) * f.b * (1 - f.b * f.dot) / f.n;
        return f;
    }

public:
    explicit OnlineScale(const Head<R>& h) : head(h), call(h.call), K(h.K), Kp(h.Kp) {}

    // One token: the write key from the scale d, and the scale advanced to `next`.
    INLINE Feedback<R> step(const R* d, R* next, const R* k, R* w, int64_t t) const {
        const Feedback<R> f = feedback(d, k, *head.per_head(call.beta, t));
        const R r = retention.at(t), rest = retention.rest();
        for (int i = 0; i < Kp; i += W<R>) {
            const Vec<R> x = load(k + i), d_i = load(d + i);
            store(w + i, d_i * x);
            store(next + i, clip(retention.at(t, i, r) * d_i + (rest * d_i + f.step * (x * x))));
        }
        return f;
    }
    // The reverse of `step`, whose feedback was f: on entry grad_d is the gradient of the scale after the token,
    // on exit of the scale before it; the key's gradient is added to grad_k.
    INLINE void step_back(const Feedback<R>& f, const R* d, const R* k, const R* grad_w, R* grad_d, R* grad_k,
                          int64_t t) const {
        const R r = retention.at(t), rest = retention.rest(), eta = R(call.eta), m = 1 - f.b * f.dot;
        Vec<R> to_step = {}, to_r = {};
        for (int i = 0; i < Kp; i += W<R>) {
            const Vec<R> x = load(k + i), x2 = x * x, d_i = load(d + i), r_i = retention.at(t, i, r);
            const Vec<R> d_raw = r_i * d_i + (rest * d_i + f.step * x2);
            Vec<R> g = load(grad_d + i);
            g = (d_raw >= R(call.low)) & (d_raw <= R(call.high)) ? g : Vec<R>{};  // torch.clamp's rule
            store(grad_d + i, g);
            to_step += g * x2;
            to_r += g * d_i;
            if (call.grad_retention && call.retention_kind == 2) {
                const Vec<R> out[1] = {g * d_i};
                stream_some<R, 1>(head.per_key(call.grad_retention, t) + i, std::min(K - i, W<R>), out);
            }
        }
        if (call.grad_retention && call.retention_kind == 1) *head.per_head(call.grad_retention, t) = total<R>(to_r);
        const R g_step = total<R>(to_step);
        const R g_dot = -g_step * eta * f.b * f.b / f.n;
        const R g_norm = f.norm_counts ? -g_step * f.step / f.n : R(0);
        if (call.beta_aware) *head.per_head(call.grad_beta, t) += g_step * eta * (m - f.b * f.dot) / f.n;
        for (int i = 0; i < Kp; i += W<R>) {
            const Vec<R> x = load(k + i), d_i = load(d + i), gw = load(grad_w + i), g = load(grad_d + i);
            const Vec<R> g_x2 = g * f.step + g_dot * d_i + g_norm;
            store(grad_d + i, retention.at(t, i, r) * g + (rest * g + gw * x) + g_dot * (x * x));
            store(grad_k + i, load(grad_k + i) + gw * d_i + 2 * x * g_x2);
        }
    }
};

}  // namespace
