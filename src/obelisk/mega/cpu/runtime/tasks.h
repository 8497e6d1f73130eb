/* Bodies of the tasks. Each is compared with its meaning (tasks/meanings.py) in the tests. */

/* Declares `in`, the input rows of a product. */
#define OM_INPUT(ENTER, ROOM, X, STRIDE, CHUNKS)                                                              \
  _Alignas(64) char om_room[(ROOM) * (CHUNKS) + OM_BATCH * 48 * !!(ROOM) + 1];                                \
  const om_input in = ENTER(X, STRIDE, CHUNKS, om_room)

static __attribute__((noinline, unused)) void om_embed(om_matrix m, const float *tokens, float *x) {
  const int32_t *token = (const int32_t *)tokens;
  for (int b = 0; b < OM_BATCH; b++) {
    float *to = x + b * OM_X_STRIDE;
    om_outer_row(m, token[b * OM_TOKEN_STRIDE], OM_OUTER_CHUNKS, to);
    for (long i = OM_OUTER_CHUNKS * OB_LANES; i < OM_X_STRIDE; i++) to[i] = 0.0f;
  }
}

static __attribute__((noinline, unused)) void om_norm(const float *x, const float *gain, float *h) {
  for (int b = 0; b < OM_BATCH; b++) {
    const float *from = x + b * OM_X_STRIDE;
    float *to = h + b * OM_X_STRIDE;
    vf sum = {0};
    long i = 0;
    for (; i + OB_LANES <= OM_HIDDEN; i += OB_LANES) { const vf v = om_get(from + i); sum += v * v; }
    float total = ob_hsum_f(sum);
    for (; i < OM_HIDDEN; i++) total += from[i] * from[i];
    const float f = 1.0f / __builtin_sqrtf(total / OM_HIDDEN + OM_EPS);
    for (i = 0; i + OB_LANES <= OM_HIDDEN; i += OB_LANES)
      om_put(to + i, om_get(from + i) * ob_splat_f(f) * om_get(gain + i));
    for (; i < OM_HIDDEN; i++) to[i] = from[i] * f * gain[i];
    for (; i < OM_X_STRIDE; i++) to[i] = 0.0f;
  }
}

/* to[b][row] = sums + bias, rows lo..hi. */
OB_INLINE void om_rows_of(om_matrix m, const float *bias, long lo, long hi, long chunks, const om_input *in, float *to,
                          long to_stride) {
  for (long p = lo / OM_PANEL; p * OM_PANEL < hi; p++) {
    om_sums y;
    om_product(m, p, chunks, in, y);
    for (int b = 0; b < OM_BATCH; b++)
      for (int r = 0; r < OM_PANEL; r++)
        to[b * to_stride + p * OM_PANEL + r] = y[b][r] + (bias ? bias[p * OM_PANEL + r] : 0.0f);
  }
}

static __attribute__((noinline, unused)) void om_rows(om_matrix m, const float *bias, long lo, long hi, long chunks,
                                                      const float *x, long stride, float *to, long to_stride) {
  OM_INPUT(om_enter, OM_ROOM, x, stride, chunks);
  om_rows_of(m, bias, lo, hi, chunks, &in, to, to_stride);
}

/* x[b][row] += sums + bias. */
static __attribute__((noinline, unused)) void om_residual(om_matrix m, const float *bias,
                                                          long lo, long hi, long chunks, const float *from,
                                                          long stride, float *x) {
  OM_INPUT(om_enter, OM_ROOM, from, stride, chunks);
  for (long p = lo / OM_PANEL; p * OM_PANEL < hi; p++) {
    om_sums y;
    om_product(m, p, chunks, &in, y);
    for (int b = 0; b < OM_BATCH; b++)
      for (int r = 0; r < OM_PANEL; r++)
        x[b * OM_X_STRIDE + p * OM_PANEL + r] += y[b][r] + (bias ? bias[p * OM_PANEL + r] : 0.0f);
  }
}

/* act[b][row] = silu(gate) * up; the panels of gate and up take turns. */
static __attribute__((noinline, unused)) void om_up(om_matrix m, const float *bias, long lo,
                                                    long hi, const float *h, float *act) {
  OM_INPUT(om_enter, OM_ROOM, h, OM_X_STRIDE, OM_HIDDEN_CHUNKS);
  for (long p = lo / OM_PANEL; p * OM_PANEL < hi; p++) {
    om_sums g, u;
    om_product(m, 2 * p, OM_HIDDEN_CHUNKS, &in, g);
    om_product(m, 2 * p + 1, OM_HIDDEN_CHUNKS, &in, u);
    for (int b = 0; b < OM_BATCH; b++) {
      float gate[OM_PANEL + OB_LANES] = {0}, y[OM_PANEL + OB_LANES];
      for (int r = 0; r < OM_PANEL; r++) gate[r] = g[b][r] + (bias ? bias[2 * p * OM_PANEL + r] : 0.0f);
      for (int r = 0; r < OM_PANEL; r += OB_LANES) om_put(y + r, om_get(gate + r) * ob_sigmoid_f(om_get(gate + r)));
      for (int r = 0; r < OM_PANEL; r++)
        act[b * OM_ACT_STRIDE + p * OM_PANEL + r] = y[r] * (u[b][r] + (bias ? bias[(2 * p + 1) * OM_PANEL + r] : 0.0f));
    }
  }
  if (hi >= OM_FFN)
    for (int b = 0; b < OM_BATCH; b++)
      for (long i = hi; i < OM_ACT_STRIDE; i++) act[b * OM_ACT_STRIDE + i] = 0.0f;
}

/* One head: optional norm, then rotation of halves. */
OB_INLINE void om_turn(const float *from, const float *gain, const float *c, const float *sn, float *to) {
  float f = 1.0f;
  if (gain) {
    float total = 0.0f;
    for (int i = 0; i < OM_HEAD_DIM; i++) total += from[i] * from[i];
    f = 1.0f / __builtin_sqrtf(total / OM_HEAD_DIM + OM_EPS);
  }
  for (int i = 0; i < OM_HEAD_DIM / 2; i++) {
    const int j = i + OM_HEAD_DIM / 2;
    const float a = from[i] * f * (gain ? gain[i] : 1.0f), b = from[j] * f * (gain ? gain[j] : 1.0f);
    to[i] = a * c[i] - b * sn[i];
    to[j] = b * c[i] + a * sn[i];
  }
}

OB_INLINE float *om_cached(float *cache, long layer, long slot, long group) {
  return cache + ((layer * OM_BATCH + slot) * OM_KV_HEADS + group) * OM_CONTEXT * OM_HEAD_DIM;
}

/* Head norms, rotation, append, for groups lo..hi; raw holds the rows of group `lo` on. */
static __attribute__((noinline, unused)) void om_rope(om_state *s, long layer, long lo, long hi, const float *raw,
                                                      long stride, const float *q_gain, const float *k_gain,
                                                      float *q) {
  const om_launch *l = s->l;
  for (int b = 0; b < OM_BATCH; b++) {
    const long at = s->active[b] ? l->position[b] : 0;
    const float *c = l->cosines + at * (OM_HEAD_DIM / 2), *sn = l->sines + at * (OM_HEAD_DIM / 2);
    for (long g = lo; g < hi; g++) {
      const float *from = raw + b * stride + (g - lo) * OM_GROUP_ROWS;
      for (int i = 0; i < OM_GROUP; i++)
        om_turn(from + i * OM_HEAD_DIM, q_gain, c, sn, q + b * OM_Q_STRIDE + (g * OM_GROUP + i) * OM_HEAD_DIM);
      for (int i = 0; i < s->active[b]; i++) { /* an idle slot appends nothing */
        om_turn(from + OM_GROUP * OM_HEAD_DIM, k_gain, c, sn,
                om_cached(l->keys, layer, b, g) + at * OM_HEAD_DIM);
        memcpy(om_cached(l->values, layer, b, g) + at * OM_HEAD_DIM, from + (OM_GROUP + 1) * OM_HEAD_DIM,
               OM_HEAD_DIM * sizeof(float));
      }
    }
  }
}

static __attribute__((noinline, unused)) void om_qkv(om_state *s, long layer, long lo, long hi, om_matrix m,
                                                     const float *bias, const float *h,
                                                     const float *q_gain, const float *k_gain, float *q) {
  OM_INPUT(om_enter, OM_ROOM, h, OM_X_STRIDE, OM_HIDDEN_CHUNKS);
  for (long g = lo; g < hi; g++) {
    float raw[OM_BATCH][OM_GROUP_ROWS];
    om_rows_of(m, bias, g * OM_GROUP_ROWS, (g + 1) * OM_GROUP_ROWS, OM_HIDDEN_CHUNKS, &in,
               &raw[0][0] - g * OM_GROUP_ROWS, OM_GROUP_ROWS);
    om_rope(s, layer, g, g + 1, &raw[0][0], OM_GROUP_ROWS, q_gain, k_gain, q);
  }
}

/* Positions whose scores are kept at a time; on Zen 4, 128 instead of 64 make attention a quarter faster. */
#define OM_BLOCK (OB_LANES == 16 ? 128 : 64)
/* Query heads that share what is loaded of a key or a value, and columns of values summed at a time: as many sums as
 * keep the multipliers busy, and no more than there are registers. */
#define OM_HEADS (OM_GROUP % 4 == 0 && OB_LANES == 16 ? 4 : OM_GROUP % 3 == 0 ? 3 : OM_GROUP % 2 == 0 ? 2 : 1)
#define OM_VECTORS (OM_HEADS > 2 ? (OB_LANES == 16 ? 4 : 2) : 4)
#define OM_WIDE ((OM_HEAD_DIM >= OM_VECTORS * OB_LANES ? OM_VECTORS : OM_HEAD_DIM >= 2 * OB_LANES ? 2 : 1) * OB_LANES)

OB_INLINE float om_most(vf v) {
  float x[OB_LANES];
  memcpy(x, &v, sizeof v);
  for (int h = OB_LANES / 2; h; h /= 2)
    for (int l = 0; l < h; l++) x[l] = x[l] > x[l + h] ? x[l] : x[l + h];
  return x[0];
}

/* Online softmax over positions from..to of one group; sums of weighted values, maxima, sums of weights. */
static __attribute__((noinline, unused)) void om_piece(const float *q, const float *k, const float *v, long from,
                                                       long to, float (*out)[OM_HEAD_DIM], float *peak, float *mass) {
  float scaled[OM_GROUP][OM_HEAD_DIM];
  for (int g = 0; g < OM_GROUP; g++) {
    peak[g] = -__builtin_inff();
    mass[g] = 0.0f;
    for (int i = 0; i < OM_HEAD_DIM; i++) out[g][i] = 0.0f, scaled[g][i] = q[g * OM_HEAD_DIM + i] * OM_SCALE;
  }
  for (long start = from; start < to; start += OM_BLOCK) {
    const int n = (int)(to - start < OM_BLOCK ? to - start : OM_BLOCK);
    float p[OM_GROUP][OM_BLOCK];
    for (int j = 0; j < n; j += 4) {
      const float *kr[4]; /* the last positions of a piece stand in for those behind it */
      for (int c = 0; c < 4; c++) {
        kr[c] = k + (start + (j + c < n ? j + c : n - 1)) * OM_HEAD_DIM;
        for (int i = 0; OM_PREFETCH && i < OM_HEAD_DIM; i += 16) { /* keys to come, and the values of this block */
          __builtin_prefetch(kr[c] + OM_AHEAD / 4 + i);
          __builtin_prefetch(v + (kr[c] - k) + i);
        }
      }
      for (int g = 0; g < OM_GROUP; g += OM_HEADS) {
        vf sum[OM_HEADS][4] = {{{0}}};
        int i = 0;
        for (; i + OB_LANES <= OM_HEAD_DIM; i += OB_LANES)
          for (int c = 0; c < 4; c++) {
            const vf key = om_get(kr[c] + i);
            for (int h = 0; h < OM_HEADS; h++) sum[h][c] += om_get(scaled[g + h] + i) * key;
          }
        for (int h = 0; h < OM_HEADS; h++) {
          om_fold(sum[h], 4, p[g + h] + j);
          for (int c = 0; c < 4 && i < OM_HEAD_DIM; c++)
            for (int r = i; r < OM_HEAD_DIM; r++) p[g + h][j + c] += scaled[g + h][r] * kr[c][r];
        }
      }
    }
    for (int g = 0; g < OM_GROUP; g++) {
      for (int j = n; j < OM_BLOCK; j++) p[g][j] = p[g][0];
      vf most = ob_splat_f(peak[g]), sum = {0};
      for (int j = 0; j < OM_BLOCK; j += OB_LANES) {
        const vf s = om_get(p[g] + j);
        most = ob_sel_f(s > most, s, most);
      }
      const float top = om_most(most);
      for (int j = 0; j < OM_BLOCK; j += OB_LANES) om_put(p[g] + j, ob_exp_f(om_get(p[g] + j) - ob_splat_f(top)));
      for (int j = n; j < OM_BLOCK; j++) p[g][j] = 0.0f;
      for (int j = 0; j < OM_BLOCK; j += OB_LANES) sum += om_get(p[g] + j);
      const float f = mass[g] > 0.0f ? __builtin_expf(peak[g] - top) : 0.0f;
      mass[g] = mass[g] * f + ob_hsum_f(sum);
      peak[g] = top;
      for (int i = 0; i < OM_HEAD_DIM; i++) out[g][i] *= f;
    }
    for (int g = 0; g < OM_GROUP; g += OM_HEADS) {
      int i = 0;
      for (; i + OM_WIDE <= OM_HEAD_DIM; i += OM_WIDE) {
        vf sum[OM_HEADS][OM_WIDE / OB_LANES];
        for (int h = 0; h < OM_HEADS; h++)
          for (int c = 0; c < OM_WIDE / OB_LANES; c++) sum[h][c] = om_get(out[g + h] + i + c * OB_LANES);
        for (int j = 0; j < n; j++)
          for (int c = 0; c < OM_WIDE / OB_LANES; c++) {
            const vf value = om_get(v + (start + j) * OM_HEAD_DIM + i + c * OB_LANES);
            for (int h = 0; h < OM_HEADS; h++) sum[h][c] += ob_splat_f(p[g + h][j]) * value;
          }
        for (int h = 0; h < OM_HEADS; h++)
          for (int c = 0; c < OM_WIDE / OB_LANES; c++) om_put(out[g + h] + i + c * OB_LANES, sum[h][c]);
      }
      for (int h = 0; h < OM_HEADS; h++)
        for (int j = 0; j < n && i < OM_HEAD_DIM; j++)
          for (int r = i; r < OM_HEAD_DIM; r++) out[g + h][r] += p[g + h][j] * v[(start + j) * OM_HEAD_DIM + r];
    }
  }
}

/* The last group also owns the padding behind the queries' width. */
OB_INLINE void om_attn_pad(float *attn, long slot, long group) {
  if (group == OM_KV_HEADS - 1)
    for (long i = OM_KV_HEADS * OM_GROUP * OM_HEAD_DIM; i < OM_Q_STRIDE; i++) attn[slot * OM_Q_STRIDE + i] = 0.0f;
}

static __attribute__((noinline, unused)) void om_attend(om_state *s, long layer, long slot, long group, long split,
                                                        const float *q, float *attn, float *part) {
  const long n = s->length[slot], piece = (n + OM_SPLITS - 1) / OM_SPLITS;
  const long from = split * piece < n ? split * piece : n, to = from + piece < n ? from + piece : n;
  const long at = slot * OM_Q_STRIDE + group * OM_GROUP * OM_HEAD_DIM;
  float out[OM_GROUP][OM_HEAD_DIM], peak[OM_GROUP], mass[OM_GROUP];
  om_piece(q + at, om_cached(s->l->keys, layer, slot, group), om_cached(s->l->values, layer, slot, group), from, to,
           out, peak, mass);
#if OM_SPLITS == 1
  (void)part;
  for (int g = 0; g < OM_GROUP; g++) {
    const float f = mass[g] > 0.0f ? 1.0f / mass[g] : 0.0f;
    for (int i = 0; i < OM_HEAD_DIM; i++) attn[at + g * OM_HEAD_DIM + i] = out[g][i] * f;
  }
  om_attn_pad(attn, slot, group);
#else
  (void)attn;
  float *to_part = part + slot * OM_PART_STRIDE + (group * OM_SPLITS + split) * OM_PART_WIDTH;
  memcpy(to_part, out, sizeof out);
  memcpy(to_part + OM_GROUP * OM_HEAD_DIM, peak, sizeof peak);
  memcpy(to_part + OM_GROUP * (OM_HEAD_DIM + 1), mass, sizeof mass);
#endif
}

#if OM_SPLITS > 1
static __attribute__((noinline, unused)) void om_combine(long slot, long group, const float *part, float *attn) {
  const float *from = part + slot * OM_PART_STRIDE + group * OM_SPLITS * OM_PART_WIDTH;
  for (int g = 0; g < OM_GROUP; g++) {
    float top = -__builtin_inff(), mass = 0.0f, out[OM_HEAD_DIM] = {0};
    for (int p = 0; p < OM_SPLITS; p++) {
      const float peak = from[p * OM_PART_WIDTH + OM_GROUP * OM_HEAD_DIM + g];
      top = peak > top ? peak : top;
    }
    for (int p = 0; p < OM_SPLITS; p++) {
      const float *piece = from + p * OM_PART_WIDTH;
      const float m = piece[OM_GROUP * (OM_HEAD_DIM + 1) + g];
      const float f = m > 0.0f ? __builtin_expf(piece[OM_GROUP * OM_HEAD_DIM + g] - top) : 0.0f;
      mass += m * f;
      for (int i = 0; i < OM_HEAD_DIM; i++) out[i] += f * piece[g * OM_HEAD_DIM + i];
    }
    const float f = mass > 0.0f ? 1.0f / mass : 0.0f;
    for (int i = 0; i < OM_HEAD_DIM; i++)
      attn[slot * OM_Q_STRIDE + (group * OM_GROUP + g) * OM_HEAD_DIM + i] = out[i] * f;
  }
  om_attn_pad(attn, slot, group);
}
#endif

/* Logits of rows lo..hi, and of each slot the first largest one; rows beyond the vocabulary are no tokens. */
static __attribute__((noinline, unused)) void om_head(om_state *s, om_matrix m, long lo,
                                                      long hi, long tile, const float *h, float *logits,
                                                      float *best) {
  if (!s->need_head) return;
  OM_INPUT(om_outer_enter, OM_OUTER_ROOM, h, OM_X_STRIDE, OM_OUTER_CHUNKS);
  float top[OM_BATCH];
  int32_t id[OM_BATCH];
  for (int b = 0; b < OM_BATCH; b++) top[b] = -__builtin_inff(), id[b] = (int32_t)lo;
  for (long p = lo / OM_PANEL; p * OM_PANEL < hi; p++) {
    om_sums y;
    om_outer_product(m, p, OM_OUTER_CHUNKS, &in, y);
    for (int b = 0; b < OM_BATCH; b++)
      for (int r = 0; r < OM_PANEL; r++) {
        const long row = p * OM_PANEL + r;
        logits[b * OM_LOGITS_STRIDE + row] = y[b][r];
        if (row < OM_VOCAB && y[b][r] > top[b]) top[b] = y[b][r], id[b] = (int32_t)row;
      }
  }
  for (int b = 0; b < OM_BATCH; b++) {
    best[b * OM_BEST_STRIDE + 2 * tile] = top[b];
    memcpy(&best[b * OM_BEST_STRIDE + 2 * tile + 1], &id[b], 4);
  }
}
