"""Loading, encoding, chat templates, end tokens, and the messages of what goes wrong."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import socket
import struct

import pytest
import tiny_tokenizers
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from edgellm.errors import AdmissionError, InvalidArgumentError, WeightFileError
from edgellm.tokenization.gguf_metadata import read_gguf_values
from edgellm.tokenization.token_ids import check_token_ids
from edgellm.tokenization.tokenizer import Tokenizer, load_tokenizer

HELLO = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_tokenizers.byte_level(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def smollm2(default_model) -> Tokenizer:
    return load_tokenizer(default_model)


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*arguments, **keywords):
        raise AssertionError(f"network access: {arguments[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


class TestEncodeDecode:
    def test_equal_to_transformers(self, folder, tokenizer):
        other = AutoTokenizer.from_pretrained(folder)
        for text in ("", "the cat sat", " the  caf\u00e9\n", "<|im_start|>the<think>", "\U0001f600 \u732b", "x\u0000y"):
            assert tokenizer.encode(text) == other.encode(text)
            assert tokenizer.encode(text, add_special_tokens=False) == other.encode(text, add_special_tokens=False)
            ids = other.encode(text)
            assert tokenizer.decode(ids) == other.decode(ids, skip_special_tokens=True)
            assert tokenizer.decode(ids, skip_special_tokens=False) == text

    def test_sizes_and_special_ids(self, folder, tokenizer):
        other = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.vocab_size == len(other)
        assert {tokenizer.token_id(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")} == set(
            tokenizer.special_token_ids
        )
        assert tokenizer.all_special_ids == tuple(sorted(tokenizer.special_token_ids))
        assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (None, None)
        assert tokenizer.token_id("no such token") is None

    def test_decoding_does_not_clean_up_spaces(self, tokenizer):
        assert tokenizer.decode(tokenizer.encode("the cat , don ' t .")) == "the cat , don ' t ."

    def test_text_that_cannot_be_encoded(self, tokenizer):
        with pytest.raises(InvalidArgumentError, match="lone surrogates"):
            tokenizer.encode("a\ud800b")
        with pytest.raises(InvalidArgumentError, match="the prompt is a list"):
            tokenizer.encode([1, 2])

    def test_ids_that_cannot_be_decoded(self, tokenizer):
        for bad in (-1, 2**32):
            with pytest.raises(InvalidArgumentError, match=f"token id {bad} cannot be decoded"):
                tokenizer.decode([5, bad])
        assert tokenizer.decode([tokenizer.vocab_size + 100]) == ""

    def test_stored_truncation_and_padding_are_switched_off(self, folder, tmp_path):
        copy = shutil.copytree(folder, tmp_path / "copy")
        stored = json.loads((copy / "tokenizer.json").read_text())
        stored["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
        (copy / "tokenizer.json").write_text(json.dumps(stored))
        assert len(load_tokenizer(copy).encode("the cat sat on the mat")) > 2

    def test_begin_token_only_when_asked_for(self, tmp_path):
        loaded = load_tokenizer(tiny_tokenizers.byte_fallback(tmp_path))
        assert loaded.bos_token_id == 1
        assert loaded.encode("Hello")[0] == 1
        assert loaded.encode("Hello", add_special_tokens=False)[0] != 1


class TestTokenBytes:
    def test_byte_level(self, tokenizer):
        ids = tokenizer.encode("caf\u00e9 \U0001f600<|im_end|><think><a \u732b>")
        text = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
        assert text.decode() == "caf\u00e9 \U0001f600<|im_end|><think><a \u732b>"
        assert tokenizer.is_byte_level
        assert tokenizer.byte_fallback_ids == frozenset()

    def test_byte_fallback(self, tmp_path):
        loaded = load_tokenizer(tiny_tokenizers.byte_fallback(tmp_path))
        assert not loaded.is_byte_level
        assert loaded.byte_fallback_ids == frozenset(range(3, 259))
        assert loaded.token_bytes(loaded.token_id("<0xE2>")) == b"\xe2"
        assert loaded.token_bytes(loaded.token_id("\u2581w")) == b" w"


class TestEndTokens:
    def test_tokenizer_and_template_end_of_turn(self, tokenizer):
        expected = sorted([tokenizer.token_id("<|endoftext|>"), tokenizer.token_id("<|im_end|>")])
        assert list(tokenizer.eos_token_ids) == expected

    def test_without_a_template_only_the_tokenizers_own(self, tmp_path):
        loaded = load_tokenizer(tiny_tokenizers.byte_level(tmp_path, chat_template=None))
        assert loaded.eos_token_ids == (loaded.token_id("<|endoftext|>"),)

    @pytest.mark.parametrize(("stored", "extra"), [([7, 9], {7, 9}), (9, {9}), (None, set())])
    @pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
    def test_lists_of_the_checkpoint_are_added(self, folder, tokenizer, tmp_path, name, stored, extra):
        copy = shutil.copytree(folder, tmp_path / "copy")
        (copy / name).write_text(json.dumps({"eos_token_id": stored, "model_type": "llama"}))
        assert set(load_tokenizer(copy).eos_token_ids) == set(tokenizer.eos_token_ids) | extra

    def test_damaged_generation_config_is_named(self, folder, tmp_path):
        copy = shutil.copytree(folder, tmp_path / "copy")
        for content in ("{", "[1]"):
            (copy / "generation_config.json").write_text(content)
            with pytest.raises(WeightFileError, match=r"generation_config\.json cannot be read as JSON"):
                load_tokenizer(copy)


class TestChatTemplate:
    def test_equal_to_transformers(self, folder, tokenizer):
        other = AutoTokenizer.from_pretrained(folder)
        messages = [{"role": "system", "content": "the"}, *HELLO, {"role": "assistant", "content": ""}]
        for opening in (True, False):
            text = other.apply_chat_template(messages, tokenize=False, add_generation_prompt=opening)
            assert tokenizer.render_chat(messages, opening) == text
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=opening)
            assert ids == other(text, add_special_tokens=False)["input_ids"]

    def test_special_tokens_are_not_doubled(self, tokenizer):
        ids = tokenizer.apply_chat_template(HELLO)
        assert ids[0] == tokenizer.token_id("<|im_start|>")
        assert ids.count(tokenizer.token_id("<|im_start|>")) == 2
        assert tokenizer.decode(ids, skip_special_tokens=False) == (
            "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_text_parts_are_joined(self, tokenizer):
        parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
        assert tokenizer.apply_chat_template([{"role": "user", "content": parts}]) == tokenizer.apply_chat_template(
            HELLO
        )

    def test_arguments_reach_the_template(self, tmp_path):
        template = "{{ messages[0]['content'] }}{% if enable_thinking %}<think>{% endif %}"
        loaded = load_tokenizer(tiny_tokenizers.byte_level(tmp_path, chat_template=template))
        assert loaded.render_chat(HELLO) == "the cat"
        assert loaded.render_chat(HELLO, enable_thinking=True) == "the cat<think>"

    def test_input_messages_are_not_modified(self, tokenizer):
        messages = [{"role": "user", "content": [{"type": "text", "text": "the"}]}]
        tokenizer.apply_chat_template(messages)
        assert messages == [{"role": "user", "content": [{"type": "text", "text": "the"}]}]

    @pytest.mark.parametrize(
        ("messages", "message"),
        [
            ([], "messages is empty"),
            ("hello", "messages is a str"),
            ({"role": "user", "content": "x"}, "messages is a dict"),
            (["hello"], r"messages\[0\] is a str"),
            ([*HELLO, {"role": "boss", "content": "x"}],
             r"messages\[1\] has the role 'boss'; allowed are system, developer, user, assistant, tool"),
            ([{"content": "x"}], r"messages\[0\] has the role None; allowed are"),
            ([{"role": ["user"], "content": "x"}], r"has the role \['user'\]"),
            ([{"role": "user"}], r"messages\[0\] \(role 'user'\) has no 'content'"),
            ([{"role": "user", "content": None}], "has no 'content'"),
            ([{"role": "assistant", "content": None, "tool_calls": []}], "has no 'content'"),
            ([{"role": "user", "content": 5}], "content of type int"),
            ([{"role": "user", "content": {"text": "x"}}], "content of type dict"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], "content part of type 'image_url'; allowed is"),
            ([{"role": "user", "content": [{"type": "text"}]}], "content part of type 'text'"),
            ([{"role": "user", "content": ["x"]}], "content part of type 'str'"),
        ],
    )  # fmt: skip
    def test_bad_messages_are_refused_with_value_and_remedy(self, tokenizer, messages, message):
        with pytest.raises(AdmissionError, match=message):
            tokenizer.apply_chat_template(messages)

    def test_tool_calls_stand_in_for_content(self, tokenizer):
        call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
        assert "assistant\n<|im_end|>" in tokenizer.render_chat([*HELLO, call])

    def test_no_template(self, tmp_path):
        loaded = load_tokenizer(tiny_tokenizers.byte_level(tmp_path, chat_template=None))
        assert not loaded.has_chat_template
        with pytest.raises(AdmissionError, match=r"has no chat template.*pass the prompt as text"):
            loaded.apply_chat_template(HELLO)
        assert loaded.render_chat(HELLO, chat_template="{{ messages[0]['content'] }}") == "the cat"

    @pytest.mark.parametrize(
        "template",
        ["{{ raise_exception('only two roles') }}", "{{ messages[7]['content'] }}", "{{ 1 + 'x' }}", "{% if %}"],
    )
    def test_whatever_a_template_raises_becomes_an_admission_error(self, tmp_path, template):
        loaded = load_tokenizer(tiny_tokenizers.byte_level(tmp_path, chat_template=template))
        with pytest.raises(AdmissionError, match="the chat template refused the messages"):
            loaded.apply_chat_template(HELLO)

    @pytest.mark.parametrize("name", ["tokenize", "return_dict", "return_tensors", "max_length"])
    def test_arguments_that_would_change_the_result_are_reserved(self, tokenizer, name):
        with pytest.raises(InvalidArgumentError, match=f"{name!r} is reserved"):
            tokenizer.apply_chat_template(HELLO, **{name: True})


class TestLoading:
    def test_quiet_offline_and_without_side_effects(self, folder, no_network, capfd):
        level = transformers_logging.get_verbosity()
        (folder / "config.json").write_text(json.dumps({"model_type": "an unknown kind"}))
        try:
            assert load_tokenizer(str(folder)).encode("the")
        finally:
            (folder / "config.json").unlink()
        assert capfd.readouterr() == ("", "")
        assert transformers_logging.get_verbosity() == level

    def test_missing_path(self, tmp_path):
        with pytest.raises(WeightFileError, match=r"nowhere does not exist; pass a model directory or a \.gguf file"):
            load_tokenizer(tmp_path / "nowhere")

    def test_directory_without_a_tokenizer(self, tmp_path, no_network):
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(
            WeightFileError, match=r"has no tokenizer file \(looked for tokenizer\.json.*copy tokenizer\.json"
        ):
            load_tokenizer(tmp_path)

    def test_file_of_another_kind(self, tmp_path):
        (tmp_path / "model.bin").write_bytes(b"x")
        with pytest.raises(WeightFileError, match=r"model\.bin is neither a model directory nor a \.gguf file"):
            load_tokenizer(tmp_path / "model.bin")

    @pytest.mark.parametrize("content", ["", "{", "{}", '{"model": {"type": "BPE"}}'])
    def test_damaged_tokenizer_json(self, folder, tmp_path, no_network, content, capfd):
        copy = shutil.copytree(folder, tmp_path / "copy")
        (copy / "tokenizer.json").write_text(content)
        with pytest.raises(WeightFileError, match=r"copy cannot be loaded: .*fetch its files again"):
            load_tokenizer(copy)
        assert capfd.readouterr() == ("", "")


def gguf_bytes(values: dict[str, tuple[int, bytes]], *, version: int = 3) -> bytes:
    """A GGUF header with encoded metadata values and no tensors."""
    blob = b"GGUF" + struct.pack("<IQQ", version, 0, len(values))
    for key, (kind, encoded) in values.items():
        blob += struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + encoded
    return blob


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


GGUF_VALUES = {
    "a.u8": (0, b"\x07"),
    "a.i16": (3, struct.pack("<h", -5)),
    "a.f32": (6, struct.pack("<f", 0.5)),
    "a.bool": (7, b"\x01"),
    "a.ints": (9, struct.pack("<IQ", 5, 3) + struct.pack("<3i", 1, 2, 3)),
    "a.nested": (9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 8, 2) + gguf_string("x") + gguf_string("yz")),
    "a.u64": (10, struct.pack("<Q", 2**40)),
    "a.text": (8, gguf_string("caf\u00e9")),
}


class TestGgufMetadata:
    def test_single_values_are_read_and_arrays_skipped(self, tmp_path):
        path = tmp_path / "a.gguf"
        path.write_bytes(gguf_bytes(GGUF_VALUES))
        assert read_gguf_values(path) == {
            "a.u8": 7, "a.i16": -5, "a.f32": 0.5, "a.bool": True, "a.u64": 2**40, "a.text": "caf\u00e9"
        }  # fmt: skip

    def test_every_truncation_is_reported(self, tmp_path):
        path, blob = tmp_path / "a.gguf", gguf_bytes(GGUF_VALUES)
        for length in range(len(blob)):
            path.write_bytes(blob[:length])
            with pytest.raises(WeightFileError):
                read_gguf_values(path)

    @pytest.mark.parametrize(
        ("blob", "message"),
        [
            (b"GGML" + bytes(40), "not a GGUF file"),
            (gguf_bytes({}, version=1), "version 1 is not supported"),
            (gguf_bytes({"a": (13, b"")}), "unknown type 13"),
            (gguf_bytes({"a": (9, struct.pack("<IQ", 14, 1))}), "unknown type 14"),
            (gguf_bytes({"a": (8, struct.pack("<Q", 2) + b"\xff\xff")}), "metadata 'a' is not UTF-8 text"),
            (b"", "not a GGUF file"),
        ],
    )
    def test_other_damage_is_named(self, tmp_path, blob, message):
        (tmp_path / "a.gguf").write_bytes(blob)
        with pytest.raises(WeightFileError, match=message):
            read_gguf_values(tmp_path / "a.gguf")

    def test_file_without_a_tokenizer(self, tmp_path):
        (tmp_path / "a.gguf").write_bytes(gguf_bytes(GGUF_VALUES))
        with pytest.raises(WeightFileError, match="contains no tokenizer"):
            load_tokenizer(tmp_path / "a.gguf")

    def test_missing_file(self, tmp_path):
        with pytest.raises(WeightFileError, match="does not exist"):
            read_gguf_values(tmp_path / "a.gguf")


GPT2_ASCII = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


def naive_bpe(text: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Tokens of an ASCII text: every digit alone, GPT-2's pattern on the rest, then the best merge until none."""
    tokens: list[str] = []
    for part in re.findall(r"[0-9]|[^0-9]+", text):
        for word in [part] if part.isdigit() else GPT2_ASCII.findall(part):
            pieces = list(word.replace(" ", "\u0120").replace("\n", "\u010a"))
            while len(pieces) > 1:
                rank, place = min((ranks.get(pair, 10**9), i) for i, pair in enumerate(itertools.pairwise(pieces)))
                if rank == 10**9:
                    break
                pieces[place : place + 2] = ["".join(pieces[place : place + 2])]
            tokens += pieces
    return tokens


@pytest.fixture(scope="module")
def arrays(default_model):
    """Tokens and merges as the gguf package, an independent reader, finds them in the file."""
    import gguf

    fields = gguf.GGUFReader(default_model).fields
    return fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.merges"].contents()


@pytest.mark.model
class TestDefaultModel:
    def test_ids_are_those_of_the_file(self, smollm2, arrays):
        tokens, _ = arrays
        assert smollm2.vocab_size == len(tokens) == 49_152
        assert [smollm2.token_id(token) for token in tokens] == list(range(49_152))

    def test_encoding_equals_a_naive_bpe_over_the_files_merges(self, smollm2, arrays):
        tokens, merges = arrays
        ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        ids = {token: token_id for token_id, token in enumerate(tokens)}
        for text in (
            "Hello world, it's a test.", "x =  12 + 345;  y", "a\n\n  7 tail  ", "The year 1984 isn't (really) 42%",
            "def f(x):\n    return x[0]  # first\n", "   ",
        ):  # fmt: skip
            assert smollm2.encode(text) == [ids[token] for token in naive_bpe(text, ranks)], text

    def test_template_is_that_of_the_file(self, smollm2, default_model):
        values = read_gguf_values(default_model)
        assert values["tokenizer.ggml.pre"] == "smollm"
        text = smollm2.render_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
        assert (
            text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )
        assert "You are a helpful AI assistant named SmolLM" in values["tokenizer.chat_template"]
        assert "You are a helpful AI assistant named SmolLM" in smollm2.render_chat([{"role": "user", "content": "Hi"}])

    def test_special_tokens(self, smollm2):
        assert smollm2.eos_token_ids == (2,)
        assert smollm2.decode([2], skip_special_tokens=False) == "<|im_end|>"
        assert (smollm2.bos_token_id, smollm2.pad_token_id) == (1, 2)
        assert smollm2.special_token_ids == frozenset(range(17))
        assert smollm2.encode("<|im_start|>user") == [1, 4093]

    def test_quiet_and_offline(self, default_model, no_network, capfd):
        load_tokenizer(default_model)
        assert capfd.readouterr() == ("", "")

    def test_truncated_file(self, default_model, tmp_path):
        for length in (3, 100, 200_000):
            (tmp_path / "cut.gguf").write_bytes(default_model.read_bytes()[:length])
            with pytest.raises(WeightFileError):
                load_tokenizer(tmp_path / "cut.gguf")


def test_token_id_check_names_value_and_vocabulary():
    check_token_ids("prompt", [0, 9], 10)
    for bad in (-1, 10):
        with pytest.raises(
            InvalidArgumentError,
            match=f"prompt contains token id {bad}, which is outside the vocabulary of 10 tokens; use ids from 0 to 9",
        ):
            check_token_ids("prompt", [3, bad], 10)


def test_token_id_check_of_a_tokenizer(tokenizer):
    tokenizer.check_ids("prompt", [0])
    with pytest.raises(InvalidArgumentError, match=f"vocabulary of {tokenizer.vocab_size} tokens"):
        tokenizer.check_ids("prompt", [tokenizer.vocab_size])
