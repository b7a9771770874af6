// Counter-based uniforms; see chunked_uniform.py for the construction, which this repeats bit for bit.
// Bytes: each number written once.
#include <algorithm>
#include <cstdint>

namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;

uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

}  // namespace

extern "C" void counter_uniform(int64_t seed, int64_t node, int64_t offset, int64_t outer, int64_t steps, int64_t inner,
                                int64_t threads, float* out) {
  const uint64_t key = mix(mix(uint64_t(seed) + kGolden) + uint64_t(node) * kGolden);
  const int64_t rows = outer * steps;
#pragma omp parallel for num_threads(int(std::max<int64_t>(1, std::min(threads, rows)))) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const uint64_t time = uint64_t(offset) + uint64_t(row % steps);
    const uint64_t stream = mix(mix(key + uint64_t(row / steps) * kGolden) + time * kGolden);
    float* to = out + row * inner;
#pragma omp simd
    for (int64_t i = 0; i < inner; ++i) to[i] = float(int32_t(mix(stream + uint64_t(i + 1) * kGolden) >> 40)) * 0x1p-24f;
  }
}
