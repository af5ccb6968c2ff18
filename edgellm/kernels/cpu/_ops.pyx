"""Thin bridge from addresses and sizes to the C kernels; the wrappers beside it check every argument.

Each call releases the GIL.  Addresses come from `Tensor.data_ptr()` or `ndarray.ctypes.data`; the caller keeps the
memory alive for the length of the call.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uintptr_t


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
        const int32_t *starts
        const int32_t *lengths
        const int32_t *tree_start
        const uint32_t *tree_mask
        const int32_t *segment_start
        const int32_t *order
        float *scratch
        int64_t query_stride
        int64_t out_stride
        int32_t num_rows
        int32_t num_heads
        int32_t tree_words
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
        int32_t rotary_dim
        int32_t is_bf16
        float eps

    ctypedef struct edge_silu_args:
        const void *gate_up
        void *out
        int64_t num_rows
        int64_t width
        int32_t is_bf16

    ctypedef struct edge_gelu_args:
        const void *gate
        const void *up
        void *out
        int64_t gate_stride
        int64_t up_stride
        int64_t num_rows
        int64_t width
        int32_t is_bf16

    void edge_rms_norm(const edge_norm_args *args, int num_threads) noexcept
    void edge_rope(const edge_rope_args *args, int num_threads) noexcept
    void edge_silu_mul(const edge_silu_args *args, int num_threads) noexcept
    void edge_gelu_mul(const edge_gelu_args *args, int num_threads) noexcept


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


cdef extern from "recurrent.h" nogil:
    ctypedef struct edge_sequences:
        const int32_t *query_start
        const int32_t *slots
        const int32_t *checkpoint_start
        float *state
        float *checkpoint
        int64_t state_stride
        int64_t checkpoint_stride
        int32_t num_sequences

    ctypedef struct edge_token_rows:
        void *at
        int64_t stride
        int32_t is_bf16


cdef extern from "causal_conv.h" nogil:
    ctypedef struct edge_conv_args:
        edge_sequences sequences
        edge_token_rows x
        edge_token_rows out
        const float *weight
        const float *bias
        int64_t channels
        int32_t width
        int32_t silu

    const int EDGE_CONV_WIDTH
    void edge_causal_conv(const edge_conv_args *args, int num_threads) noexcept


cdef extern from "gated_delta.h" nogil:
    ctypedef struct edge_delta_args:
        edge_sequences sequences
        edge_token_rows q
        edge_token_rows k
        edge_token_rows v
        edge_token_rows out
        edge_token_rows decay
        edge_token_rows beta
        int32_t key_heads
        int32_t heads
        int32_t key_dim
        int32_t value_dim
        int32_t l2norm
        float scale

    const int EDGE_MAX_KEY_DIM
    void edge_gated_delta(const edge_delta_args *args, int num_threads) noexcept


cdef extern from "gates.h" nogil:
    ctypedef struct edge_gate_args:
        edge_token_rows x
        edge_token_rows gate
        int64_t num_rows
        int64_t width
        int32_t whole_rows
        int32_t silu

    ctypedef struct edge_delta_gates_args:
        edge_token_rows a
        edge_token_rows b
        const float *rate
        const float *bias
        float *decay
        float *beta
        int64_t num_rows
        int64_t heads

    void edge_gate(const edge_gate_args *args, int num_threads) noexcept
    void edge_delta_gates(const edge_delta_gates_args *args, int num_threads) noexcept


cdef extern from "experts.h" nogil:
    ctypedef struct edge_experts_args:
        const void *rows
        const void *gate_up
        const void *down
        const int64_t *chosen
        const float *shares
        float *total
        float *scratch
        int64_t num_rows
        int64_t count
        int64_t hidden
        int64_t inner
        int32_t is_bf16

    void edge_experts(const edge_experts_args *args, int num_threads) noexcept


cdef extern from "mamba2.h" nogil:
    ctypedef struct edge_mamba_args:
        edge_sequences sequences
        edge_token_rows x
        edge_token_rows b
        edge_token_rows c
        edge_token_rows out
        edge_token_rows dt
        const float *a
        const float *d
        int32_t groups
        int32_t heads
        int32_t head_dim
        int32_t state_dim

    const int EDGE_MAX_STATE_DIM
    void edge_mamba2(const edge_mamba_args *args, int num_threads) noexcept


cdef extern from "parallel.h" nogil:
    int edge_shares_threads(const char *library) noexcept


cdef extern from "isa.h" nogil:
    int edge_isa_level() noexcept


SEGMENT_TOKENS = EDGE_SEGMENT
SKINNY_ROWS = edge_skinny_rows()
MAX_CONV_WIDTH = EDGE_CONV_WIDTH
MAX_KEY_DIM = EDGE_MAX_KEY_DIM
MAX_STATE_DIM = EDGE_MAX_STATE_DIM


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
                  uintptr_t starts, uintptr_t lengths, uintptr_t segment_start, uintptr_t order, uintptr_t scratch,
                  int32_t num_rows, int32_t num_heads, bint rows_bf16, float scale, int num_threads,
                  uintptr_t tree_start=0, uintptr_t tree_mask=0, int32_t tree_words=0):
        self.args.kv = kv_shape(shape, is_bf16)
        self.args.query_rows = <const int64_t *>query_rows
        self.args.page_rows = <const int32_t *>page_rows
        self.args.table_start = <const int64_t *>table_start
        self.args.starts = <const int32_t *>starts
        self.args.lengths = <const int32_t *>lengths
        self.args.tree_start = <const int32_t *>tree_start
        self.args.tree_mask = <const uint32_t *>tree_mask
        self.args.tree_words = tree_words
        self.args.segment_start = <const int32_t *>segment_start
        self.args.order = <const int32_t *>order
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
         int64_t row_stride, int32_t num_heads, int32_t num_kv_heads, int32_t head_dim, int32_t rotary_dim,
         bint is_bf16, float eps, int num_threads):
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
    args.rotary_dim = rotary_dim
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


def gelu_mul(uintptr_t gate, int64_t gate_stride, uintptr_t up, int64_t up_stride, uintptr_t out, int64_t num_rows,
             int64_t width, bint is_bf16, int num_threads):
    """out = gelu(gate) * up, tanh form."""
    cdef edge_gelu_args args
    args.gate = <const void *>gate
    args.up = <const void *>up
    args.out = <void *>out
    args.gate_stride = gate_stride
    args.up_stride = up_stride
    args.num_rows = num_rows
    args.width = width
    args.is_bf16 = is_bf16
    with nogil:
        edge_gelu_mul(&args, num_threads)


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


cdef edge_sequences sequences_of(tuple values) except *:
    cdef edge_sequences s
    cdef uintptr_t starts, slots, checkpoints, state, checkpoint
    starts, slots, checkpoints, s.num_sequences, state, s.state_stride, checkpoint, s.checkpoint_stride = values
    s.query_start = <const int32_t *>starts
    s.slots = <const int32_t *>slots
    s.checkpoint_start = <const int32_t *>checkpoints
    s.state = <float *>state
    s.checkpoint = <float *>checkpoint
    return s


cdef edge_token_rows rows_of(tuple values) except *:
    cdef edge_token_rows rows
    cdef uintptr_t at
    at, rows.stride, rows.is_bf16 = values
    rows.at = <void *>at
    return rows


def causal_conv(tuple sequences, tuple x, uintptr_t weight, uintptr_t bias, tuple out, int64_t channels, int32_t width,
                bint silu, int num_threads):
    """Depthwise convolution over the tokens of each sequence."""
    cdef edge_conv_args args
    args.sequences = sequences_of(sequences)
    args.x = rows_of(x)
    args.out = rows_of(out)
    args.weight = <const float *>weight
    args.bias = <const float *>bias
    args.channels = channels
    args.width = width
    args.silu = silu
    with nogil:
        edge_causal_conv(&args, num_threads)


def gated_delta(tuple sequences, tuple q, tuple k, tuple v, tuple decay, tuple beta, tuple out, tuple shape,
                bint l2norm, float scale, int num_threads):
    """The gated delta rule; `shape` is (key heads, heads, key_dim, value_dim)."""
    cdef edge_delta_args args
    args.sequences = sequences_of(sequences)
    args.q = rows_of(q)
    args.k = rows_of(k)
    args.v = rows_of(v)
    args.out = rows_of(out)
    args.decay = rows_of(decay)
    args.beta = rows_of(beta)
    args.key_heads, args.heads, args.key_dim, args.value_dim = shape
    args.l2norm = l2norm
    args.scale = scale
    with nogil:
        edge_gated_delta(&args, num_threads)


def gate(tuple x, tuple gate_rows, int64_t num_rows, int64_t width, bint whole_rows, bint silu, int num_threads):
    """x *= sigmoid or silu of the gate, in place."""
    cdef edge_gate_args args
    args.x = rows_of(x)
    args.gate = rows_of(gate_rows)
    args.num_rows = num_rows
    args.width = width
    args.whole_rows = whole_rows
    args.silu = silu
    with nogil:
        edge_gate(&args, num_threads)


def delta_gates(tuple a, tuple b, uintptr_t rate, uintptr_t bias, uintptr_t decay, uintptr_t beta, int64_t num_rows,
                int64_t heads, int num_threads):
    """Decay and step size of a gated delta net."""
    cdef edge_delta_gates_args args
    args.a = rows_of(a)
    args.b = rows_of(b)
    args.rate = <const float *>rate
    args.bias = <const float *>bias
    args.decay = <float *>decay
    args.beta = <float *>beta
    args.num_rows = num_rows
    args.heads = heads
    with nogil:
        edge_delta_gates(&args, num_threads)


def experts(uintptr_t rows, uintptr_t gate_up, uintptr_t down, uintptr_t chosen, uintptr_t shares, uintptr_t total,
            uintptr_t scratch, tuple shape, bint is_bf16, int num_threads):
    """Routed experts of few rows; `shape` is (rows, experts of a row, hidden, inner)."""
    cdef edge_experts_args args
    args.rows = <const void *>rows
    args.gate_up = <const void *>gate_up
    args.down = <const void *>down
    args.chosen = <const int64_t *>chosen
    args.shares = <const float *>shares
    args.total = <float *>total
    args.scratch = <float *>scratch
    args.num_rows, args.count, args.hidden, args.inner = shape
    args.is_bf16 = is_bf16
    with nogil:
        edge_experts(&args, num_threads)


def mamba2(tuple sequences, tuple x, tuple dt, uintptr_t a, tuple b, tuple c, uintptr_t d, tuple out, tuple shape,
           int num_threads):
    """The selective scan; `shape` is (groups, heads, head_dim, state_dim)."""
    cdef edge_mamba_args args
    args.sequences = sequences_of(sequences)
    args.x = rows_of(x)
    args.b = rows_of(b)
    args.c = rows_of(c)
    args.out = rows_of(out)
    args.dt = rows_of(dt)
    args.a = <const float *>a
    args.d = <const float *>d
    args.groups, args.heads, args.head_dim, args.state_dim = shape
    with nogil:
        edge_mamba2(&args, num_threads)
