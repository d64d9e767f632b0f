// Phase 1 by Newton's method: the covariance P, its step at a token, and the reverse of that step.
//
// P is block-diagonal and symmetric.  It is kept as b rows of K channels: row j holds, for channel i, the element
// of i's block in i's own row and column j.  With x_j the row in which every channel has element j of its block,
//
//     (P x)_i = Σ_j P_j[i] x_j[i]          (blockdiag y y')_j[i] = y_j[i] y[i]
//
// so that every block size runs over whole vectors of channels, and b = 1 is a plain scan over the diagonal.

#pragma once

#include "scale.h"

namespace {

template <class R>
class Covariance {
    using Int = typename Bits<R>::type;
    const Head<R>& head;
    const Call& call;
    const int K, Kp, b;
    const R prior;
    const Retention<R> retention{head};
    R* place;  // [Kp]: the place of every channel in its block, bits of integers
    R* spare;  // [3, Kp]

    enum Layout { DIAGONAL, WITHIN, ACROSS, ANY };  // how blocks lie in vectors
    Layout layout;

    INLINE Int places(int i) const {
        Int x;
        std::memcpy(&x, place + i, sizeof x);
        return x;
    }
    // f(i, start) for every vector i of channels, `start` being the first channel of its block.
    template <Layout L, class F>
    INLINE void each_vector(F&& f) const {
        for (int i = 0, start = 0; i < Kp; i += W<R>) {
            if (L == ACROSS && i - start == b) start = i;
            f(i, start);
        }
    }
    // Vector i of the row x_j; `own` is vector i of x itself.
    template <Layout L>
    INLINE Vec<R> spread(const R* x, Vec<R> own, int j, int i, int start, Int lanes) const {
        if constexpr (L == DIAGONAL) return own;
        if constexpr (L == WITHIN) return pick<R>(own, lanes + j);
        if constexpr (L == ACROSS) return splat(x[start + j]);
        Vec<R> out = {};
        for (int m = 0; m < W<R> && i + m < K; m++) out[m] = x[(i + m) / b * b + j];
        return out;
    }
    // The first lane of every lane's block.
    template <Layout L>
    INLINE Int lanes() const {
        Int x = {};
        if constexpr (L == WITHIN)
            for (int m = 0; m < W<R>; m++) x[m] = m / b * b;
        return x;
    }
    // 1 where row j meets the diagonal of P.
    template <Layout L>
    INLINE Vec<R> diagonal(int j, int i) const {
        const Vec<R> one = splat(R(1));
        if constexpr (L == DIAGONAL) return one;
        return places(i) == j ? one : Vec<R>{};
    }
    // The retention of token t, one value per block if there are as many.
    INLINE Vec<R> kept(int64_t t, int i, R constant) const {
        if (call.retention_kind < 2) return splat(constant);
        if (b == 1) return retention.at(t, i, constant);
        const R* per_block = head.row(call.retention, t, call.HV, head.hv, K / b);
        Vec<R> r = {};
        for (int m = 0; m < W<R> && i + m < K; m++) r[m] = per_block[(i + m) / b];
        return r;
    }
    // 1 - retention.  That of a constant is taken before rounding: 1 - 0.999 is wrong in the fifth digit in float32.
    INLINE Vec<R> forgotten(int64_t t, int i, R constant) const {
        return call.retention_kind ? 1 - kept(t, i, constant) : splat(R(1 - call.constant_retention));
    }
    // Runs f(layout, whether anything is not retained).
    template <class F>
    INLINE auto dispatch(F&& f) const {
        const bool forgets = call.retention_kind || call.constant_retention != 1;
        const auto with = [&](auto L) { return forgets ? f(L, std::true_type{}) : f(L, std::false_type{}); };
        switch (layout) {
            case DIAGONAL:
                return with(std::integral_constant<Layout, DIAGONAL>{});
            case WITHIN:
                return with(std::integral_constant<Layout, WITHIN>{});
            case ACROSS:
                return with(std::integral_constant<Layout, ACROSS>{});
            default:
                return with(std::integral_constant<Layout, ANY>{});
        }
    }
    // f(where a row of a block lies in P, where in a tensor)
    template <class F>
    INLINE void each_row(F&& f) const {
        for (int i = 0; i < K; i += b)
            for (int j = 0; j < b; j++) f(j * int64_t(Kp) + i, (i + j) * int64_t(b));
    }
    // Σ_j P_j[i] x_j[i] for vector i.
    template <Layout L>
    INLINE Vec<R> product(const R* P, const R* x, Vec<R> own, int i, int start, Int lanes) const {
        if constexpr (L == DIAGONAL) return load(P + i) * own;
        constexpr int M = L == ACROSS ? 4 : 2;  // independent sums, because additions to one sum wait for each other
        Vec<R> sum[M] = {};
        int j = 0;
        for (; j + M <= b; j += M) {
            UNROLL
            for (int m = 0; m < M; m++)
                sum[m] += load(P + (j + m) * int64_t(Kp) + i) * spread<L>(x, own, j + m, i, start, lanes);
        }
        for (; j < b; j++) sum[0] += load(P + j * int64_t(Kp) + i) * spread<L>(x, own, j, i, start, lanes);
        for (int m = 1; m < M; m++) sum[0] += sum[m];
        return sum[0];
    }

    template <Layout L, bool FORGETS>
    Feedback<R> forward(const R* P, R* next, const R* k, R* w, int64_t t) const {
        const Int first = lanes<L>();
        Vec<R> dot[2] = {};
        R* y = L == DIAGONAL ? w : spare;
        each_vector<L>([&](int i, int start) {
            const Vec<R> k_i = load(k + i), y_i = product<L>(P, k, k_i, i, start, first);
            store(y + i, y_i);
            dot[i / W<R> % 2] += y_i * k_i;
        });
        Feedback<R> f;
        f.b = *head.per_head(call.beta, t);
        f.dot = total<R>(dot[0] + dot[1]);
        f.n = 1 + f.b * f.dot;
        const R inverse = 1 / f.n, step = f.b * inverse, r = retention.at(t);
        f.step = step;
        const int rows = L == DIAGONAL ? 1 : b;
        each_vector<L>([&](int i, int start) {
            const Vec<R> y_i = load(y + i);
            const Vec<R> rest = FORGETS ? forgotten(t, i, r) : Vec<R>{};
            for (int j = 0; j < rows; j++) {
                const int64_t at = j * int64_t(Kp) + i;
                // y y' first: with this order of rounding, P stays exactly symmetric
                Vec<R> p = load(P + at) - step * (y_i * spread<L>(y, y_i, j, i, start, first));
                if (FORGETS) p += rest * (prior * diagonal<L>(j, i) - p);
                store(next + at, p);
            }
            store(w + i, y_i * inverse);
        });
        return f;
    }

    template <Layout L, bool FORGETS>
    void backward(const Feedback<R>& f, const R* P, const R* k, const R* w, const R* grad_w, R* G, R* grad_k,
                  int64_t t) const {
        const Int first = lanes<L>();
        const R r = retention.at(t);
        const int rows = L == DIAGONAL ? 1 : b;
        R *y = spare, *Gy = y + Kp, *dy = Gy + Kp;
        for (int i = 0; i < Kp; i += W<R>) store(y + i, load(w + i) * f.n);
        Vec<R> yGy = {}, wy = {}, to_r = {};
        each_vector<L>([&](int i, int start) {
            const Vec<R> y_i = load(y + i), g = product<L>(G, y, y_i, i, start, first);
            const Vec<R> kept_g = FORGETS ? kept(t, i, r) * g : g;
            store(Gy + i, kept_g);
            yGy += kept_g * y_i;
            wy += load(grad_w + i) * y_i;
            if (FORGETS && call.grad_retention) {
                Vec<R> sum = -f.step * y_i * g;
                for (int j = 0; j < rows; j++) {
                    const int64_t at = j * int64_t(Kp) + i;
                    sum += load(G + at) * (load(P + at) - prior * diagonal<L>(j, i));
                }
                to_r += sum;
                store(dy + i, sum);
            }
        });
        if (FORGETS && call.grad_retention) {
            if (call.retention_kind == 1) *head.per_head(call.grad_retention, t) = total<R>(to_r);
            R* out = head.row(call.grad_retention, t, call.HV, head.hv, K / b);
            for (int i = 0; i < K && call.retention_kind == 2; i += b) {
                R sum = 0;
                for (int j = 0; j < b; j++) sum += dy[i + j];
                *out++ = sum;
            }
        }
        const R grad_step = -total<R>(yGy), inverse = 1 / f.n;
        const R grad_n = -(total<R>(wy) + grad_step * f.b) * inverse * inverse;
        *head.per_head(call.grad_beta, t) += grad_step * inverse + grad_n * f.dot;
        const R grad_dot = grad_n * f.b, twice = 2 * f.step;
        for (int i = 0; i < Kp; i += W<R>)
            store(dy + i, load(grad_w + i) * inverse + grad_dot * load(k + i) - twice * load(Gy + i));
        each_vector<L>([&](int i, int start) {
            const Vec<R> k_i = load(k + i), dy_i = load(dy + i), r_i = FORGETS ? kept(t, i, r) : splat(R(1));
            const Vec<R> half_k = k_i * R(0.5), half_dy = dy_i * R(0.5);
            store(grad_k + i, load(grad_k + i) + grad_dot * load(y + i) + product<L>(P, dy, dy_i, i, start, first));
            for (int j = 0; j < rows; j++) {  // the symmetric part: half of dy k' and half of k dy'
                const int64_t at = j * int64_t(Kp) + i;
                const Vec<R> g = FORGETS ? r_i * load(G + at) : load(G + at);
                store(G + at, g + half_dy * spread<L>(k, k_i, j, i, start, first) +
                                  half_k * spread<L>(dy, dy_i, j, i, start, first));
            }
        });
    }

public:
    explicit Covariance(const Head<R>& h)
        : head(h), call(h.call), K(h.K), Kp(h.Kp), b(int(h.call.block)), prior(R(h.call.prior)) {
        layout = b == 1 ? DIAGONAL : b % W<R> == 0 ? ACROSS : W<R> % b == 0 ? WITHIN : ANY;
    }
    static constexpr int ROWS_OF_SCRATCH = 4;
    void take(R* memory) {
        place = memory;
        spare = memory + Kp;
        for (int i = 0; i < Kp; i++) {
            const typename Bits<R>::element x = i < K ? i % b : -1;
            std::memcpy(place + i, &x, sizeof x);
        }
    }
    // Copies between the b rows of K channels and a tensor's blocks [K / b, b, b].
    void load_blocks(R* P, const R* from) const {
        std::memset(P, 0, b * int64_t(Kp) * sizeof(R));
        each_row([&](int64_t here, int64_t there) { std::memcpy(P + here, from + there, b * sizeof(R)); });
    }
    void store_blocks(const R* P, R* to) const {
        each_row([&](int64_t here, int64_t there) { std::memcpy(to + there, P + here, b * sizeof(R)); });
    }
    void identity(R* P) const {
        std::memset(P, 0, b * int64_t(Kp) * sizeof(R));
        for (int i = 0; i < K; i++) P[i % b * int64_t(Kp) + i] = prior;
    }
    INLINE Feedback<R> step(const R* P, R* next, const R* k, R* w, int64_t t) const {
        return dispatch([&](auto L, auto forgets) { return forward<L, forgets>(P, next, k, w, t); });
    }
    // On entry G is the symmetric gradient of the covariance after the token, on exit of the one before it.
    INLINE void step_back(const Feedback<R>& f, const R* P, const R* k, const R* w, const R* grad_w, R* G, R* grad_k,
                          int64_t t) const {
        dispatch([&](auto L, auto forgets) { backward<L, forgets>(f, P, k, w, grad_w, G, grad_k, t); });
    }
};

}  // namespace
