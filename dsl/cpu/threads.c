/* The worker threads of a process: one pool, shared by all kernels. Linux.
 *
 * A call opens a job with some seats. Sleeping workers are woken, each takes a seat, and all of them, the caller
 * included, take items from one counter until none is left. The caller then closes the job, so that a worker that wakes
 * late finds no seat, and waits for those that have one. No lock is held at any time, so none can be lost in a fork. */

#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef void (*tw_run)(void *context, int64_t item, void *scratch);

#define EXPORT __attribute__((visibility("default")))
#define LINE 64                       /* bytes of a cache line */
#define HUGE_PAGE ((size_t)2 << 20)
#define LARGE ((size_t)1 << 20)       /* scratch from here on is mapped, in huge pages where there are some */
#define KEPT ((size_t)64 << 20)       /* scratch that a thread keeps between calls */
#define SPIN_NANOSECONDS 20000        /* about what falling asleep and waking costs */
#define MOST_WORKERS 4095

/* ---- scratch memory, a block for each thread ------------------------------------------------------------------- */

struct scratch {
  void *data;
  size_t bytes;
};

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) & ~(unit - 1); }

static void scratch_free(struct scratch *s) {
  if (s->bytes >= LARGE)
    munmap(s->data, s->bytes);
  else
    free(s->data);
  s->data = NULL;
  s->bytes = 0;
}

/* Whole huge pages, on their boundary: mapped with one to spare, and both ends given back. */
static void *map_large(size_t bytes) {
  char *p = mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return NULL;
  size_t before = round_up((uintptr_t)p, HUGE_PAGE) - (uintptr_t)p;
  if (before) munmap(p, before);
  if (before < HUGE_PAGE) munmap(p + before + bytes, HUGE_PAGE - before);
  madvise(p + before, bytes, MADV_HUGEPAGE);
  return p + before;
}

/* At least `bytes` bytes; their contents are undefined. False where there is no memory for them. */
static int scratch_reserve(struct scratch *s, size_t bytes) {
  if (bytes <= s->bytes) return 1;
  scratch_free(s);
  if (bytes > SIZE_MAX / 2) return 0;
  size_t rounded = round_up(bytes, bytes > LARGE - LINE ? HUGE_PAGE : LINE);
  s->data = rounded >= LARGE ? map_large(rounded) : aligned_alloc(LINE, rounded);
  s->bytes = s->data ? rounded : 0;
  return s->data != NULL;
}

static void scratch_trim(struct scratch *s) {
  if (s->bytes > KEPT) scratch_free(s);
}

static __thread struct scratch own_scratch;
static __thread int inside; /* this thread is running items, on its own scratch */

/* ---- the pool -------------------------------------------------------------------------------------------------- */

/* `gate` counts free seats of the open job (low half) and workers at work on it (high half). */
#define SEATS(gate) ((gate) & 0xffffu)
#define WORKING(gate) ((gate) >> 16)
#define ONE_WORKING 0x10000u

static struct {
  atomic_int taken;                        /* a caller has the pool; everything else below is its to change */
  int workers;                             /* threads that exist */
  tw_run run;                              /* the job */
  void *context;
  int64_t items;
  size_t scratch_bytes;
  _Alignas(LINE) _Atomic int64_t next;     /* its next item */
  _Alignas(LINE) _Atomic uint32_t gate;    /* the caller sleeps on it */
  _Alignas(LINE) _Atomic uint32_t jobs;    /* jobs opened so far; idle workers sleep on it */
  atomic_int sleepers;
  atomic_int caller_sleeps;
} pool;

static void futex_sleep(_Atomic uint32_t *word, uint32_t seen) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int threads) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, threads, NULL, NULL, 0);
}

static int64_t nanoseconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void pause_briefly(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* Until `word` differs from `seen`; false where it is still the same at `end`. */
static int spin(_Atomic uint32_t *word, uint32_t seen, int64_t end) {
  do {
    for (int i = 0; i < 32; i++) {
      if (atomic_load_explicit(word, memory_order_acquire) != seen) return 1;
      pause_briefly();
    }
  } while (nanoseconds() < end);
  return 0;
}

/* Items of the open job until none is left. A thread without scratch leaves them to the others. */
static void work(void) {
  if (!scratch_reserve(&own_scratch, pool.scratch_bytes)) return;
  inside = 1;
  for (;;) {
    int64_t item = atomic_fetch_add_explicit(&pool.next, 1, memory_order_relaxed);
    if (item >= pool.items) break;
    pool.run(pool.context, item, own_scratch.data);
  }
  inside = 0;
  scratch_trim(&own_scratch);
}

static int take_seat(void) {
  uint32_t gate = atomic_load(&pool.gate);
  while (SEATS(gate))
    if (atomic_compare_exchange_weak(&pool.gate, &gate, gate - 1 + ONE_WORKING)) return 1;
  return 0;
}

/* The last one wakes the caller, which sleeps only once no seat is free. */
static void leave_seat(void) {
  uint32_t gate = atomic_fetch_sub(&pool.gate, ONE_WORKING) - ONE_WORKING;
  if (gate == 0 && atomic_load(&pool.caller_sleeps)) futex_wake(&pool.gate, 1);
}

static void *worker(void *first_job) {
  uint32_t last = (uint32_t)(uintptr_t)first_job;
  for (;;) {
    uint32_t jobs = atomic_load(&pool.jobs);
    if (jobs != last) {
      last = jobs;
      if (take_seat()) {
        work();
        leave_seat();
      }
      spin(&pool.jobs, jobs, nanoseconds() + SPIN_NANOSECONDS); /* the next job often follows at once */
      continue;
    }
    atomic_fetch_add(&pool.sleepers, 1); /* before the kernel compares: a job opened since is seen by one of the two */
    futex_sleep(&pool.jobs, jobs);
    atomic_fetch_sub(&pool.sleepers, 1);
  }
  return NULL;
}

/* Threads up to `wanted`, as far as the system lets there be; they take no signals, which are the host's to handle. */
static void hire(int wanted) {
  if (pool.workers >= wanted) return;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  void *last = (void *)(uintptr_t)atomic_load(&pool.jobs);
  while (pool.workers < wanted) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, worker, last)) break;
    pthread_setname_np(thread, "tilewright");
    pthread_detach(thread);
    pool.workers++;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void open_job(int seats) {
  atomic_store(&pool.gate, (uint32_t)seats);
  atomic_fetch_add(&pool.jobs, 1);
  if (atomic_load(&pool.sleepers)) futex_wake(&pool.jobs, seats);
}

/* No worker comes any more; wait for those that came. */
static void close_job(void) {
  if (!WORKING(atomic_fetch_and(&pool.gate, ~0xffffu))) return;
  int64_t end = nanoseconds() + SPIN_NANOSECONDS;
  for (uint32_t gate; (gate = atomic_load(&pool.gate));) {
    if (spin(&pool.gate, gate, end)) continue;
    atomic_store(&pool.caller_sleeps, 1); /* before the kernel compares: who leaves last sees it, or the gate differs */
    futex_sleep(&pool.gate, gate);
  }
  atomic_store(&pool.caller_sleeps, 0);
}

/* ---- forks and the ends of threads ----------------------------------------------------------------------------- */

static pthread_once_t prepared = PTHREAD_ONCE_INIT;
static pthread_key_t at_thread_end;

/* A child has the forking thread only: it hires its own workers at its first call. */
static void in_child(void) {
  pool.workers = 0;
  atomic_store(&pool.gate, 0);
  atomic_store(&pool.sleepers, 0);
  atomic_store(&pool.caller_sleeps, 0);
  atomic_store(&pool.taken, 0);
}

static void end_thread(void *scratch) { scratch_free(scratch); }

static void prepare(void) {
  pthread_atfork(NULL, NULL, in_child);
  pthread_key_create(&at_thread_end, end_thread);
}

/* ---- the interface --------------------------------------------------------------------------------------------- */

#ifndef TW_ALLOWED_CPUS /* tests say more than a small machine has */
static int allowed_cpus(void) {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set)) return MOST_WORKERS; /* more than 1024 processors */
  return CPU_COUNT(&set);
}
#define TW_ALLOWED_CPUS allowed_cpus()
#endif

/* All items on this thread, in order. A call from inside an item needs memory beside that item's. */
static int run_alone(tw_run run, void *context, int64_t items, size_t scratch_bytes) {
  struct scratch nested = {NULL, 0}, *scratch = inside ? &nested : &own_scratch;
  int was_inside = inside;
  if (!scratch_reserve(scratch, scratch_bytes)) return ENOMEM;
  inside = 1;
  for (int64_t item = 0; item < items; item++) run(context, item, scratch->data);
  inside = was_inside;
  if (scratch == &nested)
    scratch_free(&nested);
  else
    scratch_trim(&own_scratch);
  return 0;
}

/* run(context, item, scratch) for item = 0 .. items - 1, handed out in order, one at a time, to at most `threads`
 * threads, the caller among them; returns when all have run. `scratch` is `scratch_bytes` bytes of the running thread's
 * own, on a cache line, with undefined contents.
 *
 * 0, or ENOMEM where memory for scratch was missing and some items have not run. A worker without is no error.
 *
 * A call from inside an item, or while another thread has the pool, runs on the calling thread alone. */
EXPORT int tw_parallel(tw_run run, void *context, int64_t items, int64_t scratch_bytes, int threads) {
  if (items <= 0) return 0;
  if (scratch_bytes < 0) return EINVAL;
  pthread_once(&prepared, prepare);
  pthread_setspecific(at_thread_end, &own_scratch);
  if (threads > items) threads = (int)items;
  if (threads > 1 && !inside) {
    int cpus = TW_ALLOWED_CPUS;
    if (threads > cpus) threads = cpus;
    if (threads > MOST_WORKERS) threads = MOST_WORKERS;
  }
  if (threads <= 1 || inside || atomic_exchange(&pool.taken, 1))
    return run_alone(run, context, items, (size_t)scratch_bytes);

  hire(threads - 1);
  pool.run = run;
  pool.context = context;
  pool.items = items;
  pool.scratch_bytes = (size_t)scratch_bytes;
  atomic_store(&pool.next, 0);
  open_job(threads - 1 < pool.workers ? threads - 1 : pool.workers);
  work();
  close_job();
  int complete = atomic_load(&pool.next) >= items;
  atomic_store(&pool.taken, 0);
  return complete ? 0 : ENOMEM;
}

/* Threads of the pool that exist now, without its callers. */
EXPORT int tw_workers(void) { return pool.workers; }
