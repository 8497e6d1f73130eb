// Bulk copies by the copy engine (sm_90 and later) and the barriers in shared memory that count their
// bytes. A ring of tiles has two barriers a slot: `full` (bytes have landed) and `empty` (its readers
// are done).

OB_DEVICE void ob_barrier_init(unsigned at, unsigned arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
// Makes initialised barriers known to the copy engine; before the block's first barrier.
OB_DEVICE void ob_barrier_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
// One arrival that also announces bytes still to land.
OB_DEVICE void ob_barrier_expect(unsigned at, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
OB_DEVICE void ob_barrier_arrive(unsigned at) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory");
}
// Returns once the phase with this parity is complete.
OB_DEVICE void ob_barrier_wait(unsigned at, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@done bra leave;\n"
      "bra again;\nleave:\n}" ::"r"(at),
      "r"(parity)
      : "memory");
}
OB_DEVICE void ob_bulk_copy(unsigned to, const void *from, unsigned bytes, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// The rows of a whole tile, dealt to the lanes of a warp. STRIDE bytes between rows in shared memory.
template <int ROWS, int COLUMNS, int STRIDE, class T>
OB_DEVICE void ob_bulk_tile(unsigned to, const T *from, long long stride, unsigned barrier, int lane) {
#pragma unroll
  for (int i = 0; i < (ROWS + 31) / 32; i++) {
    const int row = i * 32 + lane;
    if (ROWS % 32 == 0 || row < ROWS) ob_bulk_copy(to + row * STRIDE, from + row * stride, COLUMNS * 2, barrier);
  }
}
