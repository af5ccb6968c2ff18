"""What a CUDA deployment decides without a GPU: device, memory, refusals, pieces of weights."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_models_weights import CONFIG, tensors
from tiny_model import write_tiny_llama, write_tiny_qwen_hybrid

from edgellm import LLM, SamplingParams
from edgellm.assembly import LoadOptions, _engine_config
from edgellm.cache.types import DeploymentConfig
from edgellm.engine.config import SchedulingOptions
from edgellm.errors import InvalidArgumentError, StepDeviceError, WeightFileError
from edgellm.memory import MemoryBudget
from edgellm.models.config import ModelConfig, RopeConfig, StatePiece
from edgellm.models.device_graph import row_widths
from edgellm.models.device_ops import reference_ops
from edgellm.models.loader import load_model
from edgellm.models.pinned_upload import PieceReader, PinnedUpload
from edgellm.models.registry import Architecture
from edgellm.models.safetensors_source import SafetensorsSource
from edgellm.models.weights import load_weights, weight_bytes
from edgellm.runtime import cuda_memory, device_choice, device_cuda, placement, placement_cuda
from edgellm.runtime.cuda_memory import DeviceMemory
from edgellm.runtime.device import CpuDevice
from edgellm.runtime.device_cuda import CudaDevice, is_integrated, memory_errors, unified_free_bytes
from edgellm.runtime.executor_cuda import CudaExecutor, ExecutorLimits
from edgellm.runtime.placement import (
    CPU_STEP_TOKENS,
    CUDA_STEP_TOKENS,
    CpuPlacement,
    DraftSizes,
    PlacementOptions,
    place,
)
from edgellm.runtime.placement_cuda import CudaPlacement, check_model
from edgellm.runtime.step_buckets import StepBuckets
from edgellm.runtime.step_inputs import HostStaging
from edgellm.sampling.device_staging import Staging

GIB = 1 << 30
MIB = 1 << 20


def config(**changes: Any) -> ModelConfig:
    """Qwen3-8B's shape."""
    values: dict[str, Any] = {
        "architecture": Architecture.QWEN3,
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_layers": 36,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "max_positions": 40_960,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig(theta=1e6),
        "tied_embeddings": False,
        "qk_norm": True,
    }
    return ModelConfig(**(values | changes))


def limits(
    num_slots: int = 8, pages_per_slot: int = 1280, step_tokens: int = 2048, verify_tokens: int = 1
) -> ExecutorLimits:
    return ExecutorLimits(
        num_slots=num_slots, pages_per_slot=pages_per_slot, step_tokens=step_tokens, verify_tokens=verify_tokens
    )


# ---- memory ---------------------------------------------------------------------------------------------


def test_weight_bytes_of_a_known_model() -> None:
    """8,190,735,360 parameters in the published checkpoint."""
    assert weight_bytes(config(), torch.bfloat16) == 2 * 8_190_735_360


def graph(**changes: Any) -> Any:
    """What the memory plan asks a device graph, of a model with no weights."""
    shape = config(**changes)
    return SimpleNamespace(
        config=shape,
        row_widths=row_widths(shape),
        float_widths={"angles": shape.head_dim},
        workspace_bytes=lambda *, tokens, rows: 0,
    )


def test_scratch_grows_with_the_step_and_the_batch_and_not_with_the_context() -> None:
    small = cuda_memory.scratch_bytes(graph(), torch.bfloat16, limits())
    assert cuda_memory.scratch_bytes(graph(), torch.bfloat16, limits(pages_per_slot=128_000)) == small
    longer = cuda_memory.scratch_bytes(graph(), torch.bfloat16, limits(step_tokens=4096))
    token_bytes = 2 * (2 * 4096 + 6144 + 4096 + 3 * 12_288) + 128 * 4
    assert longer - small == 2048 * token_bytes
    logit_bytes = 2 * 4096 * 2 + 5 * 151_936 * 4  # its selected rows, its logits
    more = cuda_memory.scratch_bytes(graph(), torch.bfloat16, limits(num_slots=9))
    assert more - small == token_bytes + logit_bytes
    verifying = cuda_memory.scratch_bytes(graph(), torch.bfloat16, limits(verify_tokens=5))
    # Logits of four more tokens a slot, and three hidden rows a token for a draft.
    assert verifying - small == 4 * 8 * logit_bytes + 3 * 4096 * 2 * limits().largest_step().tokens


def test_graphs_of_verified_rows_are_reserved_as_well() -> None:
    plain, verifying = cuda_memory.graph_bytes(limits()), cuda_memory.graph_bytes(limits(verify_tokens=5))
    verified = StepBuckets.of(8, decode_apart=True, verify_tokens=5).verified_at_start()
    assert verifying - plain == 3 * len(verified) * MIB > 0


def test_pool_is_what_weights_scratch_and_graphs_leave() -> None:
    memory = DeviceMemory(
        device_name="H200", weights_bytes=16 * GIB, free_bytes=100 * GIB, scratch_bytes=GIB, graph_bytes=GIB
    )
    assert memory.pool_bytes == 98 * GIB
    assert memory.default_fraction == 0.85
    assert memory.describe() == (
        "H200: weights 16.0 GiB, scratch 1.0 GiB, graphs 1.0 GiB, 100.0 GiB free after the weights"
    )


class FakeDevice:
    """What `measure` asks a device."""

    name = "board"

    def __init__(self, free: int, *, unified: bool = False) -> None:
        self._free = free
        self.is_integrated = unified

    def free_memory_bytes(self) -> int:
        return self._free


def test_measured_memory_of_a_unified_board() -> None:
    device: Any = FakeDevice(8 * GIB, unified=True)
    memory = cuda_memory.measure(device, graph(), torch.bfloat16, GIB, limits())
    assert memory.default_fraction == 0.6
    assert memory.describe().endswith("8.0 GiB free after the weights, shared with the host")


def test_state_after_each_verified_token_is_taken_off_the_pool() -> None:
    pieces = (StatePiece(0, "conv", (64, 3)), StatePiece(0, "state", (4, 128, 128)))
    hybrid = graph()
    hybrid.config = SimpleNamespace(recurrent_pieces=pieces, vocab_size=1000, hidden_size=64)
    device: Any = FakeDevice(8 * GIB)
    plain = cuda_memory.measure(device, hybrid, torch.bfloat16, GIB, limits())
    verifying = cuda_memory.measure(device, hybrid, torch.bfloat16, GIB, limits(verify_tokens=5))
    assert plain.verify_bytes == 0
    assert verifying.verify_bytes == 8 * 5 * 4 * (64 * 3 + 4 * 128 * 128)
    assert "state while verifying 10.0 MiB" in verifying.describe()
    grown = verifying.scratch_bytes + verifying.graph_bytes - plain.scratch_bytes - plain.graph_bytes
    assert plain.pool_bytes - verifying.pool_bytes == grown + verifying.verify_bytes


def test_what_drafts_take_beside_their_pages_is_taken_off_the_pool() -> None:
    device: Any = FakeDevice(8 * GIB)
    plain = cuda_memory.measure(device, graph(), torch.bfloat16, GIB, limits())
    drafting = cuda_memory.measure(device, graph(), torch.bfloat16, GIB, limits(), draft_bytes=300 * MIB)
    assert plain.pool_bytes - drafting.pool_bytes == 300 * MIB
    assert "drafts" not in plain.describe()
    assert ", drafts beside their pages 300.0 MiB, 8.0 GiB free after the weights" in drafting.describe()
    with pytest.raises(InvalidArgumentError, match="nothing is left for the KV pool"):
        cuda_memory.measure(device, graph(), torch.bfloat16, GIB, limits(), draft_bytes=8 * GIB)


def test_the_pool_of_a_deployment_leaves_room_for_its_drafts(
    on_host: CudaPlacement, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The decoder is asked with the sizes that the deployment will have."""
    monkeypatch.setattr(HostDevice, "free_memory_bytes", lambda self: 4 * GIB)
    options = PlacementOptions(dtype="float32", kv_budget=0.5, page_size=16, max_batch_size=3)
    on_gpu = CudaPlacement(torch.device("cpu"), options)
    model = load_model(write_tiny_llama(tmp_path), dtype="float32")
    asked = []

    def device_bytes(ops: Any, device: torch.device, limits: ExecutorLimits) -> int:
        asked.append((ops, device, limits.num_slots, limits.pages_per_slot, limits.verify_tokens))
        return GIB

    alone = DraftSizes(verify_tokens=4, write_ahead=3)
    plain, drafting = (
        on_gpu.size_pool(model, 256, draft) for draft in (alone, replace(alone, device_bytes=device_bytes))
    )
    deployment = DeploymentConfig(3, 256, 256 + 3, plain.page_size, plain.num_pages)
    assert deployment.pages_per_slot == 18
    assert asked == [(on_gpu._ops, torch.device("cpu"), 3, deployment.pages_per_slot, 4)]
    lost = (plain.num_pages - drafting.num_pages) * plain.bytes_per_page
    assert abs(lost - GIB // 2) <= plain.bytes_per_page
    assert "drafts beside their pages 1.0 GiB" in drafting.describe()


def test_no_room_for_a_pool_names_what_to_change() -> None:
    device: Any = FakeDevice(100 * MIB)
    with pytest.raises(
        InvalidArgumentError, match=r"nothing is left for the KV pool on board.*max_batch_size \(now 8\)"
    ):
        cuda_memory.measure(device, graph(), torch.bfloat16, GIB, limits())


@pytest.mark.parametrize("name", ["max_num_tokens", "max_prompt_step_tokens"])
def test_a_step_too_large_for_the_memory_is_refused_by_the_name_of_its_option(
    on_host: CudaPlacement, name: str, tmp_path: Path
) -> None:
    model = load_model(write_tiny_llama(tmp_path), dtype="float32")
    options = LoadOptions("m", page_size=16, scheduling=SchedulingOptions(**{name: 10**8})).placement_options()
    with pytest.raises(InvalidArgumentError, match=rf"lower scheduling\.{name} \(now 100000000\), then max_batch_size"):
        CudaPlacement(torch.device("cpu"), options).size_pool(model, 256)


def test_a_step_of_the_default_size_is_not_named_when_memory_is_short(
    on_host: CudaPlacement, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(HostDevice, "free_memory_bytes", lambda self: 100 * MIB)
    model = load_model(write_tiny_llama(tmp_path), dtype="float32")
    options = LoadOptions("m", page_size=16, scheduling=SchedulingOptions(max_num_tokens=64)).placement_options()
    with pytest.raises(InvalidArgumentError, match=r"lower max_batch_size \(now 8\), load a smaller dtype"):
        CudaPlacement(torch.device("cpu"), options).size_pool(model, 256)


def test_weights_that_do_not_fit_are_refused_with_both_sizes() -> None:
    device: Any = FakeDevice(15 * GIB)
    with pytest.raises(InvalidArgumentError, match=r"need 16.0 GiB in bfloat16, 15.0 GiB are free on board.*dtype="):
        cuda_memory.check_weights_fit(16 * GIB, device, torch.bfloat16)


def test_out_of_memory_at_start_names_size_room_and_remedy() -> None:
    device: Any = FakeDevice(2 * GIB)
    for cause in (torch.cuda.OutOfMemoryError("no"), StepDeviceError("the warm-up failed")):
        if isinstance(cause, StepDeviceError):
            cause.__cause__ = torch.cuda.OutOfMemoryError("no")
        with (
            pytest.raises(
                InvalidArgumentError, match=r"the pool need 3.0 GiB, 2.0 GiB are free on board; lower kv_budget"
            ),
            memory_errors("the pool", 3 * GIB, device, "lower kv_budget"),
        ):
            raise cause
    with pytest.raises(StepDeviceError, match="another"), memory_errors("the pool", 1, device, ""):
        raise StepDeviceError("another failure")


def test_free_memory_of_a_unified_board_is_the_hosts_less_a_reserve() -> None:
    assert unified_free_bytes(50 * GIB, 64 * GIB) == 48 * GIB
    assert unified_free_bytes(7 * GIB, 8 * GIB) == 7 * GIB - int(0.8 * GIB)
    assert unified_free_bytes(200 * GIB, 64 * GIB) == 62 * GIB
    assert unified_free_bytes(GIB // 4, 8 * GIB) == 0


def test_boards_that_share_memory_are_told_by_torch_or_by_name() -> None:
    assert is_integrated(SimpleNamespace(is_integrated=1, name="Orin"))
    assert not is_integrated(SimpleNamespace(is_integrated=0, name="NVIDIA H200"))
    for name in ("Orin", "NVIDIA Thor", "NVIDIA GB10", "Xavier"):
        assert is_integrated(SimpleNamespace(name=name))
    assert not is_integrated(SimpleNamespace(name="NVIDIA GeForce RTX 4090"))


def test_budget_shows_what_is_beside_the_pool() -> None:
    budget = MemoryBudget(
        bytes_per_page=1024, num_pages=4, page_size=16, max_model_len=64, beside="H200: weights 1 GiB"
    )
    assert budget.describe().endswith("(64 tokens); H200: weights 1 GiB")


# ---- device ---------------------------------------------------------------------------------------------


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU as far as torch's questions go."""
    gpu = SimpleNamespace(capability=(9, 0), kernels="")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: gpu.capability)
    monkeypatch.setattr(device_choice, "_why_no_kernels", lambda device: gpu.kernels)
    return gpu


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused() -> None:
    choice = device_choice.choose_device("auto")
    assert choice.device == torch.device("cpu")
    assert "sees no CUDA device" in choice.reason
    for wanted in ("cuda", "cuda:1"):
        with pytest.raises(InvalidArgumentError, match=f"device is '{wanted}'.*no CUDA device.*doctor.*device='cpu'"):
            device_choice.choose_device(wanted)
    with pytest.raises(InvalidArgumentError, match="sees no CUDA device"):
        CudaDevice("cuda")


def test_with_a_gpu_auto_is_the_gpu_and_says_why(one_gpu: SimpleNamespace) -> None:
    choice = device_choice.choose_device("auto")
    assert choice.device == torch.device("cuda", 0)
    assert choice.reason == "Card is there and its kernels compile"
    assert device_choice.choose_device("cuda").device == torch.device("cuda", 0)
    assert device_choice.choose_device("cpu").device == torch.device("cpu")


def test_an_old_or_broken_gpu_is_left_aside_with_a_reason(one_gpu: SimpleNamespace) -> None:
    one_gpu.capability = (7, 5)
    assert "Card has compute capability 7.5, 8.0 or newer" in device_choice.choose_device("auto").reason
    one_gpu.capability, one_gpu.kernels = (8, 7), "CUDA kernels cannot be built: no compiler"
    choice = device_choice.choose_device("auto")
    assert (choice.device.type, choice.reason) == ("cpu", one_gpu.kernels)
    with pytest.raises(InvalidArgumentError, match="no compiler"):
        device_choice.choose_device("cuda")


@pytest.mark.parametrize(
    "wanted", ["cuda:01", "cuda:128", "cuda:256", "cuda:\u0663", "cuda:" + "9" * 20, "cuda:", "cuda:-1", "mps"]
)
def test_what_is_no_device_name_is_refused(one_gpu: SimpleNamespace, wanted: str) -> None:
    """Torch keeps the number in 8 bits: 256 would be 0, 255 would be -1."""
    with pytest.raises(InvalidArgumentError, match="'cuda:N' with N from 0 to 127 is needed"):
        device_choice.choose_device(wanted)


def test_a_process_that_cannot_use_cuda_says_so(one_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked child of a process that used CUDA."""

    def refuse(device: object = None) -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "current_device", refuse)
    monkeypatch.setattr(torch.cuda, "get_device_capability", refuse)
    assert "forked subprocess" in device_choice.choose_device("auto").reason
    with pytest.raises(InvalidArgumentError, match="forked subprocess"):
        device_choice.choose_device("cuda")


def test_full_memory_is_no_broken_device(one_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    answer: list[Exception] = [torch.cuda.OutOfMemoryError("full"), RuntimeError("illegal address")]

    def ask(*_args: object, **_options: object) -> None:
        raise answer[0]

    device = CudaDevice.__new__(CudaDevice)
    device._device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch, "zeros", ask)
    assert device.healthy()
    answer.pop(0)
    assert not device.healthy()


def test_a_number_beyond_the_devices_is_refused(one_gpu: SimpleNamespace) -> None:
    with pytest.raises(InvalidArgumentError, match=r"cuda:3.*torch sees 1 CUDA device, numbered from 0"):
        device_choice.choose_device("cuda:3")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("name", "value"), [("kv_dtype", "fp8"), ("deterministic", True)])
def test_options_that_need_a_gpu_are_refused_on_the_cpu(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name} is {value!r}, which needs a CUDA device"):
        place("auto", PlacementOptions(**{name: value}))
    assert isinstance(place("auto", PlacementOptions()), CpuPlacement)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda:x"}, "device is 'cuda:x'; it must be 'auto', 'cpu', 'cuda' or 'cuda:N'"),
        ({"device": 0}, "device is 0"),
        ({"kv_dtype": "int8"}, "kv_dtype is 'int8'; supported: 'auto', 'fp8'"),
        ({"deterministic": 1}, "deterministic is 1; it must be True or False"),
    ],
)
def test_malformed_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        LoadOptions("m", **options)


def test_step_budget_follows_the_device() -> None:
    options = LoadOptions("m", max_batch_size=4)
    for tokens in (CPU_STEP_TOKENS, CUDA_STEP_TOKENS):
        made = _engine_config(options, 4096, tokens)
        assert (made.step_token_budget, made.scheduling.max_prompt_step_tokens) == (tokens, tokens)
    wide = LoadOptions("m", scheduling=SchedulingOptions(max_num_tokens=5000, max_prompt_step_tokens=6000))
    assert wide.placement_options().step_tokens == 6000


# ---- models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 20}, r"20 dimensions.*multiples of 8 up to 512"),
        ({"head_dim": 260}, r"260 dimensions"),
        ({"num_heads": 34, "num_kv_heads": 2}, r"17 query heads share a KV head; .* up to 16"),
    ],
)
def test_heads_that_no_kernel_serves_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        check_model(config(**changes), torch.bfloat16)
    check_model(config(head_dim=96), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 4092}, "hidden_size of the model is 4092;.*deterministic=True take multiples of 8"),
        ({"intermediate_size": 1001}, "intermediate_size of the model is 1001;.*use deterministic=False"),
    ],
)
def test_widths_that_deterministic_kernels_cannot_read_are_refused(
    changes: dict[str, int], message: str, dtype: torch.dtype
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        check_model(config(**changes), dtype, deterministic=True)
    check_model(config(**changes), dtype)  # other kernels serve them
    check_model(config(**changes), torch.float32, deterministic=True)
    check_model(config(), dtype, deterministic=True)


def test_widths_that_no_16_bit_expert_kernel_reads_are_refused_in_either_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelConfig, "expert_widths", (("moe_intermediate_size", 28),))
    for deterministic in (False, True):
        with pytest.raises(InvalidArgumentError, match=r"moe_intermediate_size of the model is 28;.*dtype='float32'"):
            check_model(config(), torch.bfloat16, deterministic=deterministic)
    check_model(config(), torch.float32)


def test_a_pool_is_not_sized_for_a_model_that_deterministic_kernels_cannot_read(
    on_host: CudaPlacement, tmp_path: Path
) -> None:
    model = load_model(write_tiny_llama(tmp_path, intermediate_size=60), dtype="bfloat16")
    assert on_host.size_pool(model, 256).num_pages
    deterministic = CudaPlacement(torch.device("cpu"), PlacementOptions(deterministic=True, page_size=16))
    with pytest.raises(InvalidArgumentError, match="intermediate_size of the model is 60"):
        deterministic.size_pool(model, 256)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(torch.float16), tmp_path / "model.safetensors")
    return tmp_path


def test_float16_needs_a_gpu(checkpoint: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="dtype is 'float16', which needs a CUDA device"):
        load_model(checkpoint, dtype="float16")


@pytest.mark.parametrize("piece_bytes", [4, 12, 64, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weights_in_pieces_are_those_read_whole(checkpoint: Path, dtype: torch.dtype, piece_bytes: int) -> None:
    """The pieces that go through pinned memory to a GPU, here into host memory."""
    source = SafetensorsSource(checkpoint)
    assert isinstance(source, PieceReader)
    upload = PinnedUpload(source, torch.device("cpu"), piece_bytes=piece_bytes)
    for name, spec in source.specs().items():
        target = torch.full(spec.shape, float("nan"), dtype=dtype)
        upload.fill(name, target)
        assert torch.equal(target, source.read(name).to(dtype)), name


def test_host_memory_beside_a_gpu_is_on_the_host_whatever_torchs_default_device(checkpoint: Path) -> None:
    source, cpu = SafetensorsSource(checkpoint), torch.device("cpu")
    name, spec = next(iter(source.specs().items()))
    target = torch.empty(spec.shape)
    with torch.device("meta"):  # as `torch.set_default_device("cuda")`, which no pinned tensor can be made under
        PinnedUpload(source, cpu, piece_bytes=64).fill(name, target)
        staging, inputs = Staging(cpu), HostStaging(8, cpu)
        uploaded = staging.upload({"ids": np.arange(4, dtype=np.int32)})
    assert torch.equal(target, source.read(name).float())
    assert uploaded["ids"].tolist() == [0, 1, 2, 3]
    inputs.words[:] = 7
    words = torch.zeros(8, dtype=torch.int32)
    inputs.send(words, 0, 8)
    assert words.tolist() == [7] * 8


def test_a_file_that_shrank_is_named(checkpoint: Path) -> None:
    source = SafetensorsSource(checkpoint)
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    upload = PinnedUpload(source, torch.device("cpu"), piece_bytes=64)

    def fill_all() -> Iterator[None]:
        for name, spec in source.specs().items():
            yield upload.fill(name, torch.empty(spec.shape))

    with pytest.raises(WeightFileError, match="is truncated"):
        list(fill_all())


def test_sources_that_cannot_be_read_in_pieces_are_read_whole(checkpoint: Path) -> None:
    model = load_model(checkpoint, dtype="bfloat16")
    again = load_weights(model.config, SafetensorsSource(checkpoint), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert torch.equal(again.layers[1].gate_up, model.weights.layers[1].gate_up)


def test_device_errors_become_step_device_errors() -> None:
    with pytest.raises(StepDeviceError, match="waiting failed: illegal address"), device_cuda.device_errors("waiting"):
        raise RuntimeError("illegal address")
    with pytest.raises(ValueError, match="not a device's"), device_cuda.device_errors("waiting"):
        raise ValueError("not a device's")


# ---- the placement itself, with the host in the place of the GPU ----------------------------------------


class HostDevice(CpuDevice):
    """What a placement asks of a `CudaDevice`."""

    name = "host"
    is_integrated = False

    def __init__(self, device: object = None) -> None:
        super().__init__()

    def free_memory_bytes(self) -> int:
        return 2 * GIB


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> CudaPlacement:
    monkeypatch.setattr(placement_cuda, "CudaDevice", HostDevice)
    monkeypatch.setattr(placement_cuda, "cuda_ops", lambda **options: reference_ops())
    options = PlacementOptions(dtype="float32", kv_budget=1024, page_size=16, max_batch_size=3)
    return CudaPlacement(torch.device("cpu"), options)


@pytest.mark.parametrize("verify_tokens", [1, 4])
@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_qwen_hybrid])
def test_what_a_budget_counts_is_what_the_executor_holds(
    on_host: CudaPlacement, write: Any, verify_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaExecutor, "warm_up", lambda self: 0)  # thousands of padding tokens, token by token
    model = load_model(write(tmp_path), dtype="float32")
    draft = DraftSizes(verify_tokens=verify_tokens)
    budget = on_host.size_pool(model, 256, draft)
    deployment = DeploymentConfig(
        max_batch_size=3, max_input_length=256, max_kv_capacity=256, page_size=16, num_pages=budget.num_pages
    )
    executor = on_host.build_executor(model, budget, deployment, draft)
    assert executor.kv_cache.num_bytes == budget.total_bytes
    recurrent, snapshots = executor._recurrent, executor.resources().snapshot_storage
    if not model.config.recurrent_pieces:
        assert recurrent is snapshots is None
        assert budget.state_bytes == budget.snapshot_bytes == 0
        return
    assert recurrent is not None
    assert recurrent.num_bytes == budget.state_bytes
    assert snapshots.num_recurrent_slots == snapshots.num_partial_slots == budget.snapshot_slots >= 6
    held = snapshots.bytes_per_recurrent_slot + snapshots.bytes_per_partial_slot
    assert held * budget.snapshot_slots == budget.snapshot_bytes
    assert ("state while verifying" in budget.describe()) == (verify_tokens > 1)
    assert recurrent.keeps_checkpoints == (verify_tokens > 1)


# ---- a whole LLM on it ----------------------------------------------------------------------------------


@pytest.fixture
def llm(on_host: CudaPlacement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(CudaExecutor, "warm_up", lambda self: 0)
    monkeypatch.setattr(placement, "place", lambda device, options: CudaPlacement(torch.device("cpu"), options))
    folder = write_tiny_llama(tmp_path)
    with LLM(folder, dtype="float32", kv_budget=512, page_size=16, max_model_len=64, max_batch_size=2) as model:
        yield model


def test_a_closed_llm_gives_the_gpus_memory_back_once_nothing_holds_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = llm._runtime
    assert runtime is not None
    executor, pages = weakref.ref(runtime.executor), weakref.ref(runtime.executor.kv_cache.storage)
    del runtime
    found: list[tuple[object, object]] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append((executor(), pages())))
    llm.generate("hello", SamplingParams(max_tokens=3))
    assert found == []
    gc.collect()
    gc.disable()  # memory that waits for the collector would not be given back
    try:
        llm.close()
        llm.close()
    finally:
        gc.enable()
    assert found == [(None, None)]


def test_a_device_that_failed_for_good_does_not_keep_an_llm_from_closing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    llm.close()
    assert "the GPU's memory was not given back: CUDA error" in caplog.text


def test_a_closed_llm_on_the_cpu_leaves_cuda_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("the CPU has no cache to empty"))
    LLM(write_tiny_llama(tmp_path), device="cpu", kv_budget=512, page_size=16).close()
