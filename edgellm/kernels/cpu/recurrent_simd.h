/* Vector helpers of the recurrent kernels, on top of simd.h and like it included once per instruction set.
 *
 * A kernel may reach one result by several loops (one token, many tokens), which must agree to the last bit.  So a
 * multiply-add is written as `fma`, and whether it rounds once is the instruction set's choice, never the compiler's.
 */
#include "simd.h"

#ifndef EDGE_RECURRENT_SIMD_H
#define EDGE_RECURRENT_SIMD_H
#if defined(EDGE_X86)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#endif

EDGE_INLINE void EDGE_FN(splat)(EDGE_V *out, float value) { *out = value - (EDGE_V){0}; }

/* sum += x * y */
EDGE_INLINE void EDGE_FN(fma)(EDGE_V *sum, const EDGE_V *x, const EDGE_V *y) {
#if EDGE_LANES == 16
    *sum = (EDGE_V)_mm512_fmadd_ps((__m512)*x, (__m512)*y, (__m512)*sum);
#elif EDGE_LANES == 8
    *sum = (EDGE_V)_mm256_fmadd_ps((__m256)*x, (__m256)*y, (__m256)*sum);
#elif defined(__aarch64__)
    *sum = (EDGE_V)vfmaq_f32((float32x4_t)*sum, (float32x4_t)*x, (float32x4_t)*y);
#else
    *sum += *x * *y;
#endif
}

/* Store what is not read again soon: where the address allows, past the caches, which saves reading the line first.
 * `stores_end` makes such stores visible to other threads. */
EDGE_INLINE void EDGE_FN(store_past)(float *p, const EDGE_V *value) {
#ifdef EDGE_X86
    if (((uintptr_t)p & (sizeof(EDGE_V) - 1)) == 0) {
#if EDGE_LANES == 16
        _mm512_stream_ps(p, (__m512)*value);
#elif EDGE_LANES == 8
        _mm256_stream_ps(p, (__m256)*value);
#else
        _mm_stream_ps(p, (__m128)*value);
#endif
        return;
    }
#endif
    EDGE_FN(store_f32)(p, value);
}

EDGE_INLINE void EDGE_FN(stores_end)(void) {
#ifdef EDGE_X86
    _mm_sfence();
#endif
}

/* Copy `count` elements past the caches. */
EDGE_INLINE void EDGE_FN(copy_past)(float *out, const float *in, int64_t count) {
    EDGE_V x;
    int64_t i = 0;
    for (; i + EDGE_LANES <= count; i += EDGE_LANES) {
        EDGE_FN(load_f32)(&x, in + i);
        EDGE_FN(store_past)(out + i, &x);
    }
    for (; i < count; i++) out[i] = in[i];
}

/* The first `count` lanes, zero behind them. */
EDGE_INLINE void EDGE_FN(load_part)(EDGE_V *out, const float *p, int64_t count) {
    float lanes[EDGE_LANES] = {0};
    for (int64_t i = 0; i < count && i < EDGE_LANES; i++) lanes[i] = p[i];
    memcpy(out, lanes, sizeof lanes);
}

EDGE_INLINE void EDGE_FN(store_part)(float *p, const EDGE_V *value, int64_t count) {
    float lanes[EDGE_LANES];
    memcpy(lanes, value, sizeof lanes);
    for (int64_t i = 0; i < count && i < EDGE_LANES; i++) p[i] = lanes[i];
}

/* out[r] = sum of the lanes of value[r], four at a time. */
EDGE_INLINE void EDGE_FN(sum4)(const EDGE_V value[4], float out[4]) {
#ifdef EDGE_X86
    __m128 part[4];
    for (int r = 0; r < 4; r++) {
#if EDGE_LANES == 16
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)value[r]),
                                          _mm512_extractf32x8_ps((__m512)value[r], 1));
        part[r] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif EDGE_LANES == 8
        part[r] = _mm_add_ps(_mm256_castps256_ps128((__m256)value[r]), _mm256_extractf128_ps((__m256)value[r], 1));
#else
        part[r] = (__m128)value[r];
#endif
    }
    _MM_TRANSPOSE4_PS(part[0], part[1], part[2], part[3]);
    _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(part[0], part[2]), _mm_add_ps(part[1], part[3])));
#else
    for (int r = 0; r < 4; r++) out[r] = EDGE_FN(sum)(&value[r]);
#endif
}

/* `count` elements of token rows as float32, filled with zeros up to `padded`.  Loops, because a memcpy of a few dozen
 * bytes of unknown number costs more than the arithmetic on them. */
EDGE_INLINE void EDGE_FN(read_row)(float *out, const edge_token_rows *rows, int64_t token, int64_t offset,
                                   int64_t count, int64_t padded) {
    const int64_t start = token * rows->stride + offset;
    const uint16_t *narrow = (const uint16_t *)rows->at + start;
    const float *wide = (const float *)rows->at + start;
    int64_t i = 0;
    EDGE_V x;
    for (; i + EDGE_LANES <= count; i += EDGE_LANES) {
        if (rows->is_bf16)
            EDGE_FN(load_bf16)(&x, narrow + i);
        else
            EDGE_FN(load_f32)(&x, wide + i);
        EDGE_FN(store_f32)(out + i, &x);
    }
    for (; i < count; i++) out[i] = rows->is_bf16 ? EDGE_FN(bf16_to_float)(narrow[i]) : wide[i];
    for (; i < padded; i++) out[i] = 0.0f;
}

/* `count` float32 elements into token rows. */
EDGE_INLINE void EDGE_FN(write_row)(const edge_token_rows *rows, int64_t token, int64_t offset, const float *in,
                                    int64_t count) {
    const int64_t start = token * rows->stride + offset;
    uint16_t *narrow = (uint16_t *)rows->at + start;
    float *wide = (float *)rows->at + start;
    int64_t i = 0;
    EDGE_V x;
    for (; i + EDGE_LANES <= count; i += EDGE_LANES) {
        EDGE_FN(load_f32)(&x, in + i);
        if (rows->is_bf16)
            EDGE_FN(store_bf16)(narrow + i, &x);
        else
            EDGE_FN(store_f32)(wide + i, &x);
    }
    for (; i < count; i++) {
        if (rows->is_bf16)
            narrow[i] = EDGE_FN(float_to_bf16)(in[i]);
        else
            wide[i] = in[i];
    }
}
