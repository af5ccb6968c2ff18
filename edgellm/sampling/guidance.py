"""Grammar guidance: which tokens may come next in a text of a given form.

`Guidance` belongs to a runtime: one tokenizer, and compiled grammars shared by the requests that ask for them.  `Guide`
belongs to one sequence and remembers how far its text is.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, deque
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, ref

import numpy as np

from edgellm.errors import AdmissionError, InvalidArgumentError
from edgellm.sampling.deep_stack import start_with_deep_stack
from edgellm.sampling.guide_vocabulary import GuideVocabulary, read_vocabulary
from edgellm.sampling.structured import StructuredOutput, explain

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from llguidance import LLMatcher, LLTokenizer

    from edgellm.sampling.structured import FormKey

MAX_CACHED_GRAMMARS = 64
MAX_COMPILING = 16
"""Forms compiled at the same time; more of them wait for one of these."""
NOTHING_ALLOWED = "the grammar allows no token that the model and the request leave"

_TOO_COMPLEX = frozenset({"ParserTooComplex", "LexerTooComplex", "InternalError"})


class _Form:
    """One form that is compiled, or being compiled: the guide that those of its sequences are copied from."""

    __slots__ = ("__weakref__", "guide")

    def __init__(self, guide: Future[Guide]) -> None:
        self.guide = guide


class Guidance:
    """Everything about guided sequences that a runtime's requests share.

    Nothing is built before the first guided request: then the vocabulary is read once (a quarter of a second for 49k
    tokens), and each distinct form is compiled once.  It is kept while any `StructuredOutput` that asked for it exists,
    so that a request which waits finds it; of the others the most recently used are.

    Threads: every method may be called from several threads.  Forms are compiled on threads of their own, so that an
    interrupt of who asks leaves nobody waiting; one that takes long holds up only who asks for it.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, *, max_cached_grammars: int = MAX_CACHED_GRAMMARS) -> None:
        """
        Args:
            tokenizer: with `token_bytes`, `encode`, `decode`, `special_token_ids` and `eos_token_ids`.
            vocab_size: width of the logits; ids beyond the tokenizer's own are never allowed.
            max_cached_grammars: forms kept although no `StructuredOutput` asks for them any more.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_cached = max_cached_grammars
        self._lock = threading.Lock()  # of the forms; never held while one is compiled
        self._forms: WeakValueDictionary[FormKey, _Form] = WeakValueDictionary()
        self._recent: OrderedDict[FormKey, _Form] = OrderedDict()
        self._held: dict[int, tuple[ref[StructuredOutput], _Form]] = {}  # by identity of the one that asked
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_compilers = 0
        self._bind_lock = threading.Lock()
        self._bound: tuple[GuideVocabulary, LLTokenizer] | None = None

    @property
    def num_cached_grammars(self) -> int:
        return len(self._forms)

    def start(self, structured: StructuredOutput) -> Guide:
        """A guide at the beginning of a text.

        Raises:
            AdmissionError: the form does not go with this tokenizer, or no text has it.  Nothing was changed.
        Cost: microseconds for a form that was compiled before.
        """
        first = self.begin(structured).result()
        with self._lock:
            return first.clone()

    def prepare(self, structured: StructuredOutput) -> None:
        """Compile a form now, so that `start` finds it while `structured` exists; raises as `start`."""
        self.begin(structured).result()

    def begin(self, structured: StructuredOutput) -> Future[Guide]:
        """Have a form compiled, without waiting.

        Returns:
            done when `start` finds the form; its result is no one's to use, its exception is what `start` raises.
            Cannot be cancelled.
        """
        key = structured.key
        with self._lock:
            form = self._forms.get(key)
            if form is None:
                # Kept only once somebody is at work on it: an interrupt in between leaves nothing that never ends.
                form = self._forms[key] = self._submit(structured, key)
            self._recent[key] = form
            self._recent.move_to_end(key)
            if len(self._recent) > self._max_cached:
                self._recent.popitem(last=False)
            self._hold(structured, form)
        return form.guide

    def _submit(self, structured: StructuredOutput, key: FormKey) -> _Form:
        guide: Future[Guide] = Future()
        guide.set_running_or_notify_cancel()
        # A copy, since what asks for the form keeps it.
        self._waiting.append(partial(self._fulfil, copy.copy(structured), key, guide))
        if self._num_compilers < MAX_COMPILING:
            try:
                _start(threading.Thread(target=self._compile_waiting, name="edgellm-forms", daemon=True))
            except RuntimeError as error:
                self._waiting.pop()
                raise AdmissionError(f"{structured.mode} cannot be compiled now ({error}); try again later") from error
            self._num_compilers += 1
        return _Form(guide)

    def _compile_waiting(self) -> None:
        """Compile forms until none waits."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_compilers -= 1
                    return
                fulfil = self._waiting.popleft()
            fulfil()
            del fulfil  # it keeps the guide

    def _hold(self, structured: StructuredOutput, form: _Form) -> None:
        held, identity = self._held, id(structured)
        held[identity] = ref(structured, lambda _: held.pop(identity, None)), form

    def _fulfil(self, structured: StructuredOutput, key: FormKey, guide: Future[Guide]) -> None:
        """Compile a form for everybody who waits for it; one that fails is forgotten."""
        try:
            first = self._compile(structured)
        except BaseException as error:
            with self._lock:
                self._forms.pop(key, None)
                self._recent.pop(key, None)
            if not isinstance(error, Exception):  # a panic of the engine is none, and nobody looks at this thread
                error = AdmissionError(f"{structured.mode} makes the grammar engine fail ({error}); change it")
            guide.set_exception(error)
        else:
            guide.set_result(first)

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


def _start(thread: threading.Thread) -> None:
    if not start_with_deep_stack(thread):
        thread.start()


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
