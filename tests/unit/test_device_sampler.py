"""The device's path of the sampler, run by the references on CPU tensors, against the host's: token for token."""

from __future__ import annotations

import copy
import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_batches import assert_as_on_the_host, random_state

from edgellm.errors import KernelError, StepDeviceError
from edgellm.sampling.device_sampler import DeviceSampler, reference_ops
from edgellm.sampling.device_staging import Staging
from edgellm.sampling.guidance import Guidance
from edgellm.sampling.params import SamplingParams
from edgellm.sampling.sampler import NO_TOKEN, Sampler, SamplingState
from edgellm.sampling.structured import StructuredOutput
from edgellm.testing.toy_tokenizer import ToyTokenizer

INF, NAN = math.inf, math.nan
CPU = torch.device("cpu")
# Coarse values make equal logits and equal shares common: ties are where implementations differ.
LOGIT = st.one_of(st.integers(-4, 4).map(float), st.floats(-30, 30, width=32), st.just(-INF))
ODD_LOGIT = st.one_of(LOGIT, LOGIT, LOGIT, st.sampled_from([NAN, INF]))
VOCAB = 300
GUIDANCE = Guidance(ToyTokenizer(VOCAB), VOCAB)
FORMS = [StructuredOutput(regex="ab?c*"), StructuredOutput(choice=["yes", "no"]), StructuredOutput(regex="[0-9]+")]


def assert_same(logits: torch.Tensor, states: list[SamplingState], sampler: DeviceSampler | None = None) -> None:
    sampler = DeviceSampler(CPU, reference_ops()) if sampler is None else sampler
    assert_as_on_the_host(sampler.sample(logits, states), logits, states)


@st.composite
def parameters(draw, vocab_size: int) -> SamplingParams:
    ids = st.integers(0, vocab_size - 1)
    return SamplingParams(
        max_tokens=50,
        temperature=draw(st.sampled_from([0.0, 0.0, 1e-6, 0.3, 1.0, 1.0, 1.7, 100.0])),
        top_k=draw(st.one_of(st.sampled_from([-1, 0, 1, vocab_size, 2**31 - 1]), st.integers(1, vocab_size))),
        top_p=draw(st.one_of(st.just(1.0), st.sampled_from([1e-9, 0.25, 0.5, 0.75]), st.floats(0.01, 1.0))),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.3, -0.9])),
        logit_bias=draw(st.one_of(st.just({}), st.dictionaries(ids, st.floats(-100, 100), max_size=4))),
        seed=draw(st.integers(0, 2**64 - 1)),
        stop_token_ids=draw(st.lists(ids, max_size=2)),
        min_tokens=draw(st.sampled_from([0, 0, 3])),
        logprobs=draw(st.sampled_from([None, None, 0, 1, 5, 50])),
        ignore_eos=draw(st.booleans()),
    )


@st.composite
def batches(draw) -> tuple[torch.Tensor, list[SamplingState]]:
    vocab_size, num_rows = draw(st.integers(1, 14)), draw(st.integers(1, 6))
    ids = st.integers(0, vocab_size - 1)
    element = draw(st.sampled_from([LOGIT, ODD_LOGIT]))
    rows, states = [], []
    for _ in range(num_rows):
        rows.append(draw(st.lists(element, min_size=vocab_size, max_size=vocab_size)))
        prompt = draw(st.lists(ids, min_size=1, max_size=4))
        state = SamplingState(draw(parameters(vocab_size)), prompt, vocab_size, draw(st.sets(ids, max_size=2)))
        for token_id in draw(st.lists(ids, max_size=4)):
            state.record(token_id)
        states.append(state)
    return torch.tensor(rows, dtype=torch.float32), states


class TestAgainstTheHost:
    @settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(batches())
    def test_any_batch(self, batch):
        assert_same(*batch)

    @pytest.mark.parametrize("vocab_size", [31, 32, 33, 1000, 8192, 8193])
    def test_wide_rows(self, vocab_size):
        rng = np.random.default_rng(vocab_size)
        sampler = DeviceSampler(CPU, reference_ops())
        for trial in range(4):
            values = rng.normal(size=(12, vocab_size)) * 4
            logits = torch.from_numpy(np.round(values, 1) if trial % 2 else values).float()
            states = [random_state(rng, vocab_size) for _ in range(12)]
            assert_same(logits, states, sampler)

    def test_a_whole_vocabulary(self):
        rng = np.random.default_rng(5)
        logits = torch.from_numpy(rng.normal(size=(4, 151_936)) * 3).bfloat16().float()
        settings = ({"top_k": 50}, {"top_p": 0.9}, {"top_k": 5000, "top_p": 0.7, "min_p": 0.01}, {"logprobs": 20})
        states = [
            SamplingState(SamplingParams(seed=number, **one), [1], 151_936) for number, one in enumerate(settings)
        ]
        assert_same(logits, states)

    def test_thousands_of_draws(self):
        rng = np.random.default_rng(9)
        sampler = DeviceSampler(CPU, reference_ops())
        for trial in range(20):
            logits = torch.from_numpy(rng.normal(size=(200, 40)) * 2).float()
            states = [random_state(rng, 40) for _ in range(200)]
            assert_same(logits if trial % 2 else logits.round(), states, sampler)


class TestGuidedRows:
    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def test_guided_among_others(self, data):
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        states = []
        for _ in range(4):
            form = data.draw(st.sampled_from([None, *FORMS]))
            params = SamplingParams(
                temperature=data.draw(st.sampled_from([0.0, 1.0])),
                seed=int(rng.integers(2**63)),
                structured=form,
                logprobs=data.draw(st.sampled_from([None, 2])),
                min_tokens=data.draw(st.sampled_from([0, 5])),
                repetition_penalty=data.draw(st.sampled_from([1.0, 1.5])),
                logit_bias=data.draw(st.sampled_from([{}, {5: 3.0}])),
            )
            guide = None if form is None else GUIDANCE.start(form)
            state = SamplingState(params, [1, 2], VOCAB, [1], guide=guide)
            for token_id in data.draw(st.lists(st.sampled_from([100, 101, 102, 1, 50, 51]), max_size=3)):
                state.record(token_id)
            states.append(state)
        assert_same(torch.from_numpy(rng.normal(size=(4, VOCAB)) * 3).float(), states)

    def test_a_dead_end_says_so_and_leaves_the_others_alone(self):
        guided = SamplingState(
            SamplingParams(structured=FORMS[0], temperature=0.0), [1], VOCAB, [1], guide=GUIDANCE.start(FORMS[0])
        )
        guided.record(7)
        plain = SamplingState(SamplingParams(temperature=0.0), [1], VOCAB)
        logits = torch.zeros(2, VOCAB)
        logits[1, 9] = 1.0
        result = DeviceSampler(CPU, reference_ops()).sample(logits, [guided, plain])
        assert result.token_ids == [NO_TOKEN, 9]
        assert result.errors[0].startswith("the text left the grammar (")
        assert_same(logits, [guided, plain])

    def test_a_grammar_that_raises_ends_its_row_alone(self):
        def fail() -> None:
            raise IndexError("out of range")

        guided = SamplingState(SamplingParams(structured=FORMS[0]), [1], VOCAB, [1], guide=GUIDANCE.start(FORMS[0]))
        guided.guide = SimpleNamespace(allowed_words=fail, restrict=lambda _: fail())  # type: ignore[assignment]
        biased = SamplingState(SamplingParams(temperature=0.0, logit_bias={9: 1.0}), [1], VOCAB)
        logits = torch.zeros(2, VOCAB)
        result = DeviceSampler(CPU, reference_ops()).sample(logits, [guided, biased])
        assert result.token_ids == [NO_TOKEN, 9]
        assert result.errors[0].startswith("sampling this sequence failed (IndexError: out of range)")
        assert_same(logits, [guided, biased])

    def test_a_bad_row_is_the_models_fault_before_it_is_the_grammars(self):
        guided = SamplingState(SamplingParams(structured=FORMS[0]), [1], VOCAB, [1], guide=GUIDANCE.start(FORMS[0]))
        guided.record(7)
        for bad in (NAN, INF, -INF):
            assert_same(torch.full((1, VOCAB), bad), [guided])

    def test_logits_that_the_grammar_does_not_leave(self):
        guided = SamplingState(SamplingParams(structured=FORMS[0]), [1], VOCAB, [1], guide=GUIDANCE.start(FORMS[0]))
        logits = torch.full((1, VOCAB), -INF)
        logits[0, 3] = 0.0
        assert_same(logits, [guided])


class TestRows:
    def states(self, vocab_size: int, num_rows: int = 8) -> list[SamplingState]:
        rng = np.random.default_rng(3)
        return [random_state(rng, vocab_size) for _ in range(num_rows)]

    def test_a_row_does_not_depend_on_the_others(self):
        logits, states = torch.randn(8, 500, generator=torch.Generator().manual_seed(1)), self.states(500)
        sampler = DeviceSampler(CPU, reference_ops())
        batch = sampler.sample(logits, states)
        for row in range(8):
            alone = sampler.sample(logits[row : row + 1], states[row : row + 1])
            assert alone.token_ids == [batch.token_ids[row]]
            assert alone.logprobs == [batch.logprobs[row]]

    def test_logits_and_states_stay_as_they_were(self):
        logits, states = torch.randn(8, 100), self.states(100)
        before = logits.clone()
        positions = [state.position for state in states]
        DeviceSampler(CPU, reference_ops()).sample(logits, states)
        assert torch.equal(logits, before)
        assert [state.position for state in states] == positions

    def test_other_types_and_strides(self):
        logits = torch.randn(8, 100).bfloat16()
        states = self.states(100)
        assert_same(logits, states)
        assert_same(logits.double(), states)
        assert_same(logits.t().contiguous().t(), states)
        assert_same(torch.randn(8, 300)[:, 3:103], states)
        assert_same(torch.randn(1, 100).expand(8, 100), states)

    def test_inside_and_outside_of_inference_mode(self):
        sampler, logits, states = DeviceSampler(CPU, reference_ops()), torch.randn(8, 100), self.states(100)
        for mode in (True, False, True):
            with torch.inference_mode(mode):
                assert_same(logits, states, sampler)
                sampler.sample(logits[:1], [SamplingState(SamplingParams(temperature=0.0), [0], 100)])

    def test_nothing(self):
        result = DeviceSampler(CPU, reference_ops()).sample(torch.zeros(0, 9), [])
        assert (result.token_ids, result.logprobs, result.errors) == ([], [], {})

    def test_plain_greedy_steps_run_one_op(self):
        calls = []
        ops = copy.copy(reference_ops())
        object.__setattr__(ops, "logit_edit", lambda *_, **__: calls.append("edit"))
        object.__setattr__(ops, "logprobs", lambda *_, **__: calls.append("logprobs"))
        sampler = DeviceSampler(CPU, ops)
        logits = torch.tensor([[0.0, 3.0, 3.0], [NAN, 1.0, 0.0], [INF, 0.0, 0.0], [-INF, -INF, -INF]])
        states = [SamplingState(SamplingParams(temperature=0.0), [0], 3) for _ in range(4)]
        result = sampler.sample(logits, states)
        assert result.token_ids == [1, NO_TOKEN, NO_TOKEN, NO_TOKEN]
        assert result.errors == Sampler().sample(logits, states).errors
        assert calls == []

    def test_memory_is_reused_and_grows(self):
        sampler = DeviceSampler(CPU, reference_ops())
        for num_rows in (3, 40, 2, 64):
            assert_same(torch.randn(num_rows, 700), self.states(700, num_rows), sampler)
        edited = sampler.edited_rows("edited", 1, 700).data_ptr()
        assert_same(torch.randn(2, 700), self.states(700, 2), sampler)
        assert sampler.edited_rows("edited", 1, 700).data_ptr() == edited


OUT_OF_MEMORY = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def fail(error: BaseException):
    def call(*args, **options):
        raise error

    return call


class TestFailures:
    """What the device raises while it samples is an error of the step that says what to change."""

    def logits_and_states(self, **params):
        states = [SamplingState(SamplingParams(**params), [0], 50) for _ in range(3)]
        return torch.randn(3, 50), states

    @pytest.mark.parametrize("error", [OUT_OF_MEMORY, RuntimeError("CUDA error: illegal address"), MemoryError("none")])
    @pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 1, "logprobs": 2}])
    @pytest.mark.parametrize("where", ["op", "allocation"])
    def test_errors_of_the_device_name_the_step_and_the_remedy(self, error, params, where, monkeypatch):
        logits, states = self.logits_and_states(**params)
        ops = reference_ops()
        if where == "op":
            ops = dataclasses.replace(ops, sample=fail(error))
        else:
            monkeypatch.setattr(Staging, "_reserve", fail(error))
        with pytest.raises(
            StepDeviceError, match=r"sampling 3 rows failed: .*lower max_batch_size or kv_budget"
        ) as info:
            DeviceSampler(CPU, ops).sample(logits, states)
        assert info.value.__cause__ is error

    def test_our_own_errors_and_those_of_what_runs_beside_pass(self):
        logits, states = self.logits_and_states(temperature=0.0)
        for error in (KernelError("no compiler"), StepDeviceError("the forward pass failed")):
            with pytest.raises(type(error)) as info:
                DeviceSampler(CPU, reference_ops()).sample(logits, states, fail(error))
            assert info.value is error

    def test_memory_that_ran_out_is_asked_for_again_by_the_next_step(self, monkeypatch):
        sampler = DeviceSampler(CPU, reference_ops())
        assert_same(torch.randn(3, 50), self.logits_and_states(temperature=0.0)[1], sampler)
        states = [SamplingState(SamplingParams(temperature=0.0), [0], 4) for _ in range(2000)]
        logits = torch.randn(2000, 4)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", fail(OUT_OF_MEMORY))
            with pytest.raises(StepDeviceError, match="out of memory"):
                sampler.sample(logits, states)
        assert_same(logits, states, sampler)


class TestStaging:
    def test_arrays_arrive_as_they_were(self):
        staging = Staging(CPU)
        for size in (3, 5000, 3):
            arrays = {
                "ids": np.arange(size, dtype=np.int32),
                "columns": np.array([[1.5], [2.5]]),
                "none": np.empty(0, np.int64),
                "last": np.arange(size)[::-1],
            }
            uploaded = staging.upload(arrays)
            assert list(uploaded) == list(arrays)
            for name, array in arrays.items():
                assert uploaded[name].numpy().tolist() == array.tolist()
                assert uploaded[name].data_ptr() % 16 == 0 or array.size == 0

    def test_results_come_back(self):
        staging = Staging(CPU)
        layout = staging.layout((("i", (3,)), ("d", (2, 0)), ("d", (2, 2))))
        layout.device[0].copy_(torch.tensor([1, 2, 3]))
        layout.device[2].fill_(0.5)
        assert [array.tolist() for array in staging.download(layout)] == [[1, 2, 3], [[], []], [[0.5, 0.5]] * 2]

    def test_layouts_are_kept_until_the_memory_grows(self):
        staging = Staging(CPU)
        small, large = (("d", (2,)),), (("d", (9000,)),)
        first = staging.layout(small)
        assert staging.layout(small) is first
        grown = staging.layout(large)
        again = staging.layout(small)
        assert again is not first
        assert again.device[0].data_ptr() == grown.device[0].data_ptr()

    def test_layouts_do_not_pile_up(self):
        staging = Staging(CPU)
        for size in range(1000):
            staging.layout((("b", (size,)),))
        assert len(staging._layouts) <= 256
