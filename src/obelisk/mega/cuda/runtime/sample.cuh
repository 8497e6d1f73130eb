/* Choosing tokens. Greedy: every block reads every block's best and comes to the same answer. Otherwise one block
 * ranks the slot's logits and tells the others.
 *
 * Ranks, top_k, top_p and the draw are those of tasks/sampling.py. No sort: tokens are ordered by (logit, smaller id
 * first), and "the first token whose cumulated weight reaches a target" is found by descending that order's bits
 * eight at a time. Weights are exp((logit - largest) / T) in fixed point (44 bits), so that their sums do not depend
 * on the order of addition; the exponential itself is single precision.
 */
#define OM_BINS 256
struct om_rank {
  u64 mass[OM_BINS];
  u64 total, before, prefix;
  float top;
};
__shared__ om_rank om_ranks;

__device__ __forceinline__ u64 om_hash(u64 x) { /* splitmix64 */
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
/* 56 bits that rise with the rank's goodness: the logit's order, then the id reversed. */
__device__ __forceinline__ u64 om_order(float logit, int id) {
  const u32 u = __float_as_uint(logit + 0.0f), key = u & 0x80000000u ? ~u : u | 0x80000000u;
  return (u64)key << 24 | (0xffffffu - (u32)id);
}
__device__ __forceinline__ u64 om_weight(float logit, float t) {
  return (u64)(expf((logit - om_ranks.top) / t) * 17592186044416.0f);
}
__device__ __forceinline__ float om_logit(const u64 *row, int i) {
  return __uint_as_float((u32)om_peek(row + i));
}

/* The order of the first token, from the best down, at which the sum of weights (t > 0) or the count (t = 0) reaches
 * `target`; `om_ranks.before` is the sum ahead of it. Tokens below `floor` do not count. */
__device__ __noinline__ u64 om_descend(const om_state s, const u64 *row, float t, u64 target, u64 floor) {
  const int me = s.thread();
  if (me == 0) om_ranks.before = 0, om_ranks.prefix = 0;
  for (int shift = 48; shift >= 0; shift -= 8) {
    for (int i = me; i < OM_BINS; i += OM_THREADS) om_ranks.mass[i] = 0;
    om_sync();
    const u64 prefix = om_ranks.prefix;
    for (int i = me; i < OM_VOCAB; i += OM_THREADS) {
      const float x = om_logit(row, i);
      const u64 at = om_order(x, i);
      if (at < floor || at >> shift >> 8 != prefix) continue;
      const u64 w = t > 0.0f ? om_weight(x, t) : 1;
      if (w) atomicAdd(&om_ranks.mass[at >> shift & 255], w);
    }
    om_sync();
    if (me == 0) {
      u64 sum = om_ranks.before;
      int bin = 255, found = -1, some = 0;
      for (; bin >= 0; bin--) {
        if (!om_ranks.mass[bin]) continue;
        some = bin;
        if (sum + om_ranks.mass[bin] >= target) {
          found = bin;
          break;
        }
        sum += om_ranks.mass[bin];
      }
      if (found < 0) found = some, sum -= om_ranks.mass[some]; /* the last that counts */
      om_ranks.before = sum;
      om_ranks.prefix = prefix << 8 | found;
    }
    om_sync();
  }
  return om_ranks.prefix;
}

__device__ __noinline__ int om_draw(const om_state s, const u64 *row, int slot, u32 tag) {
  const om_launch *p = s.p;
  const int me = s.thread();
  float top = -OM_INFINITY;
  for (int base = 2 * me; base < OM_VOCAB; base += 2 * OM_THREADS) {
    uint4 w[1];
    om_take<1>(s, row + base, 2, 1, tag, OM_EDGE_HEAD, w);
    top = fmaxf(top, __uint_as_float(w[0].x));
    if (base + 1 < OM_VOCAB) top = fmaxf(top, __uint_as_float(w[0].z));
  }
#pragma unroll
  for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  om_sync();
  if (s.lane() == 0) om.squares[s.warp()] = top;
  if (me == 0) om_ranks.total = 0;
  om_sync();
  for (int i = 0; i < OM_WARPS; i++) top = fmaxf(top, om.squares[i]);
  if (me == 0) om_ranks.top = top;
  om_sync();
  const float t = p->temperature[slot];
  u64 floor = 0;
  if (p->top_k[slot] > 0 && p->top_k[slot] < OM_VOCAB) floor = om_descend(s, row, 0.0f, p->top_k[slot], 0);
  u64 mine = 0;
  for (int i = me; i < OM_VOCAB; i += OM_THREADS) {
    const float x = om_logit(row, i);
    if (om_order(x, i) >= floor) mine += om_weight(x, t);
  }
#pragma unroll
  for (int d = 16; d; d /= 2) mine += __shfl_xor_sync(~0u, mine, d);
  if (s.lane() == 0) atomicAdd(&om_ranks.total, mine);
  om_sync();
  u64 mass = om_ranks.total;
  if (p->top_p[slot] < 1.0f) {
    const u64 target = (u64)((double)p->top_p[slot] * (double)mass);
    floor = om_descend(s, row, t, target ? target : 1, floor);
    /* all that was kept: what lies ahead of the last, and the last */
    const int last = 0xffffff - (int)(floor & 0xffffff);
    mass = om_ranks.before + om_weight(om_logit(row, last), t);
    om_sync();
  }
  const double u =
      (double)(om_hash(p->seed[slot] ^ om_hash((u64)(p->position[slot] + s.step))) >> 11) * 1.1102230246251565e-16;
  const u64 target = (u64)(u * (double)mass) + 1;
  const u64 found = om_descend(s, row, t, target < mass ? target : mass, floor);
  return 0xffffff - (int)(found & 0xffffff);
}

/* The end of a step: every block learns the next step's tokens; block 0 keeps the account. */
__device__ __forceinline__ void om_next(om_state &s, char *between, u32 tag) {
  const om_launch *p = s.p;
  const int slot = s.warp();
  for (int b = 0; b < OM_BATCH; b++)
    if (b % OM_BLOCKS == s.block() && om_chooses(p, b, s.step) && p->temperature[b] > 0.0f) {
      const int id = om_draw(s, (u64 *)(between + OM_PLACE_LOGITS) + (size_t)b * (OM_VOCAB_TILES * 16), b, tag);
      if (s.warp() == 0 && s.lane() == 0) om_put((u64 *)(between + OM_PLACE_TOKEN) + 2 * b, id, tag);
    }
  om_sync();
  if (slot < OM_BATCH) {
    int id = 0;
    if (!om_active(p, slot, s.step + 1) && !om_chooses(p, slot, s.step)) {
      id = 0;
    } else if (s.step + 1 < p->feed_length[slot]) {
      id = p->feed[slot * p->feed_stride + s.step + 1];
    } else if (p->temperature[slot] > 0.0f) {
      om_patience wait;
      u64 w;
      for (;;) {
        w = om_peek((u64 *)(between + OM_PLACE_TOKEN) + 2 * slot);
        if ((u32)(w >> 32) == tag || wait.over(s, OM_EDGE_TOKEN, tag, (u32)(w >> 32))) break;
      }
      id = (int)(u32)w;
    } else {
      float top = -OM_INFINITY;
      constexpr int EACH = (OM_BLOCKS + 31) / 32;
      uint4 w[EACH];
      om_take<EACH>(s, (u64 *)(between + OM_PLACE_BEST) + ((size_t)slot * OM_BLOCKS + s.lane()) * 2, 64,
                    (OM_BLOCKS - s.lane() + 31) / 32, tag, OM_EDGE_HEAD, w);
      id = 0x7fffffff;
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        if (s.lane() + 32 * i >= OM_BLOCKS) continue;
        const float x = __uint_as_float(w[i].x);
        if (x > top || (x == top && (int)w[i].z < id)) top = x, id = (int)w[i].z;
      }
#pragma unroll
      for (int d = 16; d; d /= 2) {
        const float x = __shfl_xor_sync(~0u, top, d);
        const int other = __shfl_xor_sync(~0u, id, d);
        if (x > top || (x == top && other < id)) top = x, id = other;
      }
      if (id < 0 || id >= OM_VOCAB) id = 0; /* nothing finite: the host sees the numbers */
    }
    if (s.lane() == 0) {
      om.token[slot] = id;
      if (s.block() == 0 && om_active(p, slot, s.step) && !om.done[slot]) {
        om.reached[slot] = p->position[slot] + s.step + 1;
        if (om_chooses(p, slot, s.step)) {
          p->out[slot * p->out_stride + om.made[slot]++] = id;
          for (int i = 0; i < p->stop_count; i++)
            if (p->stops[i] == id) om.done[slot] = 1;
          if (!om.done[slot] && om.made[slot] >= p->want[slot]) om.done[slot] = 2;
        }
      }
    }
  }
  om_sync();
}
