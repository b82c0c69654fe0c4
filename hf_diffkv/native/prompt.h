// Attention of many new tokens and what each token receives. A row's tokens are packed once for all its queries; work is
// split by query heads and, in a way that depends on shapes alone, by blocks of queries, so that sums are always alike.
#pragma once
#include "prompt_block.h"

namespace diffkv {
namespace {

// Shares of a head's queries, whose sums are added up in order.
constexpr int64_t SHARES = 16;

// Rows whose tokens are packed at the same time, and their results.
template <class Unit>
struct PromptRows {
  const Prompt* prompt;
  PromptRow* rows;
  int64_t count, tiles, queries, shares;
  float* given;  // [count, group, shares, tiles * TILE], or null where nobody wants it

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
    // the last blocks see most
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
  // The most that a head of the group gives, over all its queries.
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

// Entries of `there` (null: all) that are set.
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
    struct Job {
      const PromptRows<Unit>* work;
      bool failed;
    } job = {&work, false};
    parallel(work.count * tiles, prompt.threads,
             [](void* context, int64_t task) { static_cast<Job*>(context)->work->pack(task); }, &job);
    parallel(work.count * prompt.group * shares, prompt.threads,
             [](void* context, int64_t task) {
               Job& job = *static_cast<Job*>(context);
               if (!job.work->attend(task)) job.failed = true;
             },
             &job);
    if (job.failed) return NO_MEMORY;
    if (!sums) continue;
    parallel(work.count, prompt.threads,
             [](void* context, int64_t task) { static_cast<Job*>(context)->work->join(task); }, &job);
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
