/* A pool of worker threads that lives as long as the library.
 *
 * ob_pool_run(n, fn, arg) calls fn(t, arg) for t = 0 on the caller, and for other t < n on the workers that come in
 * time: a job must be one that any number of threads can finish, because the caller does not wait for a worker that
 * has not started (it may be asleep, or have no core). Workers spin for a short while after a job, then sleep, so
 * that calls in a row start in about a microsecond and an idle pool costs nothing.
 * A second caller at the same time runs alone; a child after fork gets new workers. Unloading ends the workers.
 */
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

typedef void (*ob_job)(int thread, void *arg);

#if defined(__x86_64__) || defined(__i386__)
#define ob_pause() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define ob_pause() __asm__ volatile("yield")
#else
#define ob_pause() ((void)0)
#endif

typedef struct {
  _Alignas(64) atomic_uint round;  /* number of the newest job: a change wakes the workers */
  _Alignas(64) atomic_uint open;   /* number of the job that may be entered; 0: none */
  _Alignas(64) atomic_int inside;  /* workers that have entered, or are looking whether they may */
  _Alignas(64) atomic_int stop;
  atomic_int sleeping;
  ob_job job;
  void *arg;
  int threads; /* of the current job */
  int started; /* workers that exist */
  pid_t owner;
  pthread_t worker[OB_MAX_THREADS];
  unsigned from[OB_MAX_THREADS]; /* the round after which a worker began: earlier jobs are not its own */
  pthread_mutex_t lock;
  pthread_cond_t wake;
} ob_pool_state;

static ob_pool_state ob_pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};
static atomic_flag ob_busy = ATOMIC_FLAG_INIT;

/* The blocks of one call: how many were handed out, how many are done. */
typedef struct {
  _Alignas(64) atomic_long next;
  _Alignas(64) atomic_long done;
} ob_blocks;

static inline long ob_take(ob_blocks *b, long count) {
  return atomic_fetch_add_explicit(&b->next, count, memory_order_relaxed);
}
static inline void ob_finish(ob_blocks *b, long count) {
  atomic_fetch_add_explicit(&b->done, count, memory_order_release);
}

/* Spin, then give the core away: the thread that is waited for may need it. */
static void ob_wait_a_little(unsigned *turns) {
  if (++*turns < 4096) ob_pause();
  else sched_yield();
}

/* Return when all blocks of a call are done. */
static inline void ob_await(ob_blocks *b, long count) {
  unsigned turns = 0;
  while (atomic_load_explicit(&b->done, memory_order_acquire) < count) ob_wait_a_little(&turns);
}

static long ob_microseconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000L + t.tv_nsec / 1000;
}

static void *ob_worker(void *number) {
  const int me = (int)(intptr_t)number;
  unsigned seen = ob_pool.from[me];
  for (;;) {
    const long start = ob_microseconds();
    while (atomic_load_explicit(&ob_pool.round, memory_order_acquire) == seen) {
      for (int i = 0; i < 64 && atomic_load_explicit(&ob_pool.round, memory_order_relaxed) == seen; i++) ob_pause();
      if (ob_microseconds() - start > OB_SPIN_MICROSECONDS) {
        pthread_mutex_lock(&ob_pool.lock);
        atomic_fetch_add(&ob_pool.sleeping, 1);
        while (atomic_load(&ob_pool.round) == seen) pthread_cond_wait(&ob_pool.wake, &ob_pool.lock);
        atomic_fetch_sub(&ob_pool.sleeping, 1);
        pthread_mutex_unlock(&ob_pool.lock);
      }
    }
    if (atomic_load(&ob_pool.stop)) return NULL;
    seen = atomic_load(&ob_pool.round);
    atomic_fetch_add(&ob_pool.inside, 1); /* first, so that a caller who closes the job sees it */
    if (seen && atomic_load(&ob_pool.open) == seen && me < ob_pool.threads) ob_pool.job(me, ob_pool.arg);
    atomic_fetch_sub(&ob_pool.inside, 1);
  }
}

static void ob_pool_wake(void) {
  if (atomic_load(&ob_pool.sleeping)) {
    pthread_mutex_lock(&ob_pool.lock);
    pthread_cond_broadcast(&ob_pool.wake);
    pthread_mutex_unlock(&ob_pool.lock);
  }
}

/* Workers for `threads` threads; fewer where the system refuses. Returns how many threads there are. */
static int ob_pool_grow(int threads) {
  if (ob_pool.owner != getpid()) { /* first use, or the child of a fork: the parent's workers are not here */
    memset(&ob_pool, 0, sizeof ob_pool);
    pthread_mutex_init(&ob_pool.lock, NULL);
    pthread_cond_init(&ob_pool.wake, NULL);
    ob_pool.owner = getpid();
  }
  sigset_t all, before; /* workers take no signals: they belong to the program's own threads */
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  while (ob_pool.started < threads - 1) {
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, 1 << 20);
    const int me = ob_pool.started + 1;
    ob_pool.from[me] = atomic_load(&ob_pool.round);
    const int failed = pthread_create(&ob_pool.worker[me], &attr, ob_worker, (void *)(intptr_t)me);
    pthread_attr_destroy(&attr);
    if (failed) break;
    ob_pool.started++;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return ob_pool.started + 1;
}

static void ob_pool_run(int threads, ob_job job, void *arg) {
  if (threads > OB_MAX_THREADS) threads = OB_MAX_THREADS;
  if (ob_pool.owner && ob_pool.owner != getpid()) atomic_flag_clear(&ob_busy); /* the parent's job is not here */
  if (threads <= 1 || atomic_flag_test_and_set_explicit(&ob_busy, memory_order_acquire)) {
    job(0, arg);
    return;
  }
  if (ob_pool_grow(threads) > 1) {
    unsigned turns = 0, round = atomic_load(&ob_pool.round) + 1;
    if (round == 0) round = 1;
    ob_pool.job = job;
    ob_pool.arg = arg;
    ob_pool.threads = threads;
    atomic_store(&ob_pool.open, round);
    atomic_store(&ob_pool.round, round);
    ob_pool_wake();
    job(0, arg);
    atomic_store(&ob_pool.open, 0);
    while (atomic_load(&ob_pool.inside)) ob_wait_a_little(&turns);
  } else {
    job(0, arg);
  }
  atomic_flag_clear_explicit(&ob_busy, memory_order_release);
}

__attribute__((destructor)) static void ob_pool_end(void) {
  if (ob_pool.owner != getpid() || !ob_pool.started) return;
  atomic_store(&ob_pool.stop, 1);
  atomic_fetch_add(&ob_pool.round, 1);
  ob_pool_wake();
  for (int t = 1; t <= ob_pool.started; t++) pthread_join(ob_pool.worker[t], NULL);
  ob_pool.started = 0;
}
