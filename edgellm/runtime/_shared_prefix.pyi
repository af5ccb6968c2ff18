import numpy as np
import numpy.typing as npt

_Int32Array = npt.NDArray[np.int32]

MIN_SHARED_ROWS: int

def group_pays(rows: int, tokens: int, least_saved: int) -> bool: ...
def find_shared_prefixes(
    past_len: _Int32Array,
    state_index: _Int32Array,
    page_rows: _Int32Array,
    first: int,
    page_size: int,
    least_saved: int,
    shared: _Int32Array,
    members: _Int32Array,
    group_start: _Int32Array,
) -> int: ...
