/* The entry: starts one pinned thread for each core's program and waits for them.
 *
 * Returns 0 when all is done, else the fault's kind; its fields are in the launch. All memory is the caller's but for
 * the room that sampling ranks tokens in.
 */
#include <stdlib.h>

static void *om_thread_main(void *arg) {
  const om_thread *t = arg;
  om_programs[t->core](t->s);
  return NULL;
}

__attribute__((visibility("default"))) int obelisk_mega(om_launch *l) {
  if (l->abi != OM_ABI || l->cores != OM_CORES || l->batch != OM_BATCH) return -1;
  om_state *s = aligned_alloc(64, (sizeof *s + 63) / 64 * 64);
  if (!s) return OM_NO_THREADS;
  memset(s, 0, sizeof *s);
  s->l = l;
  l->fault = OM_RUNNING;
  l->steps_done = 0;
  int sampled = 0;
  for (int b = 0; b < OM_BATCH; b++) {
    s->active[b] = l->feed_length[b] > 0 && l->want[b] > 0;
    sampled |= l->temperature[b] > 0.0f;
    l->made[b] = l->reason[b] = 0;
  }
  om_ranked *room = sampled ? malloc(2 * sizeof(om_ranked) * OM_VOCAB) : NULL;
  s->room = room;
  om_prepare(s, (int32_t *)(l->scratch + OM_AT_TOKEN));
  pthread_t threads[OM_CORES];
  om_thread args[OM_CORES];
  int started = 0;
  for (; started < OM_CORES; started++) {
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, 8 << 20); /* inputs of products lie on the stack */
#ifdef __linux__
    if (l->cpus[started] >= 0) {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(l->cpus[started], &set);
      pthread_attr_setaffinity_np(&attr, sizeof set, &set);
    }
#endif
    args[started] = (om_thread){s, started};
    const int failed = pthread_create(&threads[started], &attr, om_thread_main, &args[started]);
    pthread_attr_destroy(&attr);
    if (failed) {
      om_report(s, OM_NO_THREADS, started, 0, -1, OM_CORES, started, -1);
      break;
    }
  }
  for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
  const int fault = l->fault;
  free(room);
  free(s);
  return fault;
}
