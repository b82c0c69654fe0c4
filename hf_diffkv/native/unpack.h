// Codes of packed rows, one byte each in their order (memory/layout.py): bit planes, in one field or two.
#pragma once
#include "page.h"

namespace diffkv {
namespace {

// `to` = or |= the `BITS` bits from `shift` up of each byte, moved to bit `place`.
template <int BITS, int SHIFT, int PLACE>
inline void unpack_plane(const uint8_t* __restrict from, int count, uint8_t* __restrict to) {
  constexpr uint8_t MASK = (1 << BITS) - 1;
  int i = 0;
#if defined(__AVX512BW__)
  const __m512i mask = _mm512_set1_epi8(MASK << PLACE);
  for (; i < count; i += 64) {
    const __mmask64 there = count - i >= 64 ? ~0ull : (1ull << (count - i)) - 1;
    __m512i x = _mm512_maskz_loadu_epi8(there, from + i);
    if (SHIFT > PLACE) x = _mm512_srli_epi16(x, SHIFT - PLACE);
    if (SHIFT < PLACE) x = _mm512_slli_epi16(x, PLACE - SHIFT);
    x = _mm512_and_si512(x, mask);
    if (PLACE) x = _mm512_or_si512(x, _mm512_maskz_loadu_epi8(there, to + i));
    _mm512_mask_storeu_epi8(to + i, there, x);
  }
#else
  for (; i < count; i++) {
    const uint8_t code = uint8_t((from[i] >> SHIFT & MASK) << PLACE);
    to[i] = PLACE ? uint8_t(to[i] | code) : code;
  }
#endif
}

template <int BITS, int PLACE>
inline void unpack_field(const uint8_t* from, int dim, uint8_t* to) {
  const int count = dim * BITS / 8;
  unpack_plane<BITS, 0, PLACE>(from, count, to);
  if constexpr (BITS <= 4) unpack_plane<BITS, BITS, PLACE>(from, count, to + count);
  if constexpr (BITS <= 2) {
    unpack_plane<BITS, 2 * BITS, PLACE>(from, count, to + 2 * count);
    unpack_plane<BITS, 3 * BITS, PLACE>(from, count, to + 3 * count);
  }
  if constexpr (BITS == 1) {
    unpack_plane<1, 4, PLACE>(from, count, to + 4 * count);
    unpack_plane<1, 5, PLACE>(from, count, to + 5 * count);
    unpack_plane<1, 6, PLACE>(from, count, to + 6 * count);
    unpack_plane<1, 7, PLACE>(from, count, to + 7 * count);
  }
}

template <int LOW, int UPPER>
inline void unpack_rows(const uint8_t* from, const Side& side, int count, uint8_t* to, int64_t stride) {
  for (int t = 0; t < count; t++, from += side.row, to += stride) {
    unpack_field<LOW, 0>(from, side.dim, to);
    if constexpr (UPPER > 0) unpack_field<UPPER, LOW>(from + side.dim * LOW / 8, side.dim, to);
  }
}

// Codes [count, dim] of rows packed one after the other, to rows of `stride` bytes.
inline void unpack(const uint8_t* from, const Side& side, int count, uint8_t* to, int64_t stride) {
  switch (side.bits) {
    case 1: return unpack_rows<1, 0>(from, side, count, to, stride);
    case 2: return unpack_rows<2, 0>(from, side, count, to, stride);
    case 3: return unpack_rows<2, 1>(from, side, count, to, stride);
    case 4: return unpack_rows<4, 0>(from, side, count, to, stride);
    case 5: return unpack_rows<4, 1>(from, side, count, to, stride);
    case 6: return unpack_rows<4, 2>(from, side, count, to, stride);
    default: return unpack_rows<8, 0>(from, side, count, to, stride);
  }
}

// Keys or values of one token in float, as `dequantize` of ops/quantize rounds them: a product, then a sum.
inline void decode_row(const uint8_t* page, const Side& side, int32_t dtype, int64_t slot, float* to) {
  const uint8_t* from = page + side.offset + slot * side.row;
  if (!has_metadata(side)) {
    with_dtype(dtype, [&](auto x) {
      for (int d = 0; d < side.dim; d++) {
        memcpy(&x, from + d * sizeof(x), sizeof(x));
        to[d] = to_float(x);
      }
    });
    return;
  }
  uint8_t codes[MAX_DIM];
  float scale[MAX_DIM], zero[MAX_DIM];
  unpack(from, side, 1, codes, 0);
  read_metadata(page, side, slot, scale, zero);
  const int size = side.dim / side.groups;
  for (int g = 0; g < side.groups; g++)
    for (int d = g * size; d < (g + 1) * size; d++) to[d] = float(codes[d]) * scale[g] + zero[g];
}

}  // namespace
}  // namespace diffkv
