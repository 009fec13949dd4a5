/* The thread pool: persistent workers, a barrier, and a shared counter from which work is taken in chunks.
 * Waiting spins briefly, then yields, then sleeps, so that a busy machine slows a step in proportion and no more. */
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

enum { MAX_WORKERS = 256, SPINS = 2000, YIELDS = 200 }; /* about 30 µs of spinning, then up to 200 turns given away */

static pthread_mutex_t caller = PTHREAD_MUTEX_INITIALIZER; /* one job at a time */
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static pthread_t threads[MAX_WORKERS];
static int wanted = 1, started = 1; /* workers, the caller included */
static Job current_job;
static void *current_context;

static _Alignas(64) atomic_int generation; /* a new value: a new job */
static _Alignas(64) atomic_int sleepers;
static _Alignas(64) atomic_int arrived;
static _Alignas(64) atomic_int phase;
static _Alignas(64) _Atomic int64_t next_item;
static struct { _Alignas(64) void *memory; size_t bytes; } scratch[MAX_WORKERS];

/* Waits until *value differs from `old`; returns 0 if it gave up and the caller should sleep. */
static int wait_change(atomic_int *value, int old, int may_sleep) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(value, memory_order_acquire) != old) return 1;
        RELAX();
    }
    for (int i = 0; !may_sleep || i < YIELDS; i++) {
        if (atomic_load_explicit(value, memory_order_acquire) != old) return 1;
        sched_yield();
    }
    return 0;
}

void pool_barrier(void) {
    if (started == 1) {
        atomic_store_explicit(&next_item, 0, memory_order_relaxed);
        return;
    }
    int old = atomic_load_explicit(&phase, memory_order_acquire);
    if (atomic_fetch_add(&arrived, 1) == started - 1) {
        atomic_store_explicit(&arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&next_item, 0, memory_order_relaxed);
        atomic_fetch_add(&phase, 1);
    } else {
        wait_change(&phase, old, 0);
    }
}

int64_t pool_take(int64_t chunk) { return atomic_fetch_add_explicit(&next_item, chunk, memory_order_relaxed); }

static void *work(void *argument) {
    int index = (int)(intptr_t)argument, seen = 0;
    for (;;) {
        if (!wait_change(&generation, seen, 1)) {
            pthread_mutex_lock(&sleep_lock);
            atomic_fetch_add(&sleepers, 1);
            while (atomic_load(&generation) == seen) pthread_cond_wait(&wake, &sleep_lock);
            atomic_fetch_sub(&sleepers, 1);
            pthread_mutex_unlock(&sleep_lock);
        }
        seen = atomic_load(&generation);
        if (!current_job) return NULL;
        current_job(current_context, index, started);
        pool_barrier();
    }
}

static void announce(Job job, void *context) {
    current_job = job;
    current_context = context;
    atomic_store(&next_item, 0);
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

/* A forked child has none of the threads: it starts its own at the next job. */
static void after_fork(void) {
    started = 1;
    atomic_store(&generation, 0);
    atomic_store(&sleepers, 0);
    atomic_store(&arrived, 0);
    pthread_mutex_init(&caller, NULL);
    pthread_mutex_init(&sleep_lock, NULL);
    pthread_cond_init(&wake, NULL);
}

static void start(void) {
    static int registered;
    if (!registered) registered = !pthread_atfork(NULL, NULL, after_fork);
    stop();
    atomic_store(&generation, 0);
    int count = 1;
    for (; count < wanted; count++)
        if (pthread_create(&threads[count], NULL, work, (void *)(intptr_t)count)) break;
    wanted = started = count;
}

void pool_run(Job job, void *context) {
    pthread_mutex_lock(&caller);
    if (started != wanted) start();
    if (started > 1) announce(job, context);
    else atomic_store(&next_item, 0);
    job(context, 0, started);
    pool_barrier();
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
void *pool_scratch(int worker, size_t bytes) {
    if (scratch[worker].bytes < bytes) {
        free(scratch[worker].memory);
        size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        scratch[worker].memory = aligned_alloc(4096, size);
        scratch[worker].bytes = scratch[worker].memory ? size : 0;
        if (!scratch[worker].memory) abort();
    }
    return scratch[worker].memory;
}
