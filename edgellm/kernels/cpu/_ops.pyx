"""Thin bridge from addresses and sizes to the C kernels; the wrappers beside it check every argument.

Each call releases the GIL.  Addresses come from `Tensor.data_ptr()` or `ndarray.ctypes.data`; the caller keeps the
memory alive for the length of the call.
"""

from libc.stdint cimport int32_t, int64_t, uintptr_t


cdef extern from "paged_attention.h" nogil:
    ctypedef struct edge_kv_shape:
        int32_t num_kv_heads
        int32_t page_size
        int32_t head_dim
        int32_t is_bf16

    ctypedef struct edge_attention_args:
        edge_kv_shape kv
        const void *pages
        const void *query
        void *out
        const int64_t *query_rows
        const int32_t *page_rows
        const int64_t *table_start
        const int32_t *lengths
        const int32_t *segment_start
        float *scratch
        int64_t query_stride
        int64_t out_stride
        int32_t num_rows
        int32_t num_heads
        int32_t rows_bf16
        float scale

    ctypedef struct edge_write_args:
        edge_kv_shape kv
        void *pages
        const void *key
        const void *value
        const int64_t *offsets
        int64_t row_stride
        int64_t num_tokens
        int32_t rows_bf16

    ctypedef struct edge_gather_args:
        edge_kv_shape kv
        const void *pages
        void *out
        const int32_t *page_ids
        int64_t length

    const int EDGE_SEGMENT
    void edge_paged_attention(const edge_attention_args *args, int num_threads) noexcept
    void edge_write_kv(const edge_write_args *args, int num_threads) noexcept
    void edge_gather_kv(const edge_gather_args *args, int num_threads) noexcept


cdef extern from "elementwise.h" nogil:
    ctypedef struct edge_norm_args:
        const void *inp "in"
        void *out
        const float *weight
        int64_t num_rows
        int64_t width
        int32_t is_bf16
        float eps

    ctypedef struct edge_rope_args:
        void *rows
        const float *angles
        const float *query_norm
        const float *key_norm
        int64_t num_tokens
        int64_t row_stride
        int32_t num_heads
        int32_t num_kv_heads
        int32_t head_dim
        int32_t is_bf16
        float eps

    ctypedef struct edge_silu_args:
        const void *gate_up
        void *out
        int64_t num_rows
        int64_t width
        int32_t is_bf16

    void edge_rms_norm(const edge_norm_args *args, int num_threads) noexcept
    void edge_rope(const edge_rope_args *args, int num_threads) noexcept
    void edge_silu_mul(const edge_silu_args *args, int num_threads) noexcept


cdef extern from "skinny_linear.h" nogil:
    ctypedef struct edge_linear_args:
        const void *x
        const void *weight
        const void *bias
        void *out
        int64_t num_rows
        int64_t in_width
        int64_t out_width
        int32_t is_bf16
        int32_t accumulate
        int32_t out_f32

    int edge_skinny_rows() noexcept
    void edge_skinny_linear(const edge_linear_args *args, int num_threads) noexcept


cdef extern from "parallel.h" nogil:
    int edge_shares_threads(const char *library) noexcept


cdef extern from "isa.h" nogil:
    int edge_isa_level() noexcept


SEGMENT_TOKENS = EDGE_SEGMENT
SKINNY_ROWS = edge_skinny_rows()


def shares_threads(bytes library not None):
    """True if the kernels run on the OpenMP threads of the loaded library."""
    return edge_shares_threads(library) != 0


def isa_name():
    """The instruction set in use: "portable", "avx2" or "avx512"."""
    return ("portable", "avx2", "avx512")[edge_isa_level()]


cdef edge_kv_shape kv_shape(tuple shape, bint is_bf16) except *:
    cdef edge_kv_shape kv
    kv.num_kv_heads, kv.page_size, kv.head_dim = shape
    kv.is_bf16 = is_bf16
    return kv


def write_kv(uintptr_t pages, tuple shape, bint is_bf16, uintptr_t key, uintptr_t value, int64_t row_stride,
             bint rows_bf16, uintptr_t offsets, int64_t num_tokens, int num_threads):
    """Store K and V rows at their offsets; `shape` is (kv heads, page size, head_dim)."""
    cdef edge_write_args args
    args.kv = kv_shape(shape, is_bf16)
    args.pages = <void *>pages
    args.key = <const void *>key
    args.value = <const void *>value
    args.offsets = <const int64_t *>offsets
    args.row_stride = row_stride
    args.num_tokens = num_tokens
    args.rows_bf16 = rows_bf16
    with nogil:
        edge_write_kv(&args, num_threads)


def gather_kv(uintptr_t pages, tuple shape, bint is_bf16, uintptr_t page_ids, int64_t length, uintptr_t out,
              int num_threads):
    """Copy `length` tokens of the listed pages to `out` (2, kv heads, length, head_dim)."""
    cdef edge_gather_args args
    args.kv = kv_shape(shape, is_bf16)
    args.pages = <const void *>pages
    args.out = <void *>out
    args.page_ids = <const int32_t *>page_ids
    args.length = length
    with nogil:
        edge_gather_kv(&args, num_threads)


cdef class AttentionRows:
    """The query rows of one step, prepared once and run for every layer.

    The arrays and the scratch belong to the caller, which keeps them alive.
    """

    cdef edge_attention_args args
    cdef int num_threads

    def __cinit__(self, tuple shape, bint is_bf16, uintptr_t query_rows, uintptr_t page_rows, uintptr_t table_start,
                  uintptr_t lengths, uintptr_t segment_start, uintptr_t scratch, int32_t num_rows, int32_t num_heads,
                  bint rows_bf16, float scale, int num_threads):
        self.args.kv = kv_shape(shape, is_bf16)
        self.args.query_rows = <const int64_t *>query_rows
        self.args.page_rows = <const int32_t *>page_rows
        self.args.table_start = <const int64_t *>table_start
        self.args.lengths = <const int32_t *>lengths
        self.args.segment_start = <const int32_t *>segment_start
        self.args.scratch = <float *>scratch
        self.args.num_rows = num_rows
        self.args.num_heads = num_heads
        self.args.rows_bf16 = rows_bf16
        self.args.scale = scale
        self.num_threads = num_threads

    def run(self, uintptr_t pages, uintptr_t query, int64_t query_stride, uintptr_t out, int64_t out_stride):
        """Attend over one layer's pages."""
        cdef edge_attention_args args = self.args
        args.pages = <const void *>pages
        args.query = <const void *>query
        args.query_stride = query_stride
        args.out = <void *>out
        args.out_stride = out_stride
        with nogil:
            edge_paged_attention(&args, self.num_threads)


def rms_norm(uintptr_t x, uintptr_t weight, uintptr_t out, int64_t num_rows, int64_t width, bint is_bf16, float eps,
             int num_threads):
    """out = x / rms(x) * weight."""
    cdef edge_norm_args args
    args.inp = <const void *>x
    args.out = <void *>out
    args.weight = <const float *>weight
    args.num_rows = num_rows
    args.width = width
    args.is_bf16 = is_bf16
    args.eps = eps
    with nogil:
        edge_rms_norm(&args, num_threads)


def rope(uintptr_t rows, uintptr_t angles, uintptr_t query_norm, uintptr_t key_norm, int64_t num_tokens,
         int64_t row_stride, int32_t num_heads, int32_t num_kv_heads, int32_t head_dim, bint is_bf16, float eps,
         int num_threads):
    """Norm (where given) and rotate query and key heads in place."""
    cdef edge_rope_args args
    args.rows = <void *>rows
    args.angles = <const float *>angles
    args.query_norm = <const float *>query_norm
    args.key_norm = <const float *>key_norm
    args.num_tokens = num_tokens
    args.row_stride = row_stride
    args.num_heads = num_heads
    args.num_kv_heads = num_kv_heads
    args.head_dim = head_dim
    args.is_bf16 = is_bf16
    args.eps = eps
    with nogil:
        edge_rope(&args, num_threads)


def silu_mul(uintptr_t gate_up, uintptr_t out, int64_t num_rows, int64_t width, bint is_bf16, int num_threads):
    """out = silu(gate) * up."""
    cdef edge_silu_args args
    args.gate_up = <const void *>gate_up
    args.out = <void *>out
    args.num_rows = num_rows
    args.width = width
    args.is_bf16 = is_bf16
    with nogil:
        edge_silu_mul(&args, num_threads)


def skinny_linear(uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t out, int64_t num_rows, int64_t in_width,
                  int64_t out_width, bint is_bf16, bint accumulate, bint out_f32, int num_threads):
    """out = x W^T + bias, added to what out holds if `accumulate`."""
    cdef edge_linear_args args
    args.x = <const void *>x
    args.weight = <const void *>weight
    args.bias = <const void *>bias
    args.out = <void *>out
    args.num_rows = num_rows
    args.in_width = in_width
    args.out_width = out_width
    args.is_bf16 = is_bf16
    args.accumulate = accumulate
    args.out_f32 = out_f32
    with nogil:
        edge_skinny_linear(&args, num_threads)
