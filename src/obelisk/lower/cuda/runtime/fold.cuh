// Fast scalar functions, folds over lanes, and vectors between registers and memory.

#define OB_LOG2E 1.4426950408889634f
OB_DEVICE float ob_exp2(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
OB_DEVICE float ob_fast_exp(float v) { return ob_exp2(v * OB_LOG2E); }
OB_DEVICE float ob_fast_sigmoid(float v) { return __fdividef(1.0f, 1.0f + ob_fast_exp(-v)); }
// exp(old - now) for a running maximum: 0 while nothing was seen.
OB_DEVICE float ob_decay(float old, float now) { return old == -OB_INF ? 0.0f : ob_fast_exp(old - now); }
// exp(v - peak), the peak in units of log 2.
OB_DEVICE float ob_exp_below(float v, float peak) { return ob_exp2(fmaf(v, OB_LOG2E, -peak)); }
OB_DEVICE float ob_fast_sqrt(float v) {
  float r;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
OB_DEVICE float ob_fast_inverse(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
OB_DEVICE float ob_fast_inverse_root(float v) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
OB_DEVICE float ob_fast_max(float a, float b) { return fmaxf(a, b); }

template <class F, int FIRST, int LAST, class T> OB_DEVICE T ob_lane_fold(T v) {
#pragma unroll
  for (int d = FIRST; d <= LAST; d <<= 1) v = F::join(v, __shfl_xor_sync(0xffffffffu, v, d));
  return v;
}

// Up to 16 bytes at once between device memory and registers.
template <int BYTES> struct ob_wide;
template <> struct ob_wide<4> { typedef unsigned type; };
template <> struct ob_wide<8> { typedef uint2 type; };
template <> struct ob_wide<16> { typedef uint4 type; };
template <int N, class T> OB_DEVICE void ob_read(float *v, const T *from) {
  union {
    typename ob_wide<N * sizeof(T)>::type wide;
    T part[N];
  } u;
  u.wide = *(const typename ob_wide<N * sizeof(T)>::type *)from;
#pragma unroll
  for (int i = 0; i < N; i++) v[i] = ob_f(u.part[i]);
}
template <int N, class T> OB_DEVICE void ob_write(T *to, const float *v) {
  union {
    typename ob_wide<N * sizeof(T)>::type wide;
    T part[N];
  } u;
#pragma unroll
  for (int i = 0; i < N; i++) ob_put(&u.part[i], v[i]);
  *(typename ob_wide<N * sizeof(T)>::type *)to = u.wide;
}
