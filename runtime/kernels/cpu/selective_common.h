// What the selective scan and its VJP share: arguments, the walk over blocks, decays and states as vectors.
//
// Channels are SIMD lanes. A block is a few steps of one vector of channels; its states stay in registers or L1.
//
// Legend: b batch, t time, d channels, n states; s step of a block, v vector of channels.
#pragma once
#include "activations.h"
#include "arguments.h"
#include "simd.h"

namespace adjcomp {

constexpr int kKept = 32;  // a state is kept every so many steps: CHECKPOINT_STEPS of adjcomp.ops.selective
constexpr double kLn2 = 0.693147180559945309417232121458;

struct Arguments {  // mirrors Arguments of selective_scan.py; pointers are null where an argument is absent
  int64_t batch, steps, channels, states, groups, threads, softplus;
  Matrix x, dt, B, C, z, y, dy, dx, ddt, dz;
  void *A, *D, *bias, *h0, *h_last, *kept, *dh_last;
  void *dA, *dB, *dC, *dD, *dbias, *dh0;  // dA, dD, dbias: one per batch; dB, dC of tasks: (batch, groups, time, n)
};

// Where a block is: `steps` steps from t0, `count` channels from d0.
struct Place {
  int64_t b, t0, d0;
  int steps, count;
};

// The blocks of one task: channels first .. last - 1 (in vectors) of batch b.
template <class T, int Steps> struct Walk {
  const Arguments& a;
  int64_t b, first, last;
  int64_t blocks() const { return (a.steps + Steps - 1) / Steps; }
  int64_t vectors() const { return last - first; }
  int count(int64_t v) const { return int(std::min<int64_t>(lanes<T>, a.channels - v * lanes<T>)); }
  Place at(int64_t block, int64_t v) const {
    return {b, block * Steps, v * lanes<T>, int(std::min<int64_t>(Steps, a.steps - block * Steps)), count(v)};
  }
  // The first vector of a block; of no steps where there is no such block.
  Place start(int64_t block) const { return block >= 0 && block < blocks() ? at(block, first) : Place{b, 0, 0, 0, 0}; }
  // A kept state, (n, lanes) for each vector of channels in turn; the last of them is the final state.
  int64_t kept_count() const { return (a.steps + kKept - 1) / kKept + 1; }
  T* kept(int64_t index, int64_t v) const {
    return static_cast<T*>(a.kept) + ((b * kept_count() + index) * a.channels + v * lanes<T>) * a.states;
  }
};

template <class T> inline Rows<T> rows(const Matrix& m, const Place& p) { return rows<T>(m, p.b, p.t0, p.d0); }

// One value per channel (D, the bias of dt), zeros where absent.
template <class T> inline Vec<T> per_channel(const void* from, const Place& p) {
  return from ? load_some<T>(static_cast<const T*>(from) + p.d0, p.count) : Vec<T>{};
}

// Memory orders of a state: (batch, d, n) outside, vectors (n, v) inside.
template <class T> void read_state(const Arguments& a, const void* from, int64_t b, int64_t d0, int count, Vec<T>* state) {
  for (int64_t n = 0; n < a.states; ++n) {
    alignas(64) T v[lanes<T>] = {};
    for (int i = 0; from && i < count; ++i) v[i] = static_cast<const T*>(from)[(b * a.channels + d0 + i) * a.states + n];
    state[n] = load<T>(v);
  }
}
template <class T> void write_state(const Arguments& a, void* to, int64_t b, int64_t d0, int count, const Vec<T>* state) {
  for (int i = 0; to && i < count; ++i)
    for (int64_t n = 0; n < a.states; ++n) static_cast<T*>(to)[(b * a.channels + d0 + i) * a.states + n] = state[n][i];
}

// What is known of the exponents of a block: it decides how a decay a is computed, and in which form it is multiplied with.
enum class Reach {
  kShort,   // float only: -1.5 <= log2 a <= 0 or NaN. a - 1 is one polynomial
  kDouble,  // float only: -3 <= log2 a <= 0 or NaN. The same for the square root of a
  kNormal,  // a is a normal number
  kAny,     // a may also be 0 or infinity
};
constexpr bool shifted(Reach r) { return r == Reach::kShort || r == Reach::kDouble; }  // whether a - 1 stands for a

// (e^w - 1) / w for -1.5 ln 2 <= w <= 0, minimax (8e-8).
constexpr double kGrowth[] = {0.9999999215551496,   0.49999444717195735,  0.1666028548011162,
                              0.041396688734065594, 0.0078088635244312485, 0.0008998907733797784};

// One state's A of a vector of channels, and A log2 e.
template <class T> struct Rate {
  Vec<T> plain, log2;
};

// The rates of one vector of channels, (n), and the extremes of A log2 e per channel.
template <class T> struct Decay {
  Rate<T>* rates;
  Vec<T> low, high;
};
template <class T> Decay<T> pack_decay(const Arguments& a, int64_t d0, int count, Rate<T>* rates) {
  Decay<T> decay{rates, Vec<T>{}, Vec<T>{}};
  const T* A = static_cast<const T*>(a.A);
  for (int64_t n = 0; n < a.states; ++n) {
    alignas(64) T plain[lanes<T>] = {}, log2[lanes<T>] = {};
    for (int i = 0; i < count; ++i) {
      plain[i] = A[(d0 + i) * a.states + n];
      log2[i] = T(double(plain[i]) * (1 / kLn2));
    }
    rates[n].plain = load<T>(plain), rates[n].log2 = load<T>(log2);
    decay.low = rates[n].log2 < decay.low ? rates[n].log2 : decay.low;
    decay.high = rates[n].log2 > decay.high ? rates[n].log2 : decay.high;
  }
  return decay;
}

template <class T, Reach R> inline Vec<T> scaled_for(Vec<T> delta) { return R == Reach::kDouble ? delta * T(0.5) : delta; }

// a = e^(δ A), or a - 1 where `shifted`, which loses less in slow states; `scaled` is δ as `scaled_for` leaves it for
// this reach.
template <class T, Reach R> inline Vec<T> decay_of(Vec<T> scaled, const Rate<T>& rate) {
  if constexpr (!shifted(R)) return exp2_product<T, R == Reach::kNormal>(scaled, rate.log2);
  const Vec<T> v = scaled * rate.plain;
  Vec<T> q = splat<T>(T(kGrowth[5]));
#pragma GCC unroll 5
  for (int k = 4; k >= 0; --k) q = q * v + T(kGrowth[k]);
  const Vec<T> w = q * v;
  return R == Reach::kShort ? w : w * w + (w + w);
}
// The same of `count` states, step by step side by side: each alone is a chain of dependent operations.
template <class T, Reach R, int count> inline void decays_of(Vec<T> scaled, const Rate<T>* rates, Vec<T>* out) {
  if constexpr (!shifted(R) || count == 1) {
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) out[i] = decay_of<T, R>(scaled, rates[i]);
  } else {
    Vec<T> v[count];
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) v[i] = scaled * rates[i].plain, out[i] = splat<T>(T(kGrowth[5]));
#pragma GCC unroll 5
    for (int k = 4; k >= 0; --k)
#pragma GCC unroll 4
      for (int i = 0; i < count; ++i) out[i] = out[i] * v[i] + T(kGrowth[k]);
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) out[i] *= v[i];
#pragma GCC unroll 4
    for (int i = 0; i < count && R == Reach::kDouble; ++i) out[i] = out[i] * out[i] + (out[i] + out[i]);
  }
}
template <class T, int count> inline Vec<T> total(const Vec<T>* sum) {
  if constexpr (count == 4) return (sum[0] + sum[1]) + (sum[2] + sum[3]);
  return sum[0];
}
template <class T, Reach R> inline Vec<T> times(Vec<T> decay, Vec<T> v) { return shifted(R) ? decay * v + v : decay * v; }

// What the steps of a block read: δ, x and δ x.
template <class T, int Steps> struct Inputs {
  Vec<T> delta[Steps], x[Steps], u[Steps];
};

// From the largest |log2 a|, the least δ and the largest A log2 e of each channel.
template <class T> inline Reach reach_of(Vec<T> most, Vec<T> least_delta, Vec<T> most_rate) {
  if (std::is_same<T, float>::value && all_lanes((most <= T(3)) & (least_delta >= T(0)) & (most_rate <= T(0))))
    return all_lanes(most <= T(1.5)) ? Reach::kShort : Reach::kDouble;
  return all_lanes(most < Format<T>::high - T(2)) ? Reach::kNormal : Reach::kAny;
}

// Calls `run` with the reach as a type.
template <Reach R> using Known = std::integral_constant<Reach, R>;
template <class T, class F> void with_reach(Reach reach, F run) {
  if constexpr (std::is_same<T, float>::value) {
    if (reach == Reach::kShort) return run(Known<Reach::kShort>());
    if (reach == Reach::kDouble) return run(Known<Reach::kDouble>());
  }
  if (reach == Reach::kNormal) return run(Known<Reach::kNormal>());
  run(Known<Reach::kAny>());
}

constexpr int kAbreast = 4;  // steps whose activations are taken side by side

// Calls `run` with the first of every few steps; arrays have room for all of them.
template <class F> inline void few_at_a_time(int steps, F run) {
  for (int s = 0; s < steps; s += kAbreast) run(s);
}
// The rows of a block, and zeros where the last few steps aren't complete.
template <class T> inline void load_rows(const Rows<T>& from, int steps, Vec<T>* to) {
  for (int s = 0; s < steps; ++s) to[s] = load<T>(from.at(s));
  for (int s = steps; s % kAbreast; ++s) to[s] = Vec<T>{};
}

// The slopes of softplus as well where `slopes` isn't null.
template <class T, int Steps>
Reach read_inputs(const Rows<T>& x, const Rows<T>& dt, int steps, Vec<T> bias, bool softplus, const Decay<T>& decay,
                  Inputs<T, Steps>& in, Vec<T>* slopes = nullptr) {
  Vec<T> low{}, high{};
  load_rows<T>(x, steps, in.x);
  load_rows<T>(dt, steps, in.delta);
  for (int s = 0; s < steps; ++s) in.delta[s] += bias;
  if (softplus && slopes)
    few_at_a_time(steps, [&](int s) { softpluses<T, kAbreast>(in.delta + s, in.delta + s, slopes + s); });
  else if (softplus)
    few_at_a_time(steps, [&](int s) { softpluses<T, kAbreast>(in.delta + s, in.delta + s, nullptr); });
  for (int s = 0; s < steps; ++s) {
    const Vec<T> delta = in.delta[s];
    in.u[s] = delta * in.x[s];
    low = delta < low ? delta : low;
    high = delta > high ? delta : high;
  }
  return reach_of<T>((high - low) * (decay.high - decay.low), low, decay.high);
}

}  // namespace adjcomp
