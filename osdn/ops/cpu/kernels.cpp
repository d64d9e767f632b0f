// The delta rule with online-scaled write keys on a CPU: forward and backward of both phases.
//
// One idea carries the file: a *tile* of C tokens is written as a few small matrix products around the state
// S [K, V], so that each element of S is loaded once for C tokens and the arithmetic runs at the speed of a
// matrix product.  With Γ_j the decay from the start of the tile to token j (a product of C factors, so
// nothing is ever divided by it), a tile is
//
//     k̂_j = Γ_j k_j      q̂_j = scale Γ_j q_j      ŵ_i = (Γ_C / Γ_i) w_i                            rows
//     A_ji = k_j · (Γ_j / Γ_i) w_i   (i < j)       Q_ji = scale q_j · (Γ_j / Γ_i) w_i   (i <= j)   scores
//     e_j = v_j - S' k̂_j - Σ A_ji u_i              u_j = beta_j e_j                                errors, writes
//     o_j = S' q̂_j + Σ Q_ji u_i                    S  <- Γ_C S + Σ ŵ_i u_i'
//
// where ' transposes.  Rows and scores belong to a head; only the last two lines touch the V columns, and
// they do so in blocks of columns that stay in the L1 cache for a whole *span* of 64 tokens.  The backward
// is the derivative of these same lines; docs/cpu.md derives it.
//
// Plain C++ over raw pointers, no PyTorch headers: it compiles in a quarter of a minute.  The Python side checks every
// shape and index before it calls.

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "backward.h"
#include "convolution.h"
#include "cross_entropy.h"
#include "decay.h"
#include "decode_step.h"
#include "forward.h"
#include "gated_norm.h"
#include "normalize.h"
#include "program.h"
#include "row_product.h"

namespace {

// Runs f(wait) on several threads at once; wait() returns when all of them have called it.
template <class F>
void on_threads(int64_t threads, F&& f) {
#ifdef __SANITIZE_THREAD__  // it cannot see how OpenMP's threads wait for each other
    std::mutex mutex;
    std::condition_variable all;
    int64_t arrived = 0, round = 0;
    const auto wait = [&] {
        std::unique_lock<std::mutex> lock(mutex);
        const int64_t mine = round;
        if (++arrived == threads) {
            arrived = 0;
            round++;
            all.notify_all();
        }
        all.wait(lock, [&] { return round != mine; });
    };
    std::vector<std::thread> team;
    for (int64_t i = 0; i < threads; i++) team.emplace_back([&] { f(wait); });
    for (auto& thread : team) thread.join();
#else
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
    f([] {
#pragma omp barrier
    });
#endif
}

// Runs f(item) for every item; 0, or 1 when memory ran out.  Items are independent, so the result does not
// depend on how many threads share them.
template <class F>
int for_each(int64_t items, int64_t threads, F&& f) {
    std::atomic<int64_t> next{0};
    std::atomic<int> failed{0};
    on_threads(threads, [&](auto&&) {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) {
            try {
                f(i);
            } catch (const std::bad_alloc&) {
                failed = 1;
            }
        }
        drain();
        scratch.trim();
    });
    return failed;
}

// The number of multiply-adds that makes it worth waking another thread.
constexpr int64_t GRAIN = 100000;

int64_t useful_threads(const Call& call, int64_t work_per_token) {
    const int64_t tokens = call.cu_seqlens ? call.cu_seqlens[call.N] : call.N * call.T;
    return std::max<int64_t>(1, std::min(call.threads, tokens * call.HV * work_per_token / GRAIN));
}

template <class R>
int forward(const Call& call) {
    const int64_t threads = useful_threads(call, 3 * call.K * call.V), heads = call.N * call.HV;
    const int64_t blocks = (call.V + BLOCK<R> - 1) / BLOCK<R>;
    // Few heads for many threads: let several threads share the columns of a head.
    const int64_t parts = heads >= threads ? 1 : std::min(blocks, (threads + heads - 1) / std::max<int64_t>(heads, 1));
    return for_each(heads * parts, threads, [&](int64_t item) {
        const Head<R> head(call, item / parts / call.HV, item / parts % call.HV);
        const int64_t part = item % parts;
        const int first = int(part * blocks / parts * BLOCK<R>);
        const int last = int(std::min(call.V, (part + 1) * blocks / parts * BLOCK<R>));
        if (head.length == 1)
            forward_head<R, 1>(head, first, last, part == 0);
        else
            forward_head<R, 4>(head, first, last, part == 0);
    });
}

template <class R, class F>
int over_heads(const Call& call, int64_t work_per_token, F&& f) {
    return for_each(call.N * call.HV, useful_threads(call, work_per_token),
                    [&](int64_t item) { f(Head<R>(call, item / call.HV, item % call.HV)); });
}

template <class F>
int over_channels(const Convolution& call, int64_t parts, int64_t tokens, F&& f) {
    const int64_t blocks = (call.D + CHANNELS - 1) / CHANNELS, work = tokens * call.D * call.W;
    return for_each(parts * blocks, std::max<int64_t>(1, std::min(call.threads, work / GRAIN)), f);
}

int over_tokens(const Rows& call, bool back) {
    const int64_t tokens = call.B * call.T, work = (back ? 8 : 4) * tokens * call.H * call.K;
    return for_each((tokens + TOKENS_PER_ITEM - 1) / TOKENS_PER_ITEM,
                    std::max<int64_t>(1, std::min(call.threads, work / GRAIN)),
                    [&](int64_t item) { normalize_item<REAL>(call, item, back); });
}

int row_products(const Product* calls) {
    int64_t work = 0;
    for (int64_t i = 0; i <= calls->more; i++) work += calls[i].M * calls[i].N * calls[i].K;
    const int64_t threads = std::max<int64_t>(1, std::min(calls->threads, work / GRAIN));
    std::vector<std::atomic<int64_t>> next(calls->more + 1);
    std::atomic<int> failed{0};
    on_threads(threads, [&](auto&&) {
        try {
            product_thread<REAL>(calls, PIECES * threads, [&](int64_t i) { return next[i]++; });
        } catch (const std::bad_alloc&) {
            failed = 1;
        }
        scratch.trim();
    });
    return failed;
}

int run_program(const Instruction* program) {
    int64_t work = 0, counters = 0, threads = 1;
    const Instruction* x = program;
    for (; x->kind != END; x++) {
        counters += counters_of(*x);
        if (x->kind != PRODUCTS) continue;
        const Product* calls = static_cast<const Product*>(x->call);
        for (int64_t i = 0; i <= calls->more; i++) work += calls[i].M * calls[i].N * calls[i].K;
        threads = calls->threads;
    }
    threads = std::max<int64_t>(1, std::min(threads, work / std::max<int64_t>(1, x - program) / GRAIN));
    std::vector<std::atomic<int64_t>> taken(counters);
    std::atomic<int> failed{0};
    on_threads(threads, [&](auto&& wait) {
        std::atomic<int64_t>* next = taken.data();
        for (const Instruction* x = program; x->kind != END; x++) {
            try {
                run_instruction<REAL>(*x, threads, next);
            } catch (const std::bad_alloc&) {
                failed = 1;
            }
            next += counters_of(*x);
            drain();
            wait();
        }
        scratch.trim();
    });
    return failed;
}

// Rows of a call, some per item, each costing about `work_per_element`; f(Element{}, item) for every item.
template <class C, class F>
int over_rows(const C& call, int64_t columns, int64_t rows_per_item, int64_t work_per_element, F&& f) {
    const int64_t work = work_per_element * call.rows * columns;
    return for_each((call.rows + rows_per_item - 1) / rows_per_item,
                    std::max<int64_t>(1, std::min(call.threads, work / GRAIN)),
                    [&](int64_t item) { with_element<REAL>(call.element, [&](auto element) { f(element, item); }); });
}

int gated_norm(const GatedNorm& call, bool back) {
    return over_rows(call, call.D, ROWS_PER_ITEM, back ? 32 : 12,
                     [&](auto element, int64_t item) { gated_norm_item<REAL, decltype(element)>(call, item, back); });
}

int decay(const Decay& call, bool back) {
    return over_rows(call, call.C, DECAYS_PER_ITEM, back ? 48 : 24,
                     [&](auto element, int64_t item) { decay_item<REAL, decltype(element)>(call, item, back); });
}

int cross_entropy(const CrossEntropy& call) {
    return over_rows(call, call.C, LOGITS_PER_ITEM, 16,
                     [&](auto element, int64_t item) { cross_entropy_item<REAL, decltype(element)>(call, item); });
}

}  // namespace

// REAL is float or double, with one library for each, so that nobody waits for one they do not use.
extern "C" {
int osdn_forward(const Call* call) { return forward<REAL>(*call); }
int osdn_backward(const Call* call) { return over_heads<REAL>(*call, 7 * call->K * call->V, backward_head<REAL>); }
int osdn_precondition(const Call* call) {
    return over_heads<REAL>(*call, 8 * call->K * call->block, precondition_head<REAL>);
}
int osdn_precondition_back(const Call* call) {
    return over_heads<REAL>(*call, 20 * call->K * call->block, precondition_back_head<REAL>);
}
int osdn_convolution(const Convolution* call) {
    const int64_t tokens = call->cu_seqlens ? call->cu_seqlens[call->N] : call->N * call->T;
    return over_channels(*call, call->S, tokens, [&](int64_t item) { convolve_item<REAL>(*call, item, false); });
}
int osdn_convolution_back(const Convolution* call) {
    const int64_t tokens = call->cu_seqlens ? call->cu_seqlens[call->N] : call->N * call->T;
    return over_channels(*call, call->S, 3 * tokens, [&](int64_t item) { convolve_item<REAL>(*call, item, true); });
}
int osdn_convolution_step(const Convolution* call) {
    return over_channels(*call, call->N, 4 * call->N, [&](int64_t item) { convolve_step_item<REAL>(*call, item); });
}
int osdn_step(const Step* call) {
    const int64_t work = 3 * call->N * call->HV * call->K * call->V;
    return for_each(call->N * call->H, std::max<int64_t>(1, std::min(call->threads, work / GRAIN)),
                    [&](int64_t item) { step_item<REAL>(*call, item); });
}
int osdn_row_products(const Product* calls) { return row_products(calls); }
int osdn_program(const Instruction* program) { return run_program(program); }
int osdn_rows(const Rows* call) { return over_tokens(*call, false); }
int osdn_rows_back(const Rows* call) { return over_tokens(*call, true); }
int osdn_gated_norm(const GatedNorm* call) { return gated_norm(*call, false); }
int osdn_gated_norm_back(const GatedNorm* call) { return gated_norm(*call, true); }
int osdn_cross_entropy(const CrossEntropy* call) { return cross_entropy(*call); }
int osdn_decay(const Decay* call) { return decay(*call, false); }
int osdn_decay_back(const Decay* call) { return decay(*call, true); }
}
