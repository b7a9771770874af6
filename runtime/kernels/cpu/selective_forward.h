// Forward of the selective scan: y, the last state, and the states before each block.
//
// Bytes: x, dt, z and y once, and a state every 32 steps: for 16 states 1.13 times the least. Exponentials bound it, not bytes.
#pragma once
#include "selective_common.h"

namespace adjcomp {

template <class T> struct ForwardBlock {
  int steps, states;
  bool past;  // y goes past the caches, as kept states do
  Rows<T> x, dt, z, y, B, C;
  Vec<T> bias, skip;
  Ahead<T, 3, false>* reads;
  Ahead<T, 1, true>* writes;
  Inputs<T, kKept> in;
  Vec<T> sum[kKept];
};

// K states through one block; their share of y is added to `sum`. All that a step needs of them stays in registers, and each level of
// the states' chains of operations stands together.
template <class T, int K, Reach R> void forward_part(ForwardBlock<T>& k, int n0, const Rate<T>* rates, Vec<T>* h) {
  Vec<T> state[K], decay[K];
  Rate<T> own[K];
  copy_rates<T, R, K>(rates, own);
#pragma GCC unroll 4
  for (int n = 0; n < K; ++n) state[n] = h[n];
  const Rows<T> rows_of_B = k.B, rows_of_C = k.C;
  auto* reads = k.reads;
  auto* writes = k.writes;
  for (int s = 0; s < k.steps; ++s) {
    const T *B = rows_of_B.at(s) + n0, *C = rows_of_C.at(s) + n0;
    const Vec<T> u = k.in.u[s];
    reads->fetch();
    if (n0 == 0) writes->fetch();
    decays_of<T, R, K>(k.in.delta[s], own, decay);
    Vec<T> sum = k.sum[s];
#pragma GCC unroll 4
    for (int n = 0; n < K; ++n) state[n] = times<T, R>(decay[n], state[n]);
#pragma GCC unroll 4
    for (int n = 0; n < K; ++n) state[n] += u * B[n];
#pragma GCC unroll 4
    for (int n = 0; n < K; ++n) sum += state[n] * C[n];
    k.sum[s] = sum;
  }
#pragma GCC unroll 4
  for (int n = 0; n < K; ++n) h[n] = state[n];
}

template <class T, Reach R> void forward_parts(ForwardBlock<T>& k, const Decay<T>& decay, Vec<T>* h) {
  scale<T, R>(k.in.delta, k.steps, decay.unit);
  each_part<T>(k.states, [&](int, int n, auto size) { forward_part<T, size.value, R>(k, n, decay.rates + n, h + n); });
}

template <class T> void write_outputs(const ForwardBlock<T>& k) {
  for (int s = 0; s < k.steps; s += kAbreast) {
    Vec<T> z[kAbreast], y[kAbreast], open[kAbreast];
#pragma GCC unroll 4
    for (int i = 0; i < kAbreast; ++i) y[i] = k.sum[s + i];
    if (k.z) {
      load_few<T>(k.z, s, k.steps, z);
      sigmoids<T, kAbreast>(z, open);
#pragma GCC unroll 4
      for (int i = 0; i < kAbreast; ++i) y[i] *= z[i] * open[i];
    }
#pragma GCC unroll 4
    for (int i = 0; i < kAbreast; ++i)
      if (s + i < k.steps) store<T>(k.y.at(s + i), y[i], k.past);
  }
}

template <class T> void forward_block(ForwardBlock<T>& k, bool softplus, const Decay<T>& decay, Vec<T>* h) {
  const auto each = [&](int s, const Vec<T>* x, const Vec<T>*) {
#pragma GCC unroll 4
    for (int i = 0; i < kAbreast; ++i) k.sum[s + i] = k.skip * x[i];
  };
  const Reach reach = read_inputs<T, kKept>(k.x, k.dt, k.steps, k.bias, softplus, decay, k.in, each);
  with_reach<T>(reach, [&](auto known) { forward_parts<T, known.value>(k, decay, h); });
  write_outputs<T>(k);
}

template <class T> void forward_task(const Walk<T, kKept>& walk) {
  const Arguments& a = walk.a;
  const int64_t states = a.states;
  Aligned<Rate<T>> rates(walk.vectors() * states);
  Aligned<Vec<T>> h(walk.vectors() * states);
  Aligned<Decay<T>> decays(walk.vectors());
  Tail<T, kKept> x, dt, z, y;
  Ahead<T, 3, false> reads(walk.vectors(), parts<T>(states));
  Ahead<T, 1, true> writes(walk.vectors(), 1);
  ForwardBlock<T> k;
  k.reads = &reads, k.writes = &writes;
  const bool past = past_caches<T>(a.y, a.batch, a.steps, a.channels);
  for (int64_t v = walk.first; v < walk.last; ++v) {
    const int64_t at = v - walk.first;
    decays.data[at] = pack_decay<T>(a, v * lanes<T>, walk.count(v), rates.data + at * states);
    read_state<T>(a, a.h0, walk.b, v * lanes<T>, walk.count(v), h.data + at * states);
  }
  for (int64_t block = 0; block <= walk.blocks(); ++block) {
    const Place next = walk.start(block + 1);
    reads.start(), writes.start();
    for (const Matrix* m : {&a.x, &a.dt, &a.z}) reads.add(rows<T>(*m, next), next.steps);
    if (!past) writes.add(rows<T>(a.y, next), next.steps);
    for (int64_t v = walk.first; v < walk.last; ++v) {
      const int64_t at = v - walk.first, count = walk.count(v);
      Vec<T>* state = h.data + at * states;
      T* kept = walk.kept(block, v);
      for (int64_t n = 0; n < states; ++n)
        count == lanes<T> ? store<T>(kept + n * count, state[n], past) : store_some<T>(kept + n * count, state[n], int(count));
      if (block == walk.blocks()) continue;
      const Place p = walk.at(block, v);
      k.steps = p.steps, k.states = int(states);
      k.x = rows<T>(a.x, p), k.dt = rows<T>(a.dt, p), k.z = rows<T>(a.z, p), k.y = rows<T>(a.y, p);
      k.B = rows<T>(a.B, p.b, p.t0, 0), k.C = rows<T>(a.C, p.b, p.t0, 0);
      k.bias = per_channel<T>(a.bias, p), k.skip = per_channel<T>(a.D, p);
      const Rows<T> out = k.y;
      const bool partial = p.count < lanes<T>;
      k.past = past && !partial;
      if (partial) {
        k.x = x.read(k.x, p.steps, p.count), k.dt = dt.read(k.dt, p.steps, p.count), k.z = z.read(k.z, p.steps, p.count);
        k.y = y.rows();
      }
      forward_block<T>(k, a.softplus, decays.data[at], state);
      if (partial) y.write(out, p.steps, p.count);
    }
  }
  finish_stores();
  for (int64_t v = walk.first; v < walk.last; ++v)
    write_state<T>(a, a.h_last, walk.b, v * lanes<T>, walk.count(v), h.data + (v - walk.first) * states);
}

}  // namespace adjcomp
