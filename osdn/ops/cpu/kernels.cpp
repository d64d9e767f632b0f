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
// Plain C++ over raw pointers, no PyTorch headers: it compiles in seconds.  The Python side checks every
// shape and index before it calls.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#include <utility>

#define INLINE inline __attribute__((always_inline))

// What Python packs for a call: native 8-byte fields in this order.  A null pointer is an absent tensor.
struct Call {
    // inputs
    const void *q, *k, *v, *beta, *write_keys, *log_decay, *retention, *initial_scale, *initial_state;
    const int64_t* cu_seqlens;  // [N + 1] on the host, or null: N sequences of T tokens each
    // outputs of the forward
    void *out, *final_state, *final_scale;
    // what the forward keeps for the backward (absent when no gradient is wanted)
    void *errors, *state_checkpoints, *scale_checkpoints;
    // gradients that come in
    const void *grad_out, *grad_final_state, *grad_final_scale;
    // gradients that go out; those of q and k have one head per value head
    void *grad_q, *grad_k, *grad_v, *grad_beta, *grad_write_keys, *grad_log_decay, *grad_retention,
        *grad_initial_scale, *grad_initial_state;
    int64_t N, T, H, HV, K, V;
    int64_t decay_kind, retention_kind;  // 0: none or a constant, 1: per head, 2: per channel
    int64_t online, beta_aware, threads;
    double eta, low, high, eps, constant_retention, scale;
};

namespace {

// ---------------------------------------------------------------------------------------------- vectors
#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif

template <class R>
struct Simd {
    static constexpr int W = BYTES / sizeof(R);
    typedef R vec __attribute__((vector_size(BYTES)));
    typedef R loose __attribute__((vector_size(BYTES), aligned(sizeof(R)), may_alias));
};
template <class R>
using Vec = typename Simd<R>::vec;
template <class R>
constexpr int W = Simd<R>::W;

template <class R>
struct Bits;
template <>
struct Bits<float> {
    typedef int32_t type __attribute__((vector_size(BYTES)));
    static constexpr int mantissa = 23, bias = 127, terms = 7;
    static constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    static constexpr float least = -87.0f, most = 88.0f;
};
template <>
struct Bits<double> {
    typedef int64_t type __attribute__((vector_size(BYTES)));
    static constexpr int mantissa = 52, bias = 1023, terms = 13;
    static constexpr double magic = 6755399441055744.0;  // 1.5 * 2^52
    static constexpr double ln2_high = 0.693145751953125, ln2_low = 1.42860682030941723212e-6;
    static constexpr double least = -708.0, most = 709.0;
};

template <class R>
INLINE Vec<R> load(const R* p) {
    return *reinterpret_cast<const typename Simd<R>::loose*>(p);
}
template <class R>
INLINE void store(R* p, Vec<R> x) {
    *reinterpret_cast<typename Simd<R>::loose*>(p) = x;
}
template <class R>
INLINE Vec<R> splat(R x) {
    return Vec<R>{} + x;
}
// The first n of NV vectors' elements; the rest read as zero and are not written.
template <class R, int NV>
INLINE void load_some(const R* p, int n, Vec<R> (&x)[NV]) {
    if (n == NV * W<R>) {
        for (int i = 0; i < NV; i++) x[i] = load(p + i * W<R>);
    } else {
        alignas(BYTES) R buffer[NV * W<R>] = {};
        std::memcpy(buffer, p, n * sizeof(R));
        for (int i = 0; i < NV; i++) x[i] = load(buffer + i * W<R>);
    }
}
template <class R, int NV>
INLINE void store_some(R* p, int n, const Vec<R> (&x)[NV]) {
    if (n == NV * W<R>) {
        for (int i = 0; i < NV; i++) store(p + i * W<R>, x[i]);
    } else {
        alignas(BYTES) R buffer[NV * W<R>];
        for (int i = 0; i < NV; i++) store(buffer + i * W<R>, x[i]);
        std::memcpy(p, buffer, n * sizeof(R));
    }
}
// Half vectors: the elements at even and odd places of two vectors, or the two halves of one.
template <class R, int... I>
INLINE auto evens(Vec<R> a, Vec<R> b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (I % 2 ? W<R> + I - 1 : I)...);
}
template <class R, int... I>
INLINE auto odds(Vec<R> a, Vec<R> b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (I % 2 ? W<R> + I : I + 1)...);
}
template <class V, int... I>
INLINE auto add_halves(V x, std::integer_sequence<int, I...>) {
    constexpr int half = sizeof...(I);
    return __builtin_shufflevector(x, x, I...) + __builtin_shufflevector(x, x, (half + I)...);
}
// Sum of the elements.
template <class R, int N = W<R>, class V = Vec<R>>
INLINE R total(V x) {
    if constexpr (N == 2)
        return x[0] + x[1];
    else
        return total<R, N / 2>(add_halves(x, std::make_integer_sequence<int, N / 2>{}));
}
// The sums of four vectors at the price of little more than one.
template <class R, int N, class V>
INLINE void store_pairs(V x, R (&out)[4]) {
    if constexpr (N > 4)
        store_pairs<R, N / 2>(add_halves(x, std::make_integer_sequence<int, N / 2>{}), out);
    else
        for (int i = 0; i < 4; i++) out[i] = x[i];
}
template <class R>
INLINE void totals(const Vec<R> (&x)[4], R (&out)[4]) {
    if constexpr (W<R> >= 8) {
        constexpr auto all = std::make_integer_sequence<int, W<R>>{};
        const Vec<R> ab = evens<R>(x[0], x[1], all) + odds<R>(x[0], x[1], all);  // a b a b ...
        const Vec<R> cd = evens<R>(x[2], x[3], all) + odds<R>(x[2], x[3], all);
        using Index = typename Bits<R>::type;
        Index low, high;
        for (int i = 0; i < W<R>; i++) {
            low[i] = i % 4 < 2 ? i : W<R> + i - 2;
            high[i] = i % 4 < 2 ? i + 2 : W<R> + i;
        }
        store_pairs<R, W<R>>(__builtin_shuffle(ab, cd, low) + __builtin_shuffle(ab, cd, high), out);  // a b c d ...
    } else {
        for (int i = 0; i < 4; i++) out[i] = total<R>(x[i]);
    }
}

INLINE int round_up(int64_t n, int multiple) { return int((n + multiple - 1) / multiple * multiple); }

// exp by splitting off a power of two and a Taylor series on [-ln2/2, ln2/2]; below `least` it is zero.
template <class R>
INLINE Vec<R> exponential(Vec<R> x) {
    using B = Bits<R>;
    const Vec<R> shifted = x * R(1.4426950408889634) + B::magic;
    const Vec<R> n = shifted - B::magic;
    const Vec<R> r = (x - n * B::ln2_high) - n * B::ln2_low;
    Vec<R> series = splat<R>(1);
    for (int i = B::terms; i >= 1; i--) series = series * r * (R(1) / R(i)) + R(1);
    typename B::type power;
    std::memcpy(&power, &shifted, sizeof power);
    power = (power + B::bias) << B::mantissa;
    Vec<R> two_n;
    std::memcpy(&two_n, &power, sizeof two_n);
    const Vec<R> result = series * two_n;
    const Vec<R> large = splat(std::numeric_limits<R>::infinity());
    return x < B::least ? Vec<R>{} : (x > B::most ? large : result);
}

// --------------------------------------------------------------------------------- the four inner loops
// acc[r] = Σ_i x[r][i] S[i]: ROWS key-side vectors read the state.
template <class R, int ROWS, int NV>
INLINE void read_state(const R* S, int64_t ld, int K, const R* x, int64_t xs, Vec<R> (&acc)[ROWS][NV]) {
    for (auto& row : acc)
        for (auto& a : row) a = Vec<R>{};
    for (int i = 0; i < K; i++) {
        Vec<R> s[NV];
        for (int n = 0; n < NV; n++) s[n] = load(S + i * ld + n * W<R>);
        for (int r = 0; r < ROWS; r++)
            for (int n = 0; n < NV; n++) acc[r][n] += s[n] * x[r * xs + i];
    }
}

// out[i] = decay[i] in[i] + Σ_c x[c][i] z[c]: RANK writes at once, M rows of the state in registers.
template <class R, int RANK, int NV, int M>
INLINE void write_rows(const R* in, R* out, int64_t ld, const R* decay, const R* x, int64_t xs, const R* z) {
    Vec<R> s[M][NV];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < NV; n++) s[m][n] = load(in + m * ld + n * W<R>);
    if (decay)
        for (int m = 0; m < M; m++)
            for (int n = 0; n < NV; n++) s[m][n] *= decay[m];
    for (int c = 0; c < RANK; c++) {
        Vec<R> row[NV];
        for (int n = 0; n < NV; n++) row[n] = load(z + (c * NV + n) * W<R>);
        for (int m = 0; m < M; m++)
            for (int n = 0; n < NV; n++) s[m][n] += row[n] * x[c * xs + m];
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < NV; n++) store(out + m * ld + n * W<R>, s[m][n]);
}
template <class R, int RANK, int NV>
INLINE void write_state(const R* in, R* out, int64_t ld, int K, const R* decay, const R* x, int64_t xs,
                        const R* z) {
    constexpr int M = 8;
    int i = 0;
    for (; i + M <= K; i += M)
        write_rows<R, RANK, NV, M>(in + i * ld, out + i * ld, ld, decay ? decay + i : nullptr, x + i, xs, z);
    for (; i < K; i++)
        write_rows<R, RANK, NV, 1>(in + i * ld, out + i * ld, ld, decay ? decay + i : nullptr, x + i, xs, z);
}

// out[i][j] += Σ_v X[i][v] z[j][v] for rows i of X and J groups of W columns z, given transposed.
template <class R, int J, int M>
INLINE void contract_rows(const R* X, int64_t ld, int columns, const R* z, int64_t zs, R* out, int64_t os) {
    Vec<R> acc[M][J];
    for (int m = 0; m < M; m++)
        for (int j = 0; j < J; j++) acc[m][j] = load(out + j * os + m * W<R>);
    for (int v = 0; v < columns; v++) {
        Vec<R> row[J];
        for (int j = 0; j < J; j++) row[j] = load(z + j * zs + v * W<R>);
        for (int m = 0; m < M; m++)
            for (int j = 0; j < J; j++) acc[m][j] += row[j] * X[m * ld + v];
    }
    for (int m = 0; m < M; m++)
        for (int j = 0; j < J; j++) store(out + j * os + m * W<R>, acc[m][j]);
}
template <class R, int J>
INLINE void contract(const R* X, int64_t ld, int rows, int columns, const R* z, int64_t zs, R* out,
                     int64_t os) {
    constexpr int M = J == 1 ? 16 : 8;
    int i = 0;
    for (; i + M <= rows; i += M) contract_rows<R, J, M>(X + i * ld, ld, columns, z, zs, out + i * W<R>, os);
    for (; i < rows; i++) contract_rows<R, J, 1>(X + i * ld, ld, columns, z, zs, out + i * W<R>, os);
}

// W x W transpose: exchange the off-diagonal blocks of size 1, 2, 4, ... in turn.
template <class R, int HALF>
INLINE void exchange(Vec<R> (&x)[W<R>]) {
    using Index = typename Bits<R>::type;
    Index low, high;
    for (int i = 0; i < W<R>; i++) {
        low[i] = i & HALF ? W<R> + i - HALF : i;
        high[i] = i & HALF ? W<R> + i : i + HALF;
    }
    for (int i = 0; i < W<R>; i++)
        if (!(i & HALF)) {
            const Vec<R> a = x[i], b = x[i + HALF];
            x[i] = __builtin_shuffle(a, b, low);
            x[i + HALF] = __builtin_shuffle(a, b, high);
        }
    if constexpr (HALF * 2 < W<R>) exchange<R, HALF * 2>(x);
}
// out[v][c] = in[c][v] for W rows c and `columns` columns v, a multiple of W.
template <class R>
INLINE void transpose(const R* in, int64_t ld, int columns, R* out, int64_t os) {
    for (int v = 0; v < columns; v += W<R>) {
        Vec<R> x[W<R>];
        for (int c = 0; c < W<R>; c++) x[c] = load(in + c * ld + v);
        exchange<R, 1>(x);
        for (int c = 0; c < W<R>; c++) store(out + (v + c) * os, x[c]);
    }
}

// ------------------------------------------------------------------------------------ sequences and heads
constexpr int SPAN = 64;  // tokens between two checkpoints; also how long a column block stays in L1

// Thread-local memory, handed out in aligned pieces and kept from call to call.
class Scratch {
    char* base = nullptr;
    size_t size = 0, used = 0;

public:
    ~Scratch() { std::free(base); }
    void reserve(size_t bytes) {
        used = 0;
        if (bytes <= size) return;
        std::free(base);
        size = (bytes + 4095) / 4096 * 4096;
        base = static_cast<char*>(std::aligned_alloc(4096, size));
        if (!base) {
            size = 0;
            throw std::bad_alloc();
        }
    }
    template <class R>
    R* take(int64_t n) {
        R* p = reinterpret_cast<R*>(base + used);
        used += (n * sizeof(R) + 63) / 64 * 64;
        return p;
    }
};
thread_local Scratch scratch;

// One sequence and value head of a call: where its tokens' rows lie.
template <class R>
struct Head {
    const Call& call;
    int64_t n, hv, h, begin, length;
    int K, Kp, V;  // Kp: K rounded up to whole vectors

    Head(const Call& c, int64_t sequence, int64_t value_head)
        : call(c), n(sequence), hv(value_head), h(value_head / (c.HV / c.H)), K(int(c.K)),
          Kp(round_up(c.K, W<R>)), V(int(c.V)) {
        begin = c.cu_seqlens ? c.cu_seqlens[n] : n * c.T;
        length = (c.cu_seqlens ? c.cu_seqlens[n + 1] : begin + c.T) - begin;
    }
    // Row of token t in a tensor [tokens, heads, width].
    const R* row(const void* x, int64_t t, int64_t heads, int64_t head, int64_t width) const {
        return static_cast<const R*>(x) + ((begin + t) * heads + head) * width;
    }
    R* row(void* x, int64_t t, int64_t heads, int64_t head, int64_t width) const {
        return static_cast<R*>(x) + ((begin + t) * heads + head) * width;
    }
    const R* query(int64_t t) const { return row(call.q, t, call.H, h, K); }
    const R* key(int64_t t) const { return row(call.k, t, call.H, h, K); }
    template <class P>
    auto per_head(P x, int64_t t) const { return row(x, t, call.HV, hv, 1); }
    template <class P>
    auto per_key(P x, int64_t t) const { return row(x, t, call.HV, hv, K); }
    template <class P>
    auto per_value(P x, int64_t t) const { return row(x, t, call.HV, hv, V); }
    // This head's part of a tensor [N, HV, size].
    const R* state(const void* x, int64_t size) const {
        return static_cast<const R*>(x) + (n * call.HV + hv) * size;
    }
    R* state(void* x, int64_t size) const { return static_cast<R*>(x) + (n * call.HV + hv) * size; }
    // Checkpoint of the span that starts at token t > 0.  begin / SPAN never collides: a sequence of L
    // tokens needs ceil(L / SPAN) - 1 checkpoints, and at least as many multiples of SPAN lie inside it.
    R* checkpoint(void* x, int64_t t, int64_t size) const {
        return static_cast<R*>(x) + ((begin / SPAN + t / SPAN - 1) * call.HV + hv) * size;
    }
};

// A row of K elements into Kp, zero-padded, times a factor.
template <class R>
INLINE void copy_row(R* to, const R* from, int K, int Kp, R factor = 1) {
    int i = 0;
    for (; i + W<R> <= K; i += W<R>) store(to + i, load(from + i) * factor);
    for (; i < K; i++) to[i] = from[i] * factor;
    for (; i < Kp; i++) to[i] = 0;
}

// ------------------------------------------------------------------------------------------------ phase 1
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
    INLINE void step(R* d, const R* k, R* w, int64_t t) const {
        const R step = feedback(d, k, *head.per_head(call.beta, t)).step, r = retention(t);
        for (int i = 0; i < Kp; i += W<R>) {
            const Vec<R> x = load(k + i), d_i = load(d + i);
            store(w + i, d_i * x);
            store(d + i, clip(retention(t, i, r) * d_i + step * (x * x)));
        }
    }
    // The reverse of `step`: grad_d holds the gradient of the scale after the token and leaves with that of
    // the scale before it; the key's gradient is added to grad_k.
    INLINE void step_back(const R* d, const R* k, const R* grad_w, R* grad_d, R* grad_k, int64_t t) const {
        const R beta = *head.per_head(call.beta, t), r = retention(t);
        const Feedback<R> f = feedback(d, k, beta);
        const R eta = R(call.eta), m = 1 - f.b * f.dot;
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
                store_some<R, 1>(head.per_key(call.grad_retention, t) + i, std::min(K - i, W<R>), out);
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

// ------------------------------------------------------------------------------- rows and scores of a tile
template <class R, int C>
struct Tile {
    R* rows;    // [3 C, Kp]: k̂, q̂, ŵ
    R* decay;   // [Kp]: Γ_C
    R* factor;  // [C, Kp]: exp(log_decay) of each token; kept for the backward
    R A[C][C], Q[C][C];
    R beta[C];

    static int64_t size(int Kp) { return (3 * C + 1 + C) * int64_t(Kp); }
    void place(R* memory, int Kp) {
        rows = memory;
        decay = rows + 3 * C * int64_t(Kp);
        factor = decay + Kp;
    }
    R* k(int c, int Kp) const { return rows + c * int64_t(Kp); }
    R* q(int c, int Kp) const { return rows + (C + c) * int64_t(Kp); }
    R* w(int c, int Kp) const { return rows + (2 * C + c) * int64_t(Kp); }
};

// exp(log_decay) of token t as a row of Kp.
template <class R>
INLINE void decay_row(const Head<R>& head, int64_t t, R* to) {
    const Call& call = head.call;
    if (call.decay_kind == 1) {
        const R a = exponential<R>(splat(*head.per_head(call.log_decay, t)))[0];
        for (int i = 0; i < head.Kp; i += W<R>) store(to + i, splat(a));
    } else {
        copy_row(to, head.per_key(call.log_decay, t), head.K, head.Kp);
        for (int i = 0; i < head.Kp; i += W<R>) store(to + i, exponential<R>(load(to + i)));
    }
}

// x[i] *= a[i]
template <class R>
INLINE void scale_row(R* x, const R* a, int Kp) {
    for (int i = 0; i < Kp; i += W<R>) store(x + i, load(x + i) * load(a + i));
}

// Scores of one token against the (decayed) write keys 0 .. c of its tile, four at a time.
template <class R, int C>
INLINE void score(const R* k, const R* q, const R* w, int c, int Kp, R* A, R* Q) {
    constexpr int G = C < 4 ? C : 4;
    for (int i = 0; i <= c; i += G) {
        Vec<R> a[4] = {}, s[4] = {};
        for (int b = 0; b < Kp; b += W<R>) {
            const Vec<R> k_b = load(k + b), q_b = load(q + b);
            for (int m = 0; m < G; m++) {
                const Vec<R> w_b = load(w + (i + m) * int64_t(Kp) + b);
                a[m] += k_b * w_b;
                s[m] += q_b * w_b;
            }
        }
        R a_sum[4], s_sum[4];
        totals<R>(a, a_sum);
        totals<R>(s, s_sum);
        for (int m = 0; m < G; m++) {
            A[i + m] = i + m < c ? a_sum[m] : R(0);
            Q[i + m] = i + m <= c ? s_sum[m] : R(0);
        }
    }
}

// What the backward wants to see again: rows [C, Kp] of keys, queries, write keys, and the scale before each.
template <class R>
struct Record {
    R *keys, *queries, *writes, *scales;
};

// Fills a tile from tokens t .. t + count; tokens beyond count do nothing to the state.  With phase 1 in the
// call, the scale d moves on by as many tokens.
template <class R, int C>
INLINE void fill_tile(Tile<R, C>& tile, const Head<R>& head, const OnlineScale<R>& online, int64_t t, int count,
                      R* d, const Record<R>* record) {
    const Call& call = head.call;
    const int K = head.K, Kp = head.Kp;
    for (int c = 0; c < C; c++) {
        R *k = tile.k(c, Kp), *q = tile.q(c, Kp), *w = tile.w(c, Kp);
        if (c >= count) {
            for (R* row : {k, q, w}) std::memset(row, 0, Kp * sizeof(R));
            tile.beta[c] = 0;
            continue;
        }
        copy_row(q, head.query(t + c), K, Kp, R(call.scale));
        copy_row(k, head.key(t + c), K, Kp);
        tile.beta[c] = *head.per_head(call.beta, t + c);
        if (call.online) {
            if (record) copy_row(record->scales + c * int64_t(Kp), d, Kp, Kp);
            online.step(d, k, w, t + c);
        } else {
            copy_row(w, call.write_keys ? head.per_key(call.write_keys, t + c) : head.key(t + c), K, Kp);
        }
        if (record) {
            copy_row(record->keys + c * int64_t(Kp), k, Kp, Kp);
            copy_row(record->queries + c * int64_t(Kp), q, Kp, Kp);
            copy_row(record->writes + c * int64_t(Kp), w, Kp, Kp);
        }
    }
    for (int c = 0; c < count; c++) {
        if (call.decay_kind) {
            R* a = tile.factor + c * int64_t(Kp);
            decay_row(head, t + c, a);
            for (int i = 0; i < c; i++) scale_row(tile.w(i, Kp), a, Kp);
            if (c == 0)
                copy_row(tile.decay, a, Kp, Kp);
            else
                scale_row(tile.decay, a, Kp);
        }
        score<R, C>(tile.k(c, Kp), tile.q(c, Kp), tile.rows + 2 * C * int64_t(Kp), c, Kp, tile.A[c], tile.Q[c]);
        if (call.decay_kind) {
            scale_row(tile.k(c, Kp), tile.decay, Kp);
            scale_row(tile.q(c, Kp), tile.decay, Kp);
        }
    }
    for (int c = count; c < C; c++)
        for (int i = 0; i < C; i++) tile.A[c][i] = tile.Q[c][i] = 0;
}

// Columns are walked in blocks of two vectors; what is left at the end may need only one.
template <class R>
constexpr int BLOCK = 2 * W<R>;

template <class F>
INLINE void with_vectors(int columns, int width, F&& f) {
    if (columns > width)
        f(std::integral_constant<int, 2>{});
    else
        f(std::integral_constant<int, 1>{});
}

// A block of a state [K, V] to and from its packed form [K, NV W].
template <class R, int NV>
INLINE void unpack_state(const R* packed, R* state, int K, int V, int columns) {
    for (int i = 0; i < K; i++) {
        Vec<R> x[NV];
        for (int n = 0; n < NV; n++) x[n] = load(packed + (i * NV + n) * W<R>);
        store_some<R, NV>(state + i * int64_t(V), columns, x);
    }
}
template <class R, int NV>
INLINE void pack_state(const R* state, R* packed, int K, int V, int columns) {
    for (int i = 0; i < K; i++) {
        Vec<R> x[NV] = {};
        if (state) load_some<R, NV>(state + i * int64_t(V), columns, x);
        for (int n = 0; n < NV; n++) store(packed + (i * NV + n) * W<R>, x[n]);
    }
}

// Asks for the key-side rows of a token, and for its part of a tensor [tokens, HV, V], well before their use:
// tokens lie a whole row of heads apart, further than the hardware looks ahead.
template <class R>
INLINE void prefetch(const R* row, int width) {
    for (int i = 0; i < width; i += 64 / int(sizeof(R))) __builtin_prefetch(row + i, 0, 2);
}
template <class R>
INLINE void prefetch_token(const Head<R>& head, int64_t t) {
    const Call& call = head.call;
    prefetch(head.query(t), head.K);
    prefetch(head.key(t), head.K);
    if (call.write_keys) prefetch(head.per_key(call.write_keys, t), head.K);
    if (call.decay_kind == 2) prefetch(head.per_key(call.log_decay, t), head.K);
    if (call.retention_kind == 2) prefetch(head.per_key(call.retention, t), head.K);
}

// ---------------------------------------------------------------------------------------- phase 2, forward
// One tile on one block of columns: errors, outputs, and the state `in` moved on to `out`.
template <class R, int C, int NV>
INLINE void run_tile(const Tile<R, C>& tile, const Head<R>& head, int64_t t, int count, int v0, int columns,
                     const R* in, R* out, int64_t ld) {
    const Call& call = head.call;
    Vec<R> read[2 * C][NV];
    read_state<R, 2 * C, NV>(in, ld, head.K, tile.rows, head.Kp, read);
    alignas(BYTES) R writes[C * NV * W<R>] = {};
    Vec<R> u[C][NV];
    for (int c = 0; c < C && c < count; c++) {
        Vec<R> e[NV], o[NV];
        load_some<R, NV>(head.per_value(call.v, t + c) + v0, columns, e);
        for (int n = 0; n < NV; n++) {
            e[n] -= read[c][n];
            o[n] = read[C + c][n];
            for (int i = 0; i < c; i++) {
                e[n] -= u[i][n] * tile.A[c][i];
                o[n] += u[i][n] * tile.Q[c][i];
            }
            u[c][n] = e[n] * tile.beta[c];
            o[n] += u[c][n] * tile.Q[c][c];
            store(writes + (c * NV + n) * W<R>, u[c][n]);
        }
        store_some<R, NV>(head.per_value(call.out, t + c) + v0, columns, o);
        if (call.errors) store_some<R, NV>(head.per_value(call.errors, t + c) + v0, columns, e);
    }
    write_state<R, C, NV>(in, out, ld, head.K, call.decay_kind ? tile.decay : nullptr, tile.w(0, head.Kp),
                          head.Kp, writes);
}

// Columns [first, last) of one head.  The columns of a head are independent of each other: several threads
// may share it, and the `owner` writes what belongs to the head as a whole.
template <class R, int C>
void forward_head(const Head<R>& head, int first, int last, bool owner) {
    const Call& call = head.call;
    const int K = head.K, Kp = head.Kp, V = head.V;
    constexpr int TILES = (SPAN + C - 1) / C;
    const OnlineScale<R> online(head);
    scratch.reserve(sizeof(R) * (int64_t(K) * round_up(last - first, BLOCK<R>) + Kp + TILES * Tile<R, C>::size(Kp)) +
                    256);
    R* S = scratch.take<R>(int64_t(K) * round_up(last - first, BLOCK<R>));
    R* d = scratch.take<R>(Kp);
    R* rows = scratch.take<R>(TILES * Tile<R, C>::size(Kp));
    Tile<R, C> tiles[TILES];
    for (int i = 0; i < TILES; i++) tiles[i].place(rows + i * Tile<R, C>::size(Kp), Kp);

    const R* initial = call.initial_state ? head.state(call.initial_state, int64_t(K) * V) : nullptr;
    R* final = head.state(call.final_state, int64_t(K) * V);
    // A single tile of whole vectors goes from the initial to the final state with no copy in between.
    const bool direct = initial && head.length > 0 && head.length <= C && V % W<R> == 0;
    if (!direct)
        for (int v0 = first; v0 < last; v0 += BLOCK<R>)
            with_vectors(last - v0, W<R>, [&](auto nv) {
                const int columns = std::min(last - v0, BLOCK<R>);
                pack_state<R, nv>(initial ? initial + v0 : nullptr, S + int64_t(K) * (v0 - first), K, V, columns);
            });
    if (call.online) online.start(d);

    for (int64_t t = 0; t < head.length; t += SPAN) {
        const int count = int(std::min<int64_t>(SPAN, head.length - t));
        if (t && call.online && call.scale_checkpoints && owner)
            copy_row(head.checkpoint(call.scale_checkpoints, t, K), d, K, K);
        for (int c = 0; c < count; c += C)
            fill_tile<R, C>(tiles[c / C], head, online, t + c, std::min(C, count - c), d, nullptr);
        for (int v0 = first; v0 < last; v0 += BLOCK<R>)
            with_vectors(last - v0, W<R>, [&](auto nv) {
                const int columns = std::min(last - v0, BLOCK<R>);
                R* block = S + int64_t(K) * (v0 - first);
                if (direct) {
                    run_tile<R, C, nv>(tiles[0], head, 0, count, v0, columns, initial + v0, final + v0, V);
                    return;
                }
                if (t && call.state_checkpoints)
                    unpack_state<R, nv>(block, head.checkpoint(call.state_checkpoints, t, int64_t(K) * V) + v0, K,
                                        V, columns);
                for (int c = 0; c < count; c += C) {
                    if (v0 == first)
                        for (int64_t next = t + c + SPAN; next < std::min(t + c + SPAN + C, head.length); next++) {
                            prefetch_token(head, next);
                            prefetch(head.per_value(call.v, next) + first, last - first);
                        }
                    run_tile<R, C, nv>(tiles[c / C], head, t + c, std::min(C, count - c), v0, columns, block,
                                       block, nv * W<R>);
                }
            });
    }
    if (!direct)
        for (int v0 = first; v0 < last; v0 += BLOCK<R>)
            with_vectors(last - v0, W<R>, [&](auto nv) {
                const int columns = std::min(last - v0, BLOCK<R>);
                unpack_state<R, nv>(S + int64_t(K) * (v0 - first), final + v0, K, V, columns);
            });
    if (call.online && owner) copy_row(head.state(call.final_scale, K), d, K, K);
}

// --------------------------------------------------------------------------------------- phase 2, backward
template <class R>
struct BackwardSpan {
    static constexpr int C = W<R>, TILES = (SPAN + C - 1) / C;
    const Head<R>& head;
    int64_t t = 0;
    int count = 0;
    Tile<R, C> tiles[TILES];
    R *grad_state;                // [K, V] in packed blocks: of the state after the current tile
    R *d, *grad_d;                // [Kp]: the scale, and its gradient
    R *keys, *queries, *writes;   // [SPAN, Kp]: as given, queries times the output's scale
    R *scales;                    // [SPAN, Kp]: the scale before each token
    R *grad_keys, *grad_writes;   // [SPAN, Kp]
    R *grad_rows;                 // [TILES, 3, Kp, C]: gradients of k̂, q̂, ŵ, transposed
    R *grad_scores;               // [TILES, 2 C, C]: gradients of A, then of Q
    R *grad_decay;                // [TILES, K, W]: partial sums of S * dS over the columns
    R *grad_beta;                 // [SPAN, W]: partial sums of du * e over the columns
    R *states;                    // [TILES, K, BLOCK]: the state before each tile, one block of columns
    R *rows;                      // [3 C, BLOCK]: dp, do, u of a tile
    R *columns_first;             // [3, BLOCK, C]: the same, transposed

    explicit BackwardSpan(const Head<R>& h) : head(h) {
        const int64_t K = h.K, Kp = h.Kp, Vp = round_up(h.V, BLOCK<R>), tile = Tile<R, C>::size(h.Kp);
        const int64_t sizes[] = {K * Vp,         Kp,
                                 Kp,             SPAN * Kp,
                                 SPAN * Kp,      SPAN * Kp,
                                 SPAN * Kp,      SPAN * Kp, SPAN * Kp,
                                 TILES * 3 * Kp * C, TILES * 2 * C * C,
                                 TILES * K * C,  SPAN * C,
                                 TILES * K * BLOCK<R>, 3 * C * BLOCK<R>,
                                 3 * C * BLOCK<R>};
        R** const places[] = {&grad_state, &d, &grad_d, &keys, &queries, &writes, &scales, &grad_keys, &grad_writes,
                              &grad_rows, &grad_scores, &grad_decay, &grad_beta, &states, &rows,
                              &columns_first};
        int64_t bytes = 64 * TILES;
        for (int64_t n : sizes) bytes += n * sizeof(R) + 64;
        scratch.reserve(bytes + TILES * tile * sizeof(R));
        for (int i = 0; i < 16; i++) *places[i] = scratch.take<R>(sizes[i]);
        for (auto& x : tiles) x.place(scratch.take<R>(tile), h.Kp);
    }

    // Padded rows of a tile from a tensor [tokens, HV, V]; with `factor`, each times its factor.
    template <int NV>
    INLINE void load_rows(const void* x, int64_t token, int n, int v0, int columns, const R* factor, R* to) const {
        for (int c = 0; c < C; c++) {
            Vec<R> row[NV] = {};
            if (c < n) load_some<R, NV>(head.per_value(x, token + c) + v0, columns, row);
            for (int i = 0; i < NV; i++)
                store(to + (c * NV + i) * W<R>, factor ? row[i] * factor[c] : row[i]);
        }
    }

    // All tiles of the span on one block of columns, in reverse.
    template <int NV>
    void run_columns(int v0, int columns) {
        const Call& call = head.call;
        const int K = head.K, Kp = head.Kp;
        constexpr int L = NV * W<R>;
        const int last = (count - 1) / C;
        R *dp = rows, *dout = rows + C * L, *u = rows + 2 * C * L;
        R* dS = grad_state + int64_t(K) * v0;

        const int64_t size = int64_t(K) * head.V;
        const R* start = t ? head.checkpoint(call.state_checkpoints, t, size)
                           : (call.initial_state ? head.state(call.initial_state, size) : nullptr);
        pack_state<R, NV>(start ? start + v0 : nullptr, states, K, head.V, columns);
        for (int i = 0; i < last; i++) {
            load_rows<NV>(call.errors, t + i * C, C, v0, columns, tiles[i].beta, u);
            write_state<R, C, NV>(states + int64_t(i) * K * L, states + int64_t(i + 1) * K * L, L, K,
                                  call.decay_kind ? tiles[i].decay : nullptr, tiles[i].w(0, Kp), Kp, u);
        }
        for (int i = last; i >= 0; i--) {
            const Tile<R, C>& tile = tiles[i];
            const int n = std::min(C, count - i * C);
            const R* S = states + int64_t(i) * K * L;
            if (v0 == 0)
                for (int64_t before = t + i * C - SPAN; before < t + (i + 1) * C - SPAN && before >= 0; before++) {
                    prefetch_token(head, before);
                    prefetch(head.per_value(call.errors, before), head.V);
                    prefetch(head.per_value(call.grad_out, before), head.V);
                }
            load_rows<NV>(call.errors, t + i * C, n, v0, columns, tile.beta, u);
            load_rows<NV>(call.grad_out, t + i * C, n, v0, columns, nullptr, dout);

            constexpr int G = C < 8 ? C : 8;
            for (int c0 = 0; c0 < C; c0 += G) {
                Vec<R> read[G][NV];
                read_state<R, G, NV>(dS, L, K, tile.w(c0, Kp), Kp, read);
                for (int c = 0; c < G; c++)
                    for (int m = 0; m < NV; m++) store(dp + ((c0 + c) * NV + m) * W<R>, read[c][m]);
            }
            solve<NV>(tile, i * C, n, v0, columns, dp, dout);

            R *dp_t = columns_first, *do_t = dp_t + C * L, *u_t = do_t + C * L;
            transpose(dp, L, L, dp_t, C);
            transpose(dout, L, L, do_t, C);
            transpose(u, L, L, u_t, C);
            R* grads = grad_rows + int64_t(i) * 3 * Kp * C;
            contract<R, 2>(S, L, K, L, dp_t, C * L, grads, int64_t(Kp) * C);
            contract<R, 1>(dS, L, K, L, u_t, 0, grads + int64_t(2) * Kp * C, 0);
            contract<R, 1>(dp, L, 2 * C, L, u_t, 0, grad_scores + int64_t(i) * 2 * C * C, 0);
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

    // From what the state's gradient says of the writes (in dp) to the gradients of the reads, last token
    // first: du_i = dp_i + Σ_j Q_ji do_j + Σ_j A_ji dp_j, then dp_i = -beta_i du_i.
    template <int NV>
    INLINE void solve(const Tile<R, C>& tile, int offset, int n, int v0, int columns, R* dp, const R* dout) const {
        const Call& call = head.call;
        for (int c = n; c < C; c++)
            for (int m = 0; m < NV; m++) store(dp + (c * NV + m) * W<R>, Vec<R>{});
        for (int c = n - 1; c >= 0; c--) {
            Vec<R> du[NV], e[NV], dv[NV];
            for (int m = 0; m < NV; m++)
                du[m] = load(dp + (c * NV + m) * W<R>) + load(dout + (c * NV + m) * W<R>) * tile.Q[c][c];
            for (int j = c + 1; j < n; j++)
                for (int m = 0; m < NV; m++)
                    du[m] += load(dout + (j * NV + m) * W<R>) * tile.Q[j][c] +
                             load(dp + (j * NV + m) * W<R>) * tile.A[j][c];
            load_some<R, NV>(head.per_value(call.errors, t + offset + c) + v0, columns, e);
            Vec<R> sum = load(grad_beta + (offset + c) * C);
            for (int m = 0; m < NV; m++) {
                sum += du[m] * e[m];
                dv[m] = du[m] * tile.beta[c];
                store(dp + (c * NV + m) * W<R>, -dv[m]);
            }
            store(grad_beta + (offset + c) * C, sum);
            store_some<R, NV>(head.per_value(call.grad_v, t + offset + c) + v0, columns, dv);
        }
    }

    // The key side of tile i: from the gradients of rows and scores to those of q, k, w and the decay, one
    // vector of key channels at a time.  With r_ji = Γ_j / Γ_i, reader j owes Σ_i dA_ji r_ji w_i to k_j and
    // write i owes Σ_j r_ji (dA_ji k_j + dQ_ji q_j) to w_i: both by Horner's rule over the decays.
    void run_rows(int i) {
        const Call& call = head.call;
        const int n = std::min(C, count - i * C), Kp = head.Kp;
        const int64_t token = t + i * C;
        const R *dA = grad_scores + int64_t(i) * 2 * C * C, *dQ = dA + C * C;
        const bool decays = call.decay_kind != 0;
        Vec<R> whole[C] = {};  // the decay's gradients, summed over the channels
        for (int b = 0; b < Kp; b += W<R>) {
            const int width = std::min(head.K - b, W<R>);
            const int64_t at = int64_t(i) * C * Kp + b;
            Vec<R> k[C], q[C], w[C], a[C], g_k[C], g_q[C], g_w[C], pairs[C];
            load_columns(grad_rows + (int64_t(i) * 3 * Kp + b) * C, g_k);
            load_columns(grad_rows + ((int64_t(i) * 3 + 1) * Kp + b) * C, g_q);
            load_columns(grad_rows + ((int64_t(i) * 3 + 2) * Kp + b) * C, g_w);
            for (int c = 0; c < n; c++) {
                k[c] = load(keys + at + c * Kp);
                q[c] = load(queries + at + c * Kp);
                w[c] = load(writes + at + c * Kp);
                a[c] = decays ? load(tiles[i].factor + c * Kp + b) : splat<R>(1);
            }
            Vec<R> gamma = splat<R>(1);
            for (int c = 0; c < n; c++) {
                Vec<R> to_k = {}, to_q = {};
                for (int j = 0; j < c; j++) {
                    if (decays) to_k *= a[j], to_q *= a[j];
                    to_k += w[j] * dA[c * C + j];
                    to_q += w[j] * dQ[c * C + j];
                }
                if (decays) {
                    to_k *= a[c], to_q *= a[c], gamma *= a[c];
                    pairs[c] = k[c] * to_k + q[c] * to_q;
                }
                store(grad_keys + at + c * Kp, to_k + gamma * g_k[c]);
                const Vec<R> out[1] = {(to_q + gamma * g_q[c] + w[c] * dQ[c * C + c]) * R(call.scale)};
                store_some<R, 1>(head.per_key(call.grad_q, token + c) + b, width, out);
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
        for (int m = 0; m < width; m++)
            sum[m] = total<R>(load(grad_decay + (int64_t(i) * head.K + b + m) * C));
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
                store_some<R, 1>(head.per_key(call.grad_log_decay, t + i * C + c) + b, width, out);
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
        std::memset(grad_rows, 0, TILES * 3 * Kp * C * sizeof(R));
        std::memset(grad_scores, 0, TILES * 2 * C * C * sizeof(R));
        std::memset(grad_decay, 0, TILES * K * C * sizeof(R));
        std::memset(grad_beta, 0, SPAN * C * sizeof(R));
    }
};

template <class R>
void backward_head(const Head<R>& head) {
    const Call& call = head.call;
    const int K = head.K, V = head.V;
    const int64_t Kp = head.Kp, size = int64_t(K) * V;
    BackwardSpan<R> span(head);
    constexpr int C = BackwardSpan<R>::C;
    const OnlineScale<R> online(head);

    auto each_block = [&](auto&& f) {
        for (int v0 = 0; v0 < V; v0 += BLOCK<R>)
            with_vectors(V - v0, W<R>, [&](auto nv) { f(nv, v0, std::min(V - v0, BLOCK<R>)); });
    };
    each_block([&](auto nv, int v0, int columns) {
        const R* g = call.grad_final_state ? head.state(call.grad_final_state, size) + v0 : nullptr;
        pack_state<R, nv>(g, span.grad_state + int64_t(K) * v0, K, V, columns);
    });
    std::memset(span.grad_d, 0, Kp * sizeof(R));
    if (call.grad_final_scale) copy_row(span.grad_d, head.state(call.grad_final_scale, K), K, int(Kp));

    for (int64_t t = (head.length - 1) / SPAN * SPAN; head.length > 0 && t >= 0; t -= SPAN) {
        span.t = t;
        span.count = int(std::min<int64_t>(SPAN, head.length - t));
        const int tiles = (span.count + C - 1) / C;
        if (call.online) {
            if (t)
                copy_row(span.d, head.checkpoint(call.scale_checkpoints, t, K), K, int(Kp));
            else
                online.start(span.d);
        }
        for (int i = 0; i < tiles; i++) {
            const int64_t at = i * C * Kp;
            const Record<R> record{span.keys + at, span.queries + at, span.writes + at, span.scales + at};
            fill_tile<R, C>(span.tiles[i], head, online, t + i * C, std::min(C, span.count - i * C), span.d, &record);
        }
        span.clear_sums();
        each_block([&](auto nv, int v0, int columns) { span.template run_columns<nv>(v0, columns); });
        for (int i = 0; i < tiles; i++) span.run_rows(i);

        for (int c = span.count - 1; c >= 0; c--) {
            R* grad_k = span.grad_keys + c * Kp;
            const R* grad_w = span.grad_writes + c * Kp;
            *head.per_head(call.grad_beta, t + c) = total<R>(load(span.grad_beta + c * C));
            if (call.online)
                online.step_back(span.scales + c * Kp, span.keys + c * Kp, grad_w, span.grad_d, grad_k, t + c);
            else if (call.write_keys)
                copy_row(head.per_key(call.grad_write_keys, t + c), grad_w, K, K);
            else
                for (int64_t b = 0; b < Kp; b += W<R>) store(grad_k + b, load(grad_k + b) + load(grad_w + b));
            copy_row(head.per_key(call.grad_k, t + c), grad_k, K, K);
        }
    }
    if (call.grad_initial_state)
        each_block([&](auto nv, int v0, int columns) {
            unpack_state<R, nv>(span.grad_state + int64_t(K) * v0, head.state(call.grad_initial_state, size) + v0, K,
                                V, columns);
        });
    if (call.grad_initial_scale) copy_row(head.state(call.grad_initial_scale, K), span.grad_d, K, K);
}

// ------------------------------------------------------------------------------------------- phase 1 alone
template <class R>
void precondition_head(const Head<R>& head) {
    const Call& call = head.call;
    const int64_t Kp = head.Kp;
    const OnlineScale<R> online(head);
    scratch.reserve(3 * Kp * sizeof(R) + 256);
    R *d = scratch.take<R>(Kp), *key = scratch.take<R>(Kp), *w = scratch.take<R>(Kp);
    online.start(d);
    for (int64_t t = 0; t < head.length; t++) {
        if (t && t % SPAN == 0 && call.scale_checkpoints)
            copy_row(head.checkpoint(call.scale_checkpoints, t, head.K), d, head.K, head.K);
        copy_row(key, head.key(t), head.K, head.Kp);
        online.step(d, key, w, t);
        copy_row(head.per_key(call.out, t), w, head.K, head.K);
    }
    copy_row(head.state(call.final_scale, head.K), d, head.K, head.K);
}

template <class R>
void precondition_back_head(const Head<R>& head) {
    const Call& call = head.call;
    const int K = head.K;
    const int64_t Kp = head.Kp;
    const OnlineScale<R> online(head);
    scratch.reserve((4 + 2 * SPAN) * Kp * sizeof(R) + 1024);
    R *d = scratch.take<R>(Kp), *grad_d = scratch.take<R>(Kp), *grad_k = scratch.take<R>(Kp);
    R *w = scratch.take<R>(Kp), *keys = scratch.take<R>(SPAN * Kp), *scales = scratch.take<R>(SPAN * Kp);
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
            online.step(d, keys + c * Kp, w, t + c);
        }
        for (int c = count - 1; c >= 0; c--) {
            R* grad_w = w;
            copy_row(grad_w, head.per_key(call.grad_out, t + c), K, int(Kp));
            std::memset(grad_k, 0, Kp * sizeof(R));
            *head.per_head(call.grad_beta, t + c) = 0;
            online.step_back(scales + c * Kp, keys + c * Kp, grad_w, grad_d, grad_k, t + c);
            copy_row(head.per_key(call.grad_k, t + c), grad_k, K, K);
        }
    }
    if (call.grad_initial_scale) copy_row(head.state(call.grad_initial_scale, K), grad_d, K, K);
}

// ------------------------------------------------------------------------------------------------- threads
// Runs f(item) for every item; 0, or 1 when memory ran out.  Items are independent, so the result does not
// depend on how many threads share them.
template <class F>
int for_each(int64_t items, int64_t threads, F&& f) {
    int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(int(threads)) if (threads > 1) reduction(| : failed)
    for (int64_t i = 0; i < items; i++) {
        try {
            f(i);
        } catch (const std::bad_alloc&) {
            failed |= 1;
        }
    }
    return failed;
}

// A thread is worth waking for this many multiply-adds.
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

}  // namespace

// REAL is float or double: one library each, so that nobody waits for the one they do not use.
extern "C" {
int osdn_forward(const Call* call) { return forward<REAL>(*call); }
int osdn_backward(const Call* call) {
    return over_heads<REAL>(*call, 7 * call->K * call->V, backward_head<REAL>);
}
int osdn_precondition(const Call* call) { return over_heads<REAL>(*call, 8 * call->K, precondition_head<REAL>); }
int osdn_precondition_back(const Call* call) {
    return over_heads<REAL>(*call, 20 * call->K, precondition_back_head<REAL>);
}
}
