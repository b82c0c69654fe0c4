// Quantises tokens into pages and reads them back, byte for byte as in ops/quantize/reference.py; codes are packed as
// in pages/layout.py.
#pragma once
#include "page.h"

namespace diffkv {
namespace {

// `to` = or |= the `BITS` bits of each byte from `SHIFT` up, moved to bit `PLACE`.
template <int BITS, int SHIFT, int PLACE, class Word>
inline void unpack_word(const uint8_t* from, uint8_t* to) {
  constexpr uint8_t MASK = ((1 << BITS) - 1) << PLACE;
  typedef uint8_t Bytes __attribute__((vector_size(sizeof(Word))));
  Word word;
  memcpy(&word, from, sizeof(word));
  // bits from a neighbouring byte are masked
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

// Unpacks `count` bytes like `unpack_word`, without masked stores: some processors store masked bytes one by one.
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
// Rotation of 32 bits that moves the plane's bits of 4 bytes of the `vector`-th 64 codes to PLACE.
template <int BITS, int PLACE, int COUNT>
constexpr int turn(int vector, int word) {
  return (PLACE - BITS * ((64 * vector + 4 * word) / COUNT)) & 31;
}

// Unpacks all planes of a field of COUNT bytes, 64 codes at a time.
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

#if defined(__AVX2__) && !defined(__AVX512BW__)
// Bits by which the `word`-th 4 bytes of a vector of 32 codes are shifted right, or left if negative, to move the bits
// of a plane of COUNT bytes to PLACE. `code` is the first of the 32.
template <int BITS, int PLACE, int COUNT>
constexpr int shift_right(int code, int word) {
  return BITS * ((code + 4 * word) / COUNT) - PLACE;
}

// The bits at PLACE of 32 codes, starting with the code FIRST, from a field of planes of COUNT bytes.
template <int BITS, int PLACE, int COUNT, int FIRST>
inline Word32 field_of_codes(const uint8_t* from) {
  Word32 packed;
  if constexpr (COUNT == 8) packed = (Word32)_mm256_broadcastq_epi64(_mm_loadl_epi64((const __m128i*)from));
  if constexpr (COUNT == 16) packed = (Word32)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)from));
  if constexpr (COUNT >= 32) memcpy(&packed, from + FIRST % COUNT, sizeof(packed));
  Word32 right = {}, left = {};
  bool rights = false, lefts = false;
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    const int shift = shift_right<BITS, PLACE, COUNT>(FIRST, i);
    right[i] = shift > 0 ? shift : 0;
    left[i] = shift < 0 ? -shift : 0;
    rights |= shift > 0;
    lefts |= shift < 0;
  }
  if (rights) packed >>= right;
  if (lefts) packed <<= left;
  // bits from a neighbouring byte are masked
  return packed & ((((1u << BITS) - 1) << PLACE) * 0x01010101u);
}

// Unpacks a row of DIM codes, a multiple of 64: 32 codes at a time, starting with the code FIRST.
template <int BITS, int DIM, int FIRST = 0>
DIFFKV_INLINE void unpack_row(const uint8_t* from, uint8_t* to) {
  Word32 codes = {};
  each_field<BITS>([&](auto field, auto below) {
    codes |= field_of_codes<field.value, below.value, DIM * field.value / 8, FIRST>(from + DIM * below.value / 8);
  });
  memcpy(to + FIRST, &codes, sizeof(codes));
  if constexpr (FIRST + 32 < DIM) unpack_row<BITS, DIM, FIRST + 32>(from, to);
}
#endif

// Unpacks rows of a side. DIM is the side's dim, for which a row's loops are fixed at compile time, or 0 for any.
template <int BITS, int DIM>
DIFFKV_ALONE void unpack_rows(const uint8_t* from, const Side& side, int count, uint8_t* to, int64_t stride) {
  const int dim = DIM ? DIM : side.dim;
  const int64_t row = side.row;
#if defined(__AVX2__) && !defined(__AVX512BW__)
  if constexpr (DIM > 0) {
    for (int t = 0; t < count; t++, from += row, to += stride) unpack_row<BITS, DIM>(from, to);
    return;
  }
#endif
  for (int t = 0; t < count; t++, from += row, to += stride)
    each_field<BITS>([=](auto field, auto below) {
      unpack_field<field.value, below.value>(from + dim * below.value / 8, dim, to);
    });
}

// Unpacks consecutive packed rows into codes [count, dim], in rows of `stride` bytes.
inline void unpack(const uint8_t* from, const Side& side, int count, uint8_t* to, int64_t stride) {
  with_bits(side.bits, [&](auto bits) {
    switch (side.dim) {
      case 64: return unpack_rows<bits.value, 64>(from, side, count, to, stride);
      case 128: return unpack_rows<bits.value, 128>(from, side, count, to, stride);
      case 256: return unpack_rows<bits.value, 256>(from, side, count, to, stride);
      default: return unpack_rows<bits.value, 0>(from, side, count, to, stride);
    }
  });
}

// Reads numbers of `dtype` as floats, starting at an offset in elements.
inline void read_row(const void* from, int32_t dtype, int64_t offset, int dim, float* to) {
  with_dtype(dtype, [&](auto element) {
    const auto* row = static_cast<const decltype(element)*>(from) + offset;
    for (int d = 0; d < dim; d++) to[d] = to_float(row[d]);
  });
}

// Reads the key or value of one token as floats, rounded as in `dequantize` of ops/quantize: a product, then a sum.
inline void decode_row(const uint8_t* page, const Side& side, int32_t dtype, int64_t slot, float* to) {
  if (!has_metadata(side)) return read_row(page + side.offset, dtype, slot * side.dim, side.dim, to);
  uint8_t codes[MAX_DIM];
  float scale[MAX_DIM], zero[MAX_DIM];
  unpack(page + side.offset + slot * side.row, side, 1, codes, 0);
  read_metadata(page, side, slot, scale, zero);
  const int size = side.dim / side.groups;
  for (int g = 0; g < side.groups; g++)
    for (int d = g * size; d < (g + 1) * size; d++) to[d] = float(codes[d]) * scale[g] + zero[g];
}

constexpr int64_t TASK_TOKENS = 64;

template <int BITS, int SHIFT>
inline void pack_field(const uint8_t* __restrict codes, int dim, uint8_t* __restrict to) {
  constexpr int PLANES = 8 / BITS;
  constexpr uint8_t MASK = (1 << BITS) - 1;
  const int count = dim / PLANES;
  for (int i = 0; i < count; i++) to[i] = codes[i] >> SHIFT & MASK;
  for (int plane = 1; plane < PLANES; plane++)
    for (int i = 0; i < count; i++)
      to[i] |= uint8_t((codes[plane * count + i] >> SHIFT & MASK) << (BITS * plane));
}

inline void pack(const uint8_t* codes, const Side& side, uint8_t* to) {
  with_bits(side.bits, [&](auto bits) {
    each_field<bits.value>([&](auto field, auto below) {
      pack_field<field.value, below.value>(codes, side.dim, to + side.dim * below.value / 8);
    });
  });
}

inline void range_of(const float* x, int count, float& low, float& high) {
  low = high = x[0];
  int d = 0;
  if (count >= WIDTH) {
    Floats lowest = load(x), highest = lowest;
    for (; d + WIDTH <= count; d += WIDTH) {
      lowest = minimum(lowest, load(x + d));
      highest = maximum(highest, load(x + d));
    }
    low = smallest(lowest);
    high = largest(highest);
  }
  for (; d < count; d++) {
    low = smaller(low, x[d]);
    high = larger(high, x[d]);
  }
}

// Stores the metadata of a slot's group and computes the codes.
inline void quantize_group(uint8_t* page, const Side& side, int64_t slot, int group, const float* x, int count,
                           uint8_t* codes) {
  float low, high, step, from;
  range_of(x, count, low, high);
  if (side.parts > 0) {
    const float inwards = (high - low) / side.parts;
    low += inwards;
    high -= inwards;
  }
  write_group(page, side, slot, group, low, high, step, from);
  const float levels = levels_of(side.bits);
  if (step == 0) {
    memset(codes, 0, count);
    return;
  }
  for (int d = 0; d < count; d++) {
    float code = (x[d] - from) / step;
    code = code > 0 ? code : 0;
    code = code < levels ? code : levels;
    codes[d] = uint8_t(int32_t(as_bits(code + MAGIC)) - int32_t(as_bits(MAGIC)));
  }
}

inline void store_row(uint8_t* page, const Side& side, int32_t dtype, int64_t slot, const float* x) {
  uint8_t* to = page + side.offset + slot * side.row;
  if (!has_metadata(side)) {
    with_dtype(dtype, [&](auto element) {
      for (int d = 0; d < side.dim; d++) {
        from_float(x[d], element);
        memcpy(to + d * sizeof(element), &element, sizeof(element));
      }
    });
    return;
  }
  float unshrunk[MAX_DIM];
  if (side.shrinkage != 1) {
    for (int d = 0; d < side.dim; d++) unshrunk[d] = x[d] / side.shrinkage;
    x = unshrunk;
  }
  uint8_t codes[MAX_DIM];
  const int size = side.dim / side.groups;
  for (int g = 0; g < side.groups; g++) quantize_group(page, side, slot, g, x + g * size, size, codes + g * size);
  pack(codes, side, to);
}

inline void store_token(uint8_t* page, const Tier& tier, int32_t dtype, int64_t slot, const float* key,
                        const float* value, float score, int32_t position) {
  store_row(page, tier.key, dtype, slot, key);
  store_row(page, tier.value, dtype, slot, value);
  write_token(page, tier, slot, score, position);
}

inline bool is_place(const Transfer& tokens, int64_t page, int64_t slot) {
  return page >= 0 && page < tokens.page_count && slot >= 0 && slot < tokens.format.tier[0].capacity;
}

inline int64_t check_places(const Transfer& tokens) {
  bool good = true;
  for (int64_t i = 0; i < tokens.count; i++) {
    good &= is_place(tokens, tokens.page[i], tokens.slot[i]);
    if (tokens.to_page) good &= is_place(tokens, tokens.to_page[i], tokens.to_slot[i]);
  }
  return good ? OK : BAD_PAGE;
}

template <class Call>
inline void each_token(const Transfer& tokens, Call call) {
  each_task((tokens.count + TASK_TOKENS - 1) / TASK_TOKENS, tokens.threads, [&](int64_t task) {
    const int64_t end = smaller((task + 1) * TASK_TOKENS, tokens.count);
    for (int64_t i = task * TASK_TOKENS; i < end; i++)
      // the null page holds no tokens
      call(i, tokens.page[i] ? tokens.pages + tokens.page[i] * tokens.format.page_bytes : nullptr);
  });
}

// Stores tokens, or copies stored ones if `to_page` is set.
inline int64_t store_tokens(const Transfer& tokens) {
  if (int64_t status = check_places(tokens)) return status;
  const Tier& tier = tokens.format.tier[0];
  if (tokens.to_page) {
    each_token(tokens, [&](int64_t i, uint8_t* page) {
      uint8_t* to = tokens.pages + tokens.to_page[i] * tokens.format.page_bytes;
      if (page && tokens.to_page[i]) copy_token(page, tokens.slot[i], to, tokens.to_slot[i], tier);
    });
    return OK;
  }
  each_token(tokens, [&](int64_t i, uint8_t* page) {
    if (!page) return;
    float key[MAX_DIM], value[MAX_DIM];
    read_row(tokens.key, tokens.source, i * tokens.key_stride, tier.key.dim, key);
    read_row(tokens.value, tokens.source, i * tokens.value_stride, tier.value.dim, value);
    store_token(page, tier, tokens.format.dtype, tokens.slot[i], key, value, tokens.score[i],
                int32_t(tokens.position[i]));
  });
  return OK;
}

// Reads tokens into float32 rows, zero for the null page.
inline int64_t load_tokens(const Transfer& tokens) {
  if (int64_t status = check_places(tokens)) return status;
  const Tier& tier = tokens.format.tier[0];
  each_token(tokens, [&](int64_t i, uint8_t* page) {
    float* key = static_cast<float*>(tokens.key) + i * tokens.key_stride;
    float* value = static_cast<float*>(tokens.value) + i * tokens.value_stride;
    if (page) {
      decode_row(page, tier.key, tokens.format.dtype, tokens.slot[i], key);
      decode_row(page, tier.value, tokens.format.dtype, tokens.slot[i], value);
    } else {
      memset(key, 0, tier.key.dim * sizeof(float));
      memset(value, 0, tier.value.dim * sizeof(float));
    }
  });
  return OK;
}

}  // namespace
}  // namespace diffkv
