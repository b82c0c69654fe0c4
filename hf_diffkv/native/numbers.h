// bfloat16 and float16 to and from float, bit for bit as PyTorch rounds. All functions of these headers are static, as
// they are compiled once for each instruction set.
#pragma once
#include <stdint.h>
#include <string.h>

#include "abi.h"

// A function that stays one: as part of a larger one it would find too few registers for what it sums up.
#define DIFFKV_ALONE __attribute__((noinline))
// One that must not: compilers drop calls of a function that only fetches ahead, as they have no effect.
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

// Adding it rounds what is small to the nearest integer, halves to the even one.
constexpr float MAGIC = 12582912.f;
template <class Number>
inline Number round_even(Number x) {
  return (x + MAGIC) - MAGIC;
}

inline float to_float(float x) { return x; }
inline float to_float(bfloat16 x) { return as_float(uint32_t(x.bits) << 16); }
inline float to_float(float16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = uint32_t(x.bits & 0x7fff) << 13;
  // a product puts the exponent right, of subnormal numbers too
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

// Calls with a value of the element type of `dtype`.
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

inline int64_t element_bytes(int32_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

}  // namespace
}  // namespace diffkv
