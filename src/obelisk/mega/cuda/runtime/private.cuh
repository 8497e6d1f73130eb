/* Weights where no engine copies them (OM_PRIVATE, with direct products): every warp copies what its own lanes will
 * read into its own part of the ring, 16 bytes a lane, and counts its copies itself. A lane reads what it copied, so
 * there is no barrier of any kind between a copy and its reader, and no loader whose instructions bound the stream.
 *
 * A warp's slabs of all products of all layers of all steps are one sequence; slab n lies in slot n % OM_STAGES of the
 * warp. Exactly OM_STAGES groups of copies are on their way, or landed and not yet read, at any time, whatever the block
 * waits for: reading the oldest makes room for the next. The last groups of a launch are empty.
 *
 * Vectors and the cache are asked for into L2 at the beginning of a layer, since no loader does it.
 */
#if OM_PRIVATE
struct om_matrix { /* where it begins (of a layer's weights, the head of all); slabs of a unit; tiles; a tile's bytes */
  long long at;
  int slabs, tiles, tile;
};
__constant__ om_matrix OM_MATRIX[5] = {
    {OM_AT_QKV, OM_HIDDEN_K, OM_QKV_TILES, OM_HIDDEN_K * 1024},
    {OM_AT_O, OM_Q_K / OM_O_SPLIT, OM_HIDDEN_TILES, OM_Q_K * 1024},
    {OM_AT_UP, OM_HIDDEN_K, OM_UP_TILES, OM_HIDDEN_K * 1024},
    {OM_AT_DOWN, OM_FFN_K / OM_DOWN_SPLIT, OM_HIDDEN_TILES, OM_FFN_K * 1024},
    {OM_AT_HEAD, OM_HIDDEN_K, OM_VOCAB_TILES, OM_HIDDEN_K * 1024},
};

/* This block's runs of a step's units, in the order in which they are multiplied: units of one product and part, one
 * tile behind the other. Where the first lies, in lines of 64 bytes; how many, and of which product. Made once, since
 * text that stands at every read of weights should be short: a layer's is about what the cache of instructions holds (by
 * sizes and times; no counter was read). */
#define OM_RUNS (2 + OM_O_SPLIT + OM_DOWN_SPLIT) /* of a layer */
#define OM_ALL_RUNS (OM_LAYERS * OM_RUNS + 1)
__device__ __forceinline__ uint2 *om_runs() { return (uint2 *)(om_memory + OM_AT_RUNS); }
__device__ __forceinline__ void om_make_runs(int block) {
  for (int i = threadIdx.x; i < OM_ALL_RUNS; i += OM_THREADS) {
    const int layer = i / OM_RUNS, at = i % OM_RUNS, turn = (block + (long long)layer * OM_ROTATE) % OM_BLOCKS;
    const bool head = layer == OM_LAYERS;
    const int kind = head ? OM_HEAD : at == 0 ? OM_QKV : at <= OM_O_SPLIT ? OM_O : at == OM_O_SPLIT + 1 ? OM_UP : OM_DOWN;
    const int part = kind == OM_O ? at - 1 : kind == OM_DOWN ? at - 2 - OM_O_SPLIT : 0;
    const om_matrix m = OM_MATRIX[kind];
    const int first = max(om_share(kind, turn), part * m.tiles);
    const int units = max(0, min(om_share(kind, turn + 1), (part + 1) * m.tiles) - first);
    const size_t from = (head ? 0 : OM_LAYER_OFFSET + (size_t)layer * OM_LAYER_BYTES) + m.at +
                        (size_t)(first - part * m.tiles) * m.tile + part * m.slabs * 1024;
    om_runs()[i] = make_uint2((u32)(from / 64), (u32)units << 3 | kind);
  }
}

__device__ __forceinline__ void om_next_slot(u32 &slot) {
  slot += 1024;
  if (slot == OM_STAGES * 1024) slot = 0;
}
/* Weights are read once: what else is in L2, text among it, stays (measured: 48 us of 745). */
__device__ __forceinline__ void om_copy16(u32 to, const char *from, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy)
               : "memory");
}
/* The next slab of the unit is copied to the oldest slot: a group of its own. */
__device__ __forceinline__ void om_copy(om_state &s) {
  const u32 to = s.ring + s.slot;
  om_copy16(to, s.from, s.policy), om_copy16(to + 512, s.from + 512, s.policy);
  asm volatile("cp.async.commit_group;" ::: "memory");
  s.from += 1024, s.left--;
  om_next_slot(s.slot);
}
/* On to the next unit of which this warp has slabs; `left` stays 0 behind the last. */
__device__ __forceinline__ void om_next_unit(om_state &s) {
  while (s.left <= 0 && s.copied < s.p->steps) {
    if (s.units == 0) {
      if (++s.run == OM_ALL_RUNS) {
        s.run = -1, s.copied++;
        continue;
      }
      const uint2 run = om_runs()[s.run];
      if (run.y >> 3 == 0 || (s.run == OM_ALL_RUNS - 1 && !om_has_head(s.p, s.copied))) continue;
      const om_matrix m = OM_MATRIX[run.y & 7];
      const int each = (m.slabs + OM_WARPS - 1) / OM_WARPS, begin = s.warp() * each;
      s.units = run.y >> 3, s.mine = min(each, m.slabs - begin), s.skip = m.tile - max(s.mine, 0) * 1024;
      s.from = s.p->weights + (size_t)run.x * 64 + begin * 1024 + s.lane() * 16 - s.skip;
    }
    s.units--, s.left = s.mine, s.from += s.skip;
  }
}
/* The warp's next slab, of this unit or of a later one; an empty group behind the last. */
__device__ __forceinline__ void om_bring(om_state &s) {
  om_next_unit(s);
  if (s.left > 0) {
    om_copy(s);
  } else {
    asm volatile("cp.async.commit_group;" ::: "memory");
    om_next_slot(s.slot);
  }
}
__device__ __forceinline__ void om_begin(om_state &s) {
  s.run = -1, s.units = s.copied = s.mine = s.skip = 0;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(s.policy));
  s.from = s.p->weights, s.left = 0, s.slot = 0;
  s.ring = om_address(om_memory) + OM_AT_RING + s.warp() * (OM_STAGES * 1024) + s.lane() * 16;
#pragma unroll 1
  for (int i = 0; i < OM_STAGES; i++) om_bring(s);
}

/* The oldest `count` of up to N slabs, what is behind them as it was; ALL: N, as the compiler knows. What refilling
 * their slots depends on is given back. */
template <int N, bool ALL>
__device__ __forceinline__ u32 om_read_slabs(const om_state &s, int count, uint4 *a) {
  static_assert(N <= OM_STAGES, "slabs that are read together");
  asm volatile("cp.async.wait_group %0;" ::"n"(OM_STAGES - N) : "memory");
  u32 at = s.slot, mix = 0;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const char *const w = om_memory + (s.ring - om_address(om_memory)) + at;
    if (ALL || i < count) {
      a[2 * i] = *(const uint4 *)w, a[2 * i + 1] = *(const uint4 *)(w + 512);
      mix ^= a[2 * i].x ^ a[2 * i + 1].x;
    }
    om_next_slot(at);
  }
  return mix;
}
__device__ __forceinline__ void om_refill(om_state &s, int count, u32 mix) {
  if (om_is_read(mix))
#pragma unroll 1
    for (int i = 0; i < count; i++) om_bring(s);
}

/* Part K to END of what is read together, whichever is `k`; a unit of EACH slabs has PARTS. */
template <int EACH, int K, int END, bool ALL>
__device__ __forceinline__ void om_read_part(const om_state &s, int k, int mine, uint4 *a, int &count, u32 &mix) {
  if constexpr (K < END) {
    constexpr int PARTS = (EACH + OM_DRAW - 1) / OM_DRAW, SIZE = (EACH + PARTS - 1) / PARTS, FIRST = K % PARTS * SIZE;
    constexpr int N = SIZE < EACH - FIRST ? SIZE : EACH - FIRST;
    if (k == K) {
      count = ALL ? N : min(N, mine - FIRST);
      if (ALL || count > 0) mix = om_read_slabs<N, ALL>(s, count, a + 2 * (K / PARTS * EACH + FIRST));
    } else {
      om_read_part<EACH, K + 1, END, ALL>(s, k, mine, a, count, mix);
    }
  }
}
/* The first EACH of the warp's `mine` slabs of units FROM to TO, as far as there are `some`; where there are none, `a` is
 * as it was. One text refills all slots, since it is longer than what reads a few. */
template <int EACH, int FROM, int TO, bool ALL>
__device__ __forceinline__ void om_draw_units(om_state &s, int some, int mine, uint4 *a) {
  constexpr int PARTS = (EACH + OM_DRAW - 1) / OM_DRAW;
#pragma unroll 1
  for (int k = FROM * PARTS; k < min(some, TO) * PARTS; k++) {
    int count = 0;
    u32 mix = 0;
    om_read_part<EACH, FROM * PARTS, TO * PARTS, ALL>(s, k, mine, a, count, mix);
    om_refill(s, count, mix);
  }
}

/* What the loader asks for at the beginning of a layer. */
__device__ __forceinline__ void om_ask_layer(const om_state &s) {
  const om_launch *const p = s.p;
  const char *const layers = p->weights + OM_LAYER_OFFSET;
  const char *const next = layers + (s.layer + 1 < OM_LAYERS ? (size_t)(s.layer + 1) * OM_LAYER_BYTES : 0);
  if (s.thread() == OM_THREADS - 1) {
    om_prefetch(next + OM_AT_VECTORS, OM_VECTOR_BYTES, s.block());
    if (s.layer + 1 == OM_LAYERS) om_prefetch(p->weights + OM_AT_NORM_FINAL, OM_HIDDEN * 4, s.block());
  }
  om_prefetch_cache(p, s.step, s.layer, s.turn, s.thread());
}
#endif
