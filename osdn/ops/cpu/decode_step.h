// One token of a mixer between its projections, as in decoding: short convolutions, SiLU, unit length, gates, the
// recurrence of both phases, output norm and output gate.  Inputs and outputs may have 16 bits.  Arithmetic is at least
// float32, but intermediate results that the layer's separate calls would store in 16 bits are rounded here as well, so
// that a token gives the same result as in a longer sequence.  One thread computes a key head and its value heads.

#pragma once

#include <cmath>

#include "convolution.h"
#include "decay.h"
#include "forward.h"
#include "gated_norm.h"

#define DECLARE_STEP(...) \
    struct Step {         \
        __VA_ARGS__       \
    };                    \
    extern "C" const char osdn_step_call[] = #__VA_ARGS__;
// clang-format off
DECLARE_STEP(
    const void *q, *k, *v;                 // [N, H K], [N, H K], [N, HV V]: the projections
    const void *q_taps, *k_taps, *v_taps;  // [channels, W], the newest input's last
    const void *q_tail, *k_tail, *v_tail;  // [N, W - 1, channels]
    const void *beta, *norm;               // [N, HV] before its sigmoid; [V]
    const void *state, *scale;             // [N, HV, K, V]; [N, HV, K], or [N, HV, K / block, block, block]
    const void *decay, *retention;         // [N, HV] or [N, HV K], before their activations
    const void *A_log, *dt_bias, *gate;    // [HV], as decay without N, [N, HV V] before its activation
    void *out, *next_q_tail, *next_k_tail, *next_v_tail, *final_state, *final_scale;  // out [N, HV V]
    int64_t N, H, HV, K, V, W;
    int64_t decay_kind, retention_kind, gate_kind;  // 0: none; 1: per head, 2: per channel; retention 3: the decay
    int64_t rule, block, beta_aware;                        // as in a Call
    int64_t element, decay_element, norm_element, threads;  // elements of A_log and dt_bias; of norm
    double eta, low, high, eps, prior, constant_retention, write_scale, norm_eps, output_scale;)
// clang-format on
extern "C" const int64_t osdn_step_size = sizeof(Step);
enum { TIED = 3 };  // the retention

namespace {

thread_local Scratch step_scratch;  // separate from the recurrence's, which divides its own anew

template <class R, class E>
struct StepHead {
    const Step& call;
    const int64_t n;
    const int K, Kp, V, Vp;
    R *q, *k, *v, *decay, *retention, *o;
    R beta, head_decay, head_retention;

    StepHead(const Step& c, int64_t sequence)
        : call(c), n(sequence), K(int(c.K)), Kp(round_up(c.K, W<R>)), V(int(c.V)), Vp(round_up(c.V, W<R>)) {
        step_scratch.divide<R>({{&q, Kp}, {&k, Kp}, {&v, Vp}, {&decay, Kp}, {&retention, Kp}, {&o, Vp}});
    }
    static const E* at(const void* x, int64_t i) { return static_cast<const E*>(x) + i; }

    // `count` channels of a convolution, starting at c: outputs to `y`, padded with zeros, and the shifted tail.
    void convolve(const void* x, const void* taps, const void* tail, void* next, int64_t channels, int64_t c, int count,
                  R* y) const {
        const int width = int(call.W), past = width - 1;
        const E *input = at(x, n * channels + c), *before = at(tail, n * past * channels + c),
                *tap = at(taps, c * width);
        E* after = static_cast<E*>(next) + n * past * channels + c;
        const int padded = round_up(count, W<R>);
        for (int i = 0; i < count; i++) y[i] = widen(input[i]) * widen(tap[i * width + past]);
        for (int lag = 0; lag < past; lag++) {
            const E* row = before + lag * channels;
            for (int i = 0; i < count; i++) y[i] += widen(row[i]) * widen(tap[i * width + lag]);
        }
        for (int lag = 0; lag < past; lag++)
            std::memmove(after + lag * channels, lag + 1 < past ? before + (lag + 1) * channels : input,
                         count * sizeof(E));
        for (int i = count; i < padded; i++) y[i] = 0;
        for (int i = 0; i < padded; i += W<R>) store(y + i, rounded<E>(load(y + i) * sigmoid<R>(load(y + i))));
    }
    void to_unit_length(R* x) const {
        Vec<R> sum = {};
        for (int i = 0; i < Kp; i += W<R>) sum += load(x + i) * load(x + i);
        const R factor = R(1) / std::sqrt(total<R>(sum) + R(1e-6));
        for (int i = 0; i < Kp; i += W<R>) store(x + i, rounded<E>(load(x + i) * factor));
    }
    // The keys and queries of a head.
    void load_keys(int64_t h) {
        convolve(call.q, call.q_taps, call.q_tail, call.next_q_tail, call.H * K, h * K, K, q);
        convolve(call.k, call.k_taps, call.k_tail, call.next_k_tail, call.H * K, h * K, K, k);
        to_unit_length(q);
        to_unit_length(k);
    }
    // The values and gates of a value head.
    void load_values(int64_t hv) {
        convolve(call.v, call.v_taps, call.v_tail, call.next_v_tail, call.HV * V, hv * V, V, v);
        const int64_t head = n * call.HV + hv;
        beta = R(call.write_scale) * sigmoid<R>(splat(R(widen(*at(call.beta, head)))))[0];
        if (call.decay_kind) load_decay(hv);
        if (call.retention_kind == 1) head_retention = sigmoid<R>(splat(R(widen(*at(call.retention, head)))))[0];
        if (call.retention_kind == 2)
            for (int i = 0; i < K; i += W<R>)
                store(retention + i, sigmoid<R>(load_part<R>(at(call.retention, head * K + i), K - i)));
        if (call.retention_kind == TIED) {
            if (call.decay_kind == 1) head_retention = exponential<R>(splat(head_decay))[0];
            if (call.decay_kind == 2) tie_retention(int(call.block));
        }
    }
    // One retention per block of channels: the geometric mean of their decays.
    void tie_retention(int b) {
        const int blocks = K / b;
        for (int i = 0; i < blocks; i++) {
            R sum = 0;
            for (int j = 0; j < b; j++) sum += decay[i * b + j];
            retention[i] = sum / R(b);
        }
        for (int i = 0; i < blocks; i += W<R>)
            store_part<R, R>(retention + i, blocks - i, exponential<R>(load_part<R>(retention + i, blocks - i)));
    }
    // -exp(A_log) softplus(f + dt_bias)
    void load_decay(int64_t hv) {
        const int width = call.decay_kind == 1 ? 1 : K;
        const int64_t first = hv * width;
        const Source<R> rates = Source<R>{call.A_log, call.decay_element} + hv;
        const Source<R> biases = Source<R>{call.dt_bias, call.decay_element} + first;
        Vec<R> rate[1], bias[1];
        load_some<R, 1>(rates, 1, rate);
        const R factor = -exponential<R>(splat(rate[0][0]))[0];
        for (int i = 0; i < width; i += W<R>) {
            const int count = std::min(width - i, W<R>);
            load_some<R, 1>(biases + i, count, bias);
            const Vec<R> f = load_part<R>(at(call.decay, n * call.HV * width + first + i), count);
            const Vec<R> log_decay = factor * softplus<R>(f + bias[0]);
            if (width == 1 && call.decay_kind == 1)
                head_decay = log_decay[0];
            else
                store(decay + i, log_decay);
        }
    }
    // The recurrence: a call of one sequence, head and token.
    void recur(int64_t hv) {
        const int64_t head = n * call.HV + hv, size = int64_t(K) * V;
        Call inner = {};
        inner.q = q;
        inner.k = k;
        inner.v = v;
        inner.beta = &beta;
        inner.out = o;
        inner.log_decay = call.decay_kind == 1 ? &head_decay : decay;
        inner.retention_kind = call.retention_kind == TIED ? call.decay_kind : call.retention_kind;
        inner.retention = inner.retention_kind == 1 ? &head_retention : retention;
        inner.initial_state = static_cast<const R*>(call.state) + head * size;
        inner.final_state = static_cast<R*>(call.final_state) + head * size;
        if (call.rule) {
            const int64_t carried = K * call.block;
            inner.initial_scale = static_cast<const R*>(call.scale) + head * carried;
            inner.final_scale = static_cast<R*>(call.final_scale) + head * carried;
        }
        inner.N = inner.T = inner.H = inner.HV = inner.threads = 1;
        inner.block = call.block;
        inner.prior = call.prior;
        inner.K = K;
        inner.V = V;
        inner.decay_kind = call.decay_kind;
        inner.rule = call.rule;
        inner.beta_aware = call.beta_aware;
        inner.eta = call.eta;
        inner.low = call.low;
        inner.high = call.high;
        inner.eps = call.eps;
        inner.constant_retention = call.constant_retention;
        inner.scale = call.output_scale;
        forward_head<R, 1>(Head<R>(inner, 0, 0), 0, V, true);
    }
    void read_out(int64_t hv) const {
        const int64_t first = (n * call.HV + hv) * V;
        Vec<R> sum = {};
        for (int i = 0; i < V; i += W<R>) {
            const Vec<R> x = rounded<E>(load_part<R>(o + i, V - i));
            store_part<R, R>(o + i, V - i, x);
            sum += x * x;
        }
        const R factor = R(1) / std::sqrt(total<R>(sum) / R(V) + R(call.norm_eps));
        for (int i = 0; i < V; i += W<R>) {
            const int count = std::min(V - i, W<R>);
            Vec<R> weight[1];
            load_some<R, 1>(Source<R>{call.norm, call.norm_element} + i, count, weight);
            Vec<R> y = load(o + i) * factor * weight[0];
            if (call.gate_kind) {
                const Vec<R> gate = load_part<R>(at(call.gate, first + i), count), open = sigmoid<R>(gate);
                y *= call.gate_kind == SILU ? gate * open : open;
            }
            store_part<R, E>(static_cast<E*>(call.out) + first + i, count, y);
        }
    }
};

// A key head of a sequence, with its value heads.
template <class R>
void step_item(const Step& call, int64_t item) {
    const int64_t h = item % call.H, group = call.HV / call.H;
    with_element<R>(call.element, [&](auto element) {
        StepHead<R, decltype(element)> head(call, item / call.H);
        head.load_keys(h);
        for (int64_t hv = h * group; hv < (h + 1) * group; hv++) {
            head.load_values(hv);
            head.recur(hv);
            head.read_out(hv);
        }
    });
}

}  // namespace
