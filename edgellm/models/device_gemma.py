"""The graph of Gemma3 and Gemma4 text models on the device.

Each sublayer is normed before and behind; what differs between the layers and between the two are fields of the config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from edgellm.models.device_attention import ChosenRows
from edgellm.models.device_gemma_experts import DeviceGemmaExperts
from edgellm.models.device_layers import DeviceAngles, OutputHead
from edgellm.models.device_step import HiddenTaps

if TYPE_CHECKING:
    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.device_step import DeviceState, StepBuffers
    from edgellm.models.families.gemma import GemmaConfig, GemmaLayer
    from edgellm.models.families.gemma_weights import GemmaLayerWeights, GemmaWeights, PerLayerWeights
    from edgellm.models.loader import LoadedModel
    from edgellm.models.step import HiddenRequest
    from edgellm.runtime.step_inputs import StepTensors

_ANGLES = {True: "sliding angles", False: "angles"}  # buffer, by whether a layer attends over a window


@dataclass(slots=True)
class _Rows:
    """Rows of a step on their way through the layers.

    Attributes:
        stream: (T, hidden_size) residual stream.
        angles: (2, T, head_dim / 2) by whether a layer attends over a window.
        inputs: (T, num_layers * per_layer_size) of the token at hand, or None.
        chosen: which token rows of the step these are; None is all.
    """

    stream: torch.Tensor
    angles: dict[bool, torch.Tensor]
    inputs: torch.Tensor | None
    chosen: ChosenRows | None = None

    def with_logits(self, step: StepTensors, buffers: StepBuffers) -> _Rows:
        """Copies of those whose logits are wanted."""
        index = step.logits_index
        stream = buffers.rows("chosen", len(index))
        torch.index_select(self.stream, 0, index, out=stream)
        inputs = None
        if self.inputs is not None:
            inputs = buffers.rows("token embedding", len(index))
            torch.index_select(self.inputs, 0, index, out=inputs)
        angles = {}
        for kind, table in self.angles.items():
            angles[kind] = buffers.rows(f"chosen {_ANGLES[kind]}", len(index)).view(2, len(index), -1)
            torch.index_select(table, 1, index, out=angles[kind])
        room = buffers.rows("chosen places", len(index)).view(torch.int32).view(4, len(index))
        return _Rows(stream, angles, inputs, ChosenRows.of_logits(step, room))


class _FirstRows:
    """Buffers of a step, of which only the first rows are used; see `StepBuffers`."""

    def __init__(self, buffers: StepBuffers, count: int) -> None:
        self._buffers = buffers
        self._count = count
        self.selected = buffers.selected
        self.selected_normed = buffers.selected_normed
        self.logits = buffers.logits
        self.workspace = buffers.workspace

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._buffers.rows(name, self._count)

    def rows(self, name: str, count: int) -> torch.Tensor:
        return self._buffers.rows(name, count)


class DeviceGemmaGraph:
    """Forward pass over rows; see `edgellm.models.device_step.DeviceFamilyGraph`.

    Args:
        model: weights on the device that `ops` compute on.
    """

    def __init__(self, model: LoadedModel, ops: DeviceOps) -> None:
        self.config = config = cast("GemmaConfig", model.config)
        weights = cast("GemmaWeights", model.weights)
        self.row_widths = _row_widths(config)
        self.float_widths = _float_widths(config)
        self._ops = ops
        self._embedding = weights.embedding
        # Rounded to the type of the embedding, as the models were trained.
        self._embedding_scale = _rounded(config.hidden_size**0.5, weights.dtype)
        final_norm = weights.final_norm.float() + config.norm_offset
        self._head = OutputHead(ops, final_norm, config.rms_norm_eps, weights.lm_head)
        self._angles = _angles(ops, config, weights.embedding.device)
        self._layers = [
            _Layer(ops, config, shape, layer) for shape, layer in zip(config.layers, weights.layers, strict=True)
        ]
        self._token_inputs = None if weights.per_layer is None else _TokenInputs(ops, config, weights.per_layer)

    def workspace_bytes(self, *, tokens: int, rows: int) -> int:
        return DeviceGemmaExperts.workspace_bytes(self._ops, self.config, self._embedding.dtype, tokens=tokens)

    def forward(
        self,
        step: StepTensors,
        buffers: StepBuffers,
        state: DeviceState,
        hidden: torch.Tensor | None = None,
        request: HiddenRequest | None = None,
    ) -> None:
        rows = self._embed(step, buffers)
        taps = HiddenTaps(request, hidden, self.config.hidden_size)
        # The layers from here on write nothing that other tokens read: only rows with logits need go on.
        owning = self.config.num_kv_layers
        self._run_layers(range(owning), rows, state, buffers, taps)
        narrow = hidden is None and len(step.logits_index) < len(rows.stream) and owning < len(self._layers)
        if narrow and len(step.logits_index):
            rows = rows.with_logits(step, buffers)
            first_rows = _FirstRows(buffers, len(rows.stream))
            self._run_layers(range(owning, len(self._layers)), rows, state, first_rows, taps)
            self._head.logits_of(rows.stream, buffers)
        elif not narrow:
            self._run_layers(range(owning, len(self._layers)), rows, state, buffers, taps)
            taps.enters(self.config.num_layers, rows.stream)
            self._head.run(step, rows.stream, taps, buffers)
        self._cap(buffers.logits)

    def _run_layers(
        self, which: range, rows: _Rows, state: DeviceState, buffers: StepBuffers, taps: HiddenTaps
    ) -> None:
        for idx in which:
            taps.enters(idx, rows.stream)
            self._layers[idx].run(idx, rows, state, buffers)

    def _cap(self, logits: torch.Tensor) -> None:
        cap = self.config.final_softcap
        if cap is not None and len(logits):
            logits.div_(cap).tanh_().mul_(cap)

    def _embed(self, step: StepTensors, buffers: StepBuffers) -> _Rows:
        stream = buffers["hidden"]
        self._ops.embedding(step.token_ids, self._embedding, stream)
        stream.mul_(self._embedding_scale)
        inputs = None if self._token_inputs is None else self._token_inputs(step.token_ids, stream, buffers)
        angles = {kind: rotary(step.positions, buffers[_ANGLES[kind]]) for kind, rotary in self._angles.items()}
        return _Rows(stream, angles, inputs)


class _Layer:
    """One decoder layer."""

    def __init__(self, ops: DeviceOps, config: GemmaConfig, shape: GemmaLayer, weights: GemmaLayerWeights) -> None:
        def norm(stored: torch.Tensor) -> torch.Tensor:
            return stored.float() + config.norm_offset

        self._ops = ops
        self._eps = config.rms_norm_eps
        self._shape = shape
        self._q_size = config.num_heads * shape.head_dim
        self._per_layer_size = config.per_layer_size
        self._weights = weights
        self._attn_norm, self._attn_out_norm = norm(weights.attn_norm), norm(weights.attn_out_norm)
        self._mlp_norm, self._mlp_out_norm = norm(weights.mlp_norm), norm(weights.mlp_out_norm)
        self._head_norms = {"query_norm": norm(weights.q_norm)}
        if weights.k_norm is not None:
            self._head_norms["key_norm"] = norm(weights.k_norm)
        if config.value_norm and shape.owns_kv:
            self._head_norms["value_norm"] = torch.ones_like(self._head_norms["query_norm"])
        self._token_norm = None if weights.token_norm is None else norm(weights.token_norm)
        self._scale = 1.0 if weights.scale is None else float(weights.scale)
        self._experts: DeviceGemmaExperts | None = None
        if weights.experts is not None:
            self._experts = DeviceGemmaExperts(ops, config, weights.experts)

    def run(self, idx: int, rows: _Rows, state: DeviceState, buffers: StepBuffers) -> None:
        """Pass the residual stream through the layer, number idx of the model."""
        self._attend(rows, state, buffers)
        self._feed_forward(rows.stream, buffers)
        if rows.inputs is not None:
            width = self._per_layer_size
            self._add_token(rows.stream, rows.inputs[:, idx * width : (idx + 1) * width], buffers)
        if self._scale != 1.0:
            rows.stream.mul_(self._scale)

    def _attend(self, rows: _Rows, state: DeviceState, buffers: StepBuffers) -> None:
        """Leaves what attention makes of rows in "normed", from where it joins the stream with the next norm."""
        shape, stream, normed = self._shape, rows.stream, buffers["normed"]
        self._ops.rms_norm(stream, self._attn_norm, self._eps, normed)
        attended = _narrow(buffers["attended"], self._q_size)
        angles = rows.angles[shape.window > 0]
        qkv = self._project(normed, buffers)
        state.attend(shape.kv_layer, qkv, angles, attended, **self._head_norms, chosen=rows.chosen)
        self._ops.linear(attended, self._weights.o, normed)
        self._ops.rms_norm(normed, self._attn_out_norm, self._eps, normed)

    def _project(self, normed: torch.Tensor, buffers: StepBuffers) -> torch.Tensor:
        """Rows of Q, K and V, or of Q alone where K and V are another layer's; nothing is normed yet."""
        shape, qkv = self._shape, self._weights.qkv
        if not (shape.owns_kv and shape.value_from_key):
            fused = _narrow(buffers["qkv"], len(qkv))
            self._ops.linear(normed, qkv, fused)
            return fused
        projected = _narrow(buffers["projected"], len(qkv))
        self._ops.linear(normed, qkv, projected)
        fused = _narrow(buffers["qkv"], len(qkv) + shape.kv_size)
        fused[:, : len(qkv)].copy_(projected)
        fused[:, len(qkv) :].copy_(projected[:, -shape.kv_size :])
        return fused

    def _feed_forward(self, stream: torch.Tensor, buffers: StepBuffers) -> None:
        """stream += what `_attend` left; then += what the MLP, and experts beside it, make of that."""
        ops, weights, inner = self._ops, self._weights, self._shape.intermediate_size
        product = normed = buffers["normed"]
        ops.rms_norm(normed, self._mlp_norm, self._eps, normed, residual=stream)
        gate_up, activated = _narrow(buffers["gate_up"], 2 * inner), _narrow(buffers["activated"], inner)
        ops.linear(normed, weights.gate_up, gate_up)
        ops.gelu_mul(gate_up[:, :inner], gate_up[:, inner:], activated)
        ops.linear(activated, weights.down, product)
        if self._experts is not None:
            self._experts.join(stream, product, buffers)
        self._add_normed(stream, product, self._mlp_out_norm)

    def _add_token(self, stream: torch.Tensor, inputs: torch.Tensor, buffers: StepBuffers) -> None:
        """Add what the layer makes of the token's own embedding for it, (T, per-layer size)."""
        weights, normed = self._weights, buffers["normed"]
        if weights.token_gate is None or weights.token_out is None or self._token_norm is None:
            return
        gate = buffers["token gate"]
        self._ops.linear(stream, weights.token_gate, gate)
        self._ops.gelu_mul(gate, inputs, gate)
        self._ops.linear(gate, weights.token_out, normed)
        self._add_normed(stream, normed, self._token_norm)

    def _add_normed(self, stream: torch.Tensor, rows: torch.Tensor, norm: torch.Tensor) -> None:
        self._ops.rms_norm(rows, norm, self._eps, rows)
        stream.add_(rows)


class _TokenInputs:
    """What each layer is given of the token at hand: an embedding of its own, and a projection of the first one."""

    def __init__(self, ops: DeviceOps, config: GemmaConfig, weights: PerLayerWeights) -> None:
        self._ops = ops
        self._config = config
        self._weights = weights
        self._norm = weights.norm.float() + config.norm_offset
        self._scale = _rounded(config.per_layer_size**0.5, weights.embedding.dtype)

    def __call__(self, token_ids: torch.Tensor, stream: torch.Tensor, buffers: StepBuffers) -> torch.Tensor:
        """(T, num_layers * per_layer_size) for the tokens and their scaled embeddings."""
        config = self._config
        rows, projected = buffers["token embedding"], buffers["token inputs"]
        self._ops.embedding(token_ids, self._weights.embedding, rows)
        rows.mul_(self._scale)
        self._ops.linear(stream, self._weights.projection, projected)
        projected.mul_(config.hidden_size**-0.5)
        parts = projected.view(-1, config.per_layer_size)
        self._ops.rms_norm(parts, self._norm, config.rms_norm_eps, parts)
        return projected.add_(rows).mul_(2.0**-0.5)


def _row_widths(config: GemmaConfig) -> dict[str, int]:
    """Layers of different shapes share buffers as wide as the widest needs them."""
    layers = config.layers
    owners = [layer for layer in layers if layer.owns_kv]
    widths = {
        "hidden": config.hidden_size,
        "normed": config.hidden_size,
        "qkv": max(config.num_heads * layer.head_dim + 2 * layer.kv_size for layer in owners),
        "attended": max(config.num_heads * layer.head_dim for layer in layers),
        "gate_up": 2 * max(layer.intermediate_size for layer in layers),
        "activated": max(layer.intermediate_size for layer in layers),
    }
    copied = [config.num_heads * layer.head_dim + layer.kv_size for layer in owners if layer.value_from_key]
    if copied:
        widths["projected"] = max(copied)
    if config.per_layer_size:
        all_layers = config.num_layers * config.per_layer_size
        widths |= {"token embedding": all_layers, "token inputs": all_layers, "token gate": config.per_layer_size}
    if config.num_kv_layers < config.num_layers:
        widths["chosen"] = config.hidden_size
    return widths | DeviceGemmaExperts.widths(config)


def _float_widths(config: GemmaConfig) -> dict[str, int]:
    widths = {_ANGLES[layer.window > 0]: layer.head_dim for layer in config.layers}
    if config.num_kv_layers < config.num_layers:
        widths |= {f"chosen {name}": head_dim for name, head_dim in widths.items()} | {"chosen places": 4}
    return widths | DeviceGemmaExperts.float_widths(config)


def _angles(ops: DeviceOps, config: GemmaConfig, device: torch.device) -> dict[bool, DeviceAngles]:
    """By whether a layer attends over a window, for the kinds that the model has."""
    head_dims = {layer.window > 0: layer.head_dim for layer in config.layers}
    return {
        sliding: DeviceAngles(ops, config.local_rope if sliding else config.rope, head_dim, device)
        for sliding, head_dim in head_dims.items()
    }


def _narrow(buffer: torch.Tensor, width: int) -> torch.Tensor:
    """(T, width), C-contiguous, in the memory of a buffer that is at least as wide."""
    count = len(buffer)
    return buffer.view(-1)[: count * width].view(count, width)


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype))
