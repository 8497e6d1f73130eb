/* Runs the megakernel: all its blocks together. 1: its threads wait for each other. */
#define TWIN_ROUNDS 0 /* no limit: the kernel has its own */
#include "fibers.h"

extern "C" __attribute__((visibility("default"))) int twin_run(const void *launch, int blocks, int threads, int order) {
  twin_launch = launch;
  std::vector<char> memory((size_t)blocks * TWIN_BYTES + 128, (char)0xff);
  char *const start = (char *)(((uintptr_t)memory.data() + 127) / 128 * 128);
  return !twin_together(0, blocks, threads, order, 64 << 10, start, TWIN_BYTES);
}
