// Products of a few heads with rows of keys and values of any element type, in float.
#pragma once
#include "numbers.h"

namespace diffkv {
namespace {

template <int HEADS, class Element>
inline void dot_heads(const Element* rows, int64_t stride, int count, const float* query, int64_t query_stride,
                      int width, float* out, int64_t out_stride) {
  constexpr int TOKENS = BLOCK / HEADS;
  for (int first = 0; first < count; first += TOKENS) {
    const Element* row[TOKENS];
    for (int t = 0; t < TOKENS; t++) row[t] = rows + smaller(first + t, count - 1) * stride;
    Floats total[BLOCK] = {};
    for (int d = 0; d < width; d += WIDTH) {
      Floats x[TOKENS];
      for (int t = 0; t < TOKENS; t++) x[t] = load(row[t] + d);
      for (int h = 0; h < HEADS; h++) {
        const Floats q = load(query + h * query_stride + d);
        for (int t = 0; t < TOKENS; t++) total[h * TOKENS + t] = fma(x[t], q, total[h * TOKENS + t]);
      }
    }
    float products[BLOCK];
    sums(total, products);
    for (int h = 0; h < HEADS; h++)
      memcpy(out + h * out_stride + first, products + h * TOKENS, TOKENS * sizeof(float));
  }
}

// out[h, t] = query[h] . row[t] over `width` elements, a multiple of WIDTH; up to BLOCK - 1 numbers after the last
// token of each head are overwritten.
template <class Element>
inline void dot_rows(const Element* rows, int64_t stride, int count, const float* query, int64_t query_stride,
                     int heads, int width, float* out, int64_t out_stride) {
  for (int h = 0; h < heads; h += 4) {
    const float* q = query + h * query_stride;
    float* to = out + h * out_stride;
    switch (smaller(4, heads - h)) {
      case 1: dot_heads<1>(rows, stride, count, q, query_stride, width, to, out_stride); break;
      case 2: dot_heads<2>(rows, stride, count, q, query_stride, width, to, out_stride); break;
      case 3: dot_heads<3>(rows, stride, count, q, query_stride, width, to, out_stride); break;
      default: dot_heads<4>(rows, stride, count, q, query_stride, width, to, out_stride);
    }
  }
}

template <int HEADS, int VECTORS, class Element>
inline void add_block(const Element* rows, int64_t stride, int count, const float* weight, int64_t weight_stride,
                      float* out, int64_t out_stride) {
  Floats total[HEADS][VECTORS];
  for (int h = 0; h < HEADS; h++)
    for (int v = 0; v < VECTORS; v++) total[h][v] = load(out + h * out_stride + v * WIDTH);
  for (int t = 0; t < count; t++) {
    Floats x[VECTORS];
    for (int v = 0; v < VECTORS; v++) x[v] = load(rows + t * stride + v * WIDTH);
    for (int h = 0; h < HEADS; h++) {
      const Floats w = splat(weight[h * weight_stride + t]);
      for (int v = 0; v < VECTORS; v++) total[h][v] = fma(x[v], w, total[h][v]);
    }
  }
  for (int h = 0; h < HEADS; h++)
    for (int v = 0; v < VECTORS; v++) store(out + h * out_stride + v * WIDTH, total[h][v]);
}

template <int HEADS, class Element>
inline void add_heads(const Element* rows, int64_t stride, int count, const float* weight, int64_t weight_stride,
                      int width, float* out, int64_t out_stride) {
  constexpr int VECTORS = BLOCK / 4;
  int d = 0;
  for (; d + VECTORS * WIDTH <= width; d += VECTORS * WIDTH)
    add_block<HEADS, VECTORS>(rows + d, stride, count, weight, weight_stride, out + d, out_stride);
  for (; d < width; d += WIDTH) add_block<HEADS, 1>(rows + d, stride, count, weight, weight_stride, out + d, out_stride);
}

// out[h] += sum of weight[h, t] * row[t] over `width` elements, a multiple of WIDTH.
template <class Element>
inline void add_rows(const Element* rows, int64_t stride, int count, const float* weight, int64_t weight_stride,
                     int heads, int width, float* out, int64_t out_stride) {
  for (int h = 0; h < heads; h += 4) {
    const float* w = weight + h * weight_stride;
    float* to = out + h * out_stride;
    switch (smaller(4, heads - h)) {
      case 1: add_heads<1>(rows, stride, count, w, weight_stride, width, to, out_stride); break;
      case 2: add_heads<2>(rows, stride, count, w, weight_stride, width, to, out_stride); break;
      case 3: add_heads<3>(rows, stride, count, w, weight_stride, width, to, out_stride); break;
      default: add_heads<4>(rows, stride, count, w, weight_stride, width, to, out_stride);
    }
  }
}

}  // namespace
}  // namespace diffkv
