/* What everything below uses: types, the launch record, marked values, bounded waits.
 *
 * Values that cross blocks carry a mark: fp32 the low three bits of the number of their step and layer, in their
 * last three bits; eight 16-bit numbers one bit of how often their buffer was used, in the last bit of the eighth. With
 * fp32 weights every value is fp32 and rounded to 23 bits: the mark is that one bit, in its last. A
 * reader looks again until the mark is the one it wants: the data is its own flag, and no fence or counter is
 * needed. Every use of a buffer writes all of it, with a mark that differs from the use before, and buffers begin as
 * zeros, which is no first mark: so an old value is never taken for a new one. That a buffer is not written while it
 * may still be read is a matter of the schedule: mega/cuda/flow.py judges it.
 *
 * What is not written in every layer (best logits, drawn tokens, logits) travels in 8-byte words with the whole
 * number.
 */
typedef unsigned int u32;
typedef unsigned long long u64;

struct om_fault { /* zeroed before a launch; `code` 1: a wait exceeded its limit */
  int code, block, role, edge, step, layer;
  u32 expected, seen;
};

struct om_launch {
  const char *weights;
  char *keys, *values;
  char *values_between; /* what blocks exchange */
  const float *cosines, *sines;
  const int *feed;
  int *out, *made, *reason, *position_out;
  om_fault *fault;
  u64 *trace;
  int *traced;
  u32 *meet;
  u64 spin_ns;
  u32 tag;
  int uses, steps, feed_stride, out_stride, stop_count, trace_room, keep_logits, withhold;
  int feed_length[OM_SLOTS], want[OM_SLOTS], position[OM_SLOTS], planned[OM_SLOTS], top_k[OM_SLOTS];
  float temperature[OM_SLOTS], top_p[OM_SLOTS];
  u64 seed[OM_SLOTS];
  int stops[OM_SLOTS];
};

#define OM_THREADS (32 * OM_WARPS) /* consumers */
#define OM_PIECES4 ((OM_PIECES + 3) / 4 * 4)
#define OM_ITEMS (OM_BATCH * OM_KV_HEADS * OM_PIECES)
#define OM_INFINITY __int_as_float(0x7f800000)
#define OM_ROOT_LATE (OM_BF16 || OM_FP32) /* the root of a norm comes after the product: no number is too large */
#define OM_LOOK (16 / OM_IN) /* values of a product's inputs, or of attention, in 16 bytes */
#define OM_MASS_AT ((OM_HEAD_DIM + 31) / 32 * 32) /* of a head of a warp: sums (of 8 the even ones first), then these */
#define OM_MERGED (OM_MASS_AT + 4) /* floats: largest score and mass */

struct om_state { /* one consumer thread's view */
  const om_launch *p;
  int step, layer, turn; /* `turn`: whose share of a phase this block takes in this layer */
  u32 chunk, unit; /* the phase's first chunk and joined unit, counted from the launch's first */
  u32 joined; /* times that warps' sums met: direct products */
  u32 meets;
#if OM_PRIVATE
  const char *from; /* the lane's next weights to copy, in step `copied` */
  int copied, run, units; /* the run of units that is being copied, and units of it behind this one */
  int left, mine, skip; /* this warp's slabs of the unit that are left, and all; bytes to those of the next unit */
  u64 policy; /* of weights in L2 */
  u32 ring, slot; /* the lane's place in the ring's first slot; bytes from there to the oldest one */
#endif
  /* Asked for anew where they are used: kept in registers through the whole kernel they would push others out. */
  __device__ __forceinline__ int thread() const {
    int t;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
    return t;
  }
  __device__ __forceinline__ int warp() const { return (u32)thread() / 32; }
  __device__ __forceinline__ int lane() const { return (u32)thread() % 32; }
  __device__ __forceinline__ int row() const { return lane() / 4; }
  __device__ __forceinline__ int quad() const { return lane() % 4; }
  __device__ __forceinline__ int block() const { return blockIdx.x; }
};

struct om_shared {
  u64 full[OM_STAGES], empty[OM_STAGES];
#if OM_FENCED
  u32 arrived[OM_WINDOW];
#else
  u64 joined[OM_WINDOW];
#endif
  float squares[OM_WARPS];
  float best[OM_WARPS][OM_BATCH];
  int best_id[OM_WARPS][OM_BATCH];
  int token[OM_BATCH], made[OM_BATCH], done[OM_BATCH], reached[OM_BATCH];
  int dead, traced, waiting;
  u32 began;
};
__shared__ __align__(16) om_shared om;
extern __shared__ __align__(128) char om_memory[];

__device__ __forceinline__ u32 om_address(const void *p) {
  return (u32)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void om_sts(u32 at, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}
__device__ __forceinline__ void om_sts2(u32 at, u32 v, u32 w) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(v), "r"(w) : "memory");
}
__device__ __forceinline__ void om_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(OM_THREADS) : "memory");
}
__device__ __forceinline__ u64 om_time() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

/* ---- 16-bit numbers ---- */
__device__ __forceinline__ u32 om_pack(float lo, float hi) {
  u32 r;
#if OM_BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
#endif
  return r;
}
__device__ __forceinline__ float2 om_unpack(u32 x) {
#if OM_BF16
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
#else
  float2 r;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(r.x), "=f"(r.y) : "r"(x));
  return r;
#endif
}
__device__ __forceinline__ float om_exp2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
/* Two units in the last place, where the exact ones take twenty instructions. */
__device__ __forceinline__ float om_rsqrt(float x) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float om_reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float om_log2(float x) {
#if OM_FP32 /* of a mass: two units of a logarithm of 12 would be 3e-6 of a piece's share */
  return log2f(x);
#else
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#endif
}

/* ---- words ---- */
__device__ __forceinline__ uint4 om_ldg(const char *at) { /* of the cache of keys and values */
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}
__device__ __forceinline__ void om_put(u64 *at, u32 a, u32 tag) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(at), "l"((u64)tag << 32 | a) : "memory");
}
__device__ __forceinline__ void om_put2(u64 *at, u32 a, u32 b, u32 tag) {
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(at), "l"((u64)tag << 32 | a),
               "l"((u64)tag << 32 | b)
               : "memory");
}
__device__ __forceinline__ u64 om_peek(const u64 *at) {
  u64 a;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(a) : "l"(at) : "memory");
  return a;
}
__device__ __forceinline__ uint4 om_peek2(const u64 *at) { /* payload, tag, payload, tag */
  u64 a, b;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(at) : "memory");
  return make_uint4((u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32));
}

/* ---- marked values ---- */
__device__ __forceinline__ uint4 om_look(const void *at) { /* 16 bytes in one access */
  u64 a, b;
  asm volatile("{.reg .b128 q; ld.relaxed.gpu.global.b128 q, [%2]; mov.b128 {%0, %1}, q;}"
               : "=l"(a), "=l"(b)
               : "l"(at)
               : "memory");
  return make_uint4((u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32));
}
__device__ __forceinline__ u32 om_marked(float v, u32 mark) {
  u32 u = __float_as_uint(v);
#if OM_FP32
  if (v == v) u += u >> 1 & u & 1; /* to the nearest, of two to the even one; NaN stays what it is */
#endif
  return (u & ~OM_MARKS) | mark;
}
__device__ __forceinline__ float om_single(u32 w) { /* without its mark */
  return __uint_as_float(w & ~OM_MARKS);
}
__device__ __forceinline__ void om_put_single(void *at, float v, u32 mark) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(at), "r"(om_marked(v, mark)) : "memory");
}
__device__ __forceinline__ void om_put_singles(void *at, const float4 &v, u32 mark) {
  asm volatile("{.reg .b128 q; mov.b128 q, {%1, %2}; st.relaxed.gpu.global.b128 [%0], q;}" ::"l"(at),
               "l"((u64)om_marked(v.y, mark) << 32 | om_marked(v.x, mark)),
               "l"((u64)om_marked(v.w, mark) << 32 | om_marked(v.z, mark))
               : "memory");
}
__device__ __forceinline__ float4 om_take_singles(const uint4 &w) {
  return make_float4(om_single(w.x), om_single(w.y), om_single(w.z), om_single(w.w));
}
__device__ __forceinline__ bool om_singles(const uint4 &w, u32 mark) { /* four fp32, all of this mark */
  return (((w.x ^ mark) | (w.y ^ mark) | (w.z ^ mark) | (w.w ^ mark)) & OM_MARKS) == 0;
}
__device__ __forceinline__ void om_put_quad(void *at, u32 a, u32 b, u32 c, u32 d) { /* 16 bytes in one access */
  asm volatile("{.reg .b128 q; mov.b128 q, {%1, %2}; st.relaxed.gpu.global.b128 [%0], q;}" ::"l"(at),
               "l"((u64)b << 32 | a), "l"((u64)d << 32 | c)
               : "memory");
}
__device__ __forceinline__ void om_put_eight(void *at, u32 a, u32 b, u32 c, u32 d, u32 mark) {
  om_put_quad(at, a, b, c, (d & ~0x10000u) | mark << 16);
}
__device__ __forceinline__ bool om_eights(const uint4 &w, u32 mark) { /* OM_LOOK values as products want them */
  return OM_FP32 ? om_singles(w, mark) : (w.w >> 16 & 1) == mark;
}
__device__ __forceinline__ void om_put_look(void *at, const float (&x)[OM_LOOK], u32 mark) {
#if OM_FP32
  om_put_quad(at, om_marked(x[0], mark), om_marked(x[1], mark), om_marked(x[2], mark), om_marked(x[3], mark));
#else
  om_put_eight(at, om_pack(x[0], x[1]), om_pack(x[2], x[3]), om_pack(x[4], x[5]), om_pack(x[6], x[7]), mark);
#endif
}
__device__ __forceinline__ float4 om_floats(const uint4 &w) {
  return make_float4(__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w));
}
__device__ __forceinline__ void om_values(const uint4 &w, float (&x)[OM_LOOK]) { /* of one look, without marks */
  const u32 all[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
#if OM_FP32
    x[i] = om_single(all[i]);
#else
    const float2 y = om_unpack(all[i]);
    x[2 * i] = y.x, x[2 * i + 1] = y.y;
#endif
  }
}

/* The nearest number that is a bf16 whose last bit is `mark`: half as much noise as a bit set after rounding. */
__device__ __forceinline__ float om_marked16(float v, u32 mark) {
  const u32 u = __float_as_uint(v), size = u & 0x7fffffffu, m = mark << 16;
  return __uint_as_float((u & 0x80000000u) | ((((max(size, m) - m) + 0x10000u) & ~0x1ffffu) + m));
}

/* One failed look at a word, now and then. True when waiting is over: the limit is exceeded, or another block has
 * stopped. The first to exceed it reports; everyone then runs to the end without waiting, and the host raises the
 * error. */
__device__ __forceinline__ bool om_expired(const om_launch *p, u64 start, int at, int edge, u32 expected, u32 seen) {
  if (!*(volatile int *)&p->fault->code) {
    if (om_time() - start <= p->spin_ns) return false;
    if (atomicCAS(&p->fault->code, 0, 1) == 0) {
      om_fault *f = p->fault;
      f->block = blockIdx.x, f->role = 1, f->edge = edge, f->step = at / 4096, f->layer = at % 4096;
      f->expected = expected, f->seen = seen;
    }
  }
  *(volatile int *)&om.dead = 1;
  return true;
}
struct om_patience {
  u32 looks = 0;
  u64 start = 0;
  __device__ __forceinline__ bool over(const om_state &s, int edge, u32 expected, u32 seen) {
    if (*(volatile int *)&om.dead) return true;
    if (++looks % 64) return false;
    if (!start) start = om_time();
    return om_expired(s.p, start, s.step * 4096 + s.layer, edge, expected, seen);
  }
};

/* N pairs of words, `stride` words apart, all wanted with `tag`; those from `count` on are not read and are zero. */
template <int N>
__device__ __forceinline__ void om_take(const om_state &s, const u64 *at, int stride, int count, u32 tag, int edge,
                                        uint4 (&w)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) w[i] = i < count ? om_peek2(at + (size_t)i * stride) : make_uint4(0, tag, 0, tag);
  om_patience wait;
  for (;;) {
    u32 seen = tag;
#pragma unroll
    for (int i = 0; i < N; i++)
      if (w[i].y != tag || w[i].w != tag) seen = w[i].y != tag ? w[i].y : w[i].w;
    if (seen == tag || wait.over(s, edge, tag, seen)) return;
#pragma unroll
    for (int i = 0; i < N; i++)
      if (w[i].y != tag || w[i].w != tag) w[i] = om_peek2(at + (size_t)i * stride);
  }
}

/* N times 16 bytes from at[i] (null: zeros): the first EIGHTS are OM_LOOK inputs of products, wanted with the mark
 * `use`, the others four fp32, wanted with `mark`: a first look, and more of them at what was missing. */
template <int N>
__device__ __forceinline__ void om_look_all(const char *const (&at)[N], uint4 (&w)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) w[i] = at[i] ? om_look(at[i]) : make_uint4(0, 0, 0, 0);
}
template <int N, int EIGHTS>
__device__ __forceinline__ void om_look_again(const om_state &s, const char *const (&at)[N], u32 mark, u32 use, int edge,
                                              uint4 (&w)[N]) {
  om_patience wait;
  for (;;) {
    bool missing = false;
    u32 seen = 0;
#pragma unroll
    for (int i = 0; i < N; i++)
      if (at[i] && !(i < EIGHTS ? om_eights(w[i], use) : om_singles(w[i], mark)))
        missing = true, seen = i < EIGHTS && !OM_FP32 ? w[i].w >> 16 & 1 : w[i].w & OM_MARKS;
    if (!missing || wait.over(s, edge, EIGHTS ? use : mark, seen)) return;
#pragma unroll
    for (int i = 0; i < N; i++)
      if (at[i] && !(i < EIGHTS ? om_eights(w[i], use) : om_singles(w[i], mark))) w[i] = om_look(at[i]);
  }
}

template <int N, int EIGHTS>
__device__ __forceinline__ void om_read(const om_state &s, const char *const (&at)[N], u32 mark, u32 use, int edge,
                                        uint4 (&w)[N]) {
  om_look_all<N>(at, w);
  om_look_again<N, EIGHTS>(s, at, mark, use, edge, w);
}

/* All blocks meet: for the edges that a plan keeps by barriers. */
__device__ __forceinline__ void om_meet(om_state &s, int edge) {
  om_sync();
  const u32 goal = ++s.meets * OM_BLOCKS;
  if (s.warp() == 0 && s.lane() == 0) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(s.p->meet) : "memory");
    om_patience wait;
    u32 seen;
    for (;;) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(s.p->meet) : "memory");
      if ((int)(seen - goal) >= 0 || wait.over(s, edge, goal, seen)) break;
    }
  }
  om_sync();
}

/* ---- time stamps ---- */
__device__ __forceinline__ u64 om_stamp(const om_state &s) {
  return s.p->trace_room ? om_time() : 0;
}
__device__ __forceinline__ u64 om_span(const om_state &s, int kind, u64 from) {
  if (!s.p->trace_room) return 0;
  const u64 now = om_time();
  if (s.warp() == 0 && s.lane() == 0 && om.traced < s.p->trace_room) {
    u64 *at = s.p->trace + ((size_t)s.block() * s.p->trace_room + om.traced++) * 3;
    at[0] = kind * 4096 + (s.layer < OM_LAYERS ? s.layer : 0), at[1] = from, at[2] = now;
  }
  return now;
}
