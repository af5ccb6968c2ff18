from collections.abc import Sequence
from typing import Any, TypeVar, final

from edgellm.sampling.logprobs import TokenLogprobs
from edgellm.sampling.state import SamplingState
from edgellm.session._finish import FinishRule
from edgellm.session.text import TextPipeline
from edgellm.session.types import FinishReason, ResidentRef, SequenceIdentity
from edgellm.streaming import StreamChannel

_Lengths = TypeVar("_Lengths", bound=LengthRow)
_Row = TypeVar("_Row", bound=ResidentRow)

@final
class CancelToken:
    def cancel(self) -> None: ...
    @property
    def cancelled(self) -> bool: ...

class LengthRow:
    committed: int
    prompt_remaining: int
    exclusive: bool
    @property
    def identity(self) -> SequenceIdentity: ...
    @property
    def ref(self) -> ResidentRef: ...
    @property
    def request_id(self) -> int: ...
    def __init__(
        self, identity: SequenceIdentity, *, committed: int = 0, prompt_remaining: int = 0, exclusive: bool = False
    ) -> None: ...

class ResidentRow(LengthRow):
    generated: list[int]
    state_length: int
    iterations: int
    reported: int
    index: int
    terminal: bool
    reason: FinishReason
    channel: StreamChannel | None
    text: TextPipeline | None
    logprobs: list[TokenLogprobs] | None
    sampling: SamplingState | None
    @property
    def rule(self) -> FinishRule: ...
    @property
    def cancel_token(self) -> Any: ...
    @property
    def cancel_requested(self) -> bool: ...
    def __init__(
        self,
        identity: SequenceIdentity,
        *,
        rule: FinishRule,
        cancel_token: Any = None,
        prompt_remaining: int = 0,
        exclusive: bool = False,
    ) -> None: ...

def with_prompt_left(rows: list[_Lengths]) -> list[_Lengths]: ...
def poll_cancelled(rows: Sequence[ResidentRow]) -> int: ...
def still_running(rows: Sequence[ResidentRow]) -> list[int] | None: ...
def with_readers(rows: list[_Row]) -> list[_Row]: ...
def renumber(order: Sequence[ResidentRow]) -> None: ...
def split_ended(order: list[_Row]) -> tuple[list[_Row], list[_Row], list[int]]: ...
