// Rows of keys or values, some tokens at a time, in the form that products are taken with; where a tier has one group,
// scale and zero point are applied to the products.
#pragma once
#include "dense.h"
#include "digits.h"
#include "pieces.h"

namespace diffkv {
namespace {

constexpr int STAGED_CODES = 128, STAGED_ROWS = 16;
// 64 so that rows of codes fill vectors of bytes too
constexpr int ROW_PADDING = 64;

inline int64_t padded(int64_t dim) { return round_up(dim, ROW_PADDING); }

// Numbers that take part in products with a row: the dim, and zeros.
inline int width_of(const Side& side) { return int(round_up(side.dim, WIDTH)); }

// The next tokens of a run of pieces of one tier.
struct Cursor {
  const Piece *piece, *end;
  int slot;

  bool done() const { return piece == end; }
  // Asks for the piece that is read after the next.
  DIFFKV_INLINE void fetch_ahead(bool values) const {
    if (slot == 0 && end - piece > 2) prefetch(piece[2], values);
  }
  int left() const { return piece->count - slot; }
  void advance(int count) {
    slot += count;
    if (slot == piece->count) piece++, slot = 0;
  }
};

// Up to `room` tokens of codes, one byte each, to rows of padded(dim) bytes. Returns how many.
inline int stage_codes(Cursor& cursor, bool values, uint8_t* codes, int room) {
  int count = 0;
  while (count < room && !cursor.done()) {
    const Piece& piece = *cursor.piece;
    cursor.fetch_ahead(values);
    const Side& side = piece.side(values);
    const int more = smaller(cursor.left(), room - count);
    const int64_t stride = padded(side.dim);
    unpack(piece.rows(values) + int64_t(cursor.slot) * side.row, side, more, codes + count * stride, stride);
    count += more;
    cursor.advance(more);
  }
  return count;
}

// Up to `room` tokens as floats, to rows of padded(dim).
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

enum Form { CODES, STORED, DECODED };

// How a side's tokens enter products: as codes, as they stand in memory, or decoded into floats.
inline Form form_of(const Side& side) {
  if (has_metadata(side)) return side.groups == 1 ? CODES : DECODED;
  return side.dim % WIDTH == 0 ? STORED : DECODED;
}

}  // namespace
}  // namespace diffkv
