/* From what other blocks wrote to a product's inputs: rows of OM_IN bytes an element in shared memory, slot b's column c
 * at OM_IN * (c / 32 * 32 * BATCH + 32 * b + c % 32) bytes; a lane reads 16 bytes of a slot's 32 columns. Those of
 * narrow weights are digits (digits.cuh).
 *
 * Every block does this for itself; reading is waiting. A norm is split in two: the gain is multiplied before the
 * row is rounded to 16 bits, the reciprocal root (one number a slot) after the product, so one pass is enough.
 */
#define OM_TEAM (OM_WARPS / OM_BATCH2) /* warps of a slot; OM_BATCH2: the batch, rounded up to a power of two */

__device__ __forceinline__ u32 om_input(int slot, int col) {
  return om_address(om_memory) + (col / 32 * (32 * OM_BATCH) + slot * 32 + col % 32) * OM_IN;
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

#if OM_OWN_HEAD /* the embedding is of another format than the head */
#undef OM_OUTER_BITS
#define OM_OUTER_BITS OM_EMBED_BITS
#endif
/* A row of the embedding, four columns. */
__device__ __forceinline__ float4 om_embedding(const om_launch *p, int token, int col) {
  const int in = col % 32, lane = token % 8 * 4 + in / 8, step = in / 4 % 2, half = token % 16 / 8;
  const char *const slab =
      p->weights + OM_AT_EMBED + ((size_t)(token / 16) * OM_HIDDEN_K + col / 32) * (OM_OUTER_BITS * 64);
#if OM_OUTER_BITS == 8
  const u32 w = *(const u32 *)(slab + lane * 16 + step * 8 + half * 4);
  const float r = *(const float *)(p->weights + OM_AT_EMBED_SCALES + (size_t)token * 4);
  return make_float4((float)((int)(w << 24) >> 24) * r, (float)((int)(w << 16) >> 24) * r,
                     (float)((int)(w << 8) >> 24) * r, (float)((int)w >> 24) * r);
#elif OM_OUTER_BITS == 32
  return *(const float4 *)(slab + ((half * 2 + token % 2) * 32 + token % 8 / 2 * 8 + in / 4) * 16);
#else
  const char *const at = slab + step * 512 + lane * 16 + half * 4;
  const float2 a = om_unpack(*(const u32 *)at), b = om_unpack(*(const u32 *)(at + 8));
  return make_float4(a.x, a.y, b.x, b.y);
#endif
}
#if OM_OWN_HEAD
#undef OM_OUTER_BITS
#define OM_OUTER_BITS OM_HEAD_BITS
#endif

__device__ __forceinline__ float om_root(int slot) {
  float sum = 0.0f;
  if (slot < OM_BATCH)
#pragma unroll
    for (int i = 0; i < OM_TEAM; i++) sum += om.squares[slot * OM_TEAM + i];
  return om_rsqrt(sum * (1.0f / OM_HIDDEN) + OM_EPS);
}

/* The residual stream (SPLIT partial sums, added in order; or the embedding), times a gain, into the inputs of weights
 * of BITS; the block's own rows [from, to) are kept for the next addition. Gives the reciprocal roots of the lane's two
 * slots. */
template <int BITS, int SPLIT, bool FIRST>
__device__ __forceinline__ float2 om_fill_norm(om_state &s, const char *stream, u32 mark, int edge, const float *gain,
                                               int from, int to) {
  constexpr int ALL = OM_HIDDEN_K * 8, STRIDE = OM_TEAM * 32,
                EACH = (ALL + STRIDE - 1) / STRIDE; /* four columns each */
  constexpr int CAP = SPLIT >= 8 ? 1 : 8 / SPLIT, N = EACH < CAP ? EACH : CAP;
  /* fp16 could overflow without the root: rows wait for it in registers (OM_KEPT), or are read a second time */
  constexpr bool LATE = OM_ROOT_LATE || BITS < 16; /* the root multiplies what the product gives */
  constexpr bool KEEPS = OM_KEPT && !LATE && EACH <= N && N <= 2; /* more would be spilled */
  constexpr int PASSES = LATE || KEEPS ? 1 : 2;
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
          om_read<N * SPLIT, 0>(s, at, mark, 0, edge, all);
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
          const float r = LATE ? 1.0f : root;
          if constexpr (BITS < 16) {
            const float y[4] = {x.x * g[i].x, x.y * g[i].y, x.z * g[i].z, x.w * g[i].w};
            om_put_digits<4>(slot, col, s.lane(), y, col < OM_HIDDEN_K * 32);
          } else if (KEEPS)
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
    if (!LATE && pass == 0) root = om_root(slot);
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
  return LATE ? make_float2(om_root(2 * quad), om_root(2 * quad + 1)) : make_float2(1.0f, 1.0f);
}

#if OM_ROUNDED
/* Where a stream has what every block reads, behind the parts: rows as the next product's inputs, squares of tiles. */
#define OM_AT_ROWS(split) ((size_t)(split) * OM_PART_BYTES)
#define OM_AT_SQUARES(split) (OM_AT_ROWS(split) + OM_BATCH * OM_HIDDEN_ROWS * 2)

/* The residual stream's rows as inputs: the blocks that ended them (om_end_rows) multiplied them by the gain and
 * rounded them, and say what their squares sum to. Of the fp32 rows a block reads those alone that it will add to,
 * [from, to). */
template <int SPLIT>
__device__ __forceinline__ float2 om_fill_rows(om_state &s, const char *stream, u32 mark, u32 use, int edge, int from,
                                               int to) {
  constexpr int EIGHTS = OM_HIDDEN_K * 4, ALL = EIGHTS * OM_BATCH, EACH = (ALL + OM_THREADS - 1) / OM_THREADS;
  constexpr int N = EACH < 8 ? EACH : 8, QUADS = OM_HIDDEN_TILES / 4, Q = (QUADS + OM_TEAM * 32 - 1) / (OM_TEAM * 32);
  const int me = s.thread(), warp = s.warp(), mine = (to - from) / 4, own = mine * OM_BATCH;
  const int team = warp / OM_TEAM, first = warp % OM_TEAM * 32 + s.lane();
  const char *const rows = stream + OM_AT_ROWS(SPLIT), *const squares = stream + OM_AT_SQUARES(SPLIT);
  float *const residual = (float *)(om_memory + OM_AT_RESIDUAL);
  const auto row_at = [&](int i) { /* of the rows that this block keeps */
    return i < own ? stream + ((size_t)(i / mine) * OM_HIDDEN_ROWS + from + i % mine * 4) * 4 : nullptr;
  };
  const auto keep = [&](int i, const uint4 &w) {
    if (i < own) *(float4 *)(residual + i / mine * OM_RESIDUAL_ROWS + i % mine * 4) = om_take_singles(w);
  };
  om_sync(); /* the inputs of the product before are no longer read */
  om_waiting(s, 1);
  float sum = 0.0f;
  for (int base = me; base - me < ALL; base += OM_THREADS * N) {
    const char *at[N + Q + 1];
    uint4 w[N + Q + 1];
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int item = base + i * OM_THREADS, slot = item / EIGHTS, col = item % EIGHTS * 8;
      at[i] = item < ALL && col < OM_HIDDEN_ROWS ? rows + ((size_t)slot * OM_HIDDEN_ROWS + col) * 2 : nullptr;
    }
#pragma unroll
    for (int q = 0; q < Q; q++) {
      const int quad = first + q * OM_TEAM * 32;
      const bool mine_too = base == me && team < OM_BATCH && quad < QUADS;
      at[N + q] = mine_too ? squares + ((size_t)team * QUADS + quad) * 16 : nullptr;
    }
    at[N + Q] = base == me ? row_at(me) : nullptr;
    om_read<N + Q + 1, N>(s, at, mark, use, edge, w);
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int item = base + i * OM_THREADS;
      if (item >= ALL) continue;
      const u32 to = om_input(item / EIGHTS, item % EIGHTS * 8);
      om_sts2(to, w[i].x, w[i].y), om_sts2(to + 8, w[i].z, w[i].w);
    }
#pragma unroll
    for (int q = 0; q < Q; q++) {
      const float4 x = om_take_singles(w[N + q]);
      sum += (x.x + x.y) + (x.z + x.w);
    }
    if (base == me) keep(me, w[N + Q]);
  }
  for (int i = me + OM_THREADS; i < own; i += OM_THREADS) { /* a few blocks keep many rows */
    const char *const at[1] = {row_at(i)};
    uint4 w[1];
    om_read<1, 0>(s, at, mark, 0, edge, w);
    keep(i, w[0]);
  }
#pragma unroll
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (s.lane() == 0) om.squares[warp] = sum;
  om_sync();
  om_waiting(s, 0);
  const int quad = s.quad();
  return make_float2(om_root(2 * quad), om_root(2 * quad + 1));
}

/* Four gains of the rows that this thread will end: read before they are wanted. */
__device__ __forceinline__ float4 om_early_gain(const om_state &s, const float *gain, int from, int to) {
  const int mine = (to - from) / 4, i = s.thread();
  return i < mine * OM_BATCH ? *(const float4 *)(gain + from + i % mine * 4) : make_float4(0, 0, 0, 0);
}

/* The rows [from, to) whose part 0 this block has in shared memory, the residual stream in it: the other parts are
 * added in order, and all that others read is written. */
template <int SPLIT>
__device__ __forceinline__ void om_end_rows(om_state &s, char *stream, const float *gain, const float4 &early, int from,
                                            int to, u32 mark, u32 use, int edge) {
  if (to <= from) return;
  const int mine = (to - from) / 4, own = mine * OM_BATCH, me = s.thread();
  const float *const residual = (const float *)(om_memory + OM_AT_RESIDUAL);
  om_sync(); /* the sums are there */
  for (int i = me; i - me % 32 < own; i += OM_THREADS) {
    const bool here = i < own;
    const int slot = here ? i / mine : 0, row = here ? from + i % mine * 4 : from;
    char *const to32 = stream + ((size_t)slot * OM_HIDDEN_ROWS + row) * 4;
    float4 x = *(const float4 *)(residual + slot * OM_RESIDUAL_ROWS + row - from);
    const float4 g = i == me ? early : *(const float4 *)(gain + row);
    if (SPLIT > 1) {
      constexpr int MORE = SPLIT > 1 ? SPLIT - 1 : 1;
      const char *at[MORE];
      uint4 w[MORE];
#pragma unroll
      for (int k = 0; k < MORE; k++) at[k] = here ? to32 + (size_t)(k + 1) * OM_PART_BYTES : nullptr;
      om_read<MORE, 0>(s, at, mark, 0, edge, w);
#pragma unroll
      for (int k = 0; k < MORE; k++) {
        const float4 y = om_take_singles(w[k]);
        x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
      }
    }
    float square = (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w);
    square += __shfl_xor_sync(~0u, square, 1), square += __shfl_xor_sync(~0u, square, 2);
    const u32 a = om_pack(x.x * g.x, x.y * g.y), c = __shfl_down_sync(~0u, a, 1);
    const float last = x.w * g.w; /* of every other thread's: the eighth column */
    const u32 b = om_pack(x.z * g.z, row % 8 ? om_marked16(last, use) : last), d = __shfl_down_sync(~0u, b, 1);
    if (!here) continue;
    om_put_singles(to32, x, mark);
    const size_t at = (size_t)slot * OM_HIDDEN_ROWS + row;
    if (row % 8 == 0) om_put_eight(stream + OM_AT_ROWS(SPLIT) + at * 2, a, b, c, d, use);
    if (row % 16 == 0) om_put_single(stream + OM_AT_SQUARES(SPLIT) + at / 16 * 4, square, mark);
  }
}
#endif

/* OM_LOOK columns of attention's pieces with their masses, joined; zeros where a thread is not `here`. */
__device__ __forceinline__ void om_join_pieces(const uint4 *w, const uint4 *m, bool here, float (&sum)[OM_LOOK]) {
  float mass[OM_PIECES4], top = -OM_INFINITY, total = 0.0f;
#pragma unroll
  for (int i = 0; i < OM_LOOK; i++) sum[i] = 0.0f;
#pragma unroll
  for (int k = 0; k < OM_PIECES4 / 4; k++) {
    mass[4 * k] = om_single(m[k].x), mass[4 * k + 1] = om_single(m[k].y);
    mass[4 * k + 2] = om_single(m[k].z), mass[4 * k + 3] = om_single(m[k].w);
  }
#pragma unroll
  for (int k = 0; k < OM_PIECES; k++) top = fmaxf(top, mass[k]);
#pragma unroll
  for (int k = 0; k < OM_PIECES; k++) {
    const float f = mass[k] == -OM_INFINITY ? 0.0f : om_exp2(mass[k] - top);
    float x[OM_LOOK];
    om_values(w[k], x);
    total += f;
#pragma unroll
    for (int i = 0; i < OM_LOOK; i++) sum[i] += f * x[i];
  }
  const float r = here && total > 0.0f ? om_reciprocal(total) : 0.0f;
#pragma unroll
  for (int i = 0; i < OM_LOOK; i++) sum[i] *= r;
}

/* Whether the masses of all pieces have this mark. */
__device__ __forceinline__ bool om_masses(const uint4 *m, u32 mark) {
  u32 other = 0;
#pragma unroll
  for (int k = 0; k < OM_PIECES; k++) {
    const uint4 &v = m[k / 4];
    other |= (k % 4 == 0 ? v.x : k % 4 == 1 ? v.y : k % 4 == 2 ? v.z : v.w) ^ mark;
  }
  return (other & OM_MARKS) == 0;
}

/* Attention's pieces, joined, as the inputs of part `part` of the output projection: OM_LOOK columns at a time, GO
 * of these looked at at once, since a look takes as long for one as for all. */
__device__ __forceinline__ void om_fill_attention(om_state &s, const char *pieces, const char *masses, u32 mark,
                                                  u32 use, int part) {
  constexpr int COLS = OM_Q_K * 32 / OM_O_SPLIT, LOOKS = COLS / OM_LOOK, ALL = LOOKS * OM_BATCH, N = OM_PIECES,
                M = OM_PIECES4 / 4, EACH = (ALL + OM_THREADS - 1) / OM_THREADS, CAP = N + M >= 12 ? 1 : 12 / (N + M),
                GO = EACH < CAP ? EACH : CAP;
  const int me = s.thread();
  om_sync();
  om_waiting(s, 1);
#pragma unroll 1
  for (int base = me; base / 32 * 32 < ALL; base += OM_THREADS * GO) { /* whole warps */
    const char *at[GO * N], *mass_at[GO];
    uint4 w[GO * N], m[GO * M];
#pragma unroll
    for (int g = 0; g < GO; g++) {
      const int item = base + g * OM_THREADS, slot = item / LOOKS, in = item % LOOKS * OM_LOOK, col = part * COLS + in;
      const size_t row = (size_t)slot * OM_HEADS + col / OM_HEAD_DIM;
      const bool here = item < ALL && col < OM_HEADS * OM_HEAD_DIM;
      mass_at[g] = here ? masses + row * (OM_PIECES4 * 4) : nullptr;
#pragma unroll
      for (int k = 0; k < N; k++)
        at[g * N + k] = here ? pieces + ((row * OM_PIECES + k) * OM_HEAD_DIM + col % OM_HEAD_DIM) * OM_IN : nullptr;
    }
#pragma unroll
    for (int k = 0; k < GO * M; k++)
      m[k] = mass_at[k / M] ? om_look(mass_at[k / M] + k % M * 16) : make_uint4(0, 0, 0, 0);
#if !OM_MASS_BESIDE
    om_read<GO * N, GO * N>(s, at, 0, use, OM_EDGE_ATTEND, w);
#else /* what is looked at after the pieces comes a whole look later */
#pragma unroll
    for (int k = 0; k < GO * N; k++) w[k] = at[k] ? om_look(at[k]) : make_uint4(0, 0, 0, 0);
#endif
    om_patience wait;
    for (;;) {
      bool missing = false;
#pragma unroll
      for (int g = 0; g < GO; g++) missing |= mass_at[g] && !om_masses(m + g * M, mark);
#if OM_MASS_BESIDE
#pragma unroll
      for (int k = 0; k < GO * N; k++) missing |= at[k] && !om_eights(w[k], use);
#endif
      if (!missing || wait.over(s, OM_EDGE_ATTEND, mark, m[0].x & OM_MARKS)) break;
#if OM_MASS_BESIDE
#pragma unroll
      for (int k = 0; k < GO * N; k++)
        if (at[k] && !om_eights(w[k], use)) w[k] = om_look(at[k]);
#endif
#pragma unroll
      for (int g = 0; g < GO; g++)
        if (mass_at[g] && !om_masses(m + g * M, mark))
#pragma unroll
          for (int k = 0; k < M; k++) m[g * M + k] = om_look(mass_at[g] + k * 16);
    }
#pragma unroll
    for (int g = 0; g < GO; g++) {
      const int item = base + g * OM_THREADS;
      if (item / 32 * 32 >= ALL) continue;
      float x[OM_LOOK];
      om_join_pieces(w + g * N, m + g * M, mass_at[g] != nullptr, x);
      const int slot = item / LOOKS, in = item % LOOKS * OM_LOOK;
#if OM_BITS < 16
      om_put_digits<8>(slot, in, me % 32, x, item < ALL);
#else
      if (item >= ALL) continue;
#pragma unroll
      for (int i = 0; i < OM_LOOK; i += 4) om_put_inputs(slot, in + i, x[i], x[i + 1], x[i + 2], x[i + 3]);
#endif
    }
  }
  om_sync();
  om_waiting(s, 0);
}

/* The MLP's values as the inputs of part `part` of the down projection. */
__device__ __forceinline__ void om_fill_act(om_state &s, const char *act, u32 use, int part) {
  constexpr int COLS = OM_FFN_K * 32 / OM_DOWN_SPLIT, LOOKS = COLS / OM_LOOK, ALL = LOOKS * OM_BATCH;
  constexpr int EACH = (ALL + OM_THREADS - 1) / OM_THREADS, N = EACH < 8 ? EACH : 8;
  const int me = s.thread();
  om_sync();
  om_waiting(s, 1);
  for (int base = me; base / 32 * 32 < ALL; base += OM_THREADS * N) { /* whole warps */
    const char *at[N];
    uint4 w[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int item = base + i * OM_THREADS, slot = item / LOOKS, col = part * COLS + item % LOOKS * OM_LOOK;
      at[i] = item < ALL && col < OM_UP_TILES * 8 ? act + ((size_t)slot * (OM_FFN_K * 32) + col) * OM_IN : nullptr;
    }
    om_read<N, N>(s, at, 0, use, OM_EDGE_UP, w);
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int item = base + i * OM_THREADS;
#if OM_BITS < 16
      if (item / 32 * 32 >= ALL) continue;
      float x[OM_LOOK];
      om_values(w[i], x);
      om_put_digits<8>(item / LOOKS, item % LOOKS * OM_LOOK, me % 32, x, item < ALL);
#elif OM_FP32
      if (item >= ALL) continue;
      float x[OM_LOOK];
      om_values(w[i], x);
      om_put_inputs(item / LOOKS, item % LOOKS * OM_LOOK, x[0], x[1], x[2], x[3]);
#else
      if (item >= ALL) continue;
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
  float *residual; /* null for other parts */
  int kept; /* first row that is kept */
  __device__ __forceinline__ void put(int unit, const float (&v)[4], float2 b) const {
    const int quad = s.quad(), row = (first + unit) * 16 + s.row();
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int slot = 2 * quad + j;
      if (j >= OM_BATCH || slot >= OM_BATCH) continue;
      float lo = v[j] + b.x, hi = v[2 + j] + b.y;
      if (residual) {
        float *const x = residual + slot * OM_RESIDUAL_ROWS + row - kept;
        lo += x[0], hi += x[8];
        if (OM_ROUNDED) {
          x[0] = lo, x[8] = hi; /* for om_end_rows */
          continue;
        }
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
      const float h = g * om_reciprocal(1.0f + om_exp2(-1.4426950408889634f * g)) * u;
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
