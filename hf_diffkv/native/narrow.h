// The numbers of narrow pages, bit for bit as in pages/segments.py: metadata and scores of 16 bits.
#pragma once
#include "precision.h"
#include "simd.h"

namespace diffkv {
namespace {

constexpr int SCORE_SHIFT = 13, ZERO_LEVELS = 63;
constexpr int32_t SCORE_BASE = 81 << 23, LARGEST_SCORE = 0xffff;
constexpr uint32_t INDEX_FACTOR = 0x9E3779B1, LENGTH_FACTOR = 0xB504F333, MIX_FACTOR = 0x93CD3A2D;
constexpr uint32_t LARGEST_SCALE = 0x3df;

typedef uint32_t Words __attribute__((vector_size(4 * DIFFKV_WIDTH)));

// What a zero point's 6 bits are multiplied with, beside the scale; all three products are exact.
inline float zero_factor(int bits) { return -levels_of(bits) * (65.f / 4096.f); }

inline float scale_of(uint32_t word) { return as_float((word & 0xffc0) << 12) * 0x1p112f; }

inline void read_narrow(const uint8_t* from, float factor, float& scale, float& zero) {
  uint16_t word;
  memcpy(&word, from, 2);
  scale = scale_of(word);
  zero = float(word & ZERO_LEVELS) * scale * factor;
}

// Metadata of a group with the elements [low, high].
inline uint16_t narrow_metadata(float low, float high, int bits) {
  const float levels = levels_of(bits);
  low = smaller(low, 0.f);
  high = larger(high, 0.f);
  float16 half;
  from_float((high - low) / levels, half);
  const uint32_t scale = smaller((uint32_t(half.bits) + 0xf + (half.bits >> 5 & 1)) >> 5, LARGEST_SCALE);
  const float covered = scale_of(scale << 6) * levels;
  if (covered == 0) return uint16_t(scale << 6);
  const float zero = round_even((covered - (low + high)) * (ZERO_LEVELS / 2.f) / covered);
  return uint16_t(scale << 6 | uint32_t(smaller(larger(zero, 0.f), float(ZERO_LEVELS))));
}

// 13 random bits; `mixed` is index * INDEX_FACTOR + (2 * length + tier) * LENGTH_FACTOR.
template <class Word>
inline Word hash_of(Word mixed) {
  return ((mixed ^ mixed >> 15) * MIX_FACTOR) >> (32 - SCORE_SHIFT);
}

inline float score_of(uint16_t code) { return as_float(code ? (uint32_t(code) << SCORE_SHIFT) + SCORE_BASE : 0); }

inline uint16_t narrow_score(float score, int32_t noise) {
  const int32_t code = (int32_t(as_bits(score)) + noise - SCORE_BASE) >> SCORE_SHIFT;
  return uint16_t(smaller(larger(code, 0), LARGEST_SCORE));
}

inline uint16_t nearest_score(float score) {
  return narrow_score(score, (1 << (SCORE_SHIFT - 1)) - 1 + int32_t(as_bits(score) >> SCORE_SHIFT & 1));
}

// WIDTH scores or positions of a segment from the `t`-th on; the last argument is of the type that is stored.
template <class Vector>
inline Vector load_numbers(const uint8_t* segment, int t, float) {
  return load(reinterpret_cast<const float*>(segment) + t);
}

template <class Vector>
inline Vector load_numbers(const uint8_t* segment, int t, int32_t) {
  Ints numbers;
  memcpy(&numbers, segment + 4 * t, sizeof(numbers));
  return numbers;
}

template <class Vector>
inline Vector load_numbers(const uint8_t* segment, int t, uint16_t) {
  Halves narrow;
  memcpy(&narrow, segment + 2 * t, sizeof(narrow));
  const Ints numbers = __builtin_convertvector(narrow, Ints);
  if constexpr (__is_same(Vector, Ints)) {
    return numbers;
  } else {
    const Ints bits = (numbers << SCORE_SHIFT) + SCORE_BASE;
    return (Floats)(numbers > 0 ? bits : Ints{});
  }
}

}  // namespace
}  // namespace diffkv
