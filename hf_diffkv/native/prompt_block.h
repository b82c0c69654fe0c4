// Exact attention of some queries of one head to all tokens they see, tile by tile with a running maximum, and, where it
// is wanted, what each token receives from them: the weights of all tiles are kept then, and summed over the queries once
// their totals are known.
#pragma once
#include <math.h>

#include "prompt_tokens.h"

namespace diffkv {
namespace {

constexpr float LOG2_OF_E = 1.44269504088896341f;
// Weights below 2^LOWEST of a query's largest are zero: products of smaller ones would be slow, subnormal numbers.
constexpr float LOWEST = -60;
// Queries at a time, fewer where the weights that are kept would take more than so many numbers.
constexpr int64_t QUERIES = 4 * PRODUCT_ROWS, WEIGHTS = 1 << 20;

inline int64_t queries_of(const Prompt& prompt, int64_t tokens) {
  if (!prompt.received) return QUERIES;
  const int64_t room = WEIGHTS / round_up(larger<int64_t>(tokens, 1), TILE) / PRODUCT_ROWS * PRODUCT_ROWS;
  return larger<int64_t>(PRODUCT_ROWS, smaller(QUERIES, room));
}

// Buffers of one thread.
template <class Unit>
struct BlockWork {
  // weights: of tile i at i * QUERIES * TILE, [QUERIES, TILE]; of one tile after the other where none are kept
  float *weights, *output, *peak, *peaks, *total, *factor;
  Unit *query, *packed;

  int64_t place(uint8_t* memory, const Prompt& prompt, int64_t queries, int64_t tiles) {
    int64_t used = 0;
    auto take = [&](auto*& part, int64_t count) {
      part = reinterpret_cast<decltype(part + 0)>(uintptr_t(memory) + used);
      used += round_up(count * int64_t(sizeof(*part)), 64);
    };
    tiles = prompt.received ? tiles : 1;
    take(weights, tiles * queries * TILE);
    take(output, queries * round_up(prompt.value_dim, WIDTH));
    take(peak, queries);
    take(peaks, tiles * queries);
    take(total, queries);
    take(factor, queries);
    take(query, queries * units_of(prompt.key_dim, depth_of(Unit())));
    take(packed, queries * TILE / depth_of(Unit()));
    return used;
  }
};

// Some consecutive queries of one head, by their index among the request's real tokens.
struct Block {
  int64_t query_head, first, count;
};

inline int64_t output_row(const Prompt& prompt, const PromptRow& row, const Block& block, int64_t query) {
  return ((row.request * prompt.length + row.real[block.first + query]) * prompt.heads * prompt.group +
          block.query_head) * prompt.value_dim;
}

template <class Unit>
inline void load_queries(const Prompt& prompt, const PromptRow& row, const Block& block, int64_t queries,
                         BlockWork<Unit>& work) {
  const int64_t depth = depth_of(Unit()), units = units_of(prompt.key_dim, depth);
  float numbers[MAX_DIM + 1];
  memset(work.query, 0, size_t(queries * units) * sizeof(Unit));
  for (int64_t q = 0; q < block.count; q++) {
    const int64_t at = row.real[block.first + q];
    read_row(prompt.query.data, prompt.dtype,
             row.request * prompt.query.batch + block.query_head * prompt.query.head + at * prompt.query.token,
             int(prompt.key_dim), numbers);
    numbers[prompt.key_dim] = 0;
    for (int64_t k = 0; k < units; k++) make_unit(numbers + k * depth, 1, work.query[q * units + k]);
  }
}

// Products with `count` keys to base-2 logits. Those from `limit` on are hidden, and of the prompt's own tokens those
// that `mask` hides; `first` is the tile's first token.
inline float to_logits(const Prompt& prompt, const PromptRow& row, const uint8_t* mask, int64_t first, int64_t limit,
                       int64_t count, float* x) {
  const Floats scale = splat(prompt.softcap > 0 ? 2 * LOG2_OF_E * prompt.scaling / prompt.softcap
                                                : LOG2_OF_E * prompt.scaling);
  const Floats cap = splat(prompt.softcap * LOG2_OF_E);
  // tanh(y) = 1 - 2 / (exp(2 y) + 1)
  if (prompt.softcap > 0)
    for (int64_t t = 0; t < count; t += WIDTH) store(x + t, cap - 2 * cap / (exp2(load(x + t) * scale) + 1));
  for (int64_t t = limit; t < count; t++) x[t] = -INFINITY;
  if (mask)
    for (int64_t t = larger<int64_t>(row.past - first, 0); t < limit; t++)
      if (!mask[row.real[first + t - row.past]]) x[t] = -INFINITY;
  Floats top = splat(-INFINITY);
  for (int64_t t = 0; t < count; t += WIDTH) top = maximum(top, load(x + t));
  return prompt.softcap > 0 ? largest(top) : largest(top) * scale[0];
}

// Weights relative to the query's largest logit so far; what stood for an earlier one is scaled.
template <class Unit>
inline void weigh(const Prompt& prompt, int64_t query, float top, int64_t count, float* x, BlockWork<Unit>& work) {
  const float before = work.peak[query], peak = larger(before, top);
  const Floats scale = splat(prompt.softcap > 0 ? 1.f : LOG2_OF_E * prompt.scaling);
  const Floats shift = splat(peak > -INFINITY ? peak : 0.f);
  Floats sums = {};
  for (int64_t t = 0; t < count; t += WIDTH) {
    const Floats power = load(x + t) * scale - shift;
    const Floats weight = power > splat(LOWEST) ? exp2(power) : Floats{};
    sums += weight;
    store(x + t, weight);
  }
  if (peak > before) {
    const Floats less = exp2(splat(larger(before - peak, -126.f)));
    const int64_t width = round_up(prompt.value_dim, WIDTH);
    float* output = work.output + query * width;
    for (int64_t d = 0; d < width; d += WIDTH) store(output + d, load(output + d) * less);
    work.total[query] *= less[0];
    work.peak[query] = peak;
  }
  work.total[query] += sum(sums);
}

inline const float* as_units(const float* weights, int64_t, int64_t, float*) { return weights; }
inline const Pair* as_units(const float* weights, int64_t queries, int64_t count, Pair* to) {
  for (int64_t q = 0; q < queries; q++)
    for (int64_t t = 0; t < count; t += 2) make_unit(weights + q * TILE + t, 1, to[(q * TILE + t) / 2]);
  return to;
}

// Adds to `given` what each token receives from the queries that count, [row.tokens] rounded up to tiles.
template <class Unit>
inline void add_received(const BlockWork<Unit>& work, const Block& block, int64_t from, int64_t queries, int64_t end,
                         float* given) {
  float factor[QUERIES];
  for (int64_t tile = 0; tile * TILE < end; tile++) {
    for (int64_t q = from; q < block.count; q++) {
      const float less = exp2(splat(larger(work.peaks[tile * queries + q] - work.peak[q], -126.f)))[0];
      const bool counts = work.total[q] > 0 && work.peaks[tile * queries + q] - work.peak[q] > LOWEST;
      factor[q] = counts ? less / work.total[q] : 0.f;
    }
    const float* weights = work.weights + tile * queries * TILE;
    const int64_t count = smaller(TILE, round_up(end - tile * TILE, WIDTH));
    for (int64_t t = 0; t < count; t += 2 * WIDTH) {
      Floats sums[2] = {load(given + tile * TILE + t), load(given + tile * TILE + t + WIDTH)};
      for (int64_t q = from; q < block.count; q++) {
        const Floats f = splat(factor[q]);
        sums[0] = fma(load(weights + q * TILE + t), f, sums[0]);
        sums[1] = fma(load(weights + q * TILE + t + WIDTH), f, sums[1]);
      }
      store(given + tile * TILE + t, sums[0]);
      store(given + tile * TILE + t + WIDTH, sums[1]);
    }
  }
}

// `given`: see add_received; null where it is not wanted.
template <class Unit>
inline void attend_block(const Prompt& prompt, const PromptRow& row, const Block& block, int64_t queries,
                         BlockWork<Unit>& work, float* given) {
  const int64_t depth = depth_of(Unit()), units = units_of(prompt.key_dim, depth);
  const int64_t width = round_up(prompt.value_dim, WIDTH), own = row.past + block.first;
  const int64_t rows = round_up(block.count, PRODUCT_ROWS), end = prompt.mask ? row.tokens : own + block.count;
  const int64_t real = row.tokens - row.past;
  const int64_t observed = smaller(larger<int64_t>(real - prompt.observed - block.first, 0), block.count);
  load_queries(prompt, row, block, rows, work);
  memset(work.output, 0, size_t(rows * width) * sizeof(float));
  const float sink = prompt.sinks ? prompt.sinks[block.query_head] * LOG2_OF_E : -INFINITY;
  for (int64_t q = 0; q < rows; q++) work.peak[q] = sink, work.total[q] = prompt.sinks ? 1.f : 0.f;
  for (int64_t tile = 0; tile * TILE < end; tile++) {
    const int64_t first = tile * TILE, there = smaller(TILE, end - first), count = round_up(there, 2 * WIDTH);
    const int64_t kept = given ? tile : 0;
    float* weights = work.weights + kept * queries * TILE;
    multiply(work.query, units, rows, reinterpret_cast<const Unit*>(row.keys) + tile * key_units<Unit>(prompt), units,
             TILE, count, units, weights, TILE, false);
    for (int64_t q = 0; q < block.count; q++) {
      float* x = weights + q * TILE;
      const int64_t seen = prompt.mask ? row.tokens : own + q + 1;
      const int64_t limit = larger<int64_t>(smaller(there, seen - first), 0);
      const uint8_t* mask = prompt.mask ? prompt.mask + row.request * prompt.mask_batch +
                                              int64_t(row.real[block.first + q]) * prompt.length
                                        : nullptr;
      weigh(prompt, q, to_logits(prompt, row, mask, first, limit, count, x), count, x, work);
      work.peaks[kept * queries + q] = work.peak[q];
    }
    const Unit* packed = as_units(weights, rows, round_up(there, 2), work.packed);
    multiply(packed, TILE / depth, rows, reinterpret_cast<const Unit*>(row.values) + tile * value_units<Unit>(prompt),
             TILE / depth, prompt.value_dim, prompt.value_dim, units_of(there, depth), work.output, width, true);
    // a token receives from later queries only
    for (int64_t q = 0; given && q < block.count; q++)
      for (int64_t t = larger<int64_t>(own + q - first, 0); t < there; t++) weights[q * TILE + t] = 0;
  }
  for (int64_t q = 0; q < block.count; q++) {
    float* output = work.output + q * width;
    const float share = work.total[q] > 0 ? 1 / work.total[q] : 0.f;
    with_dtype(prompt.dtype, [&](auto element) {
      auto* to = static_cast<decltype(element)*>(prompt.output) + output_row(prompt, row, block, q);
      for (int64_t d = 0; d < prompt.value_dim; d++) from_float(output[d] * share, to[d]);
    });
  }
  if (given && observed < block.count) add_received(work, block, observed, queries, end, given);
}

}  // namespace
}  // namespace diffkv
