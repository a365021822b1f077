"""A small client of the Kubernetes API: one connection a request, so a restarted server needs no care.

It exists beside kubectl because polling with a process per question would cost most of a start-up.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable
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
        target = urlsplit(self.url)
        context = ssl.create_default_context(cafile=str(self.ca_file))
        connection = http.client.HTTPSConnection(target.netloc, timeout=timeout, context=context)
        headers = {"Authorization": f"Bearer {self.token}", "Accept": accept}
        data = None
        if body is not None:
            headers["Content-Type"] = content_type
            data = json.dumps(body).encode()
        try:
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        try:
            answer = json.loads(text)
        except ValueError:
            answer = text
        if response.status >= 400:
            details = answer if isinstance(answer, dict) else {"message": text.strip()}
            raise ApiError(response.status, details.get("reason", response.reason), details.get("message", ""))
        return answer

    def answers(self, path: str) -> bool:
        """Whether a GET of `path` succeeds now; any failure to reach the server is a no."""
        try:
            self.request("GET", path, timeout=2)
        except (ApiError, OSError, http.client.HTTPException):
            return False
        return True


def poll(probe: Callable[[], bool], seconds: float, interval: float = 0.05) -> bool:
    """Whether `probe` became true within `seconds`; asked at least once."""
    deadline = time.monotonic() + seconds
    while not probe():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True
