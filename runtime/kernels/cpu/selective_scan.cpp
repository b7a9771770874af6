// Entry points of the selective scan and its VJP.
#include "selective_forward.h"
#include "selective_vjp.h"

using namespace adjcomp;

namespace {

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

}  // namespace

extern "C" {
int64_t checkpoint_steps() { return kKept; }
int64_t lanes_float32() { return lanes<float>; }
int64_t lanes_float64() { return lanes<double>; }
void forward_float32(const Arguments* a) { run<float>(*a, false); }
void forward_float64(const Arguments* a) { run<double>(*a, false); }
void vjp_float32(const Arguments* a) { run<float>(*a, true); }
void vjp_float64(const Arguments* a) { run<double>(*a, true); }
}
