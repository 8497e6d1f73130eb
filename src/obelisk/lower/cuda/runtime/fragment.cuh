// Matrix fragments of a warp: copies to shared memory, ldmatrix, mma, and fast scalar functions.
// Fragment values are f32 arrays v[rows][columns] in the order of the mma instruction's results:
// row r of a lane is (r / 2) * 16 + (r % 2) * 8 + lane / 4, column q is (q / 2) * 8 + lane % 4 * 2 + q % 2.

OB_DEVICE unsigned ob_shared(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

// 16 bytes from device to shared memory, of which the first `valid` are read and the rest is zero.
OB_DEVICE void ob_copy16(unsigned to, const void *from, int valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid)
               : "memory");
}
OB_DEVICE void ob_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> OB_DEVICE void ob_copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

OB_DEVICE void ob_copy16(unsigned to, const void *from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// A tile of ROWS by COLUMNS 16-bit elements, of which rows by columns exist (all of them if FULL), by
// THREADS threads. `stride` is in elements between rows in device memory, STRIDE in bytes in shared
// memory.
template <int ROWS, int COLUMNS, int STRIDE, int THREADS, bool FULL, class T>
OB_DEVICE void ob_copy_tile(unsigned to, const T *from, long long stride, int rows, int columns, int t) {
  constexpr int CHUNKS = COLUMNS / 8, TOTAL = ROWS * CHUNKS;
  constexpr bool EVEN = THREADS % CHUNKS == 0;  // then a thread stays in its column
  constexpr int STEP = EVEN ? THREADS / CHUNKS : 1;
  const int first = t / CHUNKS, across = t % CHUNKS;
  const T *const source = from + first * stride + across * 8;
  const unsigned target = to + first * STRIDE + across * 16;
#pragma unroll
  for (int i = 0; i < (TOTAL + THREADS - 1) / THREADS; i++) {
    const int x = i * THREADS + t;
    const int row = EVEN ? first + i * STEP : x / CHUNKS, chunk = EVEN ? across : x % CHUNKS;
    const T *const at = EVEN ? source + i * STEP * stride : from + row * stride + chunk * 8;
    const unsigned there = EVEN ? target + i * STEP * STRIDE : to + row * STRIDE + chunk * 16;
    if (TOTAL % THREADS == 0 || x < TOTAL) {
      if (FULL) {
        ob_copy16(there, at);
      } else {
        int valid = (columns - chunk * 8) * 2;
        valid = row < rows ? (valid > 16 ? 16 : valid < 0 ? 0 : valid) : 0;
        ob_copy16(there, valid > 0 ? at : from, valid);
      }
    }
  }
}

// The same for any strides and alignments, element by element.
template <int ROWS, int COLUMNS, int STRIDE, int THREADS, class T>
OB_DEVICE void ob_copy_any(unsigned to, const T *from, long long stride, long long step, int rows, int columns,
                           int t) {
  for (int x = t; x < ROWS * COLUMNS; x += THREADS) {
    const int row = x / COLUMNS, column = x % COLUMNS;
    unsigned short v = 0;
    if (row < rows && column < columns) v = from[row * stride + column * step].x;
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + row * STRIDE + column * 2), "h"(v) : "memory");
  }
}

OB_DEVICE void ob_ldmatrix(unsigned (&r)[4], unsigned at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}
OB_DEVICE void ob_ldmatrix_t(unsigned (&r)[4], unsigned at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}

OB_DEVICE void ob_mma(ob_f16, float &c0, float &c1, float &c2, float &c3, const unsigned (&a)[4], unsigned b0,
                      unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
               "{%0,%1,%2,%3};"
               : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
OB_DEVICE void ob_mma(ob_bf16, float &c0, float &c1, float &c2, float &c3, const unsigned (&a)[4], unsigned b0,
                      unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
               "{%0,%1,%2,%3};"
               : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two f32 values as one register of two 16-bit floats, and back; the first is in the low half.
OB_DEVICE unsigned ob_pack(ob_f16, float low, float high) {
  unsigned r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
OB_DEVICE unsigned ob_pack(ob_bf16, float low, float high) {
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
OB_DEVICE void ob_unpack(ob_f16, unsigned v, float &low, float &high) {
  asm("{.reg .f16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;}"
      : "=f"(low), "=f"(high)
      : "r"(v));
}
OB_DEVICE void ob_unpack(ob_bf16, unsigned v, float &low, float &high) {
  low = __uint_as_float(v << 16);
  high = __uint_as_float(v & 0xffff0000u);
}

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
OB_DEVICE float ob_fast_max(float a, float b) { return fmaxf(a, b); }

template <class F, int FIRST, int LAST, class T> OB_DEVICE T ob_lane_fold(T v) {
#pragma unroll
  for (int d = FIRST; d <= LAST; d <<= 1) v = F::join(v, __shfl_xor_sync(0xffffffffu, v, d));
  return v;
}

template <int THREADS> OB_DEVICE void ob_group_barrier(int id) {
  if constexpr (THREADS == 32) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
  }
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

// True in every thread of the last of `total` blocks to arrive at a counter, which it leaves at zero.
// What the other blocks wrote before they arrived is then visible.
OB_DEVICE bool ob_last_block(unsigned *counter, unsigned total) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(counter, 1) == total - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// All threads of all blocks of a cluster meet; what they wrote before is visible after.
OB_DEVICE void ob_cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
