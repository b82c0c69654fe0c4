// All of it for one instruction set; compiled once for each, under the name in DIFFKV_KERNELS.
#include "append.h"
#include "attention.h"
#include "compact.h"
#include "prompt.h"
#include "rounding.h"

namespace diffkv {
namespace {

int64_t step(const Step& step) {
  for (int64_t row = 0; row < step.batch * step.heads; row++)
    if (step.query && (!step.valid || step.valid[row / step.heads]))
      if (int64_t status = check_row(step.format, step.rows, row)) return status;
  if (step.key) append(step);
  return step.query ? attend(step) : OK;
}

}  // namespace

extern const Kernels DIFFKV_KERNELS = {step, compact, store_tokens, load_tokens, attend_prompt, round_keys};

}  // namespace diffkv
