// Places within a page, and the format of its metadata, scores and positions; no other header knows them.
#pragma once
#include "numbers.h"
#include "precision.h"

namespace diffkv {
namespace {

constexpr int SCORE_SHIFT = 13, ZERO_LEVELS = 63;
constexpr int32_t SCORE_BASE = 81 << 23, LARGEST_SCORE = 0xffff;
constexpr uint32_t INDEX_FACTOR = 0x9E3779B1, LENGTH_FACTOR = 0xB504F333, MIX_FACTOR = 0x93CD3A2D;
constexpr uint32_t LARGEST_SCALE = 0x3df;

typedef uint32_t Words __attribute__((vector_size(4 * DIFFKV_WIDTH)));

// Factor of a zero point's 6 bits apart from the scale; all products are exact.
inline float zero_factor(int bits) { return -levels_of(bits) * (65.f / 4096.f); }

inline float scale_of(uint32_t word) { return as_float((word & 0xffc0) << 12) * 0x1p112f; }

inline void read_narrow(const uint8_t* from, float factor, float& scale, float& zero) {
  uint16_t word;
  memcpy(&word, from, 2);
  scale = scale_of(word);
  zero = float(word & ZERO_LEVELS) * scale * factor;
}

// Metadata of a group with smallest and largest elements `low` and `high`.
inline uint16_t narrow_metadata(float low, float high, int bits) {
  const float levels = levels_of(bits);
  // not -0, whose sign would become a bit of the scale
  low = low < 0 ? low : 0.f;
  high = high > 0 ? high : 0.f;
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

// Loads WIDTH scores or positions of a segment, starting with the `t`-th; the last argument has the stored type.
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

// Window slot of a token that is not a sink (pages/rows.py).
inline int64_t ring_slot(int64_t position, int64_t slots, int64_t sink_slots) {
  return sink_slots + position % (slots - sink_slots);
}

constexpr int HIGH = 0;

// Table column of a row's index-th page: the first tier grows from the left, the second from the right.
inline int64_t column(int tier, int64_t index, int64_t width) { return tier == HIGH ? index : width - 1 - index; }

inline int32_t& entry(const Rows& rows, int64_t row, int tier, int64_t index) {
  return rows.table[row * rows.width + column(tier, index, rows.width)];
}

inline uint8_t* page_at(const Format& format, const Rows& rows, int64_t row, int tier, int64_t index) {
  return rows.pages + int64_t(entry(rows, row, tier, index)) * format.page_bytes;
}

inline int64_t pages_of(const Tier& tier, int64_t count) { return (count + tier.capacity - 1) / tier.capacity; }

inline bool has_metadata(const Side& side) { return side.metadata_bytes > 0; }
inline bool has_scores(const Tier& tier) { return tier.score_bytes > 0; }

// Checks that a row's counts fit its table and that its entries are pages of the pool other than the null page.
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

inline void read_pair(const uint8_t* from, float& scale, float& zero) {
  float16 pair[2];
  memcpy(pair, from, 4);
  scale = to_float(pair[0]);
  zero = to_float(pair[1]);
}

// Reads (scale, zero) of one group.
inline void read_group(const uint8_t* from, const Side& side, float& scale, float& zero) {
  if (side.metadata_bytes == 2) return read_narrow(from, zero_factor(side.bits), scale, zero);
  read_pair(from, scale, zero);
}

// Writes the metadata of a group with smallest and largest elements `low` and `high`.
inline void make_group(uint8_t* to, const Side& side, float low, float high) {
  if (side.metadata_bytes == 2) {
    const uint16_t word = narrow_metadata(low, high, side.bits);
    memcpy(to, &word, 2);
  } else {
    float16 pair[2];
    from_float((high - low) / levels_of(side.bits), pair[0]);
    from_float(low, pair[1]);
    memcpy(to, pair, 4);
  }
}

// Stores the metadata of a group with smallest and largest elements `low` and `high`, and reads it back.
inline void write_group(uint8_t* page, const Side& side, int64_t slot, int group, float low, float high, float& scale,
                        float& zero) {
  uint8_t* to = page + side.metadata_offset + (slot * side.groups + group) * side.metadata_bytes;
  make_group(to, side, low, high);
  read_group(to, side, scale, zero);
}

// Reads (scale, zero) of all groups of one token.
inline void read_metadata(const uint8_t* page, const Side& side, int64_t slot, float* scale, float* zero) {
  const uint8_t* from = page + side.metadata_offset + slot * side.groups * side.metadata_bytes;
  for (int g = 0; g < side.groups; g++) read_group(from + g * side.metadata_bytes, side, scale[g], zero[g]);
}

// Reads (scale, zero) of `count` tokens with one group each; overwrites up to WIDTH - 1 numbers after the last.
inline void read_metadata(const uint8_t* page, const Side& side, int64_t slot, int count, float* scale, float* zero) {
  const uint8_t* from = page + side.metadata_offset + slot * side.metadata_bytes;
  int t = 0;
#if defined(__AVX512F__)
  for (; t < count; t += 16) {
    const int left = count - t;
    const __mmask16 there = left >= 16 ? 0xffff : (1u << left) - 1;
    if (side.metadata_bytes == 2) {
      const __m512i words = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, from + 2 * t));
      const __m512i halves = _mm512_and_si512(_mm512_srli_epi32(words, 1), _mm512_set1_epi32(0x7fe0));
      const __m512 scales = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(halves));
      const __m512 levels = _mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(ZERO_LEVELS)));
      store(scale + t, scales);
      store(zero + t, levels * scales * splat(zero_factor(side.bits)));
      continue;
    }
    const __m512i pairs = _mm512_maskz_loadu_epi32(there, from + 4 * t);
    store(scale + t, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs)));
    store(zero + t, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16))));
  }
#elif defined(__AVX2__)
  for (; t + WIDTH <= count; t += WIDTH) {
    if (side.metadata_bytes == 2) {
      const __m128i words = _mm_loadu_si128((const __m128i*)(from + 2 * t));
      const Ints levels = (Ints)_mm256_cvtepu16_epi32(_mm_and_si128(words, _mm_set1_epi16(ZERO_LEVELS)));
      const Floats scales = _mm256_cvtph_ps(_mm_and_si128(_mm_srli_epi16(words, 1), _mm_set1_epi16(0x7fe0)));
      store(scale + t, scales);
      store(zero + t, __builtin_convertvector(levels, Floats) * scales * splat(zero_factor(side.bits)));
      continue;
    }
    const __m256i pairs = _mm256_loadu_si256((const __m256i*)(from + 4 * t));
    // all scales, then all zero points, of each half
    const __m256i parts = _mm256_packus_epi32(_mm256_blend_epi16(pairs, _mm256_setzero_si256(), 0xaa),
                                              _mm256_srli_epi32(pairs, 16));
    const __m256i halves = _mm256_permute4x64_epi64(parts, 0xd8);
    store(scale + t, _mm256_cvtph_ps(_mm256_castsi256_si128(halves)));
    store(zero + t, _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
  }
#endif
  if (side.metadata_bytes == 2) {
    const float factor = zero_factor(side.bits);
    for (; t < count; t++) read_narrow(from + 2 * t, factor, scale[t], zero[t]);
  }
  for (; t < count; t++) read_pair(from + 4 * t, scale[t], zero[t]);
}

// Calls `call` with a value of the type of a tier's scores and one of the type of its positions.
template <class Call>
inline auto with_numbers(const Tier& tier, Call call) {
  if (tier.score_bytes == 4) return call(float(), int32_t());
  if (tier.position_bytes == 4) return call(uint16_t(), int32_t());
  return call(uint16_t(), uint16_t());
}

template <class Number>
inline Number number_at(const uint8_t* page, int64_t offset, int64_t slot) {
  Number number;
  memcpy(&number, page + offset + slot * int64_t(sizeof(number)), sizeof(number));
  return number;
}

template <class Number>
inline void put_number(uint8_t* page, int64_t offset, int64_t slot, Number number) {
  memcpy(page + offset + slot * int64_t(sizeof(number)), &number, sizeof(number));
}

// Adds to the scores of the first `count` tokens of a page. The first token is its row's `index`-th of the tier.
// `index` and the row's `length` seed the rounding of narrow scores.
inline void add_scores(uint8_t* page, const Tier& tier, int count, const float* more, int tier_index, int64_t index,
                       int64_t length) {
  uint8_t* scores = page + tier.score_offset;
  int t = 0;
  if (tier.score_bytes == 4) {
    float* sums = reinterpret_cast<float*>(scores);
    for (; t < count; t++) sums[t] += more[t];
    return;
  }
  const uint32_t start = uint32_t(index) * INDEX_FACTOR + (2 * uint32_t(length) + tier_index) * LENGTH_FACTOR;
  Words step = {};
  for (int i = 0; i < WIDTH; i++) step[i] = uint32_t(i) * INDEX_FACTOR;
  for (; t + WIDTH <= count; t += WIDTH) {
    const Ints noise = (Ints)hash_of(step + (start + uint32_t(t) * INDEX_FACTOR));
    const Ints sum = (Ints)(load_numbers<Floats>(scores, t, uint16_t()) + load(more + t));
    Ints code = (sum + noise - SCORE_BASE) >> SCORE_SHIFT;
    code = code > 0 ? code : Ints{};
    code = code < LARGEST_SCORE ? code : Ints{} + LARGEST_SCORE;
    const Halves narrow = __builtin_convertvector(code, Halves);
    memcpy(scores + 2 * t, &narrow, sizeof(narrow));
  }
  for (; t < count; t++) {
    const float sum = score_of(number_at<uint16_t>(scores, 0, t)) + more[t];
    put_number(scores, 0, t, narrow_score(sum, int32_t(hash_of(start + uint32_t(t) * INDEX_FACTOR))));
  }
}

inline float read_score(const uint8_t* page, const Tier& tier, int64_t slot) {
  if (tier.score_bytes == 4) return number_at<float>(page, tier.score_offset, slot);
  return score_of(number_at<uint16_t>(page, tier.score_offset, slot));
}

inline int32_t read_position(const uint8_t* page, const Tier& tier, int64_t slot) {
  if (tier.position_bytes == 4) return number_at<int32_t>(page, tier.position_offset, slot);
  return number_at<uint16_t>(page, tier.position_offset, slot);
}

// Mean significance of a token: its score over the number of later queries. `last` is the newest token.
inline float mean_of(const uint8_t* page, const Tier& tier, int64_t slot, int32_t last) {
  return read_score(page, tier, slot) / float(larger(last - read_position(page, tier, slot), 1));
}

// Smallest mean of the first `count` tokens.
inline float least_mean(const uint8_t* page, const Tier& tier, int count, int32_t last) {
  float least = INFINITY;
  int t = 0;
  if (count >= WIDTH) {
    Floats lowest = splat(INFINITY);
    with_numbers(tier, [&](auto score, auto position) {
      for (; t + WIDTH <= count; t += WIDTH) {
        const Ints later = last - load_numbers<Ints>(page + tier.position_offset, t, position);
        const Floats weight = __builtin_convertvector(later > 1 ? later : Ints{} + 1, Floats);
        lowest = minimum(lowest, load_numbers<Floats>(page + tier.score_offset, t, score) / weight);
      }
    });
    least = smallest(lowest);
  }
  for (; t < count; t++) least = smaller(least, mean_of(page, tier, t, last));
  return least;
}

inline void write_token(uint8_t* page, const Tier& tier, int64_t slot, float score, int32_t position) {
  if (!has_scores(tier)) return;
  if (tier.score_bytes == 4)
    put_number(page, tier.score_offset, slot, score);
  else
    put_number(page, tier.score_offset, slot, nearest_score(score));
  if (tier.position_bytes == 4)
    put_number(page, tier.position_offset, slot, position);
  else
    put_number(page, tier.position_offset, slot, uint16_t(position));
}

// Copies a stored token without requantising it.
inline void copy_token(const uint8_t* from, int64_t slot, uint8_t* to, int64_t to_slot, const Tier& tier) {
  auto copy = [&](int64_t offset, int64_t bytes) {
    memcpy(to + offset + to_slot * bytes, from + offset + slot * bytes, bytes);
  };
  const Side* const sides[] = {&tier.key, &tier.value};
  for (const Side* side : sides) {
    copy(side->offset, side->row);
    copy(side->metadata_offset, int64_t(side->groups) * side->metadata_bytes);
  }
  copy(tier.score_offset, tier.score_bytes);
  copy(tier.position_offset, tier.position_bytes);
}

}  // namespace
}  // namespace diffkv
