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

// Brings the rows of a later block to L2, a vector of each per call, so that memory works while the cores compute. Whole rows in turn:
// a column of vectors would open a new page of memory with each one, and no hardware prefetcher would see them coming.
template <class T, int Most> struct Ahead {
  struct Target {
    Rows<T> rows;
    int64_t steps;
    bool write;
  };
  explicit Ahead(int64_t vectors) : width(vectors) {}
  int64_t width, count = 0, step = 0, vector = 0;
  Target targets[Most];
  void start() { count = step = vector = 0; }
  void add(const Rows<T>& rows, int64_t steps, bool write) {
    if (rows && steps > 0) targets[count++] = {rows, steps, write};
  }
  void fetch() {
    for (int64_t i = 0; i < count; ++i) {
      const Target& target = targets[i];
      if (step >= target.steps) continue;
      const T* at = target.rows.at(step) + vector * lanes<T>;
      if (target.write)
        __builtin_prefetch(at, 1, 2);
      else
        __builtin_prefetch(at, 0, 2);
    }
    if (++vector == width) vector = 0, ++step;
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
