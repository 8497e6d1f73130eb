/* Attention of one piece of one slot's context for one key-value head, by all warps of a block.
 *
 * Pieces are ranges of positions whose width depends on the length alone and seldom changes, and the same block always
 * has the same piece of a layer: so what it appends to the cache in one step it reads itself in the next, and the cache
 * needs no words; where the width changes, all blocks meet first. Keys and values of older positions are asked for before
 * the new queries are waited for. Softmax is online and in base 2; a piece's result is rounded to 16 bits.
 */
#define OM_POS_WARP (32 / OM_LANES_POS) /* positions that a warp takes side by side */
#define OM_STRIDE_POS (OM_WARPS * OM_POS_WARP)
#define OM_AHEAD (OM_GROUP > OM_HEADS_AT ? 2 : 3) /* positions of a lane in flight */
#define OM_ROWS_QKV (OM_GROUP + 2)
#define OM_TURNS ((OM_HEAD_DIM / 2 + 31) / 32)

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
__device__ __forceinline__ uint4 om_ldg(const char *at) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}
__device__ __forceinline__ void om_eight(uint4 v, float (&x)[8]) {
  const u32 u[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 t = om_unpack(u[i]);
    x[2 * i] = t.x, x[2 * i + 1] = t.y;
  }
}

struct om_softmax { /* of OM_HEADS_AT heads, this lane's 8 dimensions */
  float top[OM_HEADS_AT], mass[OM_HEADS_AT], sum[OM_HEADS_AT][8];
};

/* N positions (those not `valid` count as minus infinity). */
template <int N>
__device__ __forceinline__ void om_fold(om_softmax &a, const float (&q)[OM_HEADS_AT][8], const uint4 (&k)[N], const uint4 (&v)[N],
                                        const bool (&valid)[N]) {
  float score[OM_HEADS_AT][N];
#pragma unroll
  for (int u = 0; u < N; u++) {
    float x[8];
    om_eight(k[u], x);
#pragma unroll
    for (int h = 0; h < OM_HEADS_AT; h++) {
      float t = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; i++) t = fmaf(q[h][i], x[i], t);
#pragma unroll
      for (int d = OM_LANES_POS / 2; d; d /= 2) t += __shfl_xor_sync(~0u, t, d);
      score[h][u] = valid[u] ? t : -OM_INFINITY;
    }
  }
#pragma unroll
  for (int h = 0; h < OM_HEADS_AT; h++) {
    float top = a.top[h];
#pragma unroll
    for (int u = 0; u < N; u++) top = fmaxf(top, score[h][u]);
    const float base = top == -OM_INFINITY ? 0.0f : top, shrink = om_exp2(a.top[h] - base);
    a.top[h] = top, a.mass[h] *= shrink;
#pragma unroll
    for (int i = 0; i < 8; i++) a.sum[h][i] *= shrink;
#pragma unroll
    for (int u = 0; u < N; u++) {
      score[h][u] = om_exp2(score[h][u] - base);
      a.mass[h] += score[h][u];
    }
  }
#pragma unroll
  for (int u = 0; u < N; u++) {
    float x[8];
    om_eight(v[u], x);
#pragma unroll
    for (int h = 0; h < OM_HEADS_AT; h++)
#pragma unroll
      for (int i = 0; i < 8; i++) a.sum[h][i] = fmaf(score[h][u], x[i], a.sum[h][i]);
  }
}

__device__ __forceinline__ void om_attend_item(om_state &s, int item, const char *qkv, char *pieces, char *masses, u32 mark, u32 use,
                                               const float *q_gain, const float *k_gain) {
  const om_launch *p = s.p;
  const int slot = item / (OM_KV_HEADS * OM_PIECES), head = item / OM_PIECES % OM_KV_HEADS, piece = item % OM_PIECES;
  const int me = s.thread(), warp = me / 32, lane = me % 32;
  const int length = om_active(p, slot, s.step) ? p->position[slot] + s.step + 1 : 0;
  const int wide = om_wide(length);
  const int lo = piece * wide, hi = min(length, lo + wide);
  const size_t first = (size_t)slot * OM_HEADS + head * OM_GROUP; /* of the group's query heads */
  char *const out = pieces + (first * OM_PIECES + piece) * (OM_HEAD_DIM * 2);
  char *const mass_out = masses + (first * OM_PIECES4 + piece) * 4;
  if (hi <= lo) {
    for (int i = me; i < OM_GROUP * (OM_HEAD_DIM / 8); i += OM_THREADS)
      om_put_eight(out + i / (OM_HEAD_DIM / 8) * (OM_PIECES * OM_HEAD_DIM * 2) + i % (OM_HEAD_DIM / 8) * 16, 0, 0, 0, 0, use);
    for (int i = me; i < OM_GROUP; i += OM_THREADS) om_put_single(mass_out + i * (OM_PIECES4 * 4), -OM_INFINITY, mark);
    return;
  }
  const bool fresh = hi == length;
  const int old = fresh ? hi - 1 : hi;
  const size_t row = (((size_t)s.layer * OM_BATCH + slot) * OM_KV_HEADS + head) * OM_CONTEXT;
  char *const keys = p->keys + row * (OM_HEAD_DIM * 2), *const values = p->values + row * (OM_HEAD_DIM * 2);
  const int sub = lane / OM_LANES_POS, dims = lane % OM_LANES_POS * 8;
  const bool mine = dims < OM_HEAD_DIM;
  float *const raw = (float *)om_memory; /* queries, then the new key, then the new value */
  float *const merged = raw + OM_ROWS_QKV * OM_HEAD_DIM;

  const int start = lo + warp * OM_POS_WARP + sub;
  uint4 k[OM_AHEAD], v[OM_AHEAD];
  bool valid[OM_AHEAD];
#pragma unroll
  for (int u = 0; u < OM_AHEAD; u++) {
    const int at = start + u * OM_STRIDE_POS;
    valid[u] = at < old;
    k[u] = valid[u] && mine ? om_ldg(keys + ((size_t)at * OM_HEAD_DIM + dims) * 2) : make_uint4(0, 0, 0, 0);
    v[u] = valid[u] && mine ? om_ldg(values + ((size_t)at * OM_HEAD_DIM + dims) * 2) : make_uint4(0, 0, 0, 0);
  }
  float cosine[OM_TURNS], sine[OM_TURNS], gain[2][2 * OM_TURNS];
#pragma unroll
  for (int j = 0; j < OM_TURNS; j++) {
    const int at = lane + 32 * j;
    const bool in = at < OM_HEAD_DIM / 2;
    cosine[j] = in ? p->cosines[(size_t)(length - 1) * (OM_HEAD_DIM / 2) + at] : 0.0f;
    sine[j] = in ? p->sines[(size_t)(length - 1) * (OM_HEAD_DIM / 2) + at] : 0.0f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      gain[0][2 * j + half] = OM_QK_NORM && in ? q_gain[at + half * (OM_HEAD_DIM / 2)] : 1.0f;
      gain[1][2 * j + half] = OM_QK_NORM && in ? k_gain[at + half * (OM_HEAD_DIM / 2)] : 1.0f;
    }
  }
  om_sync(); /* the memory of the inputs is free */
  const int quads = (fresh ? OM_ROWS_QKV : OM_GROUP) * (OM_HEAD_DIM / 4);
  const char *const from = qkv + ((size_t)slot * OM_QKV_ROWS + head * (OM_ROWS_QKV * OM_HEAD_DIM)) * 4;
  om_waiting(s, 1);
  for (int base = me; base < quads; base += 2 * OM_THREADS) {
    const char *const at[2] = {from + base * 16, base + OM_THREADS < quads ? from + (base + OM_THREADS) * 16 : nullptr};
    uint4 w[2];
    om_read<2, true>(s, at, mark, OM_EDGE_QKV, w);
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (at[i]) *(uint4 *)(raw + 4 * (base + i * OM_THREADS)) = make_uint4(w[i].x & ~7u, w[i].y & ~7u, w[i].z & ~7u, w[i].w & ~7u);
  }
  om_sync();
  om_waiting(s, 0);
  for (int h = warp; h < (fresh ? OM_ROWS_QKV : OM_GROUP); h += OM_WARPS) {
    float *const x = raw + h * OM_HEAD_DIM;
    char *const cache = (h == OM_GROUP ? keys : values) + (size_t)(length - 1) * OM_HEAD_DIM * 2;
    float2 pair[OM_TURNS];
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < OM_TURNS; j++) {
      const int at = lane + 32 * j;
      pair[j] = at < OM_HEAD_DIM / 2 ? make_float2(x[at], x[at + OM_HEAD_DIM / 2]) : make_float2(0.0f, 0.0f);
      squares += pair[j].x * pair[j].x + pair[j].y * pair[j].y;
    }
    float root = 1.0f;
    if (OM_QK_NORM && h <= OM_GROUP) {
#pragma unroll
      for (int d = 16; d; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
      root = 1.0f / sqrtf(squares / OM_HEAD_DIM + OM_EPS);
    }
    if (h < OM_GROUP) root *= OM_SCALE;
#pragma unroll
    for (int j = 0; j < OM_TURNS; j++) {
      const int at = lane + 32 * j;
      if (at >= OM_HEAD_DIM / 2) continue;
      float a = pair[j].x, b = pair[j].y;
      if (h <= OM_GROUP) {
        const int which = h == OM_GROUP;
        a *= root * (which ? gain[1][2 * j] : gain[0][2 * j]), b *= root * (which ? gain[1][2 * j + 1] : gain[0][2 * j + 1]);
        const float t = a * cosine[j] - b * sine[j];
        b = b * cosine[j] + a * sine[j], a = t;
      }
      if (h >= OM_GROUP) { /* what later steps will read is what this one takes */
        const u32 both = om_pack(a, b);
        ((unsigned short *)cache)[at] = (unsigned short)both;
        ((unsigned short *)cache)[at + OM_HEAD_DIM / 2] = (unsigned short)(both >> 16);
        const float2 t = om_unpack(both);
        a = t.x, b = t.y;
      }
      x[at] = a, x[at + OM_HEAD_DIM / 2] = b;
    }
  }
  om_sync();

#pragma unroll 1
  for (int chunk = 0; chunk < OM_GROUP; chunk += OM_HEADS_AT) {
    float q[OM_HEADS_AT][8];
    om_softmax a;
#pragma unroll
    for (int h = 0; h < OM_HEADS_AT; h++) {
      a.top[h] = -OM_INFINITY, a.mass[h] = 0.0f;
      const bool in = mine && chunk + h < OM_GROUP;
      const float4 *const from = (const float4 *)(raw + (chunk + h) * OM_HEAD_DIM + dims);
      const float4 lo = in ? from[0] : make_float4(0, 0, 0, 0), hi = in ? from[1] : make_float4(0, 0, 0, 0);
      q[h][0] = lo.x, q[h][1] = lo.y, q[h][2] = lo.z, q[h][3] = lo.w;
      q[h][4] = hi.x, q[h][5] = hi.y, q[h][6] = hi.z, q[h][7] = hi.w;
#pragma unroll
      for (int i = 0; i < 8; i++) a.sum[h][i] = 0.0f;
    }
    if (chunk > 0) {
#pragma unroll
      for (int u = 0; u < OM_AHEAD; u++) {
        const int at = start + u * OM_STRIDE_POS;
        valid[u] = at < old;
        k[u] = valid[u] && mine ? om_ldg(keys + ((size_t)at * OM_HEAD_DIM + dims) * 2) : make_uint4(0, 0, 0, 0);
        v[u] = valid[u] && mine ? om_ldg(values + ((size_t)at * OM_HEAD_DIM + dims) * 2) : make_uint4(0, 0, 0, 0);
      }
    }
    om_fold<OM_AHEAD>(a, q, k, v, valid);
#pragma unroll 1
    for (int base = start + OM_AHEAD * OM_STRIDE_POS; base - sub < old; base += OM_AHEAD * OM_STRIDE_POS) {
      uint4 kk[OM_AHEAD], vv[OM_AHEAD];
      bool ok[OM_AHEAD];
#pragma unroll
      for (int u = 0; u < OM_AHEAD; u++) {
        const int at = base + u * OM_STRIDE_POS;
        ok[u] = at < old;
        kk[u] = ok[u] && mine ? om_ldg(keys + ((size_t)at * OM_HEAD_DIM + dims) * 2) : make_uint4(0, 0, 0, 0);
        vv[u] = ok[u] && mine ? om_ldg(values + ((size_t)at * OM_HEAD_DIM + dims) * 2) : make_uint4(0, 0, 0, 0);
      }
      om_fold<OM_AHEAD>(a, q, kk, vv, ok);
    }
    if (fresh && warp == OM_WARPS - 1) { /* the newest position, from shared memory */
      uint4 kk[1], vv[1];
      const bool ok[1] = {sub == 0};
      const float *const key = raw + OM_GROUP * OM_HEAD_DIM + dims, *const value = key + OM_HEAD_DIM;
      u32 t[8];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        t[i] = mine ? om_pack(key[2 * i], key[2 * i + 1]) : 0;
        t[4 + i] = mine ? om_pack(value[2 * i], value[2 * i + 1]) : 0;
      }
      kk[0] = make_uint4(t[0], t[1], t[2], t[3]), vv[0] = make_uint4(t[4], t[5], t[6], t[7]);
      om_fold<1>(a, q, kk, vv, ok);
    }
#pragma unroll
    for (int h = 0; h < OM_HEADS_AT; h++) {
#pragma unroll
      for (int d = OM_LANES_POS; d < 32; d *= 2) {
        const float top = __shfl_xor_sync(~0u, a.top[h], d), mass = __shfl_xor_sync(~0u, a.mass[h], d);
        const float both = fmaxf(a.top[h], top), base = both == -OM_INFINITY ? 0.0f : both;
        const float f = om_exp2(a.top[h] - base), g = om_exp2(top - base);
        a.top[h] = both, a.mass[h] = a.mass[h] * f + mass * g;
#pragma unroll
        for (int i = 0; i < 8; i++) a.sum[h][i] = a.sum[h][i] * f + __shfl_xor_sync(~0u, a.sum[h][i], d) * g;
      }
      float *const to = merged + (warp * OM_HEADS_AT + h) * (OM_HEAD_DIM + 2);
      if (sub == 0 && mine)
#pragma unroll
        for (int i = 0; i < 8; i += 2) *(float2 *)(to + dims + i) = make_float2(a.sum[h][i], a.sum[h][i + 1]);
      if (lane == 0) to[OM_HEAD_DIM] = a.top[h], to[OM_HEAD_DIM + 1] = a.mass[h];
    }
    om_sync();
    constexpr int EIGHTS = OM_HEAD_DIM / 8, NEXT = OM_HEADS_AT * (OM_HEAD_DIM + 2);
    for (int i = me / OM_WARPS; i < (OM_HEADS_AT * EIGHTS + 32 / OM_WARPS - 1) / (32 / OM_WARPS) * (32 / OM_WARPS); i += 32) { /* a lane for each warp's sums */
      const int h = min(i / EIGHTS, OM_HEADS_AT - 1), at = i % EIGHTS * 8;
      const float *const x = merged + me % OM_WARPS * NEXT + h * (OM_HEAD_DIM + 2);
      const float2 m = *(const float2 *)(x + OM_HEAD_DIM);
      float top = m.x;
#pragma unroll
      for (int d = 1; d < OM_WARPS; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
      const float f = om_exp2(m.x - top);
      float mass = f * m.y, sum[8];
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const float2 t = *(const float2 *)(x + at + j);
        sum[j] = f * t.x, sum[j + 1] = f * t.y;
      }
#pragma unroll
      for (int d = 1; d < OM_WARPS; d *= 2) {
        mass += __shfl_xor_sync(~0u, mass, d);
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] += __shfl_xor_sync(~0u, sum[j], d);
      }
      if (me % OM_WARPS || i >= OM_HEADS_AT * EIGHTS || chunk + h >= OM_GROUP) continue;
      const float r = 1.0f / mass;
      om_put_eight(out + (chunk + h) * (OM_PIECES * OM_HEAD_DIM * 2) + at * 2, om_pack(sum[0] * r, sum[1] * r),
                   om_pack(sum[2] * r, sum[3] * r), om_pack(sum[4] * r, sum[5] * r), om_pack(sum[6] * r, sum[7] * r), use);
      if (at == 0) om_put_single(mass_out + (chunk + h) * (OM_PIECES4 * 4), top + log2f(mass), mark);
    }
    om_sync();
  }
}
