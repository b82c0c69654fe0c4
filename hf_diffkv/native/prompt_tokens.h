// The tokens that one row of a prompt attends to, packed for products of small matrices: stored tokens by rank (pages
// tier by tier, then the window), exact tokens before the prompt, and the prompt itself. Padding is left out.
//
// Products are C [rows, columns] += A B. A is row-major. B is in panels of PANEL columns, each with its depth
// outermost. A unit is what one lane multiplies at a time: a float, or two bfloat16 numbers consecutive along depth.
#pragma once
#include <stdlib.h>

#include "pieces.h"

namespace diffkv {
namespace {

// Rows and vectors of accumulators that fit in the registers.
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int PRODUCT_ROWS = 12, PANEL_VECTORS = 2;
#else
constexpr int PRODUCT_ROWS = 6, PANEL_VECTORS = 2;
#endif
constexpr int PANEL = PANEL_VECTORS * WIDTH;

struct Pair {
  bfloat16 part[2];
};

inline int depth_of(float) { return 1; }
inline int depth_of(Pair) { return 2; }

// Makes a unit of consecutive numbers, or of numbers `stride` apart.
inline void make_unit(const float* x, int64_t, float& unit) { unit = *x; }
inline void make_unit(const float* x, int64_t stride, Pair& unit) {
  from_float(x[0], unit.part[0]);
  from_float(x[stride], unit.part[1]);
}

#if defined(__AVX512BF16__)
inline Floats multiply_add(Pair a, const Pair* b, Floats c) {
  int32_t bits;
  memcpy(&bits, &a, sizeof(bits));
  return (Floats)_mm512_dpbf16_ps((__m512)c, (__m512bh)_mm512_set1_epi32(bits), (__m512bh)_mm512_loadu_si512(b));
}
#endif
inline Floats multiply_add(float a, const float* b, Floats c) { return fma(splat(a), load(b), c); }

template <int ROWS, int VECTORS, class Unit>
inline void multiply_block(const Unit* a, int64_t a_stride, const Unit* b, int64_t depth, float* c, int64_t c_stride,
                           bool add) {
  Floats total[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) total[r][v] = add ? load(c + r * c_stride + v * WIDTH) : Floats{};
  for (int64_t k = 0; k < depth; k++)
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++)
        total[r][v] = multiply_add(a[r * a_stride + k], b + k * VECTORS * WIDTH + v * WIDTH, total[r][v]);
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) store(c + r * c_stride + v * WIDTH, total[r][v]);
}

// Number of units in the panels of a matrix of `columns` columns; the last panel may be a single vector wide.
inline int64_t panel_units(int64_t columns, int64_t depth) { return round_up(columns, WIDTH) * depth; }
inline int64_t panel_width(int64_t first, int64_t columns) { return columns - first <= WIDTH ? WIDTH : PANEL; }

// C += A B, or C = A B if `add` is false. A has `depth` units in a row and a multiple of PRODUCT_ROWS rows. B has
// `columns` columns in panels of `b_depth` units; the first `wanted` columns are multiplied.
template <class Unit>
inline void multiply(const Unit* a, int64_t a_stride, int64_t rows, const Unit* b, int64_t b_depth, int64_t columns,
                     int64_t wanted, int64_t depth, float* c, int64_t c_stride, bool add) {
  for (int64_t first = 0; first < wanted; first += PANEL) {
    const bool narrow = panel_width(first, columns) == WIDTH;
    const Unit* panel = b + first * b_depth;
    for (int64_t r = 0; r < rows; r += PRODUCT_ROWS) {
      if (narrow)
        multiply_block<PRODUCT_ROWS, 1>(a + r * a_stride, a_stride, panel, depth, c + r * c_stride + first, c_stride,
                                        add);
      else
        multiply_block<PRODUCT_ROWS, PANEL_VECTORS>(a + r * a_stride, a_stride, panel, depth,
                                                    c + r * c_stride + first, c_stride, add);
    }
  }
}

// Tokens per tile, a multiple of PANEL and of READ_TOKENS, the number read at a time.
constexpr int64_t TILE = 256, READ_TOKENS = 32;

// Memory of one call.
struct Buffer {
  uint8_t* memory = nullptr;
  explicit Buffer(int64_t bytes) {
    void* found = nullptr;
    if (!posix_memalign(&found, 64, size_t(larger<int64_t>(bytes, 64)))) memory = static_cast<uint8_t*>(found);
  }
  ~Buffer() { free(memory); }
  Buffer(const Buffer&) = delete;
};

struct PromptRow {
  int64_t request, head;
  RowTokens stored;
  const int32_t *shown, *real;  // exact tokens before the prompt, and tokens of the prompt, that exist
  int64_t past, tokens;         // tokens before the prompt; all tokens
  uint8_t *keys, *values;       // packed, tile by tile

  int64_t tiles() const { return (tokens + TILE - 1) / TILE; }
  // Column of a token in `received`.
  int64_t column(const Prompt& prompt, int64_t token) const {
    if (token < stored.tokens) return token;
    if (token < past) return prompt.stored_tokens + shown[token - stored.tokens];
    return prompt.stored_tokens + prompt.before + real[token - past];
  }
};

inline int64_t units_of(int64_t dim, int64_t depth) { return (dim + depth - 1) / depth; }

// Number of units in a packed tile of keys, and of values.
template <class Unit>
inline int64_t key_units(const Prompt& prompt) {
  return panel_units(TILE, units_of(prompt.key_dim, depth_of(Unit())));
}
template <class Unit>
inline int64_t value_units(const Prompt& prompt) {
  return panel_units(prompt.value_dim, TILE / depth_of(Unit()));
}

// Reads `count` stored tokens as floats, starting at `first`.
inline void read_stored(const Step& step, const RowTokens& tokens, bool values, int64_t first, int64_t count, float* to,
                        int64_t stride) {
  const Tier window = window_tier(step.format);
  int64_t index = 0;
  for (int t = 0; t < step.format.tiers; t++) {
    const int64_t capacity = step.format.tier[t].capacity;
    const int64_t skipped = first < tokens.count[t] ? first / capacity : tokens.pages[t];
    index += skipped;
    first -= smaller<int64_t>(skipped * capacity, tokens.count[t]);
    if (skipped < tokens.pages[t]) break;
  }
  for (; count > 0; index++) {
    const int64_t there = piece_count(step, tokens, index);
    if (first >= there) {
      first -= there;
      continue;
    }
    const Piece piece = piece_at(step, window, tokens, index);
    for (; first < there && count > 0; first++, count--, to += stride)
      piece.read(values, step.format.dtype, first, to);
    first = 0;
  }
}

// Reads READ_TOKENS keys or values of a row as floats, starting at `first`; zeros after the last.
inline void read_tokens(const Prompt& prompt, const PromptRow& row, bool values, int64_t first, float* to,
                        int64_t stride) {
  const int64_t dim = values ? prompt.value_dim : prompt.key_dim;
  const int64_t end = smaller(first + READ_TOKENS, row.tokens), stored = row.stored.tokens;
  int64_t token = first;
  if (token < stored) {
    const int64_t count = smaller(end, stored) - token;
    read_stored(*prompt.stored, row.stored, values, token, count, to, stride);
    token += count;
  }
  for (; token < end; token++) {
    const bool before = token < row.past;
    const int64_t at = before ? row.shown[token - stored] : row.real[token - row.past];
    const Strided& from = before ? (values ? prompt.past_value : prompt.past_key) : values ? prompt.value : prompt.key;
    read_row(from.data, prompt.dtype, row.request * from.batch + row.head * from.head + at * from.token, int(dim),
             to + (token - first) * stride);
  }
  for (; token < first + READ_TOKENS; token++) memset(to + (token - first) * stride, 0, size_t(dim) * sizeof(float));
}

// Packs keys as columns, with units along head_dim.
template <class Unit>
inline void pack_keys(const Prompt& prompt, const PromptRow& row, int64_t tile) {
  const int64_t depth = depth_of(Unit()), units = units_of(prompt.key_dim, depth);
  float rows[READ_TOKENS * (MAX_DIM + 1)];
  const int64_t stride = prompt.key_dim + (prompt.key_dim % depth);
  auto* to = reinterpret_cast<Unit*>(row.keys) + tile * key_units<Unit>(prompt);
  for (int64_t first = 0; first < TILE; first += READ_TOKENS) {
    if (stride != prompt.key_dim) memset(rows, 0, sizeof(rows));
    read_tokens(prompt, row, false, tile * TILE + first, rows, stride);
    for (int64_t t = 0; t < READ_TOKENS; t += WIDTH) {
      Unit* panel = to + (first + t) / PANEL * PANEL * units + (first + t) % PANEL;
      for (int64_t k = 0; k < units; k++)
        for (int64_t i = 0; i < WIDTH; i++) make_unit(rows + (t + i) * stride + k * depth, 1, panel[k * PANEL + i]);
    }
  }
}

// Packs values as rows, with units along the tokens.
template <class Unit>
inline void pack_values(const Prompt& prompt, const PromptRow& row, int64_t tile) {
  const int64_t depth = depth_of(Unit()), dim = prompt.value_dim, stride = round_up(dim, WIDTH);
  float rows[READ_TOKENS * (MAX_DIM + WIDTH)];
  auto* to = reinterpret_cast<Unit*>(row.values) + tile * value_units<Unit>(prompt);
  if (stride != dim) memset(rows, 0, sizeof(rows));
  for (int64_t first = 0; first < TILE; first += READ_TOKENS) {
    read_tokens(prompt, row, true, tile * TILE + first, rows, stride);
    for (int64_t column = 0; column < dim; column += PANEL) {
      const int64_t width = panel_width(column, dim);
      Unit* panel = to + column * (TILE / depth) + first / depth * width;
      for (int64_t k = 0; k < READ_TOKENS / depth; k++)
        for (int64_t i = 0; i < width; i++)
          make_unit(rows + k * depth * stride + column + i, stride, panel[k * width + i]);
    }
  }
}

}  // namespace
}  // namespace diffkv
