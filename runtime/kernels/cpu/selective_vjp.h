// VJP of the selective scan: walks the blocks backwards, rebuilds a few states of one at a time and keeps their decays, so that each
// exponential is taken once. Sums over channels (dB, dC) collect lane by lane in a buffer of one block and are folded when the
// block's channels are done.
//
// Bytes: x, dt, z, dy, dx, ddt and dz once, and a kept state every 32 steps: for 16 states 1.07 times the least, and dB and dC per
// thread. Exponentials and sums over channels bound it.
#pragma once
#include "selective_common.h"

namespace adjcomp {

constexpr int kPart = 4;  // states that are rebuilt and walked back together: through a block their decays stay in L1

// One step of one state: a (or a - 1), and a h. They lie together: as separate arrays they would start at equal offsets within a
// page, where a load waits for any earlier store.
template <class T> struct Cell {
  Vec<T> decay, decayed;
};
// The lane sums of one step of one state.
template <class T> struct Sums {
  Vec<T> dB, dC;
};

template <class T> struct VjpBlock {
  int steps, states;
  bool softplus;
  Rows<T> x, dt, z, B, C, dy, dx, ddt, dz;
  Vec<T> bias, skip;
  Ahead<T, 4>* reads;
  Ahead<T, 3>* writes;
  Cell<T>* cells;  // (s, n) of a part
  Sums<T>* sums;   // (part, s, n)
  Inputs<T, kKept> in;
  Vec<T> rise[kKept];   // the slope of softplus
  Vec<T> slope[kKept];  // dy times the derivative of the gate
  Vec<T> y[kKept], dout[kKept], du[kKept], dlog[kKept];
};

// The cotangent before the gate, for each step.
template <class T> void gate(VjpBlock<T>& k, Vec<T>& dskip) {
  Vec<T> z[kKept], open[kKept], sum{};
  for (int s = 0; s < k.steps; ++s) k.dout[s] = k.dy ? load<T>(k.dy.at(s)) : Vec<T>{};
  if (k.z) {
    load_rows<T>(k.z, k.steps, z);
    few_at_a_time(k.steps, [&](int s) { sigmoids<T, kAbreast>(z + s, open + s); });
    for (int s = 0; s < k.steps; ++s) {
      k.slope[s] = k.dout[s] * open[s] * (T(1) + z[s] * (T(1) - open[s]));
      k.dout[s] *= z[s] * open[s];
    }
  }
  for (int s = 0; s < k.steps; ++s) {
    sum += k.dout[s] * k.in.x[s];
    k.y[s] = k.skip * k.in.x[s];
  }
  dskip += sum;
}

// Rebuilds K states (or `count`): their decays and decayed states a h, their share of y, and dC.
template <class T, int K, Reach R> void rebuild_part(VjpBlock<T>& k, int n0, int count, const Rate<T>* rates, Vec<T>* h) {
  const int size = K ? K : count;
  Vec<T> local[K ? K : 1];
#pragma GCC unroll 4
  for (int n = 0; n < K; ++n) local[n] = h[n];
  Vec<T>* state = K ? local : h;
  Cell<T>* cells = k.cells;
  Sums<T>* sums = k.sums + n0 * kKept;
  for (int s = 0; s < k.steps; ++s) {
    if (n0 == 0) k.reads->fetch();
    const T *B = k.B.at(s) + n0, *C = k.C.at(s) + n0;
    const Vec<T> scaled = scaled_for<T, R>(k.in.delta[s]), u = k.in.u[s], g = k.dout[s];
    Vec<T> even = k.y[s], odd{};
#pragma GCC unroll 4
    for (int n = 0; n < size; ++n) {
      Cell<T>& cell = cells[s * size + n];
      const Vec<T> decay = decay_of<T, R>(scaled, rates[n]), old = times<T, R>(decay, state[n]);
      cell.decay = decay;
      cell.decayed = old;
      state[n] = old + u * B[n];
      sums[s * size + n].dC += g * state[n];
      if (n & 1)
        odd += state[n] * C[n];
      else
        even += state[n] * C[n];
    }
    k.y[s] = even + odd;
  }
#pragma GCC unroll 4
  for (int n = 0; n < K; ++n) h[n] = local[n];
}

template <class T> void gate_vjp(const VjpBlock<T>& k) {
  for (int s = 0; s < k.steps && k.dz; ++s) store<T>(k.dz.at(s), k.slope[s] * k.y[s]);
}

// The adjoint recurrence of K states (or `count`) through a block.
template <class T, int K, Reach R>
void adjoint_part(VjpBlock<T>& k, int n0, int count, const Rate<T>* rates, Vec<T>* lambda, Vec<T>* dA) {
  const int size = K ? K : count;
  Vec<T> lambda_[K ? K : 1], dA_[K ? K : 1];  // dA of this block alone: sums of sums lose less
#pragma GCC unroll 4
  for (int n = 0; n < K; ++n) lambda_[n] = lambda[n], dA_[n] = Vec<T>{};
  Vec<T>*l_ = K ? lambda_ : lambda, *d_ = K ? dA_ : dA;
  Cell<T>* cells = k.cells;
  Sums<T>* sums = k.sums + n0 * kKept;
  for (int s = k.steps - 1; s >= 0; --s) {
    if (n0 == 0) k.writes->fetch();
    const T *B = k.B.at(s) + n0, *C = k.C.at(s) + n0;
    const Vec<T> delta = k.in.delta[s], u = k.in.u[s], g = k.dout[s];
    Vec<T> du[2] = {}, dlog[2] = {};
    if (n0) du[0] = k.du[s], dlog[0] = k.dlog[s];
#pragma GCC unroll 4
    for (int n = 0; n < size; ++n) {
      Cell<T>& cell = cells[s * size + n];
      const Vec<T> l = l_[n] + g * C[n], q = l * cell.decayed;
      sums[s * size + n].dB += l * u;
      du[n % 2] += l * B[n];
      dlog[n % 2] += q * rates[n].plain;
      d_[n] += q * delta;
      l_[n] = times<T, R>(cell.decay, l);
    }
    k.du[s] = du[0] + du[1], k.dlog[s] = dlog[0] + dlog[1];
  }
#pragma GCC unroll 4
  for (int n = 0; n < K; ++n) lambda[n] = lambda_[n], dA[n] += dA_[n];
}

template <class T> void write_inputs_vjp(const VjpBlock<T>& k, Vec<T>& dbias) {
  Vec<T> sum{};
  for (int s = 0; s < k.steps; ++s) {
    Vec<T> ddt = k.dlog[s] + k.in.x[s] * k.du[s];
    if (k.softplus) ddt *= k.rise[s];
    sum += ddt;
    if (k.dx) store<T>(k.dx.at(s), k.in.delta[s] * k.du[s] + k.skip * k.dout[s]);
    if (k.ddt) store<T>(k.ddt.at(s), ddt);
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
  for (int n = 0; n < k.states; n += kPart) {
    if (k.states - n >= kPart) {
      rebuild_part<T, kPart, R>(k, n, kPart, c.decay.rates + n, h + n);
      adjoint_part<T, kPart, R>(k, n, kPart, c.decay.rates + n, c.lambda + n, c.dA + n);
    } else {
      rebuild_part<T, 0, R>(k, n, k.states - n, c.decay.rates + n, h + n);
      adjoint_part<T, 0, R>(k, n, k.states - n, c.decay.rates + n, c.lambda + n, c.dA + n);
    }
  }
}

template <class T> void vjp_block(VjpBlock<T>& k, Carried<T>& c, Vec<T>* h) {
  const Reach reach = read_inputs<T, kKept>(k.x, k.dt, k.steps, k.bias, k.softplus, c.decay, k.in, k.rise);
  gate<T>(k, c.dskip);
  with_reach<T>(reach, [&](auto known) { walk_parts<T, known.value>(k, c, h); });
  gate_vjp<T>(k);
  write_inputs_vjp<T>(k, c.dbias);
}

// Folds a block's lane sums into rows of dB and dC, (t, n), and clears them. They lie as (part, s, n), whose places are consecutive.
template <class T> void fold(VjpBlock<T>& k, T* dB, T* dC) {
  for (int n0 = 0; n0 < k.states; n0 += kPart) {
    const int size = std::min(kPart, k.states - n0), cells = size * k.steps;
    for (int at = 0; at < cells; at += lanes<T>) {
      Sums<T>* cell = k.sums + n0 * kKept + at;
      const int count = std::min(lanes<T>, cells - at);
      alignas(64) T sums[2][lanes<T>];
      constexpr int64_t stride = sizeof(Sums<T>) / sizeof(Vec<T>);
      sums_of_lanes<T>(&cell->dB, stride, count, sums[0]);
      sums_of_lanes<T>(&cell->dC, stride, count, sums[1]);
      for (int i = 0; i < count; ++i) {
        const int64_t place = (at + i) / size * k.states + n0 + (at + i) % size;
        if (dB) dB[place] = sums[0][i];
        if (dC) dC[place] = sums[1][i];
        cell[i].dB = cell[i].dC = Vec<T>{};
      }
    }
  }
}

template <class T> void place_block(const Walk<T, kKept>& walk, int64_t block, int64_t v, VjpBlock<T>& k) {
  const Arguments& a = walk.a;
  const Place p = walk.at(block, v);
  k.steps = p.steps, k.states = int(a.states), k.softplus = a.softplus;
  k.x = rows<T>(a.x, p), k.dt = rows<T>(a.dt, p), k.z = rows<T>(a.z, p), k.dy = rows<T>(a.dy, p);
  k.B = rows<T>(a.B, p.b, p.t0, 0), k.C = rows<T>(a.C, p.b, p.t0, 0);
  k.dx = rows<T>(a.dx, p), k.ddt = rows<T>(a.ddt, p), k.dz = rows<T>(a.dz, p);
  k.bias = per_channel<T>(a.bias, p), k.skip = per_channel<T>(a.D, p);
}

// What the block before this one needs.
template <class T> void look_ahead(const Walk<T, kKept>& walk, int64_t block, VjpBlock<T>& k) {
  const Arguments& a = walk.a;
  const Place next = walk.start(block - 1);
  k.reads->start(), k.writes->start();
  for (const Matrix* m : {&a.x, &a.dt, &a.z, &a.dy}) k.reads->add(rows<T>(*m, next), next.steps, false);
  for (const Matrix* m : {&a.dx, &a.ddt, &a.dz}) k.writes->add(rows<T>(*m, next), next.steps, true);
}

// Runs one block on a vector of channels; where channels don't fill it, on copies.
template <class T> struct VectorRunner {
  Tail<T, kKept> x, dt, z, dy, dx, ddt, dz;
  void operator()(VjpBlock<T>& k, int count, Carried<T>& c, Vec<T>* h) {
    if (count == lanes<T>) return vjp_block<T>(k, c, h);
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
  Aligned<Cell<T>> cells(kKept * kPart);
  Aligned<Sums<T>> sums(kKept * states);
  Aligned<Carried<T>> carried(walk.vectors());
  start_vjp<T>(walk, rates.data, memory.data, carried.data);
  VectorRunner<T> run;
  VjpBlock<T> k;
  Ahead<T, 4> reads(walk.vectors());
  Ahead<T, 3> writes(walk.vectors());
  k.cells = cells.data, k.sums = sums.data, k.reads = &reads, k.writes = &writes;
  std::fill(sums.data, sums.data + kKept * states, Sums<T>{});
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
    fold<T>(k, a.dB ? static_cast<T*>(a.dB) + base : nullptr, a.dC ? static_cast<T*>(a.dC) + base : nullptr);
  }
  finish_vjp<T>(walk, carried.data);
}

}  // namespace adjcomp
