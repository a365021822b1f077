"""A small client of the Kubernetes API: a new connection each time, so a restarted server needs no care.

It exists beside kubectl because polling with a process per question would cost most of a start-up.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .errors import ApiError

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


@dataclass(frozen=True)
class Api:
    """An API server as one user sees it: `url` like https://127.0.0.1:6443, a bearer `token`, its CA's file."""

    url: str
    ca_file: Path
    token: str

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        content_type: str = "application/json",
        accept: str = "application/json",
        timeout: float = 15,
    ) -> Any:
        """The decoded JSON answer (text where it is none).

        Raises ApiError for any status from 400 on, OSError or http.client.HTTPException if no answer came.
        """
        with self._connection(timeout) as connection:
            return self._ask(connection, method, path, body, content_type, accept)

    def delete(self, paths: Iterable[str], options: object, timeout: float = 15) -> None:
        """Delete all of these over one connection: to make one is most of what a request costs. Raises as `request`."""
        with self._connection(timeout) as connection:
            for path in paths:
                self._ask(connection, "DELETE", path, options)

    def answers(self, path: str) -> bool:
        """Whether a GET of `path` succeeds now; any failure to reach the server is a no."""
        try:
            self.request("GET", path, timeout=2)
        except (ApiError, OSError, http.client.HTTPException):
            return False
        return True

    def _connection(self, timeout: float) -> closing[http.client.HTTPSConnection]:
        context = ssl.create_default_context(cafile=str(self.ca_file))
        return closing(http.client.HTTPSConnection(urlsplit(self.url).netloc, timeout=timeout, context=context))

    def _ask(
        self,
        connection: http.client.HTTPSConnection,
        method: str,
        path: str,
        body: object,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Any:
        headers = {"Authorization": f"Bearer {self.token}", "Accept": accept}
        data = None
        if body is not None:
            headers["Content-Type"] = content_type
            data = json.dumps(body).encode()
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        text = response.read().decode()
        try:
            answer = json.loads(text)
        except ValueError:
            answer = text
        if response.status >= 400:
            details = answer if isinstance(answer, dict) else {"message": text.strip()}
            raise ApiError(response.status, details.get("reason", response.reason), details.get("message", ""))
        return answer


def poll(probe: Callable[[], bool], seconds: float, interval: float = 0.05) -> bool:
    """Whether `probe` became true within `seconds`; asked at least once."""
    deadline = time.monotonic() + seconds
    while not probe():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True
