// Barriers of groups of warps, of the blocks that share a counter, and of the blocks of a cluster.

template <int THREADS> OB_DEVICE void ob_group_barrier(int id) {
  if constexpr (THREADS == 32) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
  }
}

// True in every thread of the last of `total` blocks to arrive at a counter, which it leaves at zero.
// What the other blocks wrote before they arrived is then visible.
OB_DEVICE bool ob_last_block(unsigned *counter, unsigned total) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(counter, 1) == total - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// All threads of all blocks of a cluster meet, in two steps; what they wrote before is visible after.
OB_DEVICE void ob_cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
OB_DEVICE void ob_cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// The address of `p`, which points into this block's shared memory, in that of another block of the
// cluster.
template <class T> OB_DEVICE T *ob_remote(T *p, int block) {
#if __CUDA_ARCH__ >= 900
  T *r;
  asm("mapa.u64 %0, %1, %2;" : "=l"(r) : "l"(p), "r"(block));
  return r;
#else
  return p;
#endif
}
