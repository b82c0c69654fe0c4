// Decode step with one new token per request: appends it to the window, attends to pages and window, and adds the
// received attention to every token's sum. Rows are cut into chunks along the sequence, so that one request with few
// heads keeps all threads busy.
#pragma once
#include "chunk.h"

namespace diffkv {
namespace {

// Writes a row in the store's form, rounded once; returns whether no element is NaN or beyond `limit`.
template <class Element>
inline bool enter(const Element* from, Element* to, int dim, bool rotated, const float* offset, float limit) {
  if (rotated || offset) {
    float row[MAX_DIM];
    for (int d = 0; d < dim; d++) row[d] = to_float(from[d]);
    if (rotated) rotate(row, dim);
    for (int d = 0; offset && d < dim; d++) row[d] -= offset[d];
    for (int d = 0; d < dim; d++) from_float(row[d], to[d]);
  } else {
    memcpy(to, from, dim * sizeof(Element));
  }
  int bad = 0;
  for (int d = 0; d < dim; d++) {
    const float x = to_float(to[d]);
    // NaN fails both comparisons
    bad |= !(x <= limit) | !(x >= -limit);
  }
  return !bad;
}

inline void append(const Step& step) {
  const Side &keys = step.format.tier[0].key, &values = step.format.tier[0].value;
  bool good = true;
  for (int64_t request = 0; request < step.batch; request++) {
    if (step.valid && !step.valid[request]) continue;
    const int64_t position = step.length[request];
    const bool sink = step.sink_end && position < step.sink_end[request];
    const int64_t slot = sink ? position : ring_slot(position, step.slots, step.sink_slots);
    with_dtype(step.format.dtype, [&](auto element) {
      using Element = decltype(element);
      for (int64_t head = 0; head < step.heads; head++) {
        const int64_t row = request * step.heads + head, at = row * step.slots + slot;
        const float* offset = step.key_offset ? step.key_offset + row * keys.dim : nullptr;
        const auto* key = static_cast<const Element*>(step.key) + request * step.key_batch + head * step.key_head;
        const auto* value =
            static_cast<const Element*>(step.value) + request * step.value_batch + head * step.value_head;
        auto* held_key = static_cast<Element*>(step.window_key) + at * keys.dim;
        auto* held_value = static_cast<Element*>(step.window_value) + at * values.dim;
        good &= enter(key, held_key, keys.dim, step.rotate, offset, step.limit);
        good &= enter(value, held_value, values.dim, step.rotate, nullptr, step.limit);
        step.window_score[at] = 0;
      }
    });
    step.length[request]++;
  }
  if (!good) *step.invalid = 1;
}

constexpr int64_t CHUNK_TOKENS = 1024, SMALLEST_CHUNK = 128, CHUNKS_PER_THREAD = 3;

inline bool is_real(const Step& step, int64_t request) {
  return step.valid ? step.valid[request] != 0 : step.length[request] > 0;
}

// Number of a row's tokens before its `piece`-th piece.
inline int64_t tokens_before(const Step& step, const RowTokens& tokens, int64_t piece) {
  int64_t before = 0;
  for (int t = 0; t < step.format.tiers; t++) {
    const int64_t whole = smaller(larger<int64_t>(piece, 0), tokens.pages[t]);
    before += smaller(whole * step.format.tier[t].capacity, tokens.count[t]);
    piece -= tokens.pages[t];
  }
  for (int i = 0; i < MAX_RUNS && i < piece; i++) before += tokens.window_run[i];
  return before;
}

struct Attention {
  const Step* step;
  Tier window;
  Chunk* chunks;
  int64_t count, most_pieces, most_tokens;
  bool failed;

  int64_t plan(int64_t target, Places& take);
  void attend(int64_t index);
  void finish(int64_t index, Work& work) const;
};

// Cuts all rows into chunks of about `target` tokens and lays out their results after them. Returns their number.
inline int64_t Attention::plan(int64_t target, Places& take) {
  const int64_t group = step->group, value = padded(step->format.tier[0].value.dim);
  take(chunks, count);
  int64_t found = 0;
  most_pieces = most_tokens = 0;
  for (int64_t row = 0; row < step->batch * step->heads; row++) {
    if (!is_real(*step, row / step->heads)) continue;
    const RowTokens tokens = row_tokens(*step, row);
    if (!tokens.pieces) continue;
    const int64_t pieces = larger<int64_t>(1, target * tokens.pieces / tokens.tokens);
    const int64_t first_chunk = found;
    int64_t offset = 0;
    for (int64_t at = 0; at < tokens.pieces; at += pieces) {
      Chunk chunk = {};
      chunk.row = row;
      chunk.first = at;
      chunk.pieces = smaller(pieces, tokens.pieces - at);
      chunk.offset = offset;
      offset = tokens_before(*step, tokens, at + chunk.pieces);
      chunk.tokens = offset - chunk.offset;
      chunk.first_chunk = first_chunk;
      chunk.chunks = (tokens.pieces + pieces - 1) / pieces;
      if (has_scores(step->format.tier[HIGH])) take(chunk.weights, group * chunk.stride());
      take(chunk.peak, group);
      take(chunk.total, group);
      take(chunk.output, group * value);
      most_pieces = larger(most_pieces, chunk.pieces);
      most_tokens = larger(most_tokens, chunk.tokens);
      if (take.memory) chunks[found] = chunk;
      found++;
    }
  }
  return found;
}

inline Work* buffers(const Attention& attention, Work& work) {
  const int64_t bytes = work.place(nullptr, *attention.step, attention.most_pieces, attention.most_tokens);
  uint8_t* memory = static_cast<uint8_t*>(worker_scratch(bytes));
  if (!memory) return nullptr;
  work.place(memory, *attention.step, attention.most_pieces, attention.most_tokens);
  return &work;
}

// Softmax of a row for one head: the largest logit, and the inverse of the denominator relative to it.
struct Shared {
  float peak, inverse;
};

inline Shared shared_softmax(const Step& step, const Chunk* chunks, int64_t head) {
  const float* logit = step.sinks ? step.sinks + chunks->row % step.heads * step.group + head : nullptr;
  float peak = logit ? *logit * LOG2_E : -INFINITY;
  for (int64_t c = 0; c < chunks->chunks; c++) peak = larger(peak, chunks[c].peak[head]);
  float total = logit ? exp2f(*logit * LOG2_E - peak) : 0;
  for (int64_t c = 0; c < chunks->chunks; c++) total += chunks[c].total[head] * exp2f(chunks[c].peak[head] - peak);
  return {peak, total == 0 ? 1 : 1 / total};
}

inline void write_output(const Step& step, const Chunk* chunks) {
  const int dim = step.format.tier[0].value.dim;
  const int64_t stride = padded(dim);
  for (int64_t h = 0; h < step.group; h++) {
    const Shared all = shared_softmax(step, chunks, h);
    float sums[MAX_DIM] = {};
    for (int64_t c = 0; c < chunks->chunks; c++) {
      const float share = exp2f(chunks[c].peak[h] - all.peak) * all.inverse;
      const float* part = chunks[c].output + h * stride;
      for (int d = 0; d < dim; d++) sums[d] += part[d] * share;
    }
    if (step.rotate) rotate_back(sums, dim);
    with_dtype(step.format.dtype, [&](auto element) {
      auto* to = static_cast<decltype(element)*>(step.output) + (chunks->row * step.group + h) * dim;
      for (int d = 0; d < dim; d++) from_float(sums[d], to[d]);
    });
  }
}

inline void write_received(const Attention& attention, const Chunk& chunk, Work& work) {
  const Step& step = *attention.step;
  const Chunk* chunks = attention.chunks + chunk.first_chunk;
  const int64_t stride = chunk.stride();
  float* received = work.received;
  for (int64_t h = 0; h < step.group; h++) {
    const Shared all = shared_softmax(step, chunks, h);
    const Floats share = splat(exp2f(chunk.peak[h] - all.peak) * all.inverse);
    for (int64_t t = 0; t < chunk.tokens; t += WIDTH) {
      const Floats got = load(chunk.weights + h * stride + t) * share;
      store(received + t, h == 0 ? got : maximum(load(received + t), got));
    }
  }
  const RowTokens tokens = row_tokens(step, chunk.row);
  // the newest token's own attention does not count
  if (tokens.window > 0 && chunk.offset + chunk.tokens == tokens.tokens) received[chunk.tokens - 1] = 0;
  if (step.received) {
    float* joined = step.received + chunk.row * step.received_stride + chunk.offset;
    for (int64_t t = 0; t < chunk.tokens; t++)
      joined[t] = received[t] = step.fold ? larger(joined[t], received[t]) : received[t];
  }
  if (step.hold) return;
  const int64_t length = step.length[chunk.row / step.heads];
  for (int64_t i = 0; i < chunk.pieces; i++) {
    const Piece piece = piece_at(step, attention.window, tokens, chunk.first + i);
    if (piece.page) {
      add_scores(piece.page, *piece.tier, piece.count, received, piece.tier_index, piece.first, length);
    } else {
      for (int t = 0; t < piece.count; t++) piece.window_score[t] += received[t];
    }
    received += piece.count;
  }
}

inline void Attention::finish(int64_t index, Work& work) const {
  const Chunk& chunk = chunks[index];
  if (chunk.weights) write_received(*this, chunk, work);
  if (chunk.first_chunk == index) write_output(*step, chunks + index);
}

inline void Attention::attend(int64_t index) {
  Chunk chunk = chunks[index];
  Work work;
  if (!buffers(*this, work)) {
    failed = true;
    return;
  }
  if (!chunk.weights) chunk.weights = work.weight;
  attend_chunk(*step, window, row_tokens(*step, chunk.row), chunk, work);
  if (chunk.chunks == 1) finish(index, work);
}

// The step's table must have been checked.
inline int64_t attend(const Step& step) {
  int64_t total = 0;
  const int64_t rows = step.batch * step.heads, element = element_bytes(step.format.dtype);
  const int64_t row_bytes = step.group * step.format.tier[0].value.dim * element;
  for (int64_t row = 0; row < rows; row++) {
    const RowTokens tokens = row_tokens(step, row);
    const bool real = is_real(step, row / step.heads);
    if (real) total += tokens.tokens;
    if (!real || !tokens.pieces) memset(static_cast<uint8_t*>(step.output) + row * row_bytes, 0, row_bytes);
  }
  const int64_t share = step.threads > 1 ? total / (CHUNKS_PER_THREAD * step.threads) : CHUNK_TOKENS;
  const int64_t target = smaller(larger(share, SMALLEST_CHUNK), CHUNK_TOKENS);
  Attention attention = {};
  attention.step = &step;
  attention.window = window_tier(step.format);
  Places counted = {nullptr, 0};
  attention.count = attention.plan(target, counted);
  if (!attention.count) return OK;
  counted(attention.chunks, attention.count);
  Places take = {static_cast<uint8_t*>(call_scratch(counted.used)), 0};
  if (!take.memory) return NO_MEMORY;
  attention.plan(target, take);
  bool split = false;
  for (int64_t c = 0; c < attention.count; c++) split |= attention.chunks[c].chunks > 1;
  each_task(attention.count, step.threads, [&](int64_t index) { attention.attend(index); });
  if (split)
    each_task(attention.count, step.threads, [&](int64_t index) {
      Work work;
      if (attention.chunks[index].chunks == 1 || attention.failed || !buffers(attention, work)) return;
      attention.finish(index, work);
    });
  return attention.failed ? NO_MEMORY : OK;
}

inline int64_t run_step(const Step& step) {
  for (int64_t row = 0; row < step.batch * step.heads; row++)
    if (step.query && (!step.valid || step.valid[row / step.heads]))
      if (int64_t status = check_row(step.format, step.rows, row)) return status;
  if (step.key) append(step);
  return step.query ? attend(step) : OK;
}

}  // namespace
}  // namespace diffkv
