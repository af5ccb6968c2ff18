"""Compiled variants on disk, by a key that covers everything they were made from."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

from edgellm.kernels.cu.compiler import Cubin
from edgellm.kernels.cu.sources import Source
from edgellm.log import get_logger

logger = get_logger(__name__)

FORMAT = b"edgellm-cubin-1"


def cache_key(source: Source, expression: str, arch: str, options: tuple[str, ...], toolkit: str) -> str:
    """SHA-256 over the source, every header it reaches, the options, the variant, the architecture and the toolkit."""
    digest = hashlib.sha256()
    parts = [FORMAT.decode(), source.name, source.text, expression, arch, toolkit, *options]
    for name, text in source.headers:
        parts += [name, text]
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


class CubinCache:
    """One folder of cubins, shared by processes.  Any thread may use it.

    An entry is a line `format digest function`, then the code; the digest covers both, so a truncated or damaged
    entry is never used: it is compiled again.  A folder that cannot be written costs compile time only.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._complained = False

    def path(self, key: str) -> Path:
        return self._folder / f"{key}.cubin"

    def has(self, key: str) -> bool:
        return self.path(key).is_file()

    def load(self, key: str) -> Cubin | None:
        """The entry, or None when it is absent, unreadable or damaged."""
        try:
            head, separator, code = self.path(key).read_bytes().partition(b"\n")
        except OSError:
            return None
        fields = head.split(b" ")
        if not separator or len(fields) != 3 or fields[0] != FORMAT or fields[1] != _digest(fields[2], code):
            logger.warning("kernel cache entry %s is damaged; it is compiled again", self.path(key))
            return None
        return Cubin(code, fields[2].decode())

    def store(self, key: str, cubin: Cubin) -> bool:
        """Write an entry in one piece; False when the folder cannot be written (logged once)."""
        function = cubin.function.encode()
        data = b" ".join((FORMAT, _digest(function, cubin.code), function)) + b"\n" + cubin.code
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write(key, data)
        except OSError as error:
            self._complain(error)
            return False
        return True

    def _write(self, key: str, data: bytes) -> None:
        """Readers see the old entry or the new one: a complete file is renamed into place."""
        handle, temporary = tempfile.mkstemp(dir=self._folder, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, self.path(key))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            logger.warning(
                "compiled CUDA kernels cannot be kept in %s (%s): every start compiles them again; "
                "set EDGELLM_KERNEL_CACHE to a folder that can be written",
                self._folder,
                error,
            )


def _digest(function: bytes, code: bytes) -> bytes:
    return hashlib.sha256(function + b"\n" + code).hexdigest().encode()
