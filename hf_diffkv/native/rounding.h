// Rounding of keys for the queries that read them, as in ops/rounding/reference.py. WIDTH keys of one row are rounded
// together, one channel at a time, so that the feedback of later channels multiplies vectors by one number each.
#pragma once
#include "quantize.h"

namespace diffkv {
namespace {

// LARGEST_BITS of ops/rounding/reference.py
constexpr int ROUNDED_BITS = 6;

// Keys of one row and the numbers of their groups, by element and group, one key per lane.
struct KeyBlock {
  alignas(64) float x[MAX_DIM][WIDTH], error[MAX_DIM][WIDTH];
  alignas(64) float low[WIDTH], high[WIDTH], step[WIDTH], zero[WIDTH], least[WIDTH], most[WIDTH];
};

inline float code_near(float x, float zero, float step, float top) {
  return round_even(smaller(larger((x - zero) / step, 0.f), top));
}

// Computes the numbers of one group for the keys in all lanes.
inline void weigh_group(KeyBlock& keys, const Side& side, int first, int size) {
  const float levels = levels_of(side.bits);
  Floats lowest = load(keys.x[first]), highest = lowest;
  for (int d = first + 1; d < first + size; d++) {
    lowest = minimum(lowest, load(keys.x[d]));
    highest = maximum(highest, load(keys.x[d]));
  }
  store(keys.low, lowest);
  store(keys.high, highest);
  for (int lane = 0; lane < WIDTH; lane++) {
    uint8_t metadata[4];
    float step, zero;
    make_group(metadata, side, keys.low[lane], keys.high[lane]);
    read_group(metadata, side, step, zero);
    // a scale of 0 has the single code 0
    const float top = step == 0 ? 0 : levels;
    step = step == 0 ? 1 : step;
    keys.step[lane] = step, keys.zero[lane] = zero;
    keys.least[lane] = code_near(keys.low[lane], zero, step, top);
    keys.most[lane] = code_near(keys.high[lane], zero, step, top);
  }
}

// Feedback of the channels after `channel`, in four independent sums.
inline Floats added(const KeyBlock& keys, const float* feedback, int channel, int dim) {
  Floats part[4] = {Floats{}, Floats{}, Floats{}, Floats{}};
  int d = channel + 1;
  for (; d + 4 <= dim; d += 4)
    for (int i = 0; i < 4; i++) part[i] = fma(load(keys.error[d + i]), splat(feedback[d + i]), part[i]);
  for (; d < dim; d++) part[0] = fma(load(keys.error[d]), splat(feedback[d]), part[0]);
  return (part[0] + part[1]) + (part[2] + part[3]);
}

// M^T of one row, [dim, dim] of a dtype at an offset in elements; only entries right of the diagonal are read.
struct Feedback {
  const void* from;
  int32_t dtype;
  int64_t offset;

  // Weights of the channels after `channel`, indexed by channel; `buffer` may hold them.
  const float* behind(int channel, int dim, float* buffer) const {
    const int64_t at = offset + int64_t(channel) * dim;
    if (dtype == FLOAT32) return static_cast<const float*>(from) + at;
    read_row(from, dtype, at + channel + 1, dim - channel - 1, buffer + channel + 1);
    return buffer;
  }
};

// Rounds one channel; the element becomes the number to quantise.
inline void round_channel(KeyBlock& keys, int channel, Floats behind) {
  const Floats x = load(keys.x[channel]), step = load(keys.step), zero = load(keys.zero);
  const Floats low = load(keys.low), high = load(keys.high), least = load(keys.least), most = load(keys.most);
  Floats code = round_even(minimum(maximum((x - behind - zero) / step, least), most));
  // the ends of the range stay the same, so the group's numbers do too
  code = x == low ? least : x == high ? most : code;
  const Floats decoded = fma(code, step, zero);
  store(keys.error[channel], decoded - x);
  const Floats inside = minimum(maximum(decoded, low), high);
  store(keys.x[channel], x == low ? x : x == high ? x : inside);
}

// Rounds the keys in all lanes.
inline void round_lanes(const Side& side, const Feedback& feedback, KeyBlock& block) {
  const int dim = side.dim, size = dim / side.groups;
  float buffer[MAX_DIM];
  for (int group = side.groups - 1; group >= 0; group--) {
    weigh_group(block, side, group * size, size);
    for (int d = (group + 1) * size - 1; d >= group * size; d--)
      round_channel(block, d, added(block, feedback.behind(d, dim, buffer), d, dim));
  }
}

// Rounds one key, unless there is no feedback or codes have more than ROUNDED_BITS bits.
inline void round_key(const Side& side, const Feedback& feedback, float* key) {
  if (!feedback.from || side.bits > ROUNDED_BITS) return;
  KeyBlock block;
  for (int d = 0; d < side.dim; d++) store(block.x[d], splat(key[d]));
  round_lanes(side, feedback, block);
  for (int d = 0; d < side.dim; d++) key[d] = block.x[d][0];
}

inline void round_block(const Rounding& keys, int64_t first, int count, KeyBlock& block) {
  const int dim = keys.side.dim;
  float row[MAX_DIM];
  for (int lane = 0; lane < WIDTH; lane++) {
    // lanes without a key repeat the last one
    read_row(keys.key, keys.source, (first + smaller(lane, count - 1)) * keys.key_stride, dim, row);
    for (int d = 0; d < dim; d++) block.x[d][lane] = row[d];
  }
  round_lanes(keys.side, {keys.feedback, FLOAT32, keys.row[first] * int64_t(dim) * dim}, block);
  for (int lane = 0; lane < count; lane++)
    for (int d = 0; d < dim; d++) keys.rounded[(first + lane) * dim + d] = block.x[d][lane];
}

inline int64_t round_keys(const Rounding& keys) {
  for (int64_t i = 0; i < keys.count; i++)
    if (keys.row[i] < 0 || keys.row[i] >= keys.rows) return BAD_COUNT;
  each_task((keys.count + TASK_TOKENS - 1) / TASK_TOKENS, keys.threads, [&](int64_t task) {
    const int64_t end = smaller((task + 1) * TASK_TOKENS, keys.count);
    KeyBlock block;
    for (int64_t first = task * TASK_TOKENS; first < end;) {
      int count = 1;
      while (count < WIDTH && first + count < end && keys.row[first + count] == keys.row[first]) count++;
      round_block(keys, first, count, block);
      first += count;
    }
  });
  return OK;
}

}  // namespace
}  // namespace diffkv
