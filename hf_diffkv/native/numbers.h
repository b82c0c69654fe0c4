// Numbers: conversion of bfloat16 and float16 to and from float, bit for bit as in PyTorch, and vectors of WIDTH
// floats, with intrinsics where the compiler needs help. In vectors, NaN only propagates. All functions of these
// headers are static, because they are compiled once for each instruction set.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "abi.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#define DIFFKV_WIDTH 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define DIFFKV_WIDTH 8
#else
#define DIFFKV_WIDTH 4
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#endif

// Never inlined: within a larger function, its accumulators would not fit in the registers.
#define DIFFKV_ALONE __attribute__((noinline))
// Always inlined: compilers drop calls to a function that only prefetches, because it has no effect.
#define DIFFKV_INLINE __attribute__((always_inline)) inline

namespace diffkv {
namespace {

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

inline float as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t as_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

// Adding this rounds small numbers to the nearest integer, ties to even.
constexpr float MAGIC = 12582912.f;
template <class Number>
inline Number round_even(Number x) {
  return (x + MAGIC) - MAGIC;
}

inline float to_float(float x) { return x; }
inline float to_float(bfloat16 x) { return as_float(uint32_t(x.bits) << 16); }
inline float to_float(float16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = uint32_t(x.bits & 0x7fff) << 13;
  // the product corrects the exponent, also for subnormal numbers
  const uint32_t bits = (x.bits & 0x7c00) == 0x7c00 ? rest | 0x7f800000 : as_bits(as_float(rest) * 0x1p112f);
  return as_float(sign | bits);
}

inline void from_float(float x, float& to) { to = x; }
inline void from_float(float x, bfloat16& to) {
  const uint32_t bits = as_bits(x);
  to.bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void from_float(float x, float16& to) {
  const uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  uint32_t half;
  if (rest >= 0x7f800000) {
    half = rest > 0x7f800000 ? 0x7e00 : 0x7c00;
  } else if (rest >= 0x477ff000) {
    half = 0x7c00;
  } else if (rest < 0x38800000) {
    // adding 0.5 rounds to multiples of 2^-24, the smallest subnormal number
    half = as_bits(as_float(rest) + 0.5f) - 0x3f000000;
  } else {
    half = (rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13;
  }
  to.bits = uint16_t(sign | half);
}

// Calls `call` with a value of the element type of `dtype`.
template <class Call>
inline void with_dtype(int32_t dtype, Call call) {
  if (dtype == BFLOAT16) {
    call(bfloat16());
  } else if (dtype == FLOAT16) {
    call(float16());
  } else {
    call(float());
  }
}

// Calls `call` with the index of every task, distributed over threads.
template <class Call>
inline void each_task(int64_t tasks, int64_t threads, const Call& call) {
  parallel(tasks, int(threads), [](void* context, int64_t task) { (*static_cast<const Call*>(context))(task); },
           const_cast<Call*>(&call));
}

// Lays out arrays one after another starting at `memory`, or only counts their bytes if it is null.
struct Places {
  uint8_t* memory;
  int64_t used;

  template <class Number>
  void operator()(Number*& part, int64_t count) {
    part = reinterpret_cast<Number*>(uintptr_t(memory) + used);
    used += (count * int64_t(sizeof(Number)) + 63) / 64 * 64;
  }
};

inline int64_t element_bytes(int32_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

constexpr int WIDTH = DIFFKV_WIDTH;
constexpr float LOG2_E = 1.44269504088896341f;
// accumulators of a block: half of the registers
constexpr int BLOCK = WIDTH == 16 ? 16 : 8;

typedef float Floats __attribute__((vector_size(4 * DIFFKV_WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * DIFFKV_WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * DIFFKV_WIDTH)));
typedef uint8_t Bytes __attribute__((vector_size(DIFFKV_WIDTH)));

template <class A>
inline A smaller(A a, A b) {
  return b < a ? b : a;
}
template <class A>
inline A larger(A a, A b) {
  return b > a ? b : a;
}
inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Unlike 0 + x, x - 0 equals x for every x, so that it is a single instruction.
inline Floats splat(float x) { return x - Floats{}; }
inline Floats load(const float* p) {
  Floats x;
  memcpy(&x, p, sizeof(x));
  return x;
}
inline void store(float* p, Floats x) { memcpy(p, &x, sizeof(x)); }
inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
inline Floats minimum(Floats a, Floats b) { return a < b ? a : b; }

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

inline Floats load(const uint8_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  Bytes x;
  memcpy(&x, p, sizeof(x));
  return __builtin_convertvector(x, Floats);
#endif
}

inline Floats load(const bfloat16* p) {
#if defined(__AVX512F__)
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  Halves x;
  memcpy(&x, p, sizeof(x));
  return (Floats)(__builtin_convertvector(x, Ints) << 16);
#endif
}

inline Floats load(const float16* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  Floats x;
  for (int i = 0; i < WIDTH; i++) x[i] = to_float(p[i]);
  return x;
#endif
}

inline float sum(Floats x) {
  float total = 0;
  for (int i = 0; i < WIDTH; i++) total += x[i];
  return total;
}
inline float largest(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(x);
#else
  float best = x[0];
  for (int i = 1; i < WIDTH; i++) best = larger(best, x[i]);
  return best;
#endif
}
inline float smallest(Floats x) {
  float best = x[0];
  for (int i = 1; i < WIDTH; i++) best = smaller(best, x[i]);
  return best;
}

#if defined(__AVX512F__)
// Sums parts of 16 / PARTS vectors of floats or integers: result[part, vector] is the sum of lanes 16 / PARTS * part to
// 16 / PARTS * (part + 1) - 1 of a vector. PARTS is 1, 2 or 4.
template <int PARTS, class Vector>
inline Vector lane_sums(const Vector* a) {
  constexpr int VECTORS = 16 / PARTS;
  Vector b[VECTORS / 2], c[VECTORS / 4];
  for (int i = 0; i < VECTORS / 2; i++) {
    const __m512 x = (__m512)a[2 * i], y = (__m512)a[2 * i + 1];
    b[i] = (Vector)_mm512_unpacklo_ps(x, y) + (Vector)_mm512_unpackhi_ps(x, y);
  }
  for (int i = 0; i < VECTORS / 4; i++) {
    const __m512d x = (__m512d)b[2 * i], y = (__m512d)b[2 * i + 1];
    c[i] = (Vector)_mm512_unpacklo_pd(x, y) + (Vector)_mm512_unpackhi_pd(x, y);
  }
  auto join = [](Vector p, Vector q) {
    const __m512 x = (__m512)p, y = (__m512)q;
    return (Vector)_mm512_shuffle_f32x4(x, y, 0x88) + (Vector)_mm512_shuffle_f32x4(x, y, 0xdd);
  };
  if constexpr (PARTS == 1) return join(join(c[0], c[1]), join(c[2], c[3]));
  if constexpr (PARTS == 2) {
    // from both parts of the first four vectors and of the others to all vectors of a part
    const __m512 both = (__m512)join(c[0], c[1]);
    return (Vector)_mm512_shuffle_f32x4(both, both, 0xd8);
  }
  return c[0];
}
#endif

// Sums each of BLOCK vectors.
inline void sums(const Floats* a, float* out) {
#if defined(__AVX512F__)
  store(out, lane_sums<1>(a));
#elif defined(__AVX2__)
  const __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
  const __m256 y = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
  store(out, _mm256_permute2f128_ps(x, y, 0x20) + _mm256_permute2f128_ps(x, y, 0x31));
#else
  for (int i = 0; i < BLOCK; i++) out[i] = sum(a[i]);
#endif
}

// 2^x for x up to 126, with a relative error of about 1e-7. Below -126, the result is close to the smallest float.
inline Floats exp2(Floats x) {
  const Floats magic = splat(MAGIC);
  // in this order, NaN stays NaN
  x = minimum(splat(126.f), maximum(splat(-126.f), x));
  const Floats shifted = x + magic;
  const Floats part = x - (shifted - magic);
  const Ints whole = (Ints)shifted - (Ints)magic;
  // fitted to 2^x on [-1/2, 1/2] for minimal relative error, 2e-9 before rounding
  Floats p = splat(1.53375768e-4f);
  p = fma(p, part, splat(1.33998604e-3f));
  p = fma(p, part, splat(9.61851953e-3f));
  p = fma(p, part, splat(5.55032900e-2f));
  p = fma(p, part, splat(2.40226466e-1f));
  p = fma(p, part, splat(6.93147206e-1f));
  p = fma(p, part, splat(1.f));
  return p * (Floats)((whole + 127) << 23);
}

}  // namespace
}  // namespace diffkv
