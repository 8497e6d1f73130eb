/* The ring of weights: one loader that never stops at the border of an operator, warps that multiply what has landed.
 *
 * The loader's instructions are fixed by the tables OM_CUT: for every step, layer and product, this block's units in
 * order, each in chunks. Chunk n of a launch goes to slot n % OM_STAGES. At most OM_FLIGHT
 * chunks are on their way at a time, so that words between blocks do not queue behind weights; the rest of the ring
 * holds what has landed while its readers wait for their inputs.
 */
__device__ __forceinline__ bool om_landed(u32 bar, u32 parity) {
  u32 done;
#if OM_TRY_WAIT
  asm volatile("{.reg .pred q; mbarrier.try_wait.parity.shared::cta.b64 q, [%1], %2; selp.u32 %0, 1, 0, q;}"
               : "=r"(done)
               : "r"(bar), "r"(parity)
               : "memory");
#else
  asm volatile("{.reg .pred q; mbarrier.test_wait.parity.shared.b64 q, [%1], %2; selp.u32 %0, 1, 0, q;}"
               : "=r"(done)
               : "r"(bar), "r"(parity)
               : "memory");
#endif
  return done;
}
__device__ __forceinline__ void om_wait(u32 bar, u32 parity) {
  while (!om_landed(bar, parity)) {
  }
}
__device__ __forceinline__ void om_arrive(u32 bar) {
#if OM_TRY_WAIT
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
#else
  asm volatile("{.reg .b64 t; mbarrier.arrive.shared.b64 t, [%0];}" ::"r"(bar) : "memory");
#endif
}

__device__ __forceinline__ int om_share(int kind, int turn) {
  return OM_CUT[kind][turn];
}
__device__ __forceinline__ bool om_active(const om_launch *p, int slot, int step) {
  return step < p->planned[slot];
}
__device__ __forceinline__ int om_wide(int length) { /* positions of a piece: at most a quarter more than its share */
  const int share = (length + OM_PIECES - 1) / OM_PIECES, step = max(8, 1 << (31 - __clz(max(share, 1))) >> 2);
  return (share + step - 1) / step * step;
}
__device__ __forceinline__ bool om_moved(const om_launch *p, int step) { /* pieces are others than in the step before */
  bool any = false;
#pragma unroll
  for (int b = 0; b < OM_BATCH; b++) {
    const int length = p->position[b] + step;
    any |= om_active(p, b, step) && om_wide(length) != om_wide(length + 1);
  }
  return any;
}
__device__ __forceinline__ bool om_chooses(const om_launch *p, int slot, int step) {
  return om_active(p, slot, step) && step + 1 >= p->feed_length[slot];
}
__device__ __forceinline__ bool om_has_head(const om_launch *p, int step) {
  bool any = false;
#pragma unroll
  for (int b = 0; b < OM_BATCH; b++) any |= om_chooses(p, b, step);
  return any;
}

struct om_loader {
  u32 ring, full, empty; /* shared addresses */
  u32 slot, parity, behind, behind_parity, flying;
  u64 policy;
  int lane;

  __device__ __forceinline__ void copy(const char *from, u32 bytes) {
    om_wait(empty + 8 * slot, parity);
    u32 limit = OM_FLIGHT;
    if (OM_FLIGHT_WAITING < OM_FLIGHT && *(volatile int *)&om.waiting) limit = OM_FLIGHT_WAITING;
    while (flying >= limit) {
      om_wait(full + 8 * behind, behind_parity);
      if (++behind == OM_STAGES) behind = 0, behind_parity ^= 1;
      flying--;
    }
    flying++;
    const u32 to = ring + slot * OM_CHUNK, bar = full + 8 * slot;
#if OM_BULK
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(bar), "l"(policy)
        : "memory");
#else
    for (u32 i = lane * 16; i < bytes; i += OM_LOADERS * 512)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i), "l"(from + i) : "memory");
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
#endif
    if (++slot == OM_STAGES) slot = 0, parity ^= 1;
  }

  /* Units of one product: tiles of BLOCKS_K blocks of 32 columns, split SPLIT ways; TILES tiles. */
  template <int KIND, int TILES, int SPLIT, int BLOCKS_K>
  __device__ __forceinline__ void stream(const char *matrix, int turn) {
    constexpr u32 UNIT = BLOCKS_K / SPLIT * OM_BLOCK, TILE = BLOCKS_K * OM_BLOCK;
    const int end = om_share(KIND, turn + 1);
    for (int u = om_share(KIND, turn); u < end; u++) {
      const int part = SPLIT == 1 ? 0 : u / TILES;
      const char *from = matrix + (size_t)(u - part * TILES) * TILE + part * UNIT;
      for (u32 done = 0; done < UNIT; done += OM_CHUNK)
        copy(from + done, UNIT - done < OM_CHUNK ? UNIT - done : OM_CHUNK);
    }
  }
};

__device__ __forceinline__ void om_prefetch(const char *at, int bytes, int block) {
  for (int i = block * 128; i < bytes; i += OM_BLOCKS * 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(at + i));
}

/* This block's pieces of the cache of a layer: asked for into L2 long before attention wants them, since what comes
 * from memory queues behind the weights that are on their way. */
__device__ __forceinline__ void om_prefetch_cache(const om_launch *p, int step, int layer, int turn, int lane) {
  for (int item = turn; item < OM_ITEMS; item += OM_BLOCKS) {
    const int slot = item / (OM_KV_HEADS * OM_PIECES), head = item / OM_PIECES % OM_KV_HEADS, piece = item % OM_PIECES;
    const int length = om_active(p, slot, step) ? p->position[slot] + step + 1 : 0, wide = om_wide(length);
    const int lo = piece * wide, hi = min(length - 1, lo + wide);
    if (hi <= lo) continue;
    const size_t at = ((((size_t)layer * OM_BATCH + slot) * OM_KV_HEADS + head) * OM_CONTEXT + lo) * (OM_HEAD_DIM * 2);
    const u32 bytes = (hi - lo) * (OM_HEAD_DIM * 2);
#if OM_BULK
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p->keys + at), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p->values + at), "r"(bytes) : "memory");
#else
    for (u32 i = lane * 128; i < bytes; i += OM_LOADERS * 4096) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(p->keys + at + i));
      asm volatile("prefetch.global.L2 [%0];" ::"l"(p->values + at + i));
    }
#endif
  }
}

__device__ __forceinline__ void om_load(const om_launch *p, int block, int lane) {
  om_loader r;
  r.ring = om_address(om_memory) + OM_AT_RING, r.full = om_address(om.full), r.empty = om_address(om.empty);
  r.slot = 0, r.parity = 1, r.behind = 0, r.behind_parity = 0, r.flying = 0, r.lane = lane, r.policy = 0;
#if OM_BULK
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(r.policy));
#endif
  for (int step = 0; step < p->steps; step++) {
    int turn = block;
    for (int layer = 0; layer < OM_LAYERS; layer++) {
      const char *w = p->weights + OM_LAYER_OFFSET + (size_t)layer * OM_LAYER_BYTES;
      const char *next = layer + 1 < OM_LAYERS ? w + OM_LAYER_BYTES : p->weights + OM_LAYER_OFFSET;
      if (lane == 0) om_prefetch(next + OM_AT_VECTORS, OM_VECTOR_BYTES, block);
      om_prefetch_cache(p, step, layer, turn, lane);
      r.stream<OM_QKV, OM_QKV_TILES, 1, OM_HIDDEN_K>(w + OM_AT_QKV, turn);
      r.stream<OM_O, OM_HIDDEN_TILES, OM_O_SPLIT, OM_Q_K>(w + OM_AT_O, turn);
      r.stream<OM_UP, OM_UP_TILES, 1, OM_HIDDEN_K>(w + OM_AT_UP, turn);
      r.stream<OM_DOWN, OM_HIDDEN_TILES, OM_DOWN_SPLIT, OM_FFN_K>(w + OM_AT_DOWN, turn);
      turn += OM_ROTATE;
      if (turn >= OM_BLOCKS) turn -= OM_BLOCKS;
    }
    if (lane == 0) om_prefetch(p->weights + OM_AT_NORM_FINAL, OM_HIDDEN * 4, block);
    if (om_has_head(p, step)) r.stream<OM_HEAD, OM_VOCAB_TILES, 1, OM_HIDDEN_K>(p->weights + OM_AT_HEAD, turn);
  }
}

/* ---- consumers ---- */
/* 16 weight rows by 16 columns, times 16 columns of 8 slots. */
__device__ __forceinline__ void om_mma(float (&c)[4], const uint4 &a, u32 b0, u32 b1) {
#if OM_BF16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 om_count(u32 *at) { /* add one, and see what others wrote before they did */
  u32 old;
  asm volatile("atom.acq_rel.cta.shared.add.u32 %0, [%1], 1;" : "=r"(old) : "r"(om_address(at)) : "memory");
  return old;
}

/* The products of this block's units [0, units) of a phase; the inputs are in shared memory. `out` is called once
 * for each unit by all lanes of one warp: lane (row, quad) has rows `row` and `row` + 8 of the tile, for slots 2 *
 * quad and 2 * quad + 1: v[j] is row `row` of slot 2 * quad + j, v[2 + j] row `row` + 8.
 *
 * A lane's 8 columns of a block of 32 are 8 * quad to 8 * quad + 7, in weights and inputs alike: the order along K
 * is free. Chunk i of the phase belongs to warp i % OM_WARPS, so which chunks are added in one warp's registers
 * depends on the plan alone; the warps' sums are added in the order of their first chunks. */
template <int BLOCKS_K, class Out>
__device__ __forceinline__ void om_product(om_state &s, int units, Out &out) {
  constexpr int PER = OM_CHUNK / OM_BLOCK, CHUNKS = (BLOCKS_K + PER - 1) / PER, LAST = BLOCKS_K - (CHUNKS - 1) * PER;
  constexpr int SHARES = CHUNKS < OM_WARPS ? CHUNKS : OM_WARPS, WINDOW = OM_STAGES / CHUNKS + 2;
  constexpr int TEAM = OM_BATCH <= 2 ? 4 : OM_BATCH <= 4 ? 2 : 1, PAIRS = 4 / TEAM; /* lanes that share the last sum */
  const int lane = s.lane(), warp = s.warp(), row = lane / 4, quad = lane % 4;
  float *const sums = (float *)(om_memory + OM_AT_SUMS);
  const char *const ring = om_memory + OM_AT_RING + lane * 16;
  const char *const inputs = om_memory + row * 64 + quad * 16;
  const u32 all = units * CHUNKS;
  u32 slot = (s.chunk + warp) % OM_STAGES, parity = (s.chunk + warp) / OM_STAGES & 1;
  float c[4][4] = {};
  for (u32 local = warp; local < all; local += OM_WARPS) {
    const u32 unit = local / CHUNKS, part = local % CHUNKS;
    const bool flush = part + OM_WARPS >= CHUNKS;
    float2 extra = make_float2(0.0f, 0.0f);
    if (flush) extra = out.early(unit);
    const char *const x = inputs + part * (PER * OM_BATCH * 64), *const w = ring + slot * OM_CHUNK;
    if (LAST == PER || part + 1 < CHUNKS) {
      uint4 b[PER];
#pragma unroll
      for (int j = 0; j < PER; j++)
        b[j] = row < OM_BATCH ? *(const uint4 *)(x + j * (OM_BATCH * 64)) : make_uint4(0, 0, 0, 0);
      om_wait(om_address(om.full) + 8 * slot, parity);
#pragma unroll
      for (int j = 0; j < PER; j++) {
        om_mma(c[2 * j % 4], *(const uint4 *)(w + j * OM_BLOCK), b[j].x, b[j].y);
        om_mma(c[(2 * j + 1) % 4], *(const uint4 *)(w + j * OM_BLOCK + OM_BLOCK / 2), b[j].z, b[j].w);
      }
    } else {
      om_wait(om_address(om.full) + 8 * slot, parity);
#pragma unroll
      for (int j = 0; j < LAST; j++) {
        const uint4 b = row < OM_BATCH ? *(const uint4 *)(x + j * (OM_BATCH * 64)) : make_uint4(0, 0, 0, 0);
        om_mma(c[2 * j % 4], *(const uint4 *)(w + j * OM_BLOCK), b.x, b.y);
        om_mma(c[(2 * j + 1) % 4], *(const uint4 *)(w + j * OM_BLOCK + OM_BLOCK / 2), b.z, b.w);
      }
    }
    if (flush) {
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        v[i] = (c[0][i] + c[1][i]) + (c[2][i] + c[3][i]);
        c[0][i] = c[1][i] = c[2][i] = c[3][i] = 0.0f;
      }
      bool last = true;
      if (SHARES > 1) {
        const u32 at = unit % WINDOW;
        float *const base = sums + at * (SHARES * OM_BATCH * 16) + row;
#pragma unroll
        for (int j = 0; j < 2; j++)
          if (j < OM_BATCH && 2 * quad + j < OM_BATCH) {
            float *const to = base + (part % OM_WARPS * OM_BATCH + 2 * quad + j) * 16;
            to[0] = v[j], to[8] = v[2 + j];
          }
        __syncwarp();
        u32 before = 0;
        if (lane == 0) before = om_count(&om.arrived[at]);
        last = __shfl_sync(~0u, before, 0) == SHARES - 1;
        __syncwarp();
        if (last) {
          const int first = 2 * (quad % PAIRS);
          v[0] = v[1] = v[2] = v[3] = 0.0f;
#pragma unroll
          for (int i = 0; i < (SHARES + TEAM - 1) / TEAM; i++) {
            const int share = i * TEAM + quad / PAIRS;
#pragma unroll
            for (int j = 0; j < 2; j++)
              if (j < OM_BATCH && first + j < OM_BATCH && share < SHARES) {
                const float *const from = base + (share * OM_BATCH + first + j) * 16;
                v[j] += from[0], v[2 + j] += from[8];
              }
          }
#pragma unroll
          for (int d = PAIRS; d < 4; d *= 2)
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] += __shfl_xor_sync(~0u, v[i], d);
          if (lane == 0) om.arrived[at] = 0;
        }
      }
      if (last) out.put(unit, v, extra);
    }
    __syncwarp();
    if (lane == 0) om_arrive(om_address(om.empty) + 8 * slot);
    slot += OM_WARPS;
    if (slot >= OM_STAGES) slot -= OM_STAGES, parity ^= 1;
  }
  s.chunk += all;
}
