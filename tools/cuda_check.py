"""The CUDA half of the compile check: every variant of every kernel, for each target architecture.

For each kernel a unit is generated that includes its source, compares the parameter struct with the ctypes class field
by field and takes the address of each variant, which instantiates it.  nvcc compiles it (NVRTC where nvcc is missing),
and ptxas' report says what each variant uses.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from edgellm.errors import KernelCompileError  # noqa: E402
from edgellm.kernels.cu import compiler, spec  # noqa: E402
from edgellm.kernels.cu.sources import INCLUDE_FOLDER, read_source  # noqa: E402
from edgellm.kernels.cu.spec import KernelSpec, Variant  # noqa: E402

DEFAULT_ARCHITECTURES = (87, 90)
ALL_ARCHITECTURES = (80, 86, 87, 89, 90, 100, 110, 120, 121)
VARIANTS_A_UNIT = 8
TABLE = ROOT / "build" / "kernels.txt"
RESULTS = ROOT / "build" / "kernel_check"  # answers of earlier runs, by everything that they depend on
NVCC_FLAGS = ("-std=c++17", "-Xptxas", "-v", "-Werror", "all-warnings", "--keep", "-cubin")

# (kernel, template arguments) that may spill registers, each with its reason.
SPILLS_ALLOWED: dict[tuple[str, str], str] = {}

KIND_CHECKS = """
namespace edgellm_check {
template <class T> struct Kind { static constexpr char value = 'i'; };
template <> struct Kind<float> { static constexpr char value = 'f'; };
template <> struct Kind<double> { static constexpr char value = 'f'; };
template <class T> struct Kind<T*> { static constexpr char value = 'p'; };
template <class T, decltype(sizeof(0)) N> struct Kind<T[N]> { static constexpr char value = Kind<T>::value; };
}
"""
KINDS = {ctypes.c_void_p: "p", ctypes.c_float: "f", ctypes.c_double: "f"}


@dataclass(frozen=True, slots=True)
class Usage:
    """What one variant uses on one architecture; bytes a thread, except static shared memory (bytes a block)."""

    kernel: str
    arguments: str
    arch: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Job:
    """Some variants of one kernel for one architecture: one run of the compiler."""

    spec: KernelSpec
    variants: tuple[Variant, ...]
    arch: int

    @property
    def target(self) -> str:
        return f"sm_{self.arch}{self.spec.arch_suffix}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a job found; `error` is the compiler's output where it refused."""

    usages: tuple[Usage, ...] = ()
    error: str = ""


def jobs_of(specs: Sequence[KernelSpec], architectures: Sequence[int]) -> list[Job]:
    """Every (kernel, part of its variants, architecture) that the kernel is meant for."""
    return [
        Job(one, one.variants[start : start + VARIANTS_A_UNIT], arch)
        for one in specs
        for arch in architectures
        if one.supports(arch)
        for start in range(0, len(one.variants), VARIANTS_A_UNIT)
    ]


def field_checks(one: KernelSpec, *, offsets: bool) -> Iterator[str]:
    """Assertions that the C++ struct is the ctypes class; NVRTC has no `offsetof`, nvcc has."""
    struct, name = one.params, f"edgellm::{one.params_name}"
    for field, kind, *_ in struct._fields_:
        where = f"{one.params_name}::{field}"
        size = getattr(struct, field).size
        yield f'static_assert(sizeof({name}::{field}) == {size}, "{where} has {size} bytes in ctypes");'
        letter = _kind(kind)
        if letter:
            yield (
                f"static_assert(edgellm_check::Kind<decltype({name}::{field})>::value == '{letter}', "
                f'"{where} is {kind.__name__} in ctypes");'
            )
        if offsets:
            offset = getattr(struct, field).offset
            yield f'static_assert(offsetof({name}, {field}) == {offset}, "{where} is at byte {offset} in ctypes");'
    total = ctypes.sizeof(struct)
    yield f'static_assert(sizeof({name}) == {total}, "{one.params_name} has {total} bytes in ctypes");'


def _kind(kind: Any) -> str:
    """The letter of a field's kind: pointer, float or integer; empty for a nested struct."""
    while issubclass(kind, ctypes.Array):
        kind = kind._type_
    return "" if issubclass(kind, ctypes.Structure) else KINDS.get(kind, "i")


def unit_text(job: Job, *, offsets: bool) -> str:
    """The checks of the struct, and one pointer a variant, typed as a function of the one struct."""
    lines = ["#include <cstddef>"] if offsets else []
    lines += [KIND_CHECKS, *field_checks(job.spec, offsets=offsets)]
    for number, variant in enumerate(job.variants):
        expression = job.spec.expression(variant.key)
        lines.append(
            f'extern "C" __device__ void (*edgellm_variant_{number})(edgellm::{job.spec.params_name}) = &{expression};'
        )
    return "\n".join(lines) + "\n"


_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse_report(report: str) -> dict[str, dict[str, int]]:
    """ptxas' verbose report by mangled name: registers, spill, stack and static shared bytes.

    Functions that were not inlined count for the entry they are reported under.
    """
    found: dict[str, dict[str, int]] = {}
    current: dict[str, int] = {}
    for line in report.splitlines():
        if entry := _ENTRY.search(line):
            current = found.setdefault(entry[1], dict.fromkeys(("registers", "spill", "stack", "shared"), 0))
        elif spills := _SPILLS.search(line):
            current["stack"] = max(current.get("stack", 0), int(spills[1]))
            current["spill"] = current.get("spill", 0) + int(spills[2]) + int(spills[3])
        elif used := _USED.search(line):
            current["registers"] = max(current.get("registers", 0), int(used[1]))
            shared = _SHARED.search(line)
            current["shared"] = int(shared[1]) if shared else 0
    return found


def parse_names(ptx: str) -> dict[int, str]:
    """Mangled name of each variant, by its number in the unit."""
    return {int(number): name for number, name in re.findall(r"edgellm_variant_(\d+) = (\w+)", ptx)}


def usages_of(job: Job, report: str, names: dict[int, str]) -> tuple[Usage, ...]:
    """One line a variant.

    Raises:
        KeyError: ptxas reported nothing for a variant.
    """
    found = parse_report(report)
    rows = []
    for number, variant in enumerate(job.variants):
        used = found[names[number]]
        numbers = (used["registers"], used["spill"], used["stack"], used["shared"])
        rows.append(Usage(job.spec.name, variant.arguments, job.target, *numbers))
    return tuple(rows)


def nvcc_answer(job: Job) -> Answer:
    """Compile the job's unit with nvcc; warnings are errors."""
    with tempfile.TemporaryDirectory() as folder:
        unit = Path(folder) / "unit.cu"
        unit.write_text(f'#include "{job.spec.source_path}"\n{unit_text(job, offsets=True)}')
        command = ["nvcc", *NVCC_FLAGS, f"-arch={job.target}", f"-I{INCLUDE_FOLDER}", "--keep-dir", folder]
        done = subprocess.run(
            [*command, "-o", str(unit.with_suffix(".cubin")), str(unit)], capture_output=True, text=True, check=False
        )
        output = done.stdout + done.stderr
        if done.returncode:
            return Answer(error=_without_report(output))
        names = parse_names(unit.with_suffix(".ptx").read_text())
    return Answer(usages_of(job, output, names))


def _without_report(output: str) -> str:
    return "\n".join(line for line in output.splitlines() if "ptxas info" not in line and "bytes stack" not in line)


def nvrtc_answer(job: Job) -> Answer:
    """Compile each variant as the loader does; ptxas' report is in NVRTC's log.  Offsets are not compared."""
    source = read_source(job.spec.source_path)
    usages: list[Usage] = []
    for variant in job.variants:
        one = Job(job.spec, (variant,), job.arch)
        unit = replace(source, text=f"{source.text}\n{unit_text(one, offsets=False)}")
        try:
            cubin = compiler.compile_variant(
                unit,
                job.spec.expression(variant.key),
                job.target,
                kernel=job.spec.name,
                options=("--ptxas-options=-v",),
            )
        except KernelCompileError as error:
            return Answer(error=str(error))
        usages += usages_of(one, cubin.log, {0: cubin.function})
    return Answer(tuple(usages))


def remembered(job: Job, tool: str, identity: str) -> Answer:
    """The job's answer: of an earlier run where nothing it depends on has changed, else from the compiler."""
    source = read_source(job.spec.source_path)
    text = repr((identity, source, unit_text(job, offsets=True), job.target, NVCC_FLAGS))
    path = RESULTS / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    if path.is_file():
        return Answer(tuple(Usage(**row) for row in json.loads(path.read_text())))
    answer = nvcc_answer(job) if tool == "nvcc" else nvrtc_answer(job)
    if not answer.error:
        RESULTS.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps([asdict(usage) for usage in answer.usages]))
        temporary.replace(path)
    return answer


def choose_compiler() -> tuple[str, str]:
    """("nvcc" or "nvrtc", its version)."""
    if shutil.which("nvcc") is not None:
        return "nvcc", subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return "nvrtc", compiler.toolkit_digest()


def chosen_specs(only: Sequence[str]) -> list[KernelSpec]:
    """All specs, or those of the ops (or with the names) given."""
    if not only:
        return list(spec.registry())
    by_op = {one.name: one for op in only if op in spec.ops() for one in spec.specs_of(op)}
    wanted = [name for name in only if name not in spec.ops()]
    by_name = {one.name: one for one in spec.registry() if one.name in wanted} if wanted else {}
    unknown = sorted(set(wanted) - set(by_name))
    if unknown:
        raise SystemExit(f"kernel_check: no kernel or op is named {', '.join(unknown)}; ops: {', '.join(spec.ops())}")
    return list((by_op | by_name).values())


def table_line(use: Usage) -> str:
    return (
        f"{use.kernel:<28} {use.arch:<8} {use.registers:>4} {use.spill_bytes:>8} {use.stack_bytes:>8} "
        f"{use.shared_bytes:>8}  {use.arguments}"
    )


def write_table(usages: Sequence[Usage], *, partial: bool) -> None:
    """The table of this run; a partial run keeps the lines of the kernels and architectures that it left out."""
    head = f"{'kernel':<28} {'arch':<8} {'regs':>4} {'spill B':>8} {'stack B':>8} {'smem B':>8}  variant"
    lines = [table_line(use) for use in usages]
    if partial and TABLE.is_file():
        done = {(use.kernel, use.arch) for use in usages}
        lines += [line for line in TABLE.read_text().splitlines()[1:] if tuple(line.split()[:2]) not in done]
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text("\n".join([head, *sorted(lines)]) + "\n")


def summarize(usages: Sequence[Usage]) -> str:
    """One line about the variants of one kernel on one architecture: how many, and the worst of them."""
    worst = max(usages, key=lambda use: (use.spill_bytes, use.registers))
    return (
        f"  {worst.kernel:<28} {worst.arch:<8} {len(usages):>3} variants, worst: {worst.registers} registers, "
        f"{worst.spill_bytes} spilled bytes, {worst.shared_bytes} shared ({worst.arguments or 'no arguments'})"
    )


def spilled(usages: Sequence[Usage]) -> list[Usage]:
    return [use for use in usages if use.spill_bytes and (use.kernel, use.arguments) not in SPILLS_ALLOWED]


def compile_all(jobs: Sequence[Job]) -> Iterator[tuple[Job, list[Answer]]]:
    """The answers of all jobs of one kernel and architecture, as they come; the first job stands for them."""
    tool, identity = choose_compiler()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        answers = pool.map(lambda job: remembered(job, tool, identity), jobs)
        pairs = itertools.groupby(zip(jobs, answers, strict=True), key=lambda pair: (pair[0].spec.name, pair[0].arch))
        for _, group in pairs:
            members = list(group)
            yield members[0][0], [answer for _, answer in members]


def check(only: Sequence[str], architectures: Sequence[int]) -> int:
    """Run the check and print its result; returns how many units and variants are bad."""
    specs = chosen_specs(only)
    usages: list[Usage] = []
    bad = 0
    for job, answers in compile_all(jobs_of(specs, architectures)):
        found = [usage for answer in answers for usage in answer.usages]
        print(summarize(found) if found else f"  {job.spec.name:<28} {job.target:<8} nothing compiled", flush=True)
        for error in (answer.error for answer in answers if answer.error):
            print(f"kernel_check: {job.spec.name} for {job.target} does not compile:\n{error}")
            bad += 1
        for use in spilled(found):
            print(f"kernel_check: {use.kernel}<{use.arguments}> on {use.arch} spills {use.spill_bytes} bytes")
            bad += 1
        usages += found
    write_table(usages, partial=bool(only))
    note = "" if shutil.which("nvcc") else "; nvcc is not installed: by NVRTC, struct offsets not compared"
    print(f"kernel_check: {len(specs)} kernels, {len(usages)} variants compiled{note}; table in {TABLE}")
    return bad
