/* The end of a step: choose each slot's token, account for it, and prepare the next step.
 *
 * Temperature 0 takes the largest logit (the first of equals). Otherwise tokens are ranked by logit (of equals, the
 * smaller id first), weighed by exp((logit - largest) / T) in double; top_k keeps the first k, then top_p the fewest
 * whose mass reaches p of theirs; one uniform number, a hash of the slot's seed and the position, picks along the
 * ranks. tasks/sampling.py says the same.
 */
OB_INLINE uint64_t om_hash(uint64_t x) { /* splitmix64 */
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

typedef struct { uint32_t key, id; } om_ranked;

/* Ids by falling logit: a radix sort of the order-reversing bits, which keeps equal ones in order. */
static void om_rank(const float *logits, om_ranked *a, om_ranked *b) {
  for (uint32_t i = 0; i < OM_VOCAB; i++) {
    const uint32_t u = ob_f32_bits(logits[i] + 0.0f); /* -0 ranks as 0 */
    a[i] = (om_ranked){u & 0x80000000u ? u : ~(u | 0x80000000u), i};
  }
  for (int shift = 0; shift < 33; shift += 11) {
    uint32_t count[2049] = {0};
    for (uint32_t i = 0; i < OM_VOCAB; i++) count[((a[i].key >> shift) & 2047) + 1]++;
    for (int d = 0; d < 2048; d++) count[d + 1] += count[d];
    for (uint32_t i = 0; i < OM_VOCAB; i++) b[count[(a[i].key >> shift) & 2047]++] = a[i];
    om_ranked *t = a; a = b; b = t;
  }
}

static __attribute__((noinline, unused)) int32_t om_draw(const float *logits, om_ranked *room, double t, long k,
                                                         double p, uint64_t seed, int position) {
  om_rank(logits, room, room + OM_VOCAB);
  const om_ranked *r = room + OM_VOCAB; /* three passes end in the second half */
  const double top = logits[r[0].id];
  long n = k > 0 && k < OM_VOCAB ? k : OM_VOCAB;
  double total = 0.0, mass = 0.0;
  for (long i = 0; i < n; i++) total += exp(((double)logits[r[i].id] - top) / t);
  for (long i = 0; i < n; i++) {
    mass += exp(((double)logits[r[i].id] - top) / t);
    if (mass >= p * total) { n = i + 1; break; }
  }
  const double u = (double)(om_hash(seed ^ om_hash((uint64_t)position)) >> 11) * 0x1p-53 * mass;
  double sum = 0.0;
  for (long i = 0; i < n; i++) {
    sum += exp(((double)logits[r[i].id] - top) / t);
    if (sum > u) return (int32_t)r[i].id;
  }
  return (int32_t)r[n - 1].id;
}

OB_INLINE int32_t om_greedy(const float *best) {
  float top = best[0];
  int32_t id;
  memcpy(&id, best + 1, 4);
  for (int i = 1; i < OM_HEAD_TILES; i++)
    if (best[2 * i] > top) { top = best[2 * i]; memcpy(&id, best + 2 * i + 1, 4); }
  return id;
}

/* What the next step runs: called before the first step, and at the end of each. */
static void om_prepare(om_state *s, int32_t *token) {
  const om_launch *l = s->l;
  s->need_head = s->more = 0;
  for (int b = 0; b < OM_BATCH; b++) {
    s->length[b] = s->active[b] ? l->position[b] + 1 : 0;
    if (!s->active[b]) { token[b * OM_TOKEN_STRIDE] = 0; continue; }
    if (s->fed[b] < l->feed_length[b]) token[b * OM_TOKEN_STRIDE] = l->feed[b * l->feed_stride + s->fed[b]];
    s->need_head |= s->fed[b] + 1 >= l->feed_length[b];
    s->more = 1;
  }
}

static __attribute__((noinline, unused)) void om_sample(om_state *s, om_ranked *room, const float *logits,
                                                        const float *best, float *tokens) {
  om_launch *l = s->l;
  int32_t *token = (int32_t *)tokens;
  for (int b = 0; b < OM_BATCH; b++) {
    if (!s->active[b]) continue;
    const int32_t at = l->position[b]++;
    if (++s->fed[b] < l->feed_length[b]) continue; /* the prompt goes on */
    const float *row = logits + b * OM_LOGITS_STRIDE;
    const int32_t id = l->temperature[b] > 0.0f
        ? om_draw(row, room, l->temperature[b], l->top_k[b], l->top_p[b], l->seed[b], at)
        : om_greedy(best + b * OM_BEST_STRIDE);
    token[b * OM_TOKEN_STRIDE] = id;
    l->out[b * l->out_stride + l->made[b]++] = id;
    for (int i = 0; i < l->stop_count; i++)
      if (l->stops[i] == id) l->reason[b] = OM_REASON_STOP;
    if (!l->reason[b] && l->made[b] >= l->want[b]) l->reason[b] = OM_REASON_LENGTH;
    if (l->reason[b]) s->active[b] = 0;
  }
  l->steps_done++;
  om_prepare(s, token);
}
