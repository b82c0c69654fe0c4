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
  each_four(heads, [&](auto some, int h) {
    add_heads<some.value>(rows, stride, count, weight + h * weight_stride, weight_stride, width, out + h * out_stride,
                          out_stride);
  });
}

#if defined(__AVX512VNNI__)
constexpr bool HAS_DIGITS = true;
constexpr float LARGEST_QUERY = 16256.f, LARGEST_WEIGHT = 16383.f;

// Calls `call` with several heads at a time: their number (a `Constant` of MOST or a smaller power of two) and the
// first head.
template <int MOST, class Call>
inline void each_heads(int heads, Call call) {
  int h = 0;
  for (; h + MOST <= heads; h += MOST) call(Constant<MOST>(), h);
  if constexpr (MOST > 1) each_heads<MOST / 2>(heads - h, [&](auto count, int next) { call(count, h + next); });
}

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

// Sums digits times codes for some tokens and one head. A product has VECTORS * 64 codes; 0 allows any number.
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
    store(products, _mm512_cvtepi32_ps((__m512i)lane_sums(reinterpret_cast<const Ints*>(total))) * load(factors));
    for (int h = 0; h < HEADS; h++)
      memcpy(out + h * out_stride + first, products + h * TOKENS, TOKENS * sizeof(float));
  }
}

// out[h, t] = query[h] . codes[t] over `width` codes, a multiple of 64. Rows of codes are `stride` bytes apart, rows of
// digits `width` bytes. Overwrites up to 15 numbers after the last token of each head.
inline void dot_digits(const uint8_t* codes, int64_t stride, int64_t width, int count, const int8_t* upper,
                       const int8_t* lower, const float* factor, int heads, float* out, int64_t out_stride) {
  auto dot = [&](auto vectors) {
    each_heads<4>(heads, [&](auto some, int h) {
      dot_digit_heads<some.value, vectors.value>(codes, stride, width, count, upper + h * width, lower + h * width,
                                                 factor + h, out + h * out_stride, out_stride);
    });
  };
  switch (width) {
    case 64: return dot(Constant<1>());
    case 128: return dot(Constant<2>());
    default: return dot(Constant<0>());
  }
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
  lost = sum(losses);
  return peak / LARGEST_WEIGHT;
}

// Transposes every four rows of 64 codes into 16 x 4 dwords, each with the codes of the four rows at one place. Dword
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

// out[h] += sum of weight[h, t] * codes[t], in the order of `transpose_quads`. Digits of heads are `digits` apart.
inline void add_digits(const uint8_t* quads, int64_t stride, int count, const int8_t* upper, const int8_t* lower,
                       int64_t digits, const float* factor, int heads, float* out, int64_t out_stride) {
  each_heads<2>(heads, [&](auto some, int h) {
    add_digit_heads<some.value>(quads, stride, count, upper + h * digits, lower + h * digits, digits, factor + h,
                                out + h * out_stride, out_stride);
  });
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
