// Causal depthwise convolution, optionally with SiLU, and its VJP.
//
// A task is a block of steps of one sequence, all channels: rows are read in order. Row t < 0 is row t + W - 1 of the tail.
#include <algorithm>
#include <vector>

#include "arguments.h"

using namespace adjcomp;

namespace {

constexpr int64_t kBlock = 256;  // steps of a task; each leaves its own partial sums of the weight's cotangent

struct Arguments {  // mirrors Arguments of causal_conv1d.py
  int64_t batch, steps, channels, width, silu, threads;
  Matrix x, y, dy, dx, tail, dtail_last, dtail;
  void *taps, *bias, *dtaps;  // taps: (W, channels); dtaps: (batch, blocks, W + 1, channels), the bias's cotangent last
};

template <class T> struct Convolution {
  const Arguments& a;
  int64_t b;
  Rows<T> x, tail;
  const T *taps, *bias;
  std::vector<T> zeros;

  Convolution(const Arguments& arguments, int64_t batch)
      : a(arguments), b(batch), x(rows<T>(a.x, batch, 0, 0)), tail(rows<T>(a.tail, batch, 0, 0)),
        taps(static_cast<const T*>(a.taps)), bias(static_cast<const T*>(a.bias)), zeros(a.channels) {}

  const T* input(int64_t t) const {
    if (t >= 0) return x.at(t);
    return tail ? tail.at(t + a.width - 1) : zeros.data();
  }
  // Up to a vector of the convolution at step t, before the activation. `in` holds the rows t - W + 1 .. t.
  Vec<T> at(const T* const* in, int64_t d, int count) const {
    Vec<T> sum = bias ? load_some<T>(bias + d, count) : Vec<T>{};
    for (int64_t w = 0; w < a.width; ++w) sum += load_some<T>(taps + w * a.channels + d, count) * load_some<T>(in[w] + d, count);
    return sum;
  }
};

template <class T> void forward(const Arguments& a, int64_t b, int64_t first, int64_t last) {
  const Convolution<T> c(a, b);
  const Rows<T> y = rows<T>(a.y, b, 0, 0);
  std::vector<const T*> in(a.width);
  for (int64_t t = first; t < last; ++t) {
    for (int64_t w = 0; w < a.width; ++w) in[w] = c.input(t - a.width + 1 + w);
    for (int64_t d = 0; d < a.channels; d += lanes<T>) {
      const int count = int(std::min<int64_t>(lanes<T>, a.channels - d));
      const Vec<T> out = c.at(in.data(), d, count);
      store_some<T>(y.at(t) + d, a.silu ? silu<T>(out) : out, count);
    }
  }
}

// The cotangent of the convolution at step t into `dout`; its products with the inputs into `dtaps` unless that is null.
template <class T>
void output_vjp(const Convolution<T>& c, const Rows<T>& dy, int64_t t, const T** in, T* dout, T* dtaps) {
  const Arguments& a = c.a;
  for (int64_t w = 0; w < a.width; ++w) in[w] = c.input(t - a.width + 1 + w);
  for (int64_t d = 0; d < a.channels; d += lanes<T>) {
    const int count = int(std::min<int64_t>(lanes<T>, a.channels - d));
    Vec<T> g = dy ? load_some<T>(dy.at(t) + d, count) : Vec<T>{};
    if (a.silu) {
      const Vec<T> out = c.at(in, d, count), open = sigmoid<T>(out);
      g *= open * (T(1) + out * (T(1) - open));
    }
    store_some<T>(dout + d, g, count);
    for (int64_t w = 0; dtaps && w <= a.width; ++w) {
      T* sum = dtaps + w * a.channels + d;
      store_some<T>(sum, load_some<T>(sum, count) + (w < a.width ? g * load_some<T>(in[w] + d, count) : g), count);
    }
  }
}

// The cotangent of input row t from the cotangents of outputs t .. t + W - 1 (`ring`, by step modulo W; steps outside are zeros).
template <class T> void input_vjp(const Convolution<T>& c, int64_t t, const T* ring, T* to) {
  const Arguments& a = c.a;
  const Rows<T> last = rows<T>(a.dtail_last, c.b, 0, 0);
  const int64_t in_tail = t - (a.steps - (a.width - 1));
  for (int64_t d = 0; d < a.channels; d += lanes<T>) {
    const int count = int(std::min<int64_t>(lanes<T>, a.channels - d));
    Vec<T> sum = last && in_tail >= 0 ? load_some<T>(last.at(in_tail) + d, count) : Vec<T>{};
    for (int64_t ahead = 0; ahead < a.width; ++ahead) {
      if (t + ahead < 0 || t + ahead >= a.steps) continue;
      const T* tap = c.taps + (a.width - 1 - ahead) * a.channels + d;
      sum += load_some<T>(tap, count) * load_some<T>(ring + (t + ahead) % a.width * a.channels + d, count);
    }
    store_some<T>(to + d, sum, count);
  }
}

// Walks its steps backwards, so that the outputs that read an input are known when it is reached.
template <class T> void vjp(const Arguments& a, int64_t b, int64_t block, int64_t first, int64_t last) {
  const Convolution<T> c(a, b);
  const Rows<T> dy = rows<T>(a.dy, b, 0, 0), dx = rows<T>(a.dx, b, 0, 0), dtail = rows<T>(a.dtail, b, 0, 0);
  const int64_t blocks = (a.steps + kBlock - 1) / kBlock;
  T* dtaps = a.dtaps ? static_cast<T*>(a.dtaps) + (b * blocks + block) * (a.width + 1) * a.channels : nullptr;
  if (dtaps) std::fill_n(dtaps, (a.width + 1) * a.channels, T(0));
  std::vector<T> ring(a.width * a.channels);
  std::vector<const T*> in(a.width);
  for (int64_t t = std::min(a.steps, last + a.width - 1) - 1; t >= first; --t) {
    output_vjp<T>(c, dy, t, in.data(), ring.data() + t % a.width * a.channels, t < last ? dtaps : nullptr);
    if (t < last && dx) input_vjp<T>(c, t, ring.data(), dx.at(t));
  }
  if (first > 0 || !dtail) return;
  for (int64_t t = -1; t >= 1 - a.width; --t) input_vjp<T>(c, t, ring.data(), dtail.at(t + a.width - 1));
}

template <class T> void run(const Arguments& a, bool backward) {
  const int64_t blocks = (a.steps + kBlock - 1) / kBlock, tasks = a.batch * blocks;
#pragma omp parallel for num_threads(int(std::min(a.threads, tasks))) schedule(static)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t b = task / blocks, block = task % blocks;
    const int64_t first = block * kBlock, last = std::min(a.steps, first + kBlock);
    if (backward)
      vjp<T>(a, b, block, first, last);
    else
      forward<T>(a, b, first, last);
  }
}

}  // namespace

extern "C" {
int64_t block_steps() { return kBlock; }
void forward_float32(const Arguments* a) { run<float>(*a, false); }
void forward_float64(const Arguments* a) { run<double>(*a, false); }
void vjp_float32(const Arguments* a) { run<float>(*a, true); }
void vjp_float64(const Arguments* a) { run<double>(*a, true); }
}
