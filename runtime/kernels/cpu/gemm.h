// Products of small matrices that lie in cache: C[m][n] (+)= Σ_k A(m, k) B[k][n].
//
// A is read element by element with any strides (so it may be a transpose); rows of B and C are contiguous and padded to whole
// vectors. A block of C stays in registers through the sum.
#pragma once
#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace adjcomp {

enum class Sum { kAll, kUpToRow, kFromRow };  // which k count for row m: all, k <= m, or k >= m; A holds zeros elsewhere in a block

template <class T> struct Factor {  // A(m, k) = data[m * row + k * column]
  const T* data;
  int64_t row, column;
};
template <class T> struct Panel {  // rows of `stride` numbers
  T* data;
  int64_t stride;
};

constexpr int kTileRows = 6;
constexpr int kTileVectors = ADJCOMP_VECTOR_BYTES == 64 ? 4 : 2;

template <class T, int Rows, int Vectors>
inline void tile(int first, int last, const Factor<T>& a, const T* b, int64_t b_stride, T* c, int64_t c_stride, bool add) {
  Vec<T> sum[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) sum[r][v] = Vec<T>{};
  for (int k = first; k < last; ++k) {
    const T *b_k = b + k * b_stride, *a_k = a.data + k * a.column;
    Vec<T> row[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) row[v] = load<T>(b_k + v * lanes<T>);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sum[r][v] += a_k[r * a.row] * row[v];
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      T* to = c + r * c_stride + v * lanes<T>;
      store<T>(to, add ? load<T>(to) + sum[r][v] : sum[r][v]);
    }
}

// Columns n .. n + Vectors * lanes - 1 of C.
template <class T, int Vectors>
void columns(Sum which, int rows, int inner, const Factor<T>& a, const Panel<T>& b, const Panel<T>& c, int n, bool add) {
  int m = 0;
  for (; m + kTileRows <= rows; m += kTileRows) {
    const int first = which == Sum::kFromRow ? m : 0, last = which == Sum::kUpToRow ? std::min(inner, m + kTileRows) : inner;
    const Factor<T> at{a.data + m * a.row, a.row, a.column};
    tile<T, kTileRows, Vectors>(first, last, at, b.data + n, b.stride, c.data + m * c.stride + n, c.stride, add);
  }
  for (; m < rows; ++m) {
    const int first = which == Sum::kFromRow ? m : 0, last = which == Sum::kUpToRow ? std::min(inner, m + 1) : inner;
    const Factor<T> at{a.data + m * a.row, a.row, a.column};
    tile<T, 1, Vectors>(first, last, at, b.data + n, b.stride, c.data + m * c.stride + n, c.stride, add);
  }
}

// `width` is the padded number of columns, a multiple of the lanes.
template <class T>
void multiply(Sum which, int rows, int width, int inner, const Factor<T>& a, const Panel<T>& b, const Panel<T>& c, bool add) {
  int n = 0;
  for (; n + kTileVectors * lanes<T> <= width; n += kTileVectors * lanes<T>)
    columns<T, kTileVectors>(which, rows, inner, a, b, c, n, add);
  for (; n < width; n += lanes<T>) columns<T, 1>(which, rows, inner, a, b, c, n, add);
}

template <class T> inline Factor<T> plain(const Panel<T>& m) { return {m.data, m.stride, 1}; }
template <class T> inline Factor<T> transposed(const Panel<T>& m) { return {m.data, 1, m.stride}; }

// to[j][i] = from[i][j] * scale[i] for i < rows, j < columns; columns of `to` beyond `rows` are zeros up to its stride.
template <class T> void transpose(const Panel<T>& from, int rows, int columns, const T* scale, const Panel<T>& to) {
  for (int j = 0; j < columns; ++j) {
    T* out = to.data + j * to.stride;
    for (int i = 0; i < rows; ++i) out[i] = from.data[i * from.stride + j] * (scale ? scale[i] : T(1));
    std::fill(out + rows, out + to.stride, T(0));
  }
}

}  // namespace adjcomp
