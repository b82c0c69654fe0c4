// The C interface, and the choice of the instruction set: the best one that was compiled and the processor supports.
#include <string.h>

#include <initializer_list>

#include "abi.h"
#include "precision.h"

namespace diffkv {
namespace {

struct Choice {
  const char* name;
  const Kernels* kernels;
  bool there;
};

#ifdef DIFFKV_X86
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_bf16() { return has_vnni() && __builtin_cpu_supports("avx512bf16"); }
#endif

// Returns the best choice, or the one called `name`; null if it is not available.
const Choice* find(const char* name) {
  static const Choice all[] = {
#ifdef DIFFKV_AVX512BF16
      {"avx512bf16", &avx512bf16_kernels, has_bf16()},
#endif
#ifdef DIFFKV_AVX512VNNI
      {"avx512vnni", &avx512vnni_kernels, has_vnni()},
#endif
#ifdef DIFFKV_AVX512
      {"avx512", &avx512_kernels, has_avx512()},
#endif
#ifdef DIFFKV_AVX2
      {"avx2", &avx2_kernels, has_avx2()},
#endif
      {"portable", &portable_kernels, true},
  };
  for (const Choice& choice : all)
    if (choice.there && (!name || !strcmp(choice.name, name))) return &choice;
  return nullptr;
}

const Choice*& selected() {
  static const Choice* choice = find(nullptr);
  return choice;
}

}  // namespace
}  // namespace diffkv

using namespace diffkv;

#define EXPORT extern "C" __attribute__((visibility("default")))

// Sizes of the structs and the version in one number, so that a library from another build of the package is not used.
EXPORT int64_t diffkv_abi() {
  int64_t number = ABI_VERSION;
  for (size_t bytes : {sizeof(Step), sizeof(Compaction), sizeof(Transfer), sizeof(Prompt), sizeof(Rounding)})
    number = number * 31 + int64_t(bytes);
  return number;
}
// Bit mask of the supported numbers of bits per code.
EXPORT int64_t diffkv_code_bits() { return CODE_BITS; }
EXPORT const char* diffkv_instructions() { return selected()->name; }
// Returns 0 if the library or the processor lacks the instruction set; null chooses the best.
EXPORT int64_t diffkv_select(const char* name) {
  const Choice* choice = find(name);
  if (choice) selected() = choice;
  return choice != nullptr;
}
EXPORT int64_t diffkv_step(const Step* step) { return selected()->kernels->step(*step); }
EXPORT int64_t diffkv_compact(const Compaction* round) { return selected()->kernels->compact(*round); }
EXPORT int64_t diffkv_store(const Transfer* tokens) { return selected()->kernels->store(*tokens); }
EXPORT int64_t diffkv_load(const Transfer* tokens) { return selected()->kernels->load(*tokens); }
EXPORT int64_t diffkv_prompt(const Prompt* prompt) { return selected()->kernels->prompt(*prompt); }
EXPORT int64_t diffkv_round(const Rounding* keys) { return selected()->kernels->round(*keys); }
