/* Products of one slot whose inputs go from the values of other blocks straight into the registers that are
 * multiplied: bf16, batch 1 (OM_DIRECT). What a layer does then, in place of fill.cuh and om_product.
 *
 * K is shared out between the warps, every unit's in the same way, so a warp looks for its own columns alone, and only
 * the warps' sums meet: one barrier a product. The weights of up to TOGETHER units are read into registers before the
 * inputs are looked for. The 8 columns of m16n8k16's second operand are 8 steps along K: lane (row, quad) has the four
 * columns of K of step `row` that its quad multiplies there, and brings zeros to the other seven; the sum over the
 * quads is the sum over the steps. A norm's root comes after the product, with the warps' sums of squares.
 *
 * Sums lie in two places in turn: a warp comes to the place again only after a barrier behind its last reader. So do
 * the kept rows of the residual stream, for the output and the down projection.
 */
#if OM_DIRECT
#define OM_DIRECT_SUMS (OM_TOGETHER * OM_WARPS * 16) /* floats of one of two places; the sums of squares behind */

__device__ __forceinline__ float *om_kept_rows(int product) { /* 0: for the output projection, 1: for down */
  return (float *)(om_memory + (product ? OM_AT_RESIDUAL_DOWN : OM_AT_RESIDUAL));
}

/* ---- inputs: `early` begins to read, before or after the weights (OM_LOOK_FIRST: a look that comes too soon delays the
 * next one, a late one makes a stream wait); `fill` gives the lane's share of the squares ---- */
template <int SPLIT, bool FIRST>
struct om_in_norm {
  static constexpr bool NORM = true;
  const char *stream;
  u32 mark;
  int edge;
  const float *gain;
  int from, to; /* rows of the residual stream that are kept */
  float *kept;

  template <int SLABS>
  struct early_t {
    float4 gain[om_part<SLABS>::GROUPS];
    uint4 w[om_part<SLABS>::GROUPS * SPLIT];
  };
  template <int SLABS> static __device__ __forceinline__ bool here(const om_state &s, int g) {
    constexpr bool ALL = om_part<SLABS>::EVEN && om_part<SLABS>::COLS <= OM_HIDDEN_ROWS; /* but a warp's may end */
    const int col = om_part<SLABS>::column(s, g);
    return col >= 0 && (ALL || col < OM_HIDDEN_ROWS);
  }
  /* Part `i` % SPLIT of group `i` / SPLIT: one address for all, which two registers hold. */
  template <int SLABS> __device__ __forceinline__ uint4 look(const om_state &s, int i) const {
    const char *const first = stream + max(om_part<SLABS>::column(s, 0), 0) * 4;
    return om_look(first + ((size_t)(i % SPLIT) * OM_HIDDEN_ROWS + i / SPLIT * 128) * 4);
  }
  template <int SLABS> __device__ __forceinline__ void early(const om_state &s, early_t<SLABS> &e) const {
#pragma unroll
    for (int g = 0; g < om_part<SLABS>::GROUPS; g++) {
      e.gain[g] = here<SLABS>(s, g) ? *(const float4 *)(gain + om_part<SLABS>::column(s, g)) : make_float4(0, 0, 0, 0);
#pragma unroll
      for (int i = g * SPLIT; i < (FIRST ? 0 : (g + 1) * SPLIT); i++)
        e.w[i] = here<SLABS>(s, g) ? look<SLABS>(s, i) : make_uint4(0, 0, 0, 0);
    }
  }
  template <int SLABS>
  __device__ __forceinline__ float fill(const om_state &s, early_t<SLABS> &e, om_part<SLABS> &part) const {
    constexpr int G = om_part<SLABS>::GROUPS;
    for (om_patience wait; !FIRST;) {
      bool missing = false;
      u32 seen = 0;
#pragma unroll
      for (int i = 0; i < G * SPLIT; i++)
        if (here<SLABS>(s, i / SPLIT) && !om_singles(e.w[i], mark)) missing = true, seen = e.w[i].w & OM_MARKS;
      if (!missing || wait.over(s, edge, mark, seen)) break;
#pragma unroll
      for (int i = 0; i < G * SPLIT; i++)
        if (here<SLABS>(s, i / SPLIT) && !om_singles(e.w[i], mark)) e.w[i] = look<SLABS>(s, i);
    }
    float squares = 0.0f;
#pragma unroll
    for (int g = 0; g < G; g++) {
      const int col = om_part<SLABS>::column(s, g);
      float4 x = make_float4(0, 0, 0, 0);
      if (FIRST) {
        if (col >= 0 && col < OM_HIDDEN_ROWS) x = om_embedding(s.p, om.token[0], col);
      } else {
#pragma unroll
        for (int k = 0; k < SPLIT; k++) {
          const float4 add = om_take_singles(e.w[g * SPLIT + k]);
          x.x += add.x, x.y += add.y, x.z += add.z, x.w += add.w;
        }
      }
      if (col >= from && col < to) *(float4 *)(kept + col - from) = x;
      squares += (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w);
      part.keep(g, make_float4(x.x * e.gain[g].x, x.y * e.gain[g].y, x.z * e.gain[g].z, x.w * e.gain[g].w));
    }
    part.put_kept(s.lane());
    return squares;
  }
};

struct om_in_act { /* part `part` of the MLP's values */
  static constexpr bool NORM = false;
  const char *act;
  u32 use;
  int part;

  template <int SLABS>
  struct early_t {
    const char *at[om_part<SLABS>::GROUPS];
    uint4 w[om_part<SLABS>::GROUPS];
  };
  template <int SLABS> __device__ __forceinline__ void early(const om_state &s, early_t<SLABS> &e) const {
#pragma unroll
    for (int g = 0; g < om_part<SLABS>::GROUPS; g++) { /* eight columns in one access; a lane has half of them */
      const int in = om_part<SLABS>::column(s, g), col = part * om_part<SLABS>::COLS + (in & ~7);
      e.at[g] = in >= 0 && col < OM_UP_TILES * 8 ? act + col * 2 : nullptr;
    }
    om_look_all(e.at, e.w);
  }
  template <int SLABS>
  __device__ __forceinline__ float fill(const om_state &s, early_t<SLABS> &e, om_part<SLABS> &p) const {
    constexpr int G = om_part<SLABS>::GROUPS;
    om_look_again<G, G>(s, e.at, 0, use, OM_EDGE_UP, e.w);
    const bool half = s.lane() / 4 % 2;
#pragma unroll
    for (int g = 0; g < G; g++) p.words(s.lane(), g, half ? e.w[g].z : e.w[g].x, half ? e.w[g].w : e.w[g].y);
    return 0.0f;
  }
};

struct om_in_attention { /* part `part` of attention's pieces, joined; masses are looked for first: they are few */
  static constexpr bool NORM = false;
  const char *pieces, *masses;
  u32 mark, use;
  int part;

  template <int SLABS> struct early_t {
    uint4 m[OM_PIECES4 / 4]; /* of the first group's head */
  };
  template <int SLABS> __device__ __forceinline__ int column(const om_state &s, int group) const { /* -1: none */
    const int in = om_part<SLABS>::column(s, group), col = part * om_part<SLABS>::COLS + (in & ~7);
    return in >= 0 && col < OM_HEADS * OM_HEAD_DIM ? col : -1;
  }
  template <int SLABS> __device__ __forceinline__ void early(const om_state &s, early_t<SLABS> &e) const {
    const int col = column<SLABS>(s, 0);
#pragma unroll
    for (int k = 0; k < OM_PIECES4 / 4; k++)
      e.m[k] = col >= 0 ? om_look(masses + col / OM_HEAD_DIM * (OM_PIECES4 * 4) + k * 16) : make_uint4(0, 0, 0, 0);
  }
  template <int SLABS>
  __device__ __forceinline__ float fill(const om_state &s, early_t<SLABS> &e, om_part<SLABS> &p) const {
    constexpr int N = OM_PIECES, M = OM_PIECES4 / 4;
    const bool half = s.lane() / 4 % 2;
#pragma unroll
    for (int g = 0; g < om_part<SLABS>::GROUPS; g++) {
      const int col = column<SLABS>(s, g), head = max(col, 0) / OM_HEAD_DIM;
      const bool here = col >= 0;
      const char *const first = pieces + ((size_t)head * (OM_PIECES * OM_HEAD_DIM) + max(col, 0) % OM_HEAD_DIM) * 2;
      const char *const mass_at = masses + head * (OM_PIECES4 * 4);
      uint4 m[M], w[N];
#pragma unroll
      for (int k = 0; k < M; k++) m[k] = g == 0 ? e.m[k] : here ? om_look(mass_at + k * 16) : make_uint4(0, 0, 0, 0);
      float mass[OM_PIECES4];
      om_patience wait;
      for (;;) {
        bool missing = false;
#pragma unroll
        for (int k = 0; k < M; k++) {
          mass[4 * k] = __uint_as_float(m[k].x), mass[4 * k + 1] = __uint_as_float(m[k].y);
          mass[4 * k + 2] = __uint_as_float(m[k].z), mass[4 * k + 3] = __uint_as_float(m[k].w);
        }
#pragma unroll
        for (int k = 0; k < N; k++) missing |= here && (__float_as_uint(mass[k]) & 7) != mark;
        if (!missing || wait.over(s, OM_EDGE_ATTEND, mark, m[0].x & 7)) break;
#pragma unroll
        for (int k = 0; k < M; k++) m[k] = om_look(mass_at + k * 16);
      }
      /* one address for all: om_read's would take two registers each */
#pragma unroll
      for (int k = 0; k < N; k++) w[k] = here ? om_look(first + k * (OM_HEAD_DIM * 2)) : make_uint4(0, 0, 0, 0);
      for (om_patience late;;) {
        bool missing = false;
#pragma unroll
        for (int k = 0; k < N; k++) missing |= here && !om_eights(w[k], use);
        if (!missing || late.over(s, OM_EDGE_ATTEND, use, w[0].w >> 16 & 1)) break;
#pragma unroll
        for (int k = 0; k < N; k++)
          if (here && !om_eights(w[k], use)) w[k] = om_look(first + k * (OM_HEAD_DIM * 2));
      }
      float top = -OM_INFINITY, total = 0.0f, sum[4] = {};
#pragma unroll
      for (int k = 0; k < N; k++) {
        mass[k] = __uint_as_float(__float_as_uint(mass[k]) & ~7u);
        top = fmaxf(top, mass[k]);
      }
#pragma unroll
      for (int k = 0; k < N; k++) {
        const float f = mass[k] == -OM_INFINITY ? 0.0f : om_exp2(mass[k] - top);
        const float2 a = om_unpack(half ? w[k].z : w[k].x), b = om_unpack(half ? w[k].w : w[k].y);
        total += f;
        sum[0] += f * a.x, sum[1] += f * a.y, sum[2] += f * b.x, sum[3] += f * b.y;
      }
      const float r = here && total > 0.0f ? om_reciprocal(total) : 0.0f;
      p.put(s.lane(), g, make_float4(sum[0] * r, sum[1] * r, sum[2] * r, sum[3] * r));
    }
    return 0.0f;
  }
};

#if OM_BITS == 4
/* The same, the pieces of several groups looked at together, for which few weights leave registers: a look takes as long
 * for one as for all. */
struct om_in_pieces : om_in_attention {
  static constexpr int N = OM_PIECES, M = OM_PIECES4 / 4;

  template <int SLABS> static __device__ __forceinline__ constexpr int together() {
    return om_part<SLABS>::GROUPS * N <= 16 ? om_part<SLABS>::GROUPS : 1;
  }
  template <int SLABS> struct early_t {
    uint4 m[together<SLABS>() * M]; /* of the first groups' heads */
  };
  template <int SLABS> __device__ __forceinline__ void look(const om_state &s, int from, early_t<SLABS> &e) const {
#pragma unroll
    for (int i = 0; i < together<SLABS>() * M; i++) {
      const int col = column<SLABS>(s, from + i / M);
      e.m[i] = col >= 0 ? om_look(masses + col / OM_HEAD_DIM * (OM_PIECES4 * 4) + i % M * 16) : make_uint4(0, 0, 0, 0);
    }
  }
  template <int SLABS> __device__ __forceinline__ void early(const om_state &s, early_t<SLABS> &e) const { look(s, 0, e); }
  template <int SLABS>
  __device__ __forceinline__ float fill(const om_state &s, early_t<SLABS> &e, om_part<SLABS> &p) const {
    constexpr int G = om_part<SLABS>::GROUPS, GO = together<SLABS>();
    const bool half = s.lane() / 4 % 2;
#pragma unroll
    for (int from = 0; from < G; from += GO) {
      if (from) look(s, from, e);
      for (om_patience wait;;) {
        bool missing = false;
#pragma unroll
        for (int g = 0; g < GO; g++) missing |= column<SLABS>(s, from + g) >= 0 && !om_masses(e.m + g * M, mark);
        if (!missing || wait.over(s, OM_EDGE_ATTEND, mark, e.m[0].x & OM_MARKS)) break;
        look(s, from, e);
      }
      const char *at[GO]; /* the first piece's; a lane without columns reads others' */
      uint4 w[GO * N];
#pragma unroll
      for (int g = 0; g < GO; g++) {
        const int col = max(column<SLABS>(s, from + g), 0);
        at[g] = pieces + ((size_t)(col / OM_HEAD_DIM) * (OM_PIECES * OM_HEAD_DIM) + col % OM_HEAD_DIM) * 2;
#pragma unroll
        for (int k = 0; k < N; k++) w[g * N + k] = om_look(at[g] + k * (OM_HEAD_DIM * 2));
      }
      for (om_patience wait;;) {
        bool missing = false;
#pragma unroll
        for (int i = 0; i < GO * N; i++) missing |= !om_eights(w[i], use);
        if (!missing || wait.over(s, OM_EDGE_ATTEND, use, w[0].w >> 16 & 1)) break;
#pragma unroll
        for (int i = 0; i < GO * N; i++)
          if (!om_eights(w[i], use)) w[i] = om_look(at[i / N] + i % N * (OM_HEAD_DIM * 2));
      }
#pragma unroll
      for (int g = 0; g < GO; g++) {
        float x[8];
        const bool here = column<SLABS>(s, from + g) >= 0;
        om_join_pieces(w + g * N, e.m + g * M, here, x);
        const float4 low = make_float4(x[0], x[1], x[2], x[3]), high = make_float4(x[4], x[5], x[6], x[7]);
        p.put(s.lane(), from + g, here ? (half ? high : low) : make_float4(0, 0, 0, 0));
      }
    }
    return 0.0f;
  }
};
#else
struct om_in_pieces : om_in_attention {};
#endif

/* ---- what happens to a unit's sums: lanes r and r + 16 of one warp have row r's ---- */
struct om_put {
  char *values;
  const float *bias;
  int first; /* tile of unit 0 */
  u32 mark;
  __device__ __forceinline__ float early(int unit, int row) const {
    return bias ? bias[(first + unit) * 16 + row] : 0.0f;
  }
};
struct om_put_qkv : om_put {
  __device__ __forceinline__ void put(const om_state &s, int unit, int row, float v) const {
    const int at = (first + unit) * 16 + row;
    if (s.lane() < 16 && (OM_QKV_ROWS % 16 == 0 || at < OM_QKV_ROWS)) om_put_single(values + at * 4, v, mark);
  }
};
struct om_put_residual : om_put { /* the part with the stream itself adds it */
  const float *residual; /* null for other parts */
  int kept; /* first row that is kept */
  __device__ __forceinline__ void put(const om_state &s, int unit, int row, float v) const {
    const int at = (first + unit) * 16 + row;
    if (residual) v += residual[at - kept];
    if (s.lane() < 16) om_put_single(values + at * 4, v, mark);
  }
};
struct om_put_up : om_put { /* rows 0 to 7 of a tile are gates, 8 to 15 the same elements of up */
  __device__ __forceinline__ void put(const om_state &s, int unit, int, float g) const {
    const float u = __shfl_down_sync(~0u, g, 8), h = g * om_reciprocal(1.0f + om_exp2(-1.4426950408889634f * g)) * u;
    const u32 x = om_pack(h, __shfl_down_sync(~0u, h, 1)), y = __shfl_down_sync(~0u, x, 2);
    const u32 z = __shfl_down_sync(~0u, x, 4), w = __shfl_down_sync(~0u, x, 6);
    if (s.lane() == 0 && (int)blockIdx.x != s.p->withhold - 1)
      om_put_eight(values + (first + unit) * 16, x, y, z, w, mark);
  }
};

struct om_put_head { /* keeps the best of a row in registers; a warp's units come in rising order */
  const om_state &s;
  char *logits;
  int first;
  u32 tag;
  float *best;
  int *best_id;
  __device__ __forceinline__ float early(int, int) const { return 0.0f; }
  __device__ __forceinline__ void put(const om_state &, int unit, int row, float v) const {
    const int id = (first + unit) * 16 + row;
    if (s.p->keep_logits && s.lane() < 16) om_put((u64 *)logits + id, __float_as_uint(v), tag);
    if (id < OM_VOCAB && v > *best) *best = v, *best_id = id;
  }
};

#if !OM_PRIVATE
/* A lane's operands of this warp's slabs of unit `unit`, once they have landed. Slots are neighbours: slabs of a unit
 * follow one another in memory, but for the ring's end. */
template <int SLABS, int CHUNK>
__device__ __forceinline__ void om_unit_weights(const om_state &s, int unit, typename om_part<SLABS>::Weights &a) {
  using Part = om_part<SLABS>;
  constexpr int BYTES = om_format<OM_BITS>::BYTES, CHUNKS = (SLABS + CHUNK - 1) / CHUNK, MINE = Part::MINE;
  constexpr int LAST = OM_STAGES * CHUNK;
  constexpr bool ALONE = CHUNK % MINE == 0; /* they lie in one chunk */
  static_assert(CHUNK * BYTES == OM_CHUNK, "a chunk is a slot");
  const int lane = s.lane(), begin = s.warp() * MINE, end = Part::EVEN ? begin + MINE : min(begin + MINE, SLABS);
  u32 place = 0;
#pragma unroll
  for (int i = 0; i <= (ALONE ? 0 : (MINE + CHUNK - 2) / CHUNK); i++) {
    const int in = begin / CHUNK + i;
    const u32 chunk = s.chunk + unit * CHUNKS + in, slot = chunk % OM_STAGES;
    if (i == 0) place = slot * CHUNK + begin % CHUNK;
    if (Part::EVEN && ALONE || in * CHUNK < end) om_wait(om_address(om.full) + 8 * slot, chunk / OM_STAGES & 1);
  }
#pragma unroll
  for (int j = 0; j < MINE; j++) {
    u32 at = place + j;
    if (!ALONE && at >= LAST) at -= LAST;
    a.load(j, om_memory + OM_AT_RING + at * BYTES, lane, Part::EVEN || begin + j < end);
  }
}

#else
/* A warp's slabs of a unit. */
template <int SLABS>
__device__ __forceinline__ int om_mine(const om_state &s) {
  using Part = om_part<SLABS>;
  return Part::EVEN ? Part::MINE : min(Part::MINE, SLABS - s.warp() * Part::MINE);
}
/* A lane's operands of N units, zeros until they are read: of units that there are not, and slabs that a warp has not. */
template <int SLABS, int N>
struct om_weights {
  static constexpr int MINE = om_part<SLABS>::MINE, HOLD = MINE > OM_HOLD ? OM_HOLD : MINE; /* read before the inputs */
  static_assert(HOLD == MINE || N == 1, "units that are not held as a whole");
  uint4 a[N][2 * HOLD];

  template <int FROM, int TO>
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int u = FROM; u < TO; u++)
#pragma unroll
      for (int j = 0; j < 2 * HOLD; j++) a[u][j] = make_uint4(0, 0, 0, 0);
  }
  template <int FROM, int TO>
  __device__ __forceinline__ void draw(om_state &s, int some) {
    om_draw_units<HOLD, FROM, TO, om_part<SLABS>::EVEN>(s, some, om_mine<SLABS>(s), a[0]);
  }
};
/* Those of N units times the inputs, as a lane's sums of two rows, each in two chains. */
template <int SLABS, int N>
__device__ __forceinline__ void om_multiply(int lane, const om_part<SLABS> &part, const om_weights<SLABS, N> &w,
                                            float (&c)[N][2][4]) {
#pragma unroll
  for (int j = 0; j < 2 * w.HOLD; j++) {
    const bool here = lane / 4 == j % 8;
    const u32 b0 = here ? part.b[j / 8][0] : 0, b1 = here ? part.b[j / 8][1] : 0;
#pragma unroll
    for (int u = 0; u < N; u++) om_mma(c[u][j % 2], w.a[u][j], b0, b1);
  }
}
template <int N>
__device__ __forceinline__ void om_add_chains(const float (&c)[N][2][4], float (&both)[N][2]) {
#pragma unroll
  for (int u = 0; u < N; u++)
#pragma unroll
    for (int i = 0; i < 2; i++) both[u][i] = (c[u][0][2 * i] + c[u][0][2 * i + 1]) + (c[u][1][2 * i] + c[u][1][2 * i + 1]);
}
/* Slabs of a warp's part of a unit from FROM on, which no register held: four of them are the eight steps of a group of
 * inputs. One text for all groups. */
template <int FROM, int SLABS>
__device__ __forceinline__ void om_direct_rest(om_state &s, const om_part<SLABS> &part, float (&c)[2][4]) {
  using Part = om_part<SLABS>;
  static_assert(FROM % 4 == 0 || FROM >= Part::MINE, "whole groups are held");
#pragma unroll 1
  for (int g = FROM / 4; g < (FROM < Part::MINE ? Part::GROUPS : 0); g++) {
    constexpr bool ALL = Part::EVEN && Part::MINE % 4 == 0;
    uint4 a[8] = {};
    const int count = ALL ? 4 : min(4, om_mine<SLABS>(s) - 4 * g);
    if (ALL || count > 0) om_refill(s, count, om_read_slabs<4, ALL>(s, count, a));
    u32 b0 = 0, b1 = 0;
#pragma unroll
    for (int i = FROM / 4; i < Part::GROUPS; i++)
      if (i == g) b0 = part.b[i][0], b1 = part.b[i][1];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const bool here = s.lane() / 4 == j;
      om_mma(c[j % 2], a[j], here ? b0 : 0, here ? b1 : 0);
    }
  }
}
#endif

/* The first of `some` units that this warp ends: the first warps have more to do next; of the head's many, all in
 * turn. */
__device__ __forceinline__ int om_own_unit(const om_state &s, int begin) {
  return (OM_WARPS - 1 - s.warp() + (OM_PRIVATE ? begin : 0)) % OM_WARPS;
}

/* The warps' sums of N units meet; units FROM to FROM + `some` of them are `some` from `begin` on, and end here.
 * `squares`: the lane's, where `first` and a norm; `bias`: of unit `own`. */
template <int N, bool NORM, class Out>
__device__ __forceinline__ void om_direct_join(om_state &s, int from, int begin, int some, int kind, bool first,
                                               float squares, const float (&both)[N][2], int own, float bias,
                                               const Out &out) {
  const int lane = s.lane(), warp = s.warp();
  const u32 turn = s.joined++ & 1;
  float *const sums = (float *)(om_memory + OM_AT_DIRECT) + turn * OM_DIRECT_SUMS;
  float *const squared = (float *)(om_memory + OM_AT_DIRECT) + 2 * OM_DIRECT_SUMS + (kind == OM_SPAN_UP) * OM_WARPS;
  if (NORM && first) { /* a place for each of a layer's norms */
#pragma unroll
    for (int d = 16; d; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
    if (lane == 0) squared[warp] = squares;
  }
  const bool odd = lane % 2;
#pragma unroll
  for (int u = 0; u < N; u++) { /* of a quad, lane 0 comes to row `row`, lane 1 to row + 8 */
    const float lo = both[u][0], hi = both[u][1];
    float v = (odd ? hi : lo) + __shfl_xor_sync(~0u, odd ? lo : hi, 1);
    v += __shfl_xor_sync(~0u, v, 2);
    if (lane % 4 < 2) sums[(u * OM_WARPS + warp) * 16 + lane / 4 + 8 * (lane % 4)] = v;
  }
  om_sync();
  for (int u = own; u < some; u += OM_WARPS) {
    const int row = lane % 16;
    float v = 0.0f, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < OM_WARPS / 2; i++) v += sums[((from + u) * OM_WARPS + 2 * i + lane / 16) * 16 + row];
    v += __shfl_xor_sync(~0u, v, 16);
    if (NORM) {
#pragma unroll
      for (int i = 0; i < OM_WARPS; i++) sum += squared[i];
      v *= om_rsqrt(sum * (1.0f / OM_HIDDEN) + OM_EPS);
    }
    out.put(s, begin + u, row, v + (u == own ? bias : out.early(begin + u, row)));
    if (N <= OM_WARPS) break; /* a warp ends one at most: 400 instructions less */
  }
}

#if OM_PRIVATE
template <int SLABS, int N>
using om_registers = om_weights<SLABS, N>;
#else
template <int SLABS, int N>
struct om_registers {
  typename om_part<SLABS>::Weights a[N];
};
#endif

#define OM_ALL_UNITS 64 /* AHEAD: nothing comes between weights and inputs */
struct om_nothing {};
/* Up to TOGETHER units from `begin` on; the inputs are made before the first. Before these comes what is `between`,
 * behind the first AHEAD units' weights, or before them in a block that is `late`. */
template <int SLABS, int CHUNK, int MOST, int TOGETHER, int AHEAD, bool FIRST, class In, class Out, class Between>
__device__ __forceinline__ void om_direct_turn(om_state &s, int begin, int units, int kind, const In &in, const Out &out,
                                               const Between &between, bool late, om_registers<SLABS, TOGETHER> &w,
                                               om_part<SLABS> &part, u64 &t) {
  using Part = om_part<SLABS>;
  const int lane = s.lane(), some = min(TOGETHER, units - begin);
  typename In::template early_t<SLABS> early;
  if (FIRST && OM_LOOK_FIRST && !OM_PRIVATE) in.template early<SLABS>(s, early);
  const bool first = FIRST && (!OM_PRIVATE || MOST <= TOGETHER || begin == 0);
  const int own = om_own_unit(s, begin);
  const float bias = own < some ? out.early(begin + own, lane % 16) : 0.0f;
#if OM_PRIVATE
  if constexpr (AHEAD < OM_ALL_UNITS) {
    between.begin(first);
    late |= !first;
#pragma unroll 1
    for (int round = !first; round <= late; round++) { /* one text, whenever it is its turn */
      if (round == late) w.template draw<0, AHEAD>(s, some);
      if (round == 0) between.run(), t = om_stamp(s);
    }
    w.template clear<AHEAD, TOGETHER>(); /* not before: what comes between needs registers */
    w.template draw<AHEAD, TOGETHER>(s, some);
  } else {
    w.template draw<0, TOGETHER>(s, some);
  }
#else
  auto &a = w.a;
  constexpr int MINE = Part::MINE, CHUNKS = (SLABS + CHUNK - 1) / CHUNK;
#pragma unroll
  for (int u = 0; u < TOGETHER; u++) /* what a block has too few units for is not used */
    om_unit_weights<SLABS, CHUNK>(s, min(u, some - 1), a[u]);
  if (FIRST && !OM_LOOK_FIRST) in.template early<SLABS>(s, early);
  u32 mix = 0;
#pragma unroll
  for (int u = 0; u < TOGETHER; u++)
#pragma unroll
    for (int j = 0; j < MINE; j++) mix ^= a[u].mix(j);
  __syncwarp();
  for (int i = lane; om_is_read(mix) && i < some * CHUNKS; i += 32)
    om_arrive(om_address(om.empty) + 8 * ((s.chunk + i) % OM_STAGES));
  s.chunk += some * CHUNKS;
#endif
  float squares = 0.0f;
  if (first) {
    om_waiting(s, 1);
    if (OM_PRIVATE) in.template early<SLABS>(s, early);
    squares = in.template fill<SLABS>(s, early, part);
    om_waiting(s, 0);
    t = om_span(s, kind - 1, t);
  }
  float both[TOGETHER][2];
#if OM_PRIVATE
  float c[TOGETHER][2][4] = {};
  om_multiply(lane, part, w, c);
  om_direct_rest<om_registers<SLABS, TOGETHER>::HOLD, SLABS>(s, part, c[0]);
  om_add_chains(c, both);
#else
  part.template multiply<TOGETHER>(lane, a, both);
#endif
  om_direct_join<TOGETHER, In::NORM>(s, 0, begin, some, kind, first, squares, both, own, bias, out);
}

/* A block without units keeps its rows all the same. */
template <int SLABS, class In>
__device__ __forceinline__ void om_direct_idle(om_state &s, const In &in) {
  typename In::template early_t<SLABS> early;
  om_part<SLABS> part;
  in.template early<SLABS>(s, early);
  in.template fill<SLABS>(s, early, part);
}

/* The products of this block's units [0, units), at least one and at most MOST, `TOGETHER` at a time. A slot goes back
 * to the loader when every warp has arrived, whatever it had of it, as soon as the weights are in registers: an arrival
 * depends on them (see om_product). `kind`: the span of the product; the one before it ends when warp 0 has its
 * inputs. */
template <int SLABS, int CHUNK, int MOST, int TOGETHER, int AHEAD = OM_ALL_UNITS, class In, class Out,
          class Between = om_nothing>
__device__ __forceinline__ void om_direct(om_state &s, int units, int kind, const In &in, const Out &out,
                                          const Between &between = Between(), bool late = false) {
  u64 t = om_stamp(s);
  om_part<SLABS> part;
  om_registers<SLABS, TOGETHER> w;
#if OM_PRIVATE /* one text for all turns: a layer's should fit the cache of instructions */
  w.template clear<0, TOGETHER>();
#pragma unroll 1
  for (int begin = 0; begin < units; begin += TOGETHER)
    om_direct_turn<SLABS, CHUNK, MOST, TOGETHER, AHEAD, true>(s, begin, units, kind, in, out, between, late, w, part, t);
#else
  om_direct_turn<SLABS, CHUNK, MOST, TOGETHER, AHEAD, true>(s, 0, units, kind, in, out, between, late, w, part, t);
  if (MOST > TOGETHER)
#pragma unroll 1
    for (int begin = TOGETHER; begin < units; begin += TOGETHER)
      om_direct_turn<SLABS, CHUNK, MOST, TOGETHER, AHEAD, false>(s, begin, units, kind, in, out, between, late, w, part, t);
#endif
  om_span(s, kind, t);
}

/* Units of a product that ends in the residual stream, part by part: what this block has of the part from unit `u` on,
 * and where it goes. */
struct om_residual {
  char *values;
  const float *bias, *residual;
  int kept;
  u32 mark;
  __device__ __forceinline__ om_put_residual out(int u) const {
    const int part = u / OM_HIDDEN_TILES;
    return {{values + (size_t)part * (OM_HIDDEN_ROWS * 4), part ? nullptr : bias, u - part * OM_HIDDEN_TILES, mark},
            part ? nullptr : residual, kept};
  }
};
template <int KIND, int SLABS, int CHUNK, int MOST, int TOGETHER, class Fill>
__device__ __forceinline__ void om_direct_residual(om_state &s, const om_residual &to, int kind, const Fill &inputs) {
  const int begin = om_share(KIND, s.turn), end = om_share(KIND, s.turn + 1);
  for (int u = begin; u < end;) {
    const int part = u / OM_HIDDEN_TILES, stop = min(end, (part + 1) * OM_HIDDEN_TILES);
    om_direct<SLABS, CHUNK, MOST, TOGETHER>(s, stop - u, kind, inputs(part), to.out(u));
    u = stop;
  }
}

#if OM_AHEAD
/* The same, the weights of all units in registers: every part's inputs are multiplied by all of them, of which its own
 * count. `t`: when the wait for the first inputs began. */
template <int KIND, int SLABS, int MOST, class Fill>
__device__ __forceinline__ void om_held_residual(om_state &s, const om_weights<SLABS, MOST> &w, const om_residual &to,
                                                 int kind, const Fill &inputs, u64 t) {
  const int begin = om_share(KIND, s.turn), end = om_share(KIND, s.turn + 1), own = om_own_unit(s, 0);
#pragma unroll 1
  for (int u = begin; u < end;) {
    const int part = u / OM_HIDDEN_TILES, stop = min(end, (part + 1) * OM_HIDDEN_TILES);
    const auto in = inputs(part);
    const om_put_residual out = to.out(u);
    typename decltype(in)::template early_t<SLABS> early;
    om_part<SLABS> x;
    const float bias = own < stop - u ? out.early(own, s.lane() % 16) : 0.0f;
    in.template early<SLABS>(s, early);
    in.template fill<SLABS>(s, early, x);
    t = om_span(s, kind - 1, t);
    float c[MOST][2][4] = {}, both[MOST][2];
    om_multiply(s.lane(), x, w, c);
    om_add_chains(c, both);
    om_direct_join<MOST, false>(s, u - begin, 0, stop - u, kind, true, 0.0f, both, own, bias, out);
    t = om_span(s, kind, t);
    u = stop;
  }
}
#endif

template <class Begin, class Run>
struct om_between { /* at the beginning of every turn, and once */
  const Begin &begin;
  const Run &run;
};
/* Inputs and results of gate and up. Where they lie is worked out anew when it is used: kept from before the output
 * projection, it would cost registers there. */
__device__ __forceinline__ int om_anew(int x) {
  if (OM_AHEAD) asm volatile("" : "+r"(x));
  return x;
}
struct om_in_mid {
  using In = om_in_norm<OM_O_SPLIT, false>;
  static constexpr bool NORM = true;
  const char *stream;
  u32 mark;
  template <int SLABS>
  using early_t = typename In::template early_t<SLABS>;
  __device__ __forceinline__ In in(const om_state &s) const {
    int from, to;
    om_own(OM_DOWN, om_anew(s.turn), from, to);
    return {stream, mark, OM_EDGE_O, om_vector(s.p, om_anew(s.layer), OM_AT_NORM_MID), from, to, om_kept_rows(1)};
  }
  template <int SLABS> __device__ __forceinline__ void early(const om_state &s, early_t<SLABS> &e) const {
    in(s).template early<SLABS>(s, e);
  }
  template <int SLABS>
  __device__ __forceinline__ float fill(const om_state &s, early_t<SLABS> &e, om_part<SLABS> &part) const {
    return in(s).template fill<SLABS>(s, e, part);
  }
};
struct om_put_gated {
  const om_state &s;
  char *act;
  u32 use;
  __device__ __forceinline__ om_put_up out() const {
    return {{act, om_vector(s.p, om_anew(s.layer), OM_AT_UP_BIAS), om_share(OM_UP, om_anew(s.turn)), use}};
  }
  __device__ __forceinline__ float early(int unit, int row) const {
    return OM_AT_UP_BIAS < 0 ? 0.0f : out().early(unit, row);
  }
  __device__ __forceinline__ void put(const om_state &s, int unit, int row, float v) const { out().put(s, unit, row, v); }
};

__device__ __forceinline__ void om_layer(om_state &s, char *between, u32 tag) {
  const om_launch *p = s.p;
  const u32 mark = tag & 7, use = ((p->uses + s.step) * OM_LAYERS + s.layer + 1) & 1;
  char *const own = between + (size_t)s.layer * OM_APART;
  char *const qkv = own + OM_PLACE_QKV, *const pieces = own + OM_PLACE_PART, *const masses = own + OM_PLACE_MASS;
  char *const o = own + OM_PLACE_O, *const act = own + OM_PLACE_ACT;
  char *const down = om_stream(own, 0, s.layer);
  const char *const before = om_stream(own - OM_APART, 0, s.layer + 1);
  constexpr int EACH = om_format<OM_BITS>::BLOCKS, HIDDEN = OM_HIDDEN_K / EACH; /* slabs */
  int from, to;
#if OM_STAGED
  om_stage(s);
#endif
#if OM_PRIVATE
  om_ask_layer(s);
#endif
  if (s.layer == 0) om_clear_queries(s); /* the head's inputs were there */
  om_own(OM_O, s.turn, from, to);
  {
    const float *const gain = om_vector(p, s.layer, OM_AT_NORM_IN);
    const int units = om_units(OM_QKV, s.turn);
    const om_put_qkv out{{qkv, om_vector(p, s.layer, OM_AT_QKV_BIAS), om_share(OM_QKV, s.turn), mark}};
    if (OM_QKV_TILES < OM_BLOCKS && units == 0) {
      if (s.layer == 0)
        om_direct_idle<HIDDEN>(s, om_in_norm<1, true>{before, 0, 0, gain, from, to, om_kept_rows(0)});
      else
        om_direct_idle<HIDDEN>(
            s, om_in_norm<OM_DOWN_SPLIT, false>{before, (tag - 1) & 7, OM_EDGE_DOWN, gain, from, to, om_kept_rows(0)});
    } else if (s.layer == 0)
      om_direct<HIDDEN, OM_QKV_CHUNK, OM_QKV_MOST, OM_QKV_TOGETHER>(
          s, units, OM_SPAN_QKV, om_in_norm<1, true>{before, 0, 0, gain, from, to, om_kept_rows(0)}, out);
    else
      om_direct<HIDDEN, OM_QKV_CHUNK, OM_QKV_MOST, OM_QKV_TOGETHER>(
          s, units, OM_SPAN_QKV,
          om_in_norm<OM_DOWN_SPLIT, false>{before, (tag - 1) & 7, OM_EDGE_DOWN, gain, from, to, om_kept_rows(0)}, out);
  }
  OM_EDGE_DONE(OM_BARRIER_QKV, OM_EDGE_QKV);
  const u64 t = om_stamp(s);
  for (int item = s.turn; item < OM_ITEMS; item += OM_BLOCKS)
    om_attend_item(s, item, qkv, pieces, masses, mark, use, om_vector(p, s.layer, OM_AT_Q_GAIN),
                   om_vector(p, s.layer, OM_AT_K_GAIN));
  om_span(s, OM_SPAN_ATTEND, t);
  OM_EDGE_DONE(OM_BARRIER_ATTEND, OM_EDGE_ATTEND);
  constexpr int OUTPUT = OM_Q_K / EACH / OM_O_SPLIT;
  const om_residual output{o, om_vector(p, s.layer, OM_AT_O_BIAS), om_kept_rows(0), from, mark};
  const auto joined = [&](int part) { return om_in_pieces{{pieces, masses, mark, use, part}}; };
  const om_in_mid mid{o, mark};
  const om_put_gated gated{s, act, use};
#if OM_AHEAD /* the first weights of gate and up before the output projection, but where others wait for this block's
              * piece, whose ring had little time to fill */
  const u64 waits = om_stamp(s);
  om_weights<OUTPUT, OM_O_MOST> held;
  const auto begin = [&](bool first) { /* nothing is kept from turn to turn, for all that the compiler knows */
    held.template clear<0, OM_O_MOST>();
    if (first) held.template draw<0, OM_O_MOST>(s, om_units(OM_O, s.turn));
  };
  const auto run = [&] {
    om_held_residual<OM_O, OUTPUT, OM_O_MOST>(s, held, output, OM_SPAN_O, joined, waits);
    OM_EDGE_DONE(OM_BARRIER_O, OM_EDGE_O);
  };
  om_direct<HIDDEN, OM_UP_CHUNK, OM_UP_MOST, OM_UP_TOGETHER, OM_AHEAD>(
      s, om_units(OM_UP, s.turn), OM_SPAN_UP, mid, gated, om_between<decltype(begin), decltype(run)>{begin, run},
      s.turn < OM_ITEMS);
#else
  om_direct_residual<OM_O, OUTPUT, OM_O_CHUNK, OM_O_MOST, OM_O_TOGETHER>(s, output, OM_SPAN_O, joined);
  OM_EDGE_DONE(OM_BARRIER_O, OM_EDGE_O);
  om_direct<HIDDEN, OM_UP_CHUNK, OM_UP_MOST, OM_UP_TOGETHER>(s, om_units(OM_UP, s.turn), OM_SPAN_UP, mid, gated);
#endif
  OM_EDGE_DONE(OM_BARRIER_UP, OM_EDGE_UP);
  om_own(OM_DOWN, s.turn, from, to);
  om_direct_residual<OM_DOWN, OM_FFN_K / EACH / OM_DOWN_SPLIT, OM_DOWN_CHUNK, OM_DOWN_MOST, OM_DOWN_TOGETHER>(
      s, {down, om_vector(p, s.layer, OM_AT_DOWN_BIAS), om_kept_rows(1), from, mark}, OM_SPAN_DOWN,
      [&](int part) { return om_in_act{act, use, part}; });
  OM_EDGE_DONE(OM_BARRIER_DOWN, OM_EDGE_DOWN);
}

#if OM_PRIVATE
/* The best of this block's logits that this lane has seen. */
__device__ __forceinline__ void om_direct_head(om_state &s, const char *before, char *between, u32 tag, float &best,
                                               int &id) {
  best = -OM_INFINITY, id = 0x7fffffff;
  const om_in_norm<OM_DOWN_SPLIT, false> in{
      before, (tag - 1) & 7, OM_EDGE_DOWN, (const float *)(s.p->weights + OM_AT_NORM_FINAL), 0, 0, om_kept_rows(0)};
  const int units = om_units(OM_HEAD, s.turn);
  if (OM_VOCAB_TILES < OM_BLOCKS && units == 0)
    om_direct_idle<OM_HIDDEN_K>(s, in);
  else
    om_direct<OM_HIDDEN_K, OM_HEAD_CHUNK, OM_HEAD_MOST, OM_HEAD_TOGETHER>(
        s, units, OM_SPAN_HEAD, in,
        om_put_head{s, between + OM_PLACE_LOGITS, om_share(OM_HEAD, s.turn), tag, &best, &id});
}
#endif
#endif
