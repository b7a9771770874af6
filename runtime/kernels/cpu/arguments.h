// How tensors come in from Python, walks over their rows, and scratch memory.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "simd.h"

namespace adjcomp {

// (batch, time, inner) with contiguous inner dimension; strides in elements. Null data stands for an absent argument.
struct Matrix {
  void* data;
  int64_t batch_stride, time_stride;
};

// One vector of lanes over successive steps.
template <class T> struct Rows {
  T* first = nullptr;
  int64_t stride = 0;
  explicit operator bool() const { return first != nullptr; }
  T* at(int64_t s) const { return first + s * stride; }
};

template <class T> inline Rows<T> rows(const Matrix& m, int64_t b, int64_t t, int64_t inner) {
  if (!m.data) return {};
  return {static_cast<T*>(m.data) + b * m.batch_stride + t * m.time_stride + inner, m.time_stride};
}

// Uninitialised scratch, aligned for any vector.
template <class T> struct Aligned {
  explicit Aligned(int64_t count) : data(static_cast<T*>(std::aligned_alloc(64, (sizeof(T) * count + 64) / 64 * 64))) {}
  ~Aligned() { std::free(data); }
  Aligned(const Aligned&) = delete;
  T* data;
};

// Brings rows to L2 ahead of their use, one step per call, so that memory works while the cores compute. Rows lie far apart, so no
// hardware prefetcher sees them coming; and at a power-of-two distance they would evict each other from L1.
template <class T, int Most> struct Ahead {
  int count = 0;
  Rows<T> rows[Most];
  void add(const Rows<T>& r) {
    if (r) rows[count++] = r;
  }
  void fetch(int64_t s) const {
    for (int i = 0; i < count; ++i) __builtin_prefetch(rows[i].at(s), 0, 2);
  }
  void fetch_for_write(int64_t s) const {
    for (int i = 0; i < count; ++i) __builtin_prefetch(rows[i].at(s), 1, 2);
  }
};

// Stands in for the rows of the last vector where channels do not fill it: full vectors, copied in before and out after a block.
template <class T, int Steps> struct Tail {
  alignas(64) T cells[Steps * lanes<T>];
  Rows<T> rows() { return {cells, lanes<T>}; }
  Rows<T> read(const Rows<T>& from, int steps, int count) {
    if (!from) return from;
    std::memset(cells, 0, sizeof cells);
    for (int s = 0; s < steps; ++s) std::memcpy(cells + s * lanes<T>, from.at(s), sizeof(T) * count);
    return rows();
  }
  void write(const Rows<T>& to, int steps, int count) const {
    for (int s = 0; to && s < steps; ++s) std::memcpy(to.at(s), cells + s * lanes<T>, sizeof(T) * count);
  }
};

}  // namespace adjcomp
