// Codes of packed rows (pages/layout.py), one byte each in their order.
#pragma once
#include "page.h"

namespace diffkv {
namespace {

// `to` = or |= the `BITS` bits from `SHIFT` up of each byte, moved to bit `PLACE`.
template <int BITS, int SHIFT, int PLACE, class Word>
inline void unpack_word(const uint8_t* from, uint8_t* to) {
  constexpr uint8_t MASK = ((1 << BITS) - 1) << PLACE;
  typedef uint8_t Bytes __attribute__((vector_size(sizeof(Word))));
  Word word;
  memcpy(&word, from, sizeof(word));
  // bits that come from a neighbouring byte are masked
  if (SHIFT > PLACE) word = word >> (SHIFT - PLACE);
  if (SHIFT < PLACE) word = word << (PLACE - SHIFT);
  Bytes codes = (Bytes)word & (Bytes{} + MASK);
  if (PLACE) {
    Bytes lower;
    memcpy(&lower, to, sizeof(lower));
    codes |= lower;
  }
  memcpy(to, &codes, sizeof(codes));
}

typedef uint32_t Word64 __attribute__((vector_size(64)));
typedef uint32_t Word32 __attribute__((vector_size(32)));
typedef uint32_t Word16 __attribute__((vector_size(16)));
typedef uint32_t Word8 __attribute__((vector_size(8)));

// The same of `count` bytes. Not masked: some processors store masked bytes one by one.
template <int BITS, int SHIFT, int PLACE>
inline void unpack_plane(const uint8_t* from, int count, uint8_t* to) {
  constexpr uint8_t MASK = (1 << BITS) - 1;
  int i = 0;
#if defined(__AVX512BW__)
  for (; i + 64 <= count; i += 64) unpack_word<BITS, SHIFT, PLACE, Word64>(from + i, to + i);
#endif
#if defined(__AVX2__)
  for (; i + 32 <= count; i += 32) unpack_word<BITS, SHIFT, PLACE, Word32>(from + i, to + i);
#endif
  for (; i + 16 <= count; i += 16) unpack_word<BITS, SHIFT, PLACE, Word16>(from + i, to + i);
  for (; i + 8 <= count; i += 8) unpack_word<BITS, SHIFT, PLACE, Word8>(from + i, to + i);
  for (; i < count; i++) {
    const uint8_t code = uint8_t((from[i] >> SHIFT & MASK) << PLACE);
    to[i] = PLACE ? uint8_t(to[i] | code) : code;
  }
}

#if defined(__AVX512BW__)
// How far 32 bits are turned so that those of the plane that 4 bytes of the `vector`-th 64 codes are in come to PLACE.
template <int BITS, int PLACE, int COUNT>
constexpr int turn(int vector, int word) {
  return (PLACE - BITS * ((64 * vector + 4 * word) / COUNT)) & 31;
}

// All planes of a field of COUNT bytes, 64 codes at a time.
template <int BITS, int PLACE, int COUNT>
inline void unpack_wide(const uint8_t* from, uint8_t* to) {
  __m512i packed;
  if constexpr (COUNT == 8) {
    int64_t word;
    memcpy(&word, from, sizeof(word));
    packed = _mm512_set1_epi64(word);
  }
  if constexpr (COUNT == 16) packed = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)from));
  if constexpr (COUNT == 32) packed = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)from));
  if constexpr (COUNT == 64) packed = _mm512_loadu_si512(from);
  const __m512i mask = _mm512_set1_epi8(((1 << BITS) - 1) << PLACE);
#pragma GCC unroll 4
  for (int v = 0; v < 8 / BITS * COUNT / 64; v++) {
#define TURN(i) turn<BITS, PLACE, COUNT>(v, i)
    const __m512i turns = _mm512_setr_epi32(TURN(0), TURN(1), TURN(2), TURN(3), TURN(4), TURN(5), TURN(6), TURN(7),
                                            TURN(8), TURN(9), TURN(10), TURN(11), TURN(12), TURN(13), TURN(14),
                                            TURN(15));
#undef TURN
    __m512i codes = _mm512_and_si512(_mm512_rolv_epi32(packed, turns), mask);
    if (PLACE) codes = _mm512_or_si512(codes, _mm512_loadu_si512(to + 64 * v));
    _mm512_storeu_si512(to + 64 * v, codes);
  }
}
#endif

template <int BITS, int PLACE, int SHIFT = 0>
inline void unpack_planes(const uint8_t* from, int count, uint8_t* to) {
  unpack_plane<BITS, SHIFT, PLACE>(from, count, to);
  if constexpr (SHIFT + BITS < 8) unpack_planes<BITS, PLACE, SHIFT + BITS>(from, count, to + count);
}

template <int BITS, int PLACE>
inline void unpack_field(const uint8_t* from, int dim, uint8_t* to) {
  const int count = dim * BITS / 8;
#if defined(__AVX512BW__)
  if constexpr (BITS == 1)
    if (count == 8) return unpack_wide<BITS, PLACE, 8>(from, to);
  if constexpr (BITS <= 2)
    if (count == 16) return unpack_wide<BITS, PLACE, 16>(from, to);
  if constexpr (BITS <= 4) {
    if (count == 32) return unpack_wide<BITS, PLACE, 32>(from, to);
    if (count == 64) return unpack_wide<BITS, PLACE, 64>(from, to);
  }
#endif
  unpack_planes<BITS, PLACE>(from, count, to);
}

// DIM is that of the side, or 0 for any: what a row takes is then decided once for all rows.
template <int BITS, int DIM>
DIFFKV_ALONE void unpack_rows(const uint8_t* from, const Side& side, int count, uint8_t* to, int64_t stride) {
  const int dim = DIM ? DIM : side.dim;
  const int64_t row = side.row;
  for (int t = 0; t < count; t++, from += row, to += stride)
    each_field<BITS>([=](auto field, auto below) {
      unpack_field<field.value, below.value>(from + dim * below.value / 8, dim, to);
    });
}

// Codes [count, dim] of rows packed one after the other, to rows of `stride` bytes.
inline void unpack(const uint8_t* from, const Side& side, int count, uint8_t* to, int64_t stride) {
  with_bits(side.bits, [&](auto bits) {
    switch (side.dim) {
      case 64: return unpack_rows<bits.value, 64>(from, side, count, to, stride);
      case 128: return unpack_rows<bits.value, 128>(from, side, count, to, stride);
      default: return unpack_rows<bits.value, 0>(from, side, count, to, stride);
    }
  });
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
