// h[t] = a[t] h[t-1] + b[t] and its VJP, real and complex (interleaved pairs).
//
// Each task walks whole rows of a range of channels, so that memory is read in order; the state of the range stays in L1.
//
// Bytes: a, b and h once; the VJP moves dh, a, h, da and db once. That is the least.
#include <algorithm>
#include <vector>

#include "arguments.h"

using namespace adjcomp;

namespace {

struct Arguments {  // mirrors Arguments of linear_scan.py; channels count numbers, strides count reals
  int64_t batch, steps, channels, groups, threads;
  Matrix a, b, h, dh, da, db;
  void *h0, *h_last, *dh_last, *dh0;  // (batch, channels), contiguous
};

template <class T> struct Real {
  using Scalar = T;
  static constexpr int parts = 1;
  static void step(const T* a, const T* b, T* state, T* out, int64_t i) { out[i] = state[i] = a[i] * state[i] + b[i]; }
  static void times_conjugate(const T* x, const T* y, T* out, int64_t i) { out[i] = x[i] * y[i]; }
};

template <class T> struct Complex {
  using Scalar = T;
  static constexpr int parts = 2;
  static void step(const T* a, const T* b, T* state, T* out, int64_t i) {
    const T re = a[2 * i] * state[2 * i] - a[2 * i + 1] * state[2 * i + 1] + b[2 * i];
    const T im = a[2 * i] * state[2 * i + 1] + a[2 * i + 1] * state[2 * i] + b[2 * i + 1];
    out[2 * i] = state[2 * i] = re;
    out[2 * i + 1] = state[2 * i + 1] = im;
  }
  static void times_conjugate(const T* x, const T* y, T* out, int64_t i) {
    const T re = x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
    const T im = x[2 * i + 1] * y[2 * i] - x[2 * i] * y[2 * i + 1];
    out[2 * i] = re;
    out[2 * i + 1] = im;
  }
};

template <class F> void copy_state(typename F::Scalar* to, const void* from, int64_t at, int64_t count) {
  using T = typename F::Scalar;
  if (from)
    std::copy_n(static_cast<const T*>(from) + at * F::parts, count * F::parts, to);
  else
    std::fill_n(to, count * F::parts, T(0));
}

template <class F> void forward(const Arguments& k, int64_t batch, int64_t first, int64_t count) {
  using T = typename F::Scalar;
  const int64_t at = batch * k.channels + first;
  std::vector<T> state(count * F::parts);
  copy_state<F>(state.data(), k.h0, at, count);
  const Rows<T> a = rows<T>(k.a, batch, 0, first * F::parts), b = rows<T>(k.b, batch, 0, first * F::parts);
  const Rows<T> h = rows<T>(k.h, batch, 0, first * F::parts);
  for (int64_t t = 0; t < k.steps; ++t) {
    const T *a_t = a.at(t), *b_t = b.at(t);
    T *h_t = h.at(t), *s = state.data();
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) F::step(a_t, b_t, s, h_t, i);
  }
  std::copy_n(state.data(), count * F::parts, static_cast<T*>(k.h_last) + at * F::parts);
}

template <class F> void adjoint(const Arguments& k, int64_t batch, int64_t first, int64_t count) {
  using T = typename F::Scalar;
  const int64_t at = batch * k.channels + first, width = count * F::parts;
  std::vector<T> carry(width), zeros(width), start(width);
  copy_state<F>(carry.data(), k.dh_last, at, count);
  copy_state<F>(start.data(), k.h0, at, count);
  const Rows<T> a = rows<T>(k.a, batch, 0, first * F::parts), h = rows<T>(k.h, batch, 0, first * F::parts);
  const Rows<T> dh = rows<T>(k.dh, batch, 0, first * F::parts), da = rows<T>(k.da, batch, 0, first * F::parts);
  const Rows<T> db = rows<T>(k.db, batch, 0, first * F::parts);
  for (int64_t t = k.steps - 1; t >= 0; --t) {
    const T *a_t = a.at(t), *dh_t = dh ? dh.at(t) : zeros.data(), *before = t > 0 ? h.at(t - 1) : start.data();
    T* lambda = carry.data();
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) lambda[i] += dh_t[i];
    if (db) std::copy_n(lambda, width, db.at(t));
    if (da) {
      T* da_t = da.at(t);
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) F::times_conjugate(lambda, before, da_t, i);
    }
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) F::times_conjugate(lambda, a_t, lambda, i);
  }
  if (k.dh0) std::copy_n(carry.data(), width, static_cast<T*>(k.dh0) + at * F::parts);
}

template <class F> void run(const Arguments& k, bool vjp) {
  const int64_t line = 16, lines = (k.channels + line - 1) / line, tasks = k.batch * k.groups;
#pragma omp parallel for num_threads(int(std::min(k.threads, tasks))) schedule(static)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t group = task % k.groups, first = lines * group / k.groups * line;
    const int64_t count = std::min(k.channels, lines * (group + 1) / k.groups * line) - first;
    if (vjp)
      adjoint<F>(k, task / k.groups, first, count);
    else
      forward<F>(k, task / k.groups, first, count);
  }
}

}  // namespace

extern "C" {
void forward_float32(const Arguments* a) { run<Real<float>>(*a, false); }
void forward_float64(const Arguments* a) { run<Real<double>>(*a, false); }
void forward_complex64(const Arguments* a) { run<Complex<float>>(*a, false); }
void forward_complex128(const Arguments* a) { run<Complex<double>>(*a, false); }
void vjp_float32(const Arguments* a) { run<Real<float>>(*a, true); }
void vjp_float64(const Arguments* a) { run<Real<double>>(*a, true); }
void vjp_complex64(const Arguments* a) { run<Complex<float>>(*a, true); }
void vjp_complex128(const Arguments* a) { run<Complex<double>>(*a, true); }
}
