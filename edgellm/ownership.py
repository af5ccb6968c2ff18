"""What belongs to one owner or one process: `Uncopyable`, and the refusal of a fork."""

from __future__ import annotations

import os
from typing import NoReturn

from edgellm.errors import ContractViolation


class Uncopyable:
    """Refuses `copy.copy` and `copy.deepcopy`: a copy would share one stream, one request or one thread unseen."""

    __slots__ = ()

    def __copy__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} has one owner and cannot be copied; share the object itself")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()


def require_home_process(process_id: int, remedy: str) -> None:
    """Refuse what would wait for an engine's thread in a fork of its process: the thread does not exist there.

    Args:
        process_id: where the engine runs.
        remedy: what to do instead, for the message.
    Raises:
        ContractViolation: this is another process.
    """
    if os.getpid() != process_id:
        raise ContractViolation(
            f"the engine runs in process {process_id} and this is its fork {os.getpid()}, where its thread does not "
            f"exist; {remedy}"
        )
