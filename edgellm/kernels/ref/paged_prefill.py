"""Reference of attention over pages: gather, the keys that each row sees, the textbook formula in float64."""

from __future__ import annotations

import math

import torch

from edgellm.kernels.ref.fp8_pages import SCALE_BYTES, dequantise_pages


def paged_prefill(
    query: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    past_len: torch.Tensor,
    out: torch.Tensor,
    *,
    num_heads: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    deterministic: bool = False,
    workspace: torch.Tensor | None = None,
    by_warpgroups: bool | None = None,
) -> None:
    """Sequence by sequence; see the kernel's wrapper for what the arguments are.

    `deterministic`, `workspace` and `by_warpgroups` change nothing here.  Any head_dim, page size and group.
    Effects: writes the rows of out that belong to a sequence with a slot.
    """
    head_dim = out.shape[1] // num_heads
    for sequence, slot in enumerate(slots.tolist()):
        first, end = query_start[sequence : sequence + 2].tolist()
        if slot < 0 or first == end:
            continue
        past = int(past_len[sequence])
        key, value = gather_kv(pages, page_table[slot], past + end - first, head_dim)
        key, value = (part.repeat_interleave(num_heads // part.shape[0], dim=0) for part in (key, value))
        seen = torch.zeros(end - first, past + end - first, dtype=torch.bool)
        for token in range(end - first):
            mask = None if tree_mask is None else tree_mask[first + token]
            seen[token, seen_keys(token, past, end - first, window, mask)] = True
        rows = query[first:end, : num_heads * head_dim].double().view(-1, num_heads, head_dim).transpose(0, 1)
        scores = capped(rows @ key.transpose(1, 2) * scale, soft_cap)
        weights = softmax_with_sinks(scores, seen.to(key.device), sinks)
        out[first:end] = (weights @ value).transpose(0, 1).flatten(1).to(out.dtype)


def gather_kv(
    pages: torch.Tensor, page_ids: torch.Tensor, num_keys: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the first `num_keys` keys of a sequence, each (kv_heads, num_keys, head_dim) float64.

    Keys without a page (-1) are zeros; no other page is read.
    """
    is_fp8 = pages.dtype == torch.uint8
    page_size = pages.shape[3] // (head_dim + SCALE_BYTES) if is_fp8 else pages.shape[3]
    ids = page_ids[: -(-num_keys // page_size)].long()
    used = pages[ids.clamp(min=0)]
    if is_fp8:
        used = dequantise_pages(used, page_size, head_dim)
    used = torch.where((ids < 0)[:, None, None, None, None], 0.0, used.double())
    key, value = used.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_keys]
    return key, value


def seen_keys(token: int, past: int, num_tokens: int, window: int, mask: torch.Tensor | None) -> torch.Tensor:
    """Positions, in order, of the keys that the token-th new token of a sequence sees.

    Without a mask: all up to itself.  With one (words of 32 bits): the past, and new token j where bit j is set.
    A window keeps the last `window` of them, but never drops a new token that the mask shows.
    """
    if mask is None:
        keys = torch.arange(past + token + 1)
        return keys[-window:] if window else keys
    words = mask.tolist()
    new = [j for j in range(min(num_tokens, 32 * len(words))) if words[j // 32] >> (j % 32) & 1]
    first = max(0, past + len(new) - window) if window else 0
    return torch.tensor([*range(first, past), *(past + j for j in new)], dtype=torch.long)


def capped(scores: torch.Tensor, soft_cap: float) -> torch.Tensor:
    """cap * tanh(scores / cap), or the scores where there is no cap."""
    return soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores


def softmax_with_sinks(scores: torch.Tensor, seen: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Weights (heads, rows, keys) of scores over the keys that each row sees (rows, keys); zeros where it sees none.

    A head's sink takes part in the softmax as a key whose value is zero.
    """
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is None:
        return torch.where(seen.any(-1)[:, None], scores.softmax(-1), 0.0)
    column = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[:, :, :-1]
