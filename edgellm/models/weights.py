"""Fused weights of a decoder-only model, filled tensor by tensor from a `WeightSource`.

Q, K and V are one matrix, gate and up are one matrix.  The fused tensors are allocated first and each stored
tensor is copied into its slice, so peak memory is the model plus one tensor.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from edgellm.errors import WeightFileError
from edgellm.kernels.packed_weight import PackedWeight
from edgellm.models.packed_layers import PackedTensors
from edgellm.models.pinned_upload import PieceReader, PinnedUpload
from edgellm.models.registry import family_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from edgellm.models.config import ModelConfig
    from edgellm.models.families import NewTensor

    ProgressCallback = Callable[[int, int, str], None]
    Matrix = torch.Tensor | PackedWeight
    Targets = Mapping[str, torch.Tensor | PackedWeight]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A stored tensor: its shape, the name of its stored dtype and its size in the file."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


class WeightSource(Protocol):
    """A checkpoint opened for reading.  Names are those of the Hugging Face layout."""

    def specs(self) -> Mapping[str, TensorSpec]: ...

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, CPU, any float dtype; the caller copies it out and drops it.

        Raises:
            WeightFileError: the file is damaged; the message names file and tensor.
        """
        ...

    def sample(self, name: str, num_bytes: int) -> bytes:
        """First, middle and last `num_bytes` of the stored tensor."""
        ...


def sample_file(path: Path, offset: int, length: int, num_bytes: int) -> bytes:
    """First, middle and last `num_bytes` of the `length` bytes at `offset`; all of them where that is less."""
    if length <= 3 * num_bytes:
        places = [(offset, length)]
    else:
        middle = offset + (length - num_bytes) // 2
        places = [(offset, num_bytes), (middle, num_bytes), (offset + length - num_bytes, num_bytes)]
    parts = []
    with path.open("rb") as file:
        for start, count in places:
            file.seek(start)
            parts.append(file.read(count))
    return b"".join(parts)


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer; D hidden, Q = heads * head_dim, K = kv heads * head_dim, F intermediate.

    The matrices qkv, o, gate_up and down may be packed.

    Attributes:
        attn_norm, mlp_norm: (D,).
        qkv: (Q + 2K, D), rows q, k, v.  qkv_bias: (Q + 2K,) or None.
        q_norm, k_norm: (head_dim,) or None.
        o: (D, Q).  o_bias: (D,) or None.
        gate_up: (2F, D), rows gate, up.  gate_up_bias: (2F,) or None.
        down: (D, F).  down_bias: (D,) or None.
    """

    attn_norm: torch.Tensor
    qkv: Matrix
    o: Matrix
    mlp_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(slots=True)
class ModelWeights:
    """All tensors of a model, one dtype but for packed ones.  `lm_head` is `embedding` itself where it is tied to it.

    Families with other layers keep dataclasses of their own in `layers`; see `tensors_of`.
    """

    embedding: torch.Tensor
    layers: list[Any]
    final_norm: torch.Tensor
    lm_head: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def num_bytes(self) -> int:
        """Bytes of memory, shared tensors counted once."""
        unique = {tensor.data_ptr(): tensor.nbytes for tensor in tensors_of(self)}
        return sum(unique.values())


def tensors_of(weights: object) -> Iterable[torch.Tensor]:
    """Every tensor of a dataclass of weights: its fields, and those of the dataclasses and lists in them."""
    if isinstance(weights, torch.Tensor):
        yield weights
    elif isinstance(weights, (list, tuple)):
        for item in weights:
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(weights):
        for field in dataclasses.fields(weights):
            yield from tensors_of(getattr(weights, field.name))


def load_weights(
    config: ModelConfig,
    source: WeightSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: ProgressCallback | None = None,
    packed: bool = False,
) -> ModelWeights:
    """Allocate the fused weights and fill them.

    Args:
        packed: linear layers stay in the few bits that they are stored in; see `packed_layers.why_expanded`.
        on_progress: called as (bytes read so far, bytes in all, tensor name) after each tensor.
    Raises:
        WeightFileError: a tensor is missing or has another shape than the config says.
    """
    specs = source.specs()
    # A trial without memory first: a config that does not fit the files must not make anybody allocate.
    family = family_of(config.architecture)
    trial = empty_weights(config, dtype, torch.device("meta"), packed=packed)[1]
    _check(trial, specs, family.IGNORED_TENSORS + config.unread_tensors)
    weights, targets = empty_weights(config, dtype, device, packed=packed)
    fill(targets, source, device, on_progress)
    family.finish(config, weights)
    return weights


def fill(
    targets: Mapping[str, Matrix],
    source: WeightSource,
    device: torch.device,
    on_progress: ProgressCallback | None = None,
) -> None:
    """Read each named tensor into its slice.

    Raises:
        WeightFileError: one is missing, damaged, or of another shape.
    """
    specs = source.specs()
    check_shapes(targets, specs)
    total = sum(specs[name].num_bytes for name in targets)
    fill_one = _filler(source, device)
    done = 0
    for name, target in targets.items():
        fill_one(name, target)
        done += specs[name].num_bytes
        if on_progress is not None:
            on_progress(done, total, name)


def weight_bytes(config: ModelConfig, dtype: torch.dtype, *, packed: bool = False) -> int:
    """Bytes that the weights take in memory; nothing is allocated."""
    weights, targets = empty_weights(config, dtype, torch.device("meta"), packed=packed)
    workspace: int = weights.layers[0].qkv.workspace.nbytes if packed else 0
    return sum(target.nbytes for target in targets.values()) + workspace


@runtime_checkable
class PackedReader(Protocol):
    """A weight source whose linear layers can stay packed."""

    def fill_packed(self, name: str, target: PackedWeight) -> None: ...


def _filler(source: WeightSource, device: torch.device) -> Callable[[str, Matrix], None]:
    """How a stored tensor gets into its slice: in pieces through pinned memory where source and device can."""
    upload = PinnedUpload(source, device) if device.type == "cuda" and isinstance(source, PieceReader) else None

    def fill(name: str, target: Matrix) -> None:
        if isinstance(target, PackedWeight):
            assert isinstance(source, PackedReader)
            source.fill_packed(name, target)
        elif upload is not None:
            upload.fill(name, target)
        else:
            target.copy_(source.read(name).reshape(target.shape))

    return fill


def empty_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, packed: bool = False
) -> tuple[ModelWeights, Targets]:
    """Empty fused weights, and for each stored name the slice it fills.

    Args:
        packed: as `load_weights`; the config's quantisation says how.
    """

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    family = family_of(config.architecture)
    if not packed:
        return family.allocate(config, new)
    assert config.quantisation is not None
    return family.allocate(config, PackedTensors(config.quantisation, dtype, device, list(linear_shapes(config))))


def linear_shapes(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Rows and columns of the fused linear layers of Llama, Qwen2 and Qwen3."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return (
        (config.q_size + 2 * config.kv_size, hidden),
        (hidden, config.q_size),
        (2 * inner, hidden),
        (hidden, inner),
    )


def keep_order(config: ModelConfig, weights: ModelWeights) -> None:
    """`Family.finish` of files whose rows stand as the graph takes them."""


def allocate_dense(config: ModelConfig, new: NewTensor) -> tuple[ModelWeights, Targets]:
    """`Family.allocate` of Llama, Qwen2 and Qwen3; `PackedTensors` as `new` make packed linear layers."""
    targets: dict[str, Matrix] = {}
    embedding = targets["model.embed_tokens.weight"] = new(config.vocab_size, config.hidden_size)
    layers = [_allocate_layer(config, new, f"model.layers.{idx}.", targets) for idx in range(config.num_layers)]
    final_norm = targets["model.norm.weight"] = new(config.hidden_size)
    lm_head = embedding
    if not config.tied_embeddings:
        lm_head = targets["lm_head.weight"] = new(config.vocab_size, config.hidden_size)
    return ModelWeights(embedding, layers, final_norm, lm_head), targets


def _allocate_layer(config: ModelConfig, new: NewTensor, prefix: str, targets: dict[str, Matrix]) -> LayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size
    qkv_rows = config.q_size + 2 * config.kv_size
    linear = new.linear if isinstance(new, PackedTensors) else new
    qkv, o, gate_up, down = (linear(*shape) for shape in linear_shapes(config))
    layer = LayerWeights(
        attn_norm=new(hidden),
        qkv=qkv,
        o=o,
        mlp_norm=new(hidden),
        gate_up=gate_up,
        down=down,
        qkv_bias=new(qkv_rows) if config.qkv_bias else None,
        o_bias=new(hidden) if config.o_bias else None,
        gate_up_bias=new(2 * inner) if config.mlp_bias else None,
        down_bias=new(hidden) if config.mlp_bias else None,
        q_norm=new(config.head_dim) if config.qk_norm else None,
        k_norm=new(config.head_dim) if config.qk_norm else None,
    )
    qkv_split = {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
    gate_up_split = {"gate_proj": inner, "up_proj": inner}

    def assign(name: str, target: Matrix | None) -> None:
        if target is not None:
            targets[prefix + name] = target

    def assign_split(part: str, split: dict[str, int], weight: Matrix, bias: torch.Tensor | None) -> None:
        start = 0
        for name, rows in split.items():
            assign(f"{part}.{name}.weight", weight[start : start + rows])
            assign(f"{part}.{name}.bias", None if bias is None else bias[start : start + rows])
            start += rows

    assign("input_layernorm.weight", layer.attn_norm)
    assign_split("self_attn", qkv_split, layer.qkv, layer.qkv_bias)
    assign_split("self_attn", {"o_proj": hidden}, layer.o, layer.o_bias)
    assign("self_attn.q_norm.weight", layer.q_norm)
    assign("self_attn.k_norm.weight", layer.k_norm)
    assign("post_attention_layernorm.weight", layer.mlp_norm)
    assign_split("mlp", gate_up_split, layer.gate_up, layer.gate_up_bias)
    assign_split("mlp", {"down_proj": hidden}, layer.down, layer.down_bias)
    return layer


def _check(targets: Mapping[str, Matrix], specs: Mapping[str, TensorSpec], ignored: tuple[str, ...]) -> None:
    """Every target is stored with its shape, and nothing that would change the numbers is left unread."""
    check_shapes(targets, specs)
    left = (name for name in specs if name not in targets and not name.startswith(ignored))
    unread = [name for name in left if _would_change_numbers(name)]
    if unread:
        raise WeightFileError(
            f"the checkpoint stores {unread[0]!r} (and {len(unread) - 1} more such tensors), which the config does not "
            "mention; check num_hidden_layers, attention_bias and mlp_bias in config.json, or download the model again"
        )


def check_shapes(targets: Mapping[str, Matrix], specs: Mapping[str, TensorSpec]) -> None:
    """
    Raises:
        WeightFileError: a target is not stored, or with another shape.
    """
    missing = [name for name in targets if name not in specs]
    if missing:
        raise WeightFileError(
            f"the checkpoint lacks {len(missing)} of {len(targets)} tensors, the first is {missing[0]!r}; "
            "download it again, or check that config.json belongs to it"
        )
    for name, target in targets.items():
        if specs[name].shape != tuple(target.shape):
            raise WeightFileError(
                f"tensor {name!r} is stored as {list(specs[name].shape)} but the config says {list(target.shape)}; "
                "check that config.json belongs to these weights"
            )


def _would_change_numbers(name: str) -> bool:
    """Old files store the rope frequencies, which are computed here."""
    return ".layers." in name and not name.endswith(".rotary_emb.inv_freq")
