from typing import TypeAlias

SEGMENT_TOKENS: int
SKINNY_ROWS: int
MAX_CONV_WIDTH: int
MAX_KEY_DIM: int
MAX_STATE_DIM: int

# Addresses of query_start, slots, checkpoint_start; how many sequences; address and row stride of state, of checkpoint.
Sequences: TypeAlias = tuple[int, int, int, int, int, int, int, int]
# Address, row stride, whether bfloat16.
TokenRows: TypeAlias = tuple[int, int, bool]

def shares_threads(library: bytes) -> bool: ...
def isa_name() -> str: ...
def write_kv(
    pages: int,
    shape: tuple[int, int, int],
    is_bf16: bool,
    key: int,
    value: int,
    row_stride: int,
    rows_bf16: bool,
    offsets: int,
    num_tokens: int,
    num_threads: int,
) -> None: ...
def gather_kv(
    pages: int, shape: tuple[int, int, int], is_bf16: bool, page_ids: int, length: int, out: int, num_threads: int
) -> None: ...

class AttentionRows:
    def __init__(
        self,
        shape: tuple[int, int, int],
        is_bf16: bool,
        query_rows: int,
        page_rows: int,
        table_start: int,
        starts: int,
        lengths: int,
        segment_start: int,
        order: int,
        scratch: int,
        num_rows: int,
        num_heads: int,
        rows_bf16: bool,
        scale: float,
        num_threads: int,
        tree_start: int = 0,
        tree_mask: int = 0,
        tree_words: int = 0,
    ) -> None: ...
    def run(self, pages: int, query: int, query_stride: int, out: int, out_stride: int) -> None: ...

def rms_norm(
    x: int, weight: int, out: int, num_rows: int, width: int, is_bf16: bool, eps: float, num_threads: int
) -> None: ...
def rope(
    rows: int,
    angles: int,
    query_norm: int,
    key_norm: int,
    num_tokens: int,
    row_stride: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    is_bf16: bool,
    eps: float,
    num_threads: int,
) -> None: ...
def silu_mul(gate_up: int, out: int, num_rows: int, width: int, is_bf16: bool, num_threads: int) -> None: ...
def gelu_mul(
    gate: int,
    gate_stride: int,
    up: int,
    up_stride: int,
    out: int,
    num_rows: int,
    width: int,
    is_bf16: bool,
    num_threads: int,
) -> None: ...
def skinny_linear(
    x: int,
    weight: int,
    bias: int,
    out: int,
    num_rows: int,
    in_width: int,
    out_width: int,
    is_bf16: bool,
    accumulate: bool,
    out_f32: bool,
    num_threads: int,
) -> None: ...
def causal_conv(
    sequences: Sequences,
    x: TokenRows,
    weight: int,
    bias: int,
    out: TokenRows,
    channels: int,
    width: int,
    silu: bool,
    num_threads: int,
) -> None: ...
def gated_delta(
    sequences: Sequences,
    q: TokenRows,
    k: TokenRows,
    v: TokenRows,
    decay: TokenRows,
    beta: TokenRows,
    out: TokenRows,
    shape: tuple[int, int, int, int],
    l2norm: bool,
    scale: float,
    num_threads: int,
) -> None: ...
def gate(
    x: TokenRows,
    gate_rows: TokenRows,
    num_rows: int,
    width: int,
    whole_rows: bool,
    silu: bool,
    num_threads: int,
) -> None: ...
def delta_gates(
    a: TokenRows,
    b: TokenRows,
    rate: int,
    bias: int,
    decay: int,
    beta: int,
    num_rows: int,
    heads: int,
    num_threads: int,
) -> None: ...
def experts(
    rows: int,
    gate_up: int,
    down: int,
    chosen: int,
    shares: int,
    total: int,
    scratch: int,
    shape: tuple[int, int, int, int],
    is_bf16: bool,
    num_threads: int,
) -> None: ...
def mamba2(
    sequences: Sequences,
    x: TokenRows,
    dt: TokenRows,
    a: int,
    b: TokenRows,
    c: TokenRows,
    d: int,
    out: TokenRows,
    shape: tuple[int, int, int, int],
    num_threads: int,
) -> None: ...
