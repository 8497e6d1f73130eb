/* Formats of weights: what a warp makes of a slab in shared memory (plan/layout.py says how each is stored).
 *
 * A lane's 8 columns of a block of 32 are 8 * quad to 8 * quad + 7, in weights and inputs alike: the order along K is
 * free. Narrow weights are small whole numbers in the low bits of an fp16, so with an exponent of zero: numbers of
 * 2^-24, which tensor cores multiply exactly. A mask makes two of them; nothing is converted. What is added up is
 * brought to size once for each group (4 bits) or row (8 bits), in fp32.
 *
 *   16 bits  1024 bytes: 16 rows by 32 columns
 *    8 bits   512 bytes: 16 rows by 32 columns, a sign and seven bits each; the rows' scales lie with the biases
 *    4 bits  16 rows by 128 columns: 1024 bytes, then the groups' scales and zeros. A group's sum is that of level
 *            times input less zero times that of the inputs, which a product with ones gives to the lanes that need it
 */
#define OM_TINY 16777216.0f /* 2^24 */

/* 16 weight rows by 16 columns, times 16 columns of 8 slots. */
__device__ __forceinline__ void om_mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if OM_BF16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void om_mma(float (&c)[4], const uint4 &a, u32 b0, u32 b1) {
  om_mma(c, a.x, a.y, a.z, a.w, b0, b1);
}

/* A lane's inputs: its 8 columns of N blocks of 32, of slot `row`. */
template <int N>
__device__ __forceinline__ void om_inputs(const char *x, bool here, uint4 (&b)[N]) {
#pragma unroll
  for (int j = 0; j < N; j++) b[j] = here ? *(const uint4 *)(x + j * (OM_BATCH * 64)) : make_uint4(0, 0, 0, 0);
}

/* True, which the compiler cannot know: what depends on it comes after the products that `sum` is of, so after their
 * operands were read. Arithmetic makes no signalling NaN. */
__device__ __forceinline__ bool om_is_sum(float sum) { return __float_as_uint(sum) != 0x7f800001u; }

/* A format: `BLOCKS` blocks of 32 columns and `BYTES` bytes to a slab; `AHEAD` slabs whose inputs are read before their
 * weights are waited for; `add`: slab J of a piece; `read`: true when the weights of all slabs were read; `take`: the
 * sums of what was added since the last time, and begin anew. */
template <int BITS>
struct om_format;

template <>
struct om_format<16> {
  static constexpr int BLOCKS = 1, BYTES = 1024, AHEAD = 8;
  float c[4][4] = {};

  template <int J>
  __device__ __forceinline__ void add(const char *w, int lane, const uint4 (&b)[1]) {
    const uint4 x = *(const uint4 *)(w + lane * 16), y = *(const uint4 *)(w + 512 + lane * 16);
    om_mma(c[2 * J % 4], x, b[0].x, b[0].y);
    om_mma(c[(2 * J + 1) % 4], y, b[0].z, b[0].w);
  }
  __device__ __forceinline__ bool read() const {
    return om_is_sum(c[0][0]) && om_is_sum(c[1][0]) && om_is_sum(c[2][0]) && om_is_sum(c[3][0]);
  }
  __device__ __forceinline__ void take(float (&v)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      v[i] = (c[0][i] + c[1][i]) + (c[2][i] + c[3][i]);
      c[0][i] = c[1][i] = c[2][i] = c[3][i] = 0.0f;
    }
  }
};

template <>
struct om_format<8> {
  static constexpr int BLOCKS = 1, BYTES = 512, AHEAD = 8;
  float c[4][4] = {};

  static __device__ __forceinline__ u32 low(u32 w) { return w & 0x807f807fu; }
  static __device__ __forceinline__ u32 high(u32 w) { return (w >> 8 | w << 24) & 0x807f807fu; }
  template <int J>
  __device__ __forceinline__ void add(const char *w, int lane, const uint4 (&b)[1]) {
    const uint4 x = *(const uint4 *)(w + lane * 16);
    om_mma(c[2 * J % 4], low(x.x), low(x.y), high(x.x), high(x.y), b[0].x, b[0].y);
    om_mma(c[(2 * J + 1) % 4], low(x.z), low(x.w), high(x.z), high(x.w), b[0].z, b[0].w);
  }
  __device__ __forceinline__ bool read() const {
    return om_is_sum(c[0][0]) && om_is_sum(c[1][0]) && om_is_sum(c[2][0]) && om_is_sum(c[3][0]);
  }
  __device__ __forceinline__ void take(float (&v)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      v[i] = ((c[0][i] + c[1][i]) + (c[2][i] + c[3][i])) * OM_TINY;
      c[0][i] = c[1][i] = c[2][i] = c[3][i] = 0.0f;
    }
  }
};

template <>
struct om_format<4> {
  static constexpr int GROUPS = 128 / OM_SCALED, EACH = 4 / GROUPS; /* groups of a slab, blocks of a group */
  static constexpr int BLOCKS = 4, BYTES = 1024 + 16 * GROUPS * (OM_ZEROS ? 3 : 2), AHEAD = 2;
  float sum[4] = {};

  static __device__ __forceinline__ float single(u32 h) { /* the lower fp16 */
    float r;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(r) : "r"(h));
    return r;
  }
  template <int J>
  __device__ __forceinline__ void add(const char *w, int lane, const uint4 (&b)[4]) {
    constexpr u32 LOW = 0x000f000fu, HIGH = 0x00f000f0u, ONES = 0x00010001u;
    const uint4 all[2] = {*(const uint4 *)(w + lane * 16), *(const uint4 *)(w + 512 + lane * 16)};
    const char *const scales = w + 1024 + lane / 4 * (4 * GROUPS);
    const char *const zeros = w + 1024 + 32 * GROUPS + lane / 4 * (2 * GROUPS);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      /* levels of even and of odd steps (these 16 times as large), and the inputs alone */
      float low[4] = {}, high[4] = {}, ones[2][4] = {};
#pragma unroll
      for (int j = g * EACH; j < (g + 1) * EACH; j++) {
        const u32 x = j % 2 ? all[j / 2].z : all[j / 2].x, y = j % 2 ? all[j / 2].w : all[j / 2].y;
        om_mma(low, x & LOW, y & LOW, x >> 8 & LOW, y >> 8 & LOW, b[j].x, b[j].y);
        om_mma(high, x & HIGH, y & HIGH, x >> 8 & HIGH, y >> 8 & HIGH, b[j].z, b[j].w);
        om_mma(ones[0], ONES, ONES, ONES, ONES, b[j].x, b[j].y);
        om_mma(ones[1], ONES, ONES, ONES, ONES, b[j].z, b[j].w);
      }
      const u32 pair = *(const u32 *)(scales + 4 * g);
      float z[2] = {8.0f, 8.0f};
#if OM_ZEROS
      const u32 bytes = *(const unsigned short *)(zeros + 2 * g);
      z[0] = (float)(bytes & 255), z[1] = (float)(bytes >> 8);
#endif
      const float s[2] = {single(pair), single(pair >> 16)};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (i % 2 >= OM_BATCH) continue;
        const float level = low[i] + high[i] * 0.0625f, input = ones[0][i] + ones[1][i];
        sum[i] += s[i / 2] * (level - z[i / 2] * input);
      }
    }
  }
  __device__ __forceinline__ bool read() const { return om_is_sum(sum[0]); }
  __device__ __forceinline__ void take(float (&v)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = sum[i] * OM_TINY, sum[i] = 0.0f;
  }
};

/* N slabs, one behind the other, times their inputs; `wait` returns when the weights are there. At most AHEAD slabs are
 * one straight run of instructions: their inputs are read first. */
template <int N, class Format, class Wait>
__device__ __forceinline__ void om_multiply(Format &f, const char *w, int lane, const char *x, const Wait &wait) {
  constexpr int RUN = N < Format::AHEAD ? N : Format::AHEAD, STRIDE = Format::BLOCKS * OM_BATCH * 64;
  const bool here = lane / 4 < OM_BATCH;
#pragma unroll 1
  for (int from = 0; from < N; from += RUN) {
    uint4 b[RUN][Format::BLOCKS];
#pragma unroll
    for (int j = 0; j < RUN; j++)
      if (N % RUN == 0 || from + j < N) om_inputs(x + (from + j) * STRIDE, here, b[j]);
    if (from == 0) wait();
#pragma unroll
    for (int j = 0; j < RUN; j++) {
      if (N % RUN && from + j >= N) continue;
      if (j % 2 == 0)
        f.template add<0>(w + (from + j) * Format::BYTES, lane, b[j]);
      else
        f.template add<1>(w + (from + j) * Format::BYTES, lane, b[j]);
    }
  }
}
