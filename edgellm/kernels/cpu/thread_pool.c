#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>

#define EDGE_MAX_HELPERS 63
#define EDGE_IDLE_SPINS 4000 /* about 50 to 100 microseconds: longer than the gap between two operations of a step */
#define EDGE_WAIT_SPINS 2000

#if defined(__x86_64__) || defined(__i386__)
#define edge_pause() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define edge_pause() __asm__ volatile("yield")
#else
#define edge_pause() ((void)0)
#endif

/* The job is written while it is closed and no helper is inside; `open` publishes it. */
static struct {
    edge_task task;
    const void *args;
    int64_t count;
    int64_t grain;
    int max_helpers;
    atomic_llong next;      /* first task that nobody has taken */
    atomic_int inside;      /* helpers that may touch the job */
    atomic_int open;        /* 1 while the job may be joined */
    atomic_uint generation; /* counts jobs, so that a helper joins each at most once */
    atomic_int sleepers;
    atomic_flag busy; /* a caller owns the job */
    int num_helpers;  /* started so far; only the owner of the job writes it */
} pool = {.busy = ATOMIC_FLAG_INIT};

static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t sleep_end = PTHREAD_COND_INITIALIZER;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void take_chunks(void) {
    for (;;) {
        const int64_t begin = atomic_fetch_add(&pool.next, pool.grain);
        if (begin >= pool.count) return;
        const int64_t end = begin + pool.grain;
        pool.task(pool.args, begin, end < pool.count ? end : pool.count);
    }
}

/* Wait for a job newer than `seen`: spin a little, then sleep. */
static void await_job(unsigned seen) {
    for (int spin = 0; spin < EDGE_IDLE_SPINS; spin++) {
        if (atomic_load(&pool.generation) != seen) return;
        edge_pause();
    }
    pthread_mutex_lock(&sleep_lock);
    atomic_fetch_add(&pool.sleepers, 1);
    while (atomic_load(&pool.generation) == seen) pthread_cond_wait(&sleep_end, &sleep_lock);
    atomic_fetch_sub(&pool.sleepers, 1);
    pthread_mutex_unlock(&sleep_lock);
}

static void *help(void *opaque) {
    const int index = (int)(intptr_t)opaque;
    unsigned seen = 0;
    for (;;) {
        await_job(seen);
        seen = atomic_load(&pool.generation);
        /* First step inside, then look: either the owner sees this helper, or the helper sees the job closed. */
        atomic_fetch_add(&pool.inside, 1);
        if (atomic_load(&pool.open) && index < pool.max_helpers) take_chunks();
        atomic_fetch_sub(&pool.inside, 1);
    }
    return NULL;
}

/* A forked child has none of the helpers, and the parent's locks may have been held. */
static void forget_helpers(void) {
    pool.num_helpers = 0;
    atomic_store(&pool.inside, 0);
    atomic_store(&pool.open, 0);
    atomic_store(&pool.sleepers, 0);
    atomic_flag_clear(&pool.busy);
    pthread_mutex_init(&sleep_lock, NULL);
    pthread_cond_init(&sleep_end, NULL);
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_helpers); }

static void start_helpers(int wanted) {
    pthread_once(&fork_once, watch_forks);
    while (pool.num_helpers < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, (void *)(intptr_t)pool.num_helpers) != 0) return; /* works without */
        pthread_detach(thread);
        pool.num_helpers++;
    }
}

static void await_helpers(void) {
    for (int spin = 0; atomic_load(&pool.inside) != 0; spin++) {
        edge_pause();
        if (spin > EDGE_WAIT_SPINS) sched_yield();
    }
}

void edge_pool_run(edge_task task, const void *args, int64_t count, int64_t grain, int num_threads) {
    const int64_t chunks = (count + grain - 1) / grain;
    int helpers = num_threads - 1 < EDGE_MAX_HELPERS ? num_threads - 1 : EDGE_MAX_HELPERS;
    if (helpers > chunks - 1) helpers = (int)(chunks - 1);
    if (helpers < 1 || atomic_flag_test_and_set(&pool.busy)) {
        if (count > 0) task(args, 0, count);
        return;
    }
    start_helpers(helpers);
    /* A helper that woke late may still be passing through the closed job of the last call. */
    await_helpers();
    pool.task = task;
    pool.args = args;
    pool.count = count;
    pool.grain = grain;
    pool.max_helpers = helpers;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.open, 1);
    atomic_fetch_add(&pool.generation, 1);
    if (atomic_load(&pool.sleepers) > 0) {
        pthread_mutex_lock(&sleep_lock);
        pthread_cond_broadcast(&sleep_end);
        pthread_mutex_unlock(&sleep_lock);
    }
    take_chunks();
    atomic_store(&pool.open, 0);
    await_helpers();
    atomic_flag_clear(&pool.busy);
}
