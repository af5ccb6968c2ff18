"""Gates of CPU rows: a row times the activation of another, and the decay and step size of a gated delta net."""

from __future__ import annotations

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cpu import _ops
from edgellm.kernels.cpu.recurrent_check import ROW_DTYPES, check_token_rows, check_weight
from edgellm.kernels.cpu.threads import kernel_threads


def gate_(x: torch.Tensor, gate: torch.Tensor, *, silu: bool = False) -> None:
    """x *= sigmoid(gate), or silu(gate); an element's result does not depend on the number of rows.

    Args:
        x: (N, W) float32 or bfloat16; rows may lie apart.
        gate: (N, W), or (N, 1) for one factor a row; dtype of x; rows may lie apart.
    Effects: writes x.
    """
    num_rows, width = x.shape
    whole_rows = gate.shape[-1] == 1 and width != 1
    if gate.dtype != x.dtype:
        raise InvalidArgumentError(f"gate is {gate.dtype} and x {x.dtype}; one dtype is needed")
    x_rows = check_token_rows("x", x, (num_rows, width), ROW_DTYPES)
    gate_rows = check_token_rows("gate", gate, (num_rows, 1 if whole_rows else width), ROW_DTYPES)
    _ops.gate(x_rows, gate_rows, num_rows, width, whole_rows, silu, kernel_threads())


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> None:
    """decay = rate * softplus(a + bias) and beta = sigmoid(b) of a gated delta net.

    Args:
        a, b: (N, H) float32 or bfloat16, one dtype; rows may lie apart.
        rate, bias: (H,) float32; rate is negative.
        decay, beta: (N, H) float32, contiguous, to be filled.
    """
    num_rows, heads = a.shape
    if a.dtype != b.dtype:
        raise InvalidArgumentError(f"a is {a.dtype} and b {b.dtype}; one dtype is needed")
    a_rows = check_token_rows("a", a, (num_rows, heads), ROW_DTYPES)
    b_rows = check_token_rows("b", b, (num_rows, heads), ROW_DTYPES)
    check_weight("rate", rate, (heads,))
    check_weight("bias", bias, (heads,))
    check_weight("decay", decay, (num_rows, heads))
    check_weight("beta", beta, (num_rows, heads))
    _ops.delta_gates(
        a_rows,
        b_rows,
        rate.data_ptr(),
        bias.data_ptr(),
        decay.data_ptr(),
        beta.data_ptr(),
        num_rows,
        heads,
        kernel_threads(),
    )
