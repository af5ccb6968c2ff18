"""Use the installed packages: list the plugins; generate text with a tiny model, by API and command line.

Run by wheel_check.py inside the clean environment, with the source tree's path as its argument.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_model import write_tiny_llama

PROMPT = "The light is lit at sunset and put out at sunrise."


def check_plugins(source_tree: Path) -> None:
    """Every plugin of the source tree is installed, found by its entry point, loaded, and not from the tree."""
    from edgellm.plugins import PluginStatus, load_plugins

    folders = [project.parent.name for project in sorted(source_tree.glob("plugins/*/pyproject.toml"))]
    plugins = load_plugins(strict=True)
    loaded = [report.distribution for report in plugins.reports if report.status is PluginStatus.LOADED]
    if sorted(loaded) != folders:
        raise SystemExit(f"smoke: plugins loaded: {loaded}, expected {folders}")
    for registration in plugins.policies:
        module = Path(sys.modules[registration.factory.__module__].__file__ or "").resolve()
        if source_tree / "plugins" in module.parents:
            raise SystemExit(f"smoke: {registration.name} was imported from the source tree ({module})")


def check_kernels() -> int:
    """Every CUDA kernel is declared, and its source and headers are there to be compiled; returns how many."""
    from edgellm.kernels.cu.sources import read_source
    from edgellm.kernels.cu.spec import registry

    kernels = registry()
    for kernel in kernels:
        read_source(kernel.source_path)
    return len(kernels)


def main() -> None:
    source_tree = Path(sys.argv[1]).resolve()
    check_plugins(source_tree)
    num_kernels = check_kernels()
    import edgellm
    from edgellm import LLM, SamplingParams

    package = Path(edgellm.__file__).resolve()
    if source_tree / "edgellm" in package.parents:
        raise SystemExit(f"smoke: edgellm was imported from the source tree ({package}), not from the wheel")
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny_llama(Path(name))
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        with LLM(folder, kv_budget=2048, page_size=16) as llm:
            first, second = (llm.generate(PROMPT, params)[0] for _ in range(2))
            streamed = "".join(llm.stream(PROMPT, params))
        if len(first.token_ids) != 12 or first.token_ids != second.token_ids or streamed != first.text:
            raise SystemExit(f"smoke: answers differ: {first.token_ids} {second.token_ids} {streamed!r}")
        # Of 50 known prompt tokens one is computed again.
        if (first.reuse.reused_tokens, second.reuse.reused_tokens) != (0, 49):
            raise SystemExit(f"smoke: reuse is {first.reuse} and {second.reuse}, expected 0 and 49 tokens")
        cli = [str(Path(sys.executable).parent / "edgellm"), "generate", "--model", name, "--kv-budget", "2048",
               "--max-tokens", "5", "Hello"]  # fmt: skip
        subprocess.run(cli, check=True)
    print(
        f"smoke: plugins listed; {num_kernels} CUDA kernels with their sources; text from the installed wheel, "
        "49 of 50 prompt tokens reused"
    )


if __name__ == "__main__":
    main()
