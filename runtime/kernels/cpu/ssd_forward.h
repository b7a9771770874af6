// Forward of SSD: outputs, the last state, and the state before each chunk.
#pragma once
#include "ssd_common.h"

namespace adjcomp {

template <class T> struct ForwardScratch {
  explicit ForwardScratch(const Arguments& a)
      : p(padded<T>(a.width)), n(padded<T>(a.states)),
        all(kChunk * (2 * n + 3 * kChunk + 2 * p) + int64_t(n) * kChunk + 64), B(all.take(kChunk, n)), C(all.take(kChunk, n)),
        B_t(all.take(n, kChunk)), scores(all.take(kChunk, kChunk)), decay(all.take(kChunk, kChunk)),
        mix(all.take(kChunk, kChunk)), u(all.take(kChunk, p)), y(all.take(kChunk, p)) {}
  int p, n;
  Matrices<T> all;
  Panel<T> B, C, B_t, scores, decay, mix, u, y;
};

// scores[q][j] = C[q] · B[j]: shared by the heads of a group.
template <class T, class S> void read_group(const Arguments& a, const Task& task, int64_t t0, int steps, S& s) {
  read_panel<T>(rows<T>(a.B, task.b, t0, task.group), steps, a.states, nullptr, s.B);
  read_panel<T>(rows<T>(a.C, task.b, t0, task.group), steps, a.states, nullptr, s.C);
  transpose<T>(s.B, steps, int(a.states), nullptr, s.B_t);
  multiply<T>(Sum::kAll, steps, kChunk, int(a.states), plain(s.C), s.B_t, s.scores, false);
}

// y = since (C hᵀ) + mix u, before D and the gate; `h` is (n, p).
template <class T, class S>
void outputs(const Arguments& a, int steps, const Decays<T>& d, const Panel<T>& h, const S& s, const Panel<T>& y) {
  multiply<T>(Sum::kAll, steps, s.p, int(a.states), plain(s.C), h, y, false);
  scale_rows<T>(y, steps, d.since);
  multiply<T>(Sum::kUpToRow, steps, s.p, steps, plain(s.mix), s.u, y, true);
}

template <class T> void write_outputs(const Arguments& a, const Task& task, int64_t t0, int steps, int64_t head, const Panel<T>& y) {
  const Rows<T> x = rows<T>(a.x, task.b, t0, head), z = rows<T>(a.z, task.b, t0, head), out = rows<T>(a.y, task.b, t0, head);
  const T skip = a.D ? static_cast<const T*>(a.D)[head] : T(0);
  for (int q = 0; q < steps; ++q)
    for (int64_t i = 0; i < a.width; i += lanes<T>) {
      const int count = int(std::min<int64_t>(lanes<T>, a.width - i));
      Vec<T> v = load<T>(y.data + q * y.stride + i) + skip * load_some<T>(x.at(q) + i, count);
      if (z) v *= silu<T>(load_some<T>(z.at(q) + i, count));
      store_some<T>(out.at(q) + i, v, count);
    }
}

// A state between its orders: (p, n) contiguous outside, panels (n, p) inside.
template <class T> void read_state(const void* from, int64_t width, int64_t states, const Panel<T>& h) {
  for (int64_t n = 0; n < states; ++n)
    for (int64_t i = 0; i < width; ++i) h.data[n * h.stride + i] = from ? static_cast<const T*>(from)[i * states + n] : T(0);
}
template <class T> void write_state(void* to, int64_t width, int64_t states, const Panel<T>& h) {
  for (int64_t i = 0; to && i < width; ++i)
    for (int64_t n = 0; n < states; ++n) static_cast<T*>(to)[i * states + n] = h.data[n * h.stride + i];
}

template <class T> inline T* state_of(void* states, const Arguments& a, int64_t b, int64_t head) {
  return states ? static_cast<T*>(states) + (b * a.heads + head) * a.width * a.states : nullptr;
}
// A kept state, (n, p) contiguous.
template <class T> inline T* kept_state(const Arguments& a, int64_t b, int64_t chunk, int64_t head) {
  const int64_t count = (a.steps + kChunk - 1) / kChunk + 1;
  return static_cast<T*>(a.kept) + ((b * count + chunk) * a.heads + head) * a.width * a.states;
}
template <class T> void keep(const Panel<T>& h, int64_t width, int64_t states, T* to) {
  for (int64_t n = 0; n < states; ++n) std::copy_n(h.data + n * h.stride, width, to + n * width);
}

// One head through one chunk; `h` is carried.
template <class T>
void forward_chunk(const Arguments& a, const Task& task, int64_t t0, int steps, int64_t head, const Panel<T>& h, ForwardScratch<T>& s) {
  Decays<T> d;
  d.read(a, task.b, t0, steps, head);
  d.between(steps, s.scores, s.decay, s.mix);
  read_panel<T>(rows<T>(a.x, task.b, t0, head), steps, a.width, d.delta, s.u);
  outputs<T>(a, steps, d, h, s, s.y);
  write_outputs<T>(a, task, t0, steps, head, s.y);
  scale_rows<T>(s.u, steps, d.until);
  for (int64_t i = 0; i < a.states * h.stride; i += lanes<T>) store<T>(h.data + i, load<T>(h.data + i) * d.whole);
  multiply<T>(Sum::kAll, int(a.states), s.p, steps, transposed(s.B), s.u, h, true);
}

template <class T> void forward_task(const Arguments& a, const Task& task) {
  ForwardScratch<T> s(a);
  const int64_t size = int64_t(s.n) * s.p;
  Matrices<T> memory((task.last - task.first) * size);
  std::vector<Panel<T>> h;
  for (int64_t head = task.first; head < task.last; ++head) {
    h.push_back(memory.take(s.n, s.p));
    read_state<T>(state_of<T>(a.h0, a, task.b, head), a.width, a.states, h.back());
  }
  const int64_t chunks = (a.steps + kChunk - 1) / kChunk;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int steps = int(std::min<int64_t>(kChunk, a.steps - chunk * kChunk));
    read_group<T>(a, task, chunk * kChunk, steps, s);
    for (int64_t head = task.first; head < task.last; ++head) {
      keep<T>(h[head - task.first], a.width, a.states, kept_state<T>(a, task.b, chunk, head));
      forward_chunk<T>(a, task, chunk * kChunk, steps, head, h[head - task.first], s);
    }
  }
  for (int64_t head = task.first; head < task.last; ++head) {
    keep<T>(h[head - task.first], a.width, a.states, kept_state<T>(a, task.b, chunks, head));
    write_state<T>(state_of<T>(a.h_last, a, task.b, head), a.width, a.states, h[head - task.first]);
  }
}

}  // namespace adjcomp
