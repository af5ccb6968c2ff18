"""Where a GPU's memory goes: weights, scratch, graphs, checkpoints, and what is left for pages and kept state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm.errors import InvalidArgumentError
from edgellm.memory import format_bytes
from edgellm.models.device_buffers import GraphScratch
from edgellm.runtime.cuda_graphs import MAX_GRAPHS
from edgellm.runtime.recurrent_state import state_bytes
from edgellm.runtime.step_buckets import StepBuckets

if TYPE_CHECKING:
    import torch

    from edgellm.models.device_step import DeviceFamilyGraph
    from edgellm.runtime.device_cuda import CudaDevice
    from edgellm.runtime.executor_cuda import ExecutorLimits

# Of what weights and scratch leave.  Where the host lives in the same memory, more stays for it.
DEFAULT_POOL_FRACTION = 0.85
DEFAULT_UNIFIED_POOL_FRACTION = 0.6

_LIBRARY_BYTES = 192 << 20  # cuBLAS workspaces of two streams, those of attention, loaded kernels
_SAMPLING_COPIES = 4  # of the logits rows: edited, filtered, sorted, ids
_DRAFT_ROWS = 3  # hidden rows of a token that a draft may ask for, one a layer
GRAPH_BYTES = 1 << 20  # one captured graph of a step, its kernel nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """A GPU's memory before the KV pool is allocated, in bytes.

    Attributes:
        free_bytes: what an allocation could use now, with the weights loaded.
        scratch_bytes: reserved for a step's rows, logits, sampling and the libraries.
        graph_bytes: reserved for captured graphs.
        verify_bytes: recurrent state after each token of a verification.
        draft_bytes: what drafts take beside their pages: rows that wait, inputs, graphs and results of their passes.
    """

    device_name: str
    weights_bytes: int
    free_bytes: int
    scratch_bytes: int
    graph_bytes: int
    verify_bytes: int = 0
    draft_bytes: int = 0
    is_unified: bool = False

    @property
    def pool_bytes(self) -> int:
        """The most that pages, live recurrent state and kept checkpoints of it can have."""
        taken = self.scratch_bytes + self.graph_bytes + self.verify_bytes + self.draft_bytes
        return max(0, self.free_bytes - taken)

    @property
    def default_fraction(self) -> float:
        """Part of `pool_bytes` that the pool takes when nobody says how much."""
        return DEFAULT_UNIFIED_POOL_FRACTION if self.is_unified else DEFAULT_POOL_FRACTION

    def describe(self, weights_format: str = "") -> str:
        """One line beside the pool's own.

        Args:
            weights_format: how packed weights are stored, see `packed_layers.describe_packed`.
        """
        packed = f" ({weights_format})" if weights_format else ""
        verify = f", state while verifying {format_bytes(self.verify_bytes)}" if self.verify_bytes else ""
        drafts = f", drafts beside their pages {format_bytes(self.draft_bytes)}" if self.draft_bytes else ""
        shared = ", shared with the host" if self.is_unified else ""
        return (
            f"{self.device_name}: weights {format_bytes(self.weights_bytes)}{packed}, scratch "
            f"{format_bytes(self.scratch_bytes)}, graphs {format_bytes(self.graph_bytes)}{verify}{drafts}, "
            f"{format_bytes(self.free_bytes)} free after the weights{shared}"
        )


def measure(
    device: CudaDevice,
    graph: DeviceFamilyGraph,
    dtype: torch.dtype,
    weights_bytes: int,
    limits: ExecutorLimits,
    large_step_option: str = "",
    draft_bytes: int = 0,
) -> DeviceMemory:
    """The memory of a device that holds the weights already.

    Args:
        large_step_option: the option that made `limits.step_tokens` larger than it is without, for the message.
        draft_bytes: see `DeviceMemory`.
    Raises:
        InvalidArgumentError: nothing is left for the KV pool.
    """
    memory = DeviceMemory(
        device_name=device.name,
        weights_bytes=weights_bytes,
        free_bytes=device.free_memory_bytes(),
        scratch_bytes=scratch_bytes(graph, dtype, limits),
        graph_bytes=graph_bytes(limits),
        verify_bytes=limits.checkpoint_rows * state_bytes(graph.config.recurrent_pieces),
        draft_bytes=draft_bytes,
        is_unified=device.is_integrated,
    )
    if not memory.pool_bytes:
        drafts = " or num_drafts of the speculation" if limits.verify_tokens > 1 else ""
        lower = f"max_batch_size (now {limits.num_slots}){drafts}"
        if large_step_option:
            lower = f"{large_step_option}, then {lower}"
        raise InvalidArgumentError(
            f"nothing is left for the KV pool on {memory.describe()}; lower {lower}, load a smaller dtype or model, or "
            "end other programs on the GPU"
        )
    return memory


def scratch_bytes(graph: DeviceFamilyGraph, dtype: torch.dtype, limits: ExecutorLimits) -> int:
    """Bytes beside weights and pool that the largest ordinary step takes.

    It is sized by the step's token budget, never by batch x context: prompts run in chunks.
    """
    largest = limits.largest_step()
    logits = largest.logits
    rows = GraphScratch.bytes_for(
        graph,
        dtype,
        tokens=largest.tokens,
        rows=largest.rows,
        logits=logits,
        hidden_width=_DRAFT_ROWS * graph.config.hidden_size if limits.verify_tokens > 1 else 0,
    )
    return rows + logits * graph.config.vocab_size * 4 * _SAMPLING_COPIES + _LIBRARY_BYTES


def graph_bytes(limits: ExecutorLimits) -> int:
    """Bytes that captured graphs may take: those made at start, and twice as many that come up later."""
    buckets = StepBuckets.of(limits.num_slots, decode_apart=True, verify_tokens=limits.verify_tokens)
    at_start = len(buckets.at_start()) + len(buckets.verified_at_start())
    return min(MAX_GRAPHS, 3 * at_start) * GRAPH_BYTES


def check_weights_fit(needed_bytes: int, device: CudaDevice, dtype: torch.dtype) -> None:
    """Refuse weights that will not fit, before anything is read.

    Raises:
        InvalidArgumentError: names both sizes and what to change.
    """
    free = device.free_memory_bytes()
    if needed_bytes > free:
        raise InvalidArgumentError(
            f"the weights need {format_bytes(needed_bytes)} in {str(dtype).removeprefix('torch.')}, "
            f"{format_bytes(free)} are free on {device.name}; load them with dtype='bfloat16' or 'float16' if that is "
            "smaller, choose a smaller model or another device, or end other programs on the GPU"
        )
