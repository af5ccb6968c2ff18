"""The training scripts at tiny scale: values equal the runtime's, losses fall, the runtime accepts the drafts."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import CHAT_TEMPLATE, write_byte_tokenizer, write_tiny_llama

import edgellm_eagle.plugin
import edgellm_hybrid.plugin
import edgellm_shared_kv.plugin
from edgellm import LLM, SamplingParams, SpeculativeOptions
from edgellm.plugins import load_plugins
from training import courses, loop, parts, unrolled
from training.acceptance import count_rounds
from training.assistant import Assistant
from training.batches import batches, collate
from training.delta_rule import gated_delta
from training.documents import Document, clean, without_markup, wordnet_entry
from training.draft_vocabulary import choose, coverage, generated_counts
from training.eagle import EagleHead
from training.generate import Settings, continue_batch, generate_files
from training.hybrid import Hybrid, HybridShape
from training.llama import Llama
from training.prompts import prompts_of
from training.target_file import dequantise, pack, read_target
from training.token_file import TokenFile, join, read_tokens

PROMPTS = ["to be or not to be", "the quick brown fox", "zz top"]
NEW = 24
CHAIN = 3


# ---- files ----------------------------------------------------------------------------------------------


def test_token_files_come_back_and_damage_is_named(tmp_path: Path) -> None:
    file = TokenFile.of([[1, 2, 65535], [], [7]], [1, 0, 1], next_batch=4)
    file.write(tmp_path / "a.tok")
    back = read_tokens(tmp_path / "a.tok")
    assert [back[index].tolist() for index in range(3)] == [[1, 2, 65535], [], [7]]
    assert (back.prompt_lens.tolist(), back.notes) == ([1, 0, 1], {"next_batch": 4})
    both = join([back, back])
    assert both[5].tolist() == [7]
    assert both.starts.tolist() == [0, 3, 3, 4, 7, 7, 8]
    (tmp_path / "a.tok").write_bytes((tmp_path / "a.tok").read_bytes()[:-9])
    with pytest.raises(ValueError, match="damaged"):
        read_tokens(tmp_path / "a.tok")
    with pytest.raises(ValueError, match="65536: one does not fit"):
        TokenFile.of([[65536]], [0])


def test_files_in_parts(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))
    assert len(parts.split(tmp_path / "file", tmp_path / "parts", part_bytes=30)) == 4
    parts.join(tmp_path / "parts", "file", tmp_path / "joined")
    assert (tmp_path / "joined").read_bytes() == bytes(range(100))
    (tmp_path / "parts" / "file.part1").write_bytes(bytes(30))
    with pytest.raises(ValueError, match="100 bytes"):
        parts.join(tmp_path / "parts", "file", tmp_path / "joined")


def test_folders_in_one_file(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "in" / "a.json").write_text("one")
    parts.unpack(parts.archive(tmp_path / "in", tmp_path / "all.tar"), tmp_path / "out")
    assert [path.read_text() for path in (tmp_path / "out").iterdir()] == ["one"]
    (tmp_path / "in" / ".hidden").write_text("two")
    with pytest.raises(ValueError, match=r"'\.hidden'"):
        parts.unpack(parts.archive(tmp_path / "in", tmp_path / "all.tar"), tmp_path / "out")


@pytest.mark.parametrize(("kind", "block"), [("Q4_1", 20), ("Q8_0", 34), ("F16", 2), ("F32", 4)])
def test_stored_numbers_mean_what_the_gguf_package_says(kind: str, block: int) -> None:
    gguf = pytest.importorskip("gguf")
    stored = np.random.default_rng(3).integers(0, 120, (6, 4 * block)).astype(np.uint8)
    wanted = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind]).astype(np.float32)
    assert torch.equal(dequantise(kind, torch.from_numpy(stored).flatten()), torch.from_numpy(wanted).flatten())


# ---- corpus ---------------------------------------------------------------------------------------------


def test_documents_are_cleaned() -> None:
    line = '02084071 05 n 03 dog 0 domestic_dog 0 alpine(a) 0 001 @ 02083346 n 0000 | a canine; "he barks"  '
    assert wordnet_entry(line) == 'dog, domestic dog, alpine: a canine; "he barks"'
    assert clean("a \r\n\n\n\n\x00b\t\n") == "a\n\nb"
    markup = ".. _label:\n.. index:: x\n   single: y\n\nSee :func:`~os.read` and :ref:`that <label>`.\n\n.. note:: z\n"
    assert without_markup(markup) == "\nSee os.read and that.\n\n.. note:: z\n"


def test_prompts_are_the_same_every_time_and_of_every_kind() -> None:
    text = "\n\n".join(f"Paragraph {number} " + "word " * 60 for number in range(40))
    docs = Document("docs", "docs/a", text)
    made = list(prompts_of(docs))
    assert made == list(prompts_of(docs))
    assert len(made) == 30
    assert {prompt.chat for prompt in made} == {True, False}
    words = Document("wordnet", "wordnet/noun/0", "\n".join(f"word{n}, w: gloss" for n in range(20)))
    assert len(list(prompts_of(words))) == 5


def test_the_draft_vocabulary_counts_generated_text_alone() -> None:
    counts = generated_counts(TokenFile.of([[9, 9, 9, 1, 1, 2], [3, 1]], [3, 1]), 10)
    assert counts.tolist() == [0, 3, 1, 0, 0, 0, 0, 0, 0, 0]
    chosen = choose(counts, 3)
    assert chosen.tolist() == [0, 1, 2]
    assert coverage(counts, chosen) == 1.0
    assert coverage(counts, choose(counts, 1)) == 0.75


def test_batches_cover_the_file_and_go_on_where_they_stopped() -> None:
    file = TokenFile.of([list(range(n)) for n in (5, 9, 6, 30, 2, 12, 8)], [2] * 7)

    def first(count: int, skip: int) -> list[list[int]]:
        order = batches(file, tokens=24, longest=20, seed=5, device="cpu", skip=skip)
        return [next(order).lengths.tolist() for _ in range(count)]

    whole = first(12, 0)
    assert whole[4:] == first(8, 4)
    assert max(max(lengths) * len(lengths) for lengths in whole) <= 24
    assert {length for lengths in whole for length in lengths} == {5, 6, 8, 9, 12, 20}  # 2 tokens teach nothing
    batch = collate(file, np.array([0, 2]), 20, "cpu")
    assert batch.generated(2).tolist() == [[True, True, True, False, False], [True, True, True, True, False]]


# ---- the forward passes ---------------------------------------------------------------------------------


def sequential_delta(q: Any, k: Any, v: Any, decay: Any, beta: Any) -> torch.Tensor:
    from edgellm.kernels.cpu.recurrent_rows import RecurrentRows
    from edgellm.kernels.ref.gated_delta import gated_delta as reference

    count = q.shape[2]
    rows = RecurrentRows(*(np.array(x, np.int32) for x in ([0, count], [0], [-1])))
    out = torch.empty(count, v.shape[1], v.shape[3], dtype=torch.float64)
    state = torch.zeros(1, v.shape[1], k.shape[3], v.shape[3], dtype=torch.float64)
    flat = [part[0].transpose(0, 1) for part in (q, k, v)]
    reference(*flat, decay[0].T, beta[0].T, state, rows, out, scale=q.shape[3] ** -0.5, l2norm=True)
    return out.transpose(0, 1)[None]


@pytest.mark.parametrize("count", [1, 31, 32, 75])
def test_the_delta_rule_in_chunks_is_the_one_token_by_token(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    q, k, v = (torch.randn(1, 2, count, width, generator=generator) for width in (8, 8, 12))
    decay, beta = -3 * torch.rand(1, 2, count, generator=generator), torch.rand(1, 2, count, generator=generator)
    torch.testing.assert_close(
        gated_delta(q, k, v, decay, beta).double(), sequential_delta(q, k, v, decay, beta), atol=2e-5, rtol=2e-4
    )


def test_unrolled_attention_is_that_of_one_chain_at_a_time() -> None:
    """Row m at depth j against a plain softmax over what its chain would hold in a cache."""
    generator = torch.Generator().manual_seed(4)
    memory, count = unrolled.DepthMemory(), 7
    made = [
        [torch.randn(1, 4 // (2 if part else 1), count, 8, generator=generator) for part in range(3)] for _ in range(4)
    ]
    for depth, (query, key, value) in enumerate(made):
        out = memory.attend(query, key, value)
        for row in range(depth, count):
            start = row - depth
            for head in range(4):
                keys = [made[0][1][0, head // 2, : start + 1]]
                values = [made[0][2][0, head // 2, : start + 1]]
                for level in range(1, depth + 1):
                    keys.append(made[level][1][0, head // 2, start + level, None])
                    values.append(made[level][2][0, head // 2, start + level, None])
                weights = (torch.cat(keys) @ query[0, head, row] / math.sqrt(8)).softmax(0)
                torch.testing.assert_close(out[0, head, row], weights @ torch.cat(values), atol=1e-5, rtol=1e-5)


def test_rounds_are_counted_as_the_runtime_makes_them() -> None:
    hits = torch.tensor([[[1, 1], [0, 0], [0, 1], [1, 0], [1, 1], [1, 1]]]).bool()
    result = count_rounds(hits, [(0, 6)])  # entry 0 takes two drafts, entry 3 one; entry 5 has no room
    assert (result.rounds, result.proposed, result.accepted) == (3, (2, 2), (2, 1))
    assert result.tokens == 3 + 2 + 1
    assert "6 tokens" in result.table()


# ---- whole courses --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("target"), num_hidden_layers=6, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def target(folder: Path) -> Llama:
    pack(folder, folder / "target.bin")
    return Llama(*read_target(folder / "target.bin"), device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def generated(target: Llama, folder: Path) -> TokenFile:
    """Greedy continuations of the prompts, in the byte tokenizer's ids."""
    from edgellm.tokenization.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    rows = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in PROMPTS]
    new = continue_batch(target, rows, NEW, [0.0] * len(rows), torch.Generator())
    return TokenFile.of([row + tail for row, tail in zip(rows, new, strict=True)], [len(row) for row in rows])


@pytest.fixture(autouse=True)
def plugins_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = (
        ("eagle", edgellm_eagle.plugin),
        ("hybrid", edgellm_hybrid.plugin),
        ("shared-kv", edgellm_shared_kv.plugin),
    )
    loaded = load_plugins(extra=extra, autoload=False, strict=True)
    monkeypatch.setattr("edgellm.plugins.load_plugins", lambda: loaded)


def answers(model: Path, prompts: list[list[int]], options: SpeculativeOptions | None = None) -> list[Any]:
    params = SamplingParams(max_tokens=NEW, temperature=0.0)
    with LLM(model, device="cpu", kv_budget=4096, page_size=16, dtype="float32", speculative=options) as llm:
        return [llm.generate([prompt], params)[0] for prompt in prompts]


def prompts_in(file: TokenFile) -> list[list[int]]:
    return [file[index][: file.prompt_lens[index]].tolist() for index in range(len(file))]


def test_generation_is_what_the_runtime_says(folder: Path, generated: TokenFile) -> None:
    for index, output in enumerate(answers(folder, prompts_in(generated))):
        assert generated[index][generated.prompt_lens[index] :].tolist() == output.token_ids


def test_generation_goes_on_behind_its_last_file(target: Llama, generated: TokenFile, tmp_path: Path) -> None:
    prompts = prompts_in(generated)
    source = TokenFile.of(prompts, [len(prompt) for prompt in prompts])

    def make(folder: Path, most: int) -> list[Path]:
        settings = Settings(rows=2, most_new=6, tokens_per_file=30, most_tokens=most)
        return generate_files(target, source, folder, "train", settings, lambda line: None)

    at_once = make(tmp_path / "once", 240)
    make(tmp_path / "twice", 90)
    in_two = make(tmp_path / "twice", 240)
    rows = [[file[index].tolist() for index in range(len(file))] for file in map(join_files, (at_once, in_two))]
    assert rows[0] == rows[1]
    assert len({tuple(row) for row in rows[0]}) > 8  # later passes are other samples


def join_files(paths: list[Path]) -> TokenFile:
    return join([read_tokens(path) for path in paths])


def learn(course: courses.Course, file: TokenFile, tmp_path: Path, steps: int, rate: float) -> tuple[float, float]:
    """Train in two commands; the loss before and after."""
    batch = collate(file, np.arange(len(file)), 512, "cpu")
    with torch.no_grad():
        before = float(course.loss(batch)[0])
    losses = courses.losses(course, file, tokens=4096, longest=512, seed=0)

    def export() -> None:
        courses.save(course.student, tmp_path / "export")

    half = loop.Settings(seconds=1e9, steps=steps, stop_after=0.0, learning_rate=rate)
    assert loop.fit(course.student, losses, half, tmp_path / "state.pt", export, lambda line: None).step == 1
    whole = loop.Settings(seconds=1e9, steps=steps, learning_rate=rate)
    assert loop.fit(course.student, losses, whole, tmp_path / "state.pt", export, lambda line: None).step == steps
    with torch.no_grad():
        return before, float(course.loss(batch)[0])


@pytest.mark.parametrize(
    ("decoder", "make", "tensor"),
    [("eagle", EagleHead, "fc.weight"), ("shared_kv_mtp", partial(Assistant, hidden=48, inner=64), "norm.weight")],
)
def test_a_draft_is_learnt_exported_and_believed_by_the_runtime(
    decoder: str, make: Any, tensor: str, target: Llama, folder: Path, generated: TokenFile, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    to_target = choose(generated_counts(generated, target.shape.vocab_size), 120)
    course = courses.draft_course(make(target, to_target), target, CHAIN)
    before, after = learn(course, generated, tmp_path, 50, 1e-2)
    assert after < 0.8 * before  # what a random target is unsure of stays
    exported = courses.read_exported(tmp_path / "export")
    assert exported[tensor].dtype == torch.bfloat16
    course.student.load_public(exported)  # what the runtime reads, rounded as it is
    measured = courses.measure(course, generated, CHAIN, tokens=4096, longest=512)
    options = SpeculativeOptions(decoder=decoder, draft=tmp_path / "export", num_drafts=CHAIN, adaptive=False)
    outputs = answers(folder, prompts_in(generated), options)
    for index, output in enumerate(outputs):
        assert generated[index][generated.prompt_lens[index] :].tolist() == output.token_ids
    accepted = sum(output.accepted_draft_tokens for output in outputs)
    assert accepted > 10
    assert abs(accepted - sum(measured.accepted)) <= 2  # near-ties of two orders of summation
    with pytest.raises(ValueError, match="another draft vocabulary"):
        make(target, to_target.flip(0)).load_public(exported)


TINY = HybridShape(
    vocab_size=257, hidden_size=48, intermediate_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16,
    num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=12, rope_theta=10_000.0, max_positions=512,
)  # fmt: skip


def test_the_hybrid_learns_and_its_head_is_believed_by_the_runtime(generated: TokenFile, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Hybrid(TINY)
    course = courses.hybrid_course(model, "cpu")
    before, after = learn(course, generated, tmp_path, 30, 1.5e-2)
    assert after < 0.6 * before
    folder = tmp_path / "export"
    write_byte_tokenizer(folder)
    assert CHAT_TEMPLATE in (folder / "chat_template.jinja").read_text()
    model.load_public(courses.read_exported(folder))
    prompts = prompts_in(generated)
    tails = courses.continue_greedily(model, prompts, NEW, "cpu")
    plain = answers(folder, prompts)
    assert [output.token_ids for output in plain] == tails
    file = TokenFile.of([a + b for a, b in zip(prompts, tails, strict=True)], [len(prompt) for prompt in prompts])
    measured = courses.measure(course, file, CHAIN, tokens=4096, longest=512)
    outputs = answers(folder, prompts, SpeculativeOptions(decoder="mtp", num_drafts=CHAIN, adaptive=False))
    assert [output.token_ids for output in outputs] == tails
    accepted = sum(output.accepted_draft_tokens for output in outputs)
    assert accepted > 10
    assert abs(accepted - sum(measured.accepted)) <= 2
