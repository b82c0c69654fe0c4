// A row as pieces of consecutive tokens: its pages tier by tier, then its window, that is, the sinks and the ring from
// its oldest token.
#pragma once
#include "quantize.h"

namespace diffkv {
namespace {

struct Piece {
  const Tier* tier;
  uint8_t* page;  // null in the window
  const uint8_t *key, *value;
  float* window_score;
  int count, tier_index;
  int64_t first;  // index of its first token within its tier

  const Side& side(bool values) const { return values ? tier->value : tier->key; }
  const uint8_t* rows(bool values) const { return values ? value : key; }
  // Reads the key or value of one token as floats.
  void read(bool values, int32_t dtype, int64_t slot, float* to) const {
    const Side& from = side(values);
    if (page)
      decode_row(page, from, dtype, slot, to);
    else
      read_row(rows(values), dtype, slot * from.dim, from.dim, to);
  }
};

// Sinks, and the ring before and after the point where it wraps.
constexpr int MAX_RUNS = 3;

struct RowTokens {
  int64_t row;
  int64_t count[MAX_TIERS], pages[MAX_TIERS];
  int64_t window;                                      // tokens
  int64_t window_slot[MAX_RUNS], window_run[MAX_RUNS];  // runs of consecutive slots: first slot, tokens
  int64_t pieces, tokens;
};

// The window as a tier, whose rows have the model's dtype.
inline Tier window_tier(const Format& format) {
  Tier tier = {};
  Side Tier::* const sides[] = {&Tier::key, &Tier::value};
  for (auto side : sides) {
    (tier.*side).groups = 1;
    (tier.*side).dim = (format.tier[0].*side).dim;
    (tier.*side).row = int32_t((tier.*side).dim * element_bytes(format.dtype));
  }
  return tier;
}

// Lists the tokens of a row; the newest token of its request must be real.
inline RowTokens row_tokens(const Step& step, int64_t row) {
  RowTokens tokens = {};
  tokens.row = row;
  for (int t = 0; t < step.format.tiers; t++) {
    tokens.count[t] = step.rows.count[t][row];
    tokens.pages[t] = pages_of(step.format.tier[t], tokens.count[t]);
    tokens.pieces += tokens.pages[t];
    tokens.tokens += tokens.count[t];
  }
  const int64_t request = row / step.heads, length = step.length[request];
  const int64_t ring = step.slots - step.sink_slots;
  const int64_t held = smaller(larger<int64_t>(length - step.window_start[request], 0), ring);
  const int64_t sinks = step.sink_end ? smaller(smaller(length, step.sink_end[request]), step.sink_slots) : 0;
  const int64_t first = ring_slot(length - held, step.slots, step.sink_slots);
  const int64_t before_wrap = smaller(held, step.slots - first);
  const int64_t slot[MAX_RUNS] = {0, first, step.sink_slots}, run[MAX_RUNS] = {sinks, before_wrap, held - before_wrap};
  int runs = 0;
  for (int i = 0; i < MAX_RUNS; i++) {
    if (!run[i]) continue;
    tokens.window_slot[runs] = slot[i];
    tokens.window_run[runs++] = run[i];
  }
  tokens.window = held + sinks;
  tokens.pieces += runs;
  tokens.tokens += tokens.window;
  return tokens;
}

inline int piece_count(const Step& step, const RowTokens& tokens, int64_t index) {
  for (int t = 0; t < step.format.tiers; t++) {
    const int64_t capacity = step.format.tier[t].capacity;
    if (index < tokens.pages[t]) return int(smaller(capacity, tokens.count[t] - index * capacity));
    index -= tokens.pages[t];
  }
  return int(tokens.window_run[index]);
}

inline Piece piece_at(const Step& step, const Tier& window, const RowTokens& tokens, int64_t index) {
  Piece piece = {};
  piece.count = piece_count(step, tokens, index);
  for (int t = 0; t < step.format.tiers; t++) {
    if (index < tokens.pages[t]) {
      piece.tier = &step.format.tier[t];
      piece.tier_index = t;
      piece.first = index * piece.tier->capacity;
      piece.page = page_at(step.format, step.rows, tokens.row, t, index);
      piece.key = piece.page + piece.tier->key.offset;
      piece.value = piece.page + piece.tier->value.offset;
      return piece;
    }
    index -= tokens.pages[t];
  }
  const int64_t slot = tokens.row * step.slots + tokens.window_slot[index];
  piece.tier = &window;
  piece.key = static_cast<const uint8_t*>(step.window_key) + slot * window.key.row;
  piece.value = static_cast<const uint8_t*>(step.window_value) + slot * window.value.row;
  piece.window_score = step.window_score + slot;
  return piece;
}

// Cache lines that can be on their way at a time; further ones would wait.
constexpr int LINES_TOGETHER = 16;

// Prefetches what a pass over keys, or over values, reads next, up to two pieces ahead, into L2 because L1 holds the
// current data. The pass over keys also needs the factors of both; the pass over values also needs the scores, which
// are updated last.
struct Ahead {
  const Piece *piece, *end;
  bool values;
  int offset;

  DIFFKV_INLINE void fetch(const Piece* reading, int lines = 1 << 16) {
    if (piece <= reading) piece = reading + 1, offset = 0;
    while (lines > 0 && piece < end && piece <= reading + 2) {
      const uint8_t* rows = piece->rows(values);
      const int bytes = piece->side(values).row * piece->count, last = smaller(bytes, offset + 64 * lines);
      int at = offset;
      for (; at < last; at += 64, lines--) __builtin_prefetch(rows + at, 0, 2);
      offset = at;
      if (at < bytes) return;
      const Tier& tier = *piece->tier;
      if (piece->page && values) __builtin_prefetch(piece->page + tier.score_offset, 0, 2);
      if (piece->page && !values) {
        __builtin_prefetch(piece->page + tier.key.metadata_offset, 0, 2);
        __builtin_prefetch(piece->page + tier.value.metadata_offset, 0, 2);
      }
      piece++, offset = 0, lines--;
    }
  }
};

}  // namespace
}  // namespace diffkv
