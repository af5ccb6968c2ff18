"""Tokens a second of whole runs, plain and with trained drafts, by turns in one process; and with useless drafts.

So many requests are in flight at a time, each from a thread of its own, as a server's would be.  The lengths of the
answers are those of plain decoding to its end token.  Every engine answers all prompts once before anything is timed,
so graphs are captured and prompts cached.  In each round the engines take turns, each time another one first; a ratio
is the median of its rounds', "best" that of the fastest runs.  A second plain engine goes along: its ratios say what
the machine's moods make of 1.  t/round is a token of the target and what was accepted, in a round of the draft.

    export PYTHONPATH=.:$(echo plugins/*/src | tr ' ' ':')
    python bench/gpu/bench_speculation.py [--students eagle assistant hybrid] [--batches 1 4 8]
    python bench/gpu/bench_speculation.py --device cpu --dtype float32 --untrained --prompts 2 --new-tokens 12

Drafts are the folders `<work>/<student>/export` that `python -m training train` writes, the target is built from
`<work>/target.bin` or its parts.  With `--text FILE` prompts are that file's paragraphs, asked as a user's messages.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

import edgellm.plugins
import edgellm_eagle.plugin
import edgellm_hybrid.plugin
import edgellm_shared_kv.plugin
from edgellm import LLM, SamplingParams, SpeculativeOptions
from edgellm.outputs import RequestOutput
from training import courses, parts
from training.assistant import Assistant
from training.eagle import DRAFT_VOCAB, EagleHead
from training.hybrid import Hybrid, HybridShape
from training.llama import Llama
from training.retokenise import retokenise
from training.target_checkpoint import write_checkpoint
from training.target_file import read_target
from training.token_file import TokenFile, read_tokens

WORK = Path(__file__).parents[2] / "training" / "data"
DECODERS = {"eagle": "eagle", "assistant": "shared_kv_mtp", "hybrid": "mtp"}
LONGEST_PROMPT = 300
FLOOR = 0.97  # of plain decoding, whatever the drafts are worth
PLAIN, AGAIN = "plain", "plain, again"
TABLE = "{:18} {:>2} {:>9} {:>9} {:>6} {:>6} {:>7} {:>8} {:>8} {:>6} {:>7} {:>7}"
HEADINGS = (
    "draft", "N", "plain t/s", "draft t/s", "ratio", "best", "t/round", "proposed", "accepted", "share",
    "=texts", "=tokens",
)  # fmt: skip


@dataclass(slots=True)
class Family:
    """A model, its prompts as token ids, and the ways to decode it."""

    name: str
    model: Path
    prompts: list[list[int]]
    ways: dict[str, SpeculativeOptions]


@dataclass(slots=True)
class Runs:
    """What one engine did: seconds of each timed run, and its latest answers."""

    seconds: list[float] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)


# ---- what runs ------------------------------------------------------------------------------------------


def use_plugins_of_this_tree() -> None:
    """Nothing needs to be installed."""
    extra = [
        ("eagle", edgellm_eagle.plugin),
        ("hybrid", edgellm_hybrid.plugin),
        ("shared-kv", edgellm_shared_kv.plugin),
    ]
    edgellm.plugins.load_plugins = partial(edgellm.plugins.load_plugins, extra=extra, autoload=False, strict=True)


def families(options: argparse.Namespace, scratch: Path) -> Iterator[Family]:
    """The target with the drafts made for it, then the hybrid with its own."""
    held_out = read_tokens(options.work / "corpus" / "prompts-heldout.tok")
    for_target = [name for name in options.students if name != "hybrid"]
    if for_target:
        tokenizer = options.work / "corpus" / "target_tokenizer"
        model = write_checkpoint(target_file(options, scratch), tokenizer, scratch / "target", dtype_of(options))
        ways = {}
        for name in for_target:
            ways |= ways_of(name, draft_folder(name, options, scratch), options, scratch)
        yield Family("SmolLM2-135M", model, choose_prompts(held_out, model, options), ways)
    if "hybrid" in options.students:
        folder, corpus = draft_folder("hybrid", options, scratch), options.work / "corpus"
        file = retokenise(held_out, corpus / "target_tokenizer", corpus / "small_tokenizer")
        ways = ways_of("hybrid", folder, options, scratch)
        yield Family("hybrid", folder, choose_prompts(file, folder, options), ways)


def target_file(options: argparse.Namespace, scratch: Path) -> Path:
    path: Path = options.work / "target.bin"
    if not path.is_file():
        path = scratch / "target.bin"
        parts.join(options.work / "target", "target.bin", path)
    return path


def draft_folder(name: str, options: argparse.Namespace, scratch: Path) -> Path:
    exported: Path = options.work / name / "export"
    if not options.untrained:
        if not (exported / "config.json").is_file():
            raise SystemExit(f"{exported} holds no export; train {name}, leave it out of --students, or --untrained")
        return exported
    folder = scratch / name / "export"
    if name == "hybrid":
        tokenizer = options.work / "corpus" / "small_tokenizer"
        courses.save(Hybrid(HybridShape.of_tokenizer(tokenizer)), folder)
        for path in tokenizer.iterdir():
            shutil.copy(path, folder)
        return folder
    target = Llama(*read_target(target_file(options, scratch)), device="cpu", dtype=torch.float32)
    make = EagleHead if name == "eagle" else Assistant
    courses.save(make(target, torch.arange(DRAFT_VOCAB)), folder)
    return folder


def ways_of(name: str, folder: Path, options: argparse.Namespace, scratch: Path) -> dict[str, SpeculativeOptions]:
    """The draft, and the same with random weights; a hybrid's head comes with the model, see `worst_model`."""
    made = partial(
        SpeculativeOptions, decoder=DECODERS[name], num_drafts=options.num_drafts, adaptive=not options.fixed
    )
    if name == "hybrid":
        return {"mtp": made(), **({} if options.no_worst else {"mtp, random": made(adaptive=True)})}
    ways = {name: made(draft=folder)}
    if not options.no_worst:
        ways[f"{name}, random"] = made(draft=randomised(folder, scratch / f"{name}-random"), adaptive=True)
    return ways


def model_of(way: str, family: Family, scratch: Path) -> Path:
    """The hybrid's head is part of its checkpoint."""
    if way != "mtp, random":
        return family.model
    return randomised(family.model, scratch / "hybrid-random", only="mtp.")


def randomised(folder: Path, out: Path, only: str = "") -> Path:
    """A copy of a folder whose matrices are noise; vectors and integers stay.

    Args:
        only: begin of the names that change.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, out, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.startswith(only) and tensor.ndim > 1 and tensor.is_floating_point():
            noise = 0.02 * torch.randn(tensor.shape, generator=generator)
            tensors[name] = noise.to(tensor.dtype)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def choose_prompts(file: TokenFile, model: Path, options: argparse.Namespace) -> list[list[int]]:
    """As many as the largest batch asks for, evenly spaced, none too long."""
    if options.text:
        from edgellm.tokenization.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(model)
        texts = [part.strip() for part in options.text.read_text("utf-8").split("\n\n") if part.strip()]
        rows = [list(tokenizer.apply_chat_template([{"role": "user", "content": text}])) for text in texts]
    else:
        rows = [file[index].tolist() for index in range(len(file))]
    rows = [row for row in rows if 0 < len(row) <= LONGEST_PROMPT]
    wanted = min(num_prompts(max(options.batches), options), len(rows))
    return [rows[number * len(rows) // wanted] for number in range(wanted)]


def num_prompts(batch: int, options: argparse.Namespace) -> int:
    """Three waves of a batch, and at least what one request at a time gets."""
    return max(options.prompts, min(3, options.prompts) * batch)


def dtype_of(options: argparse.Namespace) -> torch.dtype:
    found: torch.dtype = getattr(torch, options.dtype)
    return found


# ---- how it runs ----------------------------------------------------------------------------------------


def open_llm(model: Path, way: SpeculativeOptions | None, options: argparse.Namespace) -> LLM:
    return LLM(
        model,
        device=options.device,
        dtype=options.dtype,
        kv_budget=options.kv_budget,
        max_batch_size=max(options.batches),
        max_model_len=LONGEST_PROMPT + options.new_tokens,
        speculative=way,
    )


def answers(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], batch: int) -> list[RequestOutput]:
    """Answers to all prompts, never more than `batch` in flight."""
    with ThreadPoolExecutor(batch) as pool:
        return list(pool.map(lambda prompt, each: llm.generate([prompt], each)[0], prompts, params))


def measure(
    llms: dict[str, LLM], prompts: list[list[int]], batch: int, seconds: float, options: argparse.Namespace
) -> dict[str, Runs]:
    """Rounds in which every engine answers all prompts; no further one begins after so many seconds."""
    deadline = time.monotonic() + seconds
    greedy = partial(SamplingParams, temperature=0.0)
    natural = answers(llms[PLAIN], prompts, [greedy(max_tokens=options.new_tokens)] * len(prompts), batch)
    params = [greedy(max_tokens=len(output.token_ids), ignore_eos=True) for output in natural]
    runs = {name: Runs() for name in llms}
    for name, llm in llms.items():
        runs[name].outputs = answers(llm, prompts, params, batch)
    names = list(llms)
    for number in range(options.rounds):
        if number and time.monotonic() > deadline:
            break
        first = number % len(names)
        for name in names[first:] + names[:first]:
            started = time.perf_counter()
            runs[name].outputs = answers(llms[name], prompts, params, batch)
            runs[name].seconds.append(time.perf_counter() - started)
    return runs


# ---- what is told ---------------------------------------------------------------------------------------


def row_of(name: str, batch: int, ours: Runs, plain: Runs) -> tuple[str, float]:
    """A line of the table, and how many times as fast as plain decoding."""
    tokens = sum(len(output.token_ids) for output in plain.outputs)
    rates = [tokens / statistics.median(runs.seconds) for runs in (plain, ours)]
    proposed = sum(output.proposed_draft_tokens for output in ours.outputs)
    accepted = sum(output.accepted_draft_tokens for output in ours.outputs)
    behind_first = tokens - len(ours.outputs)  # the first token of an answer comes with its prompt
    same = [one.token_ids == two.token_ids for one, two in zip(ours.outputs, plain.outputs, strict=True)]
    ratio = statistics.median(theirs / own for theirs, own in zip(plain.seconds, ours.seconds, strict=True))
    best = min(plain.seconds) / min(ours.seconds)
    cells = (
        name, batch, f"{rates[0]:.0f}", f"{rates[1]:.0f}", f"{ratio:.3f}", f"{best:.3f}",
        f"{behind_first / max(behind_first - accepted, 1):.3f}", proposed, accepted,
        f"{accepted / max(proposed, 1):.3f}", f"{sum(same) / len(same):.3f}", f"{equal_tokens(ours, plain):.4f}",
    )  # fmt: skip
    return TABLE.format(*cells), ratio


def equal_tokens(ours: Runs, plain: Runs) -> float:
    """Share of the tokens in front of the first difference of each text."""
    same = 0
    for one, two in zip(ours.outputs, plain.outputs, strict=True):
        pairs = zip(one.token_ids, two.token_ids, strict=True)
        same += next((place for place, (left, right) in enumerate(pairs) if left != right), len(one.token_ids))
    return same / sum(len(output.token_ids) for output in plain.outputs)


def report(family: Family, options: argparse.Namespace, scratch: Path) -> list[str]:
    """Print the family's table; returns what useless drafts cost too much."""
    slow, began = [], time.monotonic()
    with ExitStack() as opened:
        llms = {name: opened.enter_context(open_llm(family.model, None, options)) for name in (PLAIN, AGAIN)}
        for way, chosen in family.ways.items():
            llms[way] = opened.enter_context(open_llm(model_of(way, family, scratch), chosen, options))
        print(f"\n{family.name}: {len(llms)} engines loaded in {time.monotonic() - began:.1f} s")
        print(TABLE.format(*HEADINGS), flush=True)
        for batch in options.batches:
            prompts = family.prompts[: num_prompts(batch, options)]
            runs = measure(llms, prompts, batch, options.seconds, options)
            for way in (AGAIN, *family.ways):
                line, ratio = row_of(way, batch, runs[way], runs[PLAIN])
                print(line, flush=True)
                if way.endswith("random") and ratio < FLOOR:
                    slow.append(f"{way}, N={batch}: {ratio:.3f} of plain decoding, at least {FLOOR} is wanted")
    return slow


def main() -> None:
    options = parsed()
    use_plugins_of_this_tree()
    card = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    drafts = "fixed lengths" if options.fixed else "adaptive"
    print(f"{card}, torch {torch.__version__}, {options.dtype}, greedy, {drafts}; t/round: tokens a round", flush=True)
    began, slow = time.monotonic(), []
    with tempfile.TemporaryDirectory() as scratch:
        for family in families(options, Path(scratch)):
            slow += report(family, options, Path(scratch))
    print(f"\n{time.monotonic() - began:.0f} s in all")
    if slow:
        sys.exit("\n" + "\n".join(slow))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--students", nargs="+", choices=tuple(DECODERS), default=list(DECODERS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8], help="requests in flight")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--text", type=Path, help="prompts of a file instead of the held-out ones, by paragraphs")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of one request at a time")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--num-drafts", type=int, help="most drafts of a round; the decoder's own default otherwise")
    parser.add_argument("--fixed", action="store_true", help="always so many drafts, to see what the draft is worth")
    parser.add_argument("--no-worst", action="store_true", help="leave out the drafts of random weights")
    parser.add_argument("--untrained", action="store_true", help="fresh drafts, for a dry run before there are any")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=15, help="after so many of a batch no further round begins")
    parser.add_argument("--kv-budget", type=int, default=16_384, help="tokens of each engine's pool")
    return parser.parse_args()


if __name__ == "__main__":
    main()
