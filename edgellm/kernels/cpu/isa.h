/* Compile one body file once per instruction set, and choose among the results when first called.
 *
 * EDGE_FN(name) is the name of a function in the set being compiled.  Usage:
 *     #define EDGE_BODY "my_body.h"
 *     #include "compile_isa.h"      defines my_kernel_base, and on x86 my_kernel_avx2, my_kernel_avx512
 *     EDGE_PICK(my_kernel)          the one this machine runs best
 */
#ifndef EDGE_ISA_H
#define EDGE_ISA_H

#define EDGE_PASTE2(a, b) a##_##b
#define EDGE_PASTE(a, b) EDGE_PASTE2(a, b)
#define EDGE_FN(name) EDGE_PASTE(edge_##name, EDGE_ISA)

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define EDGE_X86 1
#define EDGE_PICK(name)                                  \
    (edge_isa_level() == 2   ? edge_##name##_avx512      \
     : edge_isa_level() == 1 ? edge_##name##_avx2        \
                             : edge_##name##_base)
#else
#define EDGE_PICK(name) edge_##name##_base
#endif

/* 0 portable, 1 AVX2 with FMA, 2 AVX-512.  EDGELLM_CPU_ISA (0, 1, 2) lowers it, for tests. */
int edge_isa_level(void);

#endif
