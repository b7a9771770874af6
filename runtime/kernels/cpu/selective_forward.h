// Forward of the selective scan: y, the last state, and the states before each block.
//
// Bytes: x, dt, z and y once, and a state every 32 steps: for 16 states 1.13 times the least. Exponentials bound it, not bytes.
#pragma once
#include "selective_common.h"

namespace adjcomp {

template <class T> struct ForwardBlock {
  int steps, states;
  Rows<T> x, dt, z, y, B, C;
  Vec<T> bias, skip;
  Ahead<T, 4>* ahead;
  Inputs<T, kKept> in;
  Vec<T> sum[kKept];
};

// K states (or `count` where K is 0) through one block; their share of y is added to `sum`, and y written by the Last of them: there,
// since stores that follow each other closely would wait for memory.
template <class T, int K, Reach R, bool Last>
void forward_part(ForwardBlock<T>& k, int n0, int count, const Rate<T>* rates, Vec<T>* h) {
  const int size = K ? K : count;
  constexpr int width = K ? 4 : 1;  // states side by side
  Vec<T> local[K ? K : 1];
#pragma GCC unroll 16
  for (int n = 0; n < K; ++n) local[n] = h[n];
  Vec<T>* state = K ? local : h;
  for (int s = 0; s < k.steps; ++s) {
    const T *B = k.B.at(s) + n0, *C = k.C.at(s) + n0;
    const Vec<T> scaled = scaled_for<T, R>(k.in.delta[s]), u = k.in.u[s];
    if (n0 == 0) k.ahead->fetch();
    Vec<T> sum[width] = {};
    sum[0] = n0 ? k.sum[s] : k.skip * k.in.x[s];
#pragma GCC unroll 16
    for (int n = 0; n < size; n += width) {
      Vec<T> decay[width];
      decays_of<T, R, width>(scaled, rates + n, decay);
#pragma GCC unroll 4
      for (int i = 0; i < width; ++i) {
        state[n + i] = times<T, R>(decay[i], state[n + i]) + u * B[n + i];
        sum[i] += state[n + i] * C[n + i];
      }
    }
    const Vec<T> y = total<T, width>(sum);
    k.sum[s] = y;
  }
#pragma GCC unroll 16
  for (int n = 0; n < K; ++n) h[n] = local[n];
}

template <class T, Reach R> void forward_parts(ForwardBlock<T>& k, const Rate<T>* rates, Vec<T>* h) {
  constexpr int part = 16;
  int n = 0;
  for (; k.states - n > part; n += part) forward_part<T, part, R, false>(k, n, part, rates + n, h + n);
  if (k.states - n == part)
    forward_part<T, part, R, true>(k, n, part, rates + n, h + n);
  else
    forward_part<T, 0, R, true>(k, n, k.states - n, rates + n, h + n);
}

template <class T> void gate_outputs(ForwardBlock<T>& k) {
  Vec<T> z[kKept], open[kAbreast];
  load_rows<T>(k.z, k.steps, z);
  few_at_a_time(k.steps, [&](int s) {
    sigmoids<T, kAbreast>(z + s, open);
#pragma GCC unroll 4
    for (int i = 0; i < kAbreast; ++i) k.sum[s + i] *= z[s + i] * open[i];
  });
}

template <class T> void forward_block(ForwardBlock<T>& k, bool softplus, const Decay<T>& decay, Vec<T>* h) {
  const Reach reach = read_inputs<T, kKept>(k.x, k.dt, k.steps, k.bias, softplus, decay, k.in);
  with_reach<T>(reach, [&](auto known) { forward_parts<T, known.value>(k, decay.rates, h); });
  if (k.z) gate_outputs<T>(k);
  for (int s = 0; s < k.steps; ++s) store<T>(k.y.at(s), k.sum[s]);
}

template <class T> void forward_task(const Walk<T, kKept>& walk) {
  const Arguments& a = walk.a;
  const int64_t states = a.states;
  Aligned<Rate<T>> rates(walk.vectors() * states);
  Aligned<Vec<T>> h(walk.vectors() * states);
  Aligned<Decay<T>> decays(walk.vectors());
  Tail<T, kKept> x, dt, z, y;
  Ahead<T, 4> ahead(walk.vectors());
  ForwardBlock<T> k;
  k.ahead = &ahead;
  for (int64_t v = walk.first; v < walk.last; ++v) {
    const int64_t at = v - walk.first;
    decays.data[at] = pack_decay<T>(a, v * lanes<T>, walk.count(v), rates.data + at * states);
    read_state<T>(a, a.h0, walk.b, v * lanes<T>, walk.count(v), h.data + at * states);
  }
  for (int64_t block = 0; block <= walk.blocks(); ++block) {
    const Place next = walk.start(block + 1);
    ahead.start();
    for (const Matrix* m : {&a.x, &a.dt, &a.z, &a.y}) ahead.add(rows<T>(*m, next), next.steps, m == &a.y);
    for (int64_t v = walk.first; v < walk.last; ++v) {
      const int64_t at = v - walk.first, count = walk.count(v);
      Vec<T>* state = h.data + at * states;
      T* kept = walk.kept(block, v);
      for (int64_t n = 0; n < states; ++n) store_some<T>(kept + n * count, state[n], int(count));
      if (block == walk.blocks()) continue;
      const Place p = walk.at(block, v);
      k.steps = p.steps, k.states = int(states);
      k.x = rows<T>(a.x, p), k.dt = rows<T>(a.dt, p), k.z = rows<T>(a.z, p), k.y = rows<T>(a.y, p);
      k.B = rows<T>(a.B, p.b, p.t0, 0), k.C = rows<T>(a.C, p.b, p.t0, 0);
      k.bias = per_channel<T>(a.bias, p), k.skip = per_channel<T>(a.D, p);
      const Rows<T> out = k.y;
      const bool partial = p.count < lanes<T>;
      if (partial) {
        k.x = x.read(k.x, p.steps, p.count), k.dt = dt.read(k.dt, p.steps, p.count), k.z = z.read(k.z, p.steps, p.count);
        k.y = y.rows();
      }
      forward_block<T>(k, a.softplus, decays.data[at], state);
      if (partial) y.write(out, p.steps, p.count);
    }
  }
  for (int64_t v = walk.first; v < walk.last; ++v)
    write_state<T>(a, a.h_last, walk.b, v * lanes<T>, walk.count(v), h.data + (v - walk.first) * states);
}

}  // namespace adjcomp
