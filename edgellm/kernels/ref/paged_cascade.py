"""Reference of decode attention over shared prefixes: the textbook formula over a group's keys and a row's own."""

from __future__ import annotations

from itertools import pairwise

import torch

from edgellm.kernels.ref.paged_prefill import capped, gather_kv, softmax_with_sinks


def paged_cascade(
    query: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    shared: torch.Tensor,
    members: torch.Tensor,
    group_start: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
    *,
    num_heads: int,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    early_reads: bool = False,
    by_warpgroups: bool | None = None,
) -> None:
    """Row by row in float64; see the kernel's wrapper for what the arguments are.

    A row's first shared[n] keys are read where its group's first member has them, as the kernel does.  `workspace`,
    `early_reads` and `by_warpgroups` change nothing here.
    Effects: writes the rows of out that have a slot and a length.
    """
    head_dim = out.shape[1] // num_heads
    leaders = leaders_of(shared, members, group_start)
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        if slot < 0 or length < 1:
            continue
        key, value = gather_kv(pages, page_table[slot], length, head_dim)
        prefix = int(shared[row])
        if prefix:
            of_leader = gather_kv(pages, page_table[slots[leaders[row]]], prefix, head_dim)
            key, value = (
                torch.cat((first, own[:, prefix:]), dim=1) for first, own in zip(of_leader, (key, value), strict=True)
            )
        key, value = (part.repeat_interleave(num_heads // part.shape[0], dim=0) for part in (key, value))
        heads = query[row, : num_heads * head_dim].double().view(num_heads, head_dim)
        scores = capped(heads[:, None, :] @ key.transpose(1, 2) * scale, soft_cap)
        everything = torch.ones(1, key.shape[1], dtype=torch.bool, device=key.device)
        out[row] = (softmax_with_sinks(scores, everything, sinks) @ value).flatten().to(out.dtype)


def leaders_of(shared: torch.Tensor, members: torch.Tensor, group_start: torch.Tensor) -> dict[int, int]:
    """The first member of the group of each row that is in one.

    Raises:
        ValueError: a row is in two groups, a row with a prefix is in none, or prefixes of a group differ.
    """
    leaders: dict[int, int] = {}
    starts = group_start.tolist()
    for first, end in pairwise(starts):
        group = members[first:end].tolist()
        if len({int(shared[row]) for row in group}) > 1 or not leaders.keys().isdisjoint(group):
            raise ValueError(f"group {group} has prefixes of several lengths, or a row of another group")
        leaders |= dict.fromkeys(group, group[0] if group else -1)
    if set(torch.nonzero(shared)[:, 0].tolist()) - leaders.keys():
        raise ValueError(f"rows with a prefix are in no group: shared {shared.tolist()}, groups {leaders}")
    return leaders
