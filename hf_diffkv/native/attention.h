// Attention of the newest token of every request over pages and window, and what every token received from it. Rows are
// cut into chunks along the sequence, so that one request with few heads keeps all threads busy.
#pragma once
#include "chunk.h"

namespace diffkv {
namespace {

constexpr int64_t CHUNK_TOKENS = 1024, SMALLEST_CHUNK = 128, CHUNKS_PER_THREAD = 3;

inline bool is_real(const Step& step, int64_t request) {
  return step.valid ? step.valid[request] != 0 : step.length[request] > 0;
}

// Tokens of a row before its `piece`-th piece.
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

  int64_t plan(int64_t target, uint8_t* memory, int64_t& bytes);
};

// Cuts all rows; lays results out from `memory` on, or only counts where that is null.
inline int64_t Attention::plan(int64_t target, uint8_t* memory, int64_t& bytes) {
  const int64_t group = step->group, value = padded(step->format.tier[0].value.dim);
  const int64_t first = memory ? round_up(count * int64_t(sizeof(Chunk)), 64) : 0;
  bytes = first;
  auto take = [&](float*& part, int64_t numbers) {
    part = reinterpret_cast<float*>(uintptr_t(memory) + bytes);
    bytes += round_up(numbers * int64_t(sizeof(float)), 64);
  };
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
      if (memory) chunks[found] = chunk;
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

inline float shared_peak(const Step& step, const Chunk* chunks, int64_t count, int64_t row, int64_t head) {
  float peak = step.sinks ? step.sinks[row % step.heads * step.group + head] * LOG2_E : -INFINITY;
  for (int64_t c = 0; c < count; c++) peak = larger(peak, chunks[c].peak[head]);
  return peak;
}

// 1 / the softmax's denominator, relative to `peak`.
inline float inverse_total(const Step& step, const Chunk* chunks, int64_t count, int64_t row, int64_t head,
                           float peak) {
  float total = step.sinks ? exp2f(step.sinks[row % step.heads * step.group + head] * LOG2_E - peak) : 0;
  for (int64_t c = 0; c < count; c++) total += chunks[c].total[head] * exp2f(chunks[c].peak[head] - peak);
  return total == 0 ? 1 : 1 / total;
}

inline void write_output(const Step& step, const Chunk* chunks, int64_t count, int64_t row) {
  const int dim = step.format.tier[0].value.dim;
  const int64_t stride = padded(dim);
  for (int64_t h = 0; h < step.group; h++) {
    const float peak = shared_peak(step, chunks, count, row, h);
    const float inverse = inverse_total(step, chunks, count, row, h, peak);
    float sums[MAX_DIM] = {};
    for (int64_t c = 0; c < count; c++) {
      const float share = exp2f(chunks[c].peak[h] - peak) * inverse;
      const float* part = chunks[c].output + h * stride;
      for (int d = 0; d < dim; d++) sums[d] += part[d] * share;
    }
    if (step.rotate) rotate_back(sums, dim);
    with_dtype(step.format.dtype, [&](auto element) {
      auto* to = static_cast<decltype(element)*>(step.output) + (row * step.group + h) * dim;
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
    const float peak = shared_peak(step, chunks, chunk.chunks, chunk.row, h);
    const float inverse = inverse_total(step, chunks, chunk.chunks, chunk.row, h, peak);
    const Floats share = splat(exp2f(chunk.peak[h] - peak) * inverse);
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

inline void finish_chunk(const Attention& attention, int64_t index, Work& work) {
  const Chunk& chunk = attention.chunks[index];
  if (chunk.weights) write_received(attention, chunk, work);
  if (chunk.first_chunk == index)
    write_output(*attention.step, attention.chunks + index, chunk.chunks, chunk.row);
}

inline void run_attend(void* context, int64_t index) {
  Attention& attention = *static_cast<Attention*>(context);
  Chunk chunk = attention.chunks[index];
  Work work;
  if (!buffers(attention, work)) {
    attention.failed = true;
    return;
  }
  if (!chunk.weights) chunk.weights = work.weight;
  attend_chunk(*attention.step, attention.window, row_tokens(*attention.step, chunk.row), chunk, work);
  if (chunk.chunks == 1) finish_chunk(attention, index, work);
}

inline void run_finish(void* context, int64_t index) {
  Attention& attention = *static_cast<Attention*>(context);
  Work work;
  if (attention.chunks[index].chunks == 1 || attention.failed || !buffers(attention, work)) return;
  finish_chunk(attention, index, work);
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
  int64_t bytes;
  attention.count = attention.plan(target, nullptr, bytes);
  if (!attention.count) return OK;
  bytes += round_up(attention.count * int64_t(sizeof(Chunk)), 64);
  uint8_t* memory = static_cast<uint8_t*>(call_scratch(bytes));
  if (!memory) return NO_MEMORY;
  attention.chunks = reinterpret_cast<Chunk*>(memory);
  attention.plan(target, memory, bytes);
  bool split = false;
  for (int64_t c = 0; c < attention.count; c++) split |= attention.chunks[c].chunks > 1;
  parallel(attention.count, step.threads, run_attend, &attention);
  if (split) parallel(attention.count, step.threads, run_finish, &attention);
  return attention.failed ? NO_MEMORY : OK;
}

}  // namespace
}  // namespace diffkv
