"""Incremental text: pieces joined are exactly the one-shot decode, every piece valid, nothing shown too early."""

from __future__ import annotations

import pytest
import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.errors import InvalidArgumentError
from edgellm.tokenization.detokenizer import IncrementalDetokenizer
from edgellm.tokenization.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(tiny_tokenizers.byte_fallback(tmp_path_factory.mktemp("byte_fallback")))


@pytest.fixture(scope="module")
def nested_byte_level(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("nested"), nested_decoder=True))


@pytest.fixture(scope="module")
def three_spaces(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(tiny_tokenizers.byte_fallback(tmp_path_factory.mktemp("strip"), stripped_spaces=3))


@pytest.fixture(scope="module")
def smollm2(default_model) -> Tokenizer:
    return load_tokenizer(default_model)


def pieces_of(tokenizer, ids, *, skip=True, step=1) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.push(ids[start : start + step]) for start in range(0, len(ids), step)]
    return [*pieces, detokenizer.flush()]


def check_exact(tokenizer, ids, skip, step) -> None:
    pieces = pieces_of(tokenizer, ids, skip=skip, step=step)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
    for piece in pieces:
        piece.encode("utf-8")


def test_emoji_of_four_bytes_appears_whole(byte_level):
    ids = [byte_level.token_id(character) for character in ("\u00f0", "\u0141", "\u013a", "\u0122")]
    assert b"".join(byte_level.token_bytes(token_id) for token_id in ids) == "\U0001f600".encode()
    assert pieces_of(byte_level, ids) == ["", "", "", "\U0001f600", ""]


def test_unfinished_and_invalid_bytes_become_replacement_characters(byte_level):
    first, stray = byte_level.token_id("\u00f0"), byte_level.token_id("\u0122")
    letter = byte_level.token_id("a")
    assert pieces_of(byte_level, [first]) == ["", "\ufffd"]
    assert pieces_of(byte_level, [stray]) == ["\ufffd", ""]
    assert pieces_of(byte_level, [first, letter]) == ["", "\ufffda", ""]


def test_special_tokens_are_left_out_or_kept(byte_level):
    ids = byte_level.encode("<|im_start|>cat<think><|im_end|>")
    assert "".join(pieces_of(byte_level, ids)) == "cat<think>"
    assert "".join(pieces_of(byte_level, ids, skip=False)) == "<|im_start|>cat<think><|im_end|>"


def test_special_token_inside_a_character_leaves_the_character_whole(byte_level):
    """Skipped tokens have no text at all, so the bytes around one meet, as in the one-shot decode."""
    ids = [byte_level.token_id("\u00c3"), byte_level.token_id("<|im_end|>"), byte_level.token_id("\u00a9")]
    assert pieces_of(byte_level, ids) == ["", "", "\u00e9", ""]
    check_exact(byte_level, ids, False, 1)


def test_leading_space_is_kept_or_dropped_as_in_one_shot(byte_level, byte_fallback):
    ids = byte_level.encode(" the cat")
    assert "".join(pieces_of(byte_level, ids)) == " the cat"
    ids = byte_fallback.encode("Hello world", add_special_tokens=False)
    assert "".join(pieces_of(byte_fallback, ids)) == "Hello world"
    continued = byte_fallback.encode("  w", add_special_tokens=False)
    assert "".join(pieces_of(byte_fallback, continued)) == "  w"


def test_byte_run_is_held_until_it_ends_since_its_end_may_spoil_it(byte_fallback):
    letter, bad = byte_fallback.token_id("<0x41>"), byte_fallback.token_id("<0xFF>")
    hello = byte_fallback.token_id("Hello")
    assert byte_fallback.decode([letter, bad, hello]) == "\ufffd\ufffdHello"
    assert pieces_of(byte_fallback, [letter, bad, hello]) == ["", "", "\ufffd\ufffdHello", ""]
    assert pieces_of(byte_fallback, [letter, hello]) == ["", "AHello", ""]
    assert pieces_of(byte_fallback, [letter]) == ["", "A"]


def test_no_ids_and_ids_without_a_token_have_no_text(byte_level, byte_fallback):
    for tokenizer in (byte_level, byte_fallback):
        assert pieces_of(tokenizer, []) == [""]
        assert pieces_of(tokenizer, [tokenizer.vocab_size + 5]) == ["", ""]
        detokenizer = IncrementalDetokenizer(tokenizer)
        assert [detokenizer.push([]), detokenizer.flush(), detokenizer.flush()] == ["", "", ""]


def test_id_without_a_token_does_not_end_a_byte_run(byte_fallback):
    ids = [byte_fallback.token_id("<0x41>"), byte_fallback.vocab_size, byte_fallback.token_id("<0xFF>")]
    assert pieces_of(byte_fallback, ids) == ["", "", "", "\ufffd\ufffd"]
    check_exact(byte_fallback, ids, True, 1)


def test_negative_id_is_refused(byte_level, byte_fallback):
    for tokenizer in (byte_level, byte_fallback):
        with pytest.raises(InvalidArgumentError, match="token id -1"):
            IncrementalDetokenizer(tokenizer).push([-1])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data(), skip=st.booleans(), step=st.integers(1, 4))
def test_byte_level_pieces_join_to_the_one_shot_decode(byte_level, data, skip, step):
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size + 2), max_size=30))
    check_exact(byte_level, ids, skip, step)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(data=st.data(), skip=st.booleans(), step=st.integers(1, 4))
def test_byte_fallback_pieces_join_to_the_one_shot_decode(byte_fallback, data, skip, step):
    words = st.integers(259, byte_fallback.vocab_size + 1)
    token = st.one_of(
        words, words, st.integers(0, 2), st.integers(3, 258), st.sampled_from([0xE2 + 3, 0x82 + 3, 0xAC + 3])
    )
    check_exact(byte_fallback, data.draw(st.lists(token, max_size=20)), skip, step)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data(), skip=st.booleans(), step=st.integers(1, 4))
def test_other_decoders_pieces_join_to_the_one_shot_decode(nested_byte_level, three_spaces, data, skip, step):
    assert not nested_byte_level.is_byte_level
    check_exact(
        nested_byte_level, data.draw(st.lists(st.integers(0, nested_byte_level.vocab_size), max_size=20)), skip, step
    )
    spaces = st.sampled_from([three_spaces.token_id("\u2581"), three_spaces.token_id("\u2581\u2581")])
    token = st.one_of(spaces, spaces, st.integers(0, three_spaces.vocab_size))
    check_exact(three_spaces, data.draw(st.lists(token, max_size=20)), skip, step)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text(max_size=20), step=st.integers(1, 3))
def test_encoded_text_comes_back_exactly(byte_level, text, step):
    ids = byte_level.encode(text)
    assert "".join(pieces_of(byte_level, ids, skip=False, step=step)) == text


@pytest.mark.model
def test_every_token_of_the_default_model_alone(smollm2):
    wrong = [
        token_id
        for token_id in range(smollm2.vocab_size)
        if smollm2.token_bytes(token_id).decode("utf-8", "replace")
        != smollm2.decode([token_id], skip_special_tokens=False)
    ]
    assert wrong == []


@pytest.mark.model
@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data(), skip=st.booleans(), step=st.integers(1, 4))
def test_random_ids_of_the_default_model(smollm2, data, skip, step):
    anything = st.integers(0, smollm2.vocab_size - 1)
    broken = st.sampled_from(incomplete_tokens(smollm2))
    ids = data.draw(st.lists(st.one_of(anything, broken, broken, st.integers(0, 16)), max_size=40))
    check_exact(smollm2, ids, skip, step)


@pytest.mark.model
def test_emoji_and_scripts_of_the_default_model(smollm2):
    text = "na\u00efve caf\u00e9 \u732b\u306f\u304b\u308f\u3044\u3044 \U0001f468\u200d\U0001f467  x =  12\n\n\tend"
    ids = smollm2.encode(text)
    pieces = pieces_of(smollm2, ids)
    assert "".join(pieces) == text
    assert "" in pieces[:-1]
    assert not any("\ufffd" in piece for piece in pieces)


_INCOMPLETE: dict[int, list[int]] = {}


def incomplete_tokens(tokenizer) -> list[int]:
    """Ids whose bytes are not valid UTF-8 by themselves."""
    if id(tokenizer) not in _INCOMPLETE:
        pieces = ((token_id, tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size))
        _INCOMPLETE[id(tokenizer)] = [i for i, piece in pieces if "\ufffd" in piece.decode("utf-8", "replace")]
    return _INCOMPLETE[id(tokenizer)]
