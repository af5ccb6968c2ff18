"""EAGLE trees on a GPU: masks, branches that are kept, tables grown on the device, and the text of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_waits import count_downloads, no_waiting
from helped_trees import HelpedTrees, note_tables
from parity.near_tie import compare
from ragged import permuted_page_rows, ragged_batch
from tiny_drafts import TinyPair, write_eagle_pair, write_tiny_gemma4
from tree_steps import TreePlan, TreeStep, commit
from tree_texts import PROMPTS, ids, second_prompts, settings_of, texts

from edgellm import LLM, SchedulingOptions, SpeculativeOptions
from edgellm.decoding.chain import widen
from edgellm.decoding.draft_tree import DraftTree, mark_trees
from edgellm.models.device_ops import cuda_ops
from edgellm.models.loader import LoadedModel, load_model
from edgellm.models.step import HiddenRequest
from edgellm.runtime.device_cuda import CudaDevice
from edgellm.runtime.executor_cpu import CpuExecutor
from edgellm.runtime.executor_cuda import CudaExecutor, ExecutorLimits, attention_mode
from edgellm.runtime.kv_cache import KVCache

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("decoders_of_this_tree")]

PAGE_SIZE, PAGES_PER_SLOT, NUM_SLOTS, VOCAB = 16, 8, 5, 250
VERIFY_TOKENS, CHUNK = 40, 90  # two words of a mask, and chunks that do not fit it
REQUEST = HiddenRequest(layers=(0, 2), normed=False)
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """Heads of 64 dimensions, which the tensor cores take."""
    return write_eagle_pair(tmp_path_factory.mktemp("eagle"), hidden_size=256)


# ---- the executor -----------------------------------------------------------------------------------------------


class Bench:
    """An executor on the GPU, or on the CPU for comparisons; what was not written is poison."""

    def __init__(
        self, model: LoadedModel, *, deterministic: bool = False, kv_dtype: torch.dtype | None = None, **options: Any
    ) -> None:
        self.page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=2)
        pages: dict[str, Any] = {"num_pages": NUM_SLOTS * PAGES_PER_SLOT, "page_size": PAGE_SIZE}
        pages["dtype"] = kv_dtype or model.dtype
        if model.weights.embedding.device.type == "cpu":
            self.executor: Any = CpuExecutor(model, KVCache.for_model(model.config, **pages))
        else:
            device = CudaDevice("cuda")
            limits = ExecutorLimits(
                num_slots=NUM_SLOTS,
                pages_per_slot=PAGES_PER_SLOT,
                step_tokens=64,
                verify_tokens=VERIFY_TOKENS,
                trees=True,
            )
            self.executor = CudaExecutor(
                model,
                KVCache.for_model(model.config, device=device.torch_device, **pages),
                device=device,
                ops=cuda_ops(deterministic=deterministic),
                limits=limits,
                mode=attention_mode(model.dtype, deterministic=deterministic),
                **options,
            )
        self.executor.kv_cache.fill_poison()
        self.executor.request_hidden(REQUEST)

    def run(self, step: TreeStep) -> list[torch.Tensor]:
        """Logits and hidden rows, on the host; then the step's branches are kept."""
        output = self.executor.forward_verify(step.batch)
        found = [rows.cpu().float() for rows in (output.logits, output.hidden)]
        commit(self.executor, step)
        return found

    def state(self, slot: int, length: int) -> list[torch.Tensor]:
        """K and V of every layer, on the host."""
        cache = self.executor.kv_cache
        return [cache.gather(layer, self.page_rows[slot], length).cpu().float() for layer in range(cache.num_layers)]


def plan(bench: Bench, seed: int = 1) -> TreePlan:
    most = PAGE_SIZE * PAGES_PER_SLOT
    return TreePlan(bench.page_rows, most=most, tree=VERIFY_TOKENS - 1, chunk=CHUNK, vocab=VOCAB, seed=seed)


@torch.inference_mode()
def check_same(one: Bench, other: Bench, *, tolerance: float, steps: int = 20) -> None:
    """Random steps: the same logits, hidden rows, and K and V in the end."""
    scripted, trees = plan(one), 0
    for _ in range(steps):
        step = scripted.step()
        trees += len(step.branches)
        for mine, wanted in zip(one.run(step), other.run(step), strict=True):
            assert mine.isfinite().all()
            torch.testing.assert_close(mine, wanted, atol=tolerance, rtol=tolerance)
    assert trees > 10
    for slot, length in enumerate(scripted.lengths):
        if length:
            for mine, wanted in zip(one.state(slot, length), other.state(slot, length), strict=True):
                torch.testing.assert_close(mine, wanted, atol=tolerance, rtol=tolerance)


def model_of(folder: Path, dtype: str = "float32", device: str = "cuda") -> LoadedModel:
    return load_model(folder, dtype=dtype, device=device)


def test_float32_equals_the_cpu_executor(pair: TinyPair) -> None:
    check_same(Bench(model_of(pair.model)), Bench(model_of(pair.model, device="cpu")), tolerance=5e-3)


def test_windows_and_shared_kv_equal_the_cpu_executor(tmp_path: Path) -> None:
    folder = write_tiny_gemma4(tmp_path)
    check_same(Bench(model_of(folder)), Bench(model_of(folder, device="cpu")), tolerance=5e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_graphs_and_padding_change_no_bit_in_deterministic_mode(pair: TinyPair, dtype: str) -> None:
    model = model_of(pair.model, dtype)
    captured = Bench(model, deterministic=True)
    captured.executor.warm_up()
    check_same(captured, Bench(model, deterministic=True, graphs=False, pad=False), tolerance=0.0)
    assert captured.executor.runner.refusal == ""
    assert len(captured.executor.runner) > 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_change_no_bit(pair: TinyPair, dtype: str) -> None:
    """Both pad alike."""
    model = model_of(pair.model, dtype)
    check_same(Bench(model), Bench(model, graphs=False), tolerance=0.0)


def test_fp8_pages_are_read_and_moved(pair: TinyPair) -> None:
    model = model_of(pair.model, "bfloat16")
    benches = [
        Bench(model, deterministic=True, kv_dtype=torch.float8_e4m3fn, graphs=graphs, pad=graphs)
        for graphs in (True, False)
    ]
    check_same(benches[0], benches[1], tolerance=0.0, steps=10)


#  0 - 1 - 3 - 5
#    \ 2 - 4
TREE = DraftTree([9, 200, 31, 32, 5], [0, 0, 1, 2, 3], [1.0] * 5)


def tree_step(bench: Bench, past: int, path: Sequence[int]) -> TreeStep:
    """The tree behind token 7 of slot 2, beside a chain of slot 4."""
    proposals: list[Any] = [[8, 8], TREE]
    batch = widen(ragged_batch([(4, 0, [7]), (2, past, [7])], bench.page_rows), proposals)
    return TreeStep(mark_trees(batch, proposals), [(2, past, list(path))])


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_way_has_the_logits_and_the_state_of_its_tokens_alone(pair: TinyPair, dtype: str) -> None:
    """A way whose nodes follow each other in the pages: to the bit.  Past a gap keys lie elsewhere, which rounds."""
    model, prompt = model_of(pair.model, dtype), list(range(3, 40))
    near = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}[dtype]
    for path, tolerance in (([0, 1], 0.0), ([0, 1, 3, 5], near), ([0, 2, 4], near)):
        branching, alone = Bench(model, deterministic=True), Bench(model, deterministic=True)
        for bench in (branching, alone):
            bench.executor.forward(ragged_batch([(2, 0, prompt)], bench.page_rows))
        logits = branching.run(tree_step(branching, len(prompt), path))[0][3:]
        for place, node in enumerate(path):
            one = ragged_batch([(2, len(prompt) + place, [[7, *TREE.token_ids][node]])], alone.page_rows)
            wanted = alone.executor.forward_verify(one).logits[0].cpu()
            torch.testing.assert_close(logits[node], wanted, atol=tolerance, rtol=tolerance)
        end = len(prompt) + len(path)
        for mine, wanted in zip(branching.state(2, end), alone.state(2, end), strict=True):
            torch.testing.assert_close(mine, wanted, atol=tolerance, rtol=tolerance)


def test_a_verification_and_a_commit_never_wait(pair: TinyPair) -> None:
    bench = Bench(model_of(pair.model, "bfloat16"))
    bench.executor.warm_up()
    for path in ([0, 1], [0, 2, 4], [0, 1, 3]):
        step = tree_step(bench, 0, path)
        with no_waiting():
            output = bench.executor.forward_verify(step.batch)
            commit(bench.executor, step)
        assert bool(output.logits.isfinite().all())


# ---- the text ---------------------------------------------------------------------------------------------------

SETTINGS = settings_of(32)
GREEDY = SETTINGS["greedy"]


def load(
    pair: TinyPair,
    *,
    shape: tuple[int, int, int] | None = (14, 2, 4),
    adaptive: bool = False,
    chunk: int = 256,
    **options: Any,
) -> LLM:
    """Without a shape nobody proposes."""
    speculative = None
    if shape is not None:
        sizes = dict(zip(("num_drafts", "top_k", "depth"), shape, strict=True))
        speculative = SpeculativeOptions(decoder="eagle", draft=pair.draft, adaptive=adaptive, **sizes)
    chosen: dict[str, Any] = {"device": "cuda", "dtype": "float32", "kv_budget": 4096, "page_size": PAGE_SIZE}
    chosen |= {"max_batch_size": NUM_SLOTS} | options
    scheduling = SchedulingOptions(max_prompt_step_tokens=chunk, max_num_tokens=chunk + NUM_SLOTS)
    return LLM(pair.model, speculative=speculative, scheduling=scheduling, **chosen)


@pytest.fixture(scope="module")
def plain(pair: TinyPair) -> dict[str, list[Any]]:
    """What plain decoding says to each prompt, and to the turn behind the greedy answers."""
    with load(pair, shape=None) as llm:
        wanted = {kind: llm.generate(PROMPTS, params, use_cache=False) for kind, params in SETTINGS.items()}
        wanted["second"] = llm.generate(second_prompts(wanted["greedy"]), GREEDY, use_cache=False)
    return wanted


@pytest.mark.parametrize(("batch", "chunk", "reuse"), [(5, 16, True), (5, 256, False), (1, 16, False), (1, 256, True)])
def test_the_text_is_that_of_plain_decoding(
    pair: TinyPair, plain: dict[str, list[Any]], batch: int, chunk: int, reuse: bool
) -> None:
    with load(pair, max_batch_size=batch, chunk=chunk) as llm:
        helped = HelpedTrees(llm, texts(plain["greedy"], plain["second"]))
        helped.runtime.decoder._pages.fill_poison()
        first = llm.generate(PROMPTS, GREEDY, use_cache=reuse)
        second = llm.generate(second_prompts(first), GREEDY, use_cache=reuse)
        graphs = helped.runtime.decoder._passes._staging._runner
        refusals = (graphs.refusal, helped.runtime.executor.runner.refusal)
    assert ids(first) == ids(plain["greedy"])
    assert ids(second) == ids(plain["second"])
    assert len(helped.branches) > 12
    assert max(map(len, helped.branches)) > 3
    assert (refusals, len(graphs) > 0) == (("", ""), True)
    reused = [output.reuse.reused_tokens for output in second]
    assert all(reused[2:]) if reuse else not any(reused)


@pytest.mark.parametrize("shape", [(40, 8, 4), (15, 3, 5)])
def test_requests_of_every_setting_share_a_batch(
    pair: TinyPair, plain: dict[str, list[Any]], shape: tuple[int, int, int]
) -> None:
    kinds = [*SETTINGS, "greedy"]
    wanted = [plain[kind][number] for number, kind in enumerate(kinds)]
    with load(pair, shape=shape, adaptive=True) as llm:
        helped = HelpedTrees(llm, texts(wanted))
        together = llm.generate(PROMPTS, [SETTINGS[kind] for kind in kinds], use_cache=False)
    assert ids(together) == ids(wanted)
    assert sum(output.accepted_draft_tokens for output in together) > 10
    assert helped.tables


@pytest.mark.parametrize(
    ("dtype", "options", "rounding"),
    [
        ("float16", {}, 0.02),
        ("bfloat16", {"kv_dtype": "fp8"}, 0.3),
        ("bfloat16", {"deterministic": True}, 0.1),
    ],
)
def test_16_bit_rows_on_the_tensor_cores(pair: TinyPair, dtype: str, options: dict[str, Any], rounding: float) -> None:
    """Keys of a branch lie elsewhere than those of plain decoding: texts part where rounding decides between tokens."""
    with load(pair, shape=None, dtype=dtype, **options) as llm:
        wanted = llm.generate(PROMPTS, replace(GREEDY, logprobs=2))
    with load(pair, dtype=dtype, **options) as llm:
        helped = HelpedTrees(llm, texts(wanted))
        found = llm.generate(PROMPTS, GREEDY)
    assert helped.branches
    assert sum(output.accepted_draft_tokens for output in found) > 10
    for ours, theirs in zip(found, wanted, strict=True):
        compared = compare(ours.token_ids, theirs.token_ids, margins_of(theirs))
        assert compared.margin is None or compared.margin < rounding, (compared, ours.token_ids, theirs.token_ids)


def margins_of(output: Any) -> list[float]:
    """How far the two best tokens of each place are apart, in nats."""
    best = [sorted((logprob for _, logprob in place.top), reverse=True) for place in output.logprobs]
    return [first - second for first, second, *_ in best]


# ---- what is proposed -------------------------------------------------------------------------------------------


def tables_of(llm: LLM) -> dict[tuple[int, int], Any]:
    """Every table that is made, by the slot and the place that it is for."""
    found = note_tables(llm._frontend.open_runtime("tables_of").decoder)
    llm.generate(PROMPTS, GREEDY, use_cache=False)
    return found


def test_tables_are_those_of_the_draft_on_the_cpu(pair: TinyPair) -> None:
    """But where two scores are as good as tied."""
    with load(pair, shape=(15, 3, 5)) as llm:
        ours = tables_of(llm)
    with load(pair, shape=(15, 3, 5), device="cpu") as llm:
        theirs = tables_of(llm)
    assert ours.keys() == theirs.keys()
    same = [place for place, table in ours.items() if table.token_ids == theirs[place].token_ids]
    assert len(same) >= 0.9 * len(ours) > 20
    for place in same:
        assert ours[place].parents == theirs[place].parents
        np.testing.assert_allclose(ours[place].scores, theirs[place].scores, atol=1e-3)


def test_a_round_reads_the_device_once(pair: TinyPair) -> None:
    """Between the start of a round and its trees nothing but the download of the tables waits."""
    with load(pair) as llm:
        llm.generate(PROMPTS[:2], GREEDY, use_cache=False)  # everything is compiled and captured
        downloads = count_downloads(llm._frontend.open_runtime("test").decoder)
        outputs = llm.generate(PROMPTS[:2], GREEDY, use_cache=False)
    assert len(downloads) > 10
    assert sum(output.proposed_draft_tokens for output in outputs) >= len(downloads)
