/* Vectors of OB_LANES elements, loads and stores of every element type, and elementwise functions.
 *
 * The emitter defines OB_LANES (f32 elements of a vector register) in front. Every type has the same number of
 * lanes: vf f32, vd f64, vi i32 (also i8, and bool as a mask of 0 and -1). Only GNU vector extensions are used, so
 * gcc and clang compile this for any instruction set. Tails are loaded and stored element by element.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define OB_INLINE static inline __attribute__((always_inline, unused))

typedef float vf __attribute__((vector_size(OB_LANES * 4)));
typedef int32_t vi __attribute__((vector_size(OB_LANES * 4)));
typedef double vd __attribute__((vector_size(OB_LANES * 8)));
typedef int64_t vl __attribute__((vector_size(OB_LANES * 8)));

#define OB_EACH for (int l = 0; l < OB_LANES; l++)

/* ---- narrow floats ---- */
typedef uint16_t ob_f16;
typedef uint16_t ob_bf16;
typedef uint8_t ob_f8;

OB_INLINE float ob_bits_f32(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
OB_INLINE uint32_t ob_f32_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

OB_INLINE float ob_from_bf16(ob_bf16 h) { return ob_bits_f32((uint32_t)h << 16); }
OB_INLINE ob_bf16 ob_to_bf16(float f) {
  uint32_t u = ob_f32_bits(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (ob_bf16)((u >> 16) | 0x40u); /* NaN stays NaN */
  return (ob_bf16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

#if defined(__FLT16_MANT_DIG__) && !defined(OB_NO_FLOAT16)
OB_INLINE float ob_from_f16(ob_f16 h) { _Float16 x; memcpy(&x, &h, 2); return (float)x; }
OB_INLINE ob_f16 ob_to_f16(float f) { _Float16 x = (_Float16)f; ob_f16 h; memcpy(&h, &x, 2); return h; }
#else
OB_INLINE float ob_from_f16(ob_f16 h) {
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu;
  if (rest >= 0x7c00u) return ob_bits_f32(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  float f = ob_bits_f32(rest << 13) * 0x1p112f; /* rebias; subnormals come out right */
  return ob_bits_f32(ob_f32_bits(f) | sign);
}
OB_INLINE ob_f16 ob_to_f16(float f) {
  uint32_t u = ob_f32_bits(f), sign = (u >> 16) & 0x8000u;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return (ob_f16)(sign | 0x7e00u);
  if (u >= 0x477ff000u) return (ob_f16)(sign | 0x7c00u);
  if (u < 0x38800000u) /* subnormal: let the adder round */
    return (ob_f16)(sign | (ob_f32_bits(ob_bits_f32(u) + 0.5f) - 0x3f000000u));
  return (ob_f16)(sign | ((u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13));
}
#endif

/* e4m3 without infinities: 1 sign, 4 exponent (bias 7), 3 mantissa bits; 0x7f is NaN, overflow becomes NaN. */
OB_INLINE float ob_from_f8(ob_f8 h) {
  uint32_t sign = (uint32_t)(h & 0x80u) << 24, rest = h & 0x7fu;
  if (rest == 0x7fu) return ob_bits_f32(sign | 0x7fc00000u);
  float f = ob_bits_f32(rest << 20) * 0x1p120f;
  return ob_bits_f32(ob_f32_bits(f) | sign);
}
OB_INLINE ob_f8 ob_to_f8(float f) {
  uint32_t u = ob_f32_bits(f), sign = (u >> 24) & 0x80u;
  u &= 0x7fffffffu;
  if (u > 0x43e80000u) return (ob_f8)(sign | 0x7fu); /* above 464 (448 and half a step) */
  if (u < 0x3c800000u) return (ob_f8)(sign | (ob_f32_bits(ob_bits_f32(u) + 16384.0f) - 0x46800000u));
  uint32_t r = (u - 0x3c000000u + 0x7ffffu + ((u >> 20) & 1u)) >> 20;
  return (ob_f8)(sign | (r > 0x7fu ? 0x7fu : r));
}

/* ---- splats, conversions, selection ---- */
OB_INLINE vf ob_splat_f(float x) { return x - (vf){0}; }
OB_INLINE vd ob_splat_d(double x) { return x - (vd){0}; }
OB_INLINE vi ob_splat_i(int32_t x) { return x - (vi){0}; }

OB_INLINE vd ob_fd(vf x) { return __builtin_convertvector(x, vd); }
OB_INLINE vf ob_df(vd x) { return __builtin_convertvector(x, vf); }
OB_INLINE vi ob_fi(vf x) { return __builtin_convertvector(x, vi); }
OB_INLINE vi ob_di(vd x) { return __builtin_convertvector(x, vi); }
OB_INLINE vf ob_if(vi x) { return __builtin_convertvector(x, vf); }
OB_INLINE vd ob_id(vi x) { return __builtin_convertvector(x, vd); }
OB_INLINE vi ob_mi(vi m) { return m & 1; }
OB_INLINE vi ob_wrap8(vi x) { return (x << 24) >> 24; }
OB_INLINE vi ob_fm(vf x) { return x != ob_splat_f(0.0f); }
OB_INLINE vi ob_im(vi x) { return x != ob_splat_i(0); }
OB_INLINE vi ob_dm(vd x) { return __builtin_convertvector(x != ob_splat_d(0.0), vi); }

OB_INLINE vf ob_sel_f(vi m, vf a, vf b) { return (vf)((m & (vi)a) | (~m & (vi)b)); }
OB_INLINE vi ob_sel_i(vi m, vi a, vi b) { return (m & a) | (~m & b); }
OB_INLINE vd ob_sel_d(vi m, vd a, vd b) {
  vl w = __builtin_convertvector(m, vl);
  return (vd)((w & (vl)a) | (~w & (vl)b));
}

OB_INLINE vi ob_less_f(vf a, vf b) { return a < b; }
OB_INLINE vi ob_less_i(vi a, vi b) { return a < b; }
OB_INLINE vi ob_less_d(vd a, vd b) { return __builtin_convertvector(a < b, vi); }

OB_INLINE vi ob_iota(int32_t from) { vi r; OB_EACH r[l] = from + l; return r; }
/* A mask of the first n lanes. */
OB_INLINE vi ob_first(long n) { vi r; OB_EACH r[l] = l; return r < ob_splat_i((int32_t)n); }

/* ---- loads: whole vectors, the first n, every s-th element, the first n of those, one element in all lanes ---- */
#define OB_MEMORY(NAME, T, V, S, FROM, TO)                                                                    \
  OB_INLINE V ob_ldt_##NAME(const T *p, long n) {                                                             \
    S x[OB_LANES] = {0};                                                                                      \
    for (long l = 0; l < n; l++) x[l] = FROM(p[l]);                                                           \
    V v; memcpy(&v, x, sizeof v); return v;                                                                   \
  }                                                                                                           \
  OB_INLINE V ob_ldg_##NAME(const T *p, long s) {                                                             \
    S x[OB_LANES];                                                                                            \
    OB_EACH x[l] = FROM(p[l * s]);                                                                            \
    V v; memcpy(&v, x, sizeof v); return v;                                                                   \
  }                                                                                                           \
  OB_INLINE V ob_ldgt_##NAME(const T *p, long s, long n) {                                                    \
    S x[OB_LANES] = {0};                                                                                      \
    for (long l = 0; l < n; l++) x[l] = FROM(p[l * s]);                                                       \
    V v; memcpy(&v, x, sizeof v); return v;                                                                   \
  }                                                                                                           \
  OB_INLINE V ob_sp_##NAME(const T *p) { return FROM(*p) - (V){0}; }                                          \
  OB_INLINE void ob_stt_##NAME(T *p, V v, long n) {                                                           \
    S x[OB_LANES]; memcpy(x, &v, sizeof v);                                                                   \
    for (long l = 0; l < n; l++) p[l] = TO(x[l]);                                                             \
  }                                                                                                           \
  OB_INLINE void ob_sts_##NAME(T *p, long s, V v) {                                                           \
    S x[OB_LANES]; memcpy(x, &v, sizeof v);                                                                   \
    OB_EACH p[l * s] = TO(x[l]);                                                                              \
  }                                                                                                           \
  OB_INLINE void ob_stst_##NAME(T *p, long s, V v, long n) {                                                  \
    S x[OB_LANES]; memcpy(x, &v, sizeof v);                                                                   \
    for (long l = 0; l < n; l++) p[l * s] = TO(x[l]);                                                         \
  }

#define OB_DENSE(NAME, T, V)                                                                                  \
  OB_INLINE V ob_ld_##NAME(const T *p) { V v; memcpy(&v, p, sizeof v); return v; }                            \
  OB_INLINE void ob_st_##NAME(T *p, V v) { memcpy(p, &v, sizeof v); }

#define OB_CONVERTED(NAME, T, V, S, FROM, TO)                                                                 \
  OB_INLINE V ob_ld_##NAME(const T *p) {                                                                      \
    S x[OB_LANES];                                                                                            \
    OB_EACH x[l] = FROM(p[l]);                                                                                \
    V v; memcpy(&v, x, sizeof v); return v;                                                                   \
  }                                                                                                           \
  OB_INLINE void ob_st_##NAME(T *p, V v) {                                                                    \
    S x[OB_LANES]; memcpy(x, &v, sizeof v);                                                                   \
    OB_EACH p[l] = TO(x[l]);                                                                                  \
  }

#define OB_SAME(x) (x)
#define OB_TO_I8(x) ((int8_t)(uint8_t)(uint32_t)(x))
#define OB_FROM_BOOL(x) (-(int32_t)((x) != 0))
#define OB_TO_BOOL(x) ((uint8_t)((x) & 1))
OB_MEMORY(f32, float, vf, float, OB_SAME, OB_SAME)
OB_DENSE(f32, float, vf)
OB_MEMORY(f64, double, vd, double, OB_SAME, OB_SAME)
OB_DENSE(f64, double, vd)
OB_MEMORY(i32, int32_t, vi, int32_t, OB_SAME, OB_SAME)
OB_DENSE(i32, int32_t, vi)
OB_MEMORY(i8, int8_t, vi, int32_t, OB_SAME, OB_TO_I8)
OB_CONVERTED(i8, int8_t, vi, int32_t, OB_SAME, OB_TO_I8)
OB_MEMORY(bool, uint8_t, vi, int32_t, OB_FROM_BOOL, OB_TO_BOOL)
OB_CONVERTED(bool, uint8_t, vi, int32_t, OB_FROM_BOOL, OB_TO_BOOL)
OB_MEMORY(f16, ob_f16, vf, float, ob_from_f16, ob_to_f16)
OB_CONVERTED(f16, ob_f16, vf, float, ob_from_f16, ob_to_f16)
OB_MEMORY(bf16, ob_bf16, vf, float, ob_from_bf16, ob_to_bf16)
OB_CONVERTED(bf16, ob_bf16, vf, float, ob_from_bf16, ob_to_bf16)
OB_MEMORY(f8e4m3, ob_f8, vf, float, ob_from_f8, ob_to_f8)
OB_CONVERTED(f8e4m3, ob_f8, vf, float, ob_from_f8, ob_to_f8)

/* ---- maximum, minimum: a NaN operand gives NaN, as in numpy ---- */
OB_INLINE vf ob_max_f(vf a, vf b) {
  vf r;
  OB_EACH r[l] = a[l] > b[l] ? a[l] : b[l]; /* one instruction; gives b where either is NaN */
  return ob_sel_f(a != a, a, r);
}
OB_INLINE vf ob_min_f(vf a, vf b) {
  vf r;
  OB_EACH r[l] = a[l] < b[l] ? a[l] : b[l];
  return ob_sel_f(a != a, a, r);
}
OB_INLINE vd ob_max_d(vd a, vd b) {
  vd r;
  OB_EACH r[l] = a[l] > b[l] || a[l] != a[l] ? a[l] : b[l];
  return r;
}
OB_INLINE vd ob_min_d(vd a, vd b) {
  vd r;
  OB_EACH r[l] = a[l] < b[l] || a[l] != a[l] ? a[l] : b[l];
  return r;
}
OB_INLINE vi ob_max_i(vi a, vi b) { return ob_sel_i(a > b, a, b); }
OB_INLINE vi ob_min_i(vi a, vi b) { return ob_sel_i(a < b, a, b); }

/* ---- across lanes ---- */
OB_INLINE float ob_hsum_f(vf v) { float x[OB_LANES]; memcpy(x, &v, sizeof v);
  for (int h = OB_LANES / 2; h; h /= 2) for (int l = 0; l < h; l++) x[l] += x[l + h];
  return x[0]; }
OB_INLINE double ob_hsum_d(vd v) { double x[OB_LANES]; memcpy(x, &v, sizeof v);
  for (int h = OB_LANES / 2; h; h /= 2) for (int l = 0; l < h; l++) x[l] += x[l + h];
  return x[0]; }
OB_INLINE int32_t ob_hsum_i(vi v) { uint32_t s = 0; OB_EACH s += (uint32_t)v[l]; return (int32_t)s; }
OB_INLINE float ob_hmax_f(vf v) { float m = v[0];
  OB_EACH m = v[l] > m || v[l] != v[l] ? v[l] : m;
  return m; }
OB_INLINE double ob_hmax_d(vd v) { double m = v[0];
  OB_EACH m = v[l] > m || v[l] != v[l] ? v[l] : m;
  return m; }
OB_INLINE int32_t ob_hmax_i(vi v) { int32_t m = v[0]; OB_EACH m = v[l] > m ? v[l] : m; return m; }

/* ---- square roots ---- */
OB_INLINE vf ob_sqrt_f(vf x) { vf r; OB_EACH r[l] = __builtin_sqrtf(x[l]); return r; }
OB_INLINE vd ob_sqrt_d(vd x) { vd r; OB_EACH r[l] = __builtin_sqrt(x[l]); return r; }
OB_INLINE vf ob_rsqrt_f(vf x) { return ob_splat_f(1.0f) / ob_sqrt_f(x); }
OB_INLINE vd ob_rsqrt_d(vd x) { return ob_splat_d(1.0) / ob_sqrt_d(x); }
/* 1 / x to multiply with in place of dividing by x: finite for every x that is not 0. */
OB_INLINE vf ob_recip_f(vf x) {
  vf r = ob_splat_f(1.0f) / x;
  vi over = ((vi)r & 0x7fffffff) == 0x7f800000;
  vf most = (vf)(((vi)r & (int32_t)0x80000000) | 0x7f7fffff);
  return ob_sel_f(over & (x != ob_splat_f(0.0f)), most, r);
}

/* ---- exp, log, tanh, sigmoid, erf in f32 ----
 * Coefficients: minimax fits (iteratively reweighted least squares in f64) of the functions named beside them.
 *
 * exp: x = n*ln2 + r, |r| <= ln2/2, a polynomial in r, and n added to the exponent bits. Results below the smallest
 * normal number are 0.
 */
OB_INLINE vf ob_clamp_f(vf x, float low, float high) { /* NaN becomes `high` */
  OB_EACH x[l] = x[l] < high ? x[l] : high;
  OB_EACH x[l] = x[l] > low ? x[l] : low;
  return x;
}
OB_INLINE vf ob_exp_f(vf x) {
  vf c = ob_clamp_f(x, -87.336544f, 88.722839f);
  vf magic = ob_splat_f(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer, kept in the low bits */
  vf t = c * ob_splat_f(1.44269504f) + magic;
  vf k = t - magic;
  vf r = c - k * ob_splat_f(0.693359375f); /* ln2 in two parts, the first exact in products with k */
  r = r + k * ob_splat_f(2.12194440e-4f);
  vf p = ob_splat_f(0.000197903571f); /* (e^r - 1 - r) / r^2 */
  p = p * r + ob_splat_f(0.00139446493f);
  p = p * r + ob_splat_f(0.008333497f);
  p = p * r + ob_splat_f(0.0416662951f);
  p = p * r + ob_splat_f(0.166666659f);
  p = p * r + ob_splat_f(0.500000007f);
  p = p * (r * r) + (r + ob_splat_f(1.0f));
  vf y = (vf)((vi)p + ((vi)t << 23));
  y = (vf)((vi)y & (x >= ob_splat_f(-87.336544f)));
  y = ob_sel_f(x > ob_splat_f(88.722839f), ob_splat_f(INFINITY), y);
  return ob_sel_f(x != x, x, y);
}
/* log: x = m * 2^e, m in [sqrt(1/2), sqrt(2)), f = m - 1, log m = f - f^2/2 + f^3 * P(f). */
OB_INLINE vf ob_log_f(vf x) {
  vi tiny = (x < ob_splat_f(1.17549435e-38f)) & (x > ob_splat_f(0.0f));
  vf s = ob_sel_f(tiny, x * ob_splat_f(8388608.0f), x);
  vi bits = (vi)s - 0x3f3504f3; /* sqrt(1/2) */
  vi e = bits >> 23;
  vf f = (vf)((bits & 0x7fffff) + 0x3f3504f3) - ob_splat_f(1.0f);
  vf k = ob_if(e) - ob_sel_f(tiny, ob_splat_f(23.0f), ob_splat_f(0.0f));
  vf p = ob_splat_f(0.0674660133f); /* (log(1+f) - f + f^2/2) / f^3 */
  p = p * f + ob_splat_f(-0.116756413f);
  p = p * f + ob_splat_f(0.118881746f);
  p = p * f + ob_splat_f(-0.124055914f);
  p = p * f + ob_splat_f(0.142195509f);
  p = p * f + ob_splat_f(-0.166679957f);
  p = p * f + ob_splat_f(0.200021187f);
  p = p * f + ob_splat_f(-0.250000096f);
  p = p * f + ob_splat_f(0.333333126f);
  vf z = f * f;
  vf y = p * f * z - k * ob_splat_f(2.12194440e-4f);
  y = y - ob_splat_f(0.5f) * z;
  y = (f + y) + k * ob_splat_f(0.693359375f);
  y = ob_sel_f(x == ob_splat_f(INFINITY), x, y);
  y = ob_sel_f(x == ob_splat_f(0.0f), ob_splat_f(-INFINITY), y);
  return ob_sel_f((x < ob_splat_f(0.0f)) | (x != x), ob_splat_f(NAN), y);
}
OB_INLINE vf ob_abs_f(vf x) { return (vf)((vi)x & 0x7fffffff); }
OB_INLINE vf ob_sign_f(vf x, vf magnitude) { return (vf)((vi)magnitude | ((vi)x & (int32_t)0x80000000)); }
/* tanh: an odd polynomial below 0.625, else 1 - 2 / (e^(2|x|) + 1). */
OB_INLINE vf ob_tanh_f(vf x) {
  vf a = ob_abs_f(x), z = x * x;
  vf p = ob_splat_f(-0.00570497837f); /* (tanh x - x) / x^3 in z = x^2 */
  p = p * z + ob_splat_f(0.0206390787f);
  p = p * z + ob_splat_f(-0.0537397122f);
  p = p * z + ob_splat_f(0.133314422f);
  p = p * z + ob_splat_f(-0.333332819f);
  vf small = p * z * x + x;
  vf large = ob_splat_f(1.0f) - ob_splat_f(2.0f) / (ob_exp_f(a + a) + ob_splat_f(1.0f));
  return ob_sel_f(a < ob_splat_f(0.625f), small, ob_sel_f(x != x, x, ob_sign_f(x, large)));
}
OB_INLINE vf ob_sigmoid_f(vf x) { return ob_splat_f(1.0f) / (ob_splat_f(1.0f) + ob_exp_f(-x)); }
/* erf: x + x * P(x^2) up to 1, else 1 - e^Q(|x|) with Q = log(erfc) on [1, 4]; 1 above. */
OB_INLINE vf ob_erf_f(vf x) {
  vf a = ob_abs_f(x), z = x * x;
  vf p = ob_splat_f(7.8538577e-05f); /* erf(x)/x - 1 in z = x^2 */
  p = p * z + ob_splat_f(-0.000801019252f);
  p = p * z + ob_splat_f(0.00518832756f);
  p = p * z + ob_splat_f(-0.0268538119f);
  p = p * z + ob_splat_f(0.112835851f);
  p = p * z + ob_splat_f(-0.376126258f);
  p = p * z + ob_splat_f(0.128379166f);
  vf small = p * x + x;
  vf c = ob_clamp_f(a, 1.0f, 4.0f);
  vf q = ob_splat_f(-2.168685e-05f);
  q = q * c + ob_splat_f(0.000441336377f);
  q = q * c + ob_splat_f(-0.00420456188f);
  q = q * c + ob_splat_f(0.0252082567f);
  q = q * c + ob_splat_f(-0.108418577f);
  q = q * c + ob_splat_f(-0.633219893f);
  q = q * c + ob_splat_f(-1.12957842f);
  q = q * c + ob_splat_f(0.000188040231f);
  vf large = ob_sign_f(x, ob_splat_f(1.0f) - ob_exp_f(q));
  return ob_sel_f(a < ob_splat_f(1.0f), small, ob_sel_f(x != x, x, large));
}

/* ---- the same in f64, by the C library ---- */
OB_INLINE vd ob_exp_d(vd x) { OB_EACH x[l] = exp(x[l]); return x; }
OB_INLINE vd ob_log_d(vd x) { OB_EACH x[l] = log(x[l]); return x; }
OB_INLINE vd ob_tanh_d(vd x) { OB_EACH x[l] = tanh(x[l]); return x; }
OB_INLINE vd ob_erf_d(vd x) { OB_EACH x[l] = erf(x[l]); return x; }
OB_INLINE vd ob_sigmoid_d(vd x) { OB_EACH x[l] = 1.0 / (1.0 + exp(-x[l])); return x; }
