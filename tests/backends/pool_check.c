/* The thread pool: every item of every phase is done once, and before anybody is in the next phase. Exit 1 on error. */
#include "trireme_cpu.h"
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PHASES = 40, ITEMS = 500, RUNS = 1500 };

typedef struct {
    int phases;
    int64_t items[PHASES], chunk[PHASES];
    atomic_int hits[PHASES][ITEMS], wrong;
} Test;

static void job(void *context, Worker *worker) {
    Test *test = context;
    for (int phase = 0; phase < test->phases; phase++) {
        for (Span span; pool_take(worker, test->items[phase], test->chunk[phase], &span);)
            for (int64_t i = span.first; i < span.end; i++) atomic_fetch_add_explicit(&test->hits[phase][i], 1, memory_order_relaxed);
        pool_next_phase(worker, test->items[phase]);
        for (int64_t i = 0; i < test->items[phase]; i++)
            if (atomic_load_explicit(&test->hits[phase][i], memory_order_relaxed) != 1) atomic_fetch_add(&test->wrong, 1);
    }
}

int main(void) {
    static Test test;
    for (int run = 0; run < RUNS; run++) {
        if (run % 100 == 0) trireme_set_threads(1 + run / 100 % 6);
        memset(&test, 0, sizeof test);
        test.phases = 1 + rand() % PHASES;
        for (int phase = 0; phase < test.phases; phase++) { /* none, fewer than workers, many */
            test.items[phase] = rand() % 5 ? rand() % 20 : rand() % ITEMS;
            test.chunk[phase] = 1 + rand() % 9;
        }
        pool_run(job, &test);
        if (test.wrong) return printf("run %d: %d items wrong\n", run, test.wrong), 1;
    }
    return 0;
}
