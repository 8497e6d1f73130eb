/* What one launch works on, and how its threads keep apart.
 *
 * The emitter defines the sizes (OM_*) in front. A launch runs up to `steps` decode steps on OM_CORES pinned threads;
 * tokens feed back on the threads themselves. Counters only grow: step e waits for e times the signals of one step.
 * A wait is bounded: after `spin_seconds` it reports who waited for what, and every thread leaves.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#define OM_ABI 3
#define OM_STOPS 8
enum { OM_RUNNING, OM_HANG, OM_NONFINITE, OM_NO_THREADS };
enum { OM_REASON_NONE, OM_REASON_STOP, OM_REASON_LENGTH };

typedef struct { /* shared with the loader: same order, same types */
  int32_t abi, cores, batch, steps;
  const char *weights;
  float *keys, *values, *scratch;
  const float *cosines, *sines; /* (context, head_dim / 2) */
  const int32_t *feed;          /* (batch, feed_stride): tokens to run through first */
  const int32_t *feed_length;   /* (batch): 0 leaves the slot out */
  const int32_t *want;          /* (batch): new tokens asked for */
  int32_t *position;            /* (batch): in and out, positions that the cache holds */
  int32_t *out;                 /* (batch, out_stride): new tokens */
  int32_t *made, *reason;       /* (batch): how many, and why it ended */
  const float *temperature, *top_p;
  const int32_t *top_k;
  const uint64_t *seed;
  const int32_t *cpus; /* (cores): processor of each thread, -1 for any */
  double *trace;       /* (cores, trace_room, 3): kind * 4096 + layer, start, end in seconds */
  int32_t *traced;     /* (cores): how many were recorded */
  float *record;       /* NULL, or room for what each operator writes */
  int32_t feed_stride, out_stride, stop_count, debug, trace_room;
  int32_t stops[OM_STOPS];
  double spin_seconds;
  int32_t fault, fault_core, fault_step, fault_edge, fault_expected, fault_seen, fault_slot, steps_done;
} om_launch;

typedef struct { _Alignas(64) atomic_uint value; } om_counter;

typedef struct {
  om_launch *l;
  void *room; /* for ranking tokens */
  int32_t fed[OM_BATCH], length[OM_BATCH], active[OM_BATCH];
  int32_t need_head, more;
  _Alignas(64) atomic_int abort;
  om_counter barrier, step_done;
  om_counter counters[OM_COUNTERS];
} om_state;

typedef struct { om_state *s; int core; } om_thread;

#if defined(__x86_64__) || defined(__i386__)
#define om_pause() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define om_pause() __asm__ volatile("yield")
#else
#define om_pause() ((void)0)
#endif

static double om_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A task's call, recorded when asked for. */
#define OM_RUN(CORE, CODE, ...)                                                                               \
  do {                                                                                                        \
    const double om_start = s->l->trace_room ? om_now() : 0.0;                                                \
    __VA_ARGS__;                                                                                              \
    if (s->l->trace_room) om_record(s->l, CORE, CODE, om_start);                                              \
  } while (0)
static __attribute__((noinline)) void om_record(om_launch *l, int core, long code, double start) {
  if (l->traced[core] >= l->trace_room) return;
  double *to = l->trace + 3 * ((long)core * l->trace_room + l->traced[core]++);
  to[0] = (double)code; to[1] = start; to[2] = om_now();
}

/* The first fault wins; its fields are published by the release of `abort`. */
static void om_report(om_state *s, int fault, int core, int step, int edge, int expected, int seen, int slot) {
  int none = 0;
  if (!atomic_compare_exchange_strong(&s->abort, &none, -1)) return;
  om_launch *l = s->l;
  l->fault = fault; l->fault_core = core; l->fault_step = step; l->fault_edge = edge;
  l->fault_expected = expected; l->fault_seen = seen; l->fault_slot = slot;
  atomic_store_explicit(&s->abort, 1, memory_order_release);
}

static __attribute__((noinline)) int om_wait_long(om_state *s, om_counter *c, unsigned want, int core, int step,
                                                  int edge, unsigned unit) {
  const double limit = om_now() + s->l->spin_seconds;
  for (unsigned turns = 0;; turns++) {
    const unsigned seen = atomic_load_explicit(&c->value, memory_order_acquire);
    if ((int)(seen - want) >= 0) return 0;
    if (atomic_load_explicit(&s->abort, memory_order_relaxed)) return 1;
    if ((turns & 63) == 63) {
      if (om_now() > limit) {
        om_report(s, OM_HANG, core, step, edge, (int)unit, (int)(seen - (want - unit)), -1);
        return 1;
      }
      sched_yield(); /* another thread of the launch may need this processor */
    } else {
      om_pause();
    }
  }
}

/* Wait until the counter is at `want`, the last `unit` of which belong to this step. */
OB_INLINE int om_wait(om_state *s, om_counter *c, unsigned want, int core, int step, int edge, unsigned unit) {
  for (int turns = 0; turns < 512; turns++) {
    if ((int)(atomic_load_explicit(&c->value, memory_order_acquire) - want) >= 0) return 0;
    om_pause();
  }
  return om_wait_long(s, c, want, core, step, edge, unit);
}

OB_INLINE void om_signal(om_counter *c) { atomic_fetch_add_explicit(&c->value, 1, memory_order_release); }

/* `mine` counts this thread's arrivals. */
OB_INLINE int om_meet(om_state *s, unsigned *mine, int core, int step, int edge) {
  om_signal(&s->barrier);
  *mine += OM_CORES;
  return om_wait(s, &s->barrier, *mine, core, step, edge, OM_CORES);
}

/* Recording: rows `lo..hi` of every slot (or of one). */
static __attribute__((noinline, unused)) void om_copy(float *to, long width, const float *page, long stride, long lo,
                                                      long hi, int slot) {
  for (int b = slot < 0 ? 0 : slot; b < (slot < 0 ? OM_BATCH : slot + 1); b++)
    memcpy(to + b * width + lo, page + b * stride + lo, (size_t)(hi - lo) * sizeof(float));
}

/* Debugging: the first element that is not finite, in rows `lo..hi` of every slot (or of one). */
static __attribute__((noinline, unused)) int om_finite(om_state *s, const float *page, long stride, long lo, long hi,
                                                       int slot, int core, int step, int edge) {
  for (int b = slot < 0 ? 0 : slot; b < (slot < 0 ? OM_BATCH : slot + 1); b++)
    for (long i = lo; i < hi; i++)
      if (!(__builtin_fabsf(page[b * stride + i]) <= 3.4028234e38f)) {
        om_report(s, OM_NONFINITE, core, step, edge, (int)i, 0, b);
        return 1;
      }
  return 0;
}
