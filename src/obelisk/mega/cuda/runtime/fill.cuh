/* From words to a product's inputs: 16-bit rows in shared memory, slot b's column c at
 * (c / 32) * 64 * BATCH + 64 * b + 2 * (c % 32) bytes, which is what a lane's A fragments read in 16 bytes.
 *
 * Every block does this for itself; reading is waiting. A norm is split in two: the gain is multiplied before the row is
 * rounded to 16 bits, the reciprocal root (one number a slot) after the product, so one pass over the words is enough.
 */
#define OM_TEAM (OM_WARPS / OM_BATCH2) /* warps of a slot; OM_BATCH2: the batch, rounded up to a power of two */

__device__ __forceinline__ u32 om_input(int slot, int col) {
  return om_address(om_memory) + (col / 32) * (64 * OM_BATCH) + slot * 64 + (col % 32) * 2;
}
__device__ __forceinline__ void om_sts(u32 at, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }
__device__ __forceinline__ void om_sts2(u32 at, u32 v, u32 w) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(v), "r"(w) : "memory");
}

/* A row of the embedding, two columns. */
__device__ __forceinline__ float2 om_embedding(const om_launch *p, int token, int col) {
  const int in = col % 32; /* 8 * quad + 4 * step + 2 * register + element */
  const char *at = p->weights + OM_AT_EMBED + ((size_t)(token / 16) * OM_HIDDEN_K + col / 32) * OM_BLOCK +
                   in / 4 % 2 * 512 + (token % 8 * 4 + in / 8) * 16 + in / 2 % 2 * 8 + token % 16 / 8 * 4;
  return om_unpack(*(const u32 *)at);
}

__device__ __forceinline__ float om_root(int slot) {
  float sum = 0.0f;
  if (slot < OM_BATCH)
#pragma unroll
    for (int i = 0; i < OM_TEAM; i++) sum += om.squares[slot * OM_TEAM + i];
  return 1.0f / sqrtf(sum / OM_HIDDEN + OM_EPS);
}

/* The residual stream (SPLIT partial sums, added in order; or the embedding), times a gain, into the inputs; the block's
 * own rows [from, to) are kept for the next addition. Gives the reciprocal roots of the lane's two slots. */
template <int SPLIT, bool FIRST>
__device__ __forceinline__ float2 om_fill_norm(om_state &s, const u64 *words, u32 tag, int edge, const float *gain, int from,
                                              int to) {
  constexpr int PAIRS = OM_HIDDEN / 2, ALL = OM_HIDDEN_K * 16, STRIDE = OM_TEAM * 32;
  constexpr int EACH = (ALL + STRIDE - 1) / STRIDE, CAP = SPLIT > 4 ? 1 : 8 / SPLIT, N = EACH < CAP ? EACH : CAP;
  constexpr int PASSES = OM_BF16 ? 1 : 2; /* fp16 could overflow without the root: it takes a second pass */
  const int slot = s.warp() / OM_TEAM, first = s.warp() % OM_TEAM * 32 + s.lane();
  float *const residual = (float *)(om_memory + OM_AT_RESIDUAL) + slot * OM_RESIDUAL_ROWS;
  float root = 1.0f; /* of this warp's slot: fp16 alone */
  om_sync(); /* the inputs of the product before are no longer read */
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    float squares = 0.0f;
    if (slot < OM_BATCH) {
      const int token = FIRST ? om.token[slot] : 0;
      for (int base = first; base < ALL; base += STRIDE * N) {
        float2 g[N];
        uint4 w[SPLIT][N];
        const int left = base < PAIRS ? (PAIRS - base + STRIDE - 1) / STRIDE : 0;
#pragma unroll
        for (int i = 0; i < N; i++) g[i] = i < left ? *(const float2 *)(gain + 2 * (base + i * STRIDE)) : make_float2(0, 0);
        if (!FIRST)
#pragma unroll
          for (int k = 0; k < SPLIT; k++)
            om_take<N>(s, words + ((size_t)k * OM_BATCH + slot) * OM_HIDDEN_ROWS + 2 * base, 2 * STRIDE, left, tag, edge, w[k]);
#pragma unroll
        for (int i = 0; i < N; i++) {
          const int col = 2 * (base + i * STRIDE);
          float2 x = make_float2(0.0f, 0.0f);
          if (FIRST) {
            if (i < left) x = om_embedding(s.p, token, col);
          } else {
#pragma unroll
            for (int k = 0; k < SPLIT; k++) x.x += __uint_as_float(w[k][i].x), x.y += __uint_as_float(w[k][i].z);
          }
          if (col >= from && col < to && pass == 0) *(float2 *)(residual + col - from) = x;
          squares += x.x * x.x + x.y * x.y;
          const float scale = OM_BF16 ? 1.0f : root;
          if (col < OM_HIDDEN_K * 32 && pass == PASSES - 1) om_sts(om_input(slot, col), om_pack(x.x * g[i].x * scale, x.y * g[i].y * scale));
        }
      }
    }
    if (pass == 0) {
#pragma unroll
      for (int d = 16; d; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
      if (s.lane() == 0) om.squares[s.warp()] = squares;
    }
    om_sync();
    if (!OM_BF16 && pass == 0) root = om_root(slot);
  }
  const int quad = s.quad();
  return OM_BF16 ? make_float2(om_root(2 * quad), om_root(2 * quad + 1)) : make_float2(1.0f, 1.0f);
}

/* Attention's pieces, joined, as the inputs of part `part` of the output projection. */
__device__ __forceinline__ void om_fill_attention(om_state &s, const u64 *words, u32 tag, int part) {
  constexpr int COLS = OM_Q_K * 32 / OM_O_SPLIT, QUADS = COLS / 4, ALL = QUADS * OM_BATCH;
  constexpr int EACH = (ALL + OM_THREADS - 1) / OM_THREADS, CAP = OM_PIECES > 8 ? 1 : OM_PIECES > 4 ? 2 : 4, N = EACH < CAP ? EACH : CAP;
  const int me = s.thread();
  om_sync();
  for (int base = me; base < ALL; base += OM_THREADS * N) {
    uint4 w[N][OM_PIECES];
    float mass[N][OM_PIECES];
    const u64 *from[N];
    bool here[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int at = base + i * OM_THREADS, slot = at / QUADS, col = part * COLS + at % QUADS * 4;
      from[i] = words + ((size_t)slot * OM_HEADS + col / OM_HEAD_DIM) * (OM_PIECES * OM_PART) + col % OM_HEAD_DIM / 2;
      here[i] = at < ALL && col < OM_HEADS * OM_HEAD_DIM;
#pragma unroll
      for (int k = 0; k < OM_PIECES; k++) {
        w[i][k] = make_uint4(0, here[i] ? ~tag : tag, 0, tag);
        mass[i][k] = -OM_INFINITY;
      }
    }
    om_patience wait;
    for (;;) {
      const u64 *missing = nullptr;
      u32 seen = tag;
#pragma unroll
      for (int i = 0; i < N; i++)
#pragma unroll
        for (int k = 0; k < OM_PIECES; k++)
          if (w[i][k].y != tag || w[i][k].w != tag) {
            const int in = (int)((from[i] - words) % OM_PART); /* the pair's place in its piece */
            w[i][k] = om_peek2(from[i] + k * OM_PART);
            const u64 m = om_peek(from[i] + k * OM_PART + OM_HEAD_DIM / 2 - in);
            mass[i][k] = __uint_as_float((u32)m);
            if ((u32)(m >> 32) != tag) w[i][k].y = (u32)(m >> 32);
          }
#pragma unroll
      for (int i = 0; i < N; i++)
#pragma unroll
        for (int k = 0; k < OM_PIECES; k++)
          if (w[i][k].y != tag || w[i][k].w != tag) missing = from[i] + k * OM_PART, seen = w[i][k].y;
      if (!missing || wait.over(s, OM_EDGE_ATTEND, tag, seen)) break;
#if OM_SPIN_ONE
      for (;;) {
        const uint4 x = om_peek2(missing);
        if ((x.y == tag && x.w == tag) || wait.over(s, OM_EDGE_ATTEND, tag, x.y)) break;
      }
#endif
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int at = base + i * OM_THREADS, slot = at / QUADS;
      float top = -OM_INFINITY, total = 0.0f;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int k = 0; k < OM_PIECES; k++) top = fmaxf(top, mass[i][k]);
#pragma unroll
      for (int k = 0; k < OM_PIECES; k++) {
        const float m = mass[i][k], f = m == -OM_INFINITY ? 0.0f : om_exp2(m - top);
        const float2 a = om_unpack(w[i][k].x), b = om_unpack(w[i][k].z);
        total += f;
        sum.x += f * a.x, sum.y += f * a.y, sum.z += f * b.x, sum.w += f * b.y;
      }
      const float r = total > 0.0f ? 1.0f / total : 0.0f;
      if (at < ALL) om_sts2(om_input(slot, at % QUADS * 4), om_pack(sum.x * r, sum.y * r), om_pack(sum.z * r, sum.w * r));
    }
  }
  om_sync();
}

/* The MLP's values as the inputs of part `part` of the down projection; they are 16 bits wide already. */
__device__ __forceinline__ void om_fill_act(om_state &s, const u64 *words, u32 tag, int part) {
  constexpr int COLS = OM_FFN_K * 32 / OM_DOWN_SPLIT, QUADS = COLS / 4, ALL = QUADS * OM_BATCH;
  constexpr int EACH = (ALL + OM_THREADS - 1) / OM_THREADS, N = EACH < 8 ? EACH : 8;
  const int me = s.thread();
  om_sync();
  for (int base = me; base < ALL; base += OM_THREADS * N) {
    uint4 w[N];
    const u64 *from[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int at = base + i * OM_THREADS, slot = at / QUADS, col = part * COLS + at % QUADS * 4;
      const bool here = at < ALL && col < OM_UP_TILES * 8;
      from[i] = words + (size_t)slot * (OM_FFN_K * 16) + col / 2;
      w[i] = here ? om_peek2(from[i]) : make_uint4(0, tag, 0, tag);
    }
    om_patience wait;
    for (;;) {
      const u64 *missing = nullptr;
      u32 seen = tag;
#pragma unroll
      for (int i = 0; i < N; i++)
        if (w[i].y != tag || w[i].w != tag) missing = from[i], seen = w[i].y;
      if (!missing || wait.over(s, OM_EDGE_UP, tag, seen)) break;
#if OM_SPIN_ONE
      for (;;) {
        const uint4 x = om_peek2(missing);
        if ((x.y == tag && x.w == tag) || wait.over(s, OM_EDGE_UP, tag, x.y)) break;
      }
#endif
#pragma unroll
      for (int i = 0; i < N; i++)
        if (w[i].y != tag || w[i].w != tag) w[i] = om_peek2(from[i]);
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int at = base + i * OM_THREADS;
      if (at < ALL) om_sts2(om_input(at / QUADS, at % QUADS * 4), w[i].x, w[i].z);
    }
  }
  om_sync();
}

/* ---- what happens to a unit's sums: see om_product for who holds what ---- */
struct om_out { /* what they share: `early` reads a bias before the product, so that its latency is hidden */
  const om_state &s;
  u64 *words;
  const float *bias;
  int first; /* tile of unit 0 */
  u32 tag;
  __device__ __forceinline__ float2 early(int unit) const {
    if (!bias) return make_float2(0.0f, 0.0f);
    const float *const at = bias + (first + unit) * 16 + s.row();
    return make_float2(at[0], at[8]);
  }
};

struct om_out_qkv : om_out {
  float2 root;
  __device__ __forceinline__ void put(int unit, const float (&v)[4], float2 b) const {
    const int quad = s.quad(), row = (first + unit) * 16 + s.row();
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int slot = 2 * quad + j;
      if (j >= OM_BATCH || slot >= OM_BATCH) continue;
      const float r = j ? root.y : root.x;
      u64 *const to = words + (size_t)slot * OM_QKV_ROWS + row;
      om_put(to, __float_as_uint(v[j] * r + b.x), tag);
      if (OM_QKV_ROWS % 16 == 0 || row + 8 < OM_QKV_ROWS) om_put(to + 8, __float_as_uint(v[2 + j] * r + b.y), tag);
    }
  }
};

struct om_out_residual : om_out { /* the part with the stream itself adds it, and the bias */
  const float *residual; /* null for other parts */
  int kept;              /* first row that is kept */
  __device__ __forceinline__ void put(int unit, const float (&v)[4], float2 b) const {
    const int quad = s.quad(), row = (first + unit) * 16 + s.row();
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int slot = 2 * quad + j;
      if (j >= OM_BATCH || slot >= OM_BATCH) continue;
      float lo = v[j] + b.x, hi = v[2 + j] + b.y;
      if (residual) {
        const float *const x = residual + slot * OM_RESIDUAL_ROWS + row - kept;
        lo += x[0], hi += x[8];
      }
      u64 *const to = words + (size_t)slot * OM_HIDDEN_ROWS + row;
      om_put(to, __float_as_uint(lo), tag), om_put(to + 8, __float_as_uint(hi), tag);
    }
  }
};

struct om_out_up : om_out { /* rows 0 to 7 of a tile are gates, 8 to 15 the same elements of up */
  float2 root;
  __device__ __forceinline__ void put(int unit, const float (&v)[4], float2 b) const {
    const int quad = s.quad(), row = s.row();
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if (j >= OM_BATCH) continue;
      const int slot = 2 * quad + j;
      const float r = j ? root.y : root.x, g = v[j] * r + b.x, u = v[2 + j] * r + b.y;
      const float h = g / (1.0f + om_exp2(-1.4426950408889634f * g)) * u, next = __shfl_down_sync(~0u, h, 4);
      if (slot < OM_BATCH && row % 2 == 0 && (int)blockIdx.x != s.p->withhold - 1)
        om_put(words + (size_t)slot * (OM_FFN_K * 16) + (first + unit) * 4 + row / 2, om_pack(h, next), tag);
    }
  }
};

struct om_out_head : om_out { /* keeps the best of the lane's two slots in registers */
  float2 root;
  float *best;
  int *best_id;
  __device__ __forceinline__ void put(int unit, const float (&v)[4], float2) const {
    const int quad = s.quad(), id = (first + unit) * 16 + s.row();
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int slot = 2 * quad + j;
      if (j >= OM_BATCH) continue;
      const float r = j ? root.y : root.x, lo = v[j] * r, hi = v[2 + j] * r;
      if (slot < OM_BATCH && s.p->keep_logits) {
        u64 *const to = words + (size_t)slot * (OM_VOCAB_TILES * 16) + id;
        om_put(to, __float_as_uint(lo), tag), om_put(to + 8, __float_as_uint(hi), tag);
      }
      /* a warp's units come in rising order: of equals, the smaller id stays */
      if (id < OM_VOCAB && lo > best[j]) best[j] = lo, best_id[j] = id;
      if (id + 8 < OM_VOCAB && hi > best[j]) best[j] = hi, best_id[j] = id + 8;
    }
  }
};
