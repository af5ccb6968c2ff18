/* Compiled once per instruction set and element type: EDGE_T, EDGE_T_NAME, EDGE_T_TO_FLOAT, EDGE_T_FROM_FLOAT. */
#define EDGE_T_LOAD EDGE_PASTE(EDGE_PASTE(edge_load, EDGE_T_NAME), EDGE_ISA)
#define EDGE_T_STORE EDGE_PASTE(EDGE_PASTE(edge_store, EDGE_T_NAME), EDGE_ISA)
#define EDGE_T_FN(name) EDGE_PASTE(EDGE_PASTE(edge_##name, EDGE_T_NAME), EDGE_ISA)

EDGE_INLINE float EDGE_T_FN(inverse_rms)(const EDGE_T *in, int64_t width, float eps) {
    EDGE_V s0 = {0}, s1 = {0}, x;
    int64_t i = 0;
    for (; i + 2 * EDGE_LANES <= width; i += 2 * EDGE_LANES) {
        EDGE_T_LOAD(&x, in + i);
        s0 += x * x;
        EDGE_T_LOAD(&x, in + i + EDGE_LANES);
        s1 += x * x;
    }
    s0 += s1;
    float squares = EDGE_FN(sum)(&s0);
    for (; i < width; i++) squares += EDGE_T_TO_FLOAT(in[i]) * EDGE_T_TO_FLOAT(in[i]);
    return 1.0f / sqrtf(squares / (float)width + eps);
}

static void EDGE_T_FN(norm_row)(const EDGE_T *in, EDGE_T *out, const float *weight, int64_t width, float eps) {
    const float inverse = EDGE_T_FN(inverse_rms)(in, width, eps);
    EDGE_V x, w;
    int64_t i = 0;
    for (; i + EDGE_LANES <= width; i += EDGE_LANES) {
        EDGE_T_LOAD(&x, in + i);
        EDGE_FN(load_f32)(&w, weight + i);
        x = x * inverse * w;
        EDGE_T_STORE(out + i, &x);
    }
    for (; i < width; i++) out[i] = EDGE_T_FROM_FLOAT(EDGE_T_TO_FLOAT(in[i]) * inverse * weight[i]);
}

static void EDGE_T_FN(rope_head)(EDGE_T *head, const float *cosine, const float *sine, const float *norm, int64_t half,
                                 int64_t width, float eps) {
    const float inverse = norm == NULL ? 1.0f : EDGE_T_FN(inverse_rms)(head, width, eps);
    EDGE_V a, b, c, s, n, low, high;
    int64_t i = 0;
    for (; i + EDGE_LANES <= half; i += EDGE_LANES) {
        EDGE_T_LOAD(&a, head + i);
        EDGE_T_LOAD(&b, head + half + i);
        if (norm != NULL) {
            EDGE_FN(load_f32)(&n, norm + i);
            a = a * inverse * n;
            EDGE_FN(load_f32)(&n, norm + half + i);
            b = b * inverse * n;
        }
        EDGE_FN(load_f32)(&c, cosine + i);
        EDGE_FN(load_f32)(&s, sine + i);
        low = a * c - b * s;
        high = b * c + a * s;
        EDGE_T_STORE(head + i, &low);
        EDGE_T_STORE(head + half + i, &high);
    }
    for (; i < half; i++) {
        float x = EDGE_T_TO_FLOAT(head[i]), y = EDGE_T_TO_FLOAT(head[half + i]);
        if (norm != NULL) {
            x = x * inverse * norm[i];
            y = y * inverse * norm[half + i];
        }
        head[i] = EDGE_T_FROM_FLOAT(x * cosine[i] - y * sine[i]);
        head[half + i] = EDGE_T_FROM_FLOAT(y * cosine[i] + x * sine[i]);
    }
    if (norm == NULL) return;
    for (i = 2 * half; i < width; i++) head[i] = EDGE_T_FROM_FLOAT(EDGE_T_TO_FLOAT(head[i]) * inverse * norm[i]);
}

static void EDGE_T_FN(silu_row)(const EDGE_T *gate_up, EDGE_T *out, int64_t width) {
    EDGE_V gate, up, e;
    int64_t i = 0;
    for (; i + EDGE_LANES <= width; i += EDGE_LANES) {
        EDGE_T_LOAD(&gate, gate_up + i);
        EDGE_T_LOAD(&up, gate_up + width + i);
        e = -gate;
        EDGE_FN(exp)(&e);
        e = gate / (1.0f + e) * up;
        EDGE_T_STORE(out + i, &e);
    }
    for (; i < width; i++) {
        const float x = EDGE_T_TO_FLOAT(gate_up[i]);
        out[i] = EDGE_T_FROM_FLOAT(x / (1.0f + expf(-x)) * EDGE_T_TO_FLOAT(gate_up[width + i]));
    }
}

static void EDGE_T_FN(gelu_row)(const EDGE_T *gate_row, const EDGE_T *up_row, EDGE_T *out, int64_t width) {
    EDGE_V gate, up, e;
    int64_t i = 0;
    for (; i + EDGE_LANES <= width; i += EDGE_LANES) {
        EDGE_T_LOAD(&gate, gate_row + i);
        EDGE_T_LOAD(&up, up_row + i);
        e = -gate * (EDGE_GELU_LINEAR + EDGE_GELU_CUBIC * gate * gate);
        EDGE_FN(exp)(&e);
        e = gate / (1.0f + e) * up;
        EDGE_T_STORE(out + i, &e);
    }
    for (; i < width; i++) {
        const float x = EDGE_T_TO_FLOAT(gate_row[i]);
        const float e2 = expf(-x * (EDGE_GELU_LINEAR + EDGE_GELU_CUBIC * x * x));
        out[i] = EDGE_T_FROM_FLOAT(x / (1.0f + e2) * EDGE_T_TO_FLOAT(up_row[i]));
    }
}

#undef EDGE_T_LOAD
#undef EDGE_T_STORE
#undef EDGE_T_FN
