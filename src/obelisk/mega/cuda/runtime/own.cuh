/* Inputs that each warp makes for itself: the digits of the columns that it multiplies in a spread product of one slot.
 *
 * Nobody else reads them, so no barrier is between the values of other blocks and the product: a warp begins when its
 * own are there, and all warps meet once, behind the product, where the norm's sums of squares meet as well. What
 * warps leave for each other lies in two places in turn (om_out::PLACE), and so do a block's rows of the residual
 * stream: a warp may be one product ahead of another. */
#if OM_OWN
template <int PIECE>
__device__ __forceinline__ int om_own_slab(int warp, int i) { /* the i-th slab of a warp */
  return (warp + i / PIECE * OM_WARPS) * PIECE + i % PIECE;
}

/* As om_fill_norm: EACH slabs of a warp, 4 columns a lane; its sum of squares is left for om_root. */
template <int PIECE, int SPLIT, bool FIRST>
__device__ __forceinline__ void om_own_norm(const om_state &s, const char *stream, u32 mark, int edge, const float *gain,
                                            int from, int to, float *residual) {
  constexpr int EACH = OM_HIDDEN_K / 4 / OM_WARPS;
  static_assert(EACH * SPLIT <= 8, "what a lane looks at");
  const int warp = s.warp(), lane = s.lane();
  float4 g[EACH];
  uint4 w[SPLIT * EACH];
  om_waiting(s, 1);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int col = om_own_slab<PIECE>(warp, i) * 128 + 4 * lane;
    g[i] = col < OM_HIDDEN_ROWS ? *(const float4 *)(gain + col) : make_float4(0, 0, 0, 0);
  }
  if (!FIRST) {
    const char *at[SPLIT * EACH];
#pragma unroll
    for (int k = 0; k < SPLIT * EACH; k++) {
      const int col = om_own_slab<PIECE>(warp, k % EACH) * 128 + 4 * lane;
      at[k] = col < OM_HIDDEN_ROWS ? stream + ((size_t)(k / EACH) * OM_HIDDEN_ROWS + col) * 4 : nullptr;
    }
    om_read<SPLIT * EACH, 0>(s, at, mark, 0, edge, w);
  }
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int col = om_own_slab<PIECE>(warp, i) * 128 + 4 * lane;
    float4 x = make_float4(0, 0, 0, 0);
    if (FIRST) {
      if (col < OM_HIDDEN_ROWS) x = om_embedding(s.p, om.token[0], col);
    } else {
#pragma unroll
      for (int k = 0; k < SPLIT; k++) {
        const uint4 &y = w[k * EACH + i];
        x.x += om_single(y.x), x.y += om_single(y.y), x.z += om_single(y.z), x.w += om_single(y.w);
      }
    }
    if (col >= from && col < to) *(float4 *)(residual + col - from) = x;
    squares += (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w);
    const float y[4] = {x.x * g[i].x, x.y * g[i].y, x.z * g[i].z, x.w * g[i].w};
    om_put_digits<4>(0, col, lane, y, true);
  }
#pragma unroll
  for (int d = 16; d; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
  if (lane == 0) om.squares[warp] = squares;
  om_waiting(s, 0);
}

/* Attention's pieces of the slot, joined: OM_LOOK columns from `col` on; zeros where a lane is not `here`. */
__device__ __forceinline__ void om_joined(const om_state &s, const char *pieces, const char *masses, u32 mark, u32 use,
                                          int col, bool here, float (&x)[OM_LOOK]) {
  constexpr int N = OM_PIECES, M = OM_PIECES4 / 4;
  const char *at[N];
  const char *const mass_at = masses + col / OM_HEAD_DIM * (OM_PIECES4 * 4);
  uint4 w[N], m[M];
#pragma unroll
  for (int k = 0; k < N; k++)
    at[k] = here ? pieces + ((col / OM_HEAD_DIM * OM_PIECES + k) * OM_HEAD_DIM + col % OM_HEAD_DIM) * OM_IN : nullptr;
#pragma unroll
  for (int k = 0; k < M; k++) m[k] = here ? om_look(mass_at + k * 16) : make_uint4(0, 0, 0, 0);
  om_read<N, N>(s, at, 0, use, OM_EDGE_ATTEND, w);
  om_patience wait;
  while (here && !om_masses(m, mark) && !wait.over(s, OM_EDGE_ATTEND, mark, m[0].x & OM_MARKS))
#pragma unroll
    for (int k = 0; k < M; k++) m[k] = om_look(mass_at + k * 16);
  om_join_pieces(w, m, here, x);
}

/* As om_fill_attention and om_fill_act: EACH slabs of a warp of part `part`, 8 columns a lane; half a warp a slab. */
template <int PIECE>
__device__ __forceinline__ void om_own_attention(const om_state &s, const char *pieces, const char *masses, u32 mark,
                                                 u32 use, int part) {
  constexpr int COLS = OM_Q_K * 32 / OM_O_SPLIT, EACH = COLS / 128 / OM_WARPS;
  const int warp = s.warp(), lane = s.lane();
  om_sync(); /* attention's memory is free */
  om_waiting(s, 1);
#pragma unroll 1
  for (int i = lane / 16; i - lane / 16 < EACH; i += 2) {
    const int in = om_own_slab<PIECE>(warp, min(i, EACH - 1)) * 128 + lane % 16 * 8;
    const bool here = i < EACH && part * COLS + in < OM_HEADS * OM_HEAD_DIM;
    float sum[8];
    om_joined(s, pieces, masses, mark, use, part * COLS + in, here, sum);
    om_put_digits<8>(0, in, lane, sum, i < EACH);
  }
  om_waiting(s, 0);
}
template <int PIECE>
__device__ __forceinline__ void om_own_act(const om_state &s, const char *act, u32 use, int part) {
  constexpr int COLS = OM_FFN_K * 32 / OM_DOWN_SPLIT, EACH = COLS / 128 / OM_WARPS, N = (EACH + 1) / 2;
  static_assert(N <= 8, "what a lane looks at");
  const int warp = s.warp(), lane = s.lane();
  const char *at[N];
  uint4 w[N];
  om_waiting(s, 1);
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int k = 2 * i + lane / 16, col = part * COLS + om_own_slab<PIECE>(warp, k) * 128 + lane % 16 * 8;
    at[i] = k < EACH && col < OM_UP_TILES * 8 ? act + (size_t)col * 2 : nullptr;
  }
  om_read<N, N>(s, at, 0, use, OM_EDGE_UP, w);
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int k = 2 * i + lane / 16, in = om_own_slab<PIECE>(warp, min(k, EACH - 1)) * 128 + lane % 16 * 8;
    float x[8];
    om_values(w[i], x);
    om_put_digits<8>(0, in, lane, x, k < EACH);
  }
  om_waiting(s, 0);
}
#endif

/* The inputs of a product with pieces of PIECE slabs; a norm gives what is known of its root. */
template <int PIECE, int SPLIT, bool FIRST>
__device__ __forceinline__ float2 om_norm(om_state &s, const char *stream, u32 mark, int edge, const float *gain,
                                          int from, int to, int residual) {
#if OM_OWN
  om_own_norm<PIECE, SPLIT, FIRST>(s, stream, mark, edge, gain, from, to, (float *)(om_memory + residual));
  return make_float2(0.0f, 0.0f);
#else
  return om_fill_norm<OM_BITS, SPLIT, FIRST>(s, stream, mark, edge, gain, from, to);
#endif
}
template <int PIECE>
__device__ __forceinline__ void om_attention(om_state &s, const char *pieces, const char *masses, u32 mark, u32 use,
                                             int part) {
#if OM_OWN
  om_own_attention<PIECE>(s, pieces, masses, mark, use, part);
#else
  om_fill_attention(s, pieces, masses, mark, use, part);
#endif
}
template <int PIECE>
__device__ __forceinline__ void om_act(om_state &s, const char *act, u32 use, int part) {
#if OM_OWN
  om_own_act<PIECE>(s, act, use, part);
#else
  om_fill_act(s, act, use, part);
#endif
}
