/* What the kernels of `lower.cuda` need besides before.h. The blocks of a cluster run together, clusters one after the
 * other. What the hardware does on its own (copies, products of four warps) happens here either at once or, with
 * `twin_lazy`, as late as the text allows: in the wait for it. So a wait that is too weak, or a register or a tile that is
 * changed too early, gives wrong results in one of the two.
 */
struct twin_named { int arrived; unsigned turn; };
struct twin_state { twin_named bars[16]; int left; }; /* of a block: its barriers, threads that have not returned */
inline bool twin_lazy;
inline twin_state *twin_states;
inline int twin_number; /* of this block in its cluster */
inline void twin_synced() { /* all threads that have not returned are there */
  if (twin_mine->barred >= twin_states[twin_number].left) twin_mine->barred = 0, twin_mine->turn++;
}
inline void twin_sync() {
  const unsigned turn = twin_mine->turn;
  ++twin_mine->barred, twin_synced();
  if (twin_mine->turn == turn) twin_wait(twin_mine->turn, turn);
}
#define __syncthreads twin_sync
#define __threadfence()
inline void ptx_group_bar(int id, int threads) {
  twin_named &b = twin_states[twin_number].bars[id];
  if (++b.arrived == threads) b.arrived = 0, b.turn++;
  else twin_wait(b.turn, b.turn);
}
void ptx_cluster_arrive();
void ptx_cluster_wait();
template <class T> void ptx_mapa(T *&r, T *p, int block) {
  r = (T *)((char *)p - om_memory + twin_blocks[block].memory);
}
inline unsigned atomicAdd(unsigned *at, int v) { unsigned old = *at; *at += v; return old; }
inline float __fdividef(float a, float b) { return a / b; }
inline void ptx_cvt_up(float &r, unsigned short v) { r = twin_wide(v, false); }
inline void ptx_cvt_f16(unsigned short &r, float v) { r = (unsigned short)twin_f16(v); }
inline void ptx_cvt_bf16(unsigned short &r, float v) { r = (unsigned short)twin_bf16(v); }
inline void ptx_sqrt(float &r, float v) { r = sqrtf(v); }
inline void ptx_unpack(float &a, float &b, t32 x) { ptx_unpack_f16(a, b, x); }
inline void ptx_times(t32 &r, t32 a, t32 b) {
  r = 0;
  for (int i = 0; i < 2; i++)
    r |= twin_f16(twin_wide(a >> 16 * i & 0xffff, false) * twin_wide(b >> 16 * i & 0xffff, false)) << 16 * i;
}
inline void ptx_sts16(t32 at, unsigned short v) { memcpy(om_memory + at, &v, 2); }
inline void ptx_lds4(t32 &a, t32 &b, t32 &c, t32 &d, t32 at) { ptx_ld32x4(a, b, c, d, om_memory + at); }

/* ---- 8 by 8 matrices in shared memory: lane l gives the address of row l % 8 of matrix l / 8 ---- */
inline void twin_ldmatrix(t32 *const (&r)[4], t32 at, bool across) {
  const t32(*all)[8] = twin_meet(&at, 1);
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  t32 rows[32];
  for (int i = 0; i < 32; i++) rows[i] = all[i][0];
  for (int j = 0; j < 4; j++) {
    if (!across) { memcpy(r[j], om_memory + rows[8 * j + g] + 4 * q, 4); continue; }
    unsigned short v[2];
    for (int e = 0; e < 2; e++) memcpy(&v[e], om_memory + rows[8 * j + 2 * q + e] + 2 * g, 2);
    *r[j] = (t32)v[1] << 16 | v[0];
  }
}
inline void ptx_ldmatrix(t32 &a, t32 &b, t32 &c, t32 &d, t32 at) {
  t32 *const r[4] = {&a, &b, &c, &d};
  twin_ldmatrix(r, at, false);
}
inline void ptx_ldmatrix_t(t32 &a, t32 &b, t32 &c, t32 &d, t32 at) {
  t32 *const r[4] = {&a, &b, &c, &d};
  twin_ldmatrix(r, at, true);
}
inline void ptx_stmatrix(t32 at, t32 a, t32 b, t32 c, t32 d) {
  const t32(*all)[8] = twin_meet(&at, 1);
  const t32 v[4] = {a, b, c, d};
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  for (int j = 0; j < 4; j++) memcpy(om_memory + all[8 * j + g][0] + 4 * q, &v[j], 4);
  __syncwarp();
}

/* ---- in fragments.cpp ---- */
void ptx_cp16(t32 to, const void *from, int valid = 16);
void ptx_cp_commit();
void ptx_cp_wait(int left);
void ptx_box(t32 to, const void *map, int column, int row, t32 bar, t64 = 0);
void ptx_await(t32 bar, t32 parity);
void ptx_wgmma(bool bf16, float *const (&c)[32], const t32 *const (&a)[4], t64 b, int add, int across);
void ptx_wgmma_commit();
void ptx_wgmma_wait(int left);
void twin_end(); /* of a thread */
inline void **twin_arguments;
