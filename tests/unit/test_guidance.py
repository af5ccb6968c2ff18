"""`Guidance` and `Guide`: which tokens may follow, how guided rows are sampled, and the cache of compiled forms."""

from __future__ import annotations

import gc
import json
import linecache
import re
import sys
import threading
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from edgellm.decoding.verify import verify_runs
from edgellm.errors import AdmissionError, InvalidArgumentError
from edgellm.sampling.guidance import Guidance, Guide
from edgellm.sampling.guide_vocabulary import VocabularyWrapper, read_vocabulary
from edgellm.sampling.params import SamplingParams
from edgellm.sampling.sampler import NO_TOKEN, Sampler, SamplingState
from edgellm.sampling.structured import StructuredOutput
from edgellm.testing.toy_tokenizer import EOS_ID, PAD_ID, ToyTokenizer
from edgellm.tokenization.tokenizer import load_tokenizer

VOCAB = 512
TOKENIZER = ToyTokenizer(VOCAB)
GUIDANCE = Guidance(TOKENIZER, VOCAB)


def byte_id(character: str) -> int:
    return TOKENIZER.encode(character)[0]


def allowed(guide: Guide, size: int = VOCAB) -> list[int]:
    logits = np.zeros(size)
    assert guide.restrict(logits) == ""
    return np.flatnonzero(logits == 0).tolist()


def state_of(structured: StructuredOutput | None, guidance: Guidance = GUIDANCE, **params: Any) -> SamplingState:
    guide = None if structured is None else guidance.start(structured)
    made = SamplingParams(structured=structured, **{"temperature": 0.0, **params})
    return SamplingState(made, [5, 6], VOCAB, TOKENIZER.eos_token_ids, guide=guide)


def generate(state: SamplingState, *, seed: int, max_tokens: int = 200) -> tuple[str, str]:
    """(text, error) of a row whose logits are random, recorded until an end token or an error."""
    rng = np.random.default_rng(seed)
    token_ids: list[int] = []
    for _ in range(max_tokens):
        row = torch.from_numpy(rng.normal(size=(1, state.vocab_size)).astype(np.float32))
        result = Sampler().sample(row, [state])
        if result.errors:
            return TOKENIZER.decode(token_ids), result.errors[0]
        state.record(result.token_ids[0])
        if result.token_ids[0] == EOS_ID:
            return TOKENIZER.decode(token_ids), ""
        token_ids.append(result.token_ids[0])
    return TOKENIZER.decode(token_ids), "too long"


class TestGuide:
    def test_allowed_tokens_step_by_step(self):
        guide = GUIDANCE.start(StructuredOutput(regex="ab?"))
        assert (allowed(guide), guide.complete) == ([byte_id("a")], False)
        guide.record(byte_id("a"))
        assert (allowed(guide), guide.complete) == ([EOS_ID, byte_id("b")], True)
        guide.record(byte_id("b"))
        assert (allowed(guide), guide.complete) == ([EOS_ID], True)
        guide.record(EOS_ID)
        assert allowed(guide) == [EOS_ID]

    def test_tokens_of_several_bytes(self):
        guide = GUIDANCE.start(StructuredOutput(regex="w26[0-9] !"))
        assert allowed(guide) == [byte_id("w"), *range(260, 270)]
        guide.record(265)
        assert allowed(guide) == [byte_id("!")]

    def test_special_tokens_are_no_text(self):
        everything = allowed(GUIDANCE.start(StructuredOutput(regex="(?s:.*)")))
        assert EOS_ID in everything
        assert PAD_ID not in everything
        assert byte_id("<") in everything

    def test_only_bytes_that_continue_a_character(self):
        guide = GUIDANCE.start(StructuredOutput(regex="猫|犬"))
        for token_id in TOKENIZER.encode("猫"):
            assert token_id in allowed(guide)
            guide.record(token_id)
        assert allowed(guide) == [EOS_ID]

    def test_forbidden_logits_alone_change(self):
        logits = np.linspace(-5.0, 5.0, VOCAB)
        before = logits.copy()
        GUIDANCE.start(StructuredOutput(choice=["a", "b"])).restrict(logits)
        kept = [byte_id("a"), byte_id("b")]
        assert logits[kept].tolist() == before[kept].tolist()
        assert np.isneginf(np.delete(logits, kept)).all()

    def test_guides_of_one_form_and_clones_are_independent(self):
        form = StructuredOutput(regex="ab")
        first, second = GUIDANCE.start(form), GUIDANCE.start(form)
        first.record(byte_id("a"))
        copied = first.clone()
        copied.record(byte_id("b"))
        assert allowed(second) == [byte_id("a")]
        assert allowed(first) == [byte_id("b")]
        assert allowed(copied) == [EOS_ID]

    def test_a_token_that_may_not_follow_fails_from_then_on(self):
        guide = GUIDANCE.start(StructuredOutput(regex="ab"))
        guide.record(byte_id("b"))
        assert guide.restrict(np.zeros(VOCAB)).startswith("the text left the grammar (")
        assert not guide.complete

    def test_an_undecided_row_says_so(self):
        guide = GUIDANCE.start(StructuredOutput(regex="ab"))
        logits = np.full(VOCAB, -np.inf)
        logits[7] = 0.0
        assert guide.restrict(logits) == "the grammar allows no token that the model and the request leave"

    def test_several_end_tokens(self):
        tokenizer = ToyTokenizer(300, eos_token_ids=(1, 299))
        guide = Guidance(tokenizer, 300).start(StructuredOutput(regex="a"))
        assert allowed(guide, 300) == [byte_id("a")]
        guide.record(byte_id("a"))
        assert allowed(guide, 300) == [1, 299]
        guide.record(299)
        assert guide.complete

    def test_logits_wider_and_narrower_than_the_tokenizer(self):
        wide = Guidance(ToyTokenizer(300), 333).start(StructuredOutput(regex="(?s:.*)"))
        assert max(allowed(wide, 333)) == 299
        narrow = Guidance(ToyTokenizer(300), 101).start(StructuredOutput(regex="[a-z]"))
        assert allowed(narrow, 101) == [byte_id("a"), byte_id("b")]


class TestDeadEnds:
    @pytest.fixture
    def narrow(self) -> Guidance:
        """A vocabulary in which "c" cannot be written."""
        return Guidance(ToyTokenizer(101), 101)

    def test_a_dead_end_never_ends_the_text_as_if_it_were_complete(self, narrow):
        guide = narrow.start(StructuredOutput(regex="ab[ac]c"))
        for letter in "aba":
            guide.record(byte_id(letter))
        reason = guide.restrict(np.zeros(101))
        assert reason.startswith("the grammar is at a dead end: the text is not complete and no token")
        assert not guide.complete

    def test_a_form_without_any_text_is_refused_at_once(self, narrow):
        for form in (StructuredOutput(choice=["c"]), StructuredOutput(ebnf="start: A\nA: /b/ & /c/")):
            with pytest.raises(AdmissionError, match=f"{form.mode}: no text has this form"):
                narrow.start(form)
        assert narrow.num_cached_grammars == 0

    @pytest.mark.parametrize(
        ("form", "rest"),
        [
            ({"choice": ["a", "abc!"]}, "c!"),
            ({"regex": "abc[0-9]"}, "c"),
            ({"json_schema": {"const": "ac"}}, 'c"'),
        ],
    )
    def test_required_text_that_the_vocabulary_cannot_spell_is_refused_at_once(self, narrow, form, rest):
        with pytest.raises(AdmissionError, match=f"the tokens of this model cannot spell '{rest}'"):
            narrow.start(StructuredOutput(**form))
        assert narrow.num_cached_grammars == 0


class TestSampling:
    def test_greedy_takes_the_best_allowed_token(self):
        logits = torch.arange(VOCAB, dtype=torch.float32)[None]
        assert Sampler().sample(logits, [state_of(StructuredOutput(choice=["a", "b"]))]).token_ids == [byte_id("b")]

    def test_guided_rows_are_not_plain_and_others_of_the_call_are_untouched(self):
        rows = torch.from_numpy(np.random.default_rng(0).normal(size=(3, VOCAB)).astype(np.float32))
        guided = state_of(StructuredOutput(choice=["a", "b"]))
        states = [state_of(None), guided, state_of(None, temperature=1.0, seed=3)]
        assert [state.plain_greedy for state in states] == [True, False, False]
        together = Sampler().sample(rows, states)
        alone = [Sampler().sample(rows[index : index + 1], [state]).token_ids[0] for index, state in enumerate(states)]
        assert together.token_ids == alone
        assert together.token_ids[1] in (byte_id("a"), byte_id("b"))

    def test_reading_a_state_changes_nothing(self):
        row = torch.from_numpy(np.random.default_rng(0).normal(size=(1, VOCAB)).astype(np.float32))
        state = state_of(StructuredOutput(regex="[a-z]+"), temperature=1.0, seed=1)
        assert Sampler().sample(row, [state]).token_ids == Sampler().sample(row, [state]).token_ids

    def test_bias_orders_allowed_tokens_and_allows_none(self):
        logits = torch.zeros(1, VOCAB)
        form = StructuredOutput(choice=["a", "b"])
        assert Sampler().sample(logits, [state_of(form, logit_bias={byte_id("b"): 1})]).token_ids == [byte_id("b")]
        biased = state_of(form, logit_bias={byte_id("z"): 100, byte_id("a"): -100})
        assert Sampler().sample(logits, [biased]).token_ids == [byte_id("b")]
        both = state_of(form, logit_bias={byte_id("a"): -100, byte_id("b"): -100})
        assert Sampler().sample(logits, [both]).token_ids == [byte_id("a")]

    def test_logprobs_are_taken_after_bias_and_before_the_mask(self):
        logits = torch.zeros(1, VOCAB)
        logits[0, 7] = 3.0
        state = state_of(StructuredOutput(choice=["a"]), logprobs=1, logit_bias={byte_id("a"): 2})
        result = Sampler().sample(logits, [state])
        free = Sampler().sample(logits, [state_of(None, logprobs=2, logit_bias={byte_id("a"): 2})])
        assert result.logprobs[0] is not None
        assert free.logprobs[0] is not None
        assert result.token_ids == [byte_id("a")]
        assert result.logprobs[0].top == ((7, free.logprobs[0].logprob),)
        assert (result.logprobs[0].token_id, result.logprobs[0].logprob) == free.logprobs[0].top[1]

    def test_penalties_act_among_allowed_tokens(self):
        logits = torch.zeros(1, VOCAB)
        logits[0, byte_id("a")], logits[0, byte_id("b")] = 2.0, 1.5
        state = state_of(StructuredOutput(regex="[ab]+"), presence_penalty=1.0)
        assert Sampler().sample(logits, [state]).token_ids == [byte_id("a")]
        state.record(byte_id("a"))
        assert Sampler().sample(logits, [state]).token_ids == [byte_id("b")]

    def test_min_tokens_holds_the_end_back_where_the_text_can_go_on(self):
        logits = torch.zeros(1, VOCAB)
        logits[0, EOS_ID] = 5.0
        state = state_of(StructuredOutput(regex="[ab]*"), min_tokens=2)
        for _ in range(2):
            (token_id,) = Sampler().sample(logits, [state]).token_ids
            assert token_id == byte_id("a")
            state.record(token_id)
        assert Sampler().sample(logits, [state]).token_ids == [EOS_ID]

    def test_min_tokens_beyond_the_grammar_is_an_error_of_the_row(self):
        state = state_of(StructuredOutput(choice=["a"]), min_tokens=2)
        state.record(byte_id("a"))
        result = Sampler().sample(torch.zeros(1, VOCAB), [state])
        assert result.token_ids == [NO_TOKEN]
        assert result.errors == {0: "min_tokens=2 excludes every token that the grammar leaves"}

    def test_a_dead_end_fails_its_row_alone(self):
        dead = state_of(StructuredOutput(regex="ab"))
        dead.record(byte_id("z"))
        result = Sampler().sample(torch.zeros(2, VOCAB), [dead, state_of(StructuredOutput(choice=["q"]))])
        assert list(result.errors) == [0]
        assert result.token_ids == [NO_TOKEN, byte_id("q")]

    def test_clones_carry_the_grammar(self):
        state = state_of(StructuredOutput(regex="ab"))
        twin = state.clone()
        state.record(byte_id("a"))
        logits = torch.zeros(1, VOCAB)
        assert Sampler().sample(logits, [state]).token_ids == [byte_id("b")]
        assert Sampler().sample(logits, [twin]).token_ids == [byte_id("a")]

    def test_a_form_without_a_guide_is_refused(self):
        with pytest.raises(InvalidArgumentError, match="structured is set and nothing here follows its grammar"):
            SamplingState(SamplingParams(structured=StructuredOutput(regex="a")), [1], VOCAB)


class TestRandomTexts:
    @settings(deadline=None, max_examples=60)
    @given(st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=6), st.integers(0, 2**32), st.booleans())
    def test_choice(self, texts, seed, greedy):
        state = state_of(StructuredOutput(choice=texts), temperature=0.0 if greedy else 1.0, seed=seed)
        text, error = generate(state, seed=seed)
        assert error == ""
        assert text in texts

    # Endless repetitions are bounded so that every random walk ends.
    ATOMS = st.sampled_from(["a", "b", "[0-9]", "[a-c]", "w26[0-4] ", "é", "[^x]", "(?:ab|c)"])
    PARTS = st.tuples(ATOMS, st.sampled_from(["", "?", "{2}", "{0,3}", "{1,4}"])).map("".join)
    REGEXES = st.lists(st.lists(PARTS, min_size=1, max_size=4).map("".join), min_size=1, max_size=3).map("|".join)

    @settings(deadline=None, max_examples=60)
    @given(REGEXES, st.integers(0, 2**32), st.sampled_from([0.0, 0.7, 5.0]), st.sampled_from([0, 3]))
    def test_regex(self, regex, seed, temperature, top_k):
        state = state_of(StructuredOutput(regex=regex), temperature=temperature, seed=seed, top_k=top_k)
        text, error = generate(state, seed=seed)
        assert error == ""
        assert re.fullmatch(regex, text), text

    LEAVES = st.sampled_from(
        [
            {"type": "integer", "minimum": -5, "maximum": 40},
            {"type": "string", "maxLength": 4},
            {"enum": ["x", 7, None, [1]]},
            {"type": "boolean"},
        ]
    )
    SCHEMAS = st.recursive(
        LEAVES,
        lambda inner: st.one_of(
            inner.map(lambda one: {"type": "array", "items": one, "maxItems": 2}),
            st.dictionaries(st.sampled_from(["a", "b c", "\u00e9"]), inner, min_size=1).map(
                lambda named: {
                    "type": "object",
                    "properties": named,
                    "required": sorted(named)[:2],
                    "additionalProperties": False,
                }
            ),
        ),
        max_leaves=4,
    )

    @settings(deadline=None, max_examples=60)
    @given(SCHEMAS, st.integers(0, 2**32))
    def test_json_schema(self, schema, seed):
        state = state_of(StructuredOutput(json_schema=schema), temperature=1.0, seed=seed)
        text, error = generate(state, seed=seed, max_tokens=3000)
        assert error == ""
        assert valid(json.loads(text), schema), text


def valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value has one of the schemas above."""
    if "enum" in schema:
        return value in schema["enum"] and not isinstance(value, bool)
    kind = schema["type"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "array":
        return isinstance(value, list) and len(value) <= 2 and all(valid(one, schema["items"]) for one in value)
    named = schema["properties"]
    complete = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(named)
    return complete and all(valid(one, named[name]) for name, one in value.items())


class TestSpeculation:
    @pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 4, "presence_penalty": 0.5}])
    def test_verified_chains_give_the_tokens_of_plain_decoding(self, params):
        form = StructuredOutput(regex="[ab]{2}[0-9]{2}")
        rows = torch.from_numpy(np.random.default_rng(5).normal(size=(5, VOCAB)).astype(np.float32))
        plain, expected = state_of(form, **params), []
        for place in range(5):
            expected += Sampler().sample(rows[place : place + 1], [plain]).token_ids
            plain.record(expected[-1])
        assert re.fullmatch("[ab]{2}[0-9]{2}", TOKENIZER.decode(expected[:4]))
        assert expected[4] == EOS_ID
        for wrong in range(5):  # the proposal at this place is not what is chosen there
            chain = [token if place != wrong else byte_id("z") for place, token in enumerate(expected[:4])]
            state = state_of(form, **params)
            (run,) = verify_runs(rows, [chain], Sampler(), [state])
            assert (run.token_ids, run.error) == (expected[: wrong + 1], "")
            assert state.num_output == 0
            assert Sampler().sample(rows[:1], [state]).token_ids == expected[:1]


class TestTokenizers:
    def test_byte_level(self, tmp_path):
        tokenizer = load_tokenizer(tiny_tokenizers.byte_level(tmp_path))
        guide = Guidance(tokenizer, tokenizer.vocab_size).start(StructuredOutput(choice=["the 猫"]))
        self.walk(guide, tokenizer, "the 猫")

    def test_special_tokens_of_a_grammar(self, tmp_path):
        tokenizer = load_tokenizer(tiny_tokenizers.byte_level(tmp_path))
        guidance = Guidance(tokenizer, tokenizer.vocab_size)
        guide = guidance.start(StructuredOutput(ebnf='start: <|im_start|> "a"'))
        assert allowed(guide, tokenizer.vocab_size) == [tokenizer.token_id("<|im_start|>")]
        with pytest.raises(AdmissionError, match=r"ebnf cannot be enforced with this model: .*unknown special token"):
            guidance.start(StructuredOutput(ebnf='start: <|nobody|> "a"'))

    @pytest.mark.parametrize("make", [tiny_tokenizers.byte_level, tiny_tokenizers.byte_fallback])
    @pytest.mark.parametrize("name", ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>", "<think>"])
    def test_required_text_that_spells_a_special_token_is_text(self, tmp_path, make, name):
        tokenizer = load_tokenizer(make(tmp_path))
        guidance = Guidance(tokenizer, tokenizer.vocab_size)
        escaped = re.sub(r"([|])", r"\\\1", name)
        for form, text in (
            ({"choice": [name]}, name),
            ({"choice": [f"the{name}b{name} cat"]}, f"the{name}b{name} cat"),
            ({"regex": f"x{escaped}y"}, f"x{name}y"),
            ({"json_schema": {"const": name}}, f'"{name}"'),
            ({"json_schema": {"enum": [f"q{name}user"]}}, f'"q{name}user"'),
            ({"ebnf": f'start: "{name}" "z"'}, f"{name}z"),
        ):
            token_ids = self.follow(guidance.start(StructuredOutput(**form)), tokenizer)
            assert tokenizer.decode(token_ids, skip_special_tokens=True) == text
            assert tokenizer.special_token_ids.isdisjoint(token_ids)

    @pytest.mark.parametrize("make", [tiny_tokenizers.byte_level, tiny_tokenizers.byte_fallback])
    def test_a_long_required_text_with_special_names_is_spelt_exactly(self, tmp_path, make):
        tokenizer = load_tokenizer(make(tmp_path))
        wrapper = read_vocabulary(tokenizer, tokenizer.vocab_size).wrapper
        rest = "Hello</s>w<|im_end|>" * 800
        while rest:
            token_ids = wrapper(rest)
            beginning = b"".join(map(tokenizer.token_bytes, token_ids)).decode()
            assert rest.startswith(beginning)
            assert len(token_ids) >= 16 or beginning == rest
            assert tokenizer.special_token_ids.isdisjoint(token_ids)
            rest = rest.removeprefix(beginning)

    def test_a_beginning_has_enough_tokens_for_what_the_engine_takes_back(self):
        """It takes up to four from the end; none left would leave the row without its mask."""
        whole = SimpleNamespace(encode=lambda text, add_special_tokens: [0] * (len(text) // 128))
        wrapper = VocabularyWrapper(whole, [b"a" * 128, b"b"], [], 1)
        assert wrapper("a" * 10_240) == [0] * 16
        assert wrapper("a" * 640) == [0] * 5

    def test_a_step_tokenises_a_bounded_part_of_a_text_without_choices(self, monkeypatch):
        tokenizer, sizes = ToyTokenizer(VOCAB), []
        original = tokenizer.encode

        def encode(text: str, **options: Any) -> list[int]:
            sizes.append(len(text))
            return original(text, **options)

        monkeypatch.setattr(tokenizer, "encode", encode)
        text = "a" * 3000 + "c"
        guide = Guidance(tokenizer, VOCAB).start(StructuredOutput(choice=[text, "b"]))
        for character in text:
            assert byte_id(character) in allowed(guide)
            guide.record(byte_id(character))
        assert allowed(guide) == [EOS_ID]
        assert len(sizes) > 2000
        assert max(sizes) <= 257  # a line feed is written before it

    def test_a_property_named_as_a_special_token(self, tmp_path):
        tokenizer = load_tokenizer(tiny_tokenizers.byte_level(tmp_path))
        schema = {
            "type": "object",
            "properties": {"<|im_end|>": {"const": 5}},
            "required": ["<|im_end|>"],
            "additionalProperties": False,
        }
        guide = Guidance(tokenizer, tokenizer.vocab_size).start(StructuredOutput(json_schema=schema))
        assert json.loads(tokenizer.decode(self.follow(guide, tokenizer))) == {"<|im_end|>": 5}

    def test_text_around_a_special_name_is_written_as_the_tokenizer_would(self, tmp_path):
        tokenizer = load_tokenizer(tiny_tokenizers.byte_level(tmp_path))
        guide = Guidance(tokenizer, tokenizer.vocab_size).start(StructuredOutput(choice=["the cat<|im_end|>the mat"]))
        token_ids = self.follow(guide, tokenizer)
        assert token_ids[: len(tokenizer.encode("the cat"))] == tokenizer.encode("the cat")
        assert token_ids[-len(tokenizer.encode("the mat")) :] == tokenizer.encode("the mat")

    def test_an_end_token_inside_a_grammar_never_ends_an_incomplete_text(self, tmp_path):
        tokenizer = load_tokenizer(tiny_tokenizers.byte_level(tmp_path))
        guidance, end = Guidance(tokenizer, tokenizer.vocab_size), tokenizer.token_id("<|im_end|>")
        last = guidance.start(StructuredOutput(ebnf='start: "a" <|im_end|>'))
        middle = guidance.start(StructuredOutput(ebnf='start: "a" <|im_end|> "b"'))
        for guide in (last, middle):
            guide.record(tokenizer.encode("a")[0])
        assert allowed(last, tokenizer.vocab_size) == [end]
        assert middle.restrict(np.zeros(tokenizer.vocab_size)).startswith("the grammar allows no token")

    def test_byte_fallback_text_is_exact_although_decoding_strips_its_first_space(self, tmp_path):
        tokenizer = load_tokenizer(tiny_tokenizers.byte_fallback(tmp_path))
        size = tokenizer.vocab_size
        guidance = Guidance(tokenizer, size)
        guide = guidance.start(StructuredOutput(regex="[ ]*(Hello|w) w.*"))
        first = {tokenizer.token_bytes(token_id) for token_id in allowed(guide, size)}
        assert {b"H", b"Hel", b"Hello", b"w"} <= first
        assert not any(piece.startswith(b" ") for piece in first)
        self.walk(guide, tokenizer, "Hello w")
        with pytest.raises(AdmissionError, match="no text has this form"):
            guidance.start(StructuredOutput(choice=[" Hello"]))

    def test_text_that_the_tokenizer_would_change_is_written_as_it_stands(self, tmp_path):
        """Its normalizer writes all letters small; nothing else is possible in this grammar than a capital one."""
        tokenizer = load_tokenizer(tiny_tokenizers.byte_level(tmp_path))
        tokenizer._backend.normalizer = normalizers.Lowercase()
        guidance = Guidance(tokenizer, tokenizer.vocab_size)
        self.walk(guidance.start(StructuredOutput(choice=["The CAT \u732b"])), tokenizer, "The CAT \u732b")

    def test_a_decoder_that_changes_text_is_refused(self, tmp_path):
        tokenizer = load_tokenizer(tiny_tokenizers.byte_level(tmp_path, nested_decoder=True))
        with pytest.raises(AdmissionError, match=r"not available with this tokenizer: token \d+ decodes to"):
            Guidance(tokenizer, tokenizer.vocab_size).start(StructuredOutput(regex="a"))

    def test_a_model_without_an_end_token_is_refused(self):
        with pytest.raises(AdmissionError, match="needs an end token, and this model's tokenizer has none"):
            Guidance(ToyTokenizer(300, eos_token_ids=()), 300).start(StructuredOutput(regex="a"))

    def follow(self, guide: Guide, tokenizer: Any) -> list[int]:
        """Ids of the text that begins with the first allowed token at every step, and ends where it may."""
        token_ids: list[int] = []
        while len(token_ids) < 100:
            options = allowed(guide, tokenizer.vocab_size)
            if not set(tokenizer.eos_token_ids).isdisjoint(options):
                assert guide.complete
                return token_ids
            token_ids.append(options[0])
            guide.record(options[0])
        raise AssertionError(tokenizer.decode(token_ids))

    def walk(self, guide: Guide, tokenizer: Any, text: str) -> None:
        """Follow the text by the longest allowed token each time; then only end tokens may come."""
        token_ids: list[int] = []
        while tokenizer.decode(token_ids) != text:
            options = allowed(guide, tokenizer.vocab_size)
            rest = text.encode().removeprefix(b"".join(map(tokenizer.token_bytes, token_ids)))
            fitting = [one for one in options if one not in tokenizer.eos_token_ids]
            fitting = [one for one in fitting if rest.startswith(tokenizer.token_bytes(one))]
            token_ids.append(max(fitting, key=lambda one: len(tokenizer.token_bytes(one))))
            guide.record(token_ids[-1])
        assert guide.complete
        assert set(tokenizer.eos_token_ids) <= set(allowed(guide, tokenizer.vocab_size))


def source_of(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


class TestCache:
    def test_equal_forms_compile_once_and_the_oldest_goes_first(self, monkeypatch):
        guidance = Guidance(TOKENIZER, VOCAB, max_cached_grammars=2)
        compiled: list[str] = []
        original = Guidance._compile

        def count(self: Guidance, structured: StructuredOutput) -> Guide:
            compiled.append(str(structured.regex))
            return original(self, structured)

        monkeypatch.setattr(Guidance, "_compile", count)
        for regex in ("a", "b", "a", "c", "a", "b"):
            guidance.start(StructuredOutput(regex=regex))
        assert compiled == ["a", "b", "c", "b"]
        assert guidance.num_cached_grammars == 2

    @pytest.fixture
    def slow(self, monkeypatch):
        """Compiling `regex="b"` waits for `go`; `compiled` counts what was begun."""
        shared = SimpleNamespace(begun=threading.Event(), go=threading.Event(), compiled=[])
        original = Guidance._compile

        def compile_slowly(guidance: Guidance, structured: StructuredOutput) -> Guide:
            shared.compiled.append(structured.regex)
            if structured.regex == "b":
                shared.begun.set()
                assert shared.go.wait(20)
            return original(guidance, structured)

        monkeypatch.setattr(Guidance, "_compile", compile_slowly)
        yield shared
        shared.go.set()

    def test_a_form_that_takes_long_holds_up_no_other(self, slow):
        guidance = Guidance(TOKENIZER, VOCAB)
        guidance.prepare(StructuredOutput(regex="a"))
        found: list[list[int]] = []

        def ask_for_others() -> None:
            found.extend(allowed(guidance.start(StructuredOutput(regex=letter))) for letter in "ac")

        builder = threading.Thread(target=guidance.prepare, args=(StructuredOutput(regex="b"),))
        builder.start()
        assert slow.begun.wait(20)
        other = threading.Thread(target=ask_for_others)
        other.start()
        other.join(20)
        assert found == [[byte_id("a")], [byte_id("c")]]
        assert builder.is_alive()
        slow.go.set()
        builder.join()

    def test_who_asks_for_a_form_that_is_being_compiled_waits_for_it(self, slow):
        guidance = Guidance(TOKENIZER, VOCAB)
        found: list[list[int]] = []

        def ask() -> None:
            found.append(allowed(guidance.start(StructuredOutput(regex="b"))))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert slow.begun.wait(20)
        slow.go.set()
        for thread in threads:
            thread.join(20)
        assert found == [[byte_id("b")]] * 3
        assert slow.compiled == ["b"]

    @pytest.mark.parametrize("place", range(28))
    def test_an_interrupt_at_any_place_leaves_nobody_waiting(self, place):
        """One that comes between two lines of who asks first; the next to ask for the form gets it."""
        guidance, form = Guidance(TOKENIZER, VOCAB), StructuredOutput(regex="b")
        codes = {getattr(Guidance, name).__code__ for name in ("prepare", "begin", "_submit", "_hold")}
        lines = 0

        def interrupt(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal lines
            # Leaving a block comes back to its line; the interpreter looks for interrupts behind that.
            if frame.f_code in codes and event == "line" and not source_of(frame).startswith("with "):
                lines += 1
                if lines == place + 1:
                    raise KeyboardInterrupt
            return interrupt if frame.f_code in codes else None

        usual = sys.gettrace()
        sys.settrace(interrupt)
        try:
            guidance.prepare(form)
        except KeyboardInterrupt:
            assert lines == place + 1
        finally:
            sys.settrace(usual)
        assert lines >= min(place + 1, 15)
        assert guidance.begin(form).result(20)
        assert allowed(guidance.start(form)) == [byte_id("b")]

    def test_who_stops_waiting_takes_the_form_from_nobody(self, slow):
        guidance = Guidance(TOKENIZER, VOCAB)
        first, second = (guidance.begin(StructuredOutput(regex="b")) for _ in range(2))
        assert not first.cancel()
        slow.go.set()
        assert second.result(20)
        assert slow.compiled == ["b"]

    def test_an_engine_that_panics_refuses_the_form_and_goes_on(self, monkeypatch):
        class PanicError(BaseException):
            pass

        guidance, original = Guidance(TOKENIZER, VOCAB), Guidance._compile

        def panic(guidance: Guidance, structured: StructuredOutput) -> Guide:
            if structured.regex == "b":
                raise PanicError("index out of bounds")
            return original(guidance, structured)

        monkeypatch.setattr(Guidance, "_compile", panic)
        for _ in range(2):
            with pytest.raises(AdmissionError, match=r"regex makes the grammar engine fail \(index out of bounds\)"):
                guidance.start(StructuredOutput(regex="b"))
        assert guidance.num_cached_grammars == 0
        assert allowed(guidance.start(StructuredOutput(regex="a"))) == [byte_id("a")]

    def test_a_form_that_somebody_holds_is_never_compiled_again(self, monkeypatch):
        """A request that waits holds its own; the actor must not have to compile it, however many came since."""
        guidance = Guidance(TOKENIZER, VOCAB, max_cached_grammars=2)
        waiting = [StructuredOutput(regex="a" * number) for number in range(1, 9)]
        twin = StructuredOutput(regex="a")
        for form in (*waiting, twin):
            guidance.prepare(form)
        for number in range(1, 6):
            guidance.prepare(StructuredOutput(regex="b" * number))
        monkeypatch.setattr(Guidance, "_compile", None)
        for form in waiting:
            assert allowed(guidance.start(form)) == [byte_id("a")]
        del waiting[0], form
        assert allowed(guidance.start(twin)) == [byte_id("a")]
        assert guidance.num_cached_grammars == 8

    def test_forms_that_nobody_holds_go(self):
        guidance = Guidance(TOKENIZER, VOCAB, max_cached_grammars=2)
        held = [StructuredOutput(regex="a" * number) for number in range(1, 9)]
        for form in held:
            guidance.prepare(form)
        assert guidance.num_cached_grammars == 8
        del held, form
        gc.collect()
        assert guidance.num_cached_grammars == 2
        assert guidance._held == {}

    def test_many_forms_at_once_take_a_bounded_number_of_threads(self, slow, monkeypatch):
        monkeypatch.setattr("edgellm.sampling.guidance.MAX_COMPILING", 2)
        guidance = Guidance(TOKENIZER, VOCAB)
        before = threading.active_count()
        first = guidance.begin(StructuredOutput(regex="b"))
        others = [guidance.begin(StructuredOutput(regex="a" * number)) for number in range(1, 30)]
        assert threading.active_count() <= before + 2
        for one in others:
            assert one.result(20)
        assert not first.done()
        slow.go.set()
        assert first.result(20)

    def test_no_thread_left_to_compile_on(self, monkeypatch):
        def fail(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        guidance = Guidance(TOKENIZER, VOCAB)
        form = StructuredOutput(regex="a")
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            with pytest.raises(AdmissionError, match="regex cannot be compiled now"):
                guidance.start(form)
        assert allowed(guidance.start(form)) == [byte_id("a")]

    def test_prepare_leaves_nothing_to_compile(self, monkeypatch):
        guidance = Guidance(TOKENIZER, VOCAB)
        guidance.prepare(StructuredOutput(regex="a"))
        monkeypatch.setattr(Guidance, "_compile", None)
        assert allowed(guidance.start(StructuredOutput(regex="a"))) == [byte_id("a")]

    def test_nothing_is_read_before_the_first_form(self):
        class Untouchable:
            def __getattr__(self, name: str) -> None:
                raise AssertionError(name)

        assert Guidance(Untouchable(), VOCAB).num_cached_grammars == 0

    def test_from_several_threads(self):
        guidance = Guidance(TOKENIZER, VOCAB)
        found: list[list[int]] = []

        def ask() -> None:
            for letter in "abcdef":
                found.append(allowed(guidance.start(StructuredOutput(choice=[letter]))))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == sorted([byte_id(letter)] for letter in "abcdef" * 4)
        assert guidance.num_cached_grammars == 6
