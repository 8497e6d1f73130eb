/* Inputs of narrow weights: fp32 numbers as whole ones, in signed digits to base 256, in shared memory.
 *
 * A slab's 128 columns of a slot share a power of two, by which the largest becomes a number below 2^22: so nothing is
 * rounded at 16 bits, and no value can overflow. Adding 1.5 * 2^23 rounds a number to a whole one and leaves it in the
 * lower bits of the sum; with 128 added to each digit these are bytes, and the sign is their first bit, turned.
 */
__device__ __forceinline__ u32 om_largest(u32 v) { /* of a warp */
  u32 r;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
  return r;
}

/* All lanes of a warp: EACH (4 or 8) columns of slot `slot` from `col` on, one lane's behind the other's, so one or two
 * whole slabs; those of lanes that are not `here` are left out. */
template <int EACH>
__device__ __forceinline__ void om_put_digits(int slot, int col, int lane, const float (&x)[EACH], bool here) {
  using Format = om_narrow<OM_BITS == 4 ? 4 : 8>;
  u32 top = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) top = max(top, __float_as_uint(x[i]) & 0x7fffffffu);
  if (EACH == 4) {
    top = om_largest(top);
  } else {
    const u32 low = om_largest(lane < 16 ? top : 0), high = om_largest(lane < 16 ? 0 : top);
    top = lane < 16 ? low : high;
  }
  const u32 exponent = max(top >> 23, 22u); /* what is smaller is zero */
  const float by = __uint_as_float((275 - exponent) << 23);
  /* where one is not finite, nothing is */
  const float back = __uint_as_float(exponent == 255 ? 0x7fc00000u : (exponent - 21) << 23);
  char *const slab = om_memory + col / 128 * Format::STRIDE;
  u32 word[3][EACH / 4];
  int total = 0;
#pragma unroll
  for (int k = 0; k < EACH / 4; k++) {
    u32 t[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      t[i] = __float_as_uint(fmaf(x[4 * k + i], by, 12582912.0f)) - (0x4b400000u - 0x808080u);
      if (OM_ZEROS) total += (int)t[i] - 0x808080;
    }
    const u32 a = __byte_perm(t[0], t[1], 0x5140), b = __byte_perm(t[2], t[3], 0x5140);
    const u32 c = __byte_perm(t[0], t[1], 0x0062), d = __byte_perm(t[2], t[3], 0x0062);
    word[0][k] = __byte_perm(a, b, 0x5410) ^ 0x80808080u;
    word[1][k] = __byte_perm(a, b, 0x7632) ^ 0x80808080u;
    word[2][k] = __byte_perm(c, d, 0x5410) ^ 0x80808080u;
  }
  const int in = col % 128;
  char *const to = slab + in / 64 * Format::HALF + slot * 64 + in % 32 / 8 * 16 + in % 64 / 32 * 8 + in % 8;
  if (here)
#pragma unroll
    for (int d = 0; d < 3; d++) {
      const u32 at = om_address(to + d * (64 * OM_BATCH));
      if (EACH == 4)
        om_sts(at, word[d][0]);
      else
        om_sts2(at, word[d][0], word[d][EACH / 4 - 1]);
    }
  float *const factors = (float *)(slab + 2 * Format::HALF) + slot;
  if (here && in == 0) factors[0] = back;
#if OM_ZEROS
#pragma unroll
  for (int d = 1; d < OM_SCALED / EACH; d *= 2) total += __shfl_xor_sync(~0u, total, d);
  if (here && in % OM_SCALED == 0) factors[(1 + in / OM_SCALED) * OM_FACTORS] = (float)total * (16.0f * back);
#endif
}
