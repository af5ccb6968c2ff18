/* Helper threads that take part where they can, and that nobody waits for where they cannot.
 *
 * A decode step is some hundred operations of tens of microseconds.  A barrier per operation, as OpenMP has, waits
 * for every thread to be scheduled: on a machine with other work that is a time slice, several hundred times a step.
 * Here the caller works through the chunks itself; a helper that runs takes chunks too, one that does not is not
 * missed.  The caller only waits for chunks that a helper has begun.
 */
#ifndef EDGE_THREAD_POOL_H
#define EDGE_THREAD_POOL_H

#include <stdint.h>

#include "parallel.h"

/* Run chunks [0, num_chunks) of `grain` tasks with up to num_threads - 1 helpers.  A second caller at the same time
 * runs alone.  Helpers are started when first needed, and again in a forked child. */
void edge_pool_run(edge_task task, const void *args, int64_t count, int64_t grain, int num_threads);

#endif
