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

// Whether rows of whole vectors may go past the caches: results that are too large to be there still when they are read, and whose
// places would have to be read before they are written. They must be aligned.
constexpr int64_t kPastCaches = 2 << 20;  // bytes of each
template <class T> inline bool past_caches(const Matrix& m, int64_t batch, int64_t steps, int64_t inner) {
#if defined(__AVX512F__)
  const int64_t odd = reinterpret_cast<intptr_t>(m.data) | m.batch_stride * sizeof(T) | m.time_stride * sizeof(T);
  return odd % sizeof(Vec<T>) == 0 && batch * steps * inner * int64_t(sizeof(T)) >= kPastCaches;
#else
  return false;
#endif
}
template <class T> inline void store(T* p, Vec<T> v, bool past) {
#if defined(__AVX512F__)
  if (past) return _mm512_stream_ps(reinterpret_cast<float*>(p), (__m512)v);
#endif
  store<T>(p, v);
}
// Orders what went past the caches before what other threads do next.
inline void finish_stores() {
#if defined(__AVX512F__)
  _mm_sfence();
#endif
}

// Uninitialised scratch, aligned for any vector.
template <class T> struct Aligned {
  explicit Aligned(int64_t count) : data(static_cast<T*>(std::aligned_alloc(64, (sizeof(T) * count + 64) / 64 * 64))) {}
  ~Aligned() { std::free(data); }
  Aligned(const Aligned&) = delete;
  T* data;
};

// Brings the rows of a later block to L2, a few vectors per call, so that memory works while the cores compute. Whole rows in turn:
// a column of vectors would open a new page of memory with each one, and no hardware prefetcher would see them coming. In small
// portions: a core waits when it has more than a dozen lines under way.
template <class T, int Most, bool Write> struct Ahead {
  struct Target {
    Rows<T> rows;
    int64_t steps;
  };
  // `calls`: how often each step of a block will call `fetch` for each vector.
  Ahead(int64_t vectors, int64_t calls) : width(vectors), calls(calls) {}
  const int64_t width, calls;
  int64_t count = 0, more = 0, target = 0, step = 0;
  int64_t left = INT64_MAX, advance = 0;  // vectors of the row; nothing is left: the same place again and again
  const T* at = nullptr;
  Target targets[Most];
  void start() { count = more = target = step = advance = 0, left = INT64_MAX; }
  void add(const Rows<T>& rows, int64_t steps) {
    if (!rows || steps <= 0) return;
    targets[count++] = {rows, steps};
    more = (count + calls - 1) / calls - 1;
    at = targets[0].rows.first, left = width, advance = lanes<T>;
  }
  void fetch() {
    fetch_one();
    for (int64_t i = 0; i < more; ++i) fetch_one();
  }
  void fetch_one() {
    if constexpr (Write)
      __builtin_prefetch(at, 1, 2);
    else
      __builtin_prefetch(at, 0, 2);
    at += advance;
    if (__builtin_expect(--left == 0, 0)) next_row();
  }
  __attribute__((always_inline)) void next_row() {  // never a call, which would cost the loops around it their registers
    left = width;
    if (++step == targets[target].steps) step = 0, ++target;
    if (target < count)
      at = targets[target].rows.at(step);
    else
      left = INT64_MAX, advance = 0;
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
