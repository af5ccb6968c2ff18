#define _GNU_SOURCE
#include "parallel.h"

#include <stddef.h>
#include <stdlib.h>

#include "isa.h"
#include "thread_pool.h"

#ifdef _OPENMP
#include <dlfcn.h>
#include <omp.h>
#endif

void edge_parallel(edge_task task, const void *args, int64_t count, int64_t grain, int num_threads) {
    if (num_threads < -1) {
        edge_pool_run(task, args, count, grain, -num_threads);
        return;
    }
#ifdef _OPENMP
    int64_t chunks = (count + grain - 1) / grain;
    if (num_threads > chunks) num_threads = (int)chunks;
    if (num_threads > 1) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads)
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            int64_t end = (chunk + 1) * grain;
            task(args, chunk * grain, end < count ? end : count);
        }
        return;
    }
#endif
    if (count > 0) task(args, 0, count);
}

int edge_shares_threads(const char *library) {
#ifdef _OPENMP
    /* Two OpenMP runtimes in one process spin against each other, so the addresses are compared. */
    void *handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    if (handle == NULL) return 0;
    void *theirs = dlsym(handle, "omp_get_max_threads");
    dlclose(handle);
    return theirs != NULL && theirs == (void *)omp_get_max_threads;
#else
    (void)library;
    return 0;
#endif
}

static int edge_detect_isa(void) {
    int level = 0;
#ifdef EDGE_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) level = 1;
    if (level == 1 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        level = 2;
    const char *limit = getenv("EDGELLM_CPU_ISA");
    if (limit != NULL && limit[0] >= '0' && limit[0] - '0' < level) level = limit[0] - '0';
#endif
    return level;
}

int edge_isa_level(void) {
    static int level = -1;
    if (level < 0) level = edge_detect_isa();
    return level;
}
