/* From what other blocks wrote to a product's inputs: rows of OM_IN bytes an element in shared memory, slot b's column c
 * at OM_IN * (c / 32 * 32 * BATCH + 32 * b + c % 32) bytes; a lane reads 16 bytes of a slot's 32 columns.
 *
 * Every block does this for itself; reading is waiting. A norm is split in two: the gain is multiplied before the
 * row is rounded to 16 bits, the reciprocal root (one number a slot) after the product, so one pass is enough.
 */
#define OM_TEAM (OM_WARPS / OM_BATCH2) /* warps of a slot; OM_BATCH2: the batch, rounded up to a power of two */

__device__ __forceinline__ u32 om_input(int slot, int col) {
  return om_address(om_memory) + (col / 32 * (32 * OM_BATCH) + slot * 32 + col % 32) * OM_IN;
}
__device__ __forceinline__ void om_sts(u32 at, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}
__device__ __forceinline__ void om_sts2(u32 at, u32 v, u32 w) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(v), "r"(w) : "memory");
}

/* Four columns of a slot. */
__device__ __forceinline__ void om_put_inputs(int slot, int col, float a, float b, float c, float d) {
#if OM_FP32
  *(float4 *)(om_memory + (om_input(slot, col) - om_address(om_memory))) = make_float4(a, b, c, d);
#else
  om_sts2(om_input(slot, col), om_pack(a, b), om_pack(c, d));
#endif
}

/* While a block waits for others, its loader has less on the way (OM_FLIGHT_WAITING): values go first. */
__device__ __forceinline__ void om_waiting(const om_state &s, int on) {
  if (OM_FLIGHT_WAITING < OM_FLIGHT && s.thread() == 0) *(volatile int *)&om.waiting = on;
}

/* A row of the embedding, four columns. */
__device__ __forceinline__ float4 om_embedding(const om_launch *p, int token, int col) {
  const int in = col % 32, lane = token % 8 * 4 + in / 8, step = in / 4 % 2, half = token % 16 / 8;
  using Format = om_format<OM_OUTER_BITS>;
  const char *const slab = p->weights + OM_AT_EMBED + ((size_t)(token / 16) * OM_HIDDEN_K + col / 32) * Format::BYTES;
#if OM_OUTER_BITS == 8
  const u32 w = *(const u32 *)(slab + lane * 16 + step * 8 + half * 4);
  const float2 a = om_unpack(Format::low(w)), b = om_unpack(Format::high(w));
  const float r = *(const float *)(p->weights + OM_AT_EMBED_SCALES + (size_t)token * 4) * OM_TINY;
  return make_float4(a.x * r, a.y * r, b.x * r, b.y * r);
#elif OM_OUTER_BITS == 32
  return *(const float4 *)(slab + ((half * 2 + token % 2) * 32 + token % 8 / 2 * 8 + in / 4) * 16);
#else
  const char *const at = slab + step * 512 + lane * 16 + half * 4;
  const float2 a = om_unpack(*(const u32 *)at), b = om_unpack(*(const u32 *)(at + 8));
  return make_float4(a.x, a.y, b.x, b.y);
#endif
}

__device__ __forceinline__ float om_root(int slot) {
  float sum = 0.0f;
  if (slot < OM_BATCH)
#pragma unroll
    for (int i = 0; i < OM_TEAM; i++) sum += om.squares[slot * OM_TEAM + i];
  return 1.0f / sqrtf(sum / OM_HIDDEN + OM_EPS);
}

/* The residual stream (SPLIT partial sums, added in order; or the embedding), times a gain, into the inputs; the
 * block's own rows [from, to) are kept for the next addition. Gives the reciprocal roots of the lane's two slots. */
template <int SPLIT, bool FIRST>
__device__ __forceinline__ float2 om_fill_norm(om_state &s, const char *stream, u32 mark, int edge, const float *gain,
                                               int from, int to) {
  constexpr int ALL = OM_HIDDEN_K * 8, STRIDE = OM_TEAM * 32,
                EACH = (ALL + STRIDE - 1) / STRIDE; /* four columns each */
  constexpr int CAP = SPLIT >= 8 ? 1 : 8 / SPLIT, N = EACH < CAP ? EACH : CAP;
  /* fp16 could overflow without the root: rows wait for it in registers (OM_KEPT), or are read a second time */
  constexpr bool KEEPS = OM_KEPT && !OM_ROOT_LATE && EACH <= N && N <= 2; /* more would be spilled */
  constexpr int PASSES = OM_ROOT_LATE || KEEPS ? 1 : 2;
  float4 kept[N];
  const int warp = s.warp(), slot = warp / OM_TEAM, first = warp % OM_TEAM * 32 + s.lane();
  float *const residual = (float *)(om_memory + OM_AT_RESIDUAL) + slot * OM_RESIDUAL_ROWS;
  float root = 1.0f; /* of this warp's slot: fp16 alone */
  om_sync(); /* the inputs of the product before are no longer read */
  om_waiting(s, 1);
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    float squares = 0.0f;
    if (slot < OM_BATCH) {
      const int token = FIRST ? om.token[slot] : 0;
      for (int base = first; base < ALL; base += STRIDE * N) {
        float4 g[N];
        uint4 w[SPLIT][N];
#pragma unroll
        for (int i = 0; i < N; i++) {
          const int col = 4 * (base + i * STRIDE);
          g[i] = col < OM_HIDDEN_ROWS ? *(const float4 *)(gain + col) : make_float4(0, 0, 0, 0);
        }
        if (!FIRST) {
          const char *at[N * SPLIT];
          uint4 all[N * SPLIT];
#pragma unroll
          for (int k = 0; k < SPLIT; k++)
#pragma unroll
            for (int i = 0; i < N; i++) {
              const int col = 4 * (base + i * STRIDE);
              at[k * N + i] =
                  col < OM_HIDDEN_ROWS ? stream + (((size_t)k * OM_BATCH + slot) * OM_HIDDEN_ROWS + col) * 4 : nullptr;
            }
          om_read<N * SPLIT, true>(s, at, mark, edge, all);
#pragma unroll
          for (int k = 0; k < SPLIT; k++)
#pragma unroll
            for (int i = 0; i < N; i++) w[k][i] = all[k * N + i];
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
          const int col = 4 * (base + i * STRIDE);
          float4 x = make_float4(0, 0, 0, 0);
          if (FIRST) {
            if (col < OM_HIDDEN_ROWS) x = om_embedding(s.p, token, col);
          } else {
#pragma unroll
            for (int k = 0; k < SPLIT; k++) {
              x.x += om_single(w[k][i].x), x.y += om_single(w[k][i].y);
              x.z += om_single(w[k][i].z), x.w += om_single(w[k][i].w);
            }
          }
          if (col >= from && col < to && pass == 0) *(float4 *)(residual + col - from) = x;
          squares += (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w);
          const float r = OM_ROOT_LATE ? 1.0f : root;
          if (KEEPS)
            kept[i] = make_float4(x.x * g[i].x, x.y * g[i].y, x.z * g[i].z, x.w * g[i].w);
          else if (col < OM_HIDDEN_K * 32 && pass == PASSES - 1)
            om_put_inputs(slot, col, x.x * g[i].x * r, x.y * g[i].y * r, x.z * g[i].z * r, x.w * g[i].w * r);
        }
      }
    }
    if (pass == 0) {
#pragma unroll
      for (int d = 16; d; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
      if (s.lane() == 0) om.squares[warp] = squares;
    }
    om_sync();
    if (!OM_ROOT_LATE && pass == 0) root = om_root(slot);
  }
  if (KEEPS) {
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int col = 4 * (first + i * STRIDE);
      if (slot < OM_BATCH && col < OM_HIDDEN_K * 32)
        om_put_inputs(slot, col, kept[i].x * root, kept[i].y * root, kept[i].z * root, kept[i].w * root);
    }
    om_sync();
  }
  om_waiting(s, 0);
  const int quad = s.quad();
  return OM_ROOT_LATE ? make_float2(om_root(2 * quad), om_root(2 * quad + 1)) : make_float2(1.0f, 1.0f);
}

/* Attention's pieces, joined, as the inputs of part `part` of the output projection: OM_LOOK columns a thread. */
__device__ __forceinline__ void om_fill_attention(om_state &s, const char *pieces, const char *masses, u32 mark,
                                                  u32 use, int part) {
  constexpr int COLS = OM_Q_K * 32 / OM_O_SPLIT, LOOKS = COLS / OM_LOOK, ALL = LOOKS * OM_BATCH, N = OM_PIECES,
                M = OM_PIECES4 / 4;
  const int me = s.thread();
  om_sync();
  om_waiting(s, 1);
#pragma unroll 1
  for (int base = me; base < ALL; base += OM_THREADS) {
    const int slot = base / LOOKS, in = base % LOOKS * OM_LOOK, col = part * COLS + in, head = col / OM_HEAD_DIM;
    const bool here = col < OM_HEADS * OM_HEAD_DIM;
    const char *at[N];
    const char *const mass_at = masses + ((size_t)slot * OM_HEADS + head) * (OM_PIECES4 * 4);
    uint4 w[N], m[M];
#pragma unroll
    for (int k = 0; k < N; k++)
      at[k] = here ? pieces + ((((size_t)slot * OM_HEADS + head) * OM_PIECES + k) * OM_HEAD_DIM + col % OM_HEAD_DIM) *
                                  OM_IN
                   : nullptr;
#pragma unroll
    for (int k = 0; k < M; k++) m[k] = here ? om_look(mass_at + k * 16) : make_uint4(0, 0, 0, 0);
#if !OM_MASS_BESIDE
    om_read<N, false>(s, at, use, OM_EDGE_ATTEND, w);
#else /* what is looked at after the pieces comes a whole look later */
#pragma unroll
    for (int k = 0; k < N; k++) w[k] = here ? om_look(at[k]) : make_uint4(0, 0, 0, 0);
#endif
    om_patience wait;
    float mass[OM_PIECES4];
    for (;;) {
      bool missing = false;
#pragma unroll
      for (int k = 0; k < M; k++) {
        mass[4 * k] = __uint_as_float(m[k].x), mass[4 * k + 1] = __uint_as_float(m[k].y);
        mass[4 * k + 2] = __uint_as_float(m[k].z), mass[4 * k + 3] = __uint_as_float(m[k].w);
      }
#pragma unroll
      for (int k = 0; k < N; k++) missing |= here && (__float_as_uint(mass[k]) & OM_MARKS) != mark;
#if OM_MASS_BESIDE
      const bool masses_missing = missing;
#pragma unroll
      for (int k = 0; k < N; k++) missing |= here && !om_eights(w[k], use);
      if (!missing || wait.over(s, OM_EDGE_ATTEND, mark, m[0].x & OM_MARKS)) break;
#pragma unroll
      for (int k = 0; k < N; k++)
        if (here && !om_eights(w[k], use)) w[k] = om_look(at[k]);
      if (!masses_missing) continue;
#else
      if (!missing || wait.over(s, OM_EDGE_ATTEND, mark, m[0].x & OM_MARKS)) break;
#endif
#pragma unroll
      for (int k = 0; k < M; k++) m[k] = om_look(mass_at + k * 16);
    }
    float top = -OM_INFINITY, total = 0.0f, sum[OM_LOOK] = {};
#pragma unroll
    for (int k = 0; k < N; k++) {
      mass[k] = om_single(__float_as_uint(mass[k]));
      top = fmaxf(top, mass[k]);
    }
#pragma unroll
    for (int k = 0; k < N; k++) {
      const float f = mass[k] == -OM_INFINITY ? 0.0f : om_exp2(mass[k] - top);
      float x[OM_LOOK];
      om_values(w[k], x);
      total += f;
#pragma unroll
      for (int i = 0; i < OM_LOOK; i++) sum[i] += f * x[i];
    }
    const float r = here && total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll
    for (int i = 0; i < OM_LOOK; i += 4)
      om_put_inputs(slot, in + i, sum[i] * r, sum[i + 1] * r, sum[i + 2] * r, sum[i + 3] * r);
  }
  om_sync();
  om_waiting(s, 0);
}

/* The MLP's values as the inputs of part `part` of the down projection, as they are. */
__device__ __forceinline__ void om_fill_act(om_state &s, const char *act, u32 use, int part) {
  constexpr int COLS = OM_FFN_K * 32 / OM_DOWN_SPLIT, LOOKS = COLS / OM_LOOK, ALL = LOOKS * OM_BATCH;
  constexpr int EACH = (ALL + OM_THREADS - 1) / OM_THREADS, N = EACH < 8 ? EACH : 8;
  const int me = s.thread();
  om_sync();
  om_waiting(s, 1);
  for (int base = me; base < ALL; base += OM_THREADS * N) {
    const char *at[N];
    uint4 w[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int item = base + i * OM_THREADS, slot = item / LOOKS, col = part * COLS + item % LOOKS * OM_LOOK;
      at[i] = item < ALL && col < OM_UP_TILES * 8 ? act + ((size_t)slot * (OM_FFN_K * 32) + col) * OM_IN : nullptr;
    }
    om_read<N, false>(s, at, use, OM_EDGE_UP, w);
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int item = base + i * OM_THREADS;
      if (item >= ALL) continue;
#if OM_FP32
      float x[4];
      om_values(w[i], x);
      om_put_inputs(item / LOOKS, item % LOOKS * OM_LOOK, x[0], x[1], x[2], x[3]);
#else
      const u32 to = om_input(item / LOOKS, item % LOOKS * OM_LOOK);
      om_sts2(to, w[i].x, w[i].y), om_sts2(to + 8, w[i].z, w[i].w);
#endif
    }
  }
  om_sync();
  om_waiting(s, 0);
}

/* ---- what happens to a unit's sums: see om_product for who holds what ---- */
struct om_out { /* what they share: `early` reads before the product, so that its latency is hidden */
  struct Extra { /* of the lane's two rows; `scale`: of 8-bit weights alone */
    float2 bias, scale;
  };
  const om_state &s;
  char *values;
  const float *bias, *scales;
  int first; /* tile of unit 0 */
  u32 mark;
  __device__ __forceinline__ float2 rows(const float *x, int unit) const {
    const float *const at = x + (first + unit) * 16 + s.row();
    return make_float2(at[0], at[8]);
  }
  __device__ __forceinline__ Extra early(int unit) const {
    Extra x = {make_float2(0.0f, 0.0f), make_float2(1.0f, 1.0f)};
    if (bias) x.bias = rows(bias, unit);
    if (scales) x.scale = rows(scales, unit);
    return x;
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
      char *const to = values + ((size_t)slot * OM_QKV_ROWS + row) * 4;
      om_put_single(to, v[j] * r + b.x, mark);
      if (OM_QKV_ROWS % 16 == 0 || row + 8 < OM_QKV_ROWS) om_put_single(to + 32, v[2 + j] * r + b.y, mark);
    }
  }
};

struct om_out_residual : om_out { /* the part with the stream itself adds it, and the bias */
  const float *residual; /* null for other parts */
  int kept; /* first row that is kept */
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
      char *const to = values + ((size_t)slot * OM_HIDDEN_ROWS + row) * 4;
      om_put_single(to, lo, mark), om_put_single(to + 32, hi, mark);
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
      const float h = g / (1.0f + om_exp2(-1.4426950408889634f * g)) * u;
#if OM_FP32
      if (slot < OM_BATCH && (int)blockIdx.x != s.p->withhold - 1)
        om_put_single(values + ((size_t)slot * (OM_FFN_K * 32) + (first + unit) * 8 + row) * 4, h, mark);
#else
      const float next = __shfl_down_sync(~0u, h, 4);
      const u32 x = om_pack(h, next), y = __shfl_down_sync(~0u, x, 8); /* of even rows; the row after the next */
      const u32 z = __shfl_down_sync(~0u, x, 16), w = __shfl_down_sync(~0u, y, 16);
      if (slot < OM_BATCH && row == 0 && (int)blockIdx.x != s.p->withhold - 1)
        om_put_eight(values + ((size_t)slot * (OM_FFN_K * 32) + (first + unit) * 8) * 2, x, y, z, w, mark);
#endif
    }
  }
};

struct om_out_head : om_out { /* keeps the best of the lane's two slots in registers */
  u32 tag;
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
        u64 *const to = (u64 *)values + (size_t)slot * (OM_VOCAB_TILES * 16) + id;
        om_put(to, __float_as_uint(lo), tag), om_put(to + 8, __float_as_uint(hi), tag);
      }
      /* a warp's units come in rising order: of equals, the smaller id stays */
      if (id < OM_VOCAB && lo > best[j]) best[j] = lo, best_id[j] = id;
      if (id + 8 < OM_VOCAB && hi > best[j]) best[j] = hi, best_id[j] = id + 8;
    }
  }
};
