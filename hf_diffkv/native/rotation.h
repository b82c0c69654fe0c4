// Rotation of channels as in ops/rotation.py: a sign for each channel, then the Hadamard matrix of each block by a fast
// Walsh-Hadamard transform. A block's size is the largest power of two that divides the dim.
#pragma once
#include "numbers.h"

namespace diffkv {
namespace {

// Top bits of a linear congruential generator, as in ops/rotation.py; a smaller dim uses the first ones.
struct Signs {
  float of[MAX_DIM];

  Signs() {
    uint64_t state = 1;
    for (float& sign : of) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      sign = state >> 63 ? 1.f : -1.f;
    }
  }
};

inline void apply_signs(float* x, int dim) {
  static const Signs signs;
  for (int d = 0; d < dim; d++) x[d] *= signs.of[d];
}

// Sums and differences of a vector's lanes that are SPAN apart.
template <int SPAN>
inline Floats butterfly(Floats x) {
  Floats partner, sign;
  for (int i = 0; i < WIDTH; i++) {
    partner[i] = x[i ^ SPAN];
    sign[i] = i & SPAN ? -1.f : 1.f;
  }
  return partner + sign * x;
}

// Transforms each block of `size` numbers, a power of two that divides `dim`, and divides by the norm.
inline void hadamard(float* x, int dim, int size) {
  int span = 1;
  if (size >= WIDTH) {
    for (int d = 0; d < dim; d += WIDTH) {
      Floats lanes = butterfly<2>(butterfly<1>(load(x + d)));
#if DIFFKV_WIDTH >= 8
      lanes = butterfly<4>(lanes);
#endif
#if DIFFKV_WIDTH >= 16
      lanes = butterfly<8>(lanes);
#endif
      store(x + d, lanes);
    }
    span = WIDTH;
    for (; span < size; span *= 2)
      for (int block = 0; block < dim; block += 2 * span)
        for (int d = block; d < block + span; d += WIDTH) {
          const Floats a = load(x + d), b = load(x + d + span);
          store(x + d, a + b);
          store(x + d + span, a - b);
        }
  }
  for (; span < size; span *= 2)
    for (int block = 0; block < dim; block += 2 * span)
      for (int d = block; d < block + span; d++) {
        const float a = x[d], b = x[d + span];
        x[d] = a + b;
        x[d + span] = a - b;
      }
  const float norm = 1 / __builtin_sqrtf(float(size));
  for (int d = 0; d < dim; d++) x[d] *= norm;
}

inline void rotate(float* x, int dim) {
  apply_signs(x, dim);
  hadamard(x, dim, dim & -dim);
}

inline void rotate_back(float* x, int dim) {
  hadamard(x, dim, dim & -dim);
  apply_signs(x, dim);
}

}  // namespace
}  // namespace diffkv
