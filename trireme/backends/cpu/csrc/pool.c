/* The thread pool: persistent workers that share out the phases of a run.
 *
 * A phase is a number of items, in chunks. Each worker has a share of neighbouring chunks, which it takes one by one from a
 * cache line of its own, and then takes what others have left. A phase is over when its items are done, not when every worker
 * has come by: a worker the system has put aside holds up only the chunk in its hands, so a busy machine slows a run in
 * proportion and no more. Waiting spins briefly, then yields; a worker without a run goes to sleep. */
#define _GNU_SOURCE
#include "trireme_cpu.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

enum { MAX_WORKERS = 256, SPINS = 1000, YIELDS = 200 }; /* some 20 µs of spinning, then up to 200 turns given away */
enum { PATIENCE = 32 }; /* turns waited for the others before their shares are looked into, which disturbs them */

typedef struct { _Alignas(64) _Atomic uint64_t taken; } Share; /* phase << 32 | its chunks that are taken */

static pthread_mutex_t caller = PTHREAD_MUTEX_INITIALIZER; /* one run at a time */
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static pthread_t threads[MAX_WORKERS];
static int wanted = 1, started = 1; /* workers, the caller included */
static Job current_job;
static void *current_context;
static Share shares[MAX_WORKERS];

static _Alignas(64) atomic_int generation; /* a new value: a new run, or the end of the pool */
static _Alignas(64) atomic_int open_run;   /* whether workers may still join the run */
static _Alignas(64) atomic_int active;     /* workers inside the run, the caller apart */
static _Alignas(64) atomic_int sleepers;
static _Alignas(64) atomic_int finished;   /* phases of this run that are over */
static _Alignas(64) _Atomic int64_t done;  /* items of this run that are finished */
static struct { _Alignas(64) void *memory; size_t bytes; } scratch[MAX_WORKERS];

static void pause_turn(int turn) {
    if (turn < SPINS) RELAX();
    else sched_yield();
}

static int is_over(const Worker *worker) { return atomic_load_explicit(&finished, memory_order_acquire) >= worker->phase; }

/* The next chunk of a worker's share, counted from its first, or -1. */
static int64_t take_chunk(int owner, int phase, int64_t size) {
    uint64_t seen = atomic_load_explicit(&shares[owner].taken, memory_order_relaxed), mine = (uint64_t)phase << 32;
    for (;;) {
        uint64_t taken = seen > mine ? seen - mine : 0; /* what is left of an earlier phase counts as nothing */
        if ((int64_t)taken >= size) return -1; /* so does a later phase's: it is larger than any share */
        if (atomic_compare_exchange_weak_explicit(&shares[owner].taken, &seen, mine + taken + 1, memory_order_relaxed,
                                                  memory_order_relaxed)) return (int64_t)taken;
    }
}

/* Says that this worker has done what it took of a phase of so many items; the last to say so ends the phase. */
static void tell(Worker *worker, int64_t items) {
    if (!worker->taken) return;
    int64_t now = atomic_fetch_add_explicit(&done, worker->taken, memory_order_acq_rel) + worker->taken;
    worker->taken = 0;
    if (now == worker->before + items) atomic_store_explicit(&finished, worker->phase, memory_order_release);
}

/* The caller's own share is empty: tells of it, and leaves the others some time to come to their ends. */
static void be_patient(Worker *worker, int64_t items) {
    tell(worker, items);
    for (int turn = 0; turn < PATIENCE && !is_over(worker); turn++) RELAX();
}

int pool_take(Worker *worker, int64_t items, int64_t chunk, Span *span) {
    int64_t chunks = (items + chunk - 1) / chunk;
    while (worker->shares_seen < worker->count && !is_over(worker)) {
        int owner = (worker->index + worker->shares_seen) % worker->count;
        int64_t first = chunks * owner / worker->count, end = chunks * (owner + 1) / worker->count;
        int64_t at = take_chunk(owner, worker->phase, end - first);
        if (at < 0) {
            if (worker->shares_seen++ == 0) be_patient(worker, items);
            continue;
        }
        span->first = (first + at) * chunk;
        span->end = span->first + chunk < items ? span->first + chunk : items;
        worker->taken += span->end - span->first;
        return 1;
    }
    return 0;
}

void pool_next_phase(Worker *worker, int64_t items) {
    worker->shares_seen = 0;
    if (!items) return; /* nobody would end it */
    tell(worker, items);
    for (int turn = 0; !is_over(worker); turn++) pause_turn(turn);
    worker->before += items;
    worker->phase++;
}

static int wait_for_run(int seen) {
    for (int turn = 0; turn < SPINS + YIELDS; turn++) {
        if (atomic_load_explicit(&generation, memory_order_acquire) != seen) break;
        pause_turn(turn);
    }
    if (atomic_load(&generation) == seen) {
        pthread_mutex_lock(&sleep_lock);
        atomic_fetch_add(&sleepers, 1);
        while (atomic_load(&generation) == seen) pthread_cond_wait(&wake, &sleep_lock);
        atomic_fetch_sub(&sleepers, 1);
        pthread_mutex_unlock(&sleep_lock);
    }
    return atomic_load(&generation);
}

static void *work(void *argument) {
    int index = (int)(intptr_t)argument;
    for (int seen = 0;;) {
        seen = wait_for_run(seen);
        atomic_fetch_add(&active, 1); /* before looking: the caller closes the run first and then waits for this to be 0 */
        int joined = atomic_load(&open_run), end = joined && !current_job;
        if (joined && !end) {
            Worker worker = {.index = index, .count = started, .phase = 1};
            current_job(current_context, &worker);
        }
        atomic_fetch_sub(&active, 1);
        if (end) return NULL;
    }
}

static void announce(Job job, void *context) {
    current_job = job;
    current_context = context;
    atomic_store(&open_run, 1);
    atomic_fetch_add(&generation, 1);
    if (atomic_load(&sleepers)) {
        pthread_mutex_lock(&sleep_lock);
        pthread_cond_broadcast(&wake);
        pthread_mutex_unlock(&sleep_lock);
    }
}

static void stop(void) {
    if (started > 1) announce(NULL, NULL);
    for (int i = 1; i < started; i++) pthread_join(threads[i], NULL);
    started = 1;
}

/* A forked child has none of the threads: it starts its own at the next run. */
static void after_fork(void) {
    started = 1;
    atomic_store(&active, 0);
    atomic_store(&sleepers, 0);
    pthread_mutex_init(&caller, NULL);
    pthread_mutex_init(&sleep_lock, NULL);
    pthread_cond_init(&wake, NULL);
}

static void start(void) {
    static int registered;
    if (!registered) registered = !pthread_atfork(NULL, NULL, after_fork);
    stop();
    atomic_store(&generation, 0);
    atomic_store(&open_run, 0);
    int count = 1;
    for (; count < wanted; count++)
        if (pthread_create(&threads[count], NULL, work, (void *)(intptr_t)count)) break;
    wanted = started = count;
}

/* Runs the job on all workers. */
void pool_run(Job job, void *context) {
    pthread_mutex_lock(&caller);
    if (started != wanted) start();
    for (int i = 0; i < started; i++) atomic_store_explicit(&shares[i].taken, 0, memory_order_relaxed);
    atomic_store_explicit(&done, 0, memory_order_relaxed);
    atomic_store_explicit(&finished, 0, memory_order_relaxed);
    Worker worker = {.index = 0, .count = started, .phase = 1};
    if (started > 1) announce(job, context);
    job(context, &worker);
    atomic_store(&open_run, 0);
    for (int turn = 0; atomic_load(&active); turn++) pause_turn(turn);
    pthread_mutex_unlock(&caller);
}

int trireme_set_threads(int count) {
    pthread_mutex_lock(&caller);
    wanted = count < 1 ? 1 : count > MAX_WORKERS ? MAX_WORKERS : count;
    pthread_mutex_unlock(&caller);
    return wanted;
}

int trireme_threads(void) { return wanted; }

/* At least `bytes` of this worker's own memory; what was in it may be gone after the next call. */
void *pool_scratch(const Worker *worker, size_t bytes) {
    int i = worker->index;
    if (scratch[i].bytes < bytes) {
        free(scratch[i].memory);
        size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        scratch[i].memory = aligned_alloc(4096, size);
        scratch[i].bytes = scratch[i].memory ? size : 0;
        if (!scratch[i].memory) abort();
    }
    return scratch[i].memory;
}
