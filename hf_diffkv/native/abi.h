// Arguments from Python: plain structs that library.py mirrors field for field and fills from PageLayout and tensors.
#pragma once
#include <stdint.h>

namespace diffkv {

constexpr int64_t ABI_VERSION = 8;
constexpr int MAX_TIERS = 4;
constexpr int MAX_DIM = 512;

enum Dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
enum Status : int64_t { OK = 0, BAD_PAGE = 1, BAD_COUNT = 2, NO_MEMORY = 3 };

// Keys or values of one tier; offsets, rows and a group's metadata are in bytes (pages/layout.py). The last two numbers
// are defined in pages/inset.py.
struct Side {
  int32_t bits, groups, dim, row, offset, metadata_offset, metadata_bytes;
  float parts, shrinkage;
};

struct Tier {
  Side key, value;
  int32_t capacity, score_offset, position_offset;
  int32_t score_bytes, position_bytes;  // 0 if pages have neither, without token selection
};

struct Format {
  int64_t page_bytes;
  int32_t dtype, tiers;
  Tier tier[MAX_TIERS];
};

// Page table [rows, width] and counts [rows] of each tier.
struct Rows {
  uint8_t* pages;
  int64_t page_count;
  int32_t* table;
  int32_t* count[MAX_TIERS];
  int64_t width;
};

// Decode step with one new token per request: appended if `key` is set, attended from if `query` is set. Strides are in
// elements. With `rotate`, stored tokens are rotated and `key_offset` is subtracted from keys. Query, key, value and
// output are in the model's form. With `absorbed`, queries have key dim + value dim elements, and logits are their
// products with key and value.
struct Step {
  Format format;
  Rows rows;                        // row = request * heads + head
  void *window_key, *window_value;  // [rows, slots, dim]
  float* window_score;              // [rows, slots]
  int64_t *window_start, *length;   // [batch]
  const int64_t* sink_end;          // [batch] or null: tokens below it are in the first sink_slots slots
  int64_t batch, heads, group, slots, sink_slots;
  const void *key, *value;
  int64_t key_batch, key_head, value_batch, value_head;
  const float* key_offset;  // [rows, key_dim] or null
  uint8_t* invalid;
  const uint8_t* valid;  // [batch] or null
  const void* query;
  int64_t query_batch, query_head;
  void* output;        // [batch, heads * group, value_dim]
  const float* sinks;  // [heads * group] or null
  float* received;     // [rows, received_stride] or null: received attention, joined over several layers
  int64_t received_stride;
  float limit, scaling, softcap;  // softcap 0: none
  int32_t fold, hold, threads, rotate, absorbed;
};

// One compaction: the candidate of row r is in slot sink_slots + position % (slots - sink_slots) of its window, and
// leaves if length - position > window. `position` and `length` have one entry for every `heads` rows.
struct Compaction {
  Format format;
  Rows rows;
  int64_t row_count, heads, slots, sink_slots, window;
  const void *key, *value;  // [rows, slots, dim]
  const float* score;       // [rows, slots]
  int64_t* position;  // incremented where a candidate left
  const int64_t* length;
  // [rows]; without scores, only the first is set: candidates are high where it is 0, otherwise low
  const float *high_threshold, *low_threshold;
  int32_t* ring;
  int64_t* state;  // free list: start, free, capacity
  int32_t* flag;
  // matrices that keys are rounded by, bfloat16 [model layers, model_heads, key dim, key dim], or null; row r uses
  // layer[r / layer_rows] and head[r % heads]
  const void* feedback;
  const int64_t *layer, *head;
  int64_t layer_rows, model_heads, threads;
};

// Tokens of one tier (the format's first) by page and slot, int64 [count] each.
struct Transfer {
  Format format;
  uint8_t* pages;
  int64_t page_count, count;
  const int64_t *page, *slot, *to_page, *to_slot;
  void *key, *value;  // [count, dim] of `source`
  int64_t key_stride, value_stride;
  const float* score;
  const int64_t* position;
  int32_t source, threads;
};

// Rounding of keys [count, side.dim] of `source` for the queries of their rows, before they are stored as `side`.
struct Rounding {
  Side side;
  const void* key;
  const int64_t* row;
  const float* feedback;  // [rows, dim, dim]; only entries right of the diagonal are read
  float* rounded;         // [count, dim]
  int64_t count, key_stride, rows;
  int32_t source, threads;
};

// Tensor [batch, heads, tokens, dim] with contiguous tokens; strides are in elements.
struct Strided {
  const void* data;
  int64_t batch, head, token;
};

// Attention from many new tokens per request to stored tokens, `before` exact tokens and themselves.
struct Prompt {
  const Step* stored;  // format, rows and window of the stored tokens, or null
  int64_t batch, heads, group, length, before, stored_tokens, key_dim, value_dim;
  Strided query, key, value, past_key, past_value;  // of `dtype`
  const uint8_t* past_valid;                        // [batch, heads, before]
  const uint8_t* valid;                             // [batch, length] or null
  const uint8_t* mask;                              // [length, length] of each request, or null
  int64_t mask_batch;
  const float* sinks;  // [heads * group] or null
  void* output;        // [batch, length, heads * group, value_dim], zeros
  float* received;     // [batch * heads, stored_tokens + before + length], zeros; null if not needed
  int64_t observed;    // number of a request's last queries that give significance
  float scaling, softcap;
  int32_t dtype, threads;
};

// Functions that every instruction set implements.
struct Kernels {
  int64_t (*step)(const Step&);
  int64_t (*compact)(const Compaction&);
  int64_t (*store)(const Transfer&);
  int64_t (*load)(const Transfer&);
  int64_t (*prompt)(const Prompt&);
  int64_t (*round)(const Rounding&);
};

extern const Kernels portable_kernels, avx2_kernels, avx512_kernels, avx512vnni_kernels, avx512bf16_kernels;

// threads.cpp
void parallel(int64_t tasks, int threads, void (*run)(void* context, int64_t task), void* context);
// Memory of the calling thread, 64-byte aligned, valid until it calls the same function again; null if out of memory.
void* call_scratch(int64_t bytes);
void* worker_scratch(int64_t bytes);

}  // namespace diffkv
