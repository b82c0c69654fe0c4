// Where things stand in a page, and what its metadata, scores and positions look like; nothing else knows.
#pragma once
#include <math.h>

#include "simd.h"

namespace diffkv {
namespace {

// Slot of a window's token that is no sink (ops/window.py).
inline int64_t ring_slot(int64_t position, int64_t slots, int64_t sink_slots) {
  return sink_slots + position % (slots - sink_slots);
}

constexpr int HIGH = 0;

// Column of a row's index-th page: the first tier grows from the left, the second from the right.
inline int64_t column(int tier, int64_t index, int64_t width) { return tier == HIGH ? index : width - 1 - index; }

inline int32_t& entry(const Rows& rows, int64_t row, int tier, int64_t index) {
  return rows.table[row * rows.width + column(tier, index, rows.width)];
}

inline uint8_t* page_at(const Format& format, const Rows& rows, int64_t row, int tier, int64_t index) {
  return rows.pages + int64_t(entry(rows, row, tier, index)) * format.page_bytes;
}

inline int64_t pages_of(const Tier& tier, int64_t count) { return (count + tier.capacity - 1) / tier.capacity; }

inline bool has_metadata(const Side& side) { return side.bits < 16; }

// Whether a row's counts fit its table and its entries are pages of the pool, the null page excluded.
inline Status check_row(const Format& format, const Rows& rows, int64_t row) {
  int64_t used = 0;
  for (int t = 0; t < format.tiers; t++) {
    const int64_t count = rows.count[t][row], pages = pages_of(format.tier[t], larger<int64_t>(count, 0));
    used += pages;
    if (count < 0 || used > rows.width) return BAD_COUNT;
    bool good = true;
    for (int64_t i = 0; i < pages; i++) {
      const int64_t id = entry(rows, row, t, i);
      good &= (id > 0) & (id < rows.page_count);
    }
    if (!good) return BAD_PAGE;
  }
  return OK;
}

// (scale, zero) of `groups` groups of one token.
inline void read_metadata(const uint8_t* page, const Side& side, int64_t slot, float* scale, float* zero) {
  float16 pair[2];
  for (int g = 0; g < side.groups; g++) {
    memcpy(pair, page + side.metadata_offset + (slot * side.groups + g) * 4, 4);
    scale[g] = to_float(pair[0]);
    zero[g] = to_float(pair[1]);
  }
}

inline void write_metadata(uint8_t* page, const Side& side, int64_t slot, int group, float16 scale, float16 zero) {
  const float16 pair[2] = {scale, zero};
  memcpy(page + side.metadata_offset + (slot * side.groups + group) * 4, pair, 4);
}

// The same of `count` tokens of one group each; up to WIDTH - 1 numbers after the last are overwritten.
inline void read_metadata(const uint8_t* page, const Side& side, int64_t slot, int count, float* scale, float* zero) {
  const uint8_t* from = page + side.metadata_offset + slot * 4;
  int t = 0;
#if defined(__AVX512F__)
  for (; t < count; t += 16) {
    const int left = count - t;
    const __mmask16 there = left >= 16 ? 0xffff : (1u << left) - 1;
    const __m512i pairs = _mm512_maskz_loadu_epi32(there, from + 4 * t);
    store(scale + t, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs)));
    store(zero + t, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16))));
  }
#endif
  for (; t < count; t++) {
    float16 pair[2];
    memcpy(pair, from + 4 * t, 4);
    scale[t] = to_float(pair[0]);
    zero[t] = to_float(pair[1]);
  }
}

// Adds to the scores of `count` tokens.
inline void add_scores(uint8_t* page, const Tier& tier, int64_t slot, int count, const float* more) {
  float* scores = reinterpret_cast<float*>(page + tier.score_offset) + slot;
  for (int t = 0; t < count; t++) scores[t] += more[t];
}

inline float read_score(const uint8_t* page, const Tier& tier, int64_t slot) {
  return reinterpret_cast<const float*>(page + tier.score_offset)[slot];
}

inline int32_t read_position(const uint8_t* page, const Tier& tier, int64_t slot) {
  return reinterpret_cast<const int32_t*>(page + tier.position_offset)[slot];
}

// Mean significance of a token: its score over the number of later queries. `last` is the newest token.
inline float mean_of(const uint8_t* page, const Tier& tier, int64_t slot, int32_t last) {
  return read_score(page, tier, slot) / float(larger(last - read_position(page, tier, slot), 1));
}

// The least of the means of the first `count` tokens.
inline float least_mean(const uint8_t* page, const Tier& tier, int count, int32_t last) {
  float least = INFINITY;
  int t = 0;
  if (count >= WIDTH) {
    Floats lowest = splat(INFINITY);
    for (; t + WIDTH <= count; t += WIDTH) {
      Ints position;
      memcpy(&position, page + tier.position_offset + 4 * t, sizeof(position));
      const Ints later = last - position;
      const Floats weight = __builtin_convertvector(later > 1 ? later : Ints{} + 1, Floats);
      lowest = minimum(lowest, load(reinterpret_cast<const float*>(page + tier.score_offset) + t) / weight);
    }
    least = smallest(lowest);
  }
  for (; t < count; t++) least = smaller(least, mean_of(page, tier, t, last));
  return least;
}

inline void write_token(uint8_t* page, const Tier& tier, int64_t slot, float score, int32_t position) {
  reinterpret_cast<float*>(page + tier.score_offset)[slot] = score;
  reinterpret_cast<int32_t*>(page + tier.position_offset)[slot] = position;
}

// Copies a token as it is stored, code for code.
inline void copy_token(const uint8_t* from, int64_t slot, uint8_t* to, int64_t to_slot, const Tier& tier) {
  const Side* const sides[] = {&tier.key, &tier.value};
  for (const Side* side : sides) {
    memcpy(to + side->offset + to_slot * side->row, from + side->offset + slot * side->row, side->row);
    if (!has_metadata(*side)) continue;
    const int64_t bytes = 4 * side->groups;
    memcpy(to + side->metadata_offset + to_slot * bytes, from + side->metadata_offset + slot * bytes, bytes);
  }
  write_token(to, tier, to_slot, read_score(from, tier, slot), read_position(from, tier, slot));
}

}  // namespace
}  // namespace diffkv
