// Element types and scalar operators. No includes: everything is plain CUDA C++ and PTX, so that it
// compiles without any header at hand.
#define OB_DEVICE __device__ __forceinline__
#define OB_INF __int_as_float(0x7f800000)

struct ob_f16 { unsigned short x; };
struct ob_bf16 { unsigned short x; };
struct ob_f8 { unsigned char x; };  // e4m3, no infinity
typedef unsigned char ob_bool;

OB_DEVICE float ob_f(float v) { return v; }
OB_DEVICE float ob_f(double v) { return (float)v; }
OB_DEVICE float ob_f(int v) { return (float)v; }
OB_DEVICE float ob_f(signed char v) { return (float)v; }
OB_DEVICE float ob_f(bool v) { return v ? 1.0f : 0.0f; }
OB_DEVICE float ob_f(ob_bool v) { return v ? 1.0f : 0.0f; }
OB_DEVICE float ob_f(ob_f16 v) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v.x));
  return r;
}
OB_DEVICE float ob_f(ob_bf16 v) { return __uint_as_float((unsigned)v.x << 16); }
OB_DEVICE float ob_f(ob_f8 v) {
  const unsigned e = (v.x >> 3) & 15, m = v.x & 7, sign = (unsigned)(v.x & 128) << 24;
  if ((v.x & 127) == 127) return __uint_as_float(0x7fc00000);
  const float a = e ? __uint_as_float((e + 120) << 23 | m << 20) : (float)m * 0.001953125f;
  return __uint_as_float(__float_as_uint(a) | sign);
}

template <class T> OB_DEVICE double ob_d(T v) { return (double)ob_f(v); }
template <> OB_DEVICE double ob_d<double>(double v) { return v; }
template <> OB_DEVICE double ob_d<int>(int v) { return (double)v; }
template <class T> OB_DEVICE int ob_i(T v) { return (int)ob_f(v); }
template <> OB_DEVICE int ob_i<int>(int v) { return v; }
template <> OB_DEVICE int ob_i<double>(double v) { return (int)v; }
template <class T> OB_DEVICE bool ob_m(T v) { return ob_f(v) != 0.0f; }
template <> OB_DEVICE bool ob_m<int>(int v) { return v != 0; }
template <> OB_DEVICE bool ob_m<double>(double v) { return v != 0.0; }
template <> OB_DEVICE bool ob_m<bool>(bool v) { return v; }

OB_DEVICE void ob_put(float *p, float v) { *p = v; }
OB_DEVICE void ob_put(double *p, double v) { *p = v; }
OB_DEVICE void ob_put(int *p, int v) { *p = v; }
OB_DEVICE void ob_put(signed char *p, int v) { *p = (signed char)v; }
OB_DEVICE void ob_put(ob_bool *p, bool v) { *p = v; }
OB_DEVICE ob_f16 ob_to_f16(float v) {
  ob_f16 r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.x) : "f"(v));
  return r;
}
OB_DEVICE ob_bf16 ob_to_bf16(float v) {
  ob_bf16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.x) : "f"(v));
  return r;
}
OB_DEVICE void ob_put(ob_f16 *p, float v) { *p = ob_to_f16(v); }
OB_DEVICE void ob_put(ob_bf16 *p, float v) { *p = ob_to_bf16(v); }
OB_DEVICE void ob_put(ob_f8 *p, float v) {
  const unsigned bits = __float_as_uint(v), a = bits & 0x7fffffffu, sign = bits >> 24 & 128;
  unsigned code;
  if (!(a <= 0x43e80000u)) {  // above 464, or no number
    code = 127;
  } else if (a < 0x3c800000u) {  // below 2^-6: steps of 2^-9
    code = (unsigned)rintf(__uint_as_float(a) * 512.0f);
  } else {
    code = ((a + 0x7ffffu + (a >> 20 & 1)) >> 20) - (120u << 3);
  }
  p->x = (unsigned char)(sign | code);
}

OB_DEVICE int ob_wrap8(int v) { return (int)(signed char)v; }
template <class T> OB_DEVICE T ob_max(T a, T b) { return a > b || a != a ? a : b; }
template <class T> OB_DEVICE T ob_min(T a, T b) { return a < b || a != a ? a : b; }
OB_DEVICE float ob_exp(float v) { return expf(v); }
OB_DEVICE double ob_exp(double v) { return exp(v); }
OB_DEVICE float ob_log(float v) { return logf(v); }
OB_DEVICE double ob_log(double v) { return log(v); }
OB_DEVICE float ob_sqrt(float v) { return sqrtf(v); }
OB_DEVICE double ob_sqrt(double v) { return sqrt(v); }
OB_DEVICE float ob_rsqrt(float v) { return 1.0f / sqrtf(v); }
OB_DEVICE double ob_rsqrt(double v) { return 1.0 / sqrt(v); }
OB_DEVICE float ob_tanh(float v) { return tanhf(v); }
OB_DEVICE double ob_tanh(double v) { return tanh(v); }
OB_DEVICE float ob_erf(float v) { return erff(v); }
OB_DEVICE double ob_erf(double v) { return erf(v); }
OB_DEVICE float ob_sigmoid(float v) { return 1.0f / (1.0f + expf(-v)); }
OB_DEVICE double ob_sigmoid(double v) { return 1.0 / (1.0 + exp(-v)); }

// How much of a tile is there: the part of [at, at + chunk) that starts at `from` and is `tile`
// long, within `full`.
OB_DEVICE int ob_part(int full, int at, int chunk, int from, int tile) {
  int stop = from + tile < chunk ? from + tile : chunk;
  stop = at + stop < full ? at + stop : full;
  const int n = stop - (at + from);
  return n > 0 ? n : 0;
}

// Folds over a warp. Every lane gets the result.
struct ob_sum_fold {
  template <class T> OB_DEVICE static T join(T a, T b) { return a + b; }
};
struct ob_max_fold {
  template <class T> OB_DEVICE static T join(T a, T b) { return ob_max(a, b); }
};
template <class F, class T> OB_DEVICE T ob_warp_fold(T v) {
#pragma unroll
  for (int d = 16; d; d >>= 1) v = F::join(v, __shfl_xor_sync(0xffffffffu, v, d));
  return v;
}

// First statement of every kernel: a launch may begin before the one ahead of it in the stream has
// ended; from here on that one's results are there, and the next launch may begin.
OB_DEVICE void ob_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#endif
}
