// The precisions and the fields of their codes, which are packed as in pages/layout.py.
#pragma once
#include <stdint.h>

namespace diffkv {
namespace {

// Bits of a code: SUPPORTED_BITS of precision.py except 16, which has no codes.
#define DIFFKV_CODE_BITS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(8)

#define DIFFKV_BIT(BITS) | 1 << BITS
constexpr int64_t CODE_BITS = 0 DIFFKV_CODE_BITS(DIFFKV_BIT);
#undef DIFFKV_BIT

template <int VALUE>
struct Constant {
  static constexpr int value = VALUE;
};

// Calls `call` with the bits of codes as a `Constant`.
template <class Call>
inline void with_bits(int bits, Call call) {
  switch (bits) {
#define DIFFKV_CASE(BITS) \
  case BITS: return call(Constant<BITS>());
    DIFFKV_CODE_BITS(DIFFKV_CASE)
#undef DIFFKV_CASE
  }
}

// Calls `call` with every field of codes, lowest first: its bits, and the number of bits below it.
template <int BITS, int BELOW = 0, class Call>
inline void each_field(Call&& call) {
  constexpr int LEFT = BITS - BELOW, FIELD = LEFT >= 8 ? 8 : LEFT >= 4 ? 4 : LEFT >= 2 ? 2 : 1;
  call(Constant<FIELD>(), Constant<BELOW>());
  if constexpr (LEFT > FIELD) each_field<BITS, BELOW + FIELD>(call);
}

// The largest code.
inline float levels_of(int bits) { return float((1 << bits) - 1); }

}  // namespace
}  // namespace diffkv
