"""A plain-Python model of one scheduling step: what the engine and the session cost beyond the bare rules.

Same admission order, same plan, same tokens, text and stream as the engine over a null executor; but one
thread, one class, tuples and dicts, no validation, no cancellation, no recovery, no separate ledgers.
"""

from __future__ import annotations

from collections import deque


class PlainSequence:
    __slots__ = ("committed", "generated", "left", "max_tokens", "request_id", "stream", "text")

    def __init__(self, request_id, prompt_length, max_tokens):
        self.request_id = request_id
        self.left = prompt_length
        self.committed = 0
        self.max_tokens = max_tokens
        self.generated = []
        self.text = ""
        self.stream = deque()


class PlainEngine:
    """Mixed steps, first come first served, page-aligned chunks.

    Args:
        piece: token id to its text; None for requests that nobody streams.
    """

    def __init__(self, *, seats, page, max_num_tokens, max_chunk_tokens, max_step_tokens, max_input, piece):
        self.seats, self.page = seats, page
        self.max_num_tokens, self.max_chunk_tokens = max_num_tokens, max_chunk_tokens
        self.max_step_tokens, self.max_input = max_step_tokens, max_input
        self.piece = piece
        self.waiting = deque()
        self.running = []
        self.done = {}

    def submit(self, request_id, prompt_length, max_tokens):
        self.waiting.append(PlainSequence(request_id, prompt_length, max_tokens))

    def step(self, token_id):
        """Admit, plan, run a null forward that samples `token_id` everywhere, and finish.

        Returns: the plan, as (request id, is context, query length, past length).
        """
        while self.waiting and len(self.running) < self.seats:
            self.running.append(self.waiting.popleft())
        plan = self.plan()
        finished = False
        for sequence, context, query in plan:
            sequence.committed += query
            if context:
                sequence.left -= query
                if sequence.left:
                    continue
            sequence.generated.append(token_id)
            ended = len(sequence.generated) >= sequence.max_tokens
            if self.piece is not None:
                piece = self.piece(token_id)
                sequence.text += piece
                sequence.stream.append(((token_id,), piece, ended))
            if ended:
                finished = True
                self.done[sequence.request_id] = sequence
        described = [(s.request_id, context, query, s.committed - query) for s, context, query in plan]
        if finished:
            self.running = [s for s in self.running if s.request_id not in self.done]
        return described

    def plan(self):
        plan = [(s, False, 1) for s in self.running if not s.left]
        if len(plan) == len(self.running):
            return plan
        if plan:
            budget, cap = min(self.max_num_tokens, self.max_step_tokens) - len(plan), self.max_chunk_tokens
        else:
            budget, cap = self.max_step_tokens, self.max_input
        for s in self.running:
            if not s.left:
                continue
            n = min(s.left, cap, self.max_input, budget)
            if n < s.left:
                n = (s.committed + n) // self.page * self.page - s.committed
            if n > 0:
                plan.append((s, True, n))
                budget -= n
        return plan
