// VJP of SSD: walks the chunks backwards, each from its kept state.
#pragma once
#include "ssd_forward.h"

namespace adjcomp {

template <class T> struct VjpScratch {
  explicit VjpScratch(const Arguments& a)
      : p(padded<T>(a.width)), n(padded<T>(a.states)),
        all(kChunk * (4 * int64_t(n) + 5 * kChunk + 7 * int64_t(p)) + 3 * int64_t(n) * kChunk + 2 * int64_t(p) * kChunk +
            int64_t(n) * p + 64),
        B(all.take(kChunk, n)), C(all.take(kChunk, n)), dB(all.take(kChunk, n)), dC(all.take(kChunk, n)),
        B_t(all.take(n, kChunk)), dB_t(all.take(n, kChunk)), dC_t(all.take(n, kChunk)), scores(all.take(kChunk, kChunk)),
        decay(all.take(kChunk, kChunk)), mix(all.take(kChunk, kChunk)), dmix(all.take(kChunk, kChunk)),
        dscores(all.take(kChunk, kChunk)), x(all.take(kChunk, p)), u(all.take(kChunk, p)), g(all.take(kChunk, p)),
        du(all.take(kChunk, p)), carried(all.take(kChunk, p)), seen(all.take(kChunk, p)), y(all.take(kChunk, p)),
        u_t(all.take(p, kChunk)), g_t(all.take(p, kChunk)), h(all.take(n, p)) {}
  int p, n;
  Matrices<T> all;
  // dB, dC by steps from the scores of all heads; dB_t, dC_t by states from the states of each head.
  Panel<T> B, C, dB, dC, B_t, dB_t, dC_t, scores, decay, mix, dmix, dscores;
  Panel<T> x, u, g, du, carried, seen, y, u_t, g_t, h;  // seen: C hᵀ times decay; carried: B λᵀ times decay
};

template <class T> inline T dot(const T* a, const T* b, int64_t count) {
  Vec<T> sum{};
  for (int64_t i = 0; i < count; i += lanes<T>) sum += load<T>(a + i) * load<T>(b + i);
  return sum_lanes<T>(sum);
}

// The cotangent before the gate into `g`, and dz.
template <class T> void gate_vjp(const Arguments& a, const Task& task, int64_t t0, int steps, int64_t head, VjpScratch<T>& s) {
  const Rows<T> dy = rows<T>(a.dy, task.b, t0, head), z = rows<T>(a.z, task.b, t0, head), dz = rows<T>(a.dz, task.b, t0, head);
  const T skip = a.D ? static_cast<const T*>(a.D)[head] : T(0);
  for (int q = 0; q < steps; ++q)
    for (int64_t i = 0; i < a.width; i += lanes<T>) {
      const int count = int(std::min<int64_t>(lanes<T>, a.width - i));
      Vec<T> g = dy ? load_some<T>(dy.at(q) + i, count) : Vec<T>{};
      if (z) {
        const Vec<T> in = load_some<T>(z.at(q) + i, count), open = sigmoid<T>(in);
        const Vec<T> y = load<T>(s.y.data + q * s.p + i) + skip * load<T>(s.x.data + q * s.p + i);
        if (dz) store_some<T>(dz.at(q) + i, g * y * open * (T(1) + in * (T(1) - open)), count);
        g *= in * open;
      }
      store<T>(s.g.data + q * s.p + i, g);
    }
}

// Cotangents of each step's log decay, in double: a product over steps j < t <= q counts for every t between, so it is added at q,
// taken off at j, and summed from the end; what lies on one side of t cancels to nothing.
template <class T>
void log_decay_vjp(int steps, const Decays<T>& d, const VjpScratch<T>& s, double held, int64_t width, double* dlog) {
  double until = d.whole * held;
  std::fill_n(dlog, steps, 0.0);
  for (int q = 0; q < steps; ++q) {
    const T *pair = s.dmix.data + q * kChunk, *mix = s.mix.data + q * kChunk;
    double row = 0;
    for (int j = 0; j < q; ++j) {
      const double product = double(pair[j]) * double(mix[j]);
      row += product;
      dlog[j] -= product;
    }
    const double from = double(dot<T>(s.u.data + q * s.p, s.carried.data + q * s.p, width));
    dlog[q] += row + double(dot<T>(s.g.data + q * s.p, s.seen.data + q * s.p, width)) - from;
    until += from;
  }
  dlog[steps - 1] += until;
  for (int q = steps - 2; q >= 0; --q) dlog[q] += dlog[q + 1];
}

// dscores += dmix * decay, the cotangent of C[q] · B[j] summed over the heads of the task.
template <class T> void add_scores(int steps, const VjpScratch<T>& s) {
  for (int i = 0; i < steps * kChunk; i += lanes<T>) {
    T* to = s.dscores.data + i;
    store<T>(to, load<T>(to) + load<T>(s.dmix.data + i) * load<T>(s.decay.data + i));
  }
}

// Writes dx and dδ of one head, and adds to its dA and dD.
template <class T>
void write_inputs_vjp(const Arguments& a, const Task& task, int64_t t0, int steps, int64_t head, const Decays<T>& d, const VjpScratch<T>& s,
                      const double* dlog) {
  const Rows<T> dx = rows<T>(a.dx, task.b, t0, head);
  const T skip = a.D ? static_cast<const T*>(a.D)[head] : T(0);
  const double rate = double(static_cast<const T*>(a.A)[head]);
  double dA = 0, dD = 0;
  for (int q = 0; q < steps; ++q) {
    const T *du = s.du.data + q * s.p, *g = s.g.data + q * s.p, *x = s.x.data + q * s.p;
    const double through = double(dot<T>(du, x, s.p));
    if (a.ddelta) static_cast<T*>(a.ddelta)[(task.b * a.steps + t0 + q) * a.heads + head] = T(dlog[q] * rate + through);
    dA += dlog[q] * double(d.delta[q]);
    dD += double(dot<T>(g, x, s.p));
    for (int64_t i = 0; dx && i < a.width; i += lanes<T>) {
      const int count = int(std::min<int64_t>(lanes<T>, a.width - i));
      store_some<T>(dx.at(q) + i, d.delta[q] * load<T>(du + i) + skip * load<T>(g + i), count);
    }
  }
  if (a.dA) static_cast<T*>(a.dA)[task.b * a.heads + head] += T(dA);
  if (a.dD) static_cast<T*>(a.dD)[task.b * a.heads + head] += T(dD);
}

// One head through one chunk; the adjoint state `lambda` (n, p) is carried.
template <class T>
void vjp_chunk(const Arguments& a, const Task& task, int64_t chunk, int steps, int64_t head, const Panel<T>& lambda, VjpScratch<T>& s) {
  const int64_t t0 = chunk * kChunk;
  const int states = int(a.states), width = int(a.width);
  Decays<T> d;
  d.read(a, task.b, t0, steps, head);
  d.between(steps, s.scores, s.decay, s.mix);
  read_panel<T>(rows<T>(a.x, task.b, t0, head), steps, width, nullptr, s.x);
  read_panel<T>(rows<T>(a.x, task.b, t0, head), steps, width, d.delta, s.u);
  const T* kept = kept_state<T>(a, task.b, chunk, head);
  for (int n = 0; n < states; ++n) std::copy_n(kept + int64_t(n) * width, width, s.h.data + n * s.p);

  multiply<T>(Sum::kAll, steps, s.p, states, plain(s.C), s.h, s.seen, false);
  scale_rows<T>(s.seen, steps, d.since);
  if (a.dz.data) {
    std::copy_n(s.seen.data, steps * s.p, s.y.data);
    multiply<T>(Sum::kUpToRow, steps, s.p, steps, plain(s.mix), s.u, s.y, true);
  }
  gate_vjp<T>(a, task, t0, steps, head, s);

  multiply<T>(Sum::kAll, steps, s.p, states, plain(s.B), lambda, s.carried, false);
  scale_rows<T>(s.carried, steps, d.until);
  std::copy_n(s.carried.data, steps * s.p, s.du.data);
  multiply<T>(Sum::kFromRow, steps, s.p, steps, transposed(s.mix), s.g, s.du, true);
  transpose<T>(s.u, steps, width, nullptr, s.u_t);
  multiply<T>(Sum::kAll, steps, kChunk, width, plain(s.g), s.u_t, s.dmix, false);
  add_scores<T>(steps, s);

  double held = 0, dlog[kChunk];
  for (int n = 0; n < states; ++n) held += double(dot<T>(lambda.data + n * s.p, s.h.data + n * s.p, s.p));
  log_decay_vjp<T>(steps, d, s, held, s.p, dlog);
  write_inputs_vjp<T>(a, task, t0, steps, head, d, s, dlog);

  transpose<T>(s.u, steps, width, d.until, s.u_t);
  multiply<T>(Sum::kAll, states, kChunk, width, plain(lambda), s.u_t, s.dB_t, true);
  scale_rows<T>(s.g, steps, d.since);
  transpose<T>(s.g, steps, width, nullptr, s.g_t);
  multiply<T>(Sum::kAll, states, kChunk, width, plain(s.h), s.g_t, s.dC_t, true);
  for (int64_t i = 0; i < int64_t(states) * s.p; i += lanes<T>) store<T>(lambda.data + i, load<T>(lambda.data + i) * d.whole);
  multiply<T>(Sum::kAll, states, s.p, steps, transposed(s.C), s.g, lambda, true);
}

// dB and dC of a chunk, from all heads of the task.
template <class T> void write_group_vjp(const Arguments& a, const Task& task, int64_t t0, int steps, VjpScratch<T>& s) {
  multiply<T>(Sum::kUpToRow, steps, s.n, steps, plain(s.dscores), s.B, s.dC, false);
  multiply<T>(Sum::kFromRow, steps, s.n, steps, transposed(s.dscores), s.C, s.dB, false);
  for (int q = 0; q < steps; ++q) {
    const int64_t at = (((task.b * a.parts + task.part) * a.steps + t0 + q) * a.groups + task.group) * a.states;
    for (int64_t n = 0; n < a.states; ++n) {
      if (a.dB) static_cast<T*>(a.dB)[at + n] = s.dB.data[q * s.n + n] + s.dB_t.data[n * kChunk + q];
      if (a.dC) static_cast<T*>(a.dC)[at + n] = s.dC.data[q * s.n + n] + s.dC_t.data[n * kChunk + q];
    }
  }
}

template <class T> void vjp_task(const Arguments& a, const Task& task) {
  VjpScratch<T> s(a);
  const int64_t chunks = (a.steps + kChunk - 1) / kChunk;
  Matrices<T> memory((task.last - task.first) * s.n * s.p);
  std::vector<Panel<T>> lambda;
  for (int64_t head = task.first; head < task.last; ++head) {
    lambda.push_back(memory.take(s.n, s.p));
    read_state<T>(state_of<T>(a.dh_last, a, task.b, head), a.width, a.states, lambda.back());
    if (a.dA) static_cast<T*>(a.dA)[task.b * a.heads + head] = T(0);
    if (a.dD) static_cast<T*>(a.dD)[task.b * a.heads + head] = T(0);
  }
  for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const int steps = int(std::min<int64_t>(kChunk, a.steps - chunk * kChunk));
    read_group<T>(a, task, chunk * kChunk, steps, s);
    std::fill_n(s.dscores.data, kChunk * kChunk, T(0));
    std::fill_n(s.dB_t.data, int64_t(s.n) * kChunk, T(0));
    std::fill_n(s.dC_t.data, int64_t(s.n) * kChunk, T(0));
    for (int64_t head = task.first; head < task.last; ++head)
      vjp_chunk<T>(a, task, chunk, steps, head, lambda[head - task.first], s);
    write_group_vjp<T>(a, task, chunk * kChunk, steps, s);
  }
  for (int64_t head = task.first; head < task.last; ++head)
    write_state<T>(state_of<T>(a.dh0, a, task.b, head), a.width, a.states, lambda[head - task.first]);
}

}  // namespace adjcomp
