/* Formats of weights: what a warp makes of a slab in shared memory (plan/layout.py says how each is stored).
 *
 * A lane's 8 columns of a block of 32 are 8 * quad to 8 * quad + 7, in weights and inputs alike: the order along K is
 * free.
 *
 *   16 bits  1024 bytes: 16 rows by 32 columns
 *    8 bits  2048 bytes: 16 rows by 128 columns; the rows' scales lie with the biases
 *    4 bits  16 rows by 128 columns: 1024 bytes, then the groups' scales and zeros
 *
 * Inputs of narrow weights are whole numbers, too (fill.cuh makes them): of 128 columns, the largest below 2^22, each
 * in three signed digits to base 256, every digit a row of B. Tensor cores then add up exactly, in 32 bits, and a
 * weight of 8 bits is an operand as it lies in memory; of 4 bits, one instruction makes four of them, 16 times as
 * large. What is added up is brought to size in fp32 once for each group, or slab.
 */

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

/* The same of 16 by 32 whole numbers of 8 bits. */
__device__ __forceinline__ void om_mma(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* True, which the compiler cannot know: what depends on it comes after the products that `sum` is of, so after their
 * operands were read. Arithmetic makes no signalling NaN. */
__device__ __forceinline__ bool om_is_sum(float sum) { return __float_as_uint(sum) != 0x7f800001u; }

/* True, which the compiler cannot know: what depends on it comes after the words that `mix` is made of were read. */
__device__ __forceinline__ bool om_is_read(u32 mix) {
  u32 ones;
  asm volatile("popc.b32 %0, %1;" : "=r"(ones) : "r"(mix));
  return ones <= 32;
}

/* A format: `BLOCKS` blocks of 32 columns, `BYTES` bytes of weights and `STRIDE` of inputs to a slab; `AHEAD` slabs
 * whose inputs are read before their weights are waited for; `inputs`: a lane's of a slab; `add`: slab J of a piece;
 * `read`: true when the weights of all slabs were read; `take`: the sums of what was added since the last time, and
 * begin anew. */
template <int BITS>
struct om_format;

template <>
struct om_format<16> {
  static constexpr int BLOCKS = 1, BYTES = 1024, STRIDE = OM_BATCH * 64, AHEAD = 8;
  typedef uint4 Inputs;
  float c[4][4] = {};

  static __device__ __forceinline__ Inputs inputs(const char *x, int lane) {
    return lane / 4 < OM_BATCH ? *(const uint4 *)(x + lane / 4 * 64 + lane % 4 * 16) : make_uint4(0, 0, 0, 0);
  }
  template <int J>
  __device__ __forceinline__ void add(const char *w, int lane, const char *, const Inputs &b) {
    const uint4 x = *(const uint4 *)(w + lane * 16), y = *(const uint4 *)(w + 512 + lane * 16);
    om_mma(c[2 * J % 4], x, b.x, b.y);
    om_mma(c[(2 * J + 1) % 4], y, b.z, b.w);
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

/* Narrow weights. Up to two slots: one product a block of 32 columns, whose column 2 d + slot is digit d, so that quad
 * d of the lanes has it; else one for each digit, whose column is the slot. Columns of B without a meaning repeat
 * others: nobody looks at what they give. A slab's inputs: two times 64 columns, each 64 bytes of every digit of every
 * slot (16 of a quad: 8 columns of two blocks); then the slots' factors; then, if groups have zeros, the inputs' sums
 * by group, times 16. */
#define OM_ACROSS (OM_BATCH <= 2)
#define OM_FACTORS (OM_ACROSS ? 2 : 8) /* slots that have room for a factor */

/* Not known to the compiler, so that it is in a register: an instruction takes one immediate, the mask. */
__constant__ u32 OM_SIGN = 0x80808080u;

template <int BITS>
struct om_narrow {
  static constexpr int DIGITS = 3, TILES = OM_ACROSS ? 1 : DIGITS, PARTS = OM_ACROSS ? DIGITS : 1;
  static constexpr int GROUPS = BITS == 4 ? 128 / OM_SCALED : 1; /* of a slab */
  static constexpr int BLOCKS = 4, EACH = 4 / GROUPS, CHAINS = OM_ACROSS && EACH > 1 ? 2 : 1; /* of products */
  static constexpr int BYTES = BITS == 8 ? 2048 : 1024 + 16 * GROUPS * (OM_ZEROS ? 3 : 2);
  static constexpr int HALF = DIGITS * 64 * OM_BATCH, STRIDE = OM_NARROW_INPUTS, AHEAD = OM_ACROSS ? 4 : 1;
  struct Inputs {
    uint4 b[TILES][2];
  };
  float sum[4] = {};

  static __device__ __forceinline__ Inputs inputs(const char *x, int lane) {
    Inputs in;
    const int n = lane / 4;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const int digit = OM_ACROSS ? min(n / 2, DIGITS - 1) : t, slot = OM_ACROSS ? n % OM_BATCH : min(n, OM_BATCH - 1);
#pragma unroll
      for (int half = 0; half < 2; half++)
        in.b[t][half] = *(const uint4 *)(x + half * HALF + (digit * OM_BATCH + slot) * 64 + lane % 4 * 16);
    }
    return in;
  }
  static __device__ __forceinline__ float single(u32 h) { /* the lower fp16 */
    float r;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(r) : "r"(h));
    return r;
  }
  template <int J>
  __device__ __forceinline__ void add(const char *w, int lane, const char *x, const Inputs &in) {
    const int quad = lane % 4;
    const char *const factors = x + 2 * HALF + (OM_ACROSS ? 0 : quad * 8);
    const float2 factor = *(const float2 *)factors;
    uint4 all[BITS == 8 ? 4 : 2];
#pragma unroll
    for (int i = 0; i < (BITS == 8 ? 4 : 2); i++) all[i] = *(const uint4 *)(w + i * 512 + lane * 16);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      int c[CHAINS][TILES][4] = {};
#pragma unroll
      for (int i = g * EACH; i < (g + 1) * EACH; i++) {
        uint4 a;
        if (BITS == 8) {
          a = all[i % 4];
        } else {
          const u32 x = i % 2 ? all[i / 2].z : all[i / 2].x, y = i % 2 ? all[i / 2].w : all[i / 2].y;
          constexpr u32 HIGH = 0xf0f0f0f0u; /* 16 times a level less 8 */
          const u32 sign = OM_SIGN;
          a = make_uint4((x << 4 & HIGH) ^ sign, (x & HIGH) ^ sign, (y << 4 & HIGH) ^ sign, (y & HIGH) ^ sign);
        }
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          const uint4 b = in.b[t][i / 2];
          om_mma(c[i % CHAINS][t], a.x, a.y, a.z, a.w, i % 2 ? b.z : b.x, i % 2 ? b.w : b.y);
        }
      }
      float s[2] = {1.0f, 1.0f};
      if (BITS == 4) {
        const u32 pair = *(const u32 *)(w + 1024 + (lane / 4 * GROUPS + g) * 4);
        s[0] = single(pair), s[1] = single(pair >> 16);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (i % 2 >= OM_BATCH) continue;
        float v = (float)(CHAINS == 1 ? c[0][0][i] : c[0][0][i] + c[CHAINS - 1][0][i]);
        if (!OM_ACROSS) v += 256.0f * (float)c[0][TILES / 2][i] + 65536.0f * (float)c[0][TILES - 1][i];
        sum[i] += v * (s[i / 2] * (i % 2 ? factor.y : factor.x));
      }
#if OM_ZEROS
#if OM_OWN_HEAD
      if (BITS == 8) continue; /* a head's weights have no zeros */
#endif
      const float2 input = *(const float2 *)(factors + (1 + g) * (4 * OM_FACTORS));
      const u32 bytes = *(const unsigned short *)(w + 1024 + 32 * GROUPS + (lane / 4 * GROUPS + g) * 2);
      const float z[2] = {8.0f - (float)(bytes & 255), 8.0f - (float)(bytes >> 8)};
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (i % 2 < OM_BATCH) sum[i] += s[i / 2] * z[i / 2] * (OM_ACROSS && quad ? 0.0f : i % 2 ? input.y : input.x);
#endif
    }
  }
  __device__ __forceinline__ bool read() const { return om_is_sum(sum[0]); }
  static __device__ __forceinline__ float worth(int quad) { /* of what a lane has added up */
    const float whole = BITS == 4 ? 0.0625f : 1.0f;
    return !OM_ACROSS || quad == 0 ? whole : quad == 1 ? 256.0f * whole : quad == 2 ? 65536.0f * whole : 0.0f;
  }
  /* The sums as shares of PARTS digits, one behind the other: a lane's rows of each slot. */
  __device__ __forceinline__ void leave(float *to, int quad) const {
    const float by = worth(quad);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int part = OM_ACROSS ? quad : 0, slot = OM_ACROSS ? j : 2 * quad + j;
      if (j >= OM_BATCH || part >= PARTS || slot >= OM_BATCH) continue;
      float *const at = to + (part * OM_BATCH + slot) * 16;
      at[0] = sum[j] * by, at[8] = sum[2 + j] * by;
    }
  }
  __device__ __forceinline__ void take(float (&v)[4]) {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    const float by = worth(thread % 4);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      v[i] = sum[i] * by, sum[i] = 0.0f;
      if (!OM_ACROSS || i % 2 >= OM_BATCH) continue;
#pragma unroll
      for (int d = 1; d < 4; d *= 2) v[i] += __shfl_xor_sync(~0u, v[i], d);
    }
  }
};
template <>
struct om_format<8> : om_narrow<8> {};
template <>
struct om_format<4> : om_narrow<4> {};

/* N slabs, one behind the other, times their inputs; `wait` returns when the weights are there. At most AHEAD slabs are
 * one straight run of instructions: their inputs are read first. */
template <int N, class Format, class Wait>
__device__ __forceinline__ void om_multiply(Format &f, const char *w, int lane, const char *x, const Wait &wait) {
  constexpr int RUN = N < Format::AHEAD ? N : Format::AHEAD;
#pragma unroll 1
  for (int from = 0; from < N; from += RUN) {
    typename Format::Inputs b[RUN];
#pragma unroll
    for (int j = 0; j < RUN; j++)
      if (N % RUN == 0 || from + j < N) b[j] = Format::inputs(x + (from + j) * Format::STRIDE, lane);
    if (from == 0) wait();
#pragma unroll
    for (int j = 0; j < RUN; j++) {
      if (N % RUN && from + j >= N) continue;
      const char *const slab = w + (from + j) * Format::BYTES, *const at = x + (from + j) * Format::STRIDE;
      if (j % 2 == 0)
        f.template add<0>(slab, lane, at, b[j]);
      else
        f.template add<1>(slab, lane, at, b[j]);
    }
  }
}
