/* What is built once for all kernels of a kind: the fibers' switch and their turns. */
#include <memory>
#include <vector>

#include "before.h" /* last: it redefines words of the compiler's own headers */

__asm__(".text\n.globl twin_switch\n.hidden twin_switch\ntwin_switch:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");
void twin_yield() { twin_switch(&twin_fibers[twin_now].stack, twin_home); }

/* `count` blocks of `threads` that run together, the first of them `first`; `fill` is what their memory holds. False:
 * they wait for each other. `order` 1: blocks and threads from the last.
 */
static bool twin_together(int first, int count, int threads, int order, size_t stack, char *memory, size_t bytes) {
  const int all = count * threads;
  std::vector<twin_block> blocks(count);
  std::vector<twin_fiber> fibers(all);
  std::vector<twin_warp> warps(all / 32);
  const std::unique_ptr<char[]> stacks(new char[stack * all + 64]); /* not filled: most is never touched */
  const std::unique_ptr<twin_piece[]> copies(new twin_piece[(size_t)all * TWIN_COPIES]);
  twin_blocks = blocks.data(), twin_fibers = fibers.data(), twin_threads = threads;
  for (int b = 0; b < count; b++) blocks[b] = {memory + b * bytes, 0, 0, &warps[b * (threads / 32)]};
  for (int i = 0; i < all; i++) {
    void **top = (void **)(((uintptr_t)stacks.get() + stack * (i + 1)) / 16 * 16 - 8); /* as a call leaves it */
    *--top = (void *)twin_body;
    top -= 6;
    fibers[i] = {top, i / threads, i % threads, false, nullptr, 0, &copies[(size_t)i * TWIN_COPIES], 0};
  }
  for (int left = all, round = 0; left; round++) {
    bool moved = false;
    for (int k = 0; k < all; k++) {
      twin_fiber &f = fibers[twin_now = order ? all - 1 - k : k];
      if (twin_idle(f)) continue;
      moved = true, f.watched = nullptr;
      blockIdx.x = first + f.block, threadIdx.x = f.thread;
      twin_enter(f.block);
      twin_switch(&twin_home, f.stack);
      if (f.done) left--;
    }
    if (!moved || TWIN_ROUNDS && round > TWIN_ROUNDS) return false;
  }
  return true;
}
