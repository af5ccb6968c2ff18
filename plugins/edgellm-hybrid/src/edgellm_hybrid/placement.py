"""Where a prompt gets its recurrent checkpoints.

Recurrent state cannot be cut back, so a later prompt can only start where a checkpoint was taken.  Each one costs
a snapshot slot and ends a prompt chunk early, so they go where later prompts are likely to part:

* At template boundaries, which the caller names: the next turn repeats the prompt up to one of them.
* At the branch point, where the cache knew more than it could reuse: a second prompt came this way and has to compute
  it again; the third one shall not.
* On a ladder: the last multiple of the interval, of twice the interval, of four times ...  A prompt that parts far
  from the end loses more than one that parts near it, and a prompt of any length needs few rungs.
* At the end, where none of these placed anything: a short prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgellm.cache.policy import CheckpointContext


def place_checkpoints(context: CheckpointContext, *, dense: bool = False) -> tuple[int, ...]:
    """Lengths at which a prompt should have a checkpoint, ascending, all in (0, `stable_end`].

    Rungs up to the reused prefix are named too: what is there already stays wanted.

    Args:
        dense: a rung at every multiple of the interval.
    """
    end, reuse = stable_end(context), context.reuse_token_length
    places = {*context.template_boundaries, *rungs(end, context.interval, dense=dense)}
    branch = branch_point(context)
    if branch > reuse:
        places.add(branch)
    places = {place for place in places if 0 < place <= end}
    if not any(place > reuse for place in places):
        places.add(end)
    return tuple(sorted(places))


def rungs(end: int, interval: int | None, *, dense: bool = False) -> tuple[int, ...]:
    """The ladder below `end`, ascending; none without an interval."""
    if interval is None:
        return ()
    if dense:
        return tuple(range(interval, end, interval))
    found = set()
    step = interval
    while step < end:
        found.add((end - 1) // step * step)
        step *= 2
    return tuple(sorted(found))


def branch_point(context: CheckpointContext) -> int:
    """The last whole page that the cache knew, and that leaves a token to compute."""
    known = min(context.known_token_length, context.num_tokens - 1)
    return known // context.page_size * context.page_size


def stable_end(context: CheckpointContext) -> int:
    """The prompt's end without its volatile tail (`replay_tail_length`), where any of the rest is computed."""
    stable = context.num_tokens - context.replay_tail_length
    return stable if stable > context.reuse_token_length else context.num_tokens
