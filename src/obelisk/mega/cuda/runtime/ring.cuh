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
__device__ __forceinline__ bool om_landed_now(u32 bar, u32 parity) { /* does not wait */
  u32 done;
  asm volatile("{.reg .pred q; mbarrier.test_wait.parity.shared.b64 q, [%1], %2; selp.u32 %0, 1, 0, q;}"
               : "=r"(done)
               : "r"(bar), "r"(parity)
               : "memory");
  return done;
}
__device__ __forceinline__ void om_wait(u32 bar, u32 parity) {
  while (!om_landed(bar, parity)) {
#if !OM_TRY_WAIT /* else the waiting warps' tests are in the loaders' way: 8 slots 1847 us, so 1714 */
    asm volatile("nanosleep.u32 20;");
#endif
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
__device__ __forceinline__ int om_wide(int length) { /* positions of a piece: at most a sixteenth more than its share */
  const int share = (length + OM_PIECES - 1) / OM_PIECES, step = max(8, 1 << (31 - __clz(max(share, 1))) >> 4);
  return (share + step - 1) & -step; /* a power of two */
}
struct om_range { /* an item of attention: positions [lo, hi) of a slot's head group; those before `old` are cached */
  int slot, head, length, lo, hi, old;
};
__device__ __forceinline__ om_range om_range_of(const om_launch *p, int step, int item) {
  om_range r;
  r.slot = item / (OM_KV_HEADS * OM_PIECES), r.head = item / OM_PIECES % OM_KV_HEADS;
  r.length = om_active(p, r.slot, step) ? p->position[r.slot] + step + 1 : 0;
  const int wide = om_wide(r.length);
  r.lo = item % OM_PIECES * wide, r.hi = min(r.length, r.lo + wide), r.old = min(r.length - 1, r.hi);
  return r;
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

#if OM_KV_RING
/* What a step appends to the cache is copied in the next one: the loader waits until the consumers have begun it (the
 * word of thread 0, behind a fence that all their stores are before). */
__device__ __forceinline__ void om_announce(const om_state &s) {
  if (s.thread()) return;
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  asm volatile("st.release.cta.b32 [%0], %1;" ::"l"(&om.began), "r"(s.step) : "memory");
}
__device__ __forceinline__ void om_await(int step) {
  u32 began;
  do asm volatile("ld.acquire.cta.b32 %0, [%1];" : "=r"(began) : "l"(&om.began) : "memory");
  while ((int)began < step);
#if OM_BULK
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}
#endif

struct om_loader {
  u32 ring, full, empty; /* shared addresses */
  u32 slot, parity, behind, behind_parity, flying;
  u64 policy, often; /* of weights, and of what L2 may keep */
  int lane;

  /* The next slot, once it is free and few enough copies are on their way; `bytes` will come. */
  __device__ __forceinline__ u32 claim(u32 bytes) {
    om_wait(empty + 8 * slot, parity);
    u32 limit = OM_FLIGHT;
    if (OM_FLIGHT_WAITING < OM_FLIGHT && *(volatile int *)&om.waiting) limit = OM_FLIGHT_WAITING;
    while (flying >= limit) {
      om_wait(full + 8 * behind, behind_parity);
      if (++behind == OM_STAGES) behind = 0, behind_parity ^= 1;
      flying--;
    }
    flying++;
#if OM_BULK
    const u32 bar = full + 8 * slot;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
#endif
    return ring + slot * OM_CHUNK;
  }
  __device__ __forceinline__ void bring(u32 to, const char *from, u32 bytes, u64 policy) {
#if OM_BULK
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(full + 8 * slot), "l"(policy)
        : "memory");
#else
    for (u32 i = lane * 16; i < bytes; i += OM_LOADERS * 512)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i), "l"(from + i) : "memory");
#endif
  }
  __device__ __forceinline__ void commit() {
#if !OM_BULK
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full + 8 * slot) : "memory");
#endif
    if (++slot == OM_STAGES) slot = 0, parity ^= 1;
  }
  __device__ __forceinline__ void copy(const char *from, u32 bytes) {
    const u32 to = claim(bytes);
    bring(to, from, bytes, policy);
    commit();
  }

  /* Units of one product: TILES tiles of BLOCKS_K blocks of 32 columns, split SPLIT ways; CHUNK slabs at a time. */
  template <int KIND, int BITS, int TILES, int SPLIT, int BLOCKS_K, int CHUNK>
  __device__ __forceinline__ void stream(const char *matrix, int turn) {
    using Format = om_format<BITS>;
    constexpr u32 TILE = BLOCKS_K / Format::BLOCKS * Format::BYTES, UNIT = TILE / SPLIT, EACH = CHUNK * Format::BYTES;
    const int end = om_share(KIND, turn + 1);
    for (int u = om_share(KIND, turn); u < end; u++) {
      const int part = SPLIT == 1 ? 0 : u / TILES;
      const char *from = matrix + (size_t)(u - part * TILES) * TILE + part * UNIT;
      for (u32 done = 0; done < UNIT; done += EACH) copy(from + done, UNIT - done < EACH ? UNIT - done : EACH);
    }
  }

#if OM_KV_RING
  /* This block's pieces of the cache of a layer, but for the newest position: OM_KV_TILES tiles of 16 positions a slot,
   * keys first. */
  __device__ __forceinline__ void cache(const om_launch *p, int step, int layer, int turn) {
    constexpr int ROW = OM_HEAD_DIM * 2, MOST = 16 * OM_KV_TILES;
    for (int item = turn; item < OM_ITEMS; item += OM_BLOCKS) {
      const om_range r = om_range_of(p, step, item);
      const size_t row = (((size_t)layer * OM_BATCH + r.slot) * OM_KV_HEADS + r.head) * OM_CONTEXT;
      for (int at = r.lo; at < r.old; at += MOST) {
        const u32 bytes = min(MOST, r.old - at) * ROW, to = claim(2 * bytes);
        bring(to, p->keys + (row + at) * ROW, bytes, often);
        bring(to + MOST * ROW, p->values + (row + at) * ROW, bytes, often);
        commit();
      }
    }
  }
#endif
};

__device__ __forceinline__ void om_prefetch(const char *at, int bytes, int block) {
  for (int i = block * 128; i < bytes; i += OM_BLOCKS * 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(at + i));
}

/* This block's pieces of the cache of a layer: asked for into L2 long before attention wants them, since what comes
 * from memory queues behind the weights that are on their way. */
__device__ __forceinline__ void om_prefetch_cache(const om_launch *p, int step, int layer, int turn, int lane) {
  for (int item = turn; item < OM_ITEMS; item += OM_BLOCKS) {
    const om_range r = om_range_of(p, step, item);
    if (r.old <= r.lo) continue;
    const size_t row = (((size_t)layer * OM_BATCH + r.slot) * OM_KV_HEADS + r.head) * OM_CONTEXT + r.lo;
    const size_t at = row * (OM_HEAD_DIM * OM_IN);
    const u32 bytes = (r.old - r.lo) * (OM_HEAD_DIM * OM_IN);
#if OM_BULK
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p->keys + at), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p->values + at), "r"(bytes) : "memory");
#else
    for (u32 i = lane * 128; i < bytes; i += (OM_LOADERS ? OM_LOADERS : OM_WARPS) * 4096) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(p->keys + at + i));
      asm volatile("prefetch.global.L2 [%0];" ::"l"(p->values + at + i));
    }
#endif
  }
}

__device__ __forceinline__ void om_load(const om_launch *p, int block, int lane) {
  om_loader r;
  r.ring = om_address(om_memory) + OM_AT_RING, r.full = om_address(om.full), r.empty = om_address(om.empty);
  r.slot = 0, r.parity = 1, r.behind = 0, r.behind_parity = 0, r.flying = 0, r.lane = lane, r.policy = r.often = 0;
#if OM_BULK
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(r.policy));
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(r.often));
#endif
  for (int step = 0; step < p->steps; step++) {
    int turn = block;
    for (int layer = 0; layer < OM_LAYERS; layer++) {
      const char *w = p->weights + OM_LAYER_OFFSET + (size_t)layer * OM_LAYER_BYTES;
      const char *next = layer + 1 < OM_LAYERS ? w + OM_LAYER_BYTES : p->weights + OM_LAYER_OFFSET;
      if (lane == 0) om_prefetch(next + OM_AT_VECTORS, OM_VECTOR_BYTES, block);
      if (!OM_KV_RING) om_prefetch_cache(p, step, layer, turn, lane);
      r.stream<OM_QKV, OM_BITS, OM_QKV_TILES, 1, OM_HIDDEN_K, OM_QKV_CHUNK>(w + OM_AT_QKV, turn);
#if OM_KV_RING
      if (layer == 0 && step > 0) om_await(step);
      r.cache(p, step, layer, turn);
#endif
      r.stream<OM_O, OM_BITS, OM_HIDDEN_TILES, OM_O_SPLIT, OM_Q_K, OM_O_CHUNK>(w + OM_AT_O, turn);
      r.stream<OM_UP, OM_BITS, OM_UP_TILES, 1, OM_HIDDEN_K, OM_UP_CHUNK>(w + OM_AT_UP, turn);
      r.stream<OM_DOWN, OM_BITS, OM_HIDDEN_TILES, OM_DOWN_SPLIT, OM_FFN_K, OM_DOWN_CHUNK>(w + OM_AT_DOWN, turn);
      turn += OM_ROTATE;
      if (turn >= OM_BLOCKS) turn -= OM_BLOCKS;
    }
    if (lane == 0) om_prefetch(p->weights + OM_AT_NORM_FINAL, OM_HIDDEN * 4, block);
    if (om_has_head(p, step))
      r.stream<OM_HEAD, OM_OUTER_BITS, OM_VOCAB_TILES, 1, OM_HIDDEN_K, OM_HEAD_CHUNK>(p->weights + OM_AT_HEAD, turn);
  }
}

/* ---- consumers ---- */
#if OM_FENCED
__device__ __forceinline__ u32 om_count(u32 *at) { /* add one, and see what others wrote before they did */
  u32 old;
  asm volatile("atom.acq_rel.cta.shared.add.u32 %0, [%1], 1;" : "=r"(old) : "r"(om_address(at)) : "memory");
  return old;
}
#endif

/* A lane's rows of what SHARES warps left at `base`, added in their order by groups of lanes. */
template <int SHARES>
__device__ __forceinline__ void om_gather(const float *base, int quad, float (&v)[4]) {
  constexpr int TEAM = OM_BATCH <= 2 ? 4 : OM_BATCH <= 4 ? 2 : 1, PAIRS = 4 / TEAM; /* lanes that share the last sum */
  const int first = 2 * (quad % PAIRS);
  v[0] = v[1] = v[2] = v[3] = 0.0f;
#pragma unroll
  for (int i = 0; i < (SHARES + TEAM - 1) / TEAM; i++) {
    const int other = i * TEAM + quad / PAIRS;
#pragma unroll
    for (int j = 0; j < 2; j++)
      if (j < OM_BATCH && first + j < OM_BATCH && other < SHARES) {
        const float *const from = base + (other * OM_BATCH + first + j) * 16;
        v[j] += from[0], v[2 + j] += from[8];
      }
  }
#pragma unroll
  for (int d = PAIRS; d < 4; d *= 2)
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] += __shfl_xor_sync(~0u, v[i], d);
}

/* The warps' sums of unit `unit`'s pieces, added in the order of the pieces by one of them: true there. Lane (row,
 * quad) brings and gets rows `row` and `row` + 8 of slots 2 * quad and 2 * quad + 1.
 *
 * OM_FENCED: by the warp that comes last. The fence in front of the count waits for all stores that a thread has under
 * way, those of values for other blocks, too. Else by the warp of the last piece: warps meet at an mbarrier of OM_WARPS
 * arrivals, where that warp's lanes arrive for those without a piece. */
template <int SHARES, int WINDOW>
__device__ __forceinline__ bool om_join(const om_state &s, u32 unit, u32 share, bool last, float (&v)[4]) {
  const int lane = s.lane(), row = lane / 4, quad = lane % 4;
  const u32 at = unit % WINDOW;
  float *const base = (float *)(om_memory + OM_AT_SUMS) + at * (SHARES * OM_BATCH * 16) + row;
#pragma unroll
  for (int j = 0; j < 2; j++)
    if (j < OM_BATCH && 2 * quad + j < OM_BATCH) {
      float *const to = base + (share * OM_BATCH + 2 * quad + j) * 16;
      to[0] = v[j], to[8] = v[2 + j];
    }
  __syncwarp();
#if OM_FENCED
  u32 before = 0;
  if (lane == 0) before = om_count(&om.arrived[at]);
  last = __shfl_sync(~0u, before, 0) == SHARES - 1;
  __syncwarp();
  if (!last) return false;
  if (lane == 0) om.arrived[at] = 0;
#else
  const u32 number = s.unit + unit, bar = om_address(om.joined) + 8 * (number % OM_WINDOW);
  if (lane < (last ? OM_WARPS - SHARES + 1 : 1)) om_arrive(bar);
  if (!last) return false;
  om_wait(bar, number / OM_WINDOW & 1);
#endif
  om_gather<SHARES>(base, quad, v);
  return true;
}

/* A lane's operands of the phase's first piece of its warp, read from the ring while the block still waits for its
 * inputs: what eight warps read takes as long as all else that a small product does. Only what has landed, and for few
 * slots of 16-bit weights, which leave registers for it. */
struct om_held {
  bool have = false;
  uint4 a[16];
};
template <int BITS, int PIECE> __device__ __forceinline__ constexpr bool om_holds() {
  return OM_HELD && BITS == 16 && OM_BATCH <= 2 && PIECE <= 8;
}
template <int BITS, int BLOCKS_K, int CHUNK, int CUTS>
__device__ __forceinline__ void om_hold(const om_state &s, int units, om_held &held) {
  constexpr int SLABS = BLOCKS_K / om_format<BITS>::BLOCKS, CHUNKS = (SLABS + CHUNK - 1) / CHUNK, PIECE = CHUNK / CUTS;
  constexpr int REST = SLABS - (CHUNKS - 1) * CHUNK, ENDS = (REST + PIECE - 1) / PIECE;
  constexpr int PIECES = (CHUNKS - 1) * CUTS + ENDS, LAST = REST - (ENDS - 1) * PIECE;
  if (!om_holds<BITS, PIECE>()) return;
  const u32 lane = s.lane(), local = s.warp(), part = local % PIECES;
  const u32 chunk = s.chunk + local / PIECES * CHUNKS + part / CUTS, slot = chunk % OM_STAGES;
  held.have = local < units * PIECES && (LAST == PIECE || part != PIECES - 1) &&
              om_landed_now(om_address(om.full) + 8 * slot, chunk / OM_STAGES & 1);
  const char *const w = om_memory + OM_AT_RING + slot * OM_CHUNK + part % CUTS * (PIECE * 1024) + lane * 16;
#pragma unroll /* read in any case: registers that may be undefined are kept in memory */
  for (int j = 0; j < 2 * PIECE; j++) held.a[j % 16] = *(const uint4 *)(w + j * 512);
}
template <int N, class Format>
__device__ __forceinline__ void om_multiply_held(Format &f, const om_held &held, int lane, const char *x) {
#pragma unroll
  for (int j = 0; j < N; j++) {
    const uint4 b = Format::inputs(x + j * Format::STRIDE, lane);
    om_mma(f.c[2 * j % 4], held.a[2 * j % 16], b.x, b.y);
    om_mma(f.c[(2 * j + 1) % 4], held.a[(2 * j + 1) % 16], b.z, b.w);
  }
}

/* The same as om_product where every warp has as many pieces of a unit as every other, and where a block has few units
 * of narrow weights: a warp then has the same columns of each of them, whose inputs it reads once (reading them costs
 * as much as reading the weights), and all warps meet once. Two pieces at a time, so that their chains of dependent
 * instructions overlap. MOST: units of a block, at most. */
template <int BITS, int BLOCKS_K, int CHUNK, int CUTS, int MOST>
struct om_spread {
  using Format = om_format<BITS>;
  static constexpr int SLABS = BLOCKS_K / Format::BLOCKS, CHUNKS = (SLABS + CHUNK - 1) / CHUNK, PIECE = CHUNK / CUTS;
  static constexpr int PIECES = SLABS / PIECE, RUNS = PIECES / OM_WARPS, SHARES = OM_WARPS * Format::PARTS;
  static constexpr int ARRIVE = OM_ARRIVALS / CUTS, LAST = SLABS - (CHUNKS - 1) * CHUNK;
  static constexpr int ARRIVE_END = OM_ARRIVALS - ARRIVE * (LAST / PIECE - 1);
  static constexpr int UNITS = RUNS == 1 && MOST > 1 ? 2 : 1, GROUP = RUNS == 1 ? 1 : 2;
  static constexpr bool KEEP = RUNS * PIECE * Format::TILES <= 4;
  static_assert(SLABS % (PIECE * OM_WARPS) == 0 && OM_ARRIVALS % CUTS == 0 && CHUNK % CUTS == 0, "a warp's share");
  const int lane, warp;
  u32 first, full; /* the phase's first chunk; where its slots' mbarriers lie */
  typename Format::Inputs kept[KEEP ? RUNS * PIECE : 1];

  __device__ __forceinline__ om_spread(const om_state &s) : lane(s.lane()), warp(s.warp()), first(s.chunk) {
    full = om_address(om.full);
    asm volatile("" : "+r"(full)); /* or it is made anew each time */
    if (KEEP)
#pragma unroll
      for (int i = 0; i < RUNS * PIECE; i++)
        kept[KEEP ? i : 0] = Format::inputs(inputs(i / PIECE) + i % PIECE * Format::STRIDE, lane);
  }
  __device__ __forceinline__ const char *inputs(int run) const {
    const int part = warp + run * OM_WARPS;
    return om_memory + (part / CUTS * CHUNK + part % CUTS * PIECE) * Format::STRIDE;
  }
  /* N units from `unit` on; sums are left for the gathering. */
  template <int N>
  __device__ __forceinline__ void multiply(int unit, float *sums) const {
    Format f[N];
#pragma unroll
    for (int run = 0; run < RUNS; run += GROUP) {
      typename Format::Inputs b[GROUP * PIECE];
      u32 slot[N * GROUP];
#pragma unroll
      for (int i = 0; i < GROUP * PIECE; i++) {
        if (run + i / PIECE >= RUNS) continue;
        if constexpr (KEEP)
          b[i] = kept[run * PIECE + i];
        else
          b[i] = Format::inputs(inputs(run + i / PIECE) + i % PIECE * Format::STRIDE, lane);
      }
#pragma unroll
      for (int i = 0; i < N * GROUP; i++) {
        if (run + i % GROUP >= RUNS) continue;
        const u32 chunk = first + (unit + i / GROUP) * CHUNKS + (warp + (run + i % GROUP) * OM_WARPS) / CUTS;
        slot[i] = chunk % OM_STAGES;
        om_wait(full + 8 * slot[i], chunk / OM_STAGES & 1);
      }
#pragma unroll
      for (int i = 0; i < N * GROUP; i++) {
        if (run + i % GROUP >= RUNS) continue;
        const int cut = (warp + (run + i % GROUP) * OM_WARPS) % CUTS;
        const char *const w = om_memory + OM_AT_RING + slot[i] * OM_CHUNK + cut * (PIECE * Format::BYTES);
        const char *const x = inputs(run + i % GROUP);
#pragma unroll
        for (int j = 0; j < PIECE; j++)
          f[i / GROUP].template add<0>(w + j * Format::BYTES, lane, x + j * Format::STRIDE, b[i % GROUP * PIECE + j]);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < N * GROUP; i++) {
        if (run + i % GROUP >= RUNS) continue;
        const bool end = warp + (run + i % GROUP) * OM_WARPS == PIECES - 1;
        if (f[i / GROUP].read() && lane < (end ? ARRIVE_END : ARRIVE)) om_arrive(full + 8 * (OM_STAGES + slot[i]));
      }
    }
#pragma unroll
    for (int n = 0; n < N; n++)
      f[n].leave(sums + ((unit + n) * SHARES + warp * Format::PARTS) * (OM_BATCH * 16), lane % 4);
  }
};
template <int BITS, int BLOCKS_K, int CHUNK, int CUTS, int MOST, class Out>
__device__ __forceinline__ void om_product_spread(om_state &s, int units, Out &out) {
  using Spread = om_spread<BITS, BLOCKS_K, CHUNK, CUTS, MOST>;
  static_assert(sizeof om.full == 8 * OM_STAGES, "empty lies behind full");
  const int warp = s.warp();
  float *const sums = (float *)(om_memory + OM_AT_SUMS) + s.row();
  typename Out::Extra extra;
  if (warp < units) extra = out.early(warp);
  const Spread spread(s);
#pragma unroll 1
  for (int unit = 0; unit < units; unit += Spread::UNITS)
    if (Spread::UNITS == 1 || unit + 1 < units)
      spread.template multiply<Spread::UNITS>(unit, sums);
    else
      spread.template multiply<1>(unit, sums);
  s.chunk += units * Spread::CHUNKS;
  om_sync();
#pragma unroll 1
  for (int unit = warp; unit < units; unit += OM_WARPS) {
    float v[4];
    om_gather<Spread::SHARES>(sums + unit * Spread::SHARES * (OM_BATCH * 16), s.quad(), v);
    if (unit > warp) extra = out.early(unit);
    if (BITS == 8) v[0] *= extra.scale.x, v[1] *= extra.scale.x, v[2] *= extra.scale.y, v[3] *= extra.scale.y;
    out.put(unit, v, extra.bias);
  }
}

/* The products of this block's units [0, units) of a phase; the inputs are in shared memory. `out` is called once
 * for each unit by all lanes of one warp: lane (row, quad) has rows `row` and `row` + 8 of the tile, for slots 2 *
 * quad and 2 * quad + 1: v[j] is row `row` of slot 2 * quad + j, v[2 + j] row `row` + 8.
 *
 * A unit's chunks (CHUNK slabs, the last may be shorter) are cut in CUTS pieces each. Piece i of the phase belongs to
 * warp i % OM_WARPS, so what is added in one warp's registers depends on the plan alone. A slot goes back to the
 * loader after OM_ARRIVALS arrivals, whatever the cut: the lanes of a warp arrive for as many as it needs. An arrival does
 * not wait for reads that are under way, and a copy that comes from L2 can overtake them: it depends on the products. */
template <int BITS, int BLOCKS_K, int CHUNK, int CUTS, int SPREAD, class Out>
__device__ __forceinline__ void om_product(om_state &s, int units, Out &out, const om_held &held) {
  if constexpr (SPREAD > 0) {
    om_product_spread<BITS, BLOCKS_K, CHUNK, CUTS, SPREAD>(s, units, out);
    return;
  }
  using Format = om_format<BITS>;
  constexpr int SLABS = BLOCKS_K / Format::BLOCKS, CHUNKS = (SLABS + CHUNK - 1) / CHUNK, PIECE = CHUNK / CUTS;
  constexpr int REST = SLABS - (CHUNKS - 1) * CHUNK, ENDS = (REST + PIECE - 1) / PIECE; /* of the last chunk */
  constexpr int PIECES = (CHUNKS - 1) * CUTS + ENDS, LAST = REST - (ENDS - 1) * PIECE;
  constexpr int SHARES = PIECES < OM_WARPS ? PIECES : OM_WARPS, WINDOW = OM_STAGES / CHUNKS + 2;
  constexpr int ARRIVE = OM_ARRIVALS / CUTS, ARRIVE_END = OM_ARRIVALS - ARRIVE * (ENDS - 1);
  static_assert(OM_ARRIVALS % CUTS == 0 && CHUNK % CUTS == 0, "cuts");
  const int lane = s.lane(), warp = s.warp();
  const u32 all = units * PIECES;
  Format f;
  bool ahead = false; /* the first piece is multiplied already */
  if constexpr (om_holds<BITS, PIECE>())
    if (held.have) {
      const u32 part = warp % PIECES;
      om_multiply_held<PIECE>(f, held, lane, om_memory + (part / CUTS * CHUNK + part % CUTS * PIECE) * Format::STRIDE);
      ahead = true;
    }
  for (u32 local = warp; local < all; local += OM_WARPS) {
    const u32 unit = local / PIECES, part = local % PIECES, in = part / CUTS, cut = part % CUTS;
    const u32 chunk = s.chunk + unit * CHUNKS + in, slot = chunk % OM_STAGES, parity = chunk / OM_STAGES & 1;
    const bool flush = part + OM_WARPS >= PIECES, end = part == PIECES - 1;
    typename Out::Extra extra;
    if (flush) extra = out.early(unit);
    const char *const x = om_memory + (in * CHUNK + cut * PIECE) * Format::STRIDE;
    const char *const w = om_memory + OM_AT_RING + slot * OM_CHUNK + cut * (PIECE * Format::BYTES);
    const auto landed = [&] { om_wait(om_address(om.full) + 8 * slot, parity); };
    if (ahead)
      ahead = false;
    else if (LAST == PIECE || !end)
      om_multiply<PIECE>(f, w, lane, x, landed);
    else
      om_multiply<LAST>(f, w, lane, x, landed);
    const bool read = f.read();
    if (flush) {
      float v[4];
      f.take(v);
      if (BITS == 8) v[0] *= extra.scale.x, v[1] *= extra.scale.x, v[2] *= extra.scale.y, v[3] *= extra.scale.y;
      if (SHARES == 1 || om_join<SHARES, WINDOW>(s, unit, part % OM_WARPS, end, v)) out.put(unit, v, extra.bias);
    }
    __syncwarp();
    if (read && lane < (end ? ARRIVE_END : ARRIVE)) om_arrive(om_address(om.empty) + 8 * slot);
  }
  s.chunk += units * CHUNKS;
  if (SHARES > 1) s.unit += units;
}
