// The C interface, and which instruction set runs: the best one that was compiled and that the processor has.
#include <string.h>

#include "abi.h"

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
#endif

const Choice* choices(int& count) {
  static const Choice all[] = {
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
  count = sizeof(all) / sizeof(all[0]);
  return all;
}

const Choice* find(const char* name) {
  int count;
  const Choice* all = choices(count);
  for (int i = 0; i < count; i++)
    if (all[i].there && (!name || !strcmp(all[i].name, name))) return all + i;
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

// Bytes of the structs and the version in one number: a library of another build of the package is not used.
EXPORT int64_t diffkv_abi() {
  return ((ABI_VERSION * 10000 + sizeof(Step)) * 10000 + sizeof(Compaction)) * 10000 + sizeof(Transfer);
}
EXPORT const char* diffkv_instructions() { return selected()->name; }
// 0 where the library or the processor lacks them; null chooses the best.
EXPORT int64_t diffkv_select(const char* name) {
  const Choice* choice = find(name);
  if (choice) selected() = choice;
  return choice != nullptr;
}
EXPORT int64_t diffkv_step(const Step* step) { return selected()->kernels->step(*step); }
EXPORT int64_t diffkv_compact(const Compaction* round) { return selected()->kernels->compact(*round); }
EXPORT int64_t diffkv_store(const Transfer* tokens) { return selected()->kernels->store(*tokens); }
EXPORT int64_t diffkv_load(const Transfer* tokens) { return selected()->kernels->load(*tokens); }
