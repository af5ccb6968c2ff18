/* Run a range of independent tasks on several threads. */
#ifndef EDGE_PARALLEL_H
#define EDGE_PARALLEL_H

#include <stdint.h>

/* Tasks [begin, end). */
typedef void (*edge_task)(const void *args, int64_t begin, int64_t end);

/* Split [0, count), `grain` tasks at a time, in any order; returns when all are done.
 *
 * num_threads > 0: that many threads of the process's OpenMP runtime, for steps in which torch uses it as well.
 * num_threads < 0: the helper threads of thread_pool.h, for steps of many short operations.
 */
void edge_parallel(edge_task task, const void *args, int64_t count, int64_t grain, int num_threads);

/* 1 if num_threads > 0 means the thread pool that `library` (already loaded) uses. */
int edge_shares_threads(const char *library);

#endif
