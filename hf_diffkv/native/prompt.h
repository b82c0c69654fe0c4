// Exact attention of many new tokens, and the attention that each token receives. A row's tokens are packed once for
// all its queries. Work is split by query heads and by blocks of queries, in a way that depends only on shapes, so
// that sums are reproducible. A block visits all visible tokens tile by tile with a running maximum. If the received
// attention is needed, the weights of all tiles are kept and summed over the queries once their totals are known.
#pragma once
#include "prompt_tokens.h"

namespace diffkv {
namespace {

// Weights below 2^LOWEST of a query's largest weight are zero, because smaller products would be subnormal and slow.
constexpr float LOWEST = -60;
// Queries per block; fewer if the kept weights would exceed WEIGHTS numbers.
constexpr int64_t QUERIES = 4 * PRODUCT_ROWS, WEIGHTS = 1 << 20;

inline int64_t queries_of(const Prompt& prompt, int64_t tokens) {
  if (!prompt.received) return QUERIES;
  const int64_t room = WEIGHTS / round_up(larger<int64_t>(tokens, 1), TILE) / PRODUCT_ROWS * PRODUCT_ROWS;
  return larger<int64_t>(PRODUCT_ROWS, smaller(QUERIES, room));
}

// Buffers of one thread.
template <class Unit>
struct BlockWork {
  // weights [QUERIES, TILE] of tile i at i * QUERIES * TILE, or of only the current tile if none are kept
  float *weights, *output, *peak, *peaks, *total, *factor;
  Unit *query, *packed;

  int64_t place(uint8_t* memory, const Prompt& prompt, int64_t queries, int64_t tiles) {
    Places take = {memory, 0};
    tiles = prompt.received ? tiles : 1;
    take(weights, tiles * queries * TILE);
    take(output, queries * round_up(prompt.value_dim, WIDTH));
    take(peak, queries);
    take(peaks, tiles * queries);
    take(total, queries);
    take(factor, queries);
    take(query, queries * units_of(prompt.key_dim, depth_of(Unit())));
    take(packed, queries * TILE / depth_of(Unit()));
    return take.used;
  }
};

// Consecutive queries of one head, by their index among the request's real tokens.
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

// Turns products with `count` keys into base-2 logits. Keys from `limit` onward and prompt tokens that `mask` hides are
// masked. `first` is the tile's first token.
inline float to_logits(const Prompt& prompt, const PromptRow& row, const uint8_t* mask, int64_t first, int64_t limit,
                       int64_t count, float* x) {
  const Floats scale = splat(prompt.softcap > 0 ? 2 * LOG2_E * prompt.scaling / prompt.softcap
                                                : LOG2_E * prompt.scaling);
  const Floats cap = splat(prompt.softcap * LOG2_E);
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

// Computes weights relative to the query's largest logit so far, and rescales earlier sums.
template <class Unit>
inline void weigh(const Prompt& prompt, int64_t query, float top, int64_t count, float* x, BlockWork<Unit>& work) {
  const float before = work.peak[query], peak = larger(before, top);
  const Floats scale = splat(prompt.softcap > 0 ? 1.f : LOG2_E * prompt.scaling);
  const Floats shift = splat(peak > -INFINITY ? peak : 0.f);
  Floats sums = {};
  for (int64_t t = 0; t < count; t += WIDTH) {
    const Floats power = load(x + t) * scale - shift;
    // NaN stays NaN
    const Floats weight = power < splat(LOWEST) ? Floats{} : exp2(power);
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

// Adds the attention that each token receives from the scoring queries to `given`, [row.tokens] rounded up to tiles.
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

// Attends from one block; `given` is as in add_received, or null if not needed.
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
  const float sink = prompt.sinks ? prompt.sinks[block.query_head] * LOG2_E : -INFINITY;
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
    // a token receives only from later queries, and nothing from NaN
    for (int64_t q = 0; given && q < block.count; q++)
      for (int64_t t = isnan(work.total[q]) ? 0 : larger<int64_t>(own + q - first, 0); t < there; t++)
        weights[q * TILE + t] = 0;
  }
  for (int64_t q = 0; q < block.count; q++) {
    float* output = work.output + q * width;
    const float share = work.total[q] == 0 ? 0.f : 1 / work.total[q];
    with_dtype(prompt.dtype, [&](auto element) {
      auto* to = static_cast<decltype(element)*>(prompt.output) + output_row(prompt, row, block, q);
      for (int64_t d = 0; d < prompt.value_dim; d++) from_float(output[d] * share, to[d]);
    });
  }
  if (given && observed < block.count) add_received(work, block, observed, queries, end, given);
}

// Number of shares of a head's queries, whose sums are added in order.
constexpr int64_t SHARES = 16;

// Rows whose tokens are packed at the same time, and their results.
template <class Unit>
struct PromptRows {
  const Prompt* prompt;
  PromptRow* rows;
  int64_t count, tiles, queries, shares;
  float* given;  // [count, group, shares, tiles * TILE], or null if not needed

  float* sums(int64_t row, int64_t member, int64_t share) const {
    if (!given) return nullptr;
    return given + ((row * prompt->group + member) * shares + share) * tiles * TILE;
  }
  void pack(int64_t task) const {
    const PromptRow& row = rows[task / tiles];
    if (task % tiles >= row.tiles()) return;
    pack_keys<Unit>(*prompt, row, task % tiles);
    pack_values<Unit>(*prompt, row, task % tiles);
  }
  bool attend(int64_t task) const {
    const int64_t index = task / (prompt->group * shares), member = task / shares % prompt->group;
    // the last blocks see the most tokens, so they come first
    const int64_t share = shares - 1 - task % shares;
    const PromptRow& row = rows[index];
    const int64_t real = row.tokens - row.past;
    BlockWork<Unit> work;
    uint8_t* memory = static_cast<uint8_t*>(worker_scratch(work.place(nullptr, *prompt, queries, tiles)));
    if (!memory) return false;
    work.place(memory, *prompt, queries, tiles);
    float* to = sums(index, member, share);
    if (to) memset(to, 0, size_t(tiles * TILE) * sizeof(float));
    for (int64_t first = share * queries; first < real; first += shares * queries) {
      const Block block = {row.head * prompt->group + member, first, smaller(queries, real - first)};
      attend_block(*prompt, row, block, queries, work, to);
    }
    return true;
  }
  // Maximum over the group's heads of the attention given by all their queries.
  void join(int64_t index) const {
    const PromptRow& row = rows[index];
    float* received = prompt->received + (row.request * prompt->heads + row.head) *
                                             (prompt->stored_tokens + prompt->before + prompt->length);
    for (int64_t token = 0; token < row.tokens; token++) {
      float most = 0;
      for (int64_t member = 0; member < prompt->group; member++) {
        float total = 0;
        for (int64_t share = 0; share < shares; share++) total += sums(index, member, share)[token];
        most = larger(most, total);
      }
      received[row.column(*prompt, token)] = most;
    }
  }
};

// Lists the entries of `there` that are set; all if it is null.
inline int64_t list_set(const uint8_t* there, int64_t count, int32_t* to) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; i++)
    if (!there || there[i]) to[found++] = int32_t(i);
  return found;
}

template <class Unit>
inline int64_t attend_rows(const Prompt& prompt, PromptRow* rows, int64_t count) {
  int64_t tokens = 0, real = 0;
  for (int64_t i = 0; i < count; i++) {
    tokens = larger(tokens, rows[i].tokens);
    real = larger(real, rows[i].tokens - rows[i].past);
  }
  if (!real) return OK;
  const int64_t tiles = (tokens + TILE - 1) / TILE, queries = queries_of(prompt, tokens);
  const int64_t shares = smaller((real + queries - 1) / queries, SHARES);
  const int64_t at_once = smaller(count, 1 + 4 * prompt.threads / (prompt.group * shares));
  const int64_t key_bytes = tiles * key_units<Unit>(prompt) * int64_t(sizeof(Unit));
  const int64_t value_bytes = tiles * value_units<Unit>(prompt) * int64_t(sizeof(Unit));
  const Buffer packed(at_once * (key_bytes + value_bytes));
  const int64_t sums = prompt.received ? at_once * prompt.group * shares * tiles * TILE : 0;
  const Buffer given(sums * int64_t(sizeof(float)));
  if (!packed.memory || !given.memory) return NO_MEMORY;
  for (int64_t first = 0; first < count; first += at_once) {
    const PromptRows<Unit> work = {&prompt, rows + first, smaller(at_once, count - first), tiles, queries, shares,
                                   sums ? reinterpret_cast<float*>(given.memory) : nullptr};
    for (int64_t i = 0; i < work.count; i++) {
      work.rows[i].keys = packed.memory + i * (key_bytes + value_bytes);
      work.rows[i].values = work.rows[i].keys + key_bytes;
    }
    bool failed = false;
    each_task(work.count * tiles, prompt.threads, [&](int64_t task) { work.pack(task); });
    each_task(work.count * prompt.group * shares, prompt.threads, [&](int64_t task) {
      if (!work.attend(task)) failed = true;
    });
    if (failed) return NO_MEMORY;
    if (sums) each_task(work.count, prompt.threads, [&](int64_t row) { work.join(row); });
  }
  return OK;
}

inline int64_t attend_prompt(const Prompt& prompt) {
  const int64_t count = prompt.batch * prompt.heads;
  const Buffer rows(count * int64_t(sizeof(PromptRow)));
  const Buffer lists((prompt.batch * prompt.length + count * prompt.before) * int64_t(sizeof(int32_t)));
  if (!rows.memory || !lists.memory) return NO_MEMORY;
  auto* row = reinterpret_cast<PromptRow*>(rows.memory);
  auto* list = reinterpret_cast<int32_t*>(lists.memory);
  for (int64_t i = 0; i < count; i++) {
    if (prompt.stored)
      if (int64_t status = check_row(prompt.stored->format, prompt.stored->rows, i)) return status;
    row[i] = {};
    row[i].request = i / prompt.heads;
    row[i].head = i % prompt.heads;
    if (prompt.stored) row[i].stored = row_tokens(*prompt.stored, i);
    if (row[i].stored.tokens > prompt.stored_tokens) return BAD_COUNT;
    row[i].shown = list;
    const int64_t shown = list_set(prompt.past_valid + i * prompt.before, prompt.before, list);
    list += shown;
    row[i].past = row[i].stored.tokens + shown;
  }
  for (int64_t request = 0; request < prompt.batch; request++) {
    const uint8_t* valid = prompt.valid ? prompt.valid + request * prompt.length : nullptr;
    const int64_t real = list_set(valid, prompt.length, list);
    for (int64_t i = request * prompt.heads; i < (request + 1) * prompt.heads; i++) {
      row[i].real = list;
      row[i].tokens = row[i].past + real;
    }
    list += real;
  }
#if defined(__AVX512BF16__)
  if (prompt.dtype == BFLOAT16) return attend_rows<Pair>(prompt, row, count);
#endif
  return attend_rows<float>(prompt, row, count);
}

}  // namespace
}  // namespace diffkv
