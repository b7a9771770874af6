// Entry points of the selective scan and its VJP.
#include "selective_forward.h"
#include "selective_vjp.h"

using namespace adjcomp;

namespace {

// Adds up what the groups of channels left, (batch, group, time, n), as (batch, time, n).
template <class T> void join_groups(const Arguments& a, const T* parts, T* total) {
  const int64_t size = a.steps * a.states, blocks = (size + 1023) / 1024;
#pragma omp parallel for num_threads(int(std::min(a.threads, a.batch * blocks))) schedule(static)
  for (int64_t block = 0; block < a.batch * blocks; ++block) {
    const int64_t b = block / blocks, first = block % blocks * 1024, last = std::min(size, first + 1024);
    const T* from = parts + b * a.groups * size;
    for (int64_t i = first; i < last; ++i) {
      T sum = from[i];
      for (int64_t group = 1; group < a.groups; ++group) sum += from[group * size + i];
      total[b * size + i] = sum;
    }
  }
}

template <class T> void run(const Arguments& a, bool vjp) {
  const int64_t vectors = (a.channels + lanes<T> - 1) / lanes<T>, tasks = a.batch * a.groups;
#pragma omp parallel for num_threads(int(std::min(a.threads, tasks))) schedule(static)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t group = task % a.groups;
    const int64_t b = task / a.groups, first = vectors * group / a.groups, last = vectors * (group + 1) / a.groups;
    if (vjp)
      vjp_task<T>({a, b, first, last}, group);
    else
      forward_task<T>({a, b, first, last});
  }
}

// The VJP, whose groups of channels each leave sums over their own channels.
template <class T> void run_vjp(const Arguments& given) {
  Arguments a = given;
  const int64_t parts = a.groups > 1 ? a.batch * a.groups * a.steps * a.states : 0;
  Aligned<T> dB(given.dB ? parts : 0), dC(given.dC ? parts : 0);
  if (parts && a.dB) a.dB = dB.data;
  if (parts && a.dC) a.dC = dC.data;
  run<T>(a, true);
  if (parts && a.dB) join_groups<T>(a, dB.data, static_cast<T*>(given.dB));
  if (parts && a.dC) join_groups<T>(a, dC.data, static_cast<T*>(given.dC));
}

}  // namespace

extern "C" {
int64_t checkpoint_steps() { return kKept; }
int64_t lanes_float32() { return lanes<float>; }
int64_t lanes_float64() { return lanes<double>; }
void forward_float32(const Arguments* a) { run<float>(*a, false); }
void forward_float64(const Arguments* a) { run<double>(*a, false); }
void vjp_float32(const Arguments* a) { run_vjp<float>(*a); }
void vjp_float64(const Arguments* a) { run_vjp<double>(*a); }
}
