/* int8 weights times inputs of three digits, on processors that multiply bytes (AVX-512 VNNI).
 *
 * An input row is rounded to 24 bits of its largest element: x = unit * (65536 d2 + 256 d1 + d0), digits from -128 to
 * 127. Products and sums of digits are exact integers, so what is lost is less than fp32 sums lose, and the order of
 * additions does not matter. A load takes four rows of a panel at 16 columns; a step of it multiplies 64 weights where
 * widening them to floats takes 12. Weights are made unsigned by adding 128, which the sums start below by.
 */
#define OM_LARGEST 8355711.0f /* all digits 127 */
#define OM_PLANES 3
enum { OM_ROOM_int8 = OM_PLANES * OM_BATCH * OB_LANES };

/* The unit of a row; `*bad` is not 0 if anything in the row is not finite. */
OB_INLINE float om_unit(const float *from, long count, float *bad) {
  __m512 top = _mm512_setzero_ps(), zero = _mm512_setzero_ps();
  for (long i = 0; i < count; i += 16) {
    const __m512 v = _mm512_loadu_ps(from + i);
    top = _mm512_max_ps(top, _mm512_abs_ps(v));
    zero = _mm512_add_ps(zero, _mm512_sub_ps(v, v));
  }
  const float most = _mm512_reduce_max_ps(top);
  *bad = _mm512_reduce_add_ps(zero);
  return most > 0.0f ? most / OM_LARGEST : 1.0f;
}

OB_INLINE __m512i om_rounded(const float *from, __m512 per_unit) {
  const __m512 cap = _mm512_set1_ps(OM_LARGEST), v = _mm512_mul_ps(_mm512_loadu_ps(from), per_unit);
  return _mm512_cvtps_epi32(_mm512_max_ps(_mm512_min_ps(v, cap), _mm512_sub_ps(_mm512_setzero_ps(), cap)));
}

/* Per slot: digits by chunk (d2, d1, d0 of 16 columns side by side); behind all, what sums begin with. */
static __attribute__((noinline, unused)) om_input om_enter_int8(const float *x, long stride, long chunks, char *room) {
  om_input in = {x, stride, (const int8_t *)room, {0}};
  for (int b = 0; b < OM_BATCH; b++) {
    const float *from = x + b * stride;
    float bad;
    const float unit = om_unit(from, chunks * 16, &bad);
    const __m512 f = _mm512_set1_ps(1.0f / unit);
    __m128i sum[OM_PLANES] = {_mm_setzero_si128(), _mm_setzero_si128(), _mm_setzero_si128()};
    char *to = room + b * chunks * OM_PLANES * 16;
    for (long k = 0; k < chunks; k++, to += OM_PLANES * 16) {
      __m512i rest = om_rounded(from + k * 16, f);
      for (int d = OM_PLANES - 1; d >= 0; d--) {
        const __m128i digit = _mm512_cvtepi32_epi8(rest); /* the lowest eight bits */
        rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, _mm512_cvtepi8_epi32(digit)), 8);
        _mm_store_si128((__m128i *)(to + d * 16), digit);
        sum[d] = _mm_dpbusd_epi32(sum[d], _mm_set1_epi8(1), digit);
      }
    }
    for (int d = 0; d < OM_PLANES; d++)
      _mm_store_si128((__m128i *)(room + OM_BATCH * chunks * OM_PLANES * 16) + b * OM_PLANES + d,
                      _mm_sub_epi32(_mm_setzero_si128(), _mm_slli_epi32(sum[d], 7)));
    in.unit[b] = unit + bad;
  }
  return in;
}

#define OM_DIGIT_CASE(NB)                                                                                     \
  OB_INLINE void om_panel_int8_##NB(const char *w, const om_input *in, int first, long chunks,                \
                                    float (*out)[OM_PANEL]) {                                                 \
    __m512i acc[NB][OM_PLANES][OM_PANEL / 4];                                                                 \
    const char *room = (const char *)in->digits, *digits = room + first * chunks * OM_PLANES * 16;            \
    const __m128i *start = (const __m128i *)(room + OM_BATCH * chunks * OM_PLANES * 16) + first * OM_PLANES;  \
    for (int b = 0; b < NB; b++)                                                                              \
      for (int d = 0; d < OM_PLANES; d++)                                                                     \
        for (int r = 0; r < OM_PANEL / 4; r++)                                                                \
          acc[b][d][r] = _mm512_broadcast_i32x4(_mm_load_si128(start + b * OM_PLANES + d));                   \
    const __m512i sign = _mm512_set1_epi8((char)0x80);                                                        \
    for (long k = 0; k < chunks; k++, w += OM_PANEL * 16, digits += OM_PLANES * 16) {                         \
      __m512i v[OM_PANEL / 4];                                                                                \
      for (int r = 0; r < OM_PANEL / 4; r++) v[r] = _mm512_xor_si512(_mm512_loadu_si512(w + r * 64), sign);   \
      for (int b = 0; b < NB; b++)                                                                            \
        for (int d = 0; d < OM_PLANES; d++) {                                                                 \
          const __m512i x = _mm512_broadcast_i32x4(                                                           \
              _mm_load_si128((const __m128i *)(digits + b * chunks * OM_PLANES * 16 + d * 16)));              \
          for (int r = 0; r < OM_PANEL / 4; r++) acc[b][d][r] = _mm512_dpbusd_epi32(acc[b][d][r], v[r], x);   \
        }                                                                                                     \
    }                                                                                                         \
    for (int b = 0; b < NB; b++)                                                                              \
      for (int r = 0; r < OM_PANEL / 4; r++) {                                                                \
        __m512 s = _mm512_cvtepi32_ps(acc[b][0][r]);                                                          \
        for (int d = 1; d < OM_PLANES; d++)                                                                   \
          s = _mm512_fmadd_ps(s, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(acc[b][d][r]));                   \
        s = _mm512_add_ps(s, _mm512_permute_ps(s, 0xb1));                                                     \
        s = _mm512_mul_ps(_mm512_add_ps(s, _mm512_permute_ps(s, 0x4e)), _mm512_set1_ps(in->unit[first + b])); \
        _mm_storeu_ps(out[b] + r * 4, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, s)));           \
      }                                                                                                       \
  }
OM_DIGIT_CASE(1)
OM_DIGIT_CASE(2)
OM_DIGIT_CASE(4)
OM_ROW(int8, 1)

OB_INLINE void om_product_int8(om_matrix m, long p, long chunks, const om_input *in, om_sums out) {
  const char *w = m.w + p * chunks * OM_PANEL * 16;
  int b = 0;
  for (; b + 4 <= OM_BATCH; b += 4) om_panel_int8_4(w, in, b, chunks, out + b);
  if (OM_BATCH & 2) { om_panel_int8_2(w, in, b, chunks, out + b); b += 2; }
  if (OM_BATCH & 1) om_panel_int8_1(w, in, b, chunks, out + b);
  for (b = 0; b < OM_BATCH; b++)
    for (int r = 0; r < OM_PANEL; r++) out[b][r] *= ((const float *)m.scale)[p * OM_PANEL + r];
}
