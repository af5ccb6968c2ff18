"""Device memory of drafts beside their pages: counted from sizes, and equal to what is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference_placement import ReferencePlacement, make_engine
from tiny_drafts import PAIRS, TinyPair

from edgellm import SpeculativeOptions
from edgellm.decoding import draft_memory
from edgellm.decoding.draft_memory import LiveBytes, graph_bytes, launching_nothing, pass_bytes, result_bytes
from edgellm.decoding.draft_model import DraftStep
from edgellm.models.device_ops import reference_ops
from edgellm.runtime.executor_cuda import ExecutorLimits

pytestmark = pytest.mark.usefixtures("decoders_of_this_tree")

CPU, MIB = torch.device("cpu"), 1 << 20
SLOTS, PAGES_PER_SLOT, DRAFTS = 3, 17, 2


@pytest.fixture(scope="module", params=["mtp", "eagle", "shared_kv"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return PAIRS[request.param](tmp_path_factory.mktemp(request.param))


def open_decoder(pair: TinyPair) -> Any:
    """The decoder beside an executor of the device's, and that one's engine."""
    speculative = SpeculativeOptions(decoder=pair.decoder, draft=pair.draft, adaptive=False, num_drafts=DRAFTS)
    return make_engine(
        pair.model,
        ReferencePlacement,
        kv_budget=1024,
        max_batch_size=SLOTS,
        max_model_len=(PAGES_PER_SLOT - 1) * 8 - DRAFTS,
        speculative=speculative,
    )


def limits(**changes: int) -> ExecutorLimits:
    sizes = {"num_slots": SLOTS, "pages_per_slot": PAGES_PER_SLOT, "step_tokens": 40, "verify_tokens": DRAFTS + 1}
    return ExecutorLimits(**(sizes | changes))


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(-(-tensor.nbytes // 512) * 512 for tensor in tensors)


def test_a_counted_run_has_the_bytes_of_a_real_one() -> None:
    def run() -> torch.Tensor:
        kept = torch.zeros(1000, dtype=torch.float32)
        for _ in range(3):
            torch.zeros(300, dtype=torch.int64)  # gone at once
        return kept[10:] + 1.0

    with LiveBytes() as live:
        result = run()
    assert (live.peak, live.now) == (4096 + 4096, 4096)
    assert result_bytes(run) == live.peak
    assert result.shape == (990,)


def test_what_is_counted_is_what_is_allocated(pair: TinyPair) -> None:
    """Results of passes come on top; on the CPU nothing keeps these, nor graphs."""
    is_assistant = pair.decoder == "shared_kv_mtp"
    with open_decoder(pair) as engine:
        decoder: Any = engine._frontend.open_runtime("memory").decoder
        counted = decoder.device_bytes(reference_ops(), CPU, limits())
        passes: Any = decoder._rounds if is_assistant else decoder._passes
        rows: Any = passes if is_assistant else passes._rows
        names = ("_hidden", "_chains") if is_assistant else ("waiting", "tokens", "own", "chains")
        kept, staging, inputs = [getattr(rows, name) for name in names], passes._staging, passes._staging._inputs
        assert inputs.table_shape == (SLOTS, PAGES_PER_SLOT)
        fixed = [inputs.table, inputs._words, staging._attention._decode_workspace, *staging._attention._single_starts]
        steps = counted - graph_bytes(SLOTS, 1 if is_assistant else DRAFTS + 2)
        allocated = sum(tensor.nbytes for tensor in fixed) + storage_bytes(kept)
        assert 0 < steps - allocated < MIB  # results of passes over a few rows of a tiny draft
        more = decoder.device_bytes(reference_ops(), CPU, limits(pages_per_slot=PAGES_PER_SLOT + 16))
        assert more - counted == SLOTS * 16 * 4


@pytest.mark.parametrize("pair", ["mtp", "eagle"], indirect=True)
def test_results_of_a_pass_are_those_of_its_head(pair: TinyPair) -> None:
    """Counted without memory, and with: the same operators, which launch nothing.

    Passes over pages: an assistant's is given a prefix.
    """
    with open_decoder(pair) as engine:
        head = engine._frontend.open_runtime("memory").decoder._head(launching_nothing(reference_ops()))  # type: ignore[attr-defined]
        with torch.inference_mode(), LiveBytes() as live:
            numbers, hidden = torch.zeros(16, dtype=torch.int32), torch.zeros((16, head.hidden_width))
            ends, step = torch.zeros(3, dtype=torch.int64), DraftStep(numbers, draft_memory.attend_to_nothing)
            result = head.forward(numbers, hidden, step, ends, projected=False)
        assert len(result[1]) == 3
        assert pass_bytes(head, CPU, tokens=16, rows=3) == live.peak
        assert pass_bytes(head, CPU, tokens=64, rows=3) > 3 * live.peak


def test_trees_take_their_tables_as_well(tmp_path_factory: pytest.TempPathFactory) -> None:
    pair = PAIRS["eagle"](tmp_path_factory.mktemp("trees"))
    options = {"decoder": "eagle", "draft": pair.draft, "adaptive": False}
    counted = []
    for shape in ({"num_drafts": 3}, {"num_drafts": 6, "top_k": 2, "depth": 3}):
        speculative = SpeculativeOptions(**options, **shape)
        with make_engine(
            pair.model, ReferencePlacement, kv_budget=1024, max_batch_size=SLOTS, speculative=speculative
        ) as engine:
            decoder: Any = engine._frontend.open_runtime("memory").decoder
            counted.append(decoder.device_bytes(reference_ops(), CPU, limits()))
            passes = decoder._passes
    tables = [passes._first_tokens, passes._first_log_probs, passes._found]
    assert 0 < counted[1] - counted[0] - sum(tensor.nbytes for tensor in tables) < MIB


def test_a_larger_batch_and_longer_chunks_take_more(pair: TinyPair) -> None:
    with open_decoder(pair) as engine:
        decoder: Any = engine._frontend.open_runtime("memory").decoder
        least = decoder.device_bytes(reference_ops(), CPU, limits())
        assert decoder.device_bytes(reference_ops(), CPU, limits(num_slots=8)) > least
        longer = decoder.device_bytes(reference_ops(), CPU, limits(step_tokens=400))
        assert (longer > least) == (pair.decoder != "shared_kv_mtp")


def test_plain_decoding_takes_nothing(tmp_path: Path, pair: TinyPair) -> None:
    with make_engine(pair.model, ReferencePlacement, kv_budget=1024, max_model_len=128) as engine:
        decoder = engine._frontend.open_runtime("memory").decoder
        assert decoder.device_bytes(reference_ops(), CPU, limits()) == 0
