// Sums of what tasks left.
#pragma once
#include <cstdint>
#include <vector>

namespace adjcomp {

// total[i] = the sum over `count` rows of rows[r * size + i], in double precision.
template <class T> void add_up(const T* rows, int64_t count, int64_t size, T* total) {
  std::vector<double> sums(size);
  for (int64_t r = 0; r < count; ++r)
    for (int64_t i = 0; i < size; ++i) sums[i] += rows[r * size + i];
  for (int64_t i = 0; i < size; ++i) total[i] = T(sums[i]);
}

}  // namespace adjcomp
