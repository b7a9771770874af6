// What SSD and its VJP share. A chunk of 64 steps of a head is a handful of small matrix products (Dao and Gu 2024); log decays are
// summed in double, since their differences are exponents.
//
// Legend: q and j steps of a chunk, h heads, p channels of a head, g groups, n states. Panels are padded to whole vectors.
#pragma once
#include <cmath>
#include <vector>

#include "activations.h"
#include "arguments.h"
#include "gemm.h"

namespace adjcomp {

constexpr int kChunk = 64;  // CHECKPOINT_STEPS of adjcomp.ops.dual

// (batch, time, head or group, inner) with contiguous inner dimension; strides in elements.
struct Heads {
  void* data;
  int64_t batch_stride, time_stride, head_stride;
};

struct Arguments {  // mirrors Arguments of ssd.py
  int64_t batch, steps, heads, width, groups, states, parts, threads;  // parts: tasks that share a group of heads
  Heads x, B, C, z, y, dy, dx, dz;
  void *delta, *ddelta;                       // (batch, steps, heads)
  void *A, *D, *h0, *h_last, *kept, *dh_last;  // kept: (batch, chunks + 1, heads, n, p)
  void *dA, *dB, *dC, *dD, *dh0;              // dA, dD: (batch, heads); dB, dC: (batch, parts, steps, groups, n)
};

template <class T> inline Rows<T> rows(const Heads& m, int64_t b, int64_t t, int64_t head) {
  if (!m.data) return {};
  return {static_cast<T*>(m.data) + b * m.batch_stride + t * m.time_stride + head * m.head_stride, m.time_stride};
}

template <class T> inline int padded(int64_t count) { return int((count + lanes<T> - 1) / lanes<T> * lanes<T>); }

// Heads first .. last - 1 of one group of one batch.
struct Task {
  int64_t b, group, part, first, last;
};

inline Task task_of(const Arguments& a, int64_t index) {
  const int64_t part = index % a.parts, group = index / a.parts % a.groups, per = a.heads / a.groups;
  return {index / a.parts / a.groups, group, part, group * per + per * part / a.parts, group * per + per * (part + 1) / a.parts};
}

template <class T> struct Matrices {  // scratch of one task: named panels cut from one allocation
  explicit Matrices(int64_t count) : memory(count), used(0) {}
  Panel<T> take(int64_t rows, int64_t stride) {
    Panel<T> panel{memory.data + used, stride};
    std::fill_n(panel.data, rows * stride, T(0));
    used += rows * stride;
    return panel;
  }
  Aligned<T> memory;
  int64_t used;
};

// Copies rows into a panel, times scale[q] where given; padding is left as it is.
template <class T> void read_panel(const Rows<T>& from, int steps, int64_t count, const T* scale, const Panel<T>& to) {
  for (int q = 0; q < steps; ++q) {
    const T *in = from.at(q), factor = scale ? scale[q] : T(1);
    T* out = to.data + q * to.stride;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) out[i] = in[i] * factor;
  }
}

template <class T> void scale_rows(const Panel<T>& m, int rows, const T* scale) {
  for (int q = 0; q < rows; ++q)
    for (int64_t i = 0; i < m.stride; i += lanes<T>) {
      T* at = m.data + q * m.stride + i;
      store<T>(at, load<T>(at) * scale[q]);
    }
}

// The decays of one head in one chunk.
template <class T> struct Decays {
  T delta[kChunk], since[kChunk], until[kChunk], whole;  // δ; from the chunk's start to q; from q to its end; over all of it
  double log[kChunk];

  void read(const Arguments& a, int64_t b, int64_t t0, int steps, int64_t head) {
    const T* from = static_cast<const T*>(a.delta) + (b * a.steps + t0) * a.heads + head;
    const double rate = double(static_cast<const T*>(a.A)[head]);
    double sum = 0;
    for (int q = 0; q < steps; ++q) {
      delta[q] = from[q * a.heads];
      log[q] = sum += double(delta[q]) * rate;
    }
    for (int q = steps; q < kChunk; ++q) log[q] = sum;
    for (int q = 0; q < kChunk; ++q) since[q] = T(log[q]), until[q] = T(sum - log[q]);
    for (int q = 0; q < kChunk; q += lanes<T>) {
      store<T>(since + q, exp<T>(load<T>(since + q)));
      store<T>(until + q, exp<T>(load<T>(until + q)));
    }
    whole = since[steps - 1];
  }

  // decay[q][j] = exp(log[q] - log[j]) for j <= q, zero above; both panels are kChunk wide. mix = scores * decay.
  void between(int steps, const Panel<T>& scores, const Panel<T>& decay, const Panel<T>& mix) const {
    for (int q = 0; q < steps; ++q) {
      T *d = decay.data + q * decay.stride, *m = mix.data + q * mix.stride;
      const T* s = scores.data + q * scores.stride;
      const int filled = (q / lanes<T> + 1) * lanes<T>;
#pragma omp simd
      for (int j = 0; j < filled; ++j) d[j] = T(log[q] - log[j]);
      for (int j = 0; j < filled; j += lanes<T>) store<T>(d + j, exp<T>(load<T>(d + j)));
      std::fill(d + q + 1, d + kChunk, T(0));
      for (int j = 0; j < filled; j += lanes<T>) store<T>(m + j, load<T>(s + j) * load<T>(d + j));
      std::fill(m + q + 1, m + kChunk, T(0));
    }
  }
};

}  // namespace adjcomp
