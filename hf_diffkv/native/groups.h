// Products with keys whose channels are in groups, each with a scale and a zero point of its own: in integers, group by
// group. product = scale * (query . code) + zero * sum(query), of the group's channels.
#pragma once
#include "rows.h"

namespace diffkv {
namespace {

#if defined(__AVX512VNNI__)
// Digits of the query of every head, group by group, zero outside the group; buffers of one thread.
struct GroupDigits {
  int8_t *upper, *lower;  // [groups, heads, width of the group's vectors]
  float *factor, *sum;    // [groups, heads]
  float *scale, *zero;    // [STAGED_CODES, groups], of staged tokens
  float *product;         // [heads, PRODUCTS]
};
constexpr int PRODUCTS = STAGED_CODES + 16;

inline int most_groups(const Format& format) {
  int most = 1;
  for (int t = 0; t < format.tiers; t++) most = larger(most, int(format.tier[t].key.groups));
  return most;
}

// The whole vectors of 64 codes that hold a group.
struct Span {
  int from, to;  // the group's channels
  int first, width;
};
inline Span span_of(const Side& side, int group) {
  const int size = side.dim / side.groups, from = group * size, first = from / 64 * 64;
  return {from, from + size, first, int(round_up(from + size, 64)) - first};
}

inline void make_digits(const Side& side, const float* query, int heads, const GroupDigits& digits) {
  const int64_t stride = padded(side.dim);
  for (int g = 0; g < side.groups; g++) {
    const Span span = span_of(side, g);
    for (int h = 0; h < heads; h++) {
      const int64_t index = g * heads + h;
      float part[MAX_DIM] = {};
      for (int d = span.from; d < span.to; d++) part[d - span.first] = query[h * stride + d];
      int8_t *upper = digits.upper + g * heads * stride + h * span.width;
      int8_t *lower = digits.lower + g * heads * stride + h * span.width;
      digits.factor[index] = query_digits(part, span.width, upper, lower);
      int64_t sum = 0;
      for (int d = 0; d < span.width; d++) sum += 128 * upper[d] + lower[d];
      digits.sum[index] = float(sum) * digits.factor[index];
    }
  }
}

// Scales and zero points of all groups of the next `count` tokens of a run.
inline void stage_factors(Cursor cursor, int count, float* scale, float* zero) {
  const Side& side = cursor.piece->tier->key;
  Side flat = side;
  flat.groups = 1;
  while (count > 0) {
    const int more = smaller(cursor.left(), count);
    read_metadata(cursor.piece->page, flat, cursor.slot * side.groups, more * side.groups, scale, zero);
    scale += more * side.groups;
    zero += more * side.groups;
    count -= more;
    cursor.advance(more);
  }
}

// Products of all heads with the keys of a run of pieces of one tier, to `out` [heads, stride]; up to WIDTH - 1 numbers
// after the last of each head are overwritten.
inline void group_products(const Piece* begin, const Piece* end, const float* query, int heads, uint8_t* codes,
                           const GroupDigits& digits, float* out, int64_t stride) {
  const Side& side = begin->tier->key;
  const int64_t padding = padded(side.dim);
  make_digits(side, query, heads, digits);
  Cursor cursor = {begin, end, 0};
  while (!cursor.done()) {
    const Cursor start = cursor;
    const int count = stage_codes(cursor, false, codes, STAGED_CODES);
    stage_factors(start, count, digits.scale, digits.zero);
    for (int g = 0; g < side.groups; g++) {
      const Span span = span_of(side, g);
      const int64_t at = g * heads * padding;
      dot_digits(codes + span.first, padding, span.width, count, digits.upper + at, digits.lower + at,
                 digits.factor + g * heads, heads, digits.product, PRODUCTS);
      float scale[PRODUCTS], zero[PRODUCTS];
      for (int t = 0; t < count; t++) {
        scale[t] = digits.scale[t * side.groups + g];
        zero[t] = digits.zero[t * side.groups + g];
      }
      for (int h = 0; h < heads; h++) {
        const Floats sum = splat(digits.sum[g * heads + h]);
        const float* product = digits.product + h * PRODUCTS;
        float* to = out + h * stride;
        for (int t = 0; t < count; t += WIDTH) {
          const Floats more = fma(load(product + t), load(scale + t), load(zero + t) * sum);
          store(to + t, g == 0 ? more : load(to + t) + more);
        }
      }
    }
    out += count;
  }
}
#endif

}  // namespace
}  // namespace diffkv
