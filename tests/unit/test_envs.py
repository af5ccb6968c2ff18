"""Environment variables: what each value means, and the refusal of values that mean nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgellm import envs
from edgellm.errors import InvalidArgumentError
from edgellm.plugins import load_plugins

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in envs.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


@pytest.mark.parametrize(("value", "meaning"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_strict_values(monkeypatch: pytest.MonkeyPatch, value: str | None, meaning: bool) -> None:
    if value is not None:
        monkeypatch.setenv("EDGELLM_PLUGINS_STRICT", value)
    assert envs.plugins_strict() is meaning


@pytest.mark.parametrize(("value", "meaning"), [("", None), ("0", 0), ("2", 2)])
def test_cpu_isa_values(monkeypatch: pytest.MonkeyPatch, value: str, meaning: int | None) -> None:
    monkeypatch.setenv("EDGELLM_CPU_ISA", value)
    assert envs.cpu_isa_limit() == meaning


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("EDGELLM_PLUGINS_STRICT", "yes", "set it to 0 (skip a plugin that fails) or 1 (raise), or unset it"),
        ("EDGELLM_PLUGINS_STRICT", "true", "set it to 0 (skip a plugin that fails) or 1 (raise), or unset it"),
        ("EDGELLM_CPU_ISA", "avx2", "set it to 0 (portable), 1 (AVX2) or 2 (AVX-512), or unset it"),
        ("EDGELLM_CPU_ISA", "-1", "set it to 0 (portable), 1 (AVX2) or 2 (AVX-512), or unset it"),
        ("EDGELLM_CPU_ISA", "22", "set it to 0 (portable), 1 (AVX2) or 2 (AVX-512), or unset it"),
    ],
)
def test_other_values_are_refused_at_start_up(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgumentError) as caught:
        load_plugins(autoload=False)
    assert str(caught.value) == f"{name} is {value!r}; {allowed}"


def test_a_home_that_names_no_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLM_HOME", "~no-such-user-here/models")
    with pytest.raises(InvalidArgumentError, match=r"EDGELLM_HOME is '~no-such-user-here/models'; use the path"):
        envs.home()


def test_the_build_refuses_other_debug_values() -> None:
    if not (ROOT / "setup.py").is_file():
        pytest.skip("setup.py is not beside an installed package")
    pytest.importorskip("Cython")
    run = subprocess.run(
        [sys.executable, "setup.py", "--name"],
        cwd=ROOT,
        env={**os.environ, "EDGELLM_DEBUG": "yes"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode != 0
    assert "EDGELLM_DEBUG is 'yes'; set it to 0 (release) or 1 (checks and line trace), or unset it" in run.stderr


def test_compiled_kernels_lie_in_the_home_unless_a_folder_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    assert envs.kernel_cache() == tmp_path / "kernels"
    monkeypatch.setenv("EDGELLM_KERNEL_CACHE", str(tmp_path / "elsewhere"))
    assert envs.kernel_cache() == tmp_path / "elsewhere"


def test_a_kernel_cache_that_names_no_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLM_KERNEL_CACHE", "~no-such-user-here/kernels")
    with pytest.raises(InvalidArgumentError, match=r"EDGELLM_KERNEL_CACHE is '~no-such-user-here/kernels'; use the"):
        envs.kernel_cache()
