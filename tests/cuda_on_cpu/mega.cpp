/* Runs the megakernel: all its blocks together. 1: its threads wait for each other, or are not done after `rounds` turns
 * of each (0: no limit, the kernel has its own where blocks wait for each other). `late`: see before.h. */
static int twin_rounds;
#define TWIN_ROUNDS twin_rounds
#include "fibers.h"

extern "C" __attribute__((visibility("default"))) int twin_run(const void *launch, int blocks, int threads, int order,
                                                               int rounds, int late) {
  twin_launch = launch, twin_bulks.clear(), twin_rounds = rounds, twin_late = late;
  std::vector<char> memory((size_t)blocks * TWIN_BYTES + 128, (char)0xff);
  char *const start = (char *)(((uintptr_t)memory.data() + 127) / 128 * 128);
  return !twin_together(0, blocks, threads, order, 64 << 10, start, TWIN_BYTES);
}
