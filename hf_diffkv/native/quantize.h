// Quantising tokens into pages and reading them back, byte for byte as ops/quantize/reference.py does.
#pragma once
#include "unpack.h"

namespace diffkv {
namespace {

constexpr int64_t TASK_TOKENS = 64;

template <int BITS, int SHIFT>
inline void pack_field(const uint8_t* __restrict codes, int dim, uint8_t* __restrict to) {
  constexpr int PLANES = 8 / BITS;
  constexpr uint8_t MASK = (1 << BITS) - 1;
  const int count = dim / PLANES;
  for (int i = 0; i < count; i++) to[i] = codes[i] >> SHIFT & MASK;
  for (int plane = 1; plane < PLANES; plane++)
    for (int i = 0; i < count; i++)
      to[i] |= uint8_t((codes[plane * count + i] >> SHIFT & MASK) << (BITS * plane));
}

inline void pack(const uint8_t* codes, const Side& side, uint8_t* to) {
  with_bits(side.bits, [&](auto bits) {
    each_field<bits.value>([&](auto field, auto below) {
      pack_field<field.value, below.value>(codes, side.dim, to + side.dim * below.value / 8);
    });
  });
}

inline void range_of(const float* x, int count, float& low, float& high) {
  low = high = x[0];
  int d = 0;
  if (count >= WIDTH) {
    Floats lowest = load(x), highest = lowest;
    for (; d + WIDTH <= count; d += WIDTH) {
      lowest = minimum(lowest, load(x + d));
      highest = maximum(highest, load(x + d));
    }
    low = smallest(lowest);
    high = largest(highest);
  }
  for (; d < count; d++) {
    low = smaller(low, x[d]);
    high = larger(high, x[d]);
  }
}

// Stores the metadata of a slot's group and makes the codes.
inline void quantize_group(uint8_t* page, const Side& side, int64_t slot, int group, const float* x, int count,
                           uint8_t* codes) {
  float low, high, step, from;
  range_of(x, count, low, high);
  write_group(page, side, slot, group, low, high, step, from);
  const float levels = levels_of(side.bits);
  if (step == 0) {
    memset(codes, 0, count);
    return;
  }
  for (int d = 0; d < count; d++) {
    float code = (x[d] - from) / step;
    code = code > 0 ? code : 0;
    code = code < levels ? code : levels;
    codes[d] = uint8_t(int32_t(as_bits(code + MAGIC)) - int32_t(as_bits(MAGIC)));
  }
}

inline void store_row(uint8_t* page, const Side& side, int32_t dtype, int64_t slot, const float* x) {
  uint8_t* to = page + side.offset + slot * side.row;
  if (!has_metadata(side)) {
    with_dtype(dtype, [&](auto element) {
      for (int d = 0; d < side.dim; d++) {
        from_float(x[d], element);
        memcpy(to + d * sizeof(element), &element, sizeof(element));
      }
    });
    return;
  }
  uint8_t codes[MAX_DIM];
  const int size = side.dim / side.groups;
  for (int g = 0; g < side.groups; g++) quantize_group(page, side, slot, g, x + g * size, size, codes + g * size);
  pack(codes, side, to);
}

inline void read_row(const void* from, int32_t dtype, int64_t offset, int dim, float* to) {
  with_dtype(dtype, [&](auto element) {
    const auto* row = static_cast<const decltype(element)*>(from) + offset;
    for (int d = 0; d < dim; d++) to[d] = to_float(row[d]);
  });
}

inline void store_token(uint8_t* page, const Tier& tier, int32_t dtype, int64_t slot, const float* key,
                        const float* value, float score, int32_t position) {
  store_row(page, tier.key, dtype, slot, key);
  store_row(page, tier.value, dtype, slot, value);
  write_token(page, tier, slot, score, position);
}

inline bool is_place(const Transfer& tokens, int64_t page, int64_t slot) {
  return page >= 0 && page < tokens.page_count && slot >= 0 && slot < tokens.format.tier[0].capacity;
}

inline int64_t check_places(const Transfer& tokens) {
  bool good = true;
  for (int64_t i = 0; i < tokens.count; i++) {
    good &= is_place(tokens, tokens.page[i], tokens.slot[i]);
    if (tokens.to_page) good &= is_place(tokens, tokens.to_page[i], tokens.to_slot[i]);
  }
  return good ? OK : BAD_PAGE;
}

template <class Call>
inline void each_token(const Transfer& tokens, Call call) {
  struct Job {
    const Transfer* tokens;
    Call* call;
  } job = {&tokens, &call};
  auto run = [](void* context, int64_t task) {
    const Job& job = *static_cast<Job*>(context);
    const int64_t end = smaller((task + 1) * TASK_TOKENS, job.tokens->count);
    for (int64_t i = task * TASK_TOKENS; i < end; i++)
      // the null page holds nothing
      (*job.call)(i, job.tokens->page[i] ? job.tokens->pages + job.tokens->page[i] * job.tokens->format.page_bytes
                                         : nullptr);
  };
  parallel((tokens.count + TASK_TOKENS - 1) / TASK_TOKENS, tokens.threads, run, &job);
}

// Stores tokens, or where `to_page` is there copies them as they are stored.
inline int64_t store_tokens(const Transfer& tokens) {
  if (int64_t status = check_places(tokens)) return status;
  const Tier& tier = tokens.format.tier[0];
  if (tokens.to_page) {
    each_token(tokens, [&](int64_t i, uint8_t* page) {
      uint8_t* to = tokens.pages + tokens.to_page[i] * tokens.format.page_bytes;
      if (page && tokens.to_page[i]) copy_token(page, tokens.slot[i], to, tokens.to_slot[i], tier);
    });
    return OK;
  }
  each_token(tokens, [&](int64_t i, uint8_t* page) {
    if (!page) return;
    float key[MAX_DIM], value[MAX_DIM];
    read_row(tokens.key, tokens.source, i * tokens.key_stride, tier.key.dim, key);
    read_row(tokens.value, tokens.source, i * tokens.value_stride, tier.value.dim, value);
    store_token(page, tier, tokens.format.dtype, tokens.slot[i], key, value, tokens.score[i],
                int32_t(tokens.position[i]));
  });
  return OK;
}

// Reads tokens into float32 rows; zeros for the null page.
inline int64_t load_tokens(const Transfer& tokens) {
  if (int64_t status = check_places(tokens)) return status;
  const Tier& tier = tokens.format.tier[0];
  each_token(tokens, [&](int64_t i, uint8_t* page) {
    float* key = static_cast<float*>(tokens.key) + i * tokens.key_stride;
    float* value = static_cast<float*>(tokens.value) + i * tokens.value_stride;
    if (page) {
      decode_row(page, tier.key, tokens.format.dtype, tokens.slot[i], key);
      decode_row(page, tier.value, tokens.format.dtype, tokens.slot[i], value);
    } else {
      memset(key, 0, tier.key.dim * sizeof(float));
      memset(value, 0, tier.value.dim * sizeof(float));
    }
  });
  return OK;
}

}  // namespace
}  // namespace diffkv
