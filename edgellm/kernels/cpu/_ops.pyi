SEGMENT_TOKENS: int
SKINNY_ROWS: int

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
        lengths: int,
        segment_start: int,
        scratch: int,
        num_rows: int,
        num_heads: int,
        rows_bf16: bool,
        scale: float,
        num_threads: int,
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
    is_bf16: bool,
    eps: float,
    num_threads: int,
) -> None: ...
def silu_mul(gate_up: int, out: int, num_rows: int, width: int, is_bf16: bool, num_threads: int) -> None: ...
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
