/* What the kernels of `lower.cuda` call (fragments.h), and what runs them: built once for all of them. */
#define TWIN_ROUNDS 1000000
#include "fibers.h"
#include "fragments.h"

/* ---- the barrier of a cluster ---- */
static twin_named twin_cluster;
static int twin_count; /* blocks of a cluster */
static std::vector<unsigned> twin_arrived; /* by thread: the turn of the cluster's barrier that it waits for */
static void twin_clustered() {
  int left = 0;
  for (int b = 0; b < twin_count; b++) left += twin_states[b].left;
  if (twin_cluster.arrived >= left) twin_cluster.arrived = 0, twin_cluster.turn++;
}
void ptx_cluster_arrive() {
  twin_arrived[twin_now] = twin_cluster.turn;
  twin_cluster.arrived++, twin_clustered();
}
void ptx_cluster_wait() {
  if (twin_cluster.turn == twin_arrived[twin_now]) twin_wait(twin_cluster.turn, twin_cluster.turn);
}

/* ---- copies of 16 bytes by groups of a thread ---- */
struct twin_copy { t32 to; const void *from; int valid; };
static std::vector<std::vector<std::vector<twin_copy>>> twin_copies; /* by thread: groups, the last one open */
static void twin_do(const twin_copy &c) {
  memset(om_memory + c.to, 0, 16);
  memcpy(om_memory + c.to, c.from, c.valid);
}
void ptx_cp16(t32 to, const void *from, int valid) {
  if (to % 16 || (uintptr_t)from % 16) fprintf(stderr, "a copy is not aligned\n"), abort();
  const twin_copy c = {to, from, valid};
  if (twin_lazy) twin_copies[twin_now].back().push_back(c);
  else twin_do(c);
}
void ptx_cp_commit() { twin_copies[twin_now].emplace_back(); }
void ptx_cp_wait(int left) {
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
void ptx_box(t32 to, const void *map, int column, int row, t32 bar, t64) {
  if (to % 1024) fprintf(stderr, "a box is not aligned\n"), abort();
  const twin_box b = {to, *(const twin_map *)map, column, row, bar};
  if (twin_lazy) twin_boxes[twin_number].push_back(b), twin_events++;
  else twin_do(b);
}
void ptx_await(t32 bar, t32 parity) {
  while (twin_at(bar).phase == parity) {
    auto &boxes = twin_boxes[twin_number];
    for (size_t i = 0; i < boxes.size();) {
      if (boxes[i].bar != bar) { i++; continue; }
      twin_do(boxes[i]);
      boxes.erase(boxes.begin() + i);
    }
    if (twin_at(bar).phase == parity) twin_wait(twin_events, twin_events);
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
void ptx_wgmma(bool bf16, float *const (&c)[32], const t32 *const (&a)[4], t64 b, int add, int across) {
  twin_product p = {{}, {}, b, add != 0, across != 0, bf16};
  for (int i = 0; i < 32; i++) p.c[i] = c[i];
  for (int i = 0; i < 4; i++) p.a[i] = a[i];
  if (twin_lazy) twin_products[twin_now].back().push_back(p);
  else twin_do(p);
}
void ptx_wgmma_commit() { twin_products[twin_now].emplace_back(); }
void ptx_wgmma_wait(int left) {
  auto &groups = twin_products[twin_now];
  while ((int)groups.size() > left + 1) {
    const auto first = groups.front();
    groups.erase(groups.begin());
    for (const twin_product &p : first) twin_do(p);
  }
}
void twin_end() {
  twin_fibers[twin_now].done = true;
  twin_states[twin_number].left--;
  if (twin_arrived[twin_now] == twin_cluster.turn) twin_cluster.arrived--;
  twin_synced(), twin_clustered(); /* those that wait need not wait for this one */
  twin_yield();
  abort();
}
void twin_enter(int number) {
  twin_number = number, twin_mine = &twin_blocks[number], om_memory = twin_mine->memory;
}
/* Runs the kernel, cluster by cluster. 1: its threads wait for each other. */
extern "C" __attribute__((visibility("default"))) int twin_run(
    void **arguments, int blocks, int cluster, int threads, int order, int lazy) {
  const int all = cluster * threads;
  twin_arguments = arguments, twin_lazy = lazy;
  std::vector<char> memory((size_t)cluster * TWIN_BYTES + 1024);
  char *const start = (char *)(((uintptr_t)memory.data() + 1023) / 1024 * 1024);
  for (int first = 0; first < blocks; first += cluster) {
    memset(start, 0xff, (size_t)cluster * TWIN_BYTES); /* not a number */
    std::vector<twin_state> states(cluster, {{}, threads});
    twin_states = states.data(), twin_count = cluster;
    twin_boxes.assign(cluster, {}), twin_cluster = twin_named(), twin_arrived.assign(all, ~0u);
    twin_copies.assign(all, {{}}), twin_products.assign(all, {{}});
    if (!twin_together(first, cluster, threads, order, 256 << 10, start, TWIN_BYTES)) return 1;
  }
  return 0;
}
