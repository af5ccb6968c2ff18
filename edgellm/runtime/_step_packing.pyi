import numpy as np
import numpy.typing as npt

_Int32Array = npt.NDArray[np.int32]

def is_sound(
    token_ids: _Int32Array,
    positions: _Int32Array,
    query_start: _Int32Array,
    query_len: _Int32Array,
    past_len: _Int32Array,
    state_index: _Int32Array,
    page_rows: _Int32Array,
    logits_index: npt.NDArray[np.int64],
    vocab_size: int,
    page_size: int,
    num_pages: int,
) -> bool: ...
def count_single_tail(query_len: _Int32Array) -> int: ...
def rows_are_current(
    query_len: _Int32Array,
    past_len: _Int32Array,
    state_index: _Int32Array,
    page_rows: _Int32Array,
    shadow: _Int32Array,
    page_size: int,
) -> bool: ...
def pack_step(
    token_ids: _Int32Array,
    positions: _Int32Array,
    query_len: _Int32Array,
    past_len: _Int32Array,
    state_index: _Int32Array,
    logits_index: npt.NDArray[np.int64],
    words: _Int32Array,
    exact_decode_rows: int,
    context_tokens: int,
    context_rows: int,
    decode_rows: int,
    logits: int,
) -> None: ...
def pack_changed_rows(
    query_len: _Int32Array,
    past_len: _Int32Array,
    state_index: _Int32Array,
    page_rows: _Int32Array,
    shadow: _Int32Array,
    page_size: int,
    words: _Int32Array,
    start: int,
    first: int,
) -> tuple[int, int, int]: ...
