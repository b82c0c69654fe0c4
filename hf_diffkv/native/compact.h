// One compaction of all rows by Algorithm 1 (DiffKV, section 4.3): plans each row, then hands out pages in row order,
// then moves tokens. Decisions match those of ops/compact/reference.py.
#pragma once
#include "rounding.h"

namespace diffkv {
namespace {

constexpr int LOW = 1, MIN_ROWS = 4;
constexpr int32_t FEW_PAGES = 1, FULL_ROW = 2;

// Decision on a row's candidate and its victim.
struct Plan {
  bool to_high, to_low, displaces, demotes;
  int64_t victim;  // token whose place the candidate takes, if it displaces one
};

inline bool leaves(const Compaction& round, int64_t request) {
  return round.length[request] - round.position[request] > round.window;
}

// Returns the index of the least significant token of a row's tier, and its mean, +inf for none; ties go to the oldest.
inline int64_t least_significant(const Compaction& round, int64_t row, int tier_index, float& mean) {
  const Tier& tier = round.format.tier[tier_index];
  const int64_t count = round.rows.count[tier_index][row];
  const int32_t last = int32_t(round.length[row / round.heads] - 1);
  int64_t found = 0;
  int32_t oldest = INT32_MAX;
  mean = INFINITY;
  for (int64_t i = 0; i * tier.capacity < count; i++) {
    const uint8_t* page = page_at(round.format, round.rows, row, tier_index, i);
    const int held = int(smaller<int64_t>(tier.capacity, count - i * tier.capacity));
    if (least_mean(page, tier, held, last) > mean) continue;
    for (int t = 0; t < held; t++) {
      const float x = mean_of(page, tier, t, last);
      const int32_t position = read_position(page, tier, t);
      if (x > mean || (x == mean && position >= oldest)) continue;
      mean = x;
      oldest = position;
      found = i * tier.capacity + t;
    }
  }
  return found;
}

inline Plan plan_row(const Compaction& round, int64_t row) {
  Plan plan = {};
  const int64_t request = row / round.heads;
  if (!leaves(round, request)) return plan;
  if (!has_scores(round.format.tier[HIGH])) {
    plan.to_low = round.high_threshold[row] > 0;
    plan.to_high = !plan.to_low;
    return plan;
  }
  const int64_t position = round.position[request], later = round.length[request] - 1 - position;
  const float score = round.score[row * round.slots + ring_slot(position, round.slots, round.sink_slots)];
  const float mean = score / float(larger<int64_t>(later, 1));
  const float high = round.high_threshold[row], low = round.low_threshold[row];
  float least;
  plan.to_high = mean >= high;
  plan.to_low = !plan.to_high && mean >= low;
  if (plan.to_high) {
    plan.victim = least_significant(round, row, HIGH, least);
    plan.displaces = least < high;
    plan.demotes = plan.displaces && least >= low;
  } else if (plan.to_low) {
    plan.victim = least_significant(round, row, LOW, least);
    plan.displaces = least < low;
  }
  return plan;
}

inline bool grows(const Plan& plan, int tier) {
  return tier == HIGH ? plan.to_high && !plan.displaces : plan.demotes || (plan.to_low && !plan.displaces);
}

inline bool needs_page(const Compaction& round, const Plan& plan, int64_t row, int tier) {
  return grows(plan, tier) && round.rows.count[tier][row] % round.format.tier[tier].capacity == 0;
}

// Gives pages to the rows that need one, or records in the flag why it cannot.
inline bool give_pages(const Compaction& round, const Plan* plans) {
  int64_t needed = 0;
  bool full = false;
  for (int64_t row = 0; row < round.row_count; row++) {
    int64_t more = 0, used = 0;
    for (int tier = HIGH; tier <= LOW; tier++) {
      more += needs_page(round, plans[row], row, tier);
      used += pages_of(round.format.tier[tier], round.rows.count[tier][row]);
    }
    needed += more;
    full |= more > 0 && used + more > round.rows.width;
  }
  int64_t &start = round.state[0], &free = round.state[1];
  const int64_t capacity = round.state[2];
  if (full || needed > free) {
    *round.flag |= (needed > free ? FEW_PAGES : 0) | (full ? FULL_ROW : 0);
    return false;
  }
  for (int tier = HIGH; tier <= LOW; tier++)
    for (int64_t row = 0; row < round.row_count; row++) {
      if (!needs_page(round, plans[row], row, tier)) continue;
      const int64_t index = round.rows.count[tier][row] / round.format.tier[tier].capacity;
      entry(round.rows, row, tier, index) = round.ring[start];
      start = (start + 1) % capacity;
    }
  free -= needed;
  return true;
}

inline uint8_t* place(const Compaction& round, int64_t row, int tier, int64_t index, int64_t& slot) {
  const int64_t capacity = round.format.tier[tier].capacity;
  slot = index % capacity;
  return page_at(round.format, round.rows, row, tier, index / capacity);
}

// Feedback that a row's keys are rounded by.
inline Feedback feedback_of(const Compaction& round, int64_t row) {
  if (!round.feedback) return {nullptr, BFLOAT16, 0};
  const int64_t dim = round.format.tier[HIGH].key.dim;
  const int64_t head = round.layer[row / round.layer_rows] * round.model_heads + round.head[row % round.heads];
  return {round.feedback, BFLOAT16, head * dim * dim};
}

inline void move_row(const Compaction& round, const Plan& plan, int64_t row) {
  if (!plan.to_high && !plan.to_low) return;
  const Tier &high = round.format.tier[HIGH], &low = round.format.tier[LOW];
  const int32_t dtype = round.format.dtype;
  const int64_t position = round.position[row / round.heads];
  const int64_t at = row * round.slots + ring_slot(position, round.slots, round.sink_slots);
  float key[MAX_DIM], value[MAX_DIM];
  int64_t slot;
  const Feedback feedback = feedback_of(round, row);
  if (plan.demotes) {
    int64_t from;
    const uint8_t* page = place(round, row, HIGH, plan.victim, from);
    decode_row(page, high.key, dtype, from, key);
    decode_row(page, high.value, dtype, from, value);
    round_key(low.key, feedback, key);
    uint8_t* to = place(round, row, LOW, round.rows.count[LOW][row]++, slot);
    store_token(to, low, dtype, slot, key, value, read_score(page, high, from), read_position(page, high, from));
  }
  read_row(round.key, dtype, at * high.key.dim, high.key.dim, key);
  read_row(round.value, dtype, at * high.value.dim, high.value.dim, value);
  const int tier = plan.to_high ? HIGH : LOW;
  const int64_t index = plan.displaces ? plan.victim : round.rows.count[tier][row]++;
  uint8_t* to = place(round, row, tier, index, slot);
  round_key(round.format.tier[tier].key, feedback, key);
  store_token(to, round.format.tier[tier], dtype, slot, key, value, round.score[at], int32_t(position));
}

inline int64_t compact(const Compaction& round) {
  for (int64_t row = 0; row < round.row_count; row++)
    if (leaves(round, row / round.heads))
      if (int64_t status = check_row(round.format, round.rows, row)) return status;
  Plan* plans = static_cast<Plan*>(call_scratch(round.row_count * int64_t(sizeof(Plan))));
  if (!plans) return NO_MEMORY;
  const int64_t threads = round.row_count < MIN_ROWS ? 1 : round.threads;
  each_task(round.row_count, threads, [&](int64_t row) { plans[row] = plan_row(round, row); });
  if (give_pages(round, plans))
    each_task(round.row_count, threads, [&](int64_t row) { move_row(round, plans[row], row); });
  for (int64_t request = 0; request * round.heads < round.row_count; request++)
    round.position[request] += leaves(round, request);
  return OK;
}

}  // namespace
}  // namespace diffkv
