// Products with codes in integers (AVX-512 VNNI): queries and weights become two digits of seven bits each.
#pragma once
#include "numbers.h"

namespace diffkv {
namespace {

#if defined(__AVX512VNNI__)
constexpr bool HAS_DIGITS = true;
constexpr float LARGEST_QUERY = 16256.f, LARGEST_WEIGHT = 16383.f;

// q = factor * (128 * upper + lower), both within [-127, 127]. Returns the factor.
inline float query_digits(const float* query, int width, int8_t* upper, int8_t* lower) {
  Floats top = {};
  for (int d = 0; d < width; d += 16) top = maximum(top, _mm512_abs_ps(load(query + d)));
  const float peak = largest(top);
  const Floats factor = splat(peak > 0 ? LARGEST_QUERY / peak : 0.f);
  for (int d = 0; d < width; d += 16) {
    const __m512i q = _mm512_cvtps_epi32(load(query + d) * factor);
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(64)), 7);
    _mm_storeu_si128((__m128i*)(upper + d), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128((__m128i*)(lower + d), _mm512_cvtepi32_epi8(_mm512_sub_epi32(q, _mm512_slli_epi32(high, 7))));
  }
  return peak / LARGEST_QUERY;
}

inline __m512i integer_sums(const __m512i* a) {
  __m512i b[8], c[4];
  for (int i = 0; i < 8; i++) {
    const __m512i x = a[2 * i], y = a[2 * i + 1];
    b[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(x, y), _mm512_unpackhi_epi32(x, y));
  }
  for (int i = 0; i < 4; i++) {
    const __m512i x = b[2 * i], y = b[2 * i + 1];
    c[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(x, y), _mm512_unpackhi_epi64(x, y));
  }
  const __m512i d =
      _mm512_add_epi32(_mm512_shuffle_i32x4(c[0], c[1], 0x88), _mm512_shuffle_i32x4(c[0], c[1], 0xdd));
  const __m512i e =
      _mm512_add_epi32(_mm512_shuffle_i32x4(c[2], c[3], 0x88), _mm512_shuffle_i32x4(c[2], c[3], 0xdd));
  return _mm512_add_epi32(_mm512_shuffle_i32x4(d, e, 0x88), _mm512_shuffle_i32x4(d, e, 0xdd));
}

// Sums of digits times codes for some tokens and one head; a product has VECTORS * 64 codes, 0 stands for any number.
template <int TOKENS, int VECTORS>
inline void dot_digit_rows(const uint8_t* const* row, int64_t width, const int8_t* upper, const int8_t* lower,
                           __m512i* sum) {
  const int vectors = VECTORS ? VECTORS : int(width / 64);
  for (int t = 0; t < TOKENS; t++) sum[t] = _mm512_setzero_si512();
  for (int v = 0; v < vectors; v++) {
    const __m512i q = _mm512_loadu_si512(upper + 64 * v);
    for (int t = 0; t < TOKENS; t++) sum[t] = _mm512_dpbusd_epi32(sum[t], _mm512_loadu_si512(row[t] + 64 * v), q);
  }
  for (int t = 0; t < TOKENS; t++) sum[t] = _mm512_slli_epi32(sum[t], 7);
  for (int v = 0; v < vectors; v++) {
    const __m512i q = _mm512_loadu_si512(lower + 64 * v);
    for (int t = 0; t < TOKENS; t++) sum[t] = _mm512_dpbusd_epi32(sum[t], _mm512_loadu_si512(row[t] + 64 * v), q);
  }
}

template <int HEADS, int VECTORS>
DIFFKV_ALONE void dot_digit_heads(const uint8_t* codes, int64_t stride, int64_t width, int count, const int8_t* upper,
                                  const int8_t* lower, const float* factor, float* out, int64_t out_stride) {
  constexpr int TOKENS = 16 / HEADS, TOGETHER = TOKENS < 4 ? TOKENS : 4;
  float factors[16];
  for (int i = 0; i < 16; i++) factors[i] = factor[i / TOKENS];
  for (int first = 0; first < count; first += TOKENS) {
    __m512i total[16];
    for (int t0 = 0; t0 < TOKENS; t0 += TOGETHER) {
      const uint8_t* row[TOGETHER];
      for (int t = 0; t < TOGETHER; t++) row[t] = codes + smaller(first + t0 + t, count - 1) * stride;
#pragma GCC unroll 4
      for (int h = 0; h < HEADS; h++)
        dot_digit_rows<TOGETHER, VECTORS>(row, width, upper + h * width, lower + h * width, total + h * TOKENS + t0);
    }
    float products[16];
    store(products, _mm512_cvtepi32_ps(integer_sums(total)) * load(factors));
    for (int h = 0; h < HEADS; h++)
      memcpy(out + h * out_stride + first, products + h * TOKENS, TOKENS * sizeof(float));
  }
}

template <int VECTORS>
inline void dot_digit_vectors(const uint8_t* codes, int64_t stride, int64_t width, int count, const int8_t* upper,
                              const int8_t* lower, const float* factor, int heads, float* out, int64_t out_stride) {
  for (int h = 0; h < heads;) {
    const int64_t at = h * width;
    float* to = out + h * out_stride;
    if (heads - h >= 4) {
      dot_digit_heads<4, VECTORS>(codes, stride, width, count, upper + at, lower + at, factor + h, to, out_stride);
      h += 4;
    } else if (heads - h >= 2) {
      dot_digit_heads<2, VECTORS>(codes, stride, width, count, upper + at, lower + at, factor + h, to, out_stride);
      h += 2;
    } else {
      dot_digit_heads<1, VECTORS>(codes, stride, width, count, upper + at, lower + at, factor + h, to, out_stride);
      h += 1;
    }
  }
}

// out[h, t] = query[h] . codes[t] over `width` codes, a multiple of 64: rows of codes are `stride` bytes apart, those of
// digits `width`. Up to 15 numbers after the last token of each head are overwritten.
inline void dot_digits(const uint8_t* codes, int64_t stride, int64_t width, int count, const int8_t* upper,
                       const int8_t* lower, const float* factor, int heads, float* out, int64_t out_stride) {
  switch (width) {
    case 64:
      return dot_digit_vectors<1>(codes, stride, width, count, upper, lower, factor, heads, out, out_stride);
    case 128:
      return dot_digit_vectors<2>(codes, stride, width, count, upper, lower, factor, heads, out, out_stride);
    default:
      return dot_digit_vectors<0>(codes, stride, width, count, upper, lower, factor, heads, out, out_stride);
  }
}

// w = factor * (128 * upper + lower), of `count` weights and zeros up to a multiple of 16. Returns the factor; `lost` is
// the sum of what rounding takes off the weights.
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
  lost = sum(losses);
  return peak / LARGEST_WEIGHT;
}

// Turns every four rows of 64 codes into 16 x 4 dwords, each the codes of the four rows at one place. Dword
// (lane, j) of vector i is place 16 * lane + 4 * i + j.
DIFFKV_ALONE void transpose_quads(uint8_t* codes, int64_t stride, int count) {
  for (int t = 0; t < count; t += 4)
    for (int d = 0; d < stride; d += 64) {
      uint8_t* at = codes + t * stride + d;
      __m512i x[4];
      for (int i = 0; i < 4; i++) x[i] = _mm512_loadu_si512(at + i * stride);
      const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpackhi_epi8(x[0], x[1]);
      const __m512i c = _mm512_unpacklo_epi8(x[2], x[3]), e = _mm512_unpackhi_epi8(x[2], x[3]);
      _mm512_storeu_si512(at, _mm512_unpacklo_epi16(a, c));
      _mm512_storeu_si512(at + stride, _mm512_unpackhi_epi16(a, c));
      _mm512_storeu_si512(at + 2 * stride, _mm512_unpacklo_epi16(b, e));
      _mm512_storeu_si512(at + 3 * stride, _mm512_unpackhi_epi16(b, e));
    }
}

inline __m512i four_weights(const int8_t* at) {
  int32_t word;
  memcpy(&word, at, 4);
  return _mm512_set1_epi32(word);
}

template <int HEADS>
DIFFKV_ALONE void add_digit_heads(const uint8_t* quads, int64_t stride, int count, const int8_t* upper,
                                  const int8_t* lower, int64_t digits, const float* factor, float* out,
                                  int64_t out_stride) {
  for (int d = 0; d < stride; d += 64) {
    __m512i high[HEADS][4], low[HEADS][4];
    for (int h = 0; h < HEADS; h++)
      for (int i = 0; i < 4; i++) high[h][i] = low[h][i] = _mm512_setzero_si512();
    for (int t = 0; t < count; t += 4) {
      __m512i x[4];
      for (int i = 0; i < 4; i++) x[i] = _mm512_loadu_si512(quads + (t + i) * stride + d);
      for (int h = 0; h < HEADS; h++) {
        const __m512i u = four_weights(upper + h * digits + t), l = four_weights(lower + h * digits + t);
        for (int i = 0; i < 4; i++) high[h][i] = _mm512_dpbusd_epi32(high[h][i], x[i], u);
        for (int i = 0; i < 4; i++) low[h][i] = _mm512_dpbusd_epi32(low[h][i], x[i], l);
      }
    }
    for (int h = 0; h < HEADS; h++)
      for (int i = 0; i < 4; i++) {
        float* to = out + h * out_stride + d + 16 * i;
        const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[h][i], 7), low[h][i]);
        store(to, fma(_mm512_cvtepi32_ps(sum), splat(factor[h]), load(to)));
      }
  }
}

// out[h] += sum of weight[h, t] * codes[t], in the order of `transpose_quads`; heads' digits are `digits` apart.
inline void add_digits(const uint8_t* quads, int64_t stride, int count, const int8_t* upper, const int8_t* lower,
                       int64_t digits, const float* factor, int heads, float* out, int64_t out_stride) {
  for (int h = 0; h < heads;) {
    const int64_t at = h * digits;
    float* to = out + h * out_stride;
    if (heads - h >= 2) {
      add_digit_heads<2>(quads, stride, count, upper + at, lower + at, digits, factor + h, to, out_stride);
      h += 2;
    } else {
      add_digit_heads<1>(quads, stride, count, upper + at, lower + at, digits, factor + h, to, out_stride);
      h += 1;
    }
  }
}

// out[d] += what stands in the order of `transpose_quads`.
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
