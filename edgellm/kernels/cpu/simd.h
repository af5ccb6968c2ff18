/* EDGE_LANES floats as one value, for the instruction set that is active where this file is included.
 *
 * Included once per instruction set: every name goes through EDGE_FN, which appends the set's suffix.
 */
#include <stdint.h>
#include <string.h>

#ifndef EDGE_INLINE
#define EDGE_INLINE static inline __attribute__((always_inline, unused))
#define EDGE_V EDGE_FN(v)
#define EDGE_I EDGE_FN(i)
#define EDGE_U EDGE_FN(u)
#define EDGE_H EDGE_FN(h)
#endif

typedef float EDGE_V __attribute__((vector_size(4 * EDGE_LANES)));
typedef int32_t EDGE_I __attribute__((vector_size(4 * EDGE_LANES)));
typedef uint32_t EDGE_U __attribute__((vector_size(4 * EDGE_LANES)));
typedef uint16_t EDGE_H __attribute__((vector_size(2 * EDGE_LANES)));
typedef float EDGE_FN(v_unaligned) __attribute__((vector_size(4 * EDGE_LANES), aligned(4), may_alias));
typedef uint16_t EDGE_FN(h_unaligned) __attribute__((vector_size(2 * EDGE_LANES), aligned(2), may_alias));

EDGE_INLINE float EDGE_FN(bf16_to_float)(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

/* Round to nearest even; NaN stays NaN. */
EDGE_INLINE uint16_t EDGE_FN(float_to_bf16)(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

EDGE_INLINE void EDGE_FN(load_f32)(EDGE_V *out, const float *p) { *out = *(const EDGE_FN(v_unaligned) *)p; }

EDGE_INLINE void EDGE_FN(load_bf16)(EDGE_V *out, const uint16_t *p) {
    EDGE_H half = *(const EDGE_FN(h_unaligned) *)p;
    EDGE_U wide = __builtin_convertvector(half, EDGE_U) << 16;
    *out = (EDGE_V)wide;
}

EDGE_INLINE void EDGE_FN(store_f32)(float *p, const EDGE_V *value) { *(EDGE_FN(v_unaligned) *)p = *value; }

EDGE_INLINE void EDGE_FN(store_bf16)(uint16_t *p, const EDGE_V *value) {
    EDGE_U bits = (EDGE_U)*value;
    EDGE_U nan = (EDGE_U)((bits & 0x7fffffffu) > 0x7f800000u);
    EDGE_U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    EDGE_U kept = ((bits >> 16) | 0x40u) & nan;
    *(EDGE_FN(h_unaligned) *)p = __builtin_convertvector((rounded & ~nan) | kept, EDGE_H);
}

EDGE_INLINE float EDGE_FN(sum)(const EDGE_V *value) {
    float lanes[EDGE_LANES];
    memcpy(lanes, value, sizeof lanes);
    for (int width = EDGE_LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

/* exp(x) within 2 units in the last place for x in [-87, 88]; clamped outside; NaN stays NaN. */
EDGE_INLINE void EDGE_FN(exp)(EDGE_V *value) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    EDGE_V x = *value;
    EDGE_I low = x < -87.0f, high = x > 88.0f;
    x = (EDGE_V)(((EDGE_I)x & ~(low | high)) | ((EDGE_I)((EDGE_V){0} - 87.0f) & low) |
                   ((EDGE_I)((EDGE_V){0} + 88.0f) & high));
    EDGE_V shifted = x * 1.44269504f + magic;
    EDGE_V n = shifted - magic;
    EDGE_I exponent = ((EDGE_I)shifted - 0x4b400000) << 23;
    EDGE_V r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    EDGE_V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const EDGE_I nan = *value != *value;
    *value = (EDGE_V)((((EDGE_I)p + exponent) & ~nan) | ((EDGE_I)*value & nan));
}
