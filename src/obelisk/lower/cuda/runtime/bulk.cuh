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
// A warp has read its slot. An arrival alone does not wait for loads under way, and the copy engine
// may write a slot again before they are served (seen: a row of a tile, in 6 of 100 calls of moe): the
// fence keeps what this thread reads in front of what the engine writes.
OB_DEVICE void ob_barrier_leave(unsigned at, int lane) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if (lane == 0) ob_barrier_arrive(at);
}
// Returns once the phase with this parity is complete.
OB_DEVICE void ob_barrier_wait(unsigned at, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@done bra leave;\n"
      "bra again;\nleave:\n}" ::"r"(at),
      "r"(parity)
      : "memory");
}

// How the copy engine sees a matrix; made by the host, a kernel argument.
struct alignas(64) ob_map { char bytes[128]; };

OB_DEVICE void ob_map_fetch(const ob_map &map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// One box of a matrix, from the element in this column and row on, to rows of 128 bytes with swizzled
// chunks (ob_place with STRIDE 0). ONCE: no other block reads it, so it is the first to leave the L2
// cache.
template <bool ONCE>
OB_DEVICE void ob_bulk_box(unsigned to, const ob_map &map, int column, int row, unsigned barrier) {
  if constexpr (ONCE) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(0x12f0000000000000ull)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
  }
}
