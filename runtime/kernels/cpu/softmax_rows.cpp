// What a head with cross-entropy does to a block of logits: its share of each row's log-sum-exp, and the logits' cotangent in place.
//
// A task is one row, which stays in the first-level cache between its two reads.
//
// Bytes: the logits read once; for the cotangent, read and written once. That is the least.
//
// Legend: r row, v vocabulary entry of the block.
#include <limits>

#include "activations.h"
#include "arguments.h"

using namespace adjcomp;

namespace {

struct Arguments {  // mirrors Arguments of softmax_rows.py
  int64_t count, size, start, threads;  // the block holds entries start .. start + size - 1 of the vocabulary
  Matrix logits;
  void *labels, *total, *picked, *norm, *scale;  // (r); labels are int64
};

template <class T> struct Row {
  const Arguments& a;
  T* logits;
  int64_t r, label;  // the label within the block; outside it, it lies in another one

  Row(const Arguments& arguments, int64_t row)
      : a(arguments), logits(rows<T>(a.logits, 0, 0, 0).at(row)), r(row), label(static_cast<int64_t*>(a.labels)[row] - a.start) {}

  bool holds_label() const { return label >= 0 && label < a.size; }
  T& of(void* numbers) const { return static_cast<T*>(numbers)[r]; }

  // Calls `run` with each vector of logits, and in the last one the lanes that are not there at `padding`.
  template <class F> void each(T padding, F run) const {
    int64_t v = 0;
    for (; v + lanes<T> <= a.size; v += lanes<T>) run(load<T>(logits + v));
    if (v == a.size) return;
    alignas(64) T last[lanes<T>];
    for (int i = 0; i < lanes<T>; ++i) last[i] = v + i < a.size ? logits[v + i] : padding;
    run(load<T>(last));
  }

  // total = log(e^total + sum of e^logit). Without a finite or infinite maximum, exponents are taken as they are.
  void join() const {
    const T none = -std::numeric_limits<T>::infinity();
    Vec<T> most = splat<T>(none), sum{};
    each(none, [&](Vec<T> v) { most = v > most ? v : most; });
    T base = none;
    for (int i = 0; i < lanes<T>; ++i) base = most[i] > base ? most[i] : base;
    T& total = of(a.total);
    if (total > base) base = total;
    if (base == none) base = 0;
    each(none, [&](Vec<T> v) { sum += adjcomp::exp<T>(v - base); });
    total = base + std::log(sum_lanes<T>(sum) + std::exp(total - base));
    if (holds_label()) of(a.picked) = logits[label];
  }

  // logits = (e^(logit - norm) - [is the label]) scale
  void vjp() const {
    const T norm = of(a.norm), scale = of(a.scale);
    int64_t v = 0;
    for (; v + lanes<T> <= a.size; v += lanes<T>) store<T>(logits + v, adjcomp::exp<T>(load<T>(logits + v) - norm) * scale);
    if (v < a.size) {
      const int left = int(a.size - v);
      store_some<T>(logits + v, adjcomp::exp<T>(load_some<T>(logits + v, left) - norm) * scale, left);
    }
    if (holds_label()) logits[label] -= scale;
  }
};

template <class T> void run(const Arguments& a, bool backward) {
#pragma omp parallel for num_threads(int(std::min(a.threads, a.count))) schedule(static)
  for (int64_t r = 0; r < a.count; ++r) {
    const Row<T> row(a, r);
    if (backward)
      row.vjp();
    else
      row.join();
  }
}

}  // namespace

extern "C" {
void join_float32(const Arguments* a) { run<float>(*a, false); }
void join_float64(const Arguments* a) { run<double>(*a, false); }
void vjp_float32(const Arguments* a) { run<float>(*a, true); }
void vjp_float64(const Arguments* a) { run<double>(*a, true); }
}
