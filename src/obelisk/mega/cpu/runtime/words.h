/* 4-bit weights in groups of OM_GROUP_COLS columns: words of 8 columns, OB_LANES apart.
 *
 * A weight is taken out of its word where it stands, as q * 16^j, and the input is scaled by 16^-j once for all rows of
 * the panel: both are exact, and a vector of weights costs a mask, a conversion and a product. Sums of a group are
 * kept apart, and w = (q - zero) * scale is applied to them: scale * (sum of q x - zero * sum of x).
 */
#define OM_WORD_COLS (8 * OB_LANES)
#define OM_RUN_COLS (OM_GROUP_COLS < OM_WORD_COLS ? OM_GROUP_COLS : OM_WORD_COLS) /* of one group, in a chunk */
#define OM_GROUP_RUNS (OM_GROUP_COLS / OM_RUN_COLS)

OB_INLINE vf om_nibble(om_word w, int j) {
  return __builtin_convertvector((vi)(j == 7 ? w >> 28 : w & (15u << (4 * j))), vf);
}
OB_INLINE float om_share(int j) { return j == 7 ? 1.0f : 1.0f / (float)(1u << (4 * j)); }

OB_INLINE void om_scales(const om_t_fp16 *from, float *to) {
  int r = 0;
  for (; r + OB_LANES <= OM_PANEL; r += OB_LANES) om_put(to + r, om_load_fp16(from + r));
  for (; r < OM_PANEL; r++) to[r] = ob_from_f16(from[r]);
}

/* The columns of nibble J, and the end of their group where it is there. */
#define OM_NIBBLE(NB, J)                                                                                      \
  do {                                                                                                        \
    vf y[NB];                                                                                                 \
    for (int b = 0; b < NB; b++) {                                                                            \
      y[b] = om_get(x + b * stride + k * OM_WORD_COLS + (J) * OB_LANES);                                      \
      total[b] += y[b];                                                                                       \
      y[b] *= ob_splat_f(om_share(J));                                                                        \
    }                                                                                                         \
    for (int r = 0; r < OM_PANEL; r++) {                                                                      \
      om_word word;                                                                                           \
      memcpy(&word, w + r * OB_LANES, sizeof word);                                                           \
      const vf v = om_nibble(word, J);                                                                        \
      for (int b = 0; b < NB; b++) acc[b][r] += v * y[b];                                                     \
    }                                                                                                         \
    if (((J) + 1) * OB_LANES % OM_RUN_COLS == 0 && (++runs == OM_GROUP_RUNS || k * 8 + (J) == last)) {        \
      float scales[OM_PANEL];                                                                                 \
      om_scales(scale, scales);                                                                               \
      for (int b = 0; b < NB; b++) {                                                                          \
        for (int r = 0; r < OM_PANEL; r++) {                                                                  \
          const vf z = ob_splat_f(zero ? (float)zero[r] : 8.0f);                                              \
          sum[b][r] += ob_splat_f(scales[r]) * (acc[b][r] - z * total[b]);                                    \
          acc[b][r] = (vf){0};                                                                                \
        }                                                                                                     \
        total[b] = (vf){0};                                                                                   \
      }                                                                                                       \
      scale += OM_PANEL;                                                                                      \
      if (zero) zero += OM_PANEL;                                                                             \
      runs = 0;                                                                                               \
    }                                                                                                         \
  } while (0)

#define OM_WORDS_CASE(NB)                                                                                     \
  OB_INLINE void om_panel_w4a16_##NB(const uint32_t *w, const om_t_fp16 *scale, const uint8_t *zero,          \
                                     const float *x, long stride, long chunks, float (*out)[OM_PANEL]) {      \
    vf acc[NB][OM_PANEL], sum[NB][OM_PANEL], total[NB];                                                       \
    for (int b = 0; b < NB; b++) {                                                                            \
      total[b] = (vf){0};                                                                                     \
      for (int r = 0; r < OM_PANEL; r++) acc[b][r] = sum[b][r] = (vf){0};                                     \
    }                                                                                                         \
    int runs = 0;                                                                                             \
    const long last = chunks * 8 - 1;                                                                         \
    for (long k = 0; k < chunks; k++, w += OM_PANEL * OB_LANES) {                                             \
      for (int at = 0; OM_PREFETCH && at < OM_PANEL * OB_LANES * 4; at += 64)                                 \
        __builtin_prefetch((const char *)w + OM_AHEAD + at);                                                  \
      OM_NIBBLE(NB, 0); OM_NIBBLE(NB, 1); OM_NIBBLE(NB, 2); OM_NIBBLE(NB, 3);                                 \
      OM_NIBBLE(NB, 4); OM_NIBBLE(NB, 5); OM_NIBBLE(NB, 6); OM_NIBBLE(NB, 7);                                 \
    }                                                                                                         \
    for (int b = 0; b < NB; b++) om_fold(sum[b], OM_PANEL, out[b]);                                           \
  }
OM_WORDS_CASE(1)
OM_WORDS_CASE(2)

#if OM_VNNI && OM_GROUP_COLS == OM_WORD_COLS
/* A chunk is a group. Its inputs are digits (digits.h), those of a word's four low nibbles in one lane, then those of its
 * high ones, for each digit; behind them, as floats, the sums of the eight inputs of a lane. */
#define OM_CHUNK_BYTES ((2 * OM_PLANES + 1) * 64)
enum { OM_ROOM_w4a16 = OM_BATCH * OM_CHUNK_BYTES };

static __attribute__((noinline, unused)) om_input om_enter_w4a16(const float *x, long stride, long chunks, char *room) {
  om_input in = {x, stride, (const int8_t *)room, {0}};
  const __m512i byte = _mm512_set1_epi32(255);
  for (int b = 0; b < OM_BATCH; b++) {
    float bad;
    const float unit = om_unit(x + b * stride, chunks * OM_WORD_COLS, &bad);
    const __m512 f = _mm512_set1_ps(1.0f / unit);
    for (long k = 0; k < chunks; k++) {
      __m512i *to = (__m512i *)(room + (b * chunks + k) * OM_CHUNK_BYTES), rest[8], sum = _mm512_setzero_si512();
      for (int j = 0; j < 8; j++) {
        rest[j] = om_rounded(x + b * stride + k * OM_WORD_COLS + j * 16, f);
        sum = _mm512_add_epi32(sum, rest[j]);
      }
      for (int d = OM_PLANES - 1; d >= 0; d--) {
        __m512i half[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        for (int j = 0; j < 8; j++) {
          const __m512i digit = _mm512_srai_epi32(_mm512_slli_epi32(rest[j], 24), 24);
          rest[j] = _mm512_srai_epi32(_mm512_sub_epi32(rest[j], digit), 8);
          half[j & 1] = _mm512_or_si512(half[j & 1], _mm512_slli_epi32(_mm512_and_si512(digit, byte), 8 * (j / 2)));
        }
        _mm512_store_si512(to + 2 * d, half[0]);
        _mm512_store_si512(to + 2 * d + 1, half[1]);
      }
      _mm512_store_ps((float *)(to + 2 * OM_PLANES), _mm512_cvtepi32_ps(sum));
    }
    in.unit[b] = unit + bad;
  }
  return in;
}

#define OM_NIBBLES_CASE(NB)                                                                                   \
  OB_INLINE void om_nibbles_##NB(const char *w, const om_t_fp16 *scale, const uint8_t *zero,                  \
                                 const om_input *in, int first, long chunks, float (*out)[OM_PANEL]) {        \
    vf sum[NB][OM_PANEL];                                                                                     \
    for (int b = 0; b < NB; b++)                                                                              \
      for (int r = 0; r < OM_PANEL; r++) sum[b][r] = (vf){0};                                                 \
    const __m512i low = _mm512_set1_epi8(15);                                                                 \
    for (long k = 0; k < chunks; k++, w += OM_PANEL * 64, scale += OM_PANEL) {                                \
      float scales[OM_PANEL];                                                                                 \
      om_scales(scale, scales);                                                                               \
      for (int r = 0; r < OM_PANEL; r++) {                                                                    \
        const __m512i word = _mm512_loadu_si512(w + r * 64);                                                  \
        const __m512i v[2] = {_mm512_and_si512(word, low), _mm512_and_si512(_mm512_srli_epi32(word, 4), low)}; \
        const __m512 z = _mm512_set1_ps(zero ? (float)zero[r] : 8.0f);                                        \
        for (int b = 0; b < NB; b++) {                                                                        \
          const __m512i *x = (const __m512i *)((const char *)in->digits                                       \
                                               + ((first + b) * chunks + k) * OM_CHUNK_BYTES);                \
          __m512i acc[OM_PLANES];                                                                             \
          for (int d = 0; d < OM_PLANES; d++)                                                                 \
            acc[d] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), v[0], x[2 * d]), v[1],   \
                                         x[2 * d + 1]);                                                       \
          __m512 t = _mm512_cvtepi32_ps(acc[0]);                                                              \
          for (int d = 1; d < OM_PLANES; d++)                                                                 \
            t = _mm512_fmadd_ps(t, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(acc[d]));                       \
          t = _mm512_fnmadd_ps(z, _mm512_load_ps((const float *)(x + 2 * OM_PLANES)), t);                     \
          sum[b][r] = (vf)_mm512_fmadd_ps(_mm512_set1_ps(scales[r]), t, (__m512)sum[b][r]);                   \
        }                                                                                                     \
      }                                                                                                       \
      if (zero) zero += OM_PANEL;                                                                             \
    }                                                                                                         \
    for (int b = 0; b < NB; b++) {                                                                            \
      om_fold(sum[b], OM_PANEL, out[b]);                                                                      \
      for (int r = 0; r < OM_PANEL; r++) out[b][r] *= in->unit[first + b];                                    \
    }                                                                                                         \
  }
OM_NIBBLES_CASE(1)
OM_NIBBLES_CASE(2)
#define OM_WORDS_PANEL(NB, B) om_nibbles_##NB((const char *)w, scale, zero, in, B, chunks, out + (B))
#else
OM_PLAIN_INPUT(w4a16)
#define OM_WORDS_PANEL(NB, B)                                                                                 \
  om_panel_w4a16_##NB(w, scale, zero, in->x + (B) * in->stride, in->stride, chunks, out + (B))
#endif

/* Sums of panel number `p`; `chunks` of OM_WORD_COLS columns. */
OB_INLINE void om_product_w4a16(om_matrix m, long p, long chunks, const om_input *in, om_sums out) {
  const uint32_t *w = (const uint32_t *)m.w + p * chunks * OM_PANEL * OB_LANES;
  const long groups = (chunks * OM_WORD_COLS + OM_GROUP_COLS - 1) / OM_GROUP_COLS;
  const om_t_fp16 *scale = (const om_t_fp16 *)m.scale + p * groups * OM_PANEL;
  const uint8_t *zero = OM_ZEROS ? m.zero + p * groups * OM_PANEL : NULL;
  int b = 0;
  for (; b + 2 <= OM_BATCH; b += 2) OM_WORDS_PANEL(2, b);
  if (OM_BATCH & 1) OM_WORDS_PANEL(1, b);
}
