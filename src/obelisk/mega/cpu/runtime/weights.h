/* Packed matrices: how each format is loaded, and the product of a panel with the input rows of all slots.
 *
 * A product streams panels of OM_PANEL rows (plan/layout.py has the formulas): per chunk of columns the rows lie side
 * by side, each row has one vector of partial sums, and the input rows stay in the first cache. The order of additions
 * does not depend on tiles, threads or the other slots. A format F gives om_enter_F, om_product_F and, for the
 * embedding, om_row_F; the emitter instantiates those in use and names them om_enter and om_product (layers),
 * om_outer_enter, om_outer_product and om_outer_row.
 */
#if (defined(__AVX2__) && OB_LANES == 8) || (defined(__AVX512F__) && OB_LANES == 16)
#include <immintrin.h> /* compilers widen narrow elements one by one without being told */
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && OB_LANES == 16
#define OM_VNNI 1 /* products of bytes: digits.h */
#else
#define OM_VNNI 0
#endif

typedef struct { const char *w; const void *scale; const uint8_t *zero; } om_matrix;
typedef float om_sums[OM_BATCH][OM_PANEL];
typedef struct { /* the input rows of a product, made once for each task by om_enter_F in `OM_ROOM_F(chunks)` bytes */
  const float *x;
  long stride;
  const int8_t *digits;
  float unit[OM_BATCH];
} om_input;

OB_INLINE vf om_get(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
OB_INLINE void om_put(float *p, vf v) { memcpy(p, &v, sizeof v); }

typedef float om_t_fp32;
OB_INLINE vf om_load_fp32(const om_t_fp32 *p) { return om_get(p); }

typedef uint16_t om_t_bf16;
typedef uint16_t om_half __attribute__((vector_size(OB_LANES * 2)));
typedef uint32_t om_word __attribute__((vector_size(OB_LANES * 4)));
OB_INLINE vf om_load_bf16(const om_t_bf16 *p) {
#if defined(__AVX2__) && OB_LANES == 8
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#elif defined(__AVX512F__) && OB_LANES == 16
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#else
  om_half h;
  memcpy(&h, p, sizeof h);
  return (vf)(__builtin_convertvector(h, om_word) << 16);
#endif
}

typedef uint16_t om_t_fp16;
OB_INLINE vf om_load_fp16(const om_t_fp16 *p) {
#if defined(__F16C__) && OB_LANES == 8
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX512F__) && OB_LANES == 16
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__aarch64__) && OB_LANES == 4
  __fp16 h __attribute__((vector_size(8)));
  memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, vf);
#else
  vf v;
  OB_EACH v[l] = ob_from_f16(p[l]);
  return v;
#endif
}

typedef int8_t om_t_int8;
typedef int8_t om_byte __attribute__((vector_size(OB_LANES)));
OB_INLINE vf om_load_int8(const om_t_int8 *p) {
#if defined(__AVX2__) && OB_LANES == 8
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#elif defined(__AVX512F__) && OB_LANES == 16
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#else
  om_byte h;
  memcpy(&h, p, sizeof h);
  return __builtin_convertvector(__builtin_convertvector(h, vi), vf);
#endif
}

/* Sums of the lanes of N vectors, 4 or 8: for 8 lanes and more, pairs are added across vectors. */
#if (OB_LANES == 8 || OB_LANES == 16) && (defined(__clang__) || __GNUC__ >= 12)
#define OM_FOLD(a, b, ...) (__builtin_shufflevector(a, b, __VA_ARGS__))
typedef float om_eight __attribute__((vector_size(32)));
#if OB_LANES == 16
OB_INLINE om_eight om_half_of(vf v) {
  return OM_FOLD(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + OM_FOLD(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
}
#else
OB_INLINE om_eight om_half_of(vf v) { return v; }
#endif
OB_INLINE om_eight om_pairs(vf x, vf y) {
  const om_eight a = om_half_of(x), b = om_half_of(y);
  return OM_FOLD(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + OM_FOLD(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
}
OB_INLINE om_eight om_quads(om_eight a, om_eight b) {
  return OM_FOLD(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + OM_FOLD(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}
OB_INLINE void om_fold(const vf *v, int n, float *out) {
  const om_eight a = om_quads(om_pairs(v[0], v[1]), om_pairs(v[2], v[3]));
  if (n == 8) {
    const om_eight b = om_quads(om_pairs(v[4], v[5]), om_pairs(v[6], v[7]));
    const om_eight s = OM_FOLD(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + OM_FOLD(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    memcpy(out, &s, sizeof s);
  } else {
    const om_eight s = a + OM_FOLD(a, a, 4, 5, 6, 7, 0, 1, 2, 3);
    memcpy(out, &s, 4 * sizeof(float));
  }
}
#else
OB_INLINE void om_fold(const vf *v, int n, float *out) {
  for (int i = 0; i < n; i++) out[i] = ob_hsum_f(v[i]);
}
#endif

/* With vectors of 8, narrow weights keep few lines in flight by themselves, so every line of their stream is asked for
 * 2 KB ahead: measured on Zen 3, int8 10.6 -> 13.8 GB/s of 14.4 a core. fp32 loses by it (86% -> 77%), and so does any
 * format when only one line in two or four is asked for. With vectors of 16 all lose by it (Zen 4, of 33 GB/s a core:
 * int8 75% and 86% without, bf16 77% and 93%). */
#define OM_AHEAD 2048
#define OM_PREFETCH (OB_LANES < 16)

/* One panel times the input rows of NB slots. */
#define OM_PANEL_CASE(F, NB)                                                                                  \
  OB_INLINE void om_panel_##F##_##NB(const om_t_##F *w, const float *x, long stride, long chunks,             \
                                     float (*out)[OM_PANEL]) {                                                \
    vf acc[NB][OM_PANEL];                                                                                     \
    for (int b = 0; b < NB; b++)                                                                              \
      for (int r = 0; r < OM_PANEL; r++) acc[b][r] = (vf){0};                                                 \
    for (long k = 0; k < chunks; k++, w += OM_PANEL * OB_LANES) {                                             \
      for (int at = 0; OM_PREFETCH && sizeof *w < 4 && at < (int)(OM_PANEL * OB_LANES * sizeof *w); at += 64) \
        __builtin_prefetch((const char *)w + OM_AHEAD + at);                                                  \
      vf v[OM_PANEL];                                                                                         \
      for (int r = 0; r < OM_PANEL; r++) v[r] = om_load_##F(w + r * OB_LANES);                                \
      for (int b = 0; b < NB; b++) {                                                                          \
        const vf xv = om_get(x + b * stride + k * OB_LANES);                                                  \
        for (int r = 0; r < OM_PANEL; r++) acc[b][r] += v[r] * xv;                                            \
      }                                                                                                       \
    }                                                                                                         \
    for (int b = 0; b < NB; b++) om_fold(acc[b], OM_PANEL, out[b]);                                           \
  }

#define OM_PLAIN_INPUT(F)                                                                                     \
  enum { OM_ROOM_##F = 0 };                                                                                   \
  OB_INLINE om_input om_enter_##F(const float *x, long stride, long chunks, char *room) {                     \
    (void)chunks, (void)room;                                                                                 \
    return (om_input){x, stride, NULL, {0}};                                                                  \
  }

/* Row `row` itself, by its scale where the format has one. */
#define OM_ROW(F, SCALED)                                                                                     \
  OB_INLINE void om_row_##F(om_matrix m, long row, long chunks, float *to) {                                  \
    const om_t_##F *w = (const om_t_##F *)m.w + row / OM_PANEL * chunks * OM_PANEL * OB_LANES                 \
                        + row % OM_PANEL * OB_LANES;                                                          \
    const vf f = ob_splat_f(SCALED ? ((const float *)m.scale)[row] : 1.0f);                                   \
    for (long k = 0; k < chunks; k++) om_put(to + k * OB_LANES, om_load_##F(w + k * OM_PANEL * OB_LANES) * f); \
  }

/* Sums of panel number `p`. */
#define OM_PRODUCT(F, SCALED)                                                                                 \
  OM_PANEL_CASE(F, 1)                                                                                         \
  OM_PANEL_CASE(F, 2)                                                                                         \
  OM_ROW(F, SCALED)                                                                                           \
  OM_PLAIN_INPUT(F)                                                                                           \
  OB_INLINE void om_product_##F(om_matrix m, long p, long chunks, const om_input *in, om_sums out) {          \
    const om_t_##F *w = (const om_t_##F *)m.w + p * chunks * OM_PANEL * OB_LANES;                             \
    const float *x = in->x;                                                                                   \
    const long stride = in->stride;                                                                           \
    int b = 0;                                                                                                \
    for (; b + 2 <= OM_BATCH; b += 2) om_panel_##F##_2(w, x + b * stride, stride, chunks, out + b);           \
    if (OM_BATCH & 1) om_panel_##F##_1(w, x + b * stride, stride, chunks, out + b);                           \
    for (b = 0; SCALED && b < OM_BATCH; b++)                                                                  \
      for (int r = 0; r < OM_PANEL; r++) out[b][r] *= ((const float *)m.scale)[p * OM_PANEL + r];             \
  }
