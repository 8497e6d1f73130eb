/* fp32 weights: multiplied one by one and added up in fp32, without tensor cores, which would round them.
 *
 * A slab is 16 rows by 32 columns in 2048 bytes (plan/layout.py). Lane (g = lane / 8, q = lane % 8) has columns 4 * q to
 * 4 * q + 3 of rows 2 * g, 2 * g + 1 and the two that are 8 further down: four loads of 16 bytes, each of them 512 bytes
 * in a row for a warp. A slot's inputs of the slab are 128 bytes, which the four groups of lanes share. The 8 lanes of a
 * row meet when the sums are taken; every exchange halves what a lane holds, so that it ends with what om_product wants.
 */
template <>
struct om_format<32> {
  static constexpr int BLOCKS = 1, BYTES = 2048, STRIDE = OM_BATCH * 128, AHEAD = OM_BATCH <= 2 ? 4 : OM_BATCH <= 4 ? 2 : 1;
  float sum[4][OM_BATCH] = {}; /* row 2 * g + i % 2 + i / 2 * 8 */

  __device__ __forceinline__ void add(int i, int slot, const float4 &a, const float4 &b) {
    float &c = sum[i][slot];
    c += a.x * b.x, c += a.y * b.y, c += a.z * b.z, c += a.w * b.w;
  }
  __device__ __forceinline__ bool read() const {
    return om_is_sum(sum[0][0]) && om_is_sum(sum[1][0]) && om_is_sum(sum[2][0]) && om_is_sum(sum[3][0]);
  }
  /* What this lane keeps of two values, with the other half of the pair's. */
  static __device__ __forceinline__ float halve(bool upper, float low, float high, int distance) {
    return (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, distance);
  }
  __device__ __forceinline__ void take(float (&v)[4]) {
    constexpr int SLOTS4 = OM_BATCH > 4 ? 4 : OM_BATCH;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float row[OM_BATCH], some[SLOTS4]; /* of one row; of slots 4 * (quad / 2) on */
#pragma unroll
      for (int b = 0; b < OM_BATCH; b++) {
        row[b] = halve(lane & 4, sum[2 * half][b], sum[2 * half + 1][b], 4);
        sum[2 * half][b] = sum[2 * half + 1][b] = 0.0f;
      }
#pragma unroll
      for (int b = 0; b < SLOTS4; b++) {
        if (OM_BATCH > 4)
          some[b] = halve(lane & 2, row[b], b + 4 < OM_BATCH ? row[(b + 4) % OM_BATCH] : 0.0f, 2);
        else
          some[b] = row[b] + __shfl_xor_sync(~0u, row[b], 2);
      }
#pragma unroll
      for (int j = 0; j < 2; j++) {
        v[2 * half + j] = 0.0f;
        if (j >= SLOTS4) continue;
        if (SLOTS4 > 2)
          v[2 * half + j] = halve(lane & 1, some[j % SLOTS4], j + 2 < SLOTS4 ? some[(j + 2) % SLOTS4] : 0.0f, 1);
        else
          v[2 * half + j] = some[j % SLOTS4] + __shfl_xor_sync(~0u, some[j % SLOTS4], 1);
      }
    }
  }
};

/* As in weights.cuh; the inputs of all slots are read by every lane. */
template <int N, class Wait>
__device__ __forceinline__ void om_multiply(om_format<32> &f, const char *w, int lane, const char *x, const Wait &wait) {
  constexpr int RUN = N < om_format<32>::AHEAD ? N : om_format<32>::AHEAD;
#pragma unroll 1
  for (int from = 0; from < N; from += RUN) {
    float4 b[RUN][OM_BATCH];
#pragma unroll
    for (int j = 0; j < RUN; j++)
#pragma unroll
      for (int slot = 0; slot < OM_BATCH; slot++)
        if (N % RUN == 0 || from + j < N) b[j][slot] = *(const float4 *)(x + ((from + j) * OM_BATCH + slot) * 128 + lane % 8 * 16);
    if (from == 0) wait();
#pragma unroll
    for (int j = 0; j < RUN; j++) {
      if (N % RUN && from + j >= N) continue;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float4 a = *(const float4 *)(w + (from + j) * om_format<32>::BYTES + i * 512 + lane * 16);
#pragma unroll
        for (int slot = 0; slot < OM_BATCH; slot++) f.add(i, slot, a, b[j][slot]);
      }
    }
  }
}
