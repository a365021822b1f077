"""The admin token, read from its file on each use, so that it can be replaced while the runtime runs."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

GRACE_SECONDS = 120.0  # how long the old token stays valid after a change


class AdminToken:
    """A file that cannot be read leaves the last known token in force; one that never could, lets nobody in."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`path` None: every caller is let in."""
        self._path = path
        self._clock = clock
        self._current: bytes | None = None
        self._previous: bytes | None = None
        self._changed = clock()
        if path is not None:
            self._read(path)

    def allows(self, authorization: str | None) -> bool:
        """Whether the Authorization header bears the token, or the one before it within the grace."""
        if self._path is None:
            return True
        self._read(self._path)
        valid = [self._current]
        if self._clock() - self._changed < GRACE_SECONDS:
            valid.append(self._previous)
        return any(bears(authorization, token) for token in valid if token)

    def _read(self, path: Path) -> None:
        try:
            token = path.read_bytes().strip()
        except OSError as error:
            log.warning("the admin token file cannot be read", extra={"path": str(path), "error": str(error)})
            return
        if token and token != self._current:
            self._previous, self._current = self._current, token
            self._changed = self._clock()


def bears(authorization: str | None, secret: bytes) -> bool:
    """Whether an Authorization header is `Bearer SECRET`; takes as long wherever the two differ."""
    scheme, _, given = (authorization or "").partition(" ")
    return hmac.compare_digest(given.strip().encode(errors="surrogateescape"), secret) and scheme.lower() == "bearer"
