/* Attention of one piece of one slot's context for one key-value head, by all warps of a block.
 *
 * Pieces are ranges of positions whose width depends on the length alone and seldom changes, and the same block
 * always has the same piece of a layer: so what it appends to the cache in one step it reads itself in the next, and
 * the cache needs no marks; where the width changes, all blocks meet first. Keys and values of older positions are
 * asked for before the new queries are waited for.
 *
 * Tensor cores, with 16-bit keys and values (fp32: attend32.cuh): a tile is 16 positions. Scores are keys (16 by 16 dimensions) times the queries of 8 heads; values,
 * transposed in registers, times probabilities. A lane's 8 dimensions of a block of 32 are neighbours, as in
 * om_product. Queries and probabilities are split in two 16-bit numbers, so that neither is rounded to 16 bits.
 * Softmax is online and in base 2; a piece's result is rounded to 16 bits.
 */
#define OM_ROWS_QKV (OM_GROUP + 2)
#define OM_MERGING (OM_HALVED ? OM_WARPS / 2 : OM_WARPS) /* warps whose sums meet in shared memory */
#if !OM_FP32
#define OM_POSITIONS 16
#define OM_DIM_BLOCKS ((OM_HEAD_DIM + 31) / 32)
#define OM_Q_STRIDE (OM_DIM_BLOCKS * 64 + (OM_DIM_BLOCKS % 2 ? 0 : 64)) /* bytes of a query: rows do not share banks */
#define OM_Q_PARTS 2
#define OM_Q_ROWS ((OM_GROUP + 7) / 8 * 8)
#define OM_NEWEST (OM_DIM_BLOCKS * 64) /* bytes of the new key, and of the new value */

__device__ __forceinline__ u32 om_turn(u32 x) { /* an 8 by 8 matrix of 16-bit numbers, transposed across the warp */
  u32 r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}

struct om_tile { /* of 16 positions: lane (row, quad) has positions `row` and `row` + 8 */
  uint4 k[OM_DIM_BLOCKS][2], v[OM_DIM_BLOCKS][2];

  __device__ __forceinline__ void load(const char *keys, const char *values, int first, int end, int row, int quad) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int at = first + row + 8 * half;
#pragma unroll
      for (int j = 0; j < OM_DIM_BLOCKS; j++) {
        const int dim = 32 * j + 8 * quad;
        const bool in = at < end && dim < OM_HEAD_DIM;
        k[j][half] = in ? om_ldg(keys + ((size_t)at * OM_HEAD_DIM + dim) * 2) : make_uint4(0, 0, 0, 0);
        v[j][half] = in ? om_ldg(values + ((size_t)at * OM_HEAD_DIM + dim) * 2) : make_uint4(0, 0, 0, 0);
      }
    }
  }
  /* From shared memory, rows STRIDE bytes apart; unless ALL are there, those from `rows` on are zero. */
  template <int STRIDE, bool ALL>
  __device__ __forceinline__ void take(const char *keys, const char *values, int rows, int row, int quad) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int j = 0; j < OM_DIM_BLOCKS; j++) {
        const int at = (row + 8 * half) * STRIDE + j * 64 + quad * 16;
        const bool in = (ALL || row + 8 * half < rows) && 32 * j + 8 * quad < OM_HEAD_DIM;
        k[j][half] = in ? *(const uint4 *)(keys + at) : make_uint4(0, 0, 0, 0);
        v[j][half] = in ? *(const uint4 *)(values + at) : make_uint4(0, 0, 0, 0);
      }
  }
  /* Values of half of the positions as the products want them. */
  template <int HALF>
  __device__ __forceinline__ void turn() {
#pragma unroll
    for (int j = 0; j < OM_DIM_BLOCKS; j++) {
      uint4 &x = v[j][HALF];
      x = make_uint4(om_turn(x.x), om_turn(x.y), om_turn(x.z), om_turn(x.w));
    }
  }
  /* The newest position, from shared memory; its values are not turned yet. */
  __device__ __forceinline__ void add(const char *fresh, int at, int row, int quad) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (at == row + 8 * half)
#pragma unroll
        for (int j = 0; j < OM_DIM_BLOCKS; j++) {
          if (32 * j + 8 * quad >= OM_HEAD_DIM) continue;
          k[j][half] = *(const uint4 *)(fresh + j * 64 + quad * 16);
          v[j][half] = *(const uint4 *)(fresh + OM_NEWEST + j * 64 + quad * 16);
        }
  }
};

struct om_softmax { /* of heads 2 * quad and 2 * quad + 1: `sum` as the products leave it */
  float top[2], mass[2], sum[OM_DIM_BLOCKS][2][4];
};

/* One tile, its values turned; positions from `end` on do not count. */
__device__ __forceinline__ void om_fold(om_softmax &a, const om_tile &t, const char *queries, int first, int end,
                                        int row, int quad) {
  float c[2][4] = {};
#pragma unroll
  for (int j = 0; j < OM_DIM_BLOCKS; j++) {
    const uint4 hi = *(const uint4 *)(queries + row * OM_Q_STRIDE + j * 64 + quad * 16);
    const uint4 lo = *(const uint4 *)(queries + (OM_Q_ROWS + row) * OM_Q_STRIDE + j * 64 + quad * 16);
    const uint4 k0 = make_uint4(t.k[j][0].x, t.k[j][1].x, t.k[j][0].y, t.k[j][1].y);
    const uint4 k1 = make_uint4(t.k[j][0].z, t.k[j][1].z, t.k[j][0].w, t.k[j][1].w);
    om_mma(c[0], k0, hi.x, hi.y), om_mma(c[1], k0, lo.x, lo.y);
    om_mma(c[0], k1, hi.z, hi.w), om_mma(c[1], k1, lo.z, lo.w);
  }
  float p[4], f[2];
#pragma unroll
  for (int i = 0; i < 4; i++) p[i] = first + row + i / 2 * 8 < end ? c[0][i] + c[1][i] : -OM_INFINITY;
#pragma unroll
  for (int e = 0; e < 2; e++) {
    float top = fmaxf(p[e], p[2 + e]);
#pragma unroll
    for (int d = 4; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    top = fmaxf(top, a.top[e]); /* finite: every tile has a position that counts */
    f[e] = om_exp2(a.top[e] - top);
    a.top[e] = top;
    p[e] = om_exp2(p[e] - top), p[2 + e] = om_exp2(p[2 + e] - top);
    a.mass[e] = a.mass[e] * f[e] + p[e] + p[2 + e];
  }
  u32 hi[2], lo[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u32 x = om_pack(p[2 * half], p[2 * half + 1]);
    const float2 y = om_unpack(x);
    hi[half] = om_turn(x), lo[half] = om_turn(om_pack(p[2 * half] - y.x, p[2 * half + 1] - y.y));
  }
#pragma unroll
  for (int j = 0; j < OM_DIM_BLOCKS; j++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint4 v0 = t.v[j][0], v1 = t.v[j][1];
      const uint4 v = i ? make_uint4(v0.z, v0.w, v1.z, v1.w) : make_uint4(v0.x, v0.y, v1.x, v1.y);
      float (&sum)[4] = a.sum[j][i];
      sum[0] *= f[0], sum[1] *= f[1], sum[2] *= f[0], sum[3] *= f[1];
      om_mma(sum, v, hi[0], hi[1]), om_mma(sum, v, lo[0], lo[1]);
    }
}

__device__ __forceinline__ void om_begin(om_softmax &a) {
  a = {};
  a.top[0] = a.top[1] = -OM_INFINITY;
}

/* What another warp left is added; both had a tile, so no largest score is infinite. */
__device__ __forceinline__ void om_add(om_softmax &a, const float *other, int row, int quad) {
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int h = 2 * quad + e;
    if (h >= OM_HEADS_AT) continue;
    const float *const from = other + h * OM_MERGED;
    const float2 m = *(const float2 *)(from + OM_MASS_AT);
    const float top = fmaxf(a.top[e], m.x), f = om_exp2(a.top[e] - top), g = om_exp2(m.x - top);
    a.top[e] = top;
    a.mass[e] = a.mass[e] * f + (row == 0 ? g * m.y : 0.0f); /* rows' masses are added up by om_leave */
#pragma unroll
    for (int j = 0; j < OM_DIM_BLOCKS; j++) {
      const float4 x = *(const float4 *)(from + 32 * j + 4 * row);
      a.sum[j][0][e] = a.sum[j][0][e] * f + g * x.x, a.sum[j][0][2 + e] = a.sum[j][0][2 + e] * f + g * x.y;
      a.sum[j][1][e] = a.sum[j][1][e] * f + g * x.z, a.sum[j][1][2 + e] = a.sum[j][1][2 + e] * f + g * x.w;
    }
  }
  __syncwarp(); /* they lie where this warp's will */
}

/* What a warp found, for the others: sums, largest score and mass of each head. */
__device__ __forceinline__ void om_leave(om_softmax &a, float *mine, bool any, int row, int quad) {
#pragma unroll
  for (int e = 0; e < 2; e++) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) a.mass[e] += __shfl_xor_sync(~0u, a.mass[e], d);
    const int h = 2 * quad + e;
    if (h >= OM_HEADS_AT) continue;
    float *const to = mine + h * OM_MERGED;
    if (row == 0) *(float2 *)(to + OM_MASS_AT) = make_float2(a.top[e], a.mass[e]);
    if (any)
#pragma unroll
      for (int j = 0; j < OM_DIM_BLOCKS; j++) /* dimensions row / 2 * 8 + row % 2 and + 2, + 4, + 6 of these 32 */
        *(float4 *)(to + 32 * j + 4 * row) =
            make_float4(a.sum[j][0][e], a.sum[j][0][2 + e], a.sum[j][1][e], a.sum[j][1][2 + e]);
  }
}
#endif

/* Row h of a group's new values (queries, then the key, then the value), by one warp. First what it is made of, and a
 * look at it, for rows that there are. */
struct om_row {
  float4 cosine, sine, gain;
  const char *at[1];
  uint4 w[1];
};
__device__ __forceinline__ om_row om_row_early(const om_state &s, int h, int rows, const char *from, int position,
                                               const float *gains, int lane) {
  const bool in = lane < OM_HEAD_DIM / 4 && h < rows;
  const size_t turn = (size_t)position * (OM_HEAD_DIM / 2) + 4 * lane % (OM_HEAD_DIM / 2);
  const float4 none = make_float4(1, 1, 1, 1);
  om_row r;
  r.at[0] = in ? from + ((size_t)h * OM_HEAD_DIM + 4 * lane) * 4 : nullptr;
  om_look_all(r.at, r.w);
  r.cosine = in ? *(const float4 *)(s.p->cosines + turn) : none, r.sine = in ? *(const float4 *)(s.p->sines + turn) : none;
  r.gain = OM_QK_NORM && in && h <= OM_GROUP ? *(const float4 *)(gains + 4 * lane) : none;
  return r;
}
/* Then, when it is there, normed, rotated, and put where the products read it; keys and values also into the cache,
 * rounded as later steps will read them. */
__device__ __forceinline__ void om_new_row(const om_state &s, int h, om_row &r, u32 mark, char *queries, char *fresh,
                                           char *cache, int lane) {
  constexpr int HALF = OM_HEAD_DIM / 8; /* lanes of half a head */
  const bool in = lane < 2 * HALF;
  const float4 gain = r.gain, cosine = r.cosine, sine = r.sine;
  uint4 (&w)[1] = r.w;
  om_look_again<1, 0>(s, r.at, mark, 0, OM_EDGE_QKV, w);
  float x[4] = {om_single(w[0].x), om_single(w[0].y), om_single(w[0].z), om_single(w[0].w)};
  if (h <= OM_GROUP) {
    float root = 1.0f;
    if (OM_QK_NORM) {
      float squares = x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3];
#pragma unroll
      for (int d = 16; d; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
      root = om_rsqrt(squares * (1.0f / OM_HEAD_DIM) + OM_EPS);
    }
    if (h < OM_GROUP) root *= OM_SCALE;
    const float g[4] = {gain.x, gain.y, gain.z, gain.w}, c[4] = {cosine.x, cosine.y, cosine.z, cosine.w};
    const float n[4] = {sine.x, sine.y, sine.z, sine.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float mine = x[i] * root * g[i], other = __shfl_sync(~0u, mine, lane < HALF ? lane + HALF : lane - HALF);
      x[i] = mine * c[i] + (lane < HALF ? -other : other) * n[i];
    }
  }
  if (!in) return;
#if OM_FP32
  const float4 all = make_float4(x[0], x[1], x[2], x[3]);
  *(float4 *)((h < OM_GROUP ? queries + h * OM_Q_STRIDE : fresh + (h - OM_GROUP) * OM_NEWEST) + lane * 16) = all;
  if (h >= OM_GROUP) *(float4 *)(cache + lane * 16) = all;
#else
  const u32 a = om_pack(x[0], x[1]), b = om_pack(x[2], x[3]);
  if (h < OM_GROUP) {
    const float2 y = om_unpack(a), z = om_unpack(b);
    *(uint2 *)(queries + h * OM_Q_STRIDE + lane * 8) = make_uint2(a, b);
    *(uint2 *)(queries + (OM_Q_ROWS + h) * OM_Q_STRIDE + lane * 8) =
        make_uint2(om_pack(x[0] - y.x, x[1] - y.y), om_pack(x[2] - z.x, x[3] - z.y));
  } else {
    *(uint2 *)(fresh + (h - OM_GROUP) * OM_NEWEST + lane * 8) = make_uint2(a, b);
    *(uint2 *)(cache + lane * 8) = make_uint2(a, b);
  }
#endif
}

#if OM_STAGED
/* The first tile of each of the first OM_STAGED warps of this block's first item of a layer: copied into shared memory
 * from the beginning of the layer on. No register waits for it, so that nothing else waits behind it. */
__device__ __forceinline__ char *om_staging(int warp) {
  return om_memory + OM_AT_STAGED + warp * (32 * OM_Q_STRIDE);
}
__device__ __forceinline__ void om_stage(const om_state &s) {
  const om_launch *p = s.p;
  const int item = s.turn, warp = s.warp(), lane = s.lane();
  if (item >= OM_ITEMS || warp >= OM_STAGED) return;
  const om_range range = om_range_of(p, s.step, item);
  const int start = range.lo + 16 * warp, rows = range.old - start;
  const size_t row = (((size_t)s.layer * OM_BATCH + range.slot) * OM_KV_HEADS + range.head) * OM_CONTEXT + start;
  char *const to = om_staging(warp);
  for (int i = lane; i < 16 * (OM_HEAD_DIM / 8); i += 32) {
    const int r = i / (OM_HEAD_DIM / 8), at = i % (OM_HEAD_DIM / 8) * 16;
    const size_t from = (row + r) * (OM_HEAD_DIM * 2) + at;
    char *const k = to + r * OM_Q_STRIDE + at, *const v = k + 16 * OM_Q_STRIDE;
    if (r < rows) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(om_address(k)), "l"(p->keys + from) : "memory");
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(om_address(v)), "l"(p->values + from) : "memory");
    } else {
      *(uint4 *)k = *(uint4 *)v = make_uint4(0, 0, 0, 0);
    }
  }
}
#endif

#if OM_KV_RING
/* Tile `tile` of an item whose keys and values are chunks of the ring, from chunk `first` on: `rows` positions. */
__device__ __forceinline__ void om_take_tile(om_tile &t, u32 first, int tile, int rows, int row, int quad) {
  const u32 chunk = first + tile / OM_KV_TILES, slot = chunk % OM_STAGES;
  const char *const keys = om_memory + OM_AT_RING + slot * OM_CHUNK + tile % OM_KV_TILES * (32 * OM_HEAD_DIM);
  if (16 * tile < rows) om_wait(om_address(om.full) + 8 * slot, chunk / OM_STAGES & 1);
  t.take<2 * OM_HEAD_DIM, false>(keys, keys + OM_KV_TILES * (32 * OM_HEAD_DIM), rows - 16 * tile, row, quad);
}
/* The tile's part of its slot goes back to the loader, behind the products that it went into: see om_product. */
__device__ __forceinline__ void om_give_tile(const om_softmax &a, u32 first, int tile, int rows, int lane) {
  constexpr int EACH = OM_ARRIVALS / OM_KV_TILES;
  static_assert(OM_ARRIVALS % OM_KV_TILES == 0, "arrivals");
  const int in = tile % OM_KV_TILES;
  const bool last = in == OM_KV_TILES - 1 || 16 * (tile + 1) >= rows;
  bool read = om_is_sum(a.mass[0]) && om_is_sum(a.mass[1]);
#pragma unroll
  for (int j = 0; j < OM_DIM_BLOCKS; j++) read = read && om_is_sum(a.sum[j][0][0]) && om_is_sum(a.sum[j][1][0]);
  __syncwarp();
  if (16 * tile < rows && read && lane < (last ? OM_ARRIVALS - in * EACH : EACH))
    om_arrive(om_address(om.empty) + 8 * ((first + tile / OM_KV_TILES) % OM_STAGES));
}
#endif

/* What no head fills of the queries is zero. */
__device__ __forceinline__ void om_clear_queries(const om_state &s) {
  for (int i = s.thread(); i < OM_Q_PARTS * OM_Q_ROWS * (OM_Q_STRIDE / 16); i += OM_THREADS) {
    const int h = i / (OM_Q_STRIDE / 16) % OM_Q_ROWS, dim = i % (OM_Q_STRIDE / 16) * OM_LOOK;
    if (h >= OM_GROUP || dim >= OM_HEAD_DIM) *(uint4 *)(om_memory + i * 16) = make_uint4(0, 0, 0, 0);
  }
}

/* Where an item's first head has its place in rows of `row` pieces of `bytes`. */
__device__ __forceinline__ char *om_piece(char *base, int item, int row, int bytes) {
  const int head = item / (OM_KV_HEADS * OM_PIECES) * OM_HEADS + item / OM_PIECES % OM_KV_HEADS * OM_GROUP;
  return base + ((size_t)head * row + item % OM_PIECES) * bytes;
}

__device__ __forceinline__ void om_attend_item(om_state &s, int item, const char *qkv, char *pieces, char *masses,
                                               u32 mark, u32 use, const float *q_gain, const float *k_gain) {
  const om_launch *p = s.p;
  const int me = s.thread(), warp = me / 32, lane = me % 32, row = lane / 4, quad = lane % 4;
  const om_range range = om_range_of(p, s.step, item);
  const int slot = range.slot, head = range.head, length = range.length, lo = range.lo, hi = range.hi;
  if (hi <= lo) {
    constexpr int LOOKS = OM_HEAD_DIM / OM_LOOK;
    char *const out = om_piece(pieces, item, OM_PIECES, OM_HEAD_DIM * OM_IN), *const mass_out =
                                                                              om_piece(masses, item, OM_PIECES4, 4);
    const float none[OM_LOOK] = {};
    for (int i = me; i < OM_GROUP * LOOKS; i += OM_THREADS)
      om_put_look(out + i / LOOKS * (OM_PIECES * OM_HEAD_DIM * OM_IN) + i % LOOKS * 16, none, use);
    for (int i = me; i < OM_GROUP; i += OM_THREADS) om_put_single(mass_out + i * (OM_PIECES4 * 4), -OM_INFINITY, mark);
    return;
  }
  const bool fresh = hi == length;
  const int old = range.old;
  const size_t cache = (((size_t)s.layer * OM_BATCH + slot) * OM_KV_HEADS + head) * OM_CONTEXT;
  char *const keys = p->keys + cache * (OM_HEAD_DIM * OM_IN), *const values = p->values + cache * (OM_HEAD_DIM * OM_IN);
  char *const queries = om_memory, *const newest = queries + OM_Q_PARTS * OM_Q_ROWS * OM_Q_STRIDE;
  float *const merged = (float *)(newest + 2 * OM_NEWEST);
  const int start = lo + OM_POSITIONS * warp;
  const char *const from = qkv + ((size_t)slot * OM_QKV_ROWS + head * (OM_ROWS_QKV * OM_HEAD_DIM)) * 4;
  const int rows = fresh ? OM_ROWS_QKV : OM_GROUP;
  om_row r = om_row_early(s, warp, rows, from, length - 1, warp == OM_GROUP ? k_gain : q_gain, lane);
  om_tile t;
#if OM_KV_RING
  const u32 ring = s.chunk; /* all warps go on behind the item's chunks */
  s.chunk += (old - lo + 16 * OM_KV_TILES - 1) / (16 * OM_KV_TILES);
  om_take_tile(t, ring, warp, old - lo, row, quad);
#else
#if OM_STAGED
  if (item == s.turn && warp < OM_STAGED) { /* copied since the layer began */
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    t.take<OM_Q_STRIDE, true>(om_staging(warp), om_staging(warp) + 16 * OM_Q_STRIDE, 16, row, quad);
  } else /* in any case: registers that may be undefined are kept through the whole kernel */
#endif
    t.load(keys, values, start, old, row, quad);
#endif
  /* Values are turned while the queries are on their way, but for the eight positions with the newest. */
  const int newer = fresh && start <= old && old < start + OM_POSITIONS ? (old - start) / 8 : -1;
  if (newer != 0) t.turn<0>();
  if (newer != 1) t.turn<1>();
  if (!OM_DIRECT || item != s.turn) om_sync(); /* the memory of the inputs is free */
  om_waiting(s, 1);
  if (!OM_DIRECT) om_clear_queries(s); /* inputs of products were there */
  for (int h = warp; h < rows; h += OM_WARPS) {
    if (h != warp) r = om_row_early(s, h, rows, from, length - 1, h == OM_GROUP ? k_gain : q_gain, lane);
    om_new_row(s, h, r, mark, queries, newest,
               (h == OM_GROUP ? keys : values) + (size_t)(length - 1) * (OM_HEAD_DIM * OM_IN), lane);
  }
  om_sync();
  om_waiting(s, 0);
#pragma unroll 1
  for (int chunk = 0; chunk < OM_GROUP; chunk += OM_HEADS_AT) {
    om_softmax a;
    om_begin(a);
#pragma unroll 1
    for (int at = start; at < hi; at += OM_POSITIONS * OM_WARPS) {
      const bool other = at > start || (!OM_KV_RING && chunk > 0 && start + OM_POSITIONS * OM_WARPS < hi);
      const bool last = fresh && at <= old && old < at + OM_POSITIONS && (other || chunk == 0);
      if (other) { /* than the tile at hand */
#if OM_KV_RING
        om_take_tile(t, ring, (at - lo) / 16, old - lo, row, quad);
#else
        t.load(keys, values, at, old, row, quad);
#endif
      }
      if (last) t.add(newest, old - at, row, quad);
      if (other || (last && newer == 0)) t.turn<0>();
      if (other || (last && newer == 1)) t.turn<1>();
      om_fold(a, t, queries + chunk * OM_Q_STRIDE, at, hi, row, quad);
#if OM_KV_RING
      om_give_tile(a, ring, (at - lo) / 16, old - lo, lane);
#endif
    }
#if OM_HALVED /* first what the upper half of the warps found, if anything, then all that the lower half has */
#pragma unroll 1
    for (int side = hi - lo > OM_MERGING * OM_POSITIONS; side >= 0; side--) {
      float *const mine = merged + warp % OM_MERGING * (OM_HEADS_AT * OM_MERGED);
      if (warp / OM_MERGING == side) {
        if (side == 0 && start + OM_MERGING * OM_POSITIONS < hi) om_add(a, mine, row, quad);
        om_leave(a, mine, start < hi, row, quad);
      }
      om_sync();
    }
#else
    om_leave(a, merged + warp * (OM_HEADS_AT * OM_MERGED), start < hi, row, quad);
    om_sync();
#endif
    int again = item; /* where results go is worked out anew: kept, it would cost registers in the products */
    asm volatile("" : "+r"(again));
    char *const out = om_piece(pieces, again, OM_PIECES, OM_HEAD_DIM * OM_IN), *const mass_out =
                                                                               om_piece(masses, again, OM_PIECES4, 4);
    constexpr int EIGHTS = OM_HEAD_DIM / 8;
    const int some = min(OM_MERGING, (hi - lo + OM_POSITIONS - 1) / OM_POSITIONS); /* warps with a tile */
    for (int i = me; i < OM_HEADS_AT * EIGHTS; i += OM_THREADS) {
      const int h = i / EIGHTS, at = i % EIGHTS * 8;
      const float *const x = merged + h * OM_MERGED;
      if (chunk + h >= OM_GROUP) continue;
      float2 m[OM_MERGING];
      float top = -OM_INFINITY, mass = 0.0f, sum[8] = {};
#pragma unroll
      for (int w = 0; w < OM_MERGING; w++) {
        const float *const y = x + w * (OM_HEADS_AT * OM_MERGED) + OM_MASS_AT;
        m[w] = w < some ? *(const float2 *)y : make_float2(-OM_INFINITY, 0.0f);
      }
#pragma unroll
      for (int w = 0; w < OM_MERGING; w++) top = fmaxf(top, m[w].x);
#pragma unroll
      for (int w = 0; w < OM_MERGING; w++) {
        if (w >= some) continue;
        const float f = om_exp2(m[w].x - top);
        const float4 *const y = (const float4 *)(x + w * (OM_HEADS_AT * OM_MERGED) + at), a = y[0], b = y[1];
        mass += f * m[w].y;
        sum[0] += f * a.x, sum[2] += f * a.y, sum[4] += f * a.z, sum[6] += f * a.w;
        sum[1] += f * b.x, sum[3] += f * b.y, sum[5] += f * b.z, sum[7] += f * b.w;
      }
      const float r = om_reciprocal(mass);
#pragma unroll
      for (int j = 0; j < 8; j += OM_LOOK) {
        float x[OM_LOOK];
#pragma unroll
        for (int k = 0; k < OM_LOOK; k++) x[k] = sum[j + k] * r;
        om_put_look(out + ((chunk + h) * (OM_PIECES * OM_HEAD_DIM) + at + j) * OM_IN, x, use);
      }
      if (at == 0) om_put_single(mass_out + (chunk + h) * (OM_PIECES4 * 4), top + om_log2(mass), mark);
    }
    if (OM_GROUP > OM_HEADS_AT) om_sync();
  }
}
