// The newest token of every request enters the window.
#pragma once
#include "page.h"

namespace diffkv {
namespace {

// Copies a row; whether all of it is a number of at most `limit`.
template <class Element>
inline bool copy_checked(const Element* from, Element* to, int64_t dim, float limit) {
  memcpy(to, from, dim * sizeof(Element));
  int bad = 0;
  for (int64_t d = 0; d < dim; d++) {
    const float x = to_float(from[d]);
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
        const int64_t at = (request * step.heads + head) * step.slots + slot;
        const auto* key = static_cast<const Element*>(step.key) + request * step.key_batch + head * step.key_head;
        const auto* value =
            static_cast<const Element*>(step.value) + request * step.value_batch + head * step.value_head;
        good &= copy_checked(key, static_cast<Element*>(step.window_key) + at * keys.dim, keys.dim, step.limit);
        good &= copy_checked(value, static_cast<Element*>(step.window_value) + at * values.dim, values.dim, step.limit);
        step.window_score[at] = 0;
      }
    });
    step.length[request]++;
  }
  if (!good) *step.invalid = 1;
}

}  // namespace
}  // namespace diffkv
