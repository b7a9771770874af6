// Entry points of SSD and its VJP.
#include "ssd_forward.h"
#include "ssd_vjp.h"

using namespace adjcomp;

namespace {

template <class T> void run(const Arguments& a, bool vjp) {
  const int64_t tasks = a.batch * a.groups * a.parts;
#pragma omp parallel for num_threads(int(std::min(a.threads, tasks))) schedule(dynamic)
  for (int64_t index = 0; index < tasks; ++index) {
    if (vjp)
      vjp_task<T>(a, task_of(a, index));
    else
      forward_task<T>(a, task_of(a, index));
  }
}

}  // namespace

extern "C" {
int64_t checkpoint_steps() { return kChunk; }
void forward_float32(const Arguments* a) { run<float>(*a, false); }
void forward_float64(const Arguments* a) { run<double>(*a, false); }
void vjp_float32(const Arguments* a) { run<float>(*a, true); }
void vjp_float64(const Arguments* a) { run<double>(*a, true); }
}
