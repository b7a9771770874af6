// Sums over the lanes of four vectors at once: a fold leaves a quarter of a vector for each of the four. As many folds as a quarter
// has lanes then fit in one vector, which has each sum in a lane.
#pragma once
#include <utility>

#include "simd.h"

namespace adjcomp {

template <class T> constexpr bool can_fold = lanes<T> >= 4;

// Chooses lanes of two vectors: lane i of the result is lane Pick::of(i), where b's lanes follow a's.
template <class T, class Pick, size_t... I> inline Vec<T> chosen(Vec<T> a, Vec<T> b, std::index_sequence<I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Pick::of(I)...);
#else
  return __builtin_shuffle(a, b, VecBits<T>{Pick::of(I)...});
#endif
}
template <class T, class Pick> inline Vec<T> chosen(Vec<T> a, Vec<T> b) {
  return chosen<T, Pick>(a, b, std::make_index_sequence<lanes<T>>());
}

// The lower (0) or upper (1) halves of two vectors.
template <int L, int Half> struct PickHalves {
  static constexpr int of(int i) { return i % (L / 2) + Half * (L / 2) + (i < L / 2 ? 0 : L); }
};
// The even (0) or odd (1) quarters of two vectors, in the order that one instruction gives: vectors of 32 bytes are halves to it.
constexpr bool kHalvesApart = ADJCOMP_VECTOR_BYTES == 32;
template <int L, int Odd> struct PickQuarters {
  static constexpr int quarter(int q) { return kHalvesApart ? (q & 2) + (q & 1) * 4 : q * 2; }  // of the eight of both
  static constexpr int of(int i) { return (quarter(i / (L / 4)) + Odd) * (L / 4) + i % (L / 4); }
};
// Which of the four vectors a quarter of their fold belongs to.
constexpr int folded(int quarter) { return kHalvesApart ? (quarter & 1) * 2 + (quarter >> 1) : quarter; }

// A vector whose halves are each repeated.
template <class T> struct Halves {
  Vec<T> low, high;
};
template <class T> inline Halves<T> halves(const Vec<T>* v) {
#if defined(__AVX512F__)  // two loads instead of two shuffles
  const double* from = reinterpret_cast<const double*>(v);
  const auto half = [&](int64_t i) { return (Vec<T>)_mm512_broadcast_f64x4(_mm256_loadu_pd(from + 4 * i)); };
  return {half(0), half(1)};
#else
  return {chosen<T, PickHalves<lanes<T>, 0>>(*v, *v), chosen<T, PickHalves<lanes<T>, 1>>(*v, *v)};
#endif
}

// The fold of four products v[i] w.
template <class T> inline Vec<T> fold(const Vec<T>* v, const Halves<T>& w) {
  constexpr int L = lanes<T>;
  Vec<T> pair[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const Vec<T> a = v[2 * i], b = v[2 * i + 1];
    pair[i] = chosen<T, PickHalves<L, 0>>(a, b) * w.low + chosen<T, PickHalves<L, 1>>(a, b) * w.high;
  }
  return chosen<T, PickQuarters<L, 0>>(pair[0], pair[1]) + chosen<T, PickQuarters<L, 1>>(pair[0], pair[1]);
}

template <class T> constexpr int kFolds = lanes<T> / 4;  // that fit in one vector

// The first (0) or second (1) halves of what two vectors have of each sum in a quarter, 2 H lanes: the first vector's before the other's.
template <int L, int H, int Second> struct PickSums {
  static constexpr int quarter = L / 4, own = quarter / (2 * H);  // sums of one vector in a quarter
  static constexpr int sum(int i) { return i % quarter / H; }
  static constexpr int of(int i) {
    const int lane = i / quarter * quarter + sum(i) % own * 2 * H + i % H + Second * H;
    return sum(i) < own ? lane : L + lane;
  }
};

// `count` folds as one vector; all of them: lane j of quarter i is the sum of vector `folded(i)` of fold j.
template <class T, int count> inline Vec<T> join_folds(const Vec<T>* folds) {
  if constexpr (count == 1) {
    return folds[0];
  } else {
    constexpr int L = lanes<T>, H = L / 4 / count;
    const Vec<T> a = join_folds<T, count / 2>(folds), b = join_folds<T, count / 2>(folds + count / 2);
    return chosen<T, PickSums<L, H, 0>>(a, b) + chosen<T, PickSums<L, H, 1>>(a, b);
  }
}

}  // namespace adjcomp
