/* The thread pool: persistent workers that share out the phases of a run.
 *
 * A phase is a number of items. It is over when its items are done, not when every worker has come by: a worker the system
 * has put aside holds up only the item in its hands, so a busy machine slows a run in proportion and no more. Waiting spins
 * briefly, then yields; a worker without a run goes to sleep. */
#define _GNU_SOURCE
#include "trireme_cpu.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

enum { MAX_WORKERS = 256, SPINS = 1000, YIELDS = 200 }; /* some 20 µs of spinning, then up to 200 turns given away */

typedef struct { _Atomic int64_t taken, done; } Phase;

static pthread_mutex_t caller = PTHREAD_MUTEX_INITIALIZER; /* one run at a time */
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static pthread_t threads[MAX_WORKERS];
static int wanted = 1, started = 1; /* workers, the caller included */
static Job current_job;
static void *current_context;
static Phase *phases;
static int phase_room;

static _Alignas(64) atomic_int generation; /* a new value: a new run, or the end of the pool */
static _Alignas(64) atomic_int open_run;   /* whether workers may still join the run */
static _Alignas(64) atomic_int active;     /* workers inside the run, the caller apart */
static _Alignas(64) atomic_int sleepers;
static struct { _Alignas(64) void *memory; size_t bytes; } scratch[MAX_WORKERS];

static void pause_turn(int turn) {
    if (turn < SPINS) RELAX();
    else sched_yield();
}

int64_t pool_take(const Worker *worker, int64_t chunk) {
    return atomic_fetch_add_explicit(&phases[worker->phase].taken, chunk, memory_order_relaxed);
}

void pool_done(const Worker *worker, int64_t count) {
    atomic_fetch_add_explicit(&phases[worker->phase].done, count, memory_order_acq_rel);
}

void pool_next_phase(Worker *worker, int64_t items) {
    Phase *phase = phases + worker->phase++;
    for (int turn = 0; atomic_load_explicit(&phase->done, memory_order_acquire) < items; turn++) pause_turn(turn);
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
    Worker worker = {.index = (int)(intptr_t)argument};
    for (int seen = 0;;) {
        seen = wait_for_run(seen);
        atomic_fetch_add(&active, 1); /* before looking: the caller closes the run first and then waits for this to be 0 */
        int joined = atomic_load(&open_run), end = !current_job;
        if (joined && !end) {
            worker.count = started;
            worker.phase = 0;
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

static void clear_phases(int count) {
    if (count > phase_room) {
        free(phases);
        phase_room = count + count / 2;
        phases = malloc((size_t)phase_room * sizeof *phases);
        if (!phases) abort();
    }
    memset(phases, 0, (size_t)count * sizeof *phases);
}

/* Runs the job on all workers; it may use up to `max_phases` phases. */
void pool_run(Job job, void *context, int max_phases) {
    pthread_mutex_lock(&caller);
    if (started != wanted) start();
    clear_phases(max_phases);
    Worker worker = {.index = 0, .count = started};
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
