// Products of a few heads with rows of keys and values: in float for any element type, and in integers for codes
// (AVX-512 VNNI), where queries and weights are split into two digits of seven bits each.
#pragma once
#include "numbers.h"
#include "precision.h"

namespace diffkv {
namespace {

// Calls `call` with up to four heads at a time: their number (a `Constant`) and the first head.
template <class Call>
inline void each_four(int heads, Call call) {
  for (int h = 0; h < heads; h += 4)
    switch (smaller(4, heads - h)) {
      case 1: call(Constant<1>(), h); break;
      case 2: call(Constant<2>(), h); break;
      case 3: call(Constant<3>(), h); break;
      default: call(Constant<4>(), h);
    }
}

// Adds the products of HEADS heads with a vector of each of BLOCK / HEADS tokens.
template <int HEADS>
DIFFKV_INLINE void add_dots(const Floats* x, const float* query, int64_t query_stride, Floats* total) {
  constexpr int TOKENS = BLOCK / HEADS;
  for (int h = 0; h < HEADS; h++) {
    const Floats q = load(query + h * query_stride);
    for (int t = 0; t < TOKENS; t++) total[h * TOKENS + t] = fma(x[t], q, total[h * TOKENS + t]);
  }
}

// Stores the sums of what `add_dots` added.
template <int HEADS>
DIFFKV_INLINE void store_dots(const Floats* total, float* out, int64_t out_stride) {
  constexpr int TOKENS = BLOCK / HEADS;
  float products[BLOCK];
  sums(total, products);
  for (int h = 0; h < HEADS; h++) memcpy(out + h * out_stride, products + h * TOKENS, TOKENS * sizeof(float));
}

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
      add_dots<HEADS>(x, query + d, query_stride, total);
    }
    store_dots<HEADS>(total, out + first, out_stride);
  }
}

// out[h, t] = query[h] . row[t] over `width` elements, a multiple of WIDTH. Overwrites up to BLOCK - 1 numbers after
// the last token of each head.
template <class Element>
inline void dot_rows(const Element* rows, int64_t stride, int count, const float* query, int64_t query_stride,
                     int heads, int width, float* out, int64_t out_stride) {
  each_four(heads, [&](auto some, int h) {
    dot_heads<some.value>(rows, stride, count, query + h * query_stride, query_stride, width, out + h * out_stride,
                          out_stride);
  });
}

// As dot_heads, with rows of codes in `groups` groups of `size` channels, which are decoded with the factors of their
// group: `scale` and `zero` [count, groups].
template <int HEADS>
inline void dot_group_heads(const uint8_t* rows, int64_t stride, int count, const float* scale, const float* zero,
                            int groups, int size, const float* query, int64_t query_stride, float* out,
                            int64_t out_stride) {
  constexpr int TOKENS = BLOCK / HEADS;
  for (int first = 0; first < count; first += TOKENS) {
    int64_t token[TOKENS];
    for (int t = 0; t < TOKENS; t++) token[t] = smaller(first + t, count - 1);
    Floats total[BLOCK] = {};
    for (int g = 0; g < groups; g++) {
      Floats factor[TOKENS], shift[TOKENS];
      for (int t = 0; t < TOKENS; t++) {
        factor[t] = splat(scale[token[t] * groups + g]);
        shift[t] = splat(zero[token[t] * groups + g]);
      }
      for (int d = g * size; d < (g + 1) * size; d += WIDTH) {
        Floats x[TOKENS];
        for (int t = 0; t < TOKENS; t++) x[t] = fma(load(rows + token[t] * stride + d), factor[t], shift[t]);
        add_dots<HEADS>(x, query + d, query_stride, total);
      }
    }
    store_dots<HEADS>(total, out + first, out_stride);
  }
}

// As dot_rows, for codes in groups whose size is a multiple of WIDTH.
inline void dot_groups(const uint8_t* rows, int64_t stride, int count, const float* scale, const float* zero,
                       int groups, int size, const float* query, int64_t query_stride, int heads, float* out,
                       int64_t out_stride) {
  each_four(heads, [&](auto some, int h) {
    dot_group_heads<some.value>(rows, stride, count, scale, zero, groups, size, query + h * query_stride, query_stride,
                                out + h * out_stride, out_stride);
  });
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
  for (; d < width; d += WIDTH)
    add_block<HEADS, 1>(rows + d, stride, count, weight, weight_stride, out + d, out_stride);
}

// out[h] += sum of weight[h, t] * row[t] over `width` elements, a multiple of WIDTH.
template <class Element>
inline void add_rows(const Element* rows, int64_t stride, int count, const float* weight, int64_t weight_stride,
                     int heads, int width, float* out, int64_t out_stride) {
  each_four(heads, [&](auto some, int h) {
    add_heads<some.value>(rows, stride, count, weight + h * weight_stride, weight_stride, width, out + h * out_stride,
                          out_stride);
  });
}

#if defined(__AVX512VNNI__)
constexpr bool HAS_DIGITS = true;
constexpr float LARGEST_QUERY = 16256.f, LARGEST_WEIGHT = 16383.f;

// How many of the next `heads` heads are multiplied together: four, of which the last may be missing, two or one.
constexpr int heads_together(int heads) { return heads > 2 ? 4 : heads; }

// q = factor * (128 * upper + lower), both within [-127, 127]. The digits of heads that are multiplied together
// alternate: 64 / `heads_together` channels of each. `upper` and `lower` are those of head 0. Returns the factor;
// `rounded` is the sum of the query as digits.
inline float query_digits(const float* query, int64_t width, int head, int heads, int8_t* upper, int8_t* lower,
                          float& rounded) {
  const int first = head / 4 * 4, channels = 64 / heads_together(heads - first);
  const int64_t place = first * width + (head - first) * channels;
  Floats top = {};
  for (int64_t d = 0; d < width; d += 16) top = maximum(top, _mm512_abs_ps(load(query + d)));
  const float peak = largest(top);
  const Floats factor = splat(peak > 0 ? LARGEST_QUERY / peak : 0.f);
  Ints total = {};
  for (int64_t d = 0; d < width; d += 16) {
    const int64_t at = place + d / channels * 64 + d % channels;
    const __m512i q = _mm512_cvtps_epi32(load(query + d) * factor);
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(64)), 7);
    _mm_storeu_si128((__m128i*)(upper + at), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128((__m128i*)(lower + at), _mm512_cvtepi32_epi8(_mm512_sub_epi32(q, _mm512_slli_epi32(high, 7))));
    total += (Ints)q;
  }
  rounded = _mm512_reduce_add_ps(_mm512_cvtepi32_ps((__m512i)total)) * (peak / LARGEST_QUERY);
  return peak / LARGEST_QUERY;
}

// Adds digits times codes. Vectors of integers of another type would be copied before every sum.
inline Ints add_products(Ints sum, __m512i codes, __m512i digits) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, codes, digits);
}

// Repeats 64 / HEADS codes for every head.
template <int HEADS>
inline __m512i codes_of_heads(const uint8_t* codes) {
  if constexpr (HEADS == 4) return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)codes));
  if constexpr (HEADS == 2) return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)codes));
  return _mm512_loadu_si512(codes);
}

// Multiplies the first `there` of HEADS heads by all tokens, 8 at a time; calls `between` before each time.
template <int HEADS, class Between>
DIFFKV_ALONE void dot_digit_heads(const uint8_t* const* rows, int64_t width, int count, const int8_t* upper,
                                  const int8_t* lower, const float* factor, int there, float* out,
                                  int64_t out_stride, Between between) {
  constexpr int TOKENS = 16 / HEADS;
  float factors[16];
  for (int i = 0; i < 16; i++) factors[i] = factor[smaller(i / TOKENS, there - 1)];
  for (int first = 0; first < count; first += 16) {
    Ints total[16];
    for (int from = 0; from < 16; from += 8) {
      between();
      const uint8_t* row[8];
      for (int t = 0; t < 8; t++) row[t] = rows[smaller(first + from + t, count - 1)];
      Ints high[8], low[8];
      for (int t = 0; t < 8; t++) high[t] = low[t] = Ints{};
      const int8_t *high_digits = upper, *low_digits = lower;
      for (int64_t d = 0; d < width; d += 64 / HEADS, high_digits += 64, low_digits += 64) {
        const __m512i u = _mm512_loadu_si512(high_digits), l = _mm512_loadu_si512(low_digits);
        for (int t = 0; t < 8; t++) {
          const __m512i x = codes_of_heads<HEADS>(row[t] + d);
          high[t] = add_products(high[t], x, u);
          low[t] = add_products(low[t], x, l);
        }
      }
      for (int t = 0; t < 8; t++) total[from + t] = (high[t] << 7) + low[t];
    }
    for (int t = 0; t < 16; t += TOKENS) {
      float products[16];
      store(products, _mm512_cvtepi32_ps((__m512i)lane_sums<HEADS>(total + t)) * load(factors));
      for (int h = 0; h < there; h++)
        memcpy(out + h * out_stride + first + t, products + h * TOKENS, TOKENS * sizeof(float));
    }
  }
}

// out[h, t] = query[h] . rows[t] over `width` codes, a multiple of 64. Overwrites up to 15 numbers after the last token
// of each head. Calls `between` after every few tokens.
template <class Between>
inline void dot_digits(const uint8_t* const* rows, int64_t width, int count, const int8_t* upper, const int8_t* lower,
                       const float* factor, int heads, float* out, int64_t out_stride, Between between) {
  each_four(heads, [&](auto some, int h) {
    dot_digit_heads<heads_together(some.value)>(rows, width, count, upper + h * width, lower + h * width, factor + h,
                                                some.value, out + h * out_stride, out_stride, between);
  });
}

// w = factor * (128 * upper + lower) for `count` weights, padded with zeros to a multiple of 16. Returns the factor;
// `lost` is the sum of the weights' rounding errors.
inline float weight_digits(const float* weight, int count, int8_t* upper, int8_t* lower, float& lost) {
  Floats top = splat(1e-30f);
  auto loaded = [&](int t) {
    const __mmask16 there = count - t >= 16 ? 0xffff : (1u << (count - t)) - 1;
    return (Floats)_mm512_maskz_loadu_ps(there, weight + t);
  };
  for (int t = 0; t < count; t += 16) top = maximum(top, loaded(t));
  const float peak = largest(top);
  const Floats factor = splat(LARGEST_WEIGHT / peak), inverse = splat(peak / LARGEST_WEIGHT);
  Floats losses = {};
  for (int t = 0; t < count; t += 16) {
    const __m512i w = _mm512_cvtps_epi32(loaded(t) * factor);
    losses += loaded(t) - _mm512_cvtepi32_ps(w) * inverse;
    _mm_storeu_si128((__m128i*)(upper + t), _mm512_cvtepi32_epi8(_mm512_srli_epi32(w, 7)));
    _mm_storeu_si128((__m128i*)(lower + t), _mm512_cvtepi32_epi8(_mm512_and_si512(w, _mm512_set1_epi32(127))));
  }
  lost = _mm512_reduce_add_ps(losses);
  return peak / LARGEST_WEIGHT;
}

// Bytes of the blocks of 64 channels below; blocks a multiple of 4096 bytes apart would share few lines of L1.
inline int64_t quad_block(int64_t count) { return 64 * (round_up(count, 4) + 4); }

// Transposes rows of `width` codes into blocks of `quads` [width / 64, tokens, 64]: every four rows' 64 codes become
// 16 x 4 dwords, each with the codes of the four rows at one place. Dword (lane, j) of vector i is place
// 16 * lane + 4 * i + j.
DIFFKV_ALONE void transpose_quads(const uint8_t* const* rows, int64_t width, int count, uint8_t* quads) {
  const int64_t block = quad_block(count);
  for (int t = 0; t < count; t += 4) {
    const uint8_t* row[4];
    for (int i = 0; i < 4; i++) row[i] = rows[smaller(t + i, count - 1)];
    for (int64_t d = 0; d < width; d += 64) {
      uint8_t* to = quads + d / 64 * block + 64 * t;
      __m512i x[4];
      for (int i = 0; i < 4; i++) x[i] = _mm512_loadu_si512(row[i] + d);
      const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpackhi_epi8(x[0], x[1]);
      const __m512i c = _mm512_unpacklo_epi8(x[2], x[3]), e = _mm512_unpackhi_epi8(x[2], x[3]);
      _mm512_storeu_si512(to, _mm512_unpacklo_epi16(a, c));
      _mm512_storeu_si512(to + 64, _mm512_unpackhi_epi16(a, c));
      _mm512_storeu_si512(to + 128, _mm512_unpacklo_epi16(b, e));
      _mm512_storeu_si512(to + 192, _mm512_unpackhi_epi16(b, e));
    }
  }
}

inline __m512i four_weights(const int8_t* at) {
  int32_t word;
  memcpy(&word, at, 4);
  return _mm512_set1_epi32(word);
}

// Adds one block of 64 codes.
template <int HEADS>
DIFFKV_ALONE void add_digit_heads(const uint8_t* quads, int count, const int8_t* upper, const int8_t* lower,
                                  int64_t digits, const float* factor, float* out, int64_t out_stride) {
  Ints high[HEADS][4], low[HEADS][4];
  for (int h = 0; h < HEADS; h++)
    for (int i = 0; i < 4; i++) high[h][i] = low[h][i] = Ints{};
  for (int t = 0; t < count; t += 4) {
    __m512i x[4];
    for (int i = 0; i < 4; i++) x[i] = _mm512_loadu_si512(quads + 64 * (t + i));
    for (int h = 0; h < HEADS; h++) {
      const __m512i u = four_weights(upper + h * digits + t), l = four_weights(lower + h * digits + t);
      for (int i = 0; i < 4; i++) high[h][i] = add_products(high[h][i], x[i], u);
      for (int i = 0; i < 4; i++) low[h][i] = add_products(low[h][i], x[i], l);
    }
  }
  for (int h = 0; h < HEADS; h++) {
    const Floats scale = splat(factor[h]);
    for (int i = 0; i < 4; i++) {
      float* to = out + h * out_stride + 16 * i;
      const Ints sum = (high[h][i] << 7) + low[h][i];
      store(to, fma(_mm512_cvtepi32_ps((__m512i)sum), scale, load(to)));
    }
  }
}

// out[h] += sum of weight[h, t] * codes[t], in the order of `transpose_quads`. Digits of heads are `digits` apart.
// Calls `between` before every two heads of a block.
template <class Between>
inline void add_digits(const uint8_t* quads, int64_t width, int count, const int8_t* upper, const int8_t* lower,
                       int64_t digits, const float* factor, int heads, float* out, int64_t out_stride,
                       Between between) {
  const int64_t block = quad_block(count);
  for (int64_t d = 0; d < width; d += 64, quads += block)
    for (int h = 0; h < heads; h += 2) {
      between();
      auto add = heads - h > 1 ? add_digit_heads<2> : add_digit_heads<1>;
      add(quads, count, upper + h * digits, lower + h * digits, digits, factor + h, out + h * out_stride + d,
          out_stride);
    }
}

// out[d] += quads[d], reordered from the order of `transpose_quads`.
inline void add_from_quads(const float* quads, int width, float* out) {
  for (int d = 0; d < width; d += 64)
    for (int i = 0; i < 4; i++)
      for (int lane = 0; lane < 4; lane++)
        for (int j = 0; j < 4; j++) out[d + 16 * lane + 4 * i + j] += quads[d + 16 * i + 4 * lane + j];
}
#else
constexpr bool HAS_DIGITS = false;
#endif

}  // namespace
}  // namespace diffkv
