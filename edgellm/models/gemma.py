"""The graph of Gemma3 and Gemma4 text models on CPU rows.

Each sublayer is normed before and behind; what differs between the layers and between the two are fields of the config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from edgellm.kernels.cpu.elementwise import gelu_mul, rms_norm, rope_
from edgellm.kernels.cpu.linear import linear
from edgellm.models.gemma_experts import GemmaExpertBlock
from edgellm.models.rope import RotaryAngles
from edgellm.models.step import GraphOutput, HiddenRows

if TYPE_CHECKING:
    from edgellm.models.families.gemma import GemmaConfig, GemmaLayer
    from edgellm.models.families.gemma_weights import GemmaLayerWeights, GemmaWeights, PerLayerWeights
    from edgellm.models.loader import LoadedModel
    from edgellm.models.step import HiddenRequest, StepState

_ROW_STEP = 64


class _Scratch:
    """Row buffers by name, grown to the largest step seen and reused; layers of different widths share them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._flat: dict[str, torch.Tensor] = {}

    def rows(self, name: str, num_rows: int, width: int) -> torch.Tensor:
        """(num_rows, width), C-contiguous, with whatever it held."""
        flat = self._flat.get(name)
        if flat is None or len(flat) < num_rows * width:
            capacity = -(-num_rows // _ROW_STEP) * _ROW_STEP * width
            flat = self._flat[name] = torch.empty(capacity, dtype=self._dtype)
        return flat[: num_rows * width].view(num_rows, width)


@dataclass(slots=True)
class _Layer:
    """A layer's shape, its weights, and those of its norms in float32, as the kernels take them."""

    shape: GemmaLayer
    weights: GemmaLayerWeights
    attn_norm: torch.Tensor
    attn_out_norm: torch.Tensor
    mlp_norm: torch.Tensor
    mlp_out_norm: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor | None
    value_norm: torch.Tensor | None
    token_norm: torch.Tensor | None
    experts: GemmaExpertBlock | None
    scale: float


@dataclass(slots=True)
class _Rows:
    """Rows of a step on their way through the layers.

    Attributes:
        hidden: (T, hidden_size) residual stream.
        angles: (2, T, head_dim / 2) by whether a layer attends over a window.
        inputs: (T, num_layers * per_layer_size) of the token at hand, or None.
        chosen: token rows of the step that these are; None is all.
    """

    hidden: torch.Tensor
    angles: dict[bool, torch.Tensor]
    inputs: torch.Tensor | None
    chosen: torch.Tensor | None = None

    def choose(self, index: torch.Tensor) -> _Rows:
        """Copies of some of them."""
        angles = {sliding: table[:, index] for sliding, table in self.angles.items()}
        return _Rows(self.hidden[index], angles, None if self.inputs is None else self.inputs[index], index)


class GemmaGraph:
    """Forward pass over rows.  Owns its scratch, so one pass at a time."""

    def __init__(self, model: LoadedModel) -> None:
        self.config = config = cast("GemmaConfig", model.config)
        weights = cast("GemmaWeights", model.weights)
        self._weights = weights
        self._layers = [
            _prepare(config, shape, layer) for shape, layer in zip(config.layers, weights.layers, strict=True)
        ]
        self._final_norm = weights.final_norm.float() + config.norm_offset
        self._scratch = _Scratch(weights.dtype)
        self._angles = _angles(config)
        # Rounded to the dtype of the embedding, as the models were trained.
        self._embedding_scale = _rounded(config.hidden_size**0.5, weights.dtype)
        self._token_inputs = None if weights.per_layer is None else _TokenInputs(config, weights.per_layer)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_index: torch.Tensor,
        step: StepState,
        hidden_request: HiddenRequest | None = None,
    ) -> GraphOutput:
        """One pass; see `edgellm.models.step.Graph`."""
        config = self.config
        rows = self._embed(token_ids, positions)
        wanted = HiddenRows(hidden_request, len(token_ids), config.hidden_size, rows.hidden.dtype)
        for idx, layer in enumerate(self._layers):
            if idx == config.num_kv_layers and hidden_request is None:
                # The layers from here on write nothing that other tokens read: only rows with logits go on.
                rows = rows.choose(logits_index)
            if not len(rows.hidden):
                break
            wanted.enters(idx, rows.hidden)
            self._run_layer(idx, layer, rows, step)
        wanted.enters(config.num_layers, rows.hidden)
        if wanted.wants_normed:
            normed = self._scratch.rows("normed", *rows.hidden.shape)
            rms_norm(rows.hidden, self._final_norm, config.rms_norm_eps, normed)
            wanted.normed(normed)
        last = rows.hidden if rows.chosen is not None else rows.hidden[logits_index]
        return GraphOutput(self._logits(last), wanted.rows)

    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> _Rows:
        hidden = self._scratch.rows("hidden", len(token_ids), self.config.hidden_size)
        torch.index_select(self._weights.embedding, 0, token_ids, out=hidden)
        hidden.mul_(self._embedding_scale)
        inputs = None if self._token_inputs is None else self._token_inputs(token_ids, hidden, self._scratch)
        return _Rows(hidden, {sliding: rotary(positions) for sliding, rotary in self._angles.items()}, inputs)

    def _run_layer(self, idx: int, layer: _Layer, rows: _Rows, step: StepState) -> None:
        self._attend(layer, rows, step)
        self._feed_forward(layer, rows.hidden)
        if rows.inputs is not None:
            width = self.config.per_layer_size
            self._add_token(layer, rows.hidden, rows.inputs[:, idx * width : (idx + 1) * width])
        if layer.scale != 1.0:
            rows.hidden.mul_(layer.scale)

    def _attend(self, layer: _Layer, rows: _Rows, step: StepState) -> None:
        config, shape, hidden = self.config, layer.shape, rows.hidden
        normed = self._scratch.rows("normed", *hidden.shape)
        rms_norm(hidden, layer.attn_norm, config.rms_norm_eps, normed)
        qkv = self._project(layer, normed)
        rope_(
            qkv,
            rows.angles[shape.window > 0],
            num_heads=config.num_heads,
            num_kv_heads=shape.num_kv_heads if shape.owns_kv else 0,
            head_dim=shape.head_dim,
            query_norm=layer.q_norm,
            key_norm=layer.k_norm,
            eps=config.rms_norm_eps,
        )
        attended = self._scratch.rows("attended", len(hidden), config.num_heads * shape.head_dim)
        step.attend(shape.kv_layer, qkv, attended, rows.chosen)
        self._add_normed(hidden, linear(attended, layer.weights.o, normed), layer.attn_out_norm)

    def _project(self, layer: _Layer, normed: torch.Tensor) -> torch.Tensor:
        """Rows of Q, K and V, or of Q alone where K and V are another layer's; V is normed, Q and K are not yet."""
        shape, num_tokens = layer.shape, len(normed)
        fused = self._scratch.rows("qkv", num_tokens, len(layer.weights.qkv))
        fused = linear(normed, layer.weights.qkv, fused)
        if not shape.owns_kv:
            return fused
        if shape.value_from_key:
            projected = fused
            fused = self._scratch.rows("qkv with v", num_tokens, projected.shape[1] + shape.kv_size)
            fused[:, : projected.shape[1]] = projected
            fused[:, projected.shape[1] :] = projected[:, -shape.kv_size :]
        if layer.value_norm is not None:
            heads = self._scratch.rows("value", num_tokens * shape.num_kv_heads, shape.head_dim)
            value = fused[:, -shape.kv_size :]
            heads.view(num_tokens, -1).copy_(value)
            rms_norm(heads, layer.value_norm, self.config.rms_norm_eps, heads)
            value.copy_(heads.view(num_tokens, -1))
        return fused

    def _feed_forward(self, layer: _Layer, hidden: torch.Tensor) -> None:
        inner = layer.shape.intermediate_size
        normed = self._scratch.rows("normed", *hidden.shape)
        rms_norm(hidden, layer.mlp_norm, self.config.rms_norm_eps, normed)
        gate_up = linear(normed, layer.weights.gate_up, self._scratch.rows("gate_up", len(hidden), 2 * inner))
        activated = self._scratch.rows("activated", len(hidden), inner)
        gelu_mul(gate_up[:, :inner], gate_up[:, inner:], activated)
        product = linear(activated, layer.weights.down, normed)
        if layer.experts is not None:
            layer.experts.join(hidden, product)
        self._add_normed(hidden, product, layer.mlp_out_norm)

    def _add_token(self, layer: _Layer, hidden: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add what the layer makes of the token's own embedding for it, (T, per-layer size)."""
        weights = layer.weights
        if weights.token_gate is None or weights.token_out is None or layer.token_norm is None:
            return
        gate = linear(hidden, weights.token_gate, self._scratch.rows("token gate", *inputs.shape))
        activated = self._scratch.rows("activated", *inputs.shape)
        gelu_mul(gate, inputs, activated)
        normed = self._scratch.rows("normed", *hidden.shape)
        self._add_normed(hidden, linear(activated, weights.token_out, normed), layer.token_norm)

    def _add_normed(self, hidden: torch.Tensor, rows: torch.Tensor, norm: torch.Tensor) -> None:
        rms_norm(rows, norm, self.config.rms_norm_eps, rows)
        hidden.add_(rows)

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits = torch.empty((len(rows), self.config.vocab_size), dtype=torch.float32)
        if not len(rows):
            return logits
        rms_norm(rows, self._final_norm, self.config.rms_norm_eps, rows)
        logits = linear(rows, self._weights.lm_head, logits)
        cap = self.config.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class _TokenInputs:
    """What each layer is given of the token at hand: an embedding of its own, and a projection of the first one."""

    def __init__(self, config: GemmaConfig, weights: PerLayerWeights) -> None:
        self._config = config
        self._weights = weights
        self._norm = weights.norm.float() + config.norm_offset
        self._scale = _rounded(config.per_layer_size**0.5, weights.embedding.dtype)

    def __call__(self, token_ids: torch.Tensor, hidden: torch.Tensor, scratch: _Scratch) -> torch.Tensor:
        """(T, num_layers * per_layer_size) for the tokens and their scaled embeddings."""
        width = self._config.num_layers * self._config.per_layer_size
        rows = scratch.rows("token embedding", len(token_ids), width)
        torch.index_select(self._weights.embedding, 0, token_ids, out=rows)
        rows.mul_(self._scale)
        projected = linear(hidden, self._weights.projection, scratch.rows("token inputs", len(token_ids), width))
        projected.mul_(self._config.hidden_size**-0.5)
        parts = projected.view(-1, self._config.per_layer_size)
        rms_norm(parts, self._norm, self._config.rms_norm_eps, parts)
        return projected.add_(rows).mul_(2.0**-0.5)


def _prepare(config: GemmaConfig, shape: GemmaLayer, weights: GemmaLayerWeights) -> _Layer:
    def norm(stored: torch.Tensor) -> torch.Tensor:
        return stored.float() + config.norm_offset

    return _Layer(
        shape=shape,
        weights=weights,
        attn_norm=norm(weights.attn_norm),
        attn_out_norm=norm(weights.attn_out_norm),
        mlp_norm=norm(weights.mlp_norm),
        mlp_out_norm=norm(weights.mlp_out_norm),
        q_norm=norm(weights.q_norm),
        k_norm=None if weights.k_norm is None else norm(weights.k_norm),
        value_norm=torch.ones(shape.head_dim) if config.value_norm and shape.owns_kv else None,
        token_norm=None if weights.token_norm is None else norm(weights.token_norm),
        experts=None if weights.experts is None else GemmaExpertBlock(config, weights.experts),
        scale=1.0 if weights.scale is None else float(weights.scale),
    )


def _angles(config: GemmaConfig) -> dict[bool, RotaryAngles]:
    """By whether a layer attends over a window, for the kinds that the model has."""
    head_dims = {layer.window > 0: layer.head_dim for layer in config.layers}
    return {
        sliding: RotaryAngles(config.local_rope if sliding else config.rope, head_dim)
        for sliding, head_dim in head_dims.items()
    }


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype))
