"""`StepBuckets`: the padded shapes that steps run as, so that captured graphs are used again.

A decode step is padded to the next larger number of rows.  A step with prompt chunks is padded to the next larger
number of tokens, and coarsely in rows: padding rows cost next to nothing, and every combination is a graph.  A step
that verifies proposals is padded in its logits rows as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from edgellm.runtime.step_inputs import StepShape

# Tokens of all prompt chunks of a step; at most a quarter of a step above 16 tokens is padding from 256 on.
TOKEN_BUCKETS = (16, 32, 64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
_LONG_CHUNK = 512  # from here on a chunk that is not its prompt's last is worth a graph without logits at start
_SOME_ROWS = 8


@dataclass(frozen=True, slots=True)
class StepBuckets:
    """Attributes:
    num_slots: most sequences of a step.
    decode_apart: rows of one token have an attention operator of their own.
    mixes_apart: also beside prompt chunks.
    verify_tokens: most tokens of a row that verifies proposals; 1 where nobody proposes.
    decode: decode rows of steps without prompt chunks, ascending: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ...
    rows: rows of either kind in steps with prompt chunks: 1, 8, 32, 128, ...
    verify: the same sizes as `decode`, of the tokens of verified rows.
    """

    num_slots: int
    decode_apart: bool
    mixes_apart: bool
    verify_tokens: int
    decode: tuple[int, ...]
    rows: tuple[int, ...]
    verify: tuple[int, ...]

    @classmethod
    def of(
        cls, num_slots: int, *, decode_apart: bool, mixes_apart: bool | None = None, verify_tokens: int = 1
    ) -> StepBuckets:
        return cls(
            num_slots,
            decode_apart,
            decode_apart if mixes_apart is None else mixes_apart,
            verify_tokens,
            decode_buckets(num_slots),
            row_buckets(num_slots),
            decode_buckets(num_slots * verify_tokens) if verify_tokens > 1 else (),
        )

    def padded(self, exact: StepShape) -> StepShape | None:
        """The shape that a step runs as; None where it is larger than any."""
        if exact.logits > exact.rows:
            return self._verify_step(exact)
        if not exact.context_rows or (not exact.decode_rows and exact.context_tokens == exact.context_rows):
            return self._decode_step(exact)
        tokens, rows = bucket_of(exact.context_tokens, TOKEN_BUCKETS), bucket_of(exact.context_rows, self.rows)
        decode = bucket_of(exact.decode_rows, self.rows) if exact.decode_rows else 0
        if tokens is None or rows is None or decode is None:
            return None
        return self._chunk_step(tokens, rows, decode, has_logits=exact.logits > 0)

    def at_start(self) -> list[StepShape]:
        """What is worth capturing before the first request, largest first.

        Every batch of decode rows, one prompt alone at every length, its long chunks without logits, and the longest
        step with several prompts beside any number of decode rows.
        """
        tokens = TOKEN_BUCKETS
        shapes = [self._chunk_step(count, self.rows[0], 0, has_logits=True) for count in tokens]
        shapes += [
            self._chunk_step(count, self.rows[0], 0, has_logits=False) for count in tokens if count >= _LONG_CHUNK
        ]
        shapes += [self._rows_of_one_token(rows) for rows in self.decode]
        some = bucket_of(2, self.rows) or self.rows[-1]
        beside = (0, *self.rows) if self.mixes_apart else (0,)
        shapes += [self._chunk_step(tokens[-1], some, decode, has_logits=True) for decode in beside]
        return _largest_first(shapes)

    def verified_at_start(self) -> list[StepShape]:
        """The same of steps that verify proposals: every batch of such rows without a prompt."""
        shapes = []
        for fewest_rows, rows in pairwise((0, *self.rows)):
            for fewest, tokens in pairwise((0, *self.verify)):
                # More tokens than rows, and no more than so many rows have.
                if fewest_rows + 2 <= tokens and fewest + 1 <= rows * self.verify_tokens:
                    shapes.append(StepShape(tokens, rows, 0, tokens))
        return _largest_first(shapes)

    def _decode_step(self, exact: StepShape) -> StepShape | None:
        rows = bucket_of(exact.rows, self.decode)
        return None if rows is None else self._rows_of_one_token(rows)

    def _verify_step(self, exact: StepShape) -> StepShape | None:
        """All rows are context rows: which of them are verified differs from step to step."""
        tokens = bucket_of(exact.tokens, tuple(sorted({*self.verify, *TOKEN_BUCKETS})))
        rows, logits = bucket_of(exact.rows, self.rows), bucket_of(exact.logits, self.verify)
        if tokens is None or rows is None or logits is None:
            return None
        return StepShape(tokens, rows, 0, logits)

    def _rows_of_one_token(self, rows: int) -> StepShape:
        return StepShape(0, 0, rows, rows) if self.decode_apart else StepShape(rows, rows, 0, rows)

    def _chunk_step(self, tokens: int, rows: int, decode: int, *, has_logits: bool) -> StepShape:
        return StepShape(tokens, rows, decode, min(rows + decode, self.num_slots) if has_logits else 0)


def decode_buckets(num_slots: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then by 8 to 32, by 16 to 64, by 32 to 256, by 64; and the largest."""
    sizes, size = [], 1
    while size < num_slots:
        sizes.append(size)
        size += size if size < 8 else 8 if size < 32 else 16 if size < 64 else 32 if size < 256 else 64
    return (*sizes, num_slots)


def row_buckets(num_slots: int) -> tuple[int, ...]:
    """1, 8, 32, 128, ... and the largest.

    One row alone has a bucket of its own: attention spreads its keys over the device by how many rows there can be.
    """
    sizes, size = [], 1
    while size < num_slots:
        sizes.append(size)
        size = _SOME_ROWS if size == 1 else 4 * size
    return (*sizes, num_slots)


def _largest_first(shapes: list[StepShape]) -> list[StepShape]:
    """Each once."""
    return sorted(set(shapes), key=lambda shape: (-shape.tokens, -shape.rows, -shape.logits))


def bucket_of(size: int, buckets: tuple[int, ...]) -> int | None:
    """The smallest bucket that holds `size`; None where there is none."""
    return next((bucket for bucket in buckets if bucket >= size), None)
