/* A warp's share of a unit's K in a direct product (direct.cuh): its inputs, as operands in registers, and its slabs. */
#if OM_DIRECT
/* What a warp has of a unit's K. `put`: a lane's four columns of 128; `keep` and `put_kept`: those of all, of any size;
 * `words`: as other blocks wrote them. `multiply`: the warp's slabs of UNITS units, as a lane's sums of two rows. */
template <int SLABS, int BITS>
struct om_shared_k {
  static constexpr int BLOCKS = om_format<BITS>::BLOCKS, COLS = 32 * BLOCKS * SLABS; /* of a slab, of a unit */
  static constexpr int MINE = (SLABS + OM_WARPS - 1) / OM_WARPS, GROUPS = (MINE * BLOCKS + 3) / 4;
  static constexpr bool EVEN = MINE * OM_WARPS == SLABS;
  /* The first of a lane's columns of a group of 128; -1: none. */
  static __device__ __forceinline__ int column(const om_state &s, int group) {
    const int lane = s.lane(), in = 4 * group + lane / 8, block = s.warp() * (MINE * BLOCKS) + in;
    return in < MINE * BLOCKS && (EVEN || block < SLABS * BLOCKS) ? 32 * block + lane % 4 * 8 + lane / 4 % 2 * 4 : -1;
  }
};

template <int SLABS, int BITS>
struct om_part_of;

template <int SLABS>
struct om_part_of<SLABS, 16> : om_shared_k<SLABS, 16> {
  using Base = om_shared_k<SLABS, 16>;
  using Base::MINE;
  u32 b[Base::GROUPS][2];

  __device__ __forceinline__ void put(int, int g, const float4 &x) {
    b[g][0] = om_pack(x.x, x.y), b[g][1] = om_pack(x.z, x.w);
  }
  __device__ __forceinline__ void keep(int g, const float4 &x) { put(0, g, x); }
  __device__ __forceinline__ void put_kept(int) {}
  __device__ __forceinline__ void words(int, int g, u32 x, u32 y) { b[g][0] = x, b[g][1] = y; }

  struct Weights { /* of a unit */
    uint4 a[2 * MINE];
    __device__ __forceinline__ void load(int j, const char *w, int lane, bool in) {
      a[2 * j] = in ? *(const uint4 *)(w + lane * 16) : make_uint4(0, 0, 0, 0);
      a[2 * j + 1] = in ? *(const uint4 *)(w + 512 + lane * 16) : make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ u32 mix(int j) const { return a[2 * j].x ^ a[2 * j + 1].x; }
  };
  template <int UNITS>
  __device__ __forceinline__ void multiply(int lane, const Weights (&w)[UNITS], float (&sum)[UNITS][2]) const {
    float c[UNITS][2][4] = {};
#pragma unroll
    for (int j = 0; j < 2 * MINE; j++) {
      const bool mine = lane / 4 == j % 8;
      const u32 b0 = mine ? b[j / 8][0] : 0, b1 = mine ? b[j / 8][1] : 0;
#pragma unroll
      for (int u = 0; u < UNITS; u++) om_mma(c[u][j % 2], w[u].a[j], b0, b1);
    }
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
      for (int i = 0; i < 2; i++) sum[u][i] = (c[u][0][2 * i] + c[u][0][2 * i + 1]) + (c[u][1][2 * i] + c[u][1][2 * i + 1]);
  }
};

/* 4 bits: a level, masked out, is an fp16 number, the level times 2^-24; of two rows in a byte the second one's is the
 * whole byte, which is 16 times as large, less the first. Inputs are two fp16 numbers each, which are columns of B beside
 * each other, so a step along K takes two of the eight, and a block of 32 columns two steps, whose results quad `block`
 * of the lanes has. What zeros take away is made of the sums of a block's inputs, which are products by a level of
 * one. */
#if OM_BITS == 4
template <int SLABS>
struct om_part_of<SLABS, 4> : om_shared_k<SLABS, 4> {
  using Base = om_shared_k<SLABS, 4>;
  using Format = om_format<4>;
  using Base::MINE;
  u32 b[Base::GROUPS][4]; /* of the even steps, of the odd ones */
  float all[Base::GROUPS]; /* sums of the inputs of the quad's block; where every zero is 8, times -8 */
  float back = 1.0f;
  float4 x[Base::GROUPS]; /* what is kept */

  /* A lane has the upper parts of its step, whose lower parts go to the lane of the step beside it. */
  __device__ __forceinline__ void set(int lane, int g, u32 h0, u32 h1, u32 l0, u32 l1) {
    const bool odd = lane / 4 % 2;
    b[g][0] = odd ? l0 : h0, b[g][1] = odd ? l1 : h1, b[g][2] = odd ? h0 : l0, b[g][3] = odd ? h1 : l1;
    constexpr u32 LEVEL = OM_ZEROS ? 0x00010001u : 0x80088008u; /* 1, -8 */
    float c[4] = {};
    om_mma(c, LEVEL, LEVEL, LEVEL, LEVEL, b[g][0], b[g][1]);
    om_mma(c, LEVEL, LEVEL, LEVEL, LEVEL, b[g][2], b[g][3]);
    all[g] = c[0] + c[1];
  }
  __device__ __forceinline__ void put(int lane, int g, const float4 &x) {
    const u32 h0 = om_pack(x.x, x.z), h1 = om_pack(x.y, x.w);
    const float2 a = om_unpack(h0), c = om_unpack(h1);
    const u32 l0 = om_pack(x.x - a.x, x.z - a.y), l1 = om_pack(x.y - c.x, x.w - c.y);
    set(lane, g, h0, h1, __shfl_xor_sync(~0u, l0, 4), __shfl_xor_sync(~0u, l1, 4));
  }
  /* A power of two makes the largest of the warp's a number below 2^15. */
  __device__ __forceinline__ void keep(int g, const float4 &y) { x[g] = y; }
  __device__ __forceinline__ void put_kept(int lane) {
    u32 top = 0;
#pragma unroll
    for (int g = 0; g < Base::GROUPS; g++) {
      const float four[4] = {x[g].x, x[g].y, x[g].z, x[g].w};
#pragma unroll
      for (int i = 0; i < 4; i++) top = max(top, __float_as_uint(four[i]) & 0x7fffffffu);
    }
    const u32 exponent = max(om_largest(top) >> 23, 15u);
    const float by = __uint_as_float((268 - exponent) << 23);
    back = __uint_as_float((exponent - 14) << 23);
#pragma unroll
    for (int g = 0; g < Base::GROUPS; g++)
      put(lane, g, make_float4(x[g].x * by, x[g].y * by, x[g].z * by, x[g].w * by));
  }
  __device__ __forceinline__ void words(int lane, int g, u32 x, u32 y) {
    set(lane, g, __byte_perm(x, y, 0x5410), __byte_perm(x, y, 0x7632), 0, 0);
  }

  struct Weights { /* of a unit */
    uint4 a[2 * MINE];
    u32 scales[MINE], zeros[OM_ZEROS ? MINE : 1] = {}; /* two rows' */
    __device__ __forceinline__ void load(int j, const char *w, int lane, bool in) {
      constexpr int EACH = Format::GROUPS;
      const int group = lane / 4 * EACH + lane % 4 * EACH / 4;
      a[2 * j] = in ? *(const uint4 *)(w + lane * 16) : make_uint4(0, 0, 0, 0);
      a[2 * j + 1] = in ? *(const uint4 *)(w + 512 + lane * 16) : make_uint4(0, 0, 0, 0);
      scales[j] = in ? *(const u32 *)(w + 1024 + group * 4) : 0;
      if (OM_ZEROS) zeros[OM_ZEROS ? j : 0] = in ? *(const unsigned short *)(w + 1024 + 32 * EACH + group * 2) : 0;
    }
    /* What a slab's products gave goes to the sums of two rows. */
    __device__ __forceinline__ void end(int j, const float (&c)[4], float all, float (&sum)[2]) const {
      const float lo = c[0] + c[1], hi = (c[2] + c[3]) - lo;
      const u32 zero = zeros[OM_ZEROS ? j : 0];
      const float2 scale = om_unpack(scales[j]);
      sum[0] += scale.x * (lo + (OM_ZEROS ? -(float)(zero & 255) * all : all));
      sum[1] += scale.y * (hi + (OM_ZEROS ? -(float)(zero >> 8) * (16.0f * all) : 16.0f * all));
    }
    __device__ __forceinline__ u32 mix(int j) const {
      return a[2 * j].x ^ a[2 * j + 1].x ^ scales[j] ^ (OM_ZEROS ? zeros[OM_ZEROS ? j : 0] : 0);
    }
  };
  template <int UNITS>
  __device__ __forceinline__ void multiply(int lane, const Weights (&w)[UNITS], float (&sum)[UNITS][2]) const {
#pragma unroll
    for (int u = 0; u < UNITS; u++) sum[u][0] = sum[u][1] = 0.0f;
    constexpr int SIDE = UNITS > 1 || MINE == 1 ? 1 : 2; /* slabs whose chains run beside each other */
#pragma unroll
    for (int first = 0; first < MINE; first += SIDE) {
      float c[SIDE][UNITS][4] = {};
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const bool mine = lane / 8 == i / 2;
#pragma unroll
        for (int k = 0; k < SIDE; k++) {
          const int j = first + k;
          if (j >= MINE) continue;
          const u32 b0 = mine ? b[j][i % 2 * 2] : 0, b1 = mine ? b[j][i % 2 * 2 + 1] : 0;
#pragma unroll
          for (int u = 0; u < UNITS; u++) {
            const uint4 &a = w[u].a[2 * j + i / 4];
            const u32 x = i % 4 == 0 ? a.x : i % 4 == 1 ? a.y : i % 4 == 2 ? a.z : a.w, y = __byte_perm(x, 0, 0x4341);
            om_mma(c[k][u], x & 0x000f000f, x & 0x00ff00ff, y & 0x000f000f, y, b0, b1);
          }
        }
      }
#pragma unroll
      for (int k = 0; k < SIDE; k++)
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
          const int j = first + k;
          if (j < MINE) w[u].end(j, c[k][u], all[j], sum[u]);
        }
    }
#pragma unroll
    for (int u = 0; u < UNITS; u++) sum[u][0] *= 16777216.0f * back, sum[u][1] *= 1048576.0f * back;
  }
};
#endif
template <int SLABS>
using om_part = om_part_of<SLABS, OM_BITS>;
#endif
