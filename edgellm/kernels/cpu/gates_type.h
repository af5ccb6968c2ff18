/* Compiled once per instruction set and element type: EDGE_T, EDGE_T_NAME, EDGE_T_TO_FLOAT, EDGE_T_FROM_FLOAT. */
#define EDGE_T_LOAD EDGE_PASTE(EDGE_PASTE(edge_load, EDGE_T_NAME), EDGE_ISA)
#define EDGE_T_STORE EDGE_PASTE(EDGE_PASTE(edge_store, EDGE_T_NAME), EDGE_ISA)
#define EDGE_T_FN(name) EDGE_PASTE(EDGE_PASTE(edge_##name, EDGE_T_NAME), EDGE_ISA)

EDGE_INLINE float EDGE_T_FN(activation)(EDGE_T gate, int32_t silu) {
    const float value = EDGE_T_TO_FLOAT(gate);
    return (silu ? value : 1.0f) / (1.0f + expf(-value));
}

static void EDGE_T_FN(gate_row)(const edge_gate_args *a, int64_t row) {
    EDGE_T *x = (EDGE_T *)a->x.at + row * a->x.stride;
    const EDGE_T *gate = (const EDGE_T *)a->gate.at + row * a->gate.stride;
    EDGE_V value, g, e;
    int64_t i = 0;
    if (a->whole_rows) {
        const float factor = EDGE_T_FN(activation)(gate[0], a->silu);
        for (; i < a->width; i++) x[i] = EDGE_T_FROM_FLOAT(EDGE_T_TO_FLOAT(x[i]) * factor);
        return;
    }
    for (; i + EDGE_LANES <= a->width; i += EDGE_LANES) {
        EDGE_T_LOAD(&value, x + i);
        EDGE_T_LOAD(&g, gate + i);
        e = -g;
        EDGE_FN(exp)(&e);
        value = (a->silu ? g * value : value) / (1.0f + e);
        EDGE_T_STORE(x + i, &value);
    }
    for (; i < a->width; i++)
        x[i] = EDGE_T_FROM_FLOAT(EDGE_T_TO_FLOAT(x[i]) * EDGE_T_FN(activation)(gate[i], a->silu));
}

static void EDGE_T_FN(delta_gate_row)(const edge_delta_gates_args *a, int64_t row) {
    const EDGE_T *in = (const EDGE_T *)a->a.at + row * a->a.stride;
    const EDGE_T *gate = (const EDGE_T *)a->b.at + row * a->b.stride;
    for (int64_t head = 0; head < a->heads; head++) {
        const float x = EDGE_T_TO_FLOAT(in[head]) + a->bias[head];
        /* Above 20 the logarithm is x itself to float32 precision. */
        a->decay[row * a->heads + head] = a->rate[head] * (x > 20.0f ? x : log1pf(expf(x)));
        a->beta[row * a->heads + head] = EDGE_T_FN(activation)(gate[head], 0);
    }
}

#undef EDGE_T_LOAD
#undef EDGE_T_STORE
#undef EDGE_T_FN
