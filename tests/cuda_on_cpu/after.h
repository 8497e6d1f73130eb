/* Runs the kernel: fibers in turn, until all are done. */
static const om_launch *twin_launch;
static void twin_enter(int block) {
  twin_mine = &twin_blocks[block];
  om_memory = twin_mine->memory;
  om_p = (om_shared *)(om_memory + TWIN_SHARED);
  om_ranks_p = (om_rank *)(om_memory + TWIN_SHARED + ((sizeof(om_shared) + 63) / 64) * 64);
}
static void twin_body() {
  obelisk_mega(*twin_launch);
  twin_fibers[twin_now].done = true;
  twin_yield();
  abort();
}
extern "C" int twin_run(const om_launch *launch, int blocks, int threads, int order) {
  constexpr size_t STACK = 64 << 10;
  twin_launch = launch, twin_threads = threads;
  twin_blocks.assign(blocks, twin_block());
  twin_fibers.assign((size_t)blocks * threads, twin_fiber());
  const std::unique_ptr<char[]> stacks(new char[STACK * twin_fibers.size() + 64]); /* not filled: most is never touched */
  std::vector<char> memory((size_t)blocks * TWIN_BYTES + 128, (char)0xff);
  char *const first = (char *)(((uintptr_t)memory.data() + 127) / 128 * 128);
  for (int b = 0; b < blocks; b++) twin_blocks[b].memory = first + (size_t)b * TWIN_BYTES, twin_blocks[b].warps.resize(threads / 32);
  for (size_t i = 0; i < twin_fibers.size(); i++) {
    void **top = (void **)(((uintptr_t)stacks.get() + STACK * (i + 1)) / 16 * 16 - 8); /* as a call leaves it */
    *--top = (void *)twin_body;
    top -= 6;
    twin_fibers[i] = {top, (int)(i / threads), (int)(i % threads), false, nullptr, 0};
  }
  size_t left = twin_fibers.size();
  while (left) {
    bool moved = false;
    for (size_t k = 0; k < twin_fibers.size(); k++) { /* `order` 1: blocks and threads from the last */
      const size_t i = order ? twin_fibers.size() - 1 - k : k;
      twin_fiber &f = twin_fibers[i];
      if (twin_idle(f)) continue;
      moved = true, f.watched = nullptr;
      twin_now = i, blockIdx.x = f.block, threadIdx.x = f.thread;
      twin_enter(f.block);
      twin_switch(&twin_home, f.stack);
      if (f.done) left--;
    }
    if (!moved) return 1; /* they wait for each other */
  }
  return 0;
}
