// Phase 1: the scale d, its step at a token, and the reverse of that step; and phase 1 on its own.

#pragma once

#include "heads.h"

namespace {

template <class R>
struct Feedback {  // what one token feeds back to the scale: d <- clip(r d + step k²)
    R b, n, dot, step;
    bool norm_counts;  // false where eps stands in for the squared norm
};

template <class R>
class OnlineScale {
    const Head<R>& head;
    const Call& call;
    const int K, Kp;

    INLINE Vec<R> retention(int64_t t, int i, R constant) const {
        if (call.retention_kind < 2) return splat(constant);
        Vec<R> r[1];
        load_some<R, 1>(head.per_key(call.retention, t) + i, std::min(K - i, W<R>), r);
        return r[0];
    }
    INLINE R retention(int64_t t) const {
        return call.retention_kind == 1 ? *head.per_head(call.retention, t) : R(call.constant_retention);
    }
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

    void start(R* d) const {
        if (call.initial_scale)
            copy_row(d, head.state(call.initial_scale, K), K, Kp);
        else
            for (int i = 0; i < Kp; i++) d[i] = i < K;
    }
    // One token: the write key out of the scale, the scale one step on.
    INLINE Feedback<R> step(R* d, const R* k, R* w, int64_t t) const {
        const Feedback<R> f = feedback(d, k, *head.per_head(call.beta, t));
        const R r = retention(t);
        for (int i = 0; i < Kp; i += W<R>) {
            const Vec<R> x = load(k + i), d_i = load(d + i);
            store(w + i, d_i * x);
            store(d + i, clip(retention(t, i, r) * d_i + f.step * (x * x)));
        }
        return f;
    }
    // The reverse of `step`, whose feedback was f: grad_d holds the gradient of the scale after the token and
    // leaves with that of the scale before it; the key's gradient is added to grad_k.
    INLINE void step_back(const Feedback<R>& f, const R* d, const R* k, const R* grad_w, R* grad_d, R* grad_k,
                          int64_t t) const {
        const R r = retention(t), eta = R(call.eta), m = 1 - f.b * f.dot;
        Vec<R> to_step = {}, to_r = {};
        for (int i = 0; i < Kp; i += W<R>) {
            const Vec<R> x = load(k + i), x2 = x * x, d_i = load(d + i), r_i = retention(t, i, r);
            const Vec<R> d_raw = r_i * d_i + f.step * x2;
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
        if (call.grad_retention && call.retention_kind == 1)
            *head.per_head(call.grad_retention, t) = total<R>(to_r);
        const R g_step = total<R>(to_step);
        const R g_dot = -g_step * eta * f.b * f.b / f.n;
        const R g_norm = f.norm_counts ? -g_step * f.step / f.n : R(0);
        if (call.beta_aware) *head.per_head(call.grad_beta, t) += g_step * eta * (m - f.b * f.dot) / f.n;
        for (int i = 0; i < Kp; i += W<R>) {
            const Vec<R> x = load(k + i), d_i = load(d + i), gw = load(grad_w + i), g = load(grad_d + i);
            const Vec<R> g_x2 = g * f.step + g_dot * d_i + g_norm;
            store(grad_d + i, retention(t, i, r) * g + gw * x + g_dot * (x * x));
            store(grad_k + i, load(grad_k + i) + gw * d_i + 2 * x * g_x2);
        }
    }
};

template <class R>
void precondition_head(const Head<R>& head) {
    const Call& call = head.call;
    const int64_t Kp = head.Kp;
    const OnlineScale<R> online(head);
    R *d, *key, *w;
    scratch.divide<R>({{&d, Kp}, {&key, Kp}, {&w, Kp}});
    online.start(d);
    for (int64_t t = 0; t < head.length; t++) {
        if (t && t % SPAN == 0 && call.scale_checkpoints)
            copy_row(head.checkpoint(call.scale_checkpoints, t, head.K), d, head.K, head.K);
        copy_row(key, head.key(t), head.K, head.Kp);
        online.step(d, key, w, t);
        stream_row(head.per_key(call.out, t), w, head.K);
    }
    copy_row(head.state(call.final_scale, head.K), d, head.K, head.K);
}

template <class R>
void precondition_back_head(const Head<R>& head) {
    const Call& call = head.call;
    const int K = head.K;
    const int64_t Kp = head.Kp;
    const OnlineScale<R> online(head);
    R *d, *grad_d, *grad_k, *w, *keys, *scales;
    scratch.divide<R>({{&d, Kp}, {&grad_d, Kp}, {&grad_k, Kp}, {&w, Kp}, {&keys, SPAN * Kp}, {&scales, SPAN * Kp}});
    Feedback<R> feedbacks[SPAN];
    std::memset(grad_d, 0, Kp * sizeof(R));
    if (call.grad_final_scale) copy_row(grad_d, head.state(call.grad_final_scale, K), K, int(Kp));
    for (int64_t t = (head.length - 1) / SPAN * SPAN; head.length > 0 && t >= 0; t -= SPAN) {
        const int count = int(std::min<int64_t>(SPAN, head.length - t));
        if (t)
            copy_row(d, head.checkpoint(call.scale_checkpoints, t, K), K, int(Kp));
        else
            online.start(d);
        for (int c = 0; c < count; c++) {
            copy_row(keys + c * Kp, head.key(t + c), K, int(Kp));
            copy_row(scales + c * Kp, d, int(Kp), int(Kp));
            feedbacks[c] = online.step(d, keys + c * Kp, w, t + c);
        }
        for (int c = count - 1; c >= 0; c--) {
            R* grad_w = w;
            if (call.grad_out)
                copy_row(grad_w, head.per_key(call.grad_out, t + c), K, int(Kp));
            else
                std::memset(grad_w, 0, Kp * sizeof(R));
            std::memset(grad_k, 0, Kp * sizeof(R));
            *head.per_head(call.grad_beta, t + c) = 0;
            online.step_back(feedbacks[c], scales + c * Kp, keys + c * Kp, grad_w, grad_d, grad_k, t + c);
            stream_row(head.per_key(call.grad_k, t + c), grad_k, K);
        }
    }
    if (call.grad_initial_scale) copy_row(head.state(call.grad_initial_scale, K), grad_d, K, K);
}

}  // namespace
