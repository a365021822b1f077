"""The operator's exceptions.

OutriderError
├── Refused          the user's fault: becomes a condition whose message says what to change; not retried by itself
│   └── NameConflict a child's name is owned by somebody else
├── NotFound         the object, its namespace or its kind is not there (404), or the namespace is ending
├── Conflict         the object moved under us (409); read again and retry
├── Unavailable      the API server or a pod did not answer, or said to come later; retried with backoff
└── Rejected         the API server refused what we sent (422, 403, or a 500 on apply); surfaced, retried slowly
"""

from __future__ import annotations

from outrider_operator.api.reasons import Reason


class OutriderError(Exception):
    """Base of all of them."""


class Refused(OutriderError):
    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class NameConflict(Refused):
    def __init__(self, message: str) -> None:
        super().__init__(Reason.NAME_CONFLICT, message)


class NotFound(OutriderError):
    pass


class Conflict(OutriderError):
    pass


class Unavailable(OutriderError):
    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds, from the server's Retry-After


class Rejected(OutriderError):
    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
