/* No include guard: see isa.h.  Needs EDGE_BODY, the name of the body file. */
#define EDGE_ISA base
#define EDGE_LANES 4
#include EDGE_BODY
#undef EDGE_ISA
#undef EDGE_LANES

#ifdef EDGE_X86
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define EDGE_ISA avx2
#define EDGE_LANES 8
#include EDGE_BODY
#undef EDGE_ISA
#undef EDGE_LANES
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define EDGE_ISA avx512
#define EDGE_LANES 16
#include EDGE_BODY
#undef EDGE_ISA
#undef EDGE_LANES
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
#undef EDGE_BODY
