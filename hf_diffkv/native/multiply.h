// Products of small matrices, C [rows, columns] += A B. A is row-major; B lies in panels of PANEL columns, each with its
// depth outermost. A unit is what one lane multiplies at a time: a float, or two bfloat16 that follow along the depth.
#pragma once
#include "numbers.h"

namespace diffkv {
namespace {

// Rows and vectors of accumulators that fit the registers.
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int PRODUCT_ROWS = 12, PANEL_VECTORS = 2;
#else
constexpr int PRODUCT_ROWS = 6, PANEL_VECTORS = 2;
#endif
constexpr int PANEL = PANEL_VECTORS * WIDTH;

struct Pair {
  bfloat16 part[2];
};

inline int depth_of(float) { return 1; }
inline int depth_of(Pair) { return 2; }

// A unit of consecutive numbers, or of numbers `stride` apart.
inline void make_unit(const float* x, int64_t, float& unit) { unit = *x; }
inline void make_unit(const float* x, int64_t stride, Pair& unit) {
  from_float(x[0], unit.part[0]);
  from_float(x[stride], unit.part[1]);
}

#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;
inline Floats multiply_add(Pair a, const Pair* b, Floats c) {
  int32_t bits;
  memcpy(&bits, &a, sizeof(bits));
  return (Floats)_mm512_dpbf16_ps((__m512)c, (__m512bh)_mm512_set1_epi32(bits), (__m512bh)_mm512_loadu_si512(b));
}
#else
constexpr bool HAS_PAIRS = false;
#endif
inline Floats multiply_add(float a, const float* b, Floats c) { return fma(splat(a), load(b), c); }

template <int ROWS, int VECTORS, class Unit>
inline void multiply_block(const Unit* a, int64_t a_stride, const Unit* b, int64_t depth, float* c, int64_t c_stride,
                           bool add) {
  Floats total[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) total[r][v] = add ? load(c + r * c_stride + v * WIDTH) : Floats{};
  for (int64_t k = 0; k < depth; k++)
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++)
        total[r][v] = multiply_add(a[r * a_stride + k], b + k * VECTORS * WIDTH + v * WIDTH, total[r][v]);
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) store(c + r * c_stride + v * WIDTH, total[r][v]);
}

// Units of the panels of a matrix of `columns` columns; a last panel of one vector is as narrow as that.
inline int64_t panel_units(int64_t columns, int64_t depth) { return round_up(columns, WIDTH) * depth; }
inline int64_t panel_width(int64_t first, int64_t columns) { return columns - first <= WIDTH ? WIDTH : PANEL; }

// C += A B, or = where `add` is false. A has `depth` units in a row and a multiple of PRODUCT_ROWS rows; B has
// `columns` columns, of which the first `wanted` are multiplied, each panel of `b_depth` units.
template <class Unit>
inline void multiply(const Unit* a, int64_t a_stride, int64_t rows, const Unit* b, int64_t b_depth, int64_t columns,
                     int64_t wanted, int64_t depth, float* c, int64_t c_stride, bool add) {
  for (int64_t first = 0; first < wanted; first += PANEL) {
    const bool narrow = panel_width(first, columns) == WIDTH;
    const Unit* panel = b + first * b_depth;
    for (int64_t r = 0; r < rows; r += PRODUCT_ROWS) {
      if (narrow)
        multiply_block<PRODUCT_ROWS, 1>(a + r * a_stride, a_stride, panel, depth, c + r * c_stride + first, c_stride,
                                        add);
      else
        multiply_block<PRODUCT_ROWS, PANEL_VECTORS>(a + r * a_stride, a_stride, panel, depth,
                                                    c + r * c_stride + first, c_stride, add);
    }
  }
}

}  // namespace
}  // namespace diffkv
