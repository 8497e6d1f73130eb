/* What the kernels of `lower.cuda` need besides before.h. The blocks of a cluster run together, clusters one after the
 * other. What the hardware does on its own (copies, products of four warps) happens here either at once or, with
 * `twin_lazy`, as late as the text allows: in the wait for it. So a wait that is too weak, or a register or a tile that is
 * changed too early, gives wrong results in one of the two.
 */
struct twin_named { int arrived; unsigned turn; };
struct twin_state { twin_named bars[16]; int left; }; /* of a block: its barriers, threads that have not returned */
static bool twin_lazy;
static std::vector<twin_state> twin_states;
static int twin_number; /* of this block in its cluster */
static void twin_sync() {
  const unsigned turn = twin_mine->turn;
  ++twin_mine->barred;
  while (twin_mine->turn == turn) {
    if (twin_mine->barred >= twin_states[twin_number].left) twin_mine->barred = 0, twin_mine->turn++;
    else twin_yield();
  }
}
#define __syncthreads twin_sync
#define __threadfence()
static void ptx_group_bar(int id, int threads) {
  twin_named &b = twin_states[twin_number].bars[id];
  if (++b.arrived == threads) b.arrived = 0, b.turn++;
  else twin_wait(b.turn, b.turn);
}
static twin_named twin_cluster;
static std::vector<unsigned> twin_arrived; /* by thread: the turn of the cluster's barrier that it waits for */
static void ptx_cluster_arrive() { twin_arrived[twin_now] = twin_cluster.turn, twin_cluster.arrived++; }
static void ptx_cluster_wait() {
  while (twin_cluster.turn == twin_arrived[twin_now]) {
    int left = 0;
    for (const twin_state &s : twin_states) left += s.left;
    if (twin_cluster.arrived >= left) twin_cluster.arrived = 0, twin_cluster.turn++;
    else twin_yield();
  }
}
template <class T> static void ptx_mapa(T *&r, T *p, int block) {
  r = (T *)((char *)p - om_memory + twin_blocks[block].memory);
}
static unsigned atomicAdd(unsigned *at, int v) { unsigned old = *at; *at += v; return old; }
static float __fdividef(float a, float b) { return a / b; }
static void ptx_cvt_up(float &r, unsigned short v) { r = twin_wide(v, false); }
static void ptx_cvt_f16(unsigned short &r, float v) { r = (unsigned short)twin_f16(v); }
static void ptx_cvt_bf16(unsigned short &r, float v) { r = (unsigned short)twin_bf16(v); }
static void ptx_sqrt(float &r, float v) { r = sqrtf(v); }
static void ptx_unpack(float &a, float &b, t32 x) { ptx_unpack_f16(a, b, x); }
static void ptx_times(t32 &r, t32 a, t32 b) {
  r = 0;
  for (int i = 0; i < 2; i++)
    r |= twin_f16(twin_wide(a >> 16 * i & 0xffff, false) * twin_wide(b >> 16 * i & 0xffff, false)) << 16 * i;
}
static void ptx_sts16(t32 at, unsigned short v) { memcpy(om_memory + at, &v, 2); }
static void ptx_lds4(t32 &a, t32 &b, t32 &c, t32 &d, t32 at) { ptx_ld32x4(a, b, c, d, om_memory + at); }

/* ---- 8 by 8 matrices in shared memory: lane l gives the address of row l % 8 of matrix l / 8 ---- */
static void twin_ldmatrix(t32 *const (&r)[4], t32 at, bool across) {
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
static void ptx_ldmatrix(t32 &a, t32 &b, t32 &c, t32 &d, t32 at) {
  t32 *const r[4] = {&a, &b, &c, &d};
  twin_ldmatrix(r, at, false);
}
static void ptx_ldmatrix_t(t32 &a, t32 &b, t32 &c, t32 &d, t32 at) {
  t32 *const r[4] = {&a, &b, &c, &d};
  twin_ldmatrix(r, at, true);
}
static void ptx_stmatrix(t32 at, t32 a, t32 b, t32 c, t32 d) {
  const t32(*all)[8] = twin_meet(&at, 1);
  const t32 v[4] = {a, b, c, d};
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  for (int j = 0; j < 4; j++) memcpy(om_memory + all[8 * j + g][0] + 4 * q, &v[j], 4);
  __syncwarp();
}

/* ---- copies of 16 bytes by groups of a thread ---- */
struct twin_copy { t32 to; const void *from; int valid; };
static std::vector<std::vector<std::vector<twin_copy>>> twin_copies; /* by thread: groups, the last one open */
static void twin_do(const twin_copy &c) {
  memset(om_memory + c.to, 0, 16);
  memcpy(om_memory + c.to, c.from, c.valid);
}
static void ptx_cp16(t32 to, const void *from, int valid = 16) {
  if (to % 16 || (uintptr_t)from % 16) fprintf(stderr, "a copy is not aligned\n"), abort();
  const twin_copy c = {to, from, valid};
  if (twin_lazy) twin_copies[twin_now].back().push_back(c);
  else twin_do(c);
}
static void ptx_cp_commit() { twin_copies[twin_now].emplace_back(); }
static void ptx_cp_wait(int left) {
  auto &groups = twin_copies[twin_now];
  while ((int)groups.size() > left + 1) {
    for (const twin_copy &c : groups.front()) twin_do(c);
    groups.erase(groups.begin());
  }
}

/* ---- boxes of a matrix, by way of what the host writes into a map ---- */
struct twin_map { const char *start; int columns, rows, stride, box_columns, box_rows; };
struct twin_box { t32 to; twin_map map; int column, row; t32 bar; };
static std::vector<std::vector<twin_box>> twin_boxes; /* on their way, by block */
static void twin_do(const twin_box &b) {
  const twin_map &m = b.map;
  for (int r = 0; r < m.box_rows; r++)
    for (int c = 0; c < m.box_columns; c++) {
      unsigned short v = 0;
      if (b.row + r < m.rows && b.column + c < m.columns)
        memcpy(&v, m.start + (long long)(b.row + r) * m.stride + 2 * (b.column + c), 2);
      memcpy(om_memory + b.to + r * 128 + ((c / 8 ^ r) & 7) * 16 + c % 8 * 2, &v, 2);
    }
  twin_at(b.bar).tx -= 2 * m.box_rows * m.box_columns, twin_turn(twin_at(b.bar));
}
static void ptx_box(t32 to, const void *map, int column, int row, t32 bar, t64 = 0) {
  if (to % 1024) fprintf(stderr, "a box is not aligned\n"), abort();
  const twin_box b = {to, *(const twin_map *)map, column, row, bar};
  if (twin_lazy) twin_boxes[twin_number].push_back(b);
  else twin_do(b);
}
static void ptx_await(t32 bar, t32 parity) {
  while (twin_at(bar).phase == parity) {
    auto &boxes = twin_boxes[twin_number];
    for (size_t i = 0; i < boxes.size();) {
      if (boxes[i].bar != bar) { i++; continue; }
      twin_do(boxes[i]);
      boxes.erase(boxes.begin() + i);
    }
    if (twin_at(bar).phase == parity) twin_yield();
  }
}

/* ---- products of four warps: each warp has 16 rows, so it needs nobody else's ---- */
struct twin_product { float *c[32]; const t32 *a[4]; t64 b; bool add, across, bf16; };
static std::vector<std::vector<std::vector<twin_product>>> twin_products; /* by thread: groups, the last one open */
static void twin_do(const twin_product &p) {
  const t32 mine[4] = {*p.a[0], *p.a[1], *p.a[2], *p.a[3]};
  const t32(*all)[8] = twin_meet(mine, 4);
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const t32 start = (t32)(p.b & 0x3fff) << 4;
  for (int i = 0; i < 32; i++) { /* columns in eights: rows g and g + 8, columns 2 q and 2 q + 1 */
    const int row = g + i / 2 % 2 * 8, col = i / 4 * 8 + 2 * q + i % 2;
    double sum = p.add ? *p.c[i] : 0.0;
    for (int k = 0; k < 16; k++) {
      const t32 a = all[row % 8 * 4 + k % 8 / 2][k / 8 * 2 + row / 8];
      t32 at = p.across ? start + k * 128 + col * 2 : start + col * 128 + k * 2;
      at ^= (at >> 7 & 7) << 4;
      unsigned short b;
      memcpy(&b, om_memory + at, 2);
      sum += (double)twin_wide(a >> 16 * (k % 2) & 0xffff, p.bf16) * twin_wide(b, p.bf16);
    }
    *p.c[i] = (float)sum;
  }
  __syncwarp();
}
static void ptx_wgmma(bool bf16, const std::vector<float *> &c, const std::vector<const t32 *> &a, t64 b, int add, int across) {
  twin_product p = {{}, {}, b, add != 0, across != 0, bf16};
  for (int i = 0; i < 32; i++) p.c[i] = c[i];
  for (int i = 0; i < 4; i++) p.a[i] = a[i];
  if (twin_lazy) twin_products[twin_now].back().push_back(p);
  else twin_do(p);
}
static void ptx_wgmma_commit() { twin_products[twin_now].emplace_back(); }
static void ptx_wgmma_wait(int left) {
  auto &groups = twin_products[twin_now];
  while ((int)groups.size() > left + 1) {
    const auto first = groups.front();
    groups.erase(groups.begin());
    for (const twin_product &p : first) twin_do(p);
  }
}
static void twin_enter(int number) {
  twin_number = number, twin_mine = &twin_blocks[number], om_memory = twin_mine->memory;
}
static void **twin_arguments;
static void twin_call();
static void twin_body() {
  twin_call();
  twin_fibers[twin_now].done = true;
  twin_states[twin_number].left--;
  twin_yield();
  abort();
}
/* Runs the kernel, cluster by cluster: all threads in turn, from the last with `order` 1. */
extern "C" int twin_run(void **arguments, int blocks, int cluster, int threads, int order, int lazy) {
  constexpr size_t STACK = 256 << 10;
  const int all = cluster * threads;
  twin_arguments = arguments, twin_threads = threads, twin_lazy = lazy;
  const std::unique_ptr<char[]> stacks(new char[STACK * all + 64]); /* not filled: most is never touched */
  std::vector<char> memory((size_t)cluster * TWIN_BYTES + 1024);
  char *const start = (char *)(((uintptr_t)memory.data() + 1023) / 1024 * 1024);
  for (int first = 0; first < blocks; first += cluster) {
    memset(start, 0xff, (size_t)cluster * TWIN_BYTES); /* not a number */
    twin_blocks.assign(cluster, twin_block()), twin_states.assign(cluster, twin_state());
    for (int b = 0; b < cluster; b++) {
      twin_blocks[b].memory = start + (size_t)b * TWIN_BYTES, twin_blocks[b].warps.resize(threads / 32);
      twin_states[b].left = threads;
    }
    twin_boxes.assign(cluster, {}), twin_cluster = twin_named(), twin_arrived.assign(all, 0);
    twin_copies.assign(all, {{}}), twin_products.assign(all, {{}}), twin_fibers.assign(all, twin_fiber());
    for (int i = 0; i < all; i++) {
      void **top = (void **)(((uintptr_t)stacks.get() + STACK * (i + 1)) / 16 * 16 - 8); /* as a call leaves it */
      *--top = (void *)twin_body;
      top -= 6;
      twin_fibers[i] = {top, i / threads, i % threads, false, nullptr, 0};
    }
    for (int left = all, round = 0; left; round++) {
      bool moved = false;
      for (int k = 0; k < all; k++) {
        const int i = order ? all - 1 - k : k;
        twin_fiber &f = twin_fibers[i];
        if (twin_idle(f)) continue;
        moved = true, f.watched = nullptr;
        twin_now = i, blockIdx.x = first + f.block, threadIdx.x = f.thread;
        twin_enter(f.block);
        twin_switch(&twin_home, f.stack);
        if (f.done) left--;
      }
      if (!moved || round > 1000000) return 1; /* they wait for each other */
    }
  }
  return 0;
}
