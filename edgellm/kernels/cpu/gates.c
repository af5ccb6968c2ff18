#include "gates.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "isa.h"
#include "parallel.h"

#define EDGE_BODY "gates_body.h"
#include "compile_isa.h"

/* Elements a task; below it a second thread costs more than it brings. */
#define EDGE_GRAIN 32768

void edge_gate(const edge_gate_args *args, int num_threads) {
    edge_parallel(EDGE_PICK(gate_tasks), args, args->num_rows, EDGE_GRAIN / args->width + 1, num_threads);
}

void edge_delta_gates(const edge_delta_gates_args *args, int num_threads) {
    edge_parallel(EDGE_PICK(delta_gate_tasks), args, args->num_rows, EDGE_GRAIN / (8 * args->heads) + 1, num_threads);
}
