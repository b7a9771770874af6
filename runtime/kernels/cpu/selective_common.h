// What the selective scan and its VJP share: arguments, the walk over blocks, decays and states as vectors.
//
// Channels are SIMD lanes. A block is a few steps of one vector of channels; its states stay in registers or L1.
//
// Legend: b batch, t time, d channels, n states; s step of a block, v vector of channels.
#pragma once
#include "arguments.h"
#include "simd.h"

namespace adjcomp {

constexpr int kKept = 32;  // a state is kept every so many steps: CHECKPOINT_STEPS of adjcomp.ops.selective
constexpr double kLn2 = 0.693147180559945309417232121458;

struct Arguments {  // mirrors Arguments of selective_scan.py; pointers are null where an argument is absent
  int64_t batch, steps, channels, states, groups, threads, softplus;
  Matrix x, dt, B, C, z, y, dy, dx, ddt, dz;
  void *A, *D, *bias, *h0, *h_last, *kept, *dh_last;
  void *dA, *dB, *dC, *dD, *dbias, *dh0;  // dB, dC: (batch, groups, time, n); dA, dD, dbias: one per batch
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
    Vec<T> v{};
    for (int i = 0; from && i < count; ++i) v[i] = static_cast<const T*>(from)[(b * a.channels + d0 + i) * a.states + n];
    state[n] = v;
  }
}
template <class T> void write_state(const Arguments& a, void* to, int64_t b, int64_t d0, int count, const Vec<T>* state) {
  for (int i = 0; to && i < count; ++i)
    for (int64_t n = 0; n < a.states; ++n) static_cast<T*>(to)[(b * a.channels + d0 + i) * a.states + n] = state[n][i];
}

// A log2 e of one vector of channels, (n, v), and its extremes per channel.
template <class T> struct Decay {
  Vec<T>* packed;
  Vec<T> low, high;
};
template <class T> Decay<T> pack_decay(const Arguments& a, int64_t d0, int count, Vec<T>* packed) {
  read_state<T>(a, a.A, 0, d0, count, packed);
  Decay<T> decay{packed, {}, {}};
  for (int64_t n = 0; n < a.states; ++n) {
    for (int i = 0; i < count; ++i) packed[n][i] = T(double(packed[n][i]) / kLn2);
    decay.low = packed[n] < decay.low ? packed[n] : decay.low;
    decay.high = packed[n] > decay.high ? packed[n] : decay.high;
  }
  return decay;
}

// What the steps of a block read: raw step sizes, δ, x and δ x.
template <class T, int Steps> struct Inputs {
  Vec<T> raw[Steps], delta[Steps], x[Steps], u[Steps];
};

template <class T, int Steps>
Reach read_inputs(const Rows<T>& x, const Rows<T>& dt, int steps, Vec<T> bias, bool softplus, const Decay<T>& decay,
                  Inputs<T, Steps>& in) {
  Vec<T> low{}, high{};
  for (int s = 0; s < steps; ++s) {
    in.x[s] = load<T>(x.at(s));
    in.raw[s] = load<T>(dt.at(s)) + bias;
  }
  for (int s = 0; s < steps; ++s) {
    const Vec<T> delta = softplus ? adjcomp::softplus<T>(in.raw[s]) : in.raw[s];
    in.delta[s] = delta;
    in.u[s] = delta * in.x[s];
    low = delta < low ? delta : low;
    high = delta > high ? delta : high;
  }
  const Vec<T> reach = (high - low) * (decay.high - decay.low);
  if (std::is_same<T, float>::value && all_lanes((reach <= T(2)) & (low >= T(0)) & (decay.high <= T(0)))) return Reach::kNarrow;
  return all_lanes(reach < Format<T>::high - T(2)) ? Reach::kNormal : Reach::kAny;
}

}  // namespace adjcomp
