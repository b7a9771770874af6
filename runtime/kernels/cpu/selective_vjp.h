// VJP of the selective scan: walks the blocks backwards, rebuilds a few states of one at a time and keeps their decays, so that each
// exponential is taken once. Sums over channels (dB, dC) collect in a buffer of one block, folded to a quarter of the lanes so that
// it stays in the first-level cache, and are finished when the block's channels are done.
//
// Bytes: x, dt, z, dy, dx, ddt and dz once, and a kept state every 32 steps: for 16 states 1.07 times the least, and dB and dC per
// thread. Exponentials and sums over channels bound it.
#pragma once
#include <utility>

#include "selective_common.h"

namespace adjcomp {

// One step of one state: a (or a - 1), and a h. They lie together: as separate arrays they would start at equal offsets within a
// page, where a load waits for any earlier store.
template <class T> struct Cell {
  Vec<T> decay, decayed;
};

template <class T> struct VjpBlock {
  int steps, states;
  bool softplus, past;  // past: dx, ddt and dz go past the caches
  Rows<T> x, dt, z, B, C, dy, dx, ddt, dz;
  Vec<T> bias, skip;
  Ahead<T, 4, false>* reads;
  Ahead<T, 3, true>* writes;
  Cell<T>* cells;  // (s, n) of a part
  Vec<T>*dB, *dC;  // sums over channels: (part, s), the steps of a part as close together as they are joined
  Inputs<T, kKept> in;
  Vec<T> rise[kKept];                       // the slope of softplus
  Vec<T> slope[kKept], dout[kKept];         // dy times the derivative of the gate, and times the gate
  Vec<T> y[kKept], du[kKept], dlog[kKept];  // y without the skip
};

// What the gate makes of dy in a few steps, and the share of dD.
template <class T> inline void gate(VjpBlock<T>& k, int s, const Vec<T>* x, Vec<T>& dskip) {
  Vec<T> dout[kAbreast] = {}, z[kAbreast], open[kAbreast];
  if (k.dy) load_few<T>(k.dy, s, k.steps, dout);
  if (k.z) {
    load_few<T>(k.z, s, k.steps, z);
    sigmoids<T, kAbreast>(z, open);
#pragma GCC unroll 4
    for (int i = 0; i < kAbreast; ++i) {
      const Vec<T> through = z[i] * open[i];
      k.slope[s + i] = dout[i] * (open[i] + through * (T(1) - open[i]));
      dout[i] *= through;
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kAbreast; ++i) {
    k.dout[s + i] = dout[i];
    dskip += dout[i] * x[i];
  }
}

// What sums over channels are collected from: v[n] w of K states in one step; and how many steps' go into one vector.
template <class T, int K> constexpr int kTogether = K == 1 ? 1 : kFolds<T>;
template <class T, int K> inline Vec<T> product(const Vec<T>* v, const Vec<T>* w) {
  if constexpr (K == 1) return *v * *w;
  return fold<T>(v, halves<T>(w));
}

// Rebuilds K states: their decays and decayed states a h, their share of y, and dC.
template <class T, int K, Reach R> void rebuild_part(VjpBlock<T>& k, int n0, const Rate<T>* rates, Vec<T>* h, Vec<T>* dC) {
  constexpr int together = kTogether<T, K>;
  Vec<T> state[K], decay[K];
  Rate<T> own[K];
  copy_rates<T, R, K>(rates, own);
#pragma GCC unroll 4
  for (int n = 0; n < K; ++n) state[n] = h[n];
  const Rows<T> rows_of_B = k.B, rows_of_C = k.C;
  auto* ahead = k.reads;
  const auto step = [&](int s) {
    ahead->fetch();
    const T *B = rows_of_B.at(s) + n0, *C = rows_of_C.at(s) + n0;
    const Vec<T> u = k.in.u[s];
    Cell<T>* cell = k.cells + s * K;
    Vec<T> y{};
    if (n0) y = k.y[s];
    decays_of<T, R, K>(k.in.delta[s], own, decay);
#pragma GCC unroll 4
    for (int n = 0; n < K; ++n) {
      state[n] = times<T, R>(decay[n], state[n]);
      cell[n] = {decay[n], state[n]};
    }
#pragma GCC unroll 4
    for (int n = 0; n < K; ++n) state[n] += u * B[n];
    const Vec<T> share = product<T, K>(state, k.dout + s);
#pragma GCC unroll 4
    for (int n = 0; n < K; ++n) y += state[n] * C[n];
    k.y[s] = y;
    return share;
  };
  for (int s = 0; s < k.steps; s += together) {
    Vec<T> shares[together];
#pragma GCC unroll 4
    for (int i = 0; i < together; ++i) shares[i] = s + i < k.steps ? step(s + i) : Vec<T>{};
    dC[s / together] += join_folds<T, together>(shares);
  }
}

// The adjoint recurrence of K states through a block.
template <class T, int K, Reach R>
void adjoint_part(VjpBlock<T>& k, int n0, const Rate<T>* rates, Vec<T> inverse, Vec<T>* lambda, Vec<T>* dA, Vec<T>* dB) {
  constexpr int together = kTogether<T, K>;
  Vec<T> plain[K], adjoint[K], l[K], q[K], sum[K] = {};  // dA of this block alone: sums of sums lose less
#pragma GCC unroll 4
  for (int n = 0; n < K; ++n) adjoint[n] = lambda[n], plain[n] = rates[n].plain;
  const Rows<T> rows_of_B = k.B, rows_of_C = k.C;
  auto* ahead = k.writes;
  const auto step = [&](int s) {
    ahead->fetch();
    const T *B = rows_of_B.at(s) + n0, *C = rows_of_C.at(s) + n0;
    const Vec<T> delta = k.in.delta[s], g = k.dout[s];
    const Cell<T>* cell = k.cells + s * K;
    Vec<T> du{}, dlog{};
    if (n0) du = k.du[s], dlog = k.dlog[s];
#pragma GCC unroll 4
    for (int n = 0; n < K; ++n) l[n] = adjoint[n] + g * C[n];
#pragma GCC unroll 4
    for (int n = 0; n < K; ++n) adjoint[n] = times<T, R>(cell[n].decay, l[n]);
#pragma GCC unroll 4
    for (int n = 0; n < K; ++n) q[n] = l[n] * cell[n].decayed;
    const Vec<T> share = product<T, K>(l, k.in.u + s);
#pragma GCC unroll 4
    for (int n = 0; n < K; ++n) sum[n] += q[n] * delta;
#pragma GCC unroll 4
    for (int n = 0; n < K; ++n) du += l[n] * B[n], dlog += q[n] * plain[n];
    k.du[s] = du, k.dlog[s] = dlog;
    return share;
  };
  for (int s = (k.steps - 1) / together * together; s >= 0; s -= together) {
    Vec<T> shares[together];
#pragma GCC unroll 4
    for (int i = together - 1; i >= 0; --i) shares[i] = s + i < k.steps ? step(s + i) : Vec<T>{};
    dB[s / together] += join_folds<T, together>(shares);
  }
#pragma GCC unroll 4
  for (int n = 0; n < K; ++n) lambda[n] = adjoint[n], dA[n] += sum[n] * inverse;
}

// The cotangents of x, dt and z; `unit` takes δ back from the unit it was left in.
template <class T> void write_inputs_vjp(const VjpBlock<T>& k, Vec<T> unit, Vec<T>& dbias) {
  Vec<T> sum{};
  for (int s = 0; s < k.steps; ++s) {
    const Vec<T> x = load<T>(k.x.at(s)), du = k.du[s];
    Vec<T> ddt = k.dlog[s] + x * du;
    if (k.softplus) ddt *= k.rise[s];
    sum += ddt;
    if (k.ddt) store<T>(k.ddt.at(s), ddt, k.past);
    if (k.dx) store<T>(k.dx.at(s), k.in.delta[s] * unit * du + k.skip * k.dout[s], k.past);
    if (k.dz) store<T>(k.dz.at(s), k.slope[s] * (k.y[s] + k.skip * x), k.past);
  }
  dbias += sum;
}

// What one vector of channels carries from block to block.
template <class T> struct Carried {
  Decay<T> decay;
  Vec<T>*lambda, *dA;
  Vec<T> dskip, dbias;
};

template <class T, Reach R> void walk_parts(VjpBlock<T>& k, Carried<T>& c, Vec<T>* h) {
  const Vec<T> inverse = shifted(R) ? c.decay.inverse : splat<T>(T(1));
  scale<T, R>(k.in.delta, k.steps, c.decay.unit);
  each_part<T>(k.states, [&](int part, int n, auto size) {
    const Rate<T>* rates = c.decay.rates + n;
    rebuild_part<T, size.value, R>(k, n, rates, h + n, k.dC + part * kKept);
    adjoint_part<T, size.value, R>(k, n, rates, inverse, c.lambda + n, c.dA + n, k.dB + part * kKept);
  });
  write_inputs_vjp<T>(k, inverse, c.dbias);
}

template <class T> void vjp_block(VjpBlock<T>& k, Carried<T>& c, Vec<T>* h) {
  Vec<T> dskip{};
  const auto each = [&](int s, const Vec<T>* x, const Vec<T>* slopes) {
    if (k.softplus) std::copy(slopes, slopes + kAbreast, k.rise + s);
    gate<T>(k, s, x, dskip);
  };
  const Reach reach = read_inputs<T, kKept>(k.x, k.dt, k.steps, k.bias, k.softplus, c.decay, k.in, each);
  c.dskip += dskip;
  with_reach<T>(reach, [&](auto known) { walk_parts<T, known.value>(k, c, h); });
}

// Writes the sums over channels of a block as rows of dB or dC, (t, n), and clears them.
template <class T> void finish_sums(const VjpBlock<T>& k, Vec<T>* sums, T* to) {
  each_part<T>(k.states, [&](int part, int n0, auto size) {
    constexpr int together = kTogether<T, size.value>;
    for (int s = 0; s < k.steps; s += together) {
      const Vec<T> sum = std::exchange(sums[part * kKept + s / together], Vec<T>{});
      if constexpr (size.value == 1)
        to[s * k.states + n0] = sum_lanes<T>(sum);
      else
        for (int i = 0; i < together && s + i < k.steps; ++i)
          for (int n = 0; n < size.value; ++n) to[(s + i) * k.states + n0 + folded(n)] = sum[n * together + i];
    }
  });
}

template <class T> bool past_caches(const Arguments& a) {
  bool all = true;
  for (const Matrix* m : {&a.dx, &a.ddt, &a.dz}) all &= !m->data || past_caches<T>(*m, a.batch, a.steps, a.channels);
  return all;
}

template <class T> void place_block(const Walk<T, kKept>& walk, int64_t block, int64_t v, VjpBlock<T>& k) {
  const Arguments& a = walk.a;
  const Place p = walk.at(block, v);
  k.steps = p.steps, k.states = int(a.states), k.softplus = a.softplus;
  k.x = rows<T>(a.x, p), k.dt = rows<T>(a.dt, p), k.z = rows<T>(a.z, p), k.dy = rows<T>(a.dy, p);
  k.B = rows<T>(a.B, p.b, p.t0, 0), k.C = rows<T>(a.C, p.b, p.t0, 0);
  k.dx = rows<T>(a.dx, p), k.ddt = rows<T>(a.ddt, p), k.dz = rows<T>(a.dz, p);
  k.bias = per_channel<T>(a.bias, p), k.skip = per_channel<T>(a.D, p);
  k.past = past_caches<T>(a);
}

// What the block before this one needs.
template <class T> void look_ahead(const Walk<T, kKept>& walk, int64_t block, VjpBlock<T>& k) {
  const Arguments& a = walk.a;
  const Place next = walk.start(block - 1);
  k.reads->start(), k.writes->start();
  for (const Matrix* m : {&a.x, &a.dt, &a.z, &a.dy}) k.reads->add(rows<T>(*m, next), next.steps);
  for (const Matrix* m : {&a.dx, &a.ddt, &a.dz})
    if (!past_caches<T>(a)) k.writes->add(rows<T>(*m, next), next.steps);
}

// Runs one block on a vector of channels; where channels don't fill it, on copies.
template <class T> struct VectorRunner {
  Tail<T, kKept> x, dt, z, dy, dx, ddt, dz;
  void operator()(VjpBlock<T>& k, int count, Carried<T>& c, Vec<T>* h) {
    if (count == lanes<T>) return vjp_block<T>(k, c, h);
    k.past = false;
    const Rows<T> to_dx = k.dx, to_ddt = k.ddt, to_dz = k.dz;
    k.x = x.read(k.x, k.steps, count), k.dt = dt.read(k.dt, k.steps, count);
    k.z = z.read(k.z, k.steps, count), k.dy = dy.read(k.dy, k.steps, count);
    k.dx = to_dx ? dx.rows() : to_dx, k.ddt = to_ddt ? ddt.rows() : to_ddt, k.dz = to_dz ? dz.rows() : to_dz;
    vjp_block<T>(k, c, h);
    dx.write(to_dx, k.steps, count), ddt.write(to_ddt, k.steps, count), dz.write(to_dz, k.steps, count);
  }
};

template <class T> void start_vjp(const Walk<T, kKept>& walk, Rate<T>* rates, Vec<T>* memory, Carried<T>* carried) {
  const int64_t states = walk.a.states;
  for (int64_t v = walk.first; v < walk.last; ++v) {
    Carried<T>& c = carried[v - walk.first];
    Vec<T>* at = memory + 2 * (v - walk.first) * states;
    c.lambda = at, c.dA = at + states;
    c.dskip = c.dbias = Vec<T>{};
    c.decay = pack_decay<T>(walk.a, v * lanes<T>, walk.count(v), rates + (v - walk.first) * states);
    read_state<T>(walk.a, walk.a.dh_last, walk.b, v * lanes<T>, walk.count(v), c.lambda);
    std::fill(c.dA, c.dA + states, Vec<T>{});
  }
}

template <class T> void finish_vjp(const Walk<T, kKept>& walk, const Carried<T>* carried) {
  const Arguments& a = walk.a;
  for (int64_t v = walk.first; v < walk.last; ++v) {
    const Carried<T>& c = carried[v - walk.first];
    const int count = walk.count(v);
    const int64_t channel = walk.b * a.channels + v * lanes<T>;
    write_state<T>(a, a.dA, walk.b, v * lanes<T>, count, c.dA);
    write_state<T>(a, a.dh0, walk.b, v * lanes<T>, count, c.lambda);
    if (a.dD) store_some<T>(static_cast<T*>(a.dD) + channel, c.dskip, count);
    if (a.dbias) store_some<T>(static_cast<T*>(a.dbias) + channel, c.dbias, count);
  }
}

template <class T> void vjp_task(const Walk<T, kKept>& walk, int64_t group) {
  const Arguments& a = walk.a;
  const int64_t states = a.states;
  Aligned<Rate<T>> rates(walk.vectors() * states);
  Aligned<Vec<T>> memory(2 * walk.vectors() * states), h(states);
  Aligned<Cell<T>> cells(kKept * kPart<T>);
  Aligned<Vec<T>> dB(kKept * parts<T>(states)), dC(kKept * parts<T>(states));
  Aligned<Carried<T>> carried(walk.vectors());
  start_vjp<T>(walk, rates.data, memory.data, carried.data);
  VectorRunner<T> run;
  VjpBlock<T> k;
  Ahead<T, 4, false> reads(walk.vectors(), parts<T>(states));
  Ahead<T, 3, true> writes(walk.vectors(), parts<T>(states));
  k.cells = cells.data, k.dB = dB.data, k.dC = dC.data, k.reads = &reads, k.writes = &writes;
  std::fill(dB.data, dB.data + kKept * parts<T>(states), Vec<T>{});
  std::fill(dC.data, dC.data + kKept * parts<T>(states), Vec<T>{});
  for (int64_t block = walk.blocks() - 1; block >= 0; --block) {
    look_ahead<T>(walk, block, k);
    for (int64_t v = walk.first; v < walk.last; ++v) {
      place_block<T>(walk, block, v, k);
      const int count = walk.count(v);
      const T* kept = walk.kept(block, v);
      for (int64_t n = 0; n < states; ++n) h.data[n] = load_some<T>(kept + n * count, count);
      run(k, count, carried.data[v - walk.first], h.data);
    }
    const int64_t base = ((walk.b * a.groups + group) * a.steps + block * kKept) * states;
    if (a.dB) finish_sums<T>(k, k.dB, static_cast<T*>(a.dB) + base);
    if (a.dC) finish_sums<T>(k, k.dC, static_cast<T*>(a.dC) + base);
  }
  finish_stores();
  finish_vjp<T>(walk, carried.data);
}

}  // namespace adjcomp
