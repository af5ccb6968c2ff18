"""Which experts serve a token, and by what share: the best of the router's scores (Shazeer et al. 2017)."""

from __future__ import annotations

import ctypes

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import address, check_rows, check_shape, check_vector

WARPS = 4  # kChooseWarps


class ChooseExpertsParams(ctypes.Structure):
    _fields_ = (
        ("scores", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("shares", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
        ("scores_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("normalise", ctypes.c_int32),
    )


SPEC = KernelSpec(
    name="choose_experts",
    entry="choose_experts",
    params=ChooseExpertsParams,
    params_name="ChooseExpertsParams",
    variants=(Variant((WARPS,), str(WARPS)),),
)


def launch_config(num_rows: int) -> LaunchConfig:
    """A warp a token, several a block."""
    return LaunchConfig((-(-num_rows // WARPS), 1, 1), (32 * WARPS, 1, 1))


def choose_experts(
    scores: torch.Tensor,
    shares: torch.Tensor,
    chosen: torch.Tensor,
    *,
    normalise: bool,
    factors: torch.Tensor | None = None,
) -> None:
    """The k experts of the highest scores, the highest first, and their shares by a softmax of the scores.

    Args:
        scores: (T, E) float32, CUDA; rows may be apart.
        shares: (T, k) float32, k at most E.
        chosen: (T, k) int32, all different; -1 where nothing but NaN is left.
        normalise: the softmax is over the chosen alone; otherwise over all experts.
        factors: (E,) float32, multiplied to the shares of the chosen, or None.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Effects: writes shares and chosen.  Ordering: torch's current stream; never waits.
    """
    check_rows("scores", scores, dtype=torch.float32)
    num_rows, num_experts = scores.shape
    check_shape("shares", shares, (num_rows, -1), torch.float32)
    count = shares.shape[1]
    if not 1 <= count <= num_experts:
        raise InvalidArgumentError(f"{count} of {num_experts} experts; at least one and no more than there are")
    check_shape("chosen", chosen, (num_rows, count), torch.int32)
    if factors is not None:
        check_vector("factors", factors, num_experts, torch.float32)
    if num_rows == 0:
        return
    params = ChooseExpertsParams(
        address(scores),
        address(factors),
        address(shares),
        address(chosen),
        scores.stride(0),
        num_rows,
        num_experts,
        count,
        normalise,
    )
    loader.kernel(SPEC, (WARPS,)).launch(launch_config(num_rows), params, pdl=True)
