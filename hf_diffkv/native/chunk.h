// Attention of a group's query heads to consecutive pieces of a row: logits, softmax relative to the largest logit, and
// weighted values. With key = scale * code + zero, logit = scale * (query . code) + zero * sum(query); values likewise.
// Absorbed queries (store/latent.py) have a second part, whose products with the values are added to the logits.
#pragma once
#include "rotation.h"
#include "rows.h"

namespace diffkv {
namespace {

// Part of a row; its results stay in memory until all chunks of the row are complete.
struct Chunk {
  int64_t row, first, pieces;  // its pieces
  int64_t offset, tokens;      // its tokens among those of the row
  int64_t first_chunk, chunks; // all chunks of the row
  // [group, stride()], [group], [group], [group, padded value dim]; without scores, weights are not needed later and
  // are kept in a thread's buffer
  float *weights, *peak, *total, *output;

  int64_t stride() const { return round_up(tokens, 16) + 16; }
};

inline bool use_digits(const Step& step) { return HAS_DIGITS && step.format.dtype != FLOAT32; }

// Part of a group's queries: elements [group, padded dim], the same as digits (`query_digits`), and the sums that zero
// points multiply.
struct Operand {
  float *elements, *sum, *factor;
  int8_t *upper, *lower;

  void place(Places& take, int64_t group, int64_t dim) {
    take(elements, group * dim);
    take(sum, group);
    take(factor, group);
    take(upper, round_up(group, 4) * dim);
    take(lower, round_up(group, 4) * dim);
  }
};

// Buffers of one thread.
struct Work {
  Piece* pieces;
  // `latent` is the second part of absorbed queries
  Operand query, latent;
  float *weight_factor, *quads;
  float* constant;  // what every channel of a head's output gets
  int8_t *weight_upper, *weight_lower;
  float *key_scale, *key_zero, *value_scale, *value_zero;
  float *group_scale, *group_zero;  // [STAGED_CODES, groups], factors of staged tokens
  float *weight, *received, *rows;
  float* latent_product;  // products of `latent` with the values
  uint8_t* codes;
#if defined(__AVX512VNNI__)
  uint8_t* transposed;  // by `transpose_quads`
  GroupDigits groups;
#endif

  // Lays out the buffers starting at `memory`, or only counts their bytes if it is null.
  int64_t place(uint8_t* memory, const Step& step, int64_t pieces_at_most, int64_t tokens_at_most) {
    const int64_t group = step.group, key = padded(step.format.tier[0].key.dim);
    const int64_t value = padded(step.format.tier[0].value.dim), widest = larger(key, value);
    const int64_t stride = round_up(tokens_at_most, 16) + 16;
    Places take = {memory, 0};
    take(pieces, pieces_at_most);
    query.place(take, group, key);
    latent.place(take, step.absorbed ? group : 0, value);
    take(weight_factor, group);
    take(constant, group);
    take(quads, group * value);
    take(weight_upper, group * STAGED_CODES);
    take(weight_lower, group * STAGED_CODES);
    take(key_scale, stride);
    take(key_zero, stride);
    take(value_scale, stride);
    take(value_zero, stride);
    const int64_t grouped = most_groups(step.format);
    take(group_scale, STAGED_CODES * grouped + 16);
    take(group_zero, STAGED_CODES * grouped + 16);
    take(weight, group * stride);
    take(received, has_scores(step.format.tier[HIGH]) ? stride : 0);
    take(rows, STAGED_ROWS * widest);
    take(latent_product, step.absorbed ? group * stride : 0);
    take(codes, STAGED_CODES * widest + 64);
#if defined(__AVX512VNNI__)
    take(transposed, quad_block(STAGED_CODES) * value / 64);
    take(groups.upper, grouped * round_up(group, 4) * key);
    take(groups.lower, grouped * round_up(group, 4) * key);
    take(groups.factor, grouped * group);
    take(groups.sum, grouped * group);
    take(groups.product, grouped ? group * PRODUCTS : 0);
#endif
    return take.used;
  }
};

// Copies part of the query of head `h`, rotated and scaled, with zeros after it.
template <class Element>
inline void load_part(const Step& step, const Element* from, int dim, float scale, int64_t h, const Operand& to) {
  const int64_t stride = padded(dim);
  float* elements = to.elements + h * stride;
  for (int d = 0; d < dim; d++) elements[d] = to_float(from[d]);
  if (step.rotate) rotate(elements, dim);
  for (int64_t d = dim; d < stride; d++) elements[d] = 0;
  Floats total = {};
  for (int64_t d = 0; d < stride; d += WIDTH) {
    const Floats scaled = load(elements + d) * splat(scale);
    store(elements + d, scaled);
    total += scaled;
  }
  to.sum[h] = sum(total);
#if defined(__AVX512VNNI__)
  if (use_digits(step))
    to.factor[h] = query_digits(elements, stride, int(h), int(step.group), to.upper, to.lower, to.sum[h]);
#endif
}

inline void load_query(const Step& step, int64_t row, Work& work) {
  const int key = step.format.tier[0].key.dim, value = step.format.tier[0].value.dim;
  const int64_t request = row / step.heads, head = row % step.heads;
  const float scale = step.scaling * LOG2_E;
  with_dtype(step.format.dtype, [&](auto element) {
    const auto* from = static_cast<const decltype(element)*>(step.query) + request * step.query_batch;
    for (int64_t h = 0; h < step.group; h++) {
      const auto* q = from + (head * step.group + h) * step.query_head;
      load_part(step, q, key, scale, h, work.query);
      if (step.absorbed) load_part(step, q + key, value, scale, h, work.latent);
    }
  });
}

// Multiplies all heads' queries by the keys of a run of pieces of one tier, or their latent parts by the values, into
// `out` [group, stride].
template <bool values>
inline void products(const Step& step, Work& work, const Piece* begin, const Piece* end, float* out, int64_t stride) {
  const Operand& query = values ? work.latent : work.query;
  const Side& side = begin->side(values);
  const int64_t padding = padded(side.dim);
  const int width = width_of(side), heads = int(step.group);
#if defined(__AVX512VNNI__)
  if (!values && use_digits(step) && has_metadata(side) && side.groups > 1)
    return group_products(begin, end, query.elements, heads, work.codes, work.groups, work.group_scale,
                          work.group_zero, out, stride);
#endif
  Cursor cursor = {begin, end, 0};
  Ahead ahead = {begin, end, values, 0};
  while (!cursor.done()) {
    const uint8_t* codes;
    int count;
    switch (form_of(side)) {
      case CODES:
#if defined(__AVX512VNNI__)
        if (use_digits(step)) {
          const uint8_t* rows[STAGED_CODES];
          // the codes stay in L1 while all heads read them
          const int64_t room = smaller<int64_t>(STAGED_CODES, STAGED_BYTES / padding);
          count = stage_codes(cursor, values, work.codes, int(room), rows);
          dot_digits(rows, padding, count, query.upper, query.lower, query.factor, heads, out, stride,
                     [&] { ahead.fetch(cursor.piece, LINES_TOGETHER); });
          break;
        }
#endif
        count = next_codes(cursor, values, work.codes, codes, ahead);
        dot_rows(codes, padding, count, query.elements, padding, heads, width, out, stride);
        break;
      case GROUPED: {
        const Cursor start = cursor;
        count = next_codes(cursor, values, work.codes, codes, ahead);
        stage_factors(start, values, count, work.group_scale, work.group_zero);
        dot_groups(codes, padding, count, work.group_scale, work.group_zero, side.groups,
                   side.dim / side.groups, query.elements, padding, heads, out, stride);
        break;
      }
      case STORED:
        count = cursor.piece->count;
        with_dtype(step.format.dtype, [&](auto element) {
          const auto* rows = reinterpret_cast<const decltype(element)*>(cursor.piece->rows(values));
          dot_rows(rows, side.dim, count, query.elements, padding, heads, width, out, stride);
        });
        cursor.advance(count);
        break;
      default:
        count = stage_rows(cursor, values, step.format.dtype, work.rows, STAGED_ROWS);
        for (int t = 0; width > side.dim && t < count; t++)
          memset(work.rows + t * padding + side.dim, 0, (width - side.dim) * sizeof(float));
        dot_rows(work.rows, padding, count, query.elements, padding, heads, width, out, stride);
    }
    out += count;
  }
}

// Adds the values of a run, weighted by `weight` [group, stride], to `output` and, as codes in quads, to work.quads.
inline void value_sums(const Step& step, Work& work, const Piece* begin, const Piece* end, const float* weight,
                       int64_t stride, float* output) {
  const Side& side = begin->tier->value;
  const int64_t padding = padded(side.dim);
  const int width = width_of(side), heads = int(step.group);
  Cursor cursor = {begin, end, 0};
  // the values of absorbed steps have just been read for logits
  Ahead ahead = {step.absorbed ? end : begin, end, true, 0};
  while (!cursor.done()) {
    const uint8_t* codes;
    int count;
    switch (form_of(side)) {
      case CODES:
#if defined(__AVX512VNNI__)
        if (use_digits(step)) {
          const uint8_t* rows[STAGED_CODES];
          count = stage_codes(cursor, true, work.codes, STAGED_CODES, rows);
          for (int h = 0; h < heads; h++) {
            int8_t *upper = work.weight_upper + h * STAGED_CODES, *lower = work.weight_lower + h * STAGED_CODES;
            float lost;
            work.weight_factor[h] = weight_digits(weight + h * stride, count, upper, lower, lost);
            // only the codes' distance from their middle is lost, because the zero points have their full weights
            work.constant[h] += lost * 0.5f * levels_of(side.bits);
          }
          transpose_quads(rows, padding, count, work.transposed);
          add_digits(work.transposed, padding, count, work.weight_upper, work.weight_lower, STAGED_CODES,
                     work.weight_factor, heads, work.quads, padding,
                     [&] { ahead.fetch(cursor.piece, LINES_TOGETHER); });
          break;
        }
#endif
        count = next_codes(cursor, true, work.codes, codes, ahead);
        add_rows(codes, padding, count, weight, stride, heads, width, output, padding);
        break;
      case STORED:
        count = cursor.piece->count;
        with_dtype(step.format.dtype, [&](auto element) {
          const auto* rows = reinterpret_cast<const decltype(element)*>(cursor.piece->value);
          add_rows(rows, side.dim, count, weight, stride, heads, width, output, padding);
        });
        cursor.advance(count);
        break;
      default:
        count = stage_rows(cursor, true, step.format.dtype, work.rows, STAGED_ROWS);
        add_rows(work.rows, padding, count, weight, stride, heads, width, output, padding);
    }
    weight += count;
  }
}

// Reads scales and zero points of one side for all tokens; 1 and 0 for rows without codes.
inline void read_factors(const Piece* begin, const Piece* end, bool values, float* scale, float* zero) {
  for (const Piece* piece = begin; piece != end; piece++) {
    const Side& side = piece->side(values);
    if (form_of(side) == CODES) {
      read_metadata(piece->page, side, 0, piece->count, scale, zero);
    } else {
      for (int t = 0; t < piece->count; t++) scale[t] = 1, zero[t] = 0;
    }
    scale += piece->count;
    zero += piece->count;
  }
}

template <class Call>
inline void each_run(const Piece* begin, const Piece* end, Call call) {
  int64_t offset = 0;
  while (begin != end) {
    const Piece* next = begin;
    int64_t tokens = 0;
    for (; next != end && next->tier == begin->tier; next++) tokens += next->count;
    call(begin, next, offset);
    offset += tokens;
    begin = next;
  }
}

// Turns products of one head into weights relative to the largest logit, `peak`; `total` is the weights' sum. Also
// multiplies the weights by the values' scales, into work.weight, and sums what they give to the values' zero points.
inline void soften(const Step& step, Work& work, int64_t head, int64_t stride, int64_t tokens, float* logits,
                   float& peak, float& total) {
  const Floats query_sum = splat(work.query.sum[head]), cap = splat(step.softcap * LOG2_E);
  const Floats latent_sum = splat(step.absorbed ? work.latent.sum[head] : 0);
  const Floats steepness = splat(step.softcap > 0 ? 2 / step.softcap : 0);
  const float* latent_product = work.latent_product + head * stride;
  auto raw = [&](int64_t t) {
    Floats x = fma(load(logits + t), load(work.key_scale + t), load(work.key_zero + t) * query_sum);
    if (step.absorbed)
      x += fma(load(latent_product + t), load(work.value_scale + t), load(work.value_zero + t) * latent_sum);
    // tanh(y) = 1 - 2 / (exp(2 y) + 1)
    if (step.softcap > 0) x = cap - 2 * cap / (exp2(x * steepness) + 1);
    return x;
  };
  Floats top = splat(-INFINITY);
  int64_t t = 0;
  for (; t + WIDTH <= tokens; t += WIDTH) {
    const Floats x = raw(t);
    top = maximum(top, x);
    store(logits + t, x);
  }
  if (t < tokens) {
    Floats x = raw(t);
    for (int i = int(tokens - t); i < WIDTH; i++) x[i] = -INFINITY;
    top = maximum(top, x);
    store(logits + t, x);
  }
  peak = largest(top);
  const Floats shift = splat(peak);
  float* scaled = work.weight + head * stride;
  Floats sums = {}, zeros = {};
  for (t = 0; t < tokens; t += WIDTH) {
    const Floats x = load(logits + t), weight = exp2(x - shift);
    // NaN stays NaN
    const Floats kept = x == splat(-INFINITY) ? Floats{} : weight;
    sums += kept;
    zeros = fma(kept, load(work.value_zero + t), zeros);
    store(logits + t, kept);
    // without scores, these are the same numbers in memory
    store(scaled + t, kept * load(work.value_scale + t));
  }
  total = sum(sums);
  work.constant[head] = sum(zeros);
}

inline void attend_chunk(const Step& step, const Tier& window, const RowTokens& tokens, const Chunk& chunk,
                         Work& work) {
  const int64_t stride = chunk.stride(), group = step.group;
  const int64_t value = padded(step.format.tier[0].value.dim);
  Piece *begin = work.pieces, *end = begin + chunk.pieces;
  for (int64_t i = 0; i < chunk.pieces; i++) begin[i] = piece_at(step, window, tokens, chunk.first + i);
  load_query(step, chunk.row, work);
  each_run(begin, end, [&](const Piece* first, const Piece* last, int64_t offset) {
    products<false>(step, work, first, last, chunk.weights + offset, stride);
    if (step.absorbed) products<true>(step, work, first, last, work.latent_product + offset, stride);
  });
  // entries after the last token are computed with its vector, then dropped
  float* const factors[] = {work.key_scale, work.key_zero, work.value_scale, work.value_zero};
  for (float* part : factors)
    for (int64_t t = chunk.tokens; t < stride; t++) part[t] = 0;
  read_factors(begin, end, false, work.key_scale, work.key_zero);
  read_factors(begin, end, true, work.value_scale, work.value_zero);
  memset(chunk.output, 0, group * value * sizeof(float));
  memset(work.quads, 0, group * value * sizeof(float));
  for (int64_t h = 0; h < group; h++)
    soften(step, work, h, stride, chunk.tokens, chunk.weights + h * stride, chunk.peak[h], chunk.total[h]);
  each_run(begin, end, [&](const Piece* first, const Piece* last, int64_t offset) {
    value_sums(step, work, first, last, work.weight + offset, stride, chunk.output);
  });
  for (int64_t h = 0; h < group; h++) {
    const Floats constant = splat(work.constant[h]);
    for (int64_t d = 0; d < value; d += WIDTH) {
      float* to = chunk.output + h * value + d;
      store(to, load(to) + constant);
    }
  }
#if defined(__AVX512VNNI__)
  if (use_digits(step))
    for (int64_t h = 0; h < group; h++) add_from_quads(work.quads + h * value, int(value), chunk.output + h * value);
#endif
}

}  // namespace
}  // namespace diffkv
