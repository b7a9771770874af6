// Root-mean-square normalisation of rows, and its VJP with what else flows into the input added on the way.
//
// A task is a block of rows. A row is read twice, the second time from the first-level cache.
//
// Bytes: x and y once (VJP: dy, x, dx and what else flows in), and a row of sums for every 128 rows: 1.01 times the least.
#include <algorithm>
#include <vector>

#include "arguments.h"
#include "sums.h"

using namespace adjcomp;

namespace {

constexpr int64_t kBlock = 128;  // rows of a task; each leaves its own partial sum of the weight's cotangent

struct Arguments {  // mirrors Arguments of rms_norm.py
  int64_t count, channels, threads;
  double eps;
  Matrix x, y, dy, dresidual, dx;
  void *weight, *scale, *dweight;  // scale: (count); dweight: (channels)
};

template <class T> struct Norm {
  const Arguments& a;
  Rows<T> x, y, dy, dresidual, dx;
  const T* weight;
  T* scale;

  explicit Norm(const Arguments& arguments)
      : a(arguments), x(rows<T>(a.x, 0, 0, 0)), y(rows<T>(a.y, 0, 0, 0)), dy(rows<T>(a.dy, 0, 0, 0)),
        dresidual(rows<T>(a.dresidual, 0, 0, 0)), dx(rows<T>(a.dx, 0, 0, 0)), weight(static_cast<const T*>(a.weight)),
        scale(static_cast<T*>(a.scale)) {}

  int left(int64_t d) const { return int(std::min<int64_t>(lanes<T>, a.channels - d)); }
  Vec<T> gain(int64_t d, int count) const { return weight ? load_some<T>(weight + d, count) : splat<T>(1); }

  void forward(int64_t r) const {
    Vec<T> squares{};
    for (int64_t d = 0; d < a.channels; d += lanes<T>) {
      const Vec<T> v = load_some<T>(x.at(r) + d, left(d));
      squares += v * v;
    }
    scale[r] = T(1) / std::sqrt(sum_lanes<T>(squares) / T(a.channels) + T(a.eps));
    for (int64_t d = 0; d < a.channels; d += lanes<T>) {
      const int count = left(d);
      store_some<T>(y.at(r) + d, load_some<T>(x.at(r) + d, count) * scale[r] * gain(d, count), count);
    }
  }

  // dx = scale (dy weight - n mean(dy weight n)) + dresidual with n = x scale; adds dy n to `dweight` unless that is null.
  void vjp(int64_t r, T* dweight) const {
    Vec<T> products{};
    for (int64_t d = 0; d < a.channels; d += lanes<T>) {
      const int count = left(d);
      const Vec<T> out = load_some<T>(dy.at(r) + d, count) * (load_some<T>(x.at(r) + d, count) * scale[r]);
      products += out * gain(d, count);
      if (dweight) store_some<T>(dweight + d, load_some<T>(dweight + d, count) + out, count);
    }
    if (!dx) return;
    const T mean = sum_lanes<T>(products) / T(a.channels);
    for (int64_t d = 0; d < a.channels; d += lanes<T>) {
      const int count = left(d);
      const Vec<T> normal = load_some<T>(x.at(r) + d, count) * scale[r];
      Vec<T> out = scale[r] * (load_some<T>(dy.at(r) + d, count) * gain(d, count) - normal * mean);
      if (dresidual) out += load_some<T>(dresidual.at(r) + d, count);
      store_some<T>(dx.at(r) + d, out, count);
    }
  }
};

template <class T> void run(const Arguments& a, bool backward) {
  const Norm<T> norm(a);
  const int64_t blocks = (a.count + kBlock - 1) / kBlock;
  std::vector<T> parts(a.dweight ? blocks * a.channels : 0);
#pragma omp parallel for num_threads(int(std::min(a.threads, blocks))) schedule(static)
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t last = std::min(a.count, (block + 1) * kBlock);
    T* dweight = a.dweight ? parts.data() + block * a.channels : nullptr;
    for (int64_t r = block * kBlock; r < last; ++r) {
      if (backward)
        norm.vjp(r, dweight);
      else
        norm.forward(r);
    }
  }
  if (a.dweight) add_up(parts.data(), blocks, a.channels, static_cast<T*>(a.dweight));
}

}  // namespace

extern "C" {
void forward_float32(const Arguments* a) { run<float>(*a, false); }
void forward_float64(const Arguments* a) { run<double>(*a, false); }
void vjp_float32(const Arguments* a) { run<float>(*a, true); }
void vjp_float64(const Arguments* a) { run<double>(*a, true); }
}
