// The newest token of every request enters the window.
#pragma once
#include "page.h"
#include "rotation.h"

namespace diffkv {
namespace {

// A row in the form in which it is held, rounded once; whether all of it is a number of at most `limit`.
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
    // a comparison with NaN is false
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

}  // namespace
}  // namespace diffkv
