// Distribution of work over threads, and the threads' memory. PyTorch's OpenMP threads are used if they can be found in
// the process, because they spin for a while after PyTorch's own work and a second pool would compete with them.
#include "abi.h"

#include <dlfcn.h>
#include <stdlib.h>

#include <atomic>

namespace diffkv {
namespace {

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

struct Job {
  void (*run)(void*, int64_t);
  void* context;
  int64_t tasks;
  std::atomic<int64_t> next;
};

void work(void* data) {
  Job& job = *static_cast<Job*>(data);
  for (int64_t task; (task = job.next.fetch_add(1, std::memory_order_relaxed)) < job.tasks;) job.run(job.context, task);
}

struct Scratch {
  void* memory = nullptr;
  int64_t size = 0;
  ~Scratch() { free(memory); }

  void* at_least(int64_t bytes) {
    if (bytes > size) {
      free(memory);
      size = (bytes + bytes / 4 + 63) / 64 * 64;
      if (posix_memalign(&memory, 64, size)) memory = nullptr, size = 0;
    }
    return memory;
  }
};

}  // namespace

void parallel(int64_t tasks, int threads, void (*run)(void*, int64_t), void* context) {
  static const auto team = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  if (threads > tasks) threads = static_cast<int>(tasks);
  if (threads <= 1 || !team) {
    for (int64_t task = 0; task < tasks; task++) run(context, task);
    return;
  }
  Job job{run, context, tasks, {0}};
  team(work, &job, threads, 0);
}

void* call_scratch(int64_t bytes) {
  static thread_local Scratch scratch;
  return scratch.at_least(bytes);
}

void* worker_scratch(int64_t bytes) {
  static thread_local Scratch scratch;
  return scratch.at_least(bytes);
}

}  // namespace diffkv
