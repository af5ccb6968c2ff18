/* Compiled once per instruction set (isa.h). */
#include "recurrent_simd.h"

/* (count, width) of channels to `width` rows of lanes, and back; `width` is a constant after inlining. */
EDGE_INLINE void EDGE_FN(conv_split)(float *restrict out, const float *restrict in, int64_t count, int32_t width) {
    for (int64_t i = 0; i < count; i++)
        for (int32_t j = 0; j < width; j++) out[j * EDGE_CONV_TILE + i] = in[i * width + j];
}

EDGE_INLINE void EDGE_FN(conv_join)(float *restrict out, const float *const rows[], int64_t count, int32_t width) {
    for (int64_t i = 0; i < count; i++)
        for (int32_t j = 0; j < width; j++) out[i * width + j] = rows[j][i];
}

static void EDGE_FN(conv_spread)(float *out, const float *in, int64_t count, int32_t width) {
    if (width == 4)
        EDGE_FN(conv_split)(out, in, count, 4);
    else if (width == 3)
        EDGE_FN(conv_split)(out, in, count, 3);
    else
        EDGE_FN(conv_split)(out, in, count, width);
}

/* The newest `taps` inputs of the ring, oldest first; `newest` is the row of the last one. */
static void EDGE_FN(conv_gather)(float *out, const float *ring, int64_t count, int32_t taps, int32_t newest) {
    const float *rows[EDGE_CONV_WIDTH];
    for (int32_t j = 0; j < taps; j++) rows[j] = ring + (newest + 2 + j) % (taps + 1) * EDGE_CONV_TILE;
    if (taps == 3)
        EDGE_FN(conv_join)(out, rows, count, 3);
    else
        EDGE_FN(conv_join)(out, rows, count, taps);
}

/* One token of a tile: ring row `newest` holds its input.  `width` is a constant after inlining where it matters. */
EDGE_INLINE void EDGE_FN(conv_token)(const float *weight, const float *ring, float *out, int64_t padded, int32_t width,
                                     int32_t newest, int32_t silu) {
    const float *row[EDGE_CONV_WIDTH];
    for (int32_t j = 0; j < width; j++) row[j] = ring + (newest + 1 + j) % width * EDGE_CONV_TILE;
    for (int64_t i = 0; i < padded; i += EDGE_LANES) {
        EDGE_V sum, x, w;
        EDGE_FN(load_f32)(&sum, weight + width * EDGE_CONV_TILE + i);
        for (int32_t j = 0; j < width; j++) {
            EDGE_FN(load_f32)(&x, row[j] + i);
            EDGE_FN(load_f32)(&w, weight + j * EDGE_CONV_TILE + i);
            EDGE_FN(fma)(&sum, &x, &w);
        }
        if (silu) {
            x = -sum;
            EDGE_FN(exp)(&x);
            sum = sum / (1.0f + x);
        }
        EDGE_FN(store_f32)(out + i, &sum);
    }
}

/* Not inlined: every token takes the same instructions, whatever stands around the call. */
static __attribute__((noinline)) void EDGE_FN(conv_any)(const float *weight, const float *ring, float *out,
                                                        int64_t padded, int32_t width, int32_t newest, int32_t silu) {
    if (width == 4)
        EDGE_FN(conv_token)(weight, ring, out, padded, 4, newest, silu);
    else
        EDGE_FN(conv_token)(weight, ring, out, padded, width, newest, silu);
}

static void EDGE_FN(conv_sequence)(const edge_conv_args *a, int64_t i, const float *weight, int64_t first,
                                   int64_t count) {
    const edge_sequences *s = &a->sequences;
    const int64_t padded = (count + EDGE_LANES - 1) / EDGE_LANES * EDGE_LANES;
    const int32_t width = a->width, taps = width - 1;
    float ring[EDGE_CONV_WIDTH * EDGE_CONV_TILE], out[EDGE_CONV_TILE];
    float *state = s->state + s->slots[i] * s->state_stride + first * taps;
    memset(ring, 0, sizeof(float) * (size_t)(width * EDGE_CONV_TILE));
    EDGE_FN(conv_spread)(ring, state, count, taps);
    int32_t newest = taps - 1;
    for (int64_t token = s->query_start[i]; token < s->query_start[i + 1]; token++) {
        newest = newest + 1 == width ? 0 : newest + 1;
        if (token + EDGE_CONV_AHEAD < s->query_start[i + 1]) {
            edge_prefetch_row(&a->x, token + EDGE_CONV_AHEAD, first, count);
            edge_prefetch_row(&a->out, token + EDGE_CONV_AHEAD, first, count);
        }
        EDGE_FN(read_row)(ring + newest * EDGE_CONV_TILE, &a->x, token, first, count, padded);
        EDGE_FN(conv_any)(weight, ring, out, padded, width, newest, a->silu);
        EDGE_FN(write_row)(&a->out, token, first, out, count);
        float *kept = edge_checkpoint(s, i, token, first * taps);
        if (kept != NULL) EDGE_FN(conv_gather)(kept, ring, count, taps, newest);
    }
    EDGE_FN(conv_gather)(state, ring, count, taps, newest);
}

/* Task = EDGE_CONV_TILE channels, all sequences. */
static void EDGE_FN(conv_tasks)(const void *opaque, int64_t begin, int64_t end) {
    const edge_conv_args *a = (const edge_conv_args *)opaque;
    float weight[(EDGE_CONV_WIDTH + 1) * EDGE_CONV_TILE]; /* taps, then the bias */
    for (int64_t tile = begin; tile < end; tile++) {
        const int64_t first = tile * EDGE_CONV_TILE, left = a->channels - first;
        const int64_t count = left < EDGE_CONV_TILE ? left : EDGE_CONV_TILE;
        float *bias = weight + a->width * EDGE_CONV_TILE;
        memset(weight, 0, sizeof weight);
        EDGE_FN(conv_spread)(weight, a->weight + first * a->width, count, a->width);
        if (a->bias != NULL) memcpy(bias, a->bias + first, sizeof(float) * (size_t)count);
        for (int32_t i = 0; i < a->sequences.num_sequences; i++)
            if (a->sequences.query_start[i + 1] > a->sequences.query_start[i])
                EDGE_FN(conv_sequence)(a, i, weight, first, count);
    }
}
