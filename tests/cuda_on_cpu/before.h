/* A CUDA kernel's text as ordinary C++: every thread of every block is a fiber of one host thread, run in turn; each
 * wait gives the turn away, and one for others of the block or the warp gets none before they are there. Built for the
 * megakernel's tests (tests/mega_cuda_twin.py turns its asm statements into the functions `ptx_*` below): slow,
 * deterministic, and the same text that a GPU's compiler gets.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unordered_map>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __constant__ static
#define __grid_constant__
#define __launch_bounds__(...)

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <class T> T min(T a, T b) { return a < b ? a : b; }
template <class T> T max(T a, T b) { return a > b ? a : b; }
inline unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
inline float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
inline float __int_as_float(int u) { return __uint_as_float((unsigned)u); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned how) {
  const unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; i++) r |= (unsigned)(both >> 8 * (how >> 4 * i & 7) & 255) << 8 * i;
  return r;
}
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
template <class T> T atomicAdd(T *at, T v) { T old = *at; *at += v; return old; }
inline int atomicCAS(int *at, int want, int v) { int old = *at; if (old == want) *at = v; return old; }

/* ---- fibers ---- */
struct twin_index { int x; };
inline twin_index threadIdx, blockIdx;
struct twin_warp {
  unsigned slots[32][8], seen[32][8];
  double left[16][32], right[8][32]; /* a product's operands, by row and by column */
  int arrived;
  unsigned turn;
};
struct twin_block { char *memory; int barred; unsigned turn; twin_warp *warps; };
#define TWIN_COPIES 256
struct twin_piece { unsigned to; const void *from; }; /* from nowhere: the end of a group */
struct twin_fiber {
  void *stack;
  int block, thread;
  bool done;
  const unsigned *watched;
  unsigned passed;
  twin_piece *copies; /* that it has not waited for */
  int copied;
};
inline twin_block *twin_blocks;
inline twin_fiber *twin_fibers;
inline size_t twin_now;
inline void *twin_home;
inline twin_block *twin_mine;
inline char *om_memory;
void twin_enter(int block); /* this and the next are of the kernel's text, or beside it */
void twin_body();
inline const void *twin_launch;

extern "C" void twin_switch(void **from, void *to);
void twin_yield();
/* Waits until `turn` has passed: a round of the fibers skips this one as long as it has not. */
inline void twin_wait(const unsigned &turn, unsigned passed) {
  twin_fibers[twin_now].watched = &turn, twin_fibers[twin_now].passed = passed;
  twin_yield();
}
inline bool twin_idle(const twin_fiber &f) { return f.done || (f.watched && *f.watched == f.passed); }
inline twin_warp &twin_w() { return twin_mine->warps[threadIdx.x / 32]; }

/* All 32 lanes bring up to 8 words; the last one does `joined` on them for everybody. */
template <class Joined> twin_warp &twin_join(const unsigned *v, int n, Joined joined) {
  twin_warp &w = twin_w();
  memcpy(w.slots[threadIdx.x % 32], v, 4 * n);
  if (++w.arrived == 32) joined(w), w.arrived = 0, w.turn++;
  else twin_wait(w.turn, w.turn);
  return w;
}
/* All 32 lanes bring up to 8 words and see everybody's. */
inline const unsigned (*twin_meet(const unsigned *v, int n))[8] {
  return twin_join(v, n, [](twin_warp &w) { memcpy(w.seen, w.slots, sizeof w.seen); }).seen;
}
inline void __syncwarp() { twin_meet(nullptr, 0); }
template <class T> T twin_shuffle(T v, int from) {
  unsigned u[2] = {};
  memcpy(u, &v, sizeof v);
  const unsigned(*all)[8] = twin_meet(u, 2);
  memcpy(&v, all[from], sizeof v);
  return v;
}
template <class T> T __shfl_xor_sync(unsigned, T v, int d) { return twin_shuffle(v, (threadIdx.x % 32) ^ d); }
template <class T> T __shfl_sync(unsigned, T v, int from) { return twin_shuffle(v, from & 31); }
template <class T> T __shfl_down_sync(unsigned, T v, int d) {
  const int lane = threadIdx.x % 32;
  return twin_shuffle(v, lane + d < 32 ? lane + d : lane);
}
inline void twin_bar(int threads) {
  if (++twin_mine->barred == threads) twin_mine->barred = 0, twin_mine->turn++;
  else twin_wait(twin_mine->turn, twin_mine->turn);
}
inline int twin_threads;
inline void __syncthreads() { twin_bar(twin_threads); }
inline unsigned long long __cvta_generic_to_shared(const void *p) { return (unsigned long long)((const char *)p - om_memory); }

/* ---- PTX: outputs first, then inputs, in the order of the asm statement ---- */
typedef unsigned t32;
typedef unsigned long long t64;
inline void ptx_tid(int &r) { r = threadIdx.x; }
inline void ptx_bar(int n) { twin_bar(n); }
inline void ptx_time(t64 &t) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  t = now.tv_sec * 1000000000ull + now.tv_nsec;
}
inline t32 twin_bf16(float f) {
  const t32 u = __float_as_uint(f);
  return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
inline t32 twin_f16(float f) { _Float16 h = (_Float16)f; unsigned short u; memcpy(&u, &h, 2); return u; }
inline float twin_wide(t32 u, bool bf16) {
  if (bf16) return __uint_as_float(u << 16);
  const unsigned short v = (unsigned short)u;
  _Float16 h;
  memcpy(&h, &v, 2);
  return (float)h;
}
inline void ptx_pack_bf16(t32 &r, float hi, float lo) { r = twin_bf16(hi) << 16 | twin_bf16(lo); }
inline void ptx_pack_f16(t32 &r, float hi, float lo) { r = twin_f16(hi) << 16 | twin_f16(lo); }
inline void ptx_unpack_f16(float &a, float &b, t32 x) { a = twin_wide(x & 0xffff, false), b = twin_wide(x >> 16, false); }
inline void ptx_unpack_f16(float &a, t32 x) { a = twin_wide(x & 0xffff, false); }
inline void ptx_ex2(float &r, float x) { r = exp2f(x); }
inline void ptx_rsqrt(float &r, float x) { r = 1.0f / sqrtf(x); }
inline void ptx_rcp(float &r, float x) { r = 1.0f / x; }
inline void ptx_lg2(float &r, float x) { r = log2f(x); }
inline void ptx_popc(t32 &r, t32 x) { r = __builtin_popcount(x); }
inline void ptx_st64(void *at, t64 v) { memcpy(at, &v, 8); }
inline void ptx_st64x2(void *at, t64 a, t64 b) { memcpy(at, &a, 8), memcpy((char *)at + 8, &b, 8); }
inline void ptx_ld64(t64 &a, const void *at) { memcpy(&a, at, 8); twin_yield(); }
inline void ptx_ld64x2(t64 &a, t64 &b, const void *at) { memcpy(&a, at, 8), memcpy(&b, (const char *)at + 8, 8); twin_yield(); }
inline void ptx_st32(void *at, t32 v) { memcpy(at, &v, 4); }
inline void ptx_ld32x4(t32 &x, t32 &y, t32 &z, t32 &w, const void *at) {
  const t32 *p = (const t32 *)at;
  x = p[0], y = p[1], z = p[2], w = p[3];
}
inline void ptx_red(t32 *at, ...) { ++*at; }
inline void ptx_ld_acquire(t32 &v, const t32 *at) { v = *at; twin_yield(); }
inline void ptx_sts(t32 at, t32 v) { memcpy(om_memory + at, &v, 4); }
inline void ptx_sts2(t32 at, t32 v, t32 w) { memcpy(om_memory + at, &v, 4), memcpy(om_memory + at + 4, &w, 4); }
inline void ptx_count(t32 &old, t32 at) { t32 *p = (t32 *)(om_memory + at); old = (*p)++; }
inline void ptx_nothing(...) {}

struct twin_mbarrier { unsigned short pending, count; unsigned tx : 31, phase : 1; };
inline twin_mbarrier &twin_at(t32 bar) { return *(twin_mbarrier *)(om_memory + bar); }
inline unsigned twin_events; /* what somebody at such a barrier may wait for */
inline void twin_turn(twin_mbarrier &b) {
  twin_events++;
  if (b.pending == 0 && b.tx == 0) b.phase ^= 1, b.pending = b.count;
}
inline void ptx_mbarrier_init(t32 bar, t32 n = 1) {
  twin_mbarrier b = {};
  b.pending = b.count = (unsigned short)n;
  twin_at(bar) = b;
}
/* A bulk copy comes when its barrier has been waited at often enough: 0 to 3 times, one copy in eight `twin_late` times, so
 * that later copies come before it. */
struct twin_coming { char *to; const void *from; t32 bytes; int waits; };
inline std::unordered_map<char *, std::vector<twin_coming>> twin_bulks; /* by barrier */
inline unsigned twin_asked;
inline int twin_late;
inline void ptx_mbarrier_wait(t32 &done, t32 bar, t32 parity) {
  if (twin_at(bar).phase == parity)
    if (const auto found = twin_bulks.find(om_memory + bar); found != twin_bulks.end()) {
      std::vector<twin_coming> &all = found->second;
      for (size_t i = 0; i < all.size();)
        if (--all[i].waits > 0) i++;
        else memcpy(all[i].to, all[i].from, all[i].bytes), twin_at(bar).tx -= all[i].bytes, all.erase(all.begin() + i);
      twin_turn(twin_at(bar));
    }
  done = twin_at(bar).phase != parity;
  if (!done) twin_yield();
}
inline void ptx_mbarrier_arrive(t32 bar) { twin_at(bar).pending--, twin_turn(twin_at(bar)); }
inline void ptx_mbarrier_expect(t32 bar, t32 bytes) {
  twin_at(bar).tx += bytes, twin_at(bar).pending--;
}
inline void ptx_bulk(t32 to, const void *from, t32 bytes, t32 bar, t64) {
  if (to % 16 || (uintptr_t)from % 16 || bytes % 16) fprintf(stderr, "a bulk copy is not aligned\n"), abort();
  const unsigned number = twin_asked++ * 2654435761u >> 24;
  const int waits = number % 8 ? number % 4 : twin_late;
  twin_bulks[om_memory + bar].push_back({om_memory + to, from, bytes, waits});
  twin_yield();
}
/* `cp.async`: a thread's copies come as late as they may: when it waits for them, or arrives behind them. */
inline void twin_land(int groups) { /* all but the last so many groups, and what is in none yet */
  twin_fiber &f = twin_fibers[twin_now];
  int open = 0, done = 0;
  for (int i = 0; i < f.copied; i++) open += !f.copies[i].from;
  for (; open > groups; done++) {
    const twin_piece &c = f.copies[done];
    if (c.from) memcpy(om_memory + c.to, c.from, 16);
    else open--;
  }
  f.copied -= done;
  memmove(f.copies, f.copies + done, f.copied * sizeof(twin_piece));
}
inline void twin_copied(t32 to, const void *from) {
  twin_fiber &f = twin_fibers[twin_now];
  if (f.copied == TWIN_COPIES) fprintf(stderr, "more than %d copies under way\n", TWIN_COPIES), abort();
  f.copies[f.copied++] = {to, from};
}
inline void ptx_copy16(t32 to, const void *from, ...) { twin_copied(to, from); }
inline void ptx_copy_commit() { twin_copied(0, nullptr); }
inline void ptx_copy_wait(int groups) { twin_land(groups); }
inline void ptx_copy_wait_all() { ptx_copy_commit(), twin_land(0); }
inline void ptx_copy_arrive(t32 bar) { ptx_copy_wait_all(), ptx_mbarrier_arrive(bar); }
inline void ptx_movmatrix(t32 &r, t32 x) { /* lane (g, q): row g, columns 2 q and 2 q + 1 */
  const t32(*all)[8] = twin_meet(&x, 1);
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  t32 out = 0;
  for (int e = 0; e < 2; e++) out |= (all[(2 * q + e) * 4 + g / 2][0] >> 16 * (g % 2) & 0xffff) << 16 * e;
  r = out;
}
/* Elements of an operand's register: two of 16 bits, or four of 8. */
inline void twin_spread(double *to, t32 x, bool bf16) { to[0] = twin_wide(x & 0xffff, bf16), to[1] = twin_wide(x >> 16, bf16); }
inline void twin_spread(double *to, t32 x) { for (int e = 0; e < 4; e++) to[e] = (signed char)(x >> 8 * e); }
/* Lane (g, q), register r: A's row g + 8 (r % 2), B's column g; the words q + 4 (r / 2) and q + 4 (r - 4) of it. */
template <class... Kind> twin_warp &twin_operands(const t32 (&v)[6], Kind... kind) {
  return twin_join(v, 6, [&](twin_warp &w) {
    constexpr int wide = sizeof...(kind) ? 2 : 4;
    for (int lane = 0; lane < 32; lane++)
      for (int r = 0; r < 6; r++) {
        double *const row = r < 4 ? w.left[lane / 4 + r % 2 * 8] : w.right[lane / 4];
        twin_spread(row + wide * (lane % 4 + 4 * (r < 4 ? r / 2 : r - 4)), w.slots[lane][r], kind...);
      }
  });
}
inline void twin_mma(float &c0, float &c1, float &c2, float &c3, const t32 (&v)[6], bool bf16) {
  const twin_warp &w = twin_operands(v, bf16);
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const double *const a = w.left[g], *const b = w.left[g + 8], *const x = w.right[2 * q], *const y = w.right[2 * q + 1];
  double s0 = c0, s1 = c1, s2 = c2, s3 = c3;
  for (int k = 0; k < 16; k++) s0 += a[k] * x[k], s1 += a[k] * y[k], s2 += b[k] * x[k], s3 += b[k] * y[k];
  c0 = (float)s0, c1 = (float)s1, c2 = (float)s2, c3 = (float)s3;
}
inline void ptx_mma_s8(int &c0, int &c1, int &c2, int &c3, t32 r0, t32 r1, t32 r2, t32 r3, t32 r4, t32 r5) {
  const t32 v[6] = {r0, r1, r2, r3, r4, r5};
  const twin_warp &w = twin_operands(v);
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  int *const c[4] = {&c0, &c1, &c2, &c3};
  for (int i = 0; i < 4; i++) {
    double sum = *c[i]; /* exact */
    for (int k = 0; k < 32; k++) sum += w.left[g + i / 2 * 8][k] * w.right[2 * q + i % 2][k];
    *c[i] = (int)sum;
  }
}
inline void ptx_redux_max(t32 &r, t32 v) {
  const t32(*all)[8] = twin_meet(&v, 1);
  r = 0;
  for (int i = 0; i < 32; i++) r = max(r, all[i][0]);
}
inline void ptx_mma_bf16(float &c0, float &c1, float &c2, float &c3, t32 a, t32 b, t32 c, t32 d, t32 e, t32 f) {
  const t32 v[6] = {a, b, c, d, e, f};
  twin_mma(c0, c1, c2, c3, v, true);
}
inline void ptx_mma_f16(float &c0, float &c1, float &c2, float &c3, t32 a, t32 b, t32 c, t32 d, t32 e, t32 f) {
  const t32 v[6] = {a, b, c, d, e, f};
  twin_mma(c0, c1, c2, c3, v, false);
}
