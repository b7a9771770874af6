// The selective scan's states alone, without outputs.
#pragma once
#include "selective_common.h"

namespace adjcomp {

// K states (or `count`) through a block, nothing else.
template <class T, int K, Reach R, int Steps>
void advance_part(const Rows<T>& B, int steps, int n0, int count, const Inputs<T, Steps>& in, const Rate<T>* rates, Vec<T>* h) {
  const int size = K ? K : count;
  Vec<T> local[K ? K : 1];
#pragma GCC unroll 16
  for (int n = 0; n < K; ++n) local[n] = h[n];
  Vec<T>* state = K ? local : h;
  for (int s = 0; s < steps; ++s) {
    const T* b = B.at(s) + n0;
    const Vec<T> delta = in.scaled[s], u = in.u[s];
#pragma GCC unroll 16
    for (int n = 0; n < size; ++n) state[n] = times<T, R>(decay_of<T, R>(delta, rates[n]), state[n]) + u * b[n];
  }
#pragma GCC unroll 16
  for (int n = 0; n < K; ++n) h[n] = local[n];
}

template <class T, Reach R, int Steps>
void advance(const Rows<T>& B, int steps, int states, const Inputs<T, Steps>& in, const Rate<T>* rates, Vec<T>* h) {
  for (int n = 0; n < states; n += 16) {
    if (states - n >= 16)
      advance_part<T, 16, R, Steps>(B, steps, n, 16, in, rates + n, h + n);
    else
      advance_part<T, 0, R, Steps>(B, steps, n, states - n, in, rates + n, h + n);
  }
}

}  // namespace adjcomp
