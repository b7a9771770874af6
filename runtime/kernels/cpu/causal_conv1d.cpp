// Causal depthwise convolution, optionally with SiLU, and its VJP.
//
// A task is a block of steps of one sequence, walked in strips: a few rows, one vector of channels after the other, so that the taps
// and the sums of their cotangents stay in registers while rows are still read side by side. Row t < 0 is row t + W - 1 of the tail.
//
// Bytes: x and y once (VJP: x, dy, dx), and for each block of 256 steps a few rows at its ends again (VJP: and W + 1 rows of sums):
// for W = 4 at most 1.01 (VJP 1.02) times the least. Rows that strips share come from the second-level cache.
#include <algorithm>
#include <vector>

#include "activations.h"
#include "arguments.h"
#include "sums.h"

using namespace adjcomp;

namespace {

constexpr int64_t kBlock = 256;  // steps of a task; each leaves its own partial sums of the weight's cotangent
constexpr int kStrip = 8;        // with the rows before it, as many lines of one cache set as a core has
constexpr int kWidth = 4;        // of a filter with code of its own; shorter ones are padded with zeros in front
constexpr int kMostWidth = 64;

struct Arguments {  // mirrors Arguments of causal_conv1d.py
  int64_t batch, steps, channels, width, silu, threads;
  Matrix x, y, dy, dx, tail, tail_last, dtail_last, dtail;
  void *weight, *bias, *dweight, *dbias;  // weight, dweight: (channels, W)
  void *taps, *dtaps;  // scratch: (W, channels), and for each task (W + 1, channels), the bias's cotangent last
};

// The channels d .. d + count - 1. All: they fill a vector, so that no code of the inner loops may call memcpy, which would cost them
// their registers.
template <class T, bool All> struct Channels {
  int64_t d;
  int count;
  Vec<T> load(const T* row) const { return All ? adjcomp::load<T>(row + d) : load_some<T>(row + d, count); }
  // Brings row t near, where there is one: the strip after this one, so that memory works while the cores compute.
  void fetch(const Rows<T>& rows, int64_t t, int64_t steps) const {
    if (rows && t >= 0 && t < steps) __builtin_prefetch(rows.at(t) + d, 0, 2);
  }
  void fetch_to_write(const Rows<T>& rows, int64_t t, int64_t steps) const {
    if (rows && t >= 0 && t < steps) __builtin_prefetch(rows.at(t) + d, 1, 2);
  }
  void store(T* row, Vec<T> v) const { All ? adjcomp::store<T>(row + d, v) : store_some<T>(row + d, v, count); }
};

// A filter of one vector of channels; W is 0 where the width is known at run time only.
template <class T, int W> struct Filter {
  const int given;
  Vec<T> taps[W ? W : kMostWidth], bias;
  int width() const { return W ? W : given; }

  template <class Part> Filter(const Arguments& a, const Part& part) : given(int(a.width)) {
    const int missing = width() - given;
#pragma GCC unroll 4
    for (int w = 0; w < width(); ++w)
      taps[w] = w < missing ? Vec<T>{} : part.load(static_cast<T*>(a.taps) + (w - missing) * a.channels);
    bias = a.bias ? part.load(static_cast<T*>(a.bias)) : Vec<T>{};
  }
};

// The rows that steps first .. first + count - 1 of one sequence read: row(s + w) meets tap w at step s.
template <class T> struct Strip {
  const T* rows[kStrip + kMostWidth];
  int count;
};

template <class T, int W> struct Sequence {
  const Arguments& a;
  int64_t b;
  Rows<T> x, tail;
  std::vector<T> zeros;
  int width() const { return W ? W : int(a.width); }

  Sequence(const Arguments& arguments, int64_t batch)
      : a(arguments), b(batch), x(adjcomp::rows<T>(a.x, batch, 0, 0)), tail(adjcomp::rows<T>(a.tail, batch, 0, 0)),
        zeros(a.channels) {}

  const T* input(int64_t t) const {
    if (t >= 0) return x.at(t);
    return tail && t + a.width - 1 >= 0 ? tail.at(t + a.width - 1) : zeros.data();
  }
  Strip<T> strip(int64_t first, int64_t last) const {
    Strip<T> found;
    found.count = int(last - first);
    for (int i = 0; i < found.count + width() - 1; ++i) found.rows[i] = input(first - (width() - 1) + i);
    return found;
  }
  template <class F> void each_vector(F run) const {
    int64_t d = 0;
    for (; d + lanes<T> <= a.channels; d += lanes<T>) run(Channels<T, true>{d, lanes<T>});
    if (d < a.channels) run(Channels<T, false>{d, int(a.channels - d)});
  }
};

// The convolution at step s of a strip, before the activation.
template <class T, int W, class Part> inline Vec<T> convolved(const Filter<T, W>& f, const Strip<T>& in, int s, const Part& part) {
  Vec<T> sum = f.bias;
#pragma GCC unroll 4
  for (int w = 0; w < f.width(); ++w) sum += f.taps[w] * part.load(in.rows[s + w]);
  return sum;
}

template <class T> inline void sigmoids_of_strip(const Vec<T>* in, Vec<T>* out) {
  for (int s = 0; s < kStrip; s += 4) sigmoids<T, 4>(in + s, out + s);
}

template <class T, int W> void forward(const Arguments& a, int64_t b, int64_t first, int64_t last) {
  const Sequence<T, W> q(a, b);
  const Rows<T> y = rows<T>(a.y, b, 0, 0);
  for (int64_t t = first; t < last; t += kStrip) {
    const Strip<T> in = q.strip(t, std::min(last, t + kStrip));
    q.each_vector([&](const auto& part) {
      const Filter<T, W> f(a, part);
      Vec<T> out[kStrip] = {}, open[kStrip];
      for (int s = 0; s < in.count; ++s) {
        part.fetch(q.x, t + s + kStrip, a.steps);
        part.fetch_to_write(y, t + s + kStrip, a.steps);
        out[s] = convolved(f, in, s, part);
      }
      if (a.silu) sigmoids_of_strip<T>(out, open);
      for (int s = 0; s < in.count; ++s) part.store(y.at(t + s), a.silu ? out[s] * open[s] : out[s]);
    });
  }
}

// The cotangents of the convolution at each step of a strip, in place of those of y.
template <class T, int W, class Part>
inline void outputs_vjp(const Filter<T, W>& f, const Strip<T>& in, const Part& part, bool activated, Vec<T>* g) {
  if (!activated) return;
  Vec<T> out[kStrip] = {}, open[kStrip];
  for (int s = 0; s < in.count; ++s) out[s] = convolved(f, in, s, part);
  sigmoids_of_strip<T>(out, open);
  for (int s = 0; s < in.count; ++s) g[s] *= open[s] * (T(1) + out[s] * (T(1) - open[s]));
}

// One task of the VJP. It walks backwards, so that the outputs that read an input are known when it is reached.
template <class T, int W> struct Vjp {
  const Arguments& a;
  Sequence<T, W> q;
  Rows<T> dy, dx, dtail, dlast;
  T* dtaps;
  std::vector<T> later;  // cotangents of the W - 1 outputs after the rows at hand, the next one first

  Vjp(const Arguments& arguments, int64_t b, T* sums)
      : a(arguments), q(a, b), dy(rows<T>(a.dy, b, 0, 0)), dx(rows<T>(a.dx, b, 0, 0)), dtail(rows<T>(a.dtail, b, 0, 0)),
        dlast(rows<T>(a.dtail_last, b, 0, 0)), dtaps(sums), later((q.width() - 1) * a.channels) {}

  // What flows to row t from the outgoing tail.
  const T* from_tail(int64_t t) const {
    const int64_t in_tail = t - (a.steps - (a.width - 1));
    return dlast && in_tail >= 0 ? dlast.at(in_tail) : nullptr;
  }

  void run(int64_t first, int64_t last) {
    if (last < a.steps) look_ahead(last);
    for (int64_t end = last; end > first; end -= std::min<int64_t>(kStrip, end - first)) {
      const int64_t start = std::max(first, end - kStrip);
      const Strip<T> in = q.strip(start, end);
      q.each_vector([&](const auto& part) { vector(in, start, part); });
    }
    if (first > 0 || !dtail) return;
    q.each_vector([&](const auto& part) { into_tail(part); });
  }

  // Outputs of the next task that read inputs of this one.
  void look_ahead(int64_t last) {
    for (int64_t t = last; t < std::min(a.steps, last + q.width() - 1); ++t) {
      const Strip<T> in = q.strip(t, t + 1);
      q.each_vector([&](const auto& part) {
        const Filter<T, W> f(a, part);
        Vec<T> g = dy ? part.load(dy.at(t)) : Vec<T>{};
        outputs_vjp(f, in, part, a.silu, &g);
        part.store(later.data() + (t - last) * a.channels, g);
      });
    }
  }

  // The cotangent of row t, and the outputs' cotangents one step on.
  template <class Part>
  inline Vec<T> input_vjp(const Filter<T, W>& f, int64_t t, const Part& part, Vec<T> g, Vec<T>* next) const {
    const T* tail = from_tail(t);
    Vec<T> sum = f.taps[f.width() - 1] * g;
    if (tail) sum += part.load(tail);
#pragma GCC unroll 4
    for (int w = f.width() - 2; w >= 0; --w) sum += f.taps[w] * next[f.width() - 2 - w];
#pragma GCC unroll 4
    for (int i = f.width() - 2; i > 0; --i) next[i] = next[i - 1];
    if (f.width() > 1) next[0] = g;
    return sum;
  }

  template <class Part> void read_later(Vec<T>* next, const Part& part) const {
#pragma GCC unroll 4
    for (int i = 0; i < q.width() - 1; ++i) next[i] = part.load(later.data() + i * a.channels);
  }

  template <class Part> void vector(const Strip<T>& in, int64_t start, const Part& part) {
    const Filter<T, W> f(a, part);
    Vec<T> next[W ? W : kMostWidth], sums[W ? W : kMostWidth], total{};
    read_later(next, part);
#pragma GCC unroll 4
    for (int w = 0; w < f.width(); ++w) sums[w] = Vec<T>{};
    Vec<T> g[kStrip];
    for (int s = 0; s < in.count; ++s) {
      part.fetch(q.x, start + s - kStrip - f.width() + 1, a.steps);
      part.fetch(dy, start + s - kStrip, a.steps);
      part.fetch_to_write(dx, start + s - kStrip, a.steps);
      g[s] = dy ? part.load(dy.at(start + s)) : Vec<T>{};
    }
    outputs_vjp(f, in, part, a.silu, g);
    for (int s = in.count - 1; s >= 0; --s) {
#pragma GCC unroll 4
      for (int w = 0; w < f.width(); ++w) sums[w] += g[s] * part.load(in.rows[s + w]);
      total += g[s];
      const Vec<T> out = input_vjp(f, start + s, part, g[s], next);
      if (dx) part.store(dx.at(start + s), out);
    }
#pragma GCC unroll 4
    for (int i = 0; i < q.width() - 1; ++i) part.store(later.data() + i * a.channels, next[i]);
    if (dtaps) add_sums(f, sums, total, part);
  }

  template <class Part> void add_sums(const Filter<T, W>& f, const Vec<T>* sums, Vec<T> total, const Part& part) const {
    const int missing = f.width() - f.given;
    for (int w = 0; w <= f.given; ++w) {
      T* to = dtaps + w * a.channels;
      part.store(to, part.load(to) + (w < f.given ? sums[w + missing] : total));
    }
  }

  template <class Part> void into_tail(const Part& part) {
    const Filter<T, W> f(a, part);
    Vec<T> next[W ? W : kMostWidth];
    read_later(next, part);
    for (int64_t t = -1; t >= 1 - a.width; --t)
      part.store(dtail.at(t + a.width - 1), input_vjp(f, t, part, Vec<T>{}, next));
  }
};

template <class T, int W> void task(const Arguments& a, bool backward, int64_t number) {
  const int64_t blocks = (a.steps + kBlock - 1) / kBlock, b = number / blocks, block = number % blocks;
  const int64_t first = block * kBlock, last = std::min(a.steps, first + kBlock), sums = (a.width + 1) * a.channels;
  if (!backward) return forward<T, W>(a, b, first, last);
  T* dtaps = a.dtaps ? static_cast<T*>(a.dtaps) + number * sums : nullptr;
  Vjp<T, W>(a, b, dtaps).run(first, last);
}

// The last W - 1 rows of the tail and x together.
template <class T> void write_tail(const Arguments& a) {
  for (int64_t b = 0; b < a.batch && a.tail_last.data; ++b) {
    const Sequence<T, 0> q(a, b);
    for (int64_t i = 0; i < a.width - 1; ++i)
      std::copy_n(q.input(a.steps - (a.width - 1) + i), a.channels, rows<T>(a.tail_last, b, i, 0).first);
  }
}

template <class T> void write_sums(const Arguments& a, const T* sums) {
  for (int64_t d = 0; d < a.channels; ++d) {
    for (int64_t w = 0; w < a.width && a.dweight; ++w) static_cast<T*>(a.dweight)[d * a.width + w] = sums[w * a.channels + d];
    if (a.dbias) static_cast<T*>(a.dbias)[d] = sums[a.width * a.channels + d];
  }
}

template <class T> void run(const Arguments& given, bool backward) {
  Arguments a = given;
  const int64_t tasks = a.batch * ((a.steps + kBlock - 1) / kBlock), sums = (a.width + 1) * a.channels;
  std::vector<T> taps(a.width * a.channels), dtaps(a.dweight || a.dbias ? tasks * sums : 0), total(dtaps.empty() ? 0 : sums);
  for (int64_t d = 0; d < a.channels; ++d)
    for (int64_t w = 0; w < a.width; ++w) taps[w * a.channels + d] = static_cast<const T*>(a.weight)[d * a.width + w];
  a.taps = taps.data(), a.dtaps = dtaps.empty() ? nullptr : dtaps.data();
#pragma omp parallel for num_threads(int(std::min(a.threads, tasks))) schedule(static)
  for (int64_t number = 0; number < tasks; ++number) {
    if (a.width <= kWidth)
      task<T, kWidth>(a, backward, number);
    else
      task<T, 0>(a, backward, number);
  }
  write_tail<T>(a);
  if (dtaps.empty()) return;
  add_up(dtaps.data(), tasks, sums, total.data());
  write_sums<T>(a, total.data());
}

}  // namespace

extern "C" {
int64_t most_width() { return kMostWidth; }
void forward_float32(const Arguments* a) { run<float>(*a, false); }
void forward_float64(const Arguments* a) { run<double>(*a, false); }
void vjp_float32(const Arguments* a) { run<float>(*a, true); }
void vjp_float64(const Arguments* a) { run<double>(*a, true); }
}
