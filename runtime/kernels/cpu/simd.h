// Vectors of the machine's own width, and the elementary functions that the kernels need, for float and double.
//
// Built with GCC's vector extension (Clang has it too) and without -ffast-math, so that NaN, infinities and subnormals behave.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define ADJCOMP_VECTOR_BYTES 64
#elif defined(__AVX__)
#define ADJCOMP_VECTOR_BYTES 32
#else
#define ADJCOMP_VECTOR_BYTES 16
#endif

namespace adjcomp {

typedef float VecFloat __attribute__((vector_size(ADJCOMP_VECTOR_BYTES)));
typedef double VecDouble __attribute__((vector_size(ADJCOMP_VECTOR_BYTES)));
typedef int32_t VecInt __attribute__((vector_size(ADJCOMP_VECTOR_BYTES)));
typedef int64_t VecLong __attribute__((vector_size(ADJCOMP_VECTOR_BYTES)));

template <class T> using Vec = std::conditional_t<std::is_same<T, float>::value, VecFloat, VecDouble>;
template <class T> using VecBits = std::conditional_t<std::is_same<T, float>::value, VecInt, VecLong>;
template <class T> constexpr int lanes = ADJCOMP_VECTOR_BYTES / sizeof(T);

template <class T> inline Vec<T> splat(T value) { return value - Vec<T>{}; }  // minus: x - 0 is x for every x, also -0

template <class T> inline Vec<T> load(const T* p) {
  Vec<T> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class T> inline void store(T* p, Vec<T> v) { std::memcpy(p, &v, sizeof v); }

// The first `count` lanes; the others are zero, or left alone in memory.
template <class T> inline Vec<T> load_some(const T* p, int count) {
  if (count == lanes<T>) return load<T>(p);
  Vec<T> v{};
  std::memcpy(&v, p, sizeof(T) * count);
  return v;
}
template <class T> inline void store_some(T* p, Vec<T> v, int count) {
  if (count == lanes<T>) return store<T>(p, v);
  std::memcpy(p, &v, sizeof(T) * count);
}

// `v` between bounds; NaN stays NaN.
template <class T> inline Vec<T> at_least(Vec<T> v, T low) {
#if defined(__AVX512F__)
  if constexpr (std::is_same<T, float>::value) return (VecFloat)_mm512_max_ps((__m512)splat<float>(low), (__m512)v);
#endif
  return v < low ? splat<T>(low) : v;
}
template <class T> inline Vec<T> at_most(Vec<T> v, T high) {
#if defined(__AVX512F__)
  if constexpr (std::is_same<T, float>::value) return (VecFloat)_mm512_min_ps((__m512)splat<float>(high), (__m512)v);
#endif
  return v > high ? splat<T>(high) : v;
}
template <class T> inline Vec<T> clamp(Vec<T> v, T low, T high) { return at_most<T>(at_least<T>(v, low), high); }

// Whether a comparison holds in every lane.
template <class M> inline bool all_lanes(M mask) {
  int64_t words[sizeof(M) / 8], all = -1;
  std::memcpy(words, &mask, sizeof mask);
  for (int64_t word : words) all &= word;
  return all == -1;
}

template <class T> inline T sum_lanes(Vec<T> v) {
  T total = 0;
  for (int i = 0; i < lanes<T>; ++i) total += v[i];
  return total;
}

// 2^f for f in [-0.5, 0.5], of W vectors in place: 1 + f q(f), minimax in relative error (9e-8 for float, 4e-18 for double).
inline constexpr float kExp2Float[] = {1.0f, 0x1.62e42ap-1f, 0x1.ebf9bcp-3f, 0x1.c6b754p-5f, 0x1.3cea88p-7f, 0x1.5bbap-10f};
inline constexpr double kExp2Double[] = {
    1.0,
    0.6931471805599453,    0.2402265069591013,     0.055504108664820084,   0.009618129107594112,
    0.0013333558146774776, 0.00015403530457120838, 1.525273349299735e-05,  1.321543527847803e-06,
    1.0178199620024734e-07, 7.0737838391453505e-09, 4.4347647168011575e-10};
template <class T> inline constexpr auto& exp2_coefficients() {
  if constexpr (std::is_same<T, float>::value)
    return kExp2Float;
  else
    return kExp2Double;
}
// The polynomial with coefficients c, lowest power first, of W vectors.
template <class T, int W, int Terms> inline void polynomials(const T (&c)[Terms], const Vec<T>* v, Vec<T>* q) {
#pragma GCC unroll 8
  for (int i = 0; i < W; ++i) q[i] = v[i] * c[Terms - 1] + c[Terms - 2];
#pragma GCC unroll 20
  for (int k = Terms - 3; k >= 0; --k)
#pragma GCC unroll 8
    for (int i = 0; i < W; ++i) q[i] = q[i] * v[i] + c[k];
}
template <class T, int W> inline void exp2_fractions(Vec<T>* f) {
  Vec<T> q[W];
  polynomials<T, W>(exp2_coefficients<T>(), f, q);
#pragma GCC unroll 8
  for (int i = 0; i < W; ++i) f[i] = q[i];
}

template <class T> struct Format;
template <> struct Format<float> {
  // Adding `magic` rounds to an integer and leaves it, biased for an exponent field, in the low bits.
  static constexpr float magic = 0x1.8p23f + 127.0f, low = -127.0f, high = 128.0f;
  static constexpr int shift = 23;
};
template <> struct Format<double> {
  static constexpr double magic = 0x1.8p52 + 1023.0, low = -1023.0, high = 1024.0;
  static constexpr int shift = 52;
};

// 2^k, where `shifted` is k + magic; 0 for the least k, infinity for the largest.
template <class T> inline Vec<T> power_of_two(Vec<T> shifted) {
  VecBits<T> bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits <<= Format<T>::shift;
  Vec<T> scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return scale;
}
// 2^fraction times 2^k, where `shifted` is k + magic.
template <class T> inline Vec<T> scaled_exp2(Vec<T> fraction, Vec<T> shifted) {
  exp2_fractions<T, 1>(&fraction);
  return fraction * power_of_two<T>(shifted);
}

// 2^(a b), the product taken exactly where there is a fused multiply-add; NaN stays NaN. `Normal`: |a b| < high - 2 or NaN, so that
// the result is a normal number. Else 0 below the normal range, infinity above it.
template <class T, bool Normal> inline Vec<T> exp2_product(Vec<T> a, Vec<T> b) {
  if constexpr (Normal) {
    const Vec<T> shifted = a * b + Format<T>::magic;
    return scaled_exp2<T>(a * b - (shifted - Format<T>::magic), shifted);
  }
  const Vec<T> v = clamp<T>(a * b, Format<T>::low, Format<T>::high);
  const Vec<T> shifted = v + Format<T>::magic;
  return scaled_exp2<T>(v - (shifted - Format<T>::magic), shifted);
}

}  // namespace adjcomp
