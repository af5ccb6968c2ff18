"""Grammar guidance: which tokens may come next in a text of a given form.

`Guidance` belongs to a runtime: one tokenizer, and compiled grammars shared by the requests that ask for them.  `Guide`
belongs to one sequence and remembers how far its text is.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm.errors import AdmissionError, InvalidArgumentError
from edgellm.sampling.guide_vocabulary import GuideVocabulary, read_vocabulary
from edgellm.sampling.structured import StructuredOutput, explain

if TYPE_CHECKING:
    import numpy.typing as npt
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHED_GRAMMARS = 64
NOTHING_ALLOWED = "the grammar allows no token that the model and the request leave"

_TOO_COMPLEX = frozenset({"ParserTooComplex", "LexerTooComplex", "InternalError"})


class Guidance:
    """Everything about guided sequences that a runtime's requests share.

    Nothing is built before the first guided request: then the vocabulary is read once (a quarter of a second for 49k
    tokens), and each distinct form is compiled once and kept, the least recently used going first.

    Threads: every method may be called from several threads.  The first to ask for a form compiles it, others who ask
    for the same one wait for that; a form that takes long holds up nobody else.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, *, max_cached_grammars: int = MAX_CACHED_GRAMMARS) -> None:
        """
        Args:
            tokenizer: with `token_bytes`, `encode`, `decode`, `special_token_ids` and `eos_token_ids`.
            vocab_size: width of the logits; ids beyond the tokenizer's own are never allowed.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_cached = max_cached_grammars
        self._lock = threading.Lock()  # of the forms; never held while one is compiled
        self._compiled: OrderedDict[StructuredOutput, Future[Guide]] = OrderedDict()
        self._bind_lock = threading.Lock()
        self._bound: tuple[GuideVocabulary, LLTokenizer] | None = None

    @property
    def num_cached_grammars(self) -> int:
        return len(self._compiled)

    def start(self, structured: StructuredOutput) -> Guide:
        """A guide at the beginning of a text.

        Raises:
            AdmissionError: the form does not go with this tokenizer, or no text has it.  Nothing was changed.
        Cost: microseconds for a form that was compiled before.
        """
        first = self._compiled_form(structured)
        with self._lock:
            return first.clone()

    def prepare(self, structured: StructuredOutput) -> None:
        """Compile a form now, so that `start` finds it; raises as `start`."""
        self._compiled_form(structured)

    def _compiled_form(self, structured: StructuredOutput) -> Guide:
        """The guide that those of a form are copied from."""
        while True:
            with self._lock:
                form = self._compiled.get(structured)
                if form is not None:
                    self._compiled.move_to_end(structured)
                else:
                    mine = self._compiled[structured] = Future()
                    if len(self._compiled) > self._max_cached:
                        self._compiled.popitem(last=False)
            if form is None:
                return self._fulfil(structured, mine)
            with contextlib.suppress(CancelledError):  # interrupted over there: begin again here
                return form.result()

    def _fulfil(self, structured: StructuredOutput, form: Future[Guide]) -> Guide:
        """Compile a form for everybody who waits for it; one that fails is forgotten."""
        try:
            first = self._compile(structured)
        except BaseException as error:
            with self._lock:
                if self._compiled.get(structured) is form:
                    del self._compiled[structured]
            if isinstance(error, Exception):
                form.set_exception(error)
            else:
                form.cancel()
            raise
        form.set_result(first)
        return first

    def _compile(self, structured: StructuredOutput) -> Guide:
        from llguidance import LLMatcher, LLParserLimits

        vocabulary, engine = self._bind()
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(engine, structured.grammar(), log_level=0, limits=limits)
        warnings = [] if matcher.is_error() else matcher.get_grammar_warnings()
        if matcher.is_error() or warnings:
            found = warnings[0] if warnings else matcher.get_error()
            raise AdmissionError(f"{structured.mode} cannot be enforced with this model: {structured.complaint(found)}")
        # The first mask is the dearest; computed here, every guide of this form has it.
        first = Guide(matcher, vocabulary)
        reason = first.restrict(np.zeros(self._vocab_size))
        if reason:
            raise AdmissionError(f"{structured.mode}: no text has this form ({reason}); change it")
        _check_spelling(structured, matcher, vocabulary)
        return first

    def _bind(self) -> tuple[GuideVocabulary, LLTokenizer]:
        from llguidance import LLTokenizer

        with self._bind_lock:
            if self._bound is None:
                try:
                    vocabulary = read_vocabulary(self._tokenizer, self._vocab_size)
                except InvalidArgumentError as error:
                    raise AdmissionError(str(error)) from error
                ends = sorted(vocabulary.end_ids)
                self._bound = vocabulary, LLTokenizer(vocabulary.wrapper, eos_token=ends)  # type: ignore[arg-type]
            return self._bound


def _check_spelling(structured: StructuredOutput, matcher: LLMatcher, vocabulary: GuideVocabulary) -> None:
    """Refuse a choice, or a beginning that every text of the form has, that ends nowhere but in a dead end."""
    whole = structured.choice is not None
    texts = [text.encode() for text in structured.choice or ()] or [matcher.compute_ff_bytes()]
    for text in texts:
        rest = vocabulary.wrapper.unspelled(text)
        if rest and (whole or not vocabulary.wrapper.can_go_on(rest)):
            raise AdmissionError(
                f"{structured.mode}: the tokens of this model cannot spell {rest.decode(errors='replace')!r:.80} "
                "of the required text; change it"
            )


class Guide:
    """How far one sequence's text is in its form, and what may follow.  Not thread-safe."""

    __slots__ = ("_bits", "_matcher", "_started", "_vocabulary")

    def __init__(self, matcher: LLMatcher, vocabulary: GuideVocabulary, *, started: bool = False) -> None:
        """Takes `matcher` over."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._started = started
        self._bits: npt.NDArray[np.int32] = np.zeros((vocabulary.size + 31) // 32, np.int32)

    @property
    def complete(self) -> bool:
        """Whether the text so far has the form; it may be that it can go on nevertheless."""
        return bool(not self._matcher.is_error() and self._matcher.is_accepting())

    def restrict(self, logits: npt.NDArray[np.float64]) -> str:
        """Set the logits of tokens that may not follow to -inf; end tokens may where the text is complete.

        Args:
            logits: (vocab_size,) float64; changed in place.
        Returns:
            "", or why nothing may follow (the logits are then of no use).
        Cost: microseconds to walk the grammar, and one pass over the row.
        """
        words, reason = self.allowed_words()
        if reason:
            return reason
        forbidden = np.unpackbits(~words.view(np.uint8), bitorder="little")[: len(logits)].view(np.bool_)
        np.putmask(logits, forbidden, -np.inf)
        return "" if np.isfinite(logits.max()) else NOTHING_ALLOWED

    def allowed_words(self) -> tuple[npt.NDArray[np.int32], str]:
        """The tokens that may follow, packed: bit (id % 32) of word (id / 32) is set.

        Returns:
            (ceil(vocab_size / 32),) int32, the guide's own until it is asked again; and "", or why nothing may follow
            (the words are then of no use).
        """
        bits = self._bits
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matcher.is_error():  # with a dead end it says that the text may end, which it may not
            return bits, self._failure()
        if not self._started and self._vocabulary.stripped is not None:
            stripped = np.packbits(self._vocabulary.stripped, bitorder="little")
            bits.view(np.uint8)[: len(stripped)] &= ~stripped
        if not self._matcher.is_accepting():
            self._forbid_early_ends(bits)
        return bits, ""

    def record(self, token_id: int) -> None:
        """The text goes on with this token.  One that may not follow makes every later `restrict` fail.  O(1)."""
        self._started = True
        if token_id not in self._vocabulary.end_ids:
            self._matcher.consume_token(token_id)

    def clone(self) -> Guide:
        """An independent guide at the same place."""
        return Guide(self._matcher.deep_copy(), self._vocabulary, started=self._started)

    def _forbid_early_ends(self, bits: npt.NDArray[np.int32]) -> None:
        """A grammar may name an end token, which ends the text also where the grammar goes on behind it."""
        octets = bits.view(np.uint8)
        for token_id in self._vocabulary.end_ids:
            bit = np.uint8(1 << token_id % 8)
            if octets[token_id // 8] & bit:
                behind = self._matcher.deep_copy()
                behind.consume_token(token_id)
                if not behind.is_accepting():
                    octets[token_id // 8] &= ~bit

    def _failure(self) -> str:
        reason, detail = self._matcher.stop_reason(), explain(self._matcher.get_error())
        if "NoExtensionBias" in (reason, *detail.split()):
            return "the grammar is at a dead end: the text is not complete and no token of the model can continue it"
        if reason in _TOO_COMPLEX and "satisfy" not in detail:
            return f"the grammar cannot be followed any further, simplify it ({reason}: {detail})"
        return f"the text left the grammar ({detail})"
