// h[t] = A[t] h[t-1] + b[t] with a matrix per step, and its VJP.
//
// Bytes: A, b and h once; the VJP moves dh, A, h, dA and db once. That is the least.
#include <algorithm>
#include <vector>

#include "arguments.h"

using namespace adjcomp;

namespace {

struct Arguments {  // mirrors Arguments of dense_scan.py; a row of A and dA is a whole N x N matrix
  int64_t batch, steps, size, threads;
  Matrix A, b, h, dh, dA, db;
  void *h0, *h_last, *dh_last, *dh0;  // (batch, N), contiguous
};

template <class T> std::vector<T> start(const void* from, int64_t batch, int64_t size) {
  std::vector<T> state(size, T(0));
  if (from) std::copy_n(static_cast<const T*>(from) + batch * size, size, state.begin());
  return state;
}

template <class T> void forward(const Arguments& k, int64_t batch) {
  const Rows<T> A = rows<T>(k.A, batch, 0, 0), b = rows<T>(k.b, batch, 0, 0), h = rows<T>(k.h, batch, 0, 0);
  const std::vector<T> first = start<T>(k.h0, batch, k.size);
  const T* before = first.data();
  for (int64_t t = 0; t < k.steps; ++t) {
    const T* row = A.at(t);
    T* out = h.at(t);
    for (int64_t i = 0; i < k.size; ++i, row += k.size) {
      T sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < k.size; ++j) sum += row[j] * before[j];
      out[i] = sum + b.at(t)[i];
    }
    before = out;
  }
  std::copy_n(before, k.size, static_cast<T*>(k.h_last) + batch * k.size);
}

template <class T> void adjoint(const Arguments& k, int64_t batch) {
  const Rows<T> A = rows<T>(k.A, batch, 0, 0), h = rows<T>(k.h, batch, 0, 0), dh = rows<T>(k.dh, batch, 0, 0);
  const Rows<T> dA = rows<T>(k.dA, batch, 0, 0), db = rows<T>(k.db, batch, 0, 0);
  const std::vector<T> first = start<T>(k.h0, batch, k.size);
  std::vector<T> lambda = start<T>(k.dh_last, batch, k.size), carry(k.size);
  for (int64_t t = k.steps - 1; t >= 0; --t) {
    const T *row = A.at(t), *before = t > 0 ? h.at(t - 1) : first.data();
    for (int64_t i = 0; dh && i < k.size; ++i) lambda[i] += dh.at(t)[i];
    if (db) std::copy(lambda.begin(), lambda.end(), db.at(t));
    std::fill(carry.begin(), carry.end(), T(0));
    for (int64_t i = 0; i < k.size; ++i, row += k.size) {
      const T l = lambda[i];
      T* sum = carry.data();
#pragma omp simd
      for (int64_t j = 0; j < k.size; ++j) sum[j] += row[j] * l;
      if (!dA) continue;
      T* to = dA.at(t) + i * k.size;
#pragma omp simd
      for (int64_t j = 0; j < k.size; ++j) to[j] = l * before[j];
    }
    lambda.swap(carry);
  }
  if (k.dh0) std::copy(lambda.begin(), lambda.end(), static_cast<T*>(k.dh0) + batch * k.size);
}

template <class T> void run(const Arguments& k, bool vjp) {
#pragma omp parallel for num_threads(int(std::min(k.threads, k.batch))) schedule(static)
  for (int64_t batch = 0; batch < k.batch; ++batch) {
    if (vjp)
      adjoint<T>(k, batch);
    else
      forward<T>(k, batch);
  }
}

}  // namespace

extern "C" {
void forward_float32(const Arguments* a) { run<float>(*a, false); }
void forward_float64(const Arguments* a) { run<double>(*a, false); }
void vjp_float32(const Arguments* a) { run<float>(*a, true); }
void vjp_float64(const Arguments* a) { run<double>(*a, true); }
}
