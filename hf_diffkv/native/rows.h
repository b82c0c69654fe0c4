// Rows of keys or values, a few tokens at a time, in the form used in products. If a tier has one group, scale and zero
// point are applied to the products. Keys with several groups are multiplied group by group, in integers:
// product = scale * (query . code) + zero * sum(query), over the group's channels.
#pragma once
#include "pieces.h"
#include "products.h"

namespace diffkv {
namespace {

constexpr int STAGED_CODES = 128, STAGED_BYTES = 16384, STAGED_ROWS = 16;
// 64, so that rows of codes also fill vectors of bytes
constexpr int ROW_PADDING = 64;

inline int64_t padded(int64_t dim) { return round_up(dim, ROW_PADDING); }

// Numbers per row in products: the dim, padded with zeros.
inline int width_of(const Side& side) { return int(round_up(side.dim, WIDTH)); }

// Position within a run of pieces of one tier.
struct Cursor {
  const Piece *piece, *end;
  int slot;

  bool done() const { return piece == end; }
  int left() const { return piece->count - slot; }
  void advance(int count) {
    slot += count;
    if (slot == piece->count) piece++, slot = 0;
  }
};

// Unpacks up to `room` tokens into codes of one byte, in rows of padded(dim) bytes. Given `rows`, it points to every
// token's codes, and one-byte codes in rows of whole vectors stay where they are. Returns the number of tokens.
inline int stage_codes(Cursor& cursor, bool values, uint8_t* codes, int room, const uint8_t** rows = nullptr) {
  int count = 0;
  while (count < room && !cursor.done()) {
    const Piece& piece = *cursor.piece;
    const Side& side = piece.side(values);
    const int more = smaller(cursor.left(), room - count);
    const int64_t stride = padded(side.dim);
    const uint8_t* at = piece.rows(values) + int64_t(cursor.slot) * side.row;
    if (!rows || side.row != stride) {
      unpack(at, side, more, codes + count * stride, stride);
      at = codes + count * stride;
    }
    for (int t = 0; rows && t < more; t++) rows[count + t] = at + t * stride;
    count += more;
    cursor.advance(more);
  }
  return count;
}

// Points `codes` to the next tokens of a run, at most STAGED_CODES, as codes of one byte in rows of padded(dim) bytes.
// Codes that are not stored so are unpacked into `memory`. Returns the number of tokens.
inline int next_codes(Cursor& cursor, bool values, uint8_t* memory, const uint8_t*& codes, Ahead& ahead) {
  const Piece& piece = *cursor.piece;
  const Side& side = piece.side(values);
  int count = 0;
  if (side.row == padded(side.dim)) {
    ahead.fetch(&piece);
    codes = piece.rows(values) + int64_t(cursor.slot) * side.row;
    count = smaller(cursor.left(), STAGED_CODES);
    cursor.advance(count);
    return count;
  }
  codes = memory;
  while (count < STAGED_CODES && !cursor.done()) {
    ahead.fetch(cursor.piece);
    // a page at a time, so that the pages after it arrive while it is unpacked
    const int room = smaller(cursor.left(), STAGED_CODES - count);
    count += stage_codes(cursor, values, memory + count * padded(side.dim), room);
  }
  return count;
}

// Decodes up to `room` tokens into floats, in rows of padded(dim). Returns the number of tokens.
inline int stage_rows(Cursor& cursor, bool values, int32_t dtype, float* rows, int room) {
  int count = 0;
  while (count < room && !cursor.done()) {
    const Piece& piece = *cursor.piece;
    piece.read(values, dtype, cursor.slot, rows + count * padded(piece.side(values).dim));
    count++;
    cursor.advance(1);
  }
  return count;
}

// Reads the scales and zero points of all groups for the next `count` tokens of a run.
inline void stage_factors(Cursor cursor, bool values, int count, float* scale, float* zero) {
  const Side& side = cursor.piece->side(values);
  Side flat = side;
  flat.groups = 1;
  while (count > 0) {
    const int more = smaller(cursor.left(), count);
    read_metadata(cursor.piece->page, flat, cursor.slot * side.groups, more * side.groups, scale, zero);
    scale += more * side.groups;
    zero += more * side.groups;
    count -= more;
    cursor.advance(more);
  }
}

enum Form { CODES, GROUPED, STORED, DECODED };

// Form of a side's tokens in products: codes of one group or of several, rows in memory, or floats decoded from codes.
inline Form form_of(const Side& side) {
  if (has_metadata(side) && side.groups > 1) return side.dim / side.groups % WIDTH == 0 ? GROUPED : DECODED;
  if (has_metadata(side)) return CODES;
  return side.dim % WIDTH == 0 ? STORED : DECODED;
}

// The most groups of a side, or 0 if all have one.
inline int most_groups(const Format& format) {
  int most = 1;
  for (int t = 0; t < format.tiers; t++)
    most = larger(most, int(larger(format.tier[t].key.groups, format.tier[t].value.groups)));
  return most > 1 ? most : 0;
}

#if defined(__AVX512VNNI__)
// Digits of every head's query, group by group, zero outside the group; buffers of one thread.
struct GroupDigits {
  int8_t *upper, *lower;  // [groups, heads rounded up to 4, width of the group's vectors]
  float *factor, *sum;    // [groups, heads]
  float *product;         // [heads, PRODUCTS]
};
constexpr int PRODUCTS = STAGED_CODES + 16;

// The whole vectors of 64 codes that hold a group.
struct Span {
  int from, to;  // the group's channels
  int first, width;
};
inline Span span_of(const Side& side, int group) {
  const int size = side.dim / side.groups, from = group * size, first = from / 64 * 64;
  return {from, from + size, first, int(round_up(from + size, 64)) - first};
}

inline void make_digits(const Side& side, const float* query, int heads, const GroupDigits& digits) {
  const int64_t stride = padded(side.dim), together = round_up(heads, 4);
  for (int g = 0; g < side.groups; g++) {
    const Span span = span_of(side, g);
    for (int h = 0; h < heads; h++) {
      const int64_t index = g * heads + h;
      float part[MAX_DIM] = {};
      for (int d = span.from; d < span.to; d++) part[d - span.first] = query[h * stride + d];
      digits.factor[index] = query_digits(part, span.width, h, heads, digits.upper + g * together * stride,
                                          digits.lower + g * together * stride, digits.sum[index]);
    }
  }
}

// Multiplies all heads by the keys of a run of pieces of one tier, into `out` [heads, stride]. Overwrites up to
// WIDTH - 1 numbers after each head's last.
inline void group_products(const Piece* begin, const Piece* end, const float* query, int heads, uint8_t* codes,
                           const GroupDigits& digits, float* group_scale, float* group_zero, float* out,
                           int64_t stride) {
  Ahead ahead = {begin, end, false, 0};
  const uint8_t *rows[STAGED_CODES], *part[STAGED_CODES];
  const Side& side = begin->tier->key;
  const int64_t padding = padded(side.dim);
  make_digits(side, query, heads, digits);
  Cursor cursor = {begin, end, 0};
  while (!cursor.done()) {
    const Cursor start = cursor;
    const int count = stage_codes(cursor, false, codes, STAGED_CODES, rows);
    stage_factors(start, false, count, group_scale, group_zero);
    for (int g = 0; g < side.groups; g++) {
      const Span span = span_of(side, g);
      const int64_t at = g * round_up(heads, 4) * padding;
      for (int t = 0; t < count; t++) part[t] = rows[t] + span.first;
      dot_digits(part, span.width, count, digits.upper + at, digits.lower + at, digits.factor + g * heads, heads,
                 digits.product, PRODUCTS, [&] { ahead.fetch(cursor.piece, LINES_TOGETHER); });
      float scale[PRODUCTS], zero[PRODUCTS];
      for (int t = 0; t < count; t++) {
        scale[t] = group_scale[t * side.groups + g];
        zero[t] = group_zero[t * side.groups + g];
      }
      for (int h = 0; h < heads; h++) {
        const Floats sum = splat(digits.sum[g * heads + h]);
        const float* product = digits.product + h * PRODUCTS;
        float* to = out + h * stride;
        for (int t = 0; t < count; t += WIDTH) {
          const Floats more = fma(load(product + t), load(scale + t), load(zero + t) * sum);
          store(to + t, g == 0 ? more : load(to + t) + more);
        }
      }
    }
    out += count;
  }
}
#endif

}  // namespace
}  // namespace diffkv
