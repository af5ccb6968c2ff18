import numpy as np
import numpy.typing as npt

def int64_of(ids: list[int]) -> npt.NDArray[np.int64] | None: ...
