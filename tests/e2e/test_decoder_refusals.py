"""A decoder that does not go with a model is refused from configs alone: no weight was read, and the error says why."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from decoder_plugins import PLUGINS, use_decoder_plugins
from tiny_drafts import write_eagle_head, write_gemma4_assistant
from tiny_model import write_byte_tokenizer, write_tiny_llama, write_tiny_qwen_hybrid
from typer.testing import CliRunner

from edgellm import LLM, SpeculativeOptions, cli
from edgellm.decoding.options import DecoderChoice
from edgellm.errors import EdgeLLMError, InvalidArgumentError, PluginError, UnsupportedModelError, WeightFileError
from edgellm.plugins import DecoderRegistrar, load_plugins


def write_tiny_mamba2(folder: Path) -> Path:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {"num_heads": 4, "head_dim": 16, "hidden_size": 32, "state_size": 8, "n_groups": 1, "num_hidden_layers": 2}
    config = Mamba2Config(vocab_size=write_byte_tokenizer(folder), eos_token_id=0, bos_token_id=0, **sizes)
    Mamba2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models and drafts by name."""
    root = tmp_path_factory.mktemp("refused")
    llama = write_tiny_llama(root / "llama", num_hidden_layers=6)
    return {
        "llama": llama,
        "shallow": write_tiny_llama(root / "shallow", num_hidden_layers=4),
        "mamba2": write_tiny_mamba2(root / "mamba2"),
        "hybrid": write_tiny_qwen_hybrid(root / "hybrid"),
        "headless": write_tiny_qwen_hybrid(root / "headless", mtp=False),
        "head": write_eagle_head(root / "head", llama),
        "gemma assistant": write_gemma4_assistant(root / "assistant"),
        "empty": empty_head(root / "empty", llama),
    }


def empty_head(folder: Path, model: Path) -> Path:
    """A config without weights."""
    (write_eagle_head(folder, model) / "model.safetensors").unlink()
    return folder


@pytest.fixture(autouse=True)
def plugins_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    use_decoder_plugins(monkeypatch)


def refused(model: Path, options: SpeculativeOptions | None) -> EdgeLLMError:
    """The error of opening a model, of which no weight was read before."""
    read: list[Any] = []
    with pytest.raises(EdgeLLMError) as caught:
        LLM(model, device="cpu", speculative=options, on_load=lambda *progress: read.append(progress))
    assert read == []
    return caught.value


CASES: dict[str, tuple[str, dict[str, Any], type[EdgeLLMError], str]] = {
    "mtp on attention": (
        "llama", {"decoder": "mtp"}, UnsupportedModelError,
        "decoder 'mtp' on an attention-only model is not supported; use vanilla, eagle, shared_kv_mtp or prompt_lookup",
    ),
    "eagle on a hybrid": (
        "hybrid", {"decoder": "eagle"}, UnsupportedModelError,
        "decoder 'eagle' on a hybrid model is not supported; use vanilla, mtp or prompt_lookup",
    ),
    "lookup on recurrent layers": (
        "mamba2", {"decoder": "prompt_lookup"}, UnsupportedModelError,
        "decoder 'prompt_lookup' on a pure recurrent model is not supported; use vanilla",
    ),
    "no mtp head": ("headless", {"decoder": "mtp"}, UnsupportedModelError, "no multi-token prediction head (mtp.*)"),
    "a draft for mtp": ("hybrid", {"decoder": "mtp", "draft": "head"}, InvalidArgumentError, "the model's own head"),
    "a draft for lookup": (
        "llama", {"decoder": "prompt_lookup", "draft": "head"}, InvalidArgumentError, "prompt lookup needs none",
    ),
    "no draft": (
        "llama", {"decoder": "eagle"}, InvalidArgumentError,
        "pass its folder, as draft= of SpeculativeOptions or --draft of the command line; this model is llama, 6",
    ),
    "no assistant": ("llama", {"decoder": "shared_kv_mtp"}, InvalidArgumentError, "needs an assistant that was"),
    "too shallow for eagle": ("shallow", {"decoder": "eagle", "draft": "head"}, UnsupportedModelError, "at least 5"),
    "an assistant for eagle": (
        "llama", {"decoder": "eagle", "draft": "gemma assistant"}, UnsupportedModelError,
        "is no EAGLE-3 head: it stores no tensor midlayer.hidden_norm.weight, and its config.json names "
        "Gemma4AssistantForCausalLM; train or download a head for this model",
    ),
    "a model for eagle": (
        "llama", {"decoder": "eagle", "draft": "llama"}, UnsupportedModelError,
        "is no EAGLE-3 head: it stores no tensor midlayer.hidden_norm.weight, and its config.json names "
        "LlamaForCausalLM; train",
    ),
    "a head without weights": (
        "llama", {"decoder": "eagle", "draft": "empty"}, WeightFileError, "holds no model.safetensors",
    ),
    "a head as an assistant": (
        "llama", {"decoder": "shared_kv_mtp", "draft": "head"}, UnsupportedModelError,
        "LlamaForCausalLMEagle3 is no shared-KV assistant; supported: ",
    ),
    "an assistant of another family": (
        "llama", {"decoder": "shared_kv_mtp", "draft": "gemma assistant"}, UnsupportedModelError,
        "reads the pages of a gemma4_text model; the model is llama",
    ),
    "trees from lookup": (
        "llama", {"decoder": "prompt_lookup", "top_k": 3}, InvalidArgumentError,
        "top_k is 3, and decoder 'prompt_lookup' proposes chains; pass top_k=1",
    ),
    "trees from mtp": ("hybrid", {"decoder": "mtp", "top_k": 3}, InvalidArgumentError, "'mtp' proposes chains"),
    "nobody's decoder": ("llama", {"decoder": "crystal_ball"}, PluginError, "of kind 'crystal_ball'"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refused_before_weights_are_read(case: str, folders: dict[str, Path]) -> None:
    model, options, error, words = CASES[case]
    if "draft" in options:
        options = {**options, "draft": folders[options["draft"]]}
    caught = refused(folders[model], SpeculativeOptions(**options))
    assert isinstance(caught, error)
    assert words in str(caught)
    if error in (UnsupportedModelError, WeightFileError):  # the model's path, or the draft's
        assert str(folders["llama"].parent) in str(caught)


@pytest.mark.parametrize(("model", "decoder"), [("mamba2", None), ("hybrid", None), ("llama", "prompt_lookup")])
def test_a_policy_that_is_missing_is_missed_before_weights_are_read(
    model: str, decoder: str | None, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup = [pair for pair in PLUGINS if pair[0] == "lookup"]
    loaded = load_plugins(extra=lookup, autoload=False, strict=True)
    monkeypatch.setattr("edgellm.plugins.load_plugins", lambda: loaded)
    caught = refused(folders[model], None if decoder is None else SpeculativeOptions(decoder=decoder))
    assert isinstance(caught, PluginError)
    assert "no installed publication policy serves" in str(caught)


def test_a_decoder_whose_check_is_broken_is_its_plugins_fault(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fits(choice: DecoderChoice) -> None:
        raise KeyError(choice.config.num_layers)

    loaded = load_plugins(extra=PLUGINS, autoload=False, strict=True)
    loaded.decoders[:] = [
        dataclasses.replace(each, fits=fits) if each.kind == "prompt_lookup" else each for each in loaded.decoders
    ]
    monkeypatch.setattr("edgellm.plugins.load_plugins", lambda: loaded)
    caught = refused(folders["llama"], SpeculativeOptions(decoder="prompt_lookup"))
    assert isinstance(caught, PluginError)
    assert "plugin 'lookup' (local 0): `fits` of decoder 'prompt-lookup' raised KeyError" in str(caught)


def test_what_is_asked_must_be_callable() -> None:
    with pytest.raises(InvalidArgumentError, match="decoder 'mine' has fits 3; it must be callable"):
        DecoderRegistrar("p")("mine", lambda: None, "kind", fits=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "nodes"),
    [({"top_k": 4, "depth": 1}, 4), ({"top_k": 2, "depth": 3}, 10), ({"top_k": 2}, 18)],
)
def test_trees_that_can_never_be_so_large_are_noticed(
    folders: dict[str, Path], sizes: dict[str, Any], nodes: int, caplog: pytest.LogCaptureFixture
) -> None:
    for num_drafts in (nodes, nodes + 1, 127):
        options = SpeculativeOptions(decoder="eagle", draft=folders["head"], num_drafts=num_drafts, **sizes)
        with LLM(folders["llama"], device="cpu", kv_budget=1024, speculative=options):
            pass
    depth = sizes.get("depth", 5)
    assert caplog.messages == [
        f"num_drafts is {num_drafts}, and a tree with top_k {sizes['top_k']} and depth {depth} has {nodes} nodes: pass "
        f"at most {nodes}, or more of the others"
        for num_drafts in (nodes + 1, 127)
    ]


def test_the_command_line_answers_in_its_own_words(folders: dict[str, Path]) -> None:
    arguments = ["generate", "hello", "-m", str(folders["llama"]), "--device", "cpu", "--speculative"]
    for options, words in (
        (["eagle"], "--draft of the command line"),
        (["prompt_lookup", "--draft-top-k", "3"], "--draft-top-k is 3, and decoder 'prompt_lookup' proposes chains"),
    ):
        result = CliRunner().invoke(cli.app, [*arguments, *options])
        assert isinstance(result.exception, InvalidArgumentError)
        assert words in str(result.exception)
