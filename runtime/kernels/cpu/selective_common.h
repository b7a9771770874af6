// What the selective scan and its VJP share: arguments, the walk over blocks, decays and states as vectors.
//
// Channels are SIMD lanes. A block is a few steps of one vector of channels; its states stay in registers or L1.
//
// Legend: b batch, t time, d channels, n states; s step of a block, v vector of channels.
#pragma once
#include <limits>

#include "activations.h"
#include "arguments.h"
#include "folds.h"

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

// (e^w - 1) / w for -1.5 ln 2 <= w <= 0, minimax (8e-8), lowest power first.
constexpr double kGrowth[] = {0.9999999215551496,   0.49999444717195735,  0.1666028548011162,
                              0.041396688734065594, 0.0078088635244312485, 0.0008998907733797784};
template <class T> constexpr int kTerms = std::is_same<T, float>::value ? 6 : 0;

// One state's A of a vector of channels, A log2 e, and the polynomial of e^(δ A) - 1 in δ: its coefficients are those of `kGrowth`
// times powers of A, so that δ A itself is never taken.
template <class T> struct Rate {
  Vec<T> plain, log2, growth[kTerms<T> + 1];
};

// The rates of one vector of channels, (n), and the extremes of A log2 e per channel. Powers of A are taken in `unit`, a power of two
// near a channel's largest |A|, and δ in its inverse: they stay in range.
template <class T> struct Decay {
  Rate<T>* rates;
  Vec<T> low, high, unit, inverse;
};

// The power of two at or below each of these positive numbers, of which the least and largest are cut.
inline VecFloat power_below(VecFloat v) {
  const VecFloat cut = clamp<float>(v, 0x1p-120f, 0x1p120f);
  VecInt bits;
  std::memcpy(&bits, &cut, sizeof bits);
  bits &= 0x7f800000;
  std::memcpy(&v, &bits, sizeof bits);
  return v;
}
inline VecDouble power_below(VecDouble) { return splat<double>(1); }

template <class T> void pack_growth(const Decay<T>& decay, int64_t states) {
  for (int64_t n = 0; n < states; ++n) {
    const Vec<T> rate = decay.rates[n].plain * decay.inverse;
    Vec<T> power = rate;
    for (int k = 0; k < kTerms<T>; ++k, power *= rate) {
      const Vec<T> term = power * T(kGrowth[k]);  // none is subnormal: products of such take a hundred times as long
      decay.rates[n].growth[k] = (term < 0 ? -term : term) < std::numeric_limits<T>::min() ? Vec<T>{} : term;
    }
  }
}
template <class T> Decay<T> pack_decay(const Arguments& a, int64_t d0, int count, Rate<T>* rates) {
  Decay<T> decay{rates, Vec<T>{}, Vec<T>{}, Vec<T>{}, Vec<T>{}};
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
  decay.unit = power_below(decay.high - decay.low);
  decay.inverse = T(1) / decay.unit;
  pack_growth<T>(decay, a.states);
  return decay;
}

// Copies the rates of `count` states as this reach wants them: the polynomials of the square root where it takes that.
template <class T, Reach R, int count> inline void copy_rates(const Rate<T>* from, Rate<T>* to) {
#pragma GCC unroll 4
  for (int i = 0; i < count; ++i) {
    to[i] = from[i];
    T half = T(0.5);
#pragma GCC unroll 6
    for (int k = 0; k < kTerms<T> && R == Reach::kDouble; ++k, half *= T(0.5)) to[i].growth[k] *= half;
  }
}

// a = e^(δ A), or a - 1 where `shifted`, which loses less in slow states, of `count` states; δ is in the channel's unit where
// `shifted`. Level by level: each decay alone is a chain of dependent operations.
template <class T, Reach R, int count> inline void decays_of(Vec<T> delta, const Rate<T>* rates, Vec<T>* out) {
  if constexpr (!shifted(R)) {
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) out[i] = exp2_product<T, R == Reach::kNormal>(delta, rates[i].log2);
  } else {
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) out[i] = delta * rates[i].growth[5] + rates[i].growth[4];
#pragma GCC unroll 4
    for (int k = 3; k >= 0; --k)
#pragma GCC unroll 4
      for (int i = 0; i < count; ++i) out[i] = out[i] * delta + rates[i].growth[k];
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) out[i] *= delta;
#pragma GCC unroll 4
    for (int i = 0; i < count && R == Reach::kDouble; ++i) out[i] = out[i] * out[i] + (out[i] + out[i]);
  }
}
template <class T, Reach R> inline Vec<T> times(Vec<T> decay, Vec<T> v) { return shifted(R) ? decay * v + v : decay * v; }

// What the states read of a block's steps: δ, in the channel's unit where the block's reach is `shifted`, and δ x.
template <class T, int Steps> struct Inputs {
  Vec<T> delta[Steps], u[Steps];
};
template <class T, Reach R> inline void scale(Vec<T>* deltas, int steps, Vec<T> unit) {
  for (int s = 0; s < steps && shifted(R); ++s) deltas[s] *= unit;
}

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

template <class T> constexpr int kPart = can_fold<T> ? 4 : 1;  // states that go through a block together

// Calls `run` with each part's index, its first state, and its size as a type.
template <class T, class F> inline void each_part(int64_t states, F run) {
  int part = 0, n = 0;
  for (; states - n >= kPart<T>; n += kPart<T>) run(part++, n, std::integral_constant<int, kPart<T>>());
  for (; n < states; ++n) run(part++, n, std::integral_constant<int, 1>());
}
template <class T> inline int64_t parts(int64_t states) { return states / kPart<T> + states % kPart<T>; }

constexpr int kAbreast = 4;  // steps whose activations are taken side by side

// Rows s .. s + kAbreast - 1; zeros where there are none.
template <class T> inline void load_few(const Rows<T>& from, int s, int steps, Vec<T>* to) {
  const bool all = s + kAbreast <= steps;
#pragma GCC unroll 4
  for (int i = 0; i < kAbreast; ++i) to[i] = all || s + i < steps ? load<T>(from.at(s + i)) : Vec<T>{};
}

// Reads x and dt, and calls `each` with the first of every few steps, their x, and the slopes of softplus.
template <class T, int Steps, class F>
inline Reach read_inputs(const Rows<T>& x, const Rows<T>& dt, int steps, Vec<T> bias, bool softplus, const Decay<T>& decay,
                         Inputs<T, Steps>& in, F each) {
  Vec<T> low{}, high{};
  for (int s = 0; s < steps; s += kAbreast) {  // the arrays have room for whole multiples
    Vec<T> few[kAbreast], delta[kAbreast], slope[kAbreast];
    load_few<T>(x, s, steps, few);
    load_few<T>(dt, s, steps, delta);
#pragma GCC unroll 4
    for (int i = 0; i < kAbreast; ++i) delta[i] += bias;
    if (softplus) softpluses<T, kAbreast>(delta, delta, slope);
#pragma GCC unroll 4
    for (int i = 0; i < kAbreast; ++i) {
      in.delta[s + i] = delta[i];
      in.u[s + i] = delta[i] * few[i];
      low = delta[i] < low ? delta[i] : low;
      high = delta[i] > high ? delta[i] : high;
    }
    each(s, few, slope);
  }
  return reach_of<T>((high - low) * (decay.high - decay.low), low, decay.high);
}

}  // namespace adjcomp
