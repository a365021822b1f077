"""The runtime's exceptions.

RuntimeFault
├── Refusal        the runtime will not start with this: one line with the fix, an exit code of its own
├── BadRequest     the client's fault: a 4xx that names the field
├── Unavailable    not now: loading, draining or a full queue; the client may try again
└── EngineDead     the engine's process is gone; every request gets a 503, and the server ends
"""

from __future__ import annotations

# Reason (also the condition reason the operator shows) -> exit code; tests/contract/termination.json
EXIT_CODES = {
    "InvalidArgument": 64,
    "UnsupportedParallelism": 64,
    "UnsupportedModel": 65,
    "ModelNotFound": 66,
    "PortInUse": 69,
    "OutOfMemory": 70,
    "DoesNotFit": 71,
    "OutOfSpace": 73,
    "TokenizerMismatch": 76,
    "Unauthorized": 77,
    "DraftUnavailable": 78,
}


class RuntimeFault(Exception):
    """Base of all of them."""


class Refusal(RuntimeFault):
    """`reason` is a key of EXIT_CODES; `message` names both sides and the fix, on one line."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.reason]


class BadRequest(RuntimeFault):
    """`param` is the field's name as the client wrote it, `code` one of OpenAI's words."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class Unavailable(RuntimeFault):
    def __init__(self, message: str, code: str, status: int = 503, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.retry_after = retry_after  # seconds


class EngineDead(RuntimeFault):
    """`reason` is a key of EXIT_CODES where there is more to say than that it crashed, else empty."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(f"{reason}: {message}" if reason else message)
        self.message = message
        self.reason = reason

    @property
    def exit_code(self) -> int:
        return EXIT_CODES.get(self.reason, 1)


def in_a_line(error: Exception) -> str:
    """Another library's: its kind and its words."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
