"""Every exception edgellm raises on purpose.

Two branches: `CallerError` (the caller can mend it; nothing was changed) and `BrokenInvariantError`
(state is unknown or wrong; stop using the object that raised it).  Messages name the value, the limit
and the remedy.  Ordinary shortage is never an exception: it is a result (`NO_CAPACITY`, `False`, `None`).
"""

from __future__ import annotations

INPUT_TOO_LONG_MARKER = "EDGELLM_INPUT_TOO_LONG"


class EdgeLLMError(Exception):
    """Base of every error that edgellm raises."""


class CallerError(EdgeLLMError):
    """The call was wrong; nothing was modified and the object stays usable."""


class InvalidArgumentError(CallerError, ValueError):
    """An argument is outside its documented range."""


class UnsupportedRequestError(CallerError, ValueError):
    """A kind of request that this deployment never serves."""


class UnsupportedModelError(CallerError, ValueError):
    """A checkpoint whose architecture, tensor type or configuration is not supported."""


class WeightFileError(CallerError, ValueError):
    """A checkpoint file is missing, truncated, damaged or has the wrong digest."""


class FetchError(CallerError, RuntimeError):
    """The default model could not be fetched; the message says what to check."""


class AdmissionError(CallerError, RuntimeError):
    """One request could not be admitted (validation, templating, tokenising); the session goes on."""


class InputTooLongError(AdmissionError):
    """The prompt exceeds the KV capacity or the input length; the message carries the marker."""

    def __init__(self, message: str) -> None:
        super().__init__(message if INPUT_TOO_LONG_MARKER in message else f"{INPUT_TOO_LONG_MARKER}: {message}")


class SubmitError(CallerError, RuntimeError):
    """The engine refuses work right now (queue full, shutting down); a later retry may succeed."""


class ContractViolation(CallerError, RuntimeError):
    """The caller broke the protocol (plan, call order, wrong thread); the session is untouched."""


class RequestCancelled(CallerError, RuntimeError):
    """The request ended because somebody cancelled it."""


class RequestTimedOut(RequestCancelled):
    """The request ended because its `timeout_seconds` were over; the message says how far it got."""


class RequestFailed(CallerError, RuntimeError):
    """The request ended with an error; the message says why.  Other requests are unaffected."""


class PluginError(CallerError, RuntimeError):
    """A plugin could not be loaded, or no installed plugin serves what a deployment needs."""


class KernelError(CallerError, RuntimeError):
    """A CUDA kernel cannot be had: no driver, no such variant, an architecture that it does not compile for."""


class KernelCompileError(KernelError):
    """A CUDA kernel does not compile; the message ends with the compiler's log."""


class BrokenInvariantError(EdgeLLMError, RuntimeError):
    """Internal state is wrong or unknown.  Stop using the object that raised this."""


# What code that is not ours (plugins, callbacks) may raise without taking others with it.  An interrupt of the
# process is nobody's failure and passes.
FOREIGN_ERRORS = (Exception, SystemExit)


class InvariantError(BrokenInvariantError):
    """A data structure of the cache contradicts itself."""


class SessionLostError(BrokenInvariantError):
    """Admission failed inside the reservation: the session's state is unknown, do not drive it further.

    Not an `AdmissionError` on purpose, so that a caller that catches refusals cannot swallow it.
    """


class StepDeviceError(BrokenInvariantError):
    """A device failure inside a step; same meaning as `StepResult.ok == False`."""


class CompactRefusedError(EdgeLLMError, RuntimeError):
    """An operator declined a compact step while the device stayed healthy; names operator and shape."""
