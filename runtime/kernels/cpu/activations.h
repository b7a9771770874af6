// Sigmoid and softplus of a few vectors side by side: each alone is a chain of some twenty dependent operations.
#pragma once
#include "simd.h"

namespace adjcomp {

// e^v of W vectors; 0 below the normal range, infinity above it, NaN stays NaN. `Below`: v is known to be small enough for a number.
template <class T, int W, bool Below = false> inline void exps(const Vec<T>* v, Vec<T>* out) {
  const T log2e = T(1.442695040888963407359924681001892137L);
  const T ln2_high = std::is_same<T, float>::value ? T(0x1.62e4p-1) : T(0x1.62e42fefa38p-1);  // short, so that k times it is exact
  const T ln2_low = T(0.693147180559945309417232121458176568L - (long double)ln2_high);
  const T low = T(0.69314718) * Format<T>::low, high = T(0.69314718) * Format<T>::high;
  Vec<T> in[W], shifted[W], rest[W];
#pragma GCC unroll 8
  for (int i = 0; i < W; ++i) in[i] = Below ? at_least<T>(v[i], low) : clamp<T>(v[i], low, high);
#pragma GCC unroll 8
  for (int i = 0; i < W; ++i) shifted[i] = in[i] * log2e + Format<T>::magic;
#pragma GCC unroll 8
  for (int i = 0; i < W; ++i) rest[i] = in[i] - (shifted[i] - Format<T>::magic) * ln2_high;
#pragma GCC unroll 8
  for (int i = 0; i < W; ++i) rest[i] = (rest[i] - (shifted[i] - Format<T>::magic) * ln2_low) * log2e;
  exp2_fractions<T, W>(rest);
#pragma GCC unroll 8
  for (int i = 0; i < W; ++i) out[i] = rest[i] * power_of_two<T>(shifted[i]);
}
template <class T> inline Vec<T> exp(Vec<T> v) {
  exps<T, 1>(&v, &v);
  return v;
}

#if defined(__AVX512F__)
// 1 / v for 1 <= v < 2^126: an estimate of 14 bits and one Newton step take half the time of a division.
inline VecFloat reciprocal(VecFloat v) {
  const VecFloat r = (VecFloat)_mm512_rcp14_ps((__m512)v);
  return r + r * (1.0f - v * r);
}
#else
inline VecFloat reciprocal(VecFloat v) { return 1.0f / v; }
#endif
inline VecDouble reciprocal(VecDouble v) { return 1.0 / v; }

// 1 / (1 + e^-v); below -87 (-708 for double) what it is there, a number of that size.
template <class T, int W> inline void sigmoids(const Vec<T>* v, Vec<T>* out) {
  const T least = std::is_same<T, float>::value ? T(-87) : T(-708);
  Vec<T> e[W];
#pragma GCC unroll 8
  for (int i = 0; i < W; ++i) e[i] = -at_least<T>(v[i], least);
  exps<T, W, true>(e, e);
#pragma GCC unroll 8
  for (int i = 0; i < W; ++i) out[i] = reciprocal(T(1) + e[i]);
}
template <class T> inline Vec<T> sigmoid(Vec<T> v) {
  sigmoids<T, 1>(&v, &v);
  return v;
}
template <class T> inline Vec<T> silu(Vec<T> v) { return v * sigmoid<T>(v); }

// log(1 + e) / e for e in [0, 1]: minimax in relative error (5e-9 for float, 2e-18 for double), lowest power first.
inline constexpr float kLog1pFloat[] = {0.9999999952881524f,  -0.499999024268511f,  0.333299624871627f,   -0.2495413427469744f,
                                        0.19675942441668612f, -0.15305602381584316f, 0.10603672895763157f, -0.056959726223501136f,
                                        0.019851571706808745f, -0.0032440508921346744f};
inline constexpr double kLog1pDouble[] = {
    1.0,                  -0.49999999999999856, 0.3333333333330922,    -0.24999999998422778,  0.19999999945152652,
    -0.16666665493201296, 0.14285697424199104,  -0.12499827580216433,  0.11109804334670356,   -0.09992437486636158,
    0.09056730672387112,  -0.08210569732426723, 0.07336853296469743,   -0.06302978486824047,  0.05028076615203863,
    -0.03575814974904428, 0.021708114587821535, -0.01074396852685545,  0.0041098641805239755, -0.0011299347211925453,
    0.0001975044748609255, -1.641812281644003e-05};
template <class T> inline constexpr auto& log1p_coefficients() {
  if constexpr (std::is_same<T, float>::value)
    return kLog1pFloat;
  else
    return kLog1pDouble;
}

// log(1 + e^v) of W vectors, as torch the identity above 20, and its slope, unless that is null.
template <class T, int W> inline void softpluses(const Vec<T>* v, Vec<T>* out, Vec<T>* slope) {
  Vec<T> e[W], q[W];
#pragma GCC unroll 8
  for (int i = 0; i < W; ++i) e[i] = v[i] > T(0) ? -v[i] : v[i];
  exps<T, W, true>(e, e);
  polynomials<T, W>(log1p_coefficients<T>(), e, q);
#pragma GCC unroll 8
  for (int i = 0; i < W; ++i) {
    const auto linear = v[i] > T(20);  // in float the sum below is v there by itself
    if (slope) {
      const Vec<T> share = reciprocal(T(1) + e[i]);
      const Vec<T> rise = v[i] > T(0) ? share : e[i] * share;
      slope[i] = std::is_same<T, float>::value ? rise : linear ? splat<T>(T(1)) : rise;
    }
    const Vec<T> exact = q[i] * e[i] + at_least<T>(v[i], T(0));
    out[i] = std::is_same<T, float>::value ? exact : linear ? v[i] : exact;
  }
}

}  // namespace adjcomp
