// Products of 64 rows by 64 columns by 16 of depth on four warps at once (sm_90a). Left operand and
// result lie in registers as mma's do, 16 rows a warp; the right operand lies in shared memory in
// blocks of 64 columns whose rows are 128 bytes with swizzled chunks (ob_place).

// How the hardware finds a right operand: its address (of which bits 4 to 17 count), 1024 bytes
// between groups of eight rows, chunks swizzled within 128 bytes.
OB_DEVICE unsigned long long ob_operand(unsigned at) {
  return (unsigned long long)((at & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
OB_DEVICE void ob_wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
OB_DEVICE void ob_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All products are complete. Ties results to this point: nothing that reads them may be moved before.
OB_DEVICE void ob_wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
template <int ROWS, int COLUMNS> OB_DEVICE void ob_wgmma_settle(float (&c)[ROWS][COLUMNS]) {
#pragma unroll
  for (int i = 0; i < ROWS * COLUMNS; i++) asm volatile("" : "+f"(c[i / COLUMNS][i % COLUMNS])::"memory");
}

#define OB_PAIR(t) \
  "+f"(c[2 * w][c0 + 2 * t]), "+f"(c[2 * w][c0 + 2 * t + 1]), "+f"(c[2 * w + 1][c0 + 2 * t]), \
      "+f"(c[2 * w + 1][c0 + 2 * t + 1])
#define OB_WGMMA(TYPE, NAME) \
  template <int ACROSS, int ROWS, int COLUMNS> \
  OB_DEVICE void ob_wgmma(TYPE, float (&c)[ROWS][COLUMNS], int w, int c0, const unsigned (&a)[4], \
                          unsigned long long b, int add) { \
    asm volatile( \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11," \
        "%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, " \
        "{%32,%33,%34,%35}, %36, add, 1, 1, %38;\n}" \
        : OB_PAIR(0), OB_PAIR(1), OB_PAIR(2), OB_PAIR(3), OB_PAIR(4), OB_PAIR(5), OB_PAIR(6), OB_PAIR(7) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(ACROSS)); \
  }
// Columns c0 / 2 * 8 and the 63 behind them of rows of tile w: c (+)= a b. ACROSS 1: the depth of b
// runs along its rows; 0: along its columns.
OB_WGMMA(ob_f16, "f16")
OB_WGMMA(ob_bf16, "bf16")
