/* Attention's tiles with fp32 keys and values: 8 positions, one to each row of lanes, multiplied and added in fp32.
 *
 * Lane (row, quad) has position `row`, and of every 16 dimensions four: 4 * quad to 4 * quad + 3. A lane's softmax is
 * over its own positions, with a largest score of its own, so nothing crosses lanes but a score's four parts; the rows
 * meet when an item is done.
 */
#define OM_POSITIONS 8
#define OM_SIXTEENS ((OM_HEAD_DIM + 15) / 16)
#define OM_Q_STRIDE (OM_SIXTEENS * 64) /* bytes of a query */
#define OM_Q_PARTS 1
#define OM_Q_ROWS ((OM_GROUP + OM_HEADS_AT - 1) / OM_HEADS_AT * OM_HEADS_AT)
#define OM_NEWEST OM_Q_STRIDE /* bytes of the new key, and of the new value */

struct om_tile {
  float4 k[OM_SIXTEENS], v[OM_SIXTEENS];

  __device__ __forceinline__ void load(const char *keys, const char *values, int first, int end, int row, int quad) {
    const int at = first + row;
#pragma unroll
    for (int j = 0; j < OM_SIXTEENS; j++) {
      const int dim = 16 * j + 4 * quad;
      const bool in = at < end && dim < OM_HEAD_DIM;
      const uint4 none = make_uint4(0, 0, 0, 0);
      k[j] = om_floats(in ? om_ldg(keys + ((size_t)at * OM_HEAD_DIM + dim) * 4) : none);
      v[j] = om_floats(in ? om_ldg(values + ((size_t)at * OM_HEAD_DIM + dim) * 4) : none);
    }
  }
  template <int HALF>
  __device__ __forceinline__ void turn() {} /* values are multiplied as they are */
  /* The newest position, from shared memory. */
  __device__ __forceinline__ void add(const char *fresh, int at, int row, int quad) {
    if (at != row) return;
#pragma unroll
    for (int j = 0; j < OM_SIXTEENS; j++) {
      if (16 * j + 4 * quad >= OM_HEAD_DIM) continue;
      k[j] = *(const float4 *)(fresh + j * 64 + quad * 16);
      v[j] = *(const float4 *)(fresh + OM_NEWEST + j * 64 + quad * 16);
    }
  }
};

struct om_softmax { /* of OM_HEADS_AT heads, over this lane's positions and dimensions */
  float top[OM_HEADS_AT], mass[OM_HEADS_AT];
  float4 sum[OM_HEADS_AT][OM_SIXTEENS];
};

__device__ __forceinline__ float om_share_of(float score, float top) { /* a lane may have no position yet */
  return score == -OM_INFINITY ? 0.0f : om_exp2(score - top);
}

/* One tile; positions from `end` on do not count. */
__device__ __forceinline__ void om_fold(om_softmax &a, const om_tile &t, const char *queries, int first, int end,
                                        int row, int quad) {
  const bool counts = first + row < end;
#pragma unroll
  for (int h = 0; h < OM_HEADS_AT; h++) {
    float score = 0.0f;
#pragma unroll
    for (int j = 0; j < OM_SIXTEENS; j++) {
      const float4 q = *(const float4 *)(queries + h * OM_Q_STRIDE + j * 64 + quad * 16), k = t.k[j];
      score += (q.x * k.x + q.y * k.y) + (q.z * k.z + q.w * k.w);
    }
    score += __shfl_xor_sync(~0u, score, 1);
    score += __shfl_xor_sync(~0u, score, 2);
    if (!counts) score = -OM_INFINITY;
    const float top = fmaxf(a.top[h], score), f = om_share_of(a.top[h], top), p = om_share_of(score, top);
    a.top[h] = top, a.mass[h] = a.mass[h] * f + p;
#pragma unroll
    for (int j = 0; j < OM_SIXTEENS; j++) {
      float4 &s = a.sum[h][j];
      const float4 v = t.v[j];
      s.x = s.x * f + p * v.x, s.y = s.y * f + p * v.y, s.z = s.z * f + p * v.z, s.w = s.w * f + p * v.w;
    }
  }
}

__device__ __forceinline__ void om_begin(om_softmax &a) {
  a = {};
#pragma unroll
  for (int h = 0; h < OM_HEADS_AT; h++) a.top[h] = -OM_INFINITY;
}

/* What a warp found, for the others: sums, largest score and mass of each head. Two exchanges leave a lane one of the
 * four dimensions of each of its 16s, the third adds the last two rows. */
__device__ __forceinline__ void om_leave(const om_softmax &a, float *mine, bool any, int row, int quad) {
#pragma unroll
  for (int h = 0; h < OM_HEADS_AT; h++) {
    float *const to = mine + h * OM_MERGED;
    float top = a.top[h];
#pragma unroll
    for (int d = 4; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    const float f = om_share_of(a.top[h], top);
    float mass = a.mass[h] * f;
#pragma unroll
    for (int d = 4; d < 32; d *= 2) mass += __shfl_xor_sync(~0u, mass, d);
    if (row == 0 && quad == 0) to[OM_MASS_AT] = top, to[OM_MASS_AT + 1] = mass;
#pragma unroll
    for (int j = 0; j < OM_SIXTEENS; j++) {
      const float4 s = a.sum[h][j];
      const bool back = row & 4, odd = row & 2;
      const float x = (back ? s.z : s.x) * f + __shfl_xor_sync(~0u, (back ? s.x : s.z) * f, 16);
      const float y = (back ? s.w : s.y) * f + __shfl_xor_sync(~0u, (back ? s.y : s.w) * f, 16);
      float z = (odd ? y : x) + __shfl_xor_sync(~0u, odd ? x : y, 8);
      z += __shfl_xor_sync(~0u, z, 4);
      const int dim = 16 * j + 4 * quad + (back ? 2 : 0) + (odd ? 1 : 0);
      if (any && row % 2 == 0 && dim < OM_HEAD_DIM) to[dim / 8 * 8 + dim % 2 * 4 + dim % 8 / 2] = z;
    }
  }
}
