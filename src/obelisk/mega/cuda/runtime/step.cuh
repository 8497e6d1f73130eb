/* The kernel: a loader, and consumers that go through the operators of every layer of every step. */
__device__ __forceinline__ const float *om_vector(const om_launch *p, int layer, int at) {
  return at < 0 ? nullptr : (const float *)(p->weights + OM_LAYER_OFFSET + (size_t)layer * OM_LAYER_BYTES + at);
}

__device__ __forceinline__ int om_units(int kind, int turn) {
  return om_share(kind, turn + 1) - om_share(kind, turn);
}

/* The scales of a matrix's rows: 8-bit weights alone. */
#if OM_BITS == 8
#define OM_SCALES(p, layer, name) om_vector(p, layer, OM_AT_##name##_SCALES)
#else
#define OM_SCALES(p, layer, name) nullptr
#endif

/* The rows of the residual stream that this block will add to: units of part 0 of a split product. */
__device__ __forceinline__ void om_own(int kind, int turn, int &from, int &to) {
  from = min(om_share(kind, turn), OM_HIDDEN_TILES) * 16, to = min(om_share(kind, turn + 1), OM_HIDDEN_TILES) * 16;
}

/* Units of a product that ends in the residual stream, part by part: `fill(part)` makes the inputs. */
template <int KIND, int BLOCKS_K, int CHUNK, int CUTS, int SPREAD, class Fill>
__device__ __forceinline__ void om_residual_product(om_state &s, char *values, const float *bias, const float *scales,
                                                    int kept, u32 mark, int kind, const Fill &fill) {
  const int begin = om_share(KIND, s.turn), end = om_share(KIND, s.turn + 1);
  for (int u = begin; u < end;) {
    const int part = u / OM_HIDDEN_TILES, stop = min(end, (part + 1) * OM_HIDDEN_TILES);
    const u64 t0 = om_stamp(s);
    om_held held;
    if (OM_HELD) om_hold<OM_BITS, BLOCKS_K, CHUNK, CUTS>(s, stop - u, held);
    fill(part);
    const u64 t1 = om_span(s, kind - 1, t0);
    om_out_residual out{{s, values + (size_t)part * OM_PART_BYTES, part ? nullptr : bias,
                         scales, u - part * OM_HIDDEN_TILES, mark},
                        part ? nullptr : (float *)(om_memory + OM_AT_RESIDUAL),
                        kept};
    om_product<OM_BITS, BLOCKS_K, CHUNK, CUTS, SPREAD>(s, stop - u, out, held);
    om_span(s, kind, t1);
    u = stop;
  }
}


#define OM_EDGE_DONE(barrier, edge) \
  if (barrier) om_meet(s, edge)

/* What the down projection writes lies in two places in turn: by the number of a layer, or, where 16-bit rows go with
 * it, by how many layers there were, since their mark says how often their place was used. */
__device__ __forceinline__ char *om_stream(char *between, u32 layers, int layer) {
  return between + OM_PLACE_DOWN + (OM_ROUNDED ? layers & 1 : layer & 1) * OM_STREAM_BYTES;
}
__device__ __forceinline__ u32 om_stream_use(u32 layers) { /* a recording kernel uses each place once */
  return (OM_APART ? layers & 1 : layers >> 1 & 1) ^ 1;
}

/* The mark of what the down projection of a layer writes; `done`: steps since the buffers were zeros. */
__device__ __forceinline__ u32 om_down_mark(u32 done, int layer, u32 tag) {
  const u32 each = layer & 1 ? OM_LAYERS / 2 : (OM_LAYERS + 1) / 2; /* times that a step uses this layer's buffer */
  return OM_FP32 ? (done * each + layer / 2 + 1) & 1 : tag & 7;
}

#if OM_DIRECT /* direct.cuh */
__device__ __forceinline__ void om_layer(om_state &s, char *between, u32 tag);
__device__ __forceinline__ void om_direct_head(om_state &s, const char *before, char *between, u32 tag, float &best,
                                               int &id);
#else
/* OM_APART: 0, or in a recording kernel the bytes from a layer's exchanged values to the next one's, so that all stay. */
__device__ __forceinline__ void om_layer(om_state &s, char *between, u32 tag) {
  const om_launch *p = s.p;
  const u32 done = p->uses + s.step, layers = done * OM_LAYERS + s.layer, use = (layers + 1) & 1;
  const u32 mark = OM_FP32 ? use : tag & 7;
  char *const own = between + (size_t)s.layer * OM_APART;
  char *const qkv = own + OM_PLACE_QKV, *const pieces = own + OM_PLACE_PART, *const masses = own + OM_PLACE_MASS;
  char *const o = own + OM_PLACE_O, *const act = own + OM_PLACE_ACT;
  char *const down = om_stream(own, layers, s.layer);
  const char *const before = om_stream(own - OM_APART, layers + 1, s.layer + 1);
  int from, to;
#if OM_STAGED
  om_stage(s);
#endif
  u64 t = om_stamp(s);
  om_own(OM_O, s.turn, from, to);
  const float *gain = om_vector(p, s.layer, OM_AT_NORM_IN);
  om_held held;
  if (OM_HELD) om_hold<OM_BITS, OM_HIDDEN_K, OM_QKV_CHUNK, OM_QKV_CUTS>(s, om_units(OM_QKV, s.turn), held);
  float2 root;
  if (s.layer == 0)
    root = om_fill_norm<OM_BITS, 1, true>(s, before, 0, 0, gain, from, to);
  else
#if OM_ROUNDED
    root = om_fill_rows<OM_DOWN_SPLIT>(s, before, (tag - 1) & 7, om_stream_use(layers - 1), OM_EDGE_DOWN, from, to);
#else
    root = om_fill_norm<OM_BITS, OM_DOWN_SPLIT, false>(s, before, om_down_mark(done, s.layer - 1, tag - 1), OM_EDGE_DOWN,
                                                       gain, from, to);
#endif
  t = om_span(s, OM_SPAN_NORM_IN, t);
  {
    const int first = om_share(OM_QKV, s.turn);
    om_out_qkv out{{s, qkv, om_vector(p, s.layer, OM_AT_QKV_BIAS), OM_SCALES(p, s.layer, QKV), first, mark}, root};
    om_product<OM_BITS, OM_HIDDEN_K, OM_QKV_CHUNK, OM_QKV_CUTS, OM_QKV_SPREAD>(s, om_units(OM_QKV, s.turn), out, held);
    t = om_span(s, OM_SPAN_QKV, t);
  }
  OM_EDGE_DONE(OM_BARRIER_QKV, OM_EDGE_QKV);
  for (int item = s.turn; item < OM_ITEMS; item += OM_BLOCKS)
    om_attend_item(s, item, qkv, pieces, masses, mark, use, om_vector(p, s.layer, OM_AT_Q_GAIN),
                   om_vector(p, s.layer, OM_AT_K_GAIN));
  om_span(s, OM_SPAN_ATTEND, t);
  OM_EDGE_DONE(OM_BARRIER_ATTEND, OM_EDGE_ATTEND);
#if OM_ROUNDED
  gain = om_vector(p, s.layer, OM_AT_NORM_MID);
  float4 early = om_early_gain(s, gain, from, to);
#endif
  om_residual_product<OM_O, OM_Q_K / OM_O_SPLIT, OM_O_CHUNK, OM_O_CUTS, OM_O_SPREAD>(
      s, o, om_vector(p, s.layer, OM_AT_O_BIAS), OM_SCALES(p, s.layer, O), from, mark, OM_SPAN_O,
      [&](int part) { om_fill_attention(s, pieces, masses, mark, use, part); });
#if OM_ROUNDED
  om_end_rows<OM_O_SPLIT>(s, o, gain, early, from, to, mark, use, OM_EDGE_O);
#endif
  OM_EDGE_DONE(OM_BARRIER_O, OM_EDGE_O);
  t = om_stamp(s);
  om_own(OM_DOWN, s.turn, from, to);
  om_held held_up;
  if (OM_HELD) om_hold<OM_BITS, OM_HIDDEN_K, OM_UP_CHUNK, OM_UP_CUTS>(s, om_units(OM_UP, s.turn), held_up);
#if OM_ROUNDED
  root = om_fill_rows<OM_O_SPLIT>(s, o, mark, use, OM_EDGE_O, from, to);
#else
  gain = om_vector(p, s.layer, OM_AT_NORM_MID);
  root = om_fill_norm<OM_BITS, OM_O_SPLIT, false>(s, o, mark, OM_EDGE_O, gain, from, to);
#endif
  t = om_span(s, OM_SPAN_NORM_MID, t);
  {
    const int first = om_share(OM_UP, s.turn);
    om_out_up out{{s, act, om_vector(p, s.layer, OM_AT_UP_BIAS), OM_SCALES(p, s.layer, UP), first, use}, root};
    om_product<OM_BITS, OM_HIDDEN_K, OM_UP_CHUNK, OM_UP_CUTS, OM_UP_SPREAD>(s, om_units(OM_UP, s.turn), out, held_up);
    om_span(s, OM_SPAN_UP, t);
  }
  OM_EDGE_DONE(OM_BARRIER_UP, OM_EDGE_UP);
#if OM_ROUNDED
  gain = s.layer + 1 < OM_LAYERS ? om_vector(p, s.layer + 1, OM_AT_NORM_IN)
                                 : (const float *)(p->weights + OM_AT_NORM_FINAL);
  early = om_early_gain(s, gain, from, to);
#endif
  om_residual_product<OM_DOWN, OM_FFN_K / OM_DOWN_SPLIT, OM_DOWN_CHUNK, OM_DOWN_CUTS, OM_DOWN_SPREAD>(
      s, down, om_vector(p, s.layer, OM_AT_DOWN_BIAS), OM_SCALES(p, s.layer, DOWN), from,
      om_down_mark(done, s.layer, tag), OM_SPAN_DOWN, [&](int part) { om_fill_act(s, act, use, part); });
#if OM_ROUNDED
  om_end_rows<OM_DOWN_SPLIT>(s, down, gain, early, from, to, mark, om_stream_use(layers), OM_EDGE_DOWN);
#endif
  OM_EDGE_DONE(OM_BARRIER_DOWN, OM_EDGE_DOWN);
}
#endif

__device__ __forceinline__ void om_head(om_state &s, char *between, u32 tag) {
  const om_launch *p = s.p;
  const u32 layers = (p->uses + s.step + 1) * OM_LAYERS - 1;
  const char *const before = om_stream(between + (OM_LAYERS - 1) * (size_t)OM_APART, layers, OM_LAYERS - 1);
  u64 t = om_stamp(s);
#if OM_PRIVATE
  float best;
  int best_id;
  om_direct_head(s, before, between, tag, best, best_id);
  const int lane = s.lane();
#pragma unroll
  for (int d = 1; d < 16; d *= 2) {
    const float x = __shfl_xor_sync(~0u, best, d);
    const int id = __shfl_xor_sync(~0u, best_id, d);
    if (x > best || (x == best && id < best_id)) best = x, best_id = id;
  }
  if (lane == 0) om.best[s.warp()][0] = best, om.best_id[s.warp()][0] = best_id;
#else
#if OM_ROUNDED
  const float2 root = om_fill_rows<OM_DOWN_SPLIT>(s, before, (tag - 1) & 7, om_stream_use(layers), OM_EDGE_DOWN, 0, 0);
#else
  const u32 mark = om_down_mark(p->uses + s.step, OM_LAYERS - 1, tag - 1);
  const float2 root = om_fill_norm<OM_OUTER_BITS, OM_DOWN_SPLIT, false>(s, before, mark, OM_EDGE_DOWN,
                                                         (const float *)(p->weights + OM_AT_NORM_FINAL), 0, 0);
#endif
  t = om_span(s, OM_SPAN_NORM_FINAL, t);
  float best[2] = {-OM_INFINITY, -OM_INFINITY};
  int best_id[2] = {0x7fffffff, 0x7fffffff};
  const int first = om_share(OM_HEAD, s.turn);
#if OM_OUTER_BITS == 8
  const float *const scales = (const float *)(p->weights + OM_AT_HEAD_SCALES);
#else
  const float *const scales = nullptr;
#endif
  om_out_head out{{s, between + OM_PLACE_LOGITS, nullptr, scales, first, 0}, tag, root, best, best_id};
  om_product<OM_OUTER_BITS, OM_HIDDEN_K, OM_HEAD_CHUNK, OM_HEAD_CUTS, OM_HEAD_SPREAD>(s, om_units(OM_HEAD, s.turn), out,
                                                                                      om_held());
  const int lane = s.lane();
#pragma unroll
  for (int j = 0; j < 2; j++) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) {
      const float x = __shfl_xor_sync(~0u, best[j], d);
      const int id = __shfl_xor_sync(~0u, best_id[j], d);
      if (x > best[j] || (x == best[j] && id < best_id[j])) best[j] = x, best_id[j] = id;
    }
    const int slot = 2 * lane + j;
    if (lane < 4 && slot < OM_BATCH) om.best[s.warp()][slot] = best[j], om.best_id[s.warp()][slot] = best_id[j];
  }
#endif
  om_sync();
  const int slot = s.thread();
  if (slot < OM_BATCH) {
    float top = -OM_INFINITY;
    int id = 0x7fffffff;
#pragma unroll
    for (int w = 0; w < OM_WARPS; w++) {
      const float x = om.best[w][slot];
      if (x > top || (x == top && om.best_id[w][slot] < id)) top = x, id = om.best_id[w][slot];
    }
    om_put2((u64 *)(between + OM_PLACE_BEST) + ((size_t)slot * OM_BLOCKS + s.block()) * 2, __float_as_uint(top),
            (u32)id, tag);
  }
  if (!OM_PRIVATE) om_span(s, OM_SPAN_HEAD, t);
  OM_EDGE_DONE(OM_BARRIER_HEAD, OM_EDGE_HEAD);
}

extern "C" __global__ void __launch_bounds__(32 * (OM_WARPS + OM_LOADERS), 1)
    obelisk_mega(const __grid_constant__ om_launch launch) {
  const int block = blockIdx.x;
  const om_launch *const p = &launch;
  if (threadIdx.x == 0) {
#if !OM_PRIVATE /* without a loader nobody arrives; NVRTC's assembler (13.0) dies of a count of 0 */
    for (int i = 0; i < OM_STAGES; i++) {
      asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(om_address(&om.full[i])),
                   "r"(OM_BULK ? 1 : 32 * OM_LOADERS));
      asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(om_address(&om.empty[i])), "r"(OM_ARRIVALS));
    }
#endif
    for (int i = 0; i < OM_WINDOW; i++)
#if OM_FENCED
      om.arrived[i] = 0;
#else
      asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(om_address(&om.joined[i])), "r"(OM_WARPS));
#endif
    for (int b = 0; b < OM_BATCH; b++) {
      om.token[b] = om_active(p, b, 0) ? p->feed[b * p->feed_stride] : 0;
      om.made[b] = om.done[b] = 0, om.reached[b] = p->position[b];
    }
    om.dead = om.traced = om.waiting = 0, om.began = 0;
#if OM_BULK
    asm volatile("fence.mbarrier_init.release.cluster;");
#endif
  }
#if OM_PRIVATE
  om_make_runs(block);
#endif
  __syncthreads();
#if !OM_PRIVATE
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp >= OM_WARPS) {
#if OM_BULK
    if (lane == 0) om_load(p, block, 0);
#else
    om_load(p, block, (warp - OM_WARPS) * 32 + lane);
#endif
    return;
  }
#endif
  om_state s;
  s.p = p;
  s.chunk = s.unit = s.joined = 0, s.meets = 0;
#if OM_PRIVATE
  om_begin(s);
#endif
  u32 tag = p->tag;
  for (s.step = 0; s.step < p->steps; s.step++) {
    s.turn = block;
    if (s.step > 0 && om_moved(p, s.step)) om_meet(s, OM_EDGE_STEP);
#if OM_KV_RING
    om_announce(s);
#endif
    for (s.layer = 0; s.layer < OM_LAYERS; s.layer++) {
      om_layer(s, p->values_between, ++tag);
      s.turn += OM_ROTATE;
      if (s.turn >= OM_BLOCKS) s.turn -= OM_BLOCKS;
    }
    tag++;
    if (om_has_head(p, s.step))
      om_head(s, p->values_between, tag);
    else
      om_meet(s, OM_EDGE_STEP); /* nothing else orders a prompt's steps */
    om_next(s, p->values_between, tag);
  }
  if (threadIdx.x == 0) {
    if (p->trace_room) p->traced[block] = om.traced;
    if (block == 0)
      for (int b = 0; b < OM_BATCH; b++)
        p->made[b] = om.made[b], p->reason[b] = om.done[b], p->position_out[b] = om.reached[b];
  }
}
