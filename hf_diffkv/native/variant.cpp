// All kernels for one instruction set; compiled once for each, under the name in DIFFKV_KERNELS.
#include "compact.h"
#include "prompt.h"
#include "step.h"

namespace diffkv {

extern const Kernels DIFFKV_KERNELS = {run_step, compact, store_tokens, load_tokens, attend_prompt, round_keys};

}  // namespace diffkv
