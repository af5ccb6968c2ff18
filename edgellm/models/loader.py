"""`load_model`: from a path to fused weights in memory, with a fingerprint of the checkpoint."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from edgellm.errors import InvalidArgumentError, UnsupportedModelError, WeightFileError
from edgellm.log import get_logger
from edgellm.models.config import ModelConfig, config_from_hf, read_config_json
from edgellm.models.fields import naming
from edgellm.models.gguf_loader import GgufSource
from edgellm.models.packed_layers import why_expanded
from edgellm.models.quantised_source import QuantisedSource
from edgellm.models.safetensors_source import SafetensorsSource
from edgellm.models.weights import ModelWeights, load_weights, weight_bytes

if TYPE_CHECKING:
    from edgellm.models.weights import ProgressCallback, WeightSource

logger = get_logger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory.

    Attributes:
        fingerprint: hex digest of what the checkpoint computes (not of its file names or times); part of the
            identity of cached state.
    """

    config: ModelConfig
    weights: ModelWeights
    path: Path
    fingerprint: str

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.dtype


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    on_progress: ProgressCallback | None = None,
) -> LoadedModel:
    """Load a Hugging Face directory or a `.gguf` file.

    Args:
        dtype: "float32", "bfloat16", "float16" (not on a CPU) or "auto": float32 on a CPU, else the file's own
            dtype, and bfloat16 for quantised files.
        on_progress: called as (bytes read so far, bytes in all, tensor name).
    Raises:
        UnsupportedModelError: architecture, option or tensor type that is not supported.
        WeightFileError: a file is missing, truncated or damaged.
        InvalidArgumentError: unknown dtype, or the weights do not fit on the device.
    """
    path = Path(path)
    target = torch.device(device)
    with naming(path):
        config, source = open_checkpoint(path)
        chosen = _choose_dtype(dtype, config, target)
        packed = target.type == "cuda" and stays_packed(config, source, chosen)
        if target.type == "cuda":
            _check_memory(config, chosen, target, packed=packed)
        with torch.inference_mode():
            weights = load_weights(config, source, dtype=chosen, device=target, on_progress=on_progress, packed=packed)
        return LoadedModel(config, weights, path, fingerprint(config, source, chosen))


def open_checkpoint(path: Path) -> tuple[ModelConfig, WeightSource]:
    """The config and the tensors of a checkpoint, nothing read yet but headers.

    Raises:
        WeightFileError: nothing is at `path`.
    """
    if path.is_dir():
        config = config_from_hf(read_config_json(path), source=path / "config.json")
        tensors = _open_tensors(path, config)
        return config.settled(tensors.specs()), tensors
    if not path.exists():
        raise WeightFileError(f"no model at {path}; give a Hugging Face directory or a .gguf file")
    if path.suffix != ".gguf":
        raise UnsupportedModelError(f"{path} is neither a directory nor a .gguf file; those two are supported")
    source = GgufSource(path)
    return source.config, source


def _open_tensors(path: Path, config: ModelConfig) -> WeightSource:
    return SafetensorsSource(path) if config.quantisation is None else QuantisedSource(path, config.quantisation)


def stays_packed(config: ModelConfig, source: WeightSource, dtype: torch.dtype) -> bool:
    """Whether linear layers stay in the bits that they are stored in, on a device with kernels for them."""
    if config.quantisation is None:
        return False
    reason = why_expanded(config, dtype, source.specs())
    if reason:
        logger.warning("the quantised weights are expanded to %s: %s", str(dtype).removeprefix("torch."), reason)
    return not reason


def fingerprint(config: ModelConfig, source: WeightSource, dtype: torch.dtype) -> str:
    """SHA-256 over config, compute dtype, and name, shape, stored dtype and sampled bytes of every tensor.

    The sample is the head, middle and tail of each tensor: fine-tuning moves all of them, and reading a whole
    checkpoint twice would double the start-up time.
    """
    digest = hashlib.sha256(repr((config, str(dtype))).encode())
    for name, spec in sorted(source.specs().items()):
        digest.update(repr((name, spec.shape, spec.dtype, spec.num_bytes)).encode())
        digest.update(source.sample(name, _SAMPLE_BYTES))
    return digest.hexdigest()


def _choose_dtype(dtype: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        # CPUs without bfloat16 arithmetic emulate it slowly, and float32 is the exact reference.
        return torch.float32 if device.type == "cpu" else DTYPES.get(config.weight_dtype, torch.bfloat16)
    if dtype not in DTYPES:
        raise InvalidArgumentError(f"dtype is {dtype!r}; supported: auto, {', '.join(DTYPES)}")
    if device.type == "cpu" and DTYPES[dtype] == torch.float16:
        raise InvalidArgumentError("dtype is 'float16', which needs a CUDA device; on a CPU use float32 or bfloat16")
    return DTYPES[dtype]


def _check_memory(config: ModelConfig, dtype: torch.dtype, device: torch.device, *, packed: bool) -> None:
    """Refuse weights that do not fit, before the device is asked for the memory."""
    from edgellm.runtime.cuda_memory import check_weights_fit
    from edgellm.runtime.device_cuda import CudaDevice

    check_weights_fit(weight_bytes(config, dtype, packed=packed), CudaDevice(device), dtype)
