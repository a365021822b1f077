"""What can go wrong that a person can act on: each message says what is wrong and what to do."""

from __future__ import annotations


class ClusterError(Exception):
    """The base of all; `cluster` prints it as one line and exits with 1."""


class NotBuilt(ClusterError):
    """The components are not compiled and cannot be (no Go, too little disk, a compile error)."""


class NotUp(ClusterError):
    """The command needs a running cluster."""


class ApiError(ClusterError):
    """The API server refused a request; `status` is its HTTP status, `reason` Kubernetes' word for it."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
