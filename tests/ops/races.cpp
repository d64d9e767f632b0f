// Two callers at once, each with several threads, over shared inputs, by every rule of phase 1: for
// ThreadSanitizer, and to see that every answer is that of one thread.  Built and run by `make sanitize` and by test_cpu_races.py.

#define REAL float
#include <cstdio>
#include <random>

#include "kernels.cpp"

namespace {

constexpr int64_t T = 1100, H = 1, HV = 2, K = 24, V = 80, CUTS[] = {0, 500, 500, T}, N = 3;
constexpr int64_t WIDEST = 8;  // block of a covariance

using Tensor = std::vector<REAL>;

Tensor random(int64_t size, REAL low, REAL high) {
    static std::mt19937 engine(0);
    std::uniform_real_distribution<REAL> draw(low, high);
    Tensor x(size);
    for (auto& value : x) value = draw(engine);
    return x;
}

struct Inputs {
    Tensor q = random(T * H * K, -0.2, 0.2), k = random(T * H * K, -0.2, 0.2), v = random(T * HV * V, -1, 1);
    Tensor beta = random(T * HV, 0, 1), log_decay = random(T * HV * K, -1, 0);
    Tensor retention = random(T * HV * K, 0.9, 1), initial_scale = random(N * HV * K, 0.6, 1.8);
    Tensor gain = random(T * HV, 0, 1), center = random(HV, -0.5, 0.5);
    Tensor initial_state = random(N * HV * K * V, -1, 1), grad_out = random(T * HV * V, -1, 1);
    Tensor grad_final_state = random(N * HV * K * V, -1, 1), grad_final_scale = random(N * HV * K * WIDEST, -1, 1);
    Tensor grad_write_keys = random(T * HV * K, -1, 1);
};

struct Answer {
    Tensor out = Tensor(T * HV * V), final_state = Tensor(N * HV * K * V), final_scale = Tensor(N * HV * K * WIDEST);
    Tensor errors = out, state_checkpoints = Tensor(T / SPAN * HV * K * V);
    Tensor scale_checkpoints = Tensor(T / SPAN * HV * K * WIDEST);
    Tensor grad_q = Tensor(T * HV * K), grad_k = grad_q, grad_v = out, grad_beta = Tensor(T * HV);
    Tensor grad_log_decay = grad_q, grad_retention = grad_q, grad_initial_scale = final_scale;
    Tensor grad_initial_state = final_state, write_keys = grad_q, grad_gain = grad_beta, grad_center = Tensor(N * HV);

    Answer(const Inputs& x, int64_t rule, int64_t block, int64_t threads) {
        Call call = {};
        call.q = x.q.data();
        call.k = x.k.data();
        call.v = x.v.data();
        call.beta = x.beta.data();
        call.log_decay = x.log_decay.data();
        call.retention = x.retention.data();
        if (rule != NEWTON) call.initial_scale = x.initial_scale.data();  // not symmetric
        call.initial_state = x.initial_state.data();
        call.cu_seqlens = CUTS;
        if (rule == SQUASH) {
            call.gain = x.gain.data();
            call.center = x.center.data();
        }
        call.out = out.data();
        call.final_state = final_state.data();
        call.final_scale = final_scale.data();
        call.errors = errors.data();
        call.state_checkpoints = state_checkpoints.data();
        call.scale_checkpoints = scale_checkpoints.data();
        call.N = N;
        call.T = T;
        call.H = H;
        call.HV = HV;
        call.K = K;
        call.V = V;
        call.decay_kind = call.retention_kind = 2;
        call.beta_aware = 1;
        call.threads = threads;
        call.rule = rule;
        call.block = block;
        call.prior = 1;
        call.log_squash = 0.4;
        call.eta = 0.1;
        call.low = 0.5;
        call.high = 2;
        call.eps = 1e-6;
        call.scale = 0.2;
        osdn_forward(&call);

        call.grad_out = x.grad_out.data();
        call.grad_final_state = x.grad_final_state.data();
        call.grad_final_scale = x.grad_final_scale.data();
        call.grad_q = grad_q.data();
        call.grad_k = grad_k.data();
        call.grad_v = grad_v.data();
        call.grad_beta = grad_beta.data();
        call.grad_log_decay = grad_log_decay.data();
        call.grad_retention = grad_retention.data();
        if (call.initial_scale) call.grad_initial_scale = grad_initial_scale.data();
        if (rule == SQUASH) {
            call.grad_gain = grad_gain.data();
            call.grad_center = grad_center.data();
        }
        call.grad_initial_state = grad_initial_state.data();
        osdn_backward(&call);

        call.out = write_keys.data();
        osdn_precondition(&call);
        call.grad_out = x.grad_write_keys.data();
        osdn_precondition_back(&call);  // over the gradients of the backward, which are not compared
    }
    bool operator==(const Answer& other) const {
        return out == other.out && final_state == other.final_state && final_scale == other.final_scale &&
               grad_q == other.grad_q && grad_k == other.grad_k && grad_v == other.grad_v &&
               grad_beta == other.grad_beta && grad_log_decay == other.grad_log_decay &&
               grad_initial_state == other.grad_initial_state && write_keys == other.write_keys &&
               grad_gain == other.grad_gain && grad_center == other.grad_center;
    }
};

}  // namespace

int main() {
    const Inputs inputs;
    constexpr int64_t RULES[][2] = {{SCALING, 1}, {NEWTON, 1}, {NEWTON, 3}, {NEWTON, WIDEST}, {SQUASH, 1}};
    for (const auto& [rule, block] : RULES) {
        const Answer alone(inputs, rule, block, 1);
        bool same[2] = {};
        auto call = [&, rule = rule, block = block](int caller) {
            same[caller] = Answer(inputs, rule, block, 16) == alone;
        };
        std::thread other(call, 1);
        call(0);
        other.join();
        if (!same[0] || !same[1]) {
            std::puts("several threads do not give the answer of one");
            return 1;
        }
    }
    std::puts("two callers of sixteen threads each: the answer of one thread");
    return 0;
}
