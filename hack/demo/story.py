"""The story that status tells: one `kubectl get` line whenever it has something new to say."""

from __future__ import annotations

import time
from collections.abc import Callable

from .kubectl import Kubectl, Object, condition
from .steps import Step


def speculation(obj: Object | None) -> tuple[str, str]:
    """State and reason, such as ("Suspended", "Saturated"); empty strings while there is no status."""
    found = (obj or {}).get("status", {}).get("speculativeDecoding", {})
    return found.get("state", ""), found.get("reason", "")


class Story:
    """Follows one object. Prints its row, under a header once, with the seconds since it began."""

    def __init__(self, kubectl: Kubectl, name: str, tell: Callable[[str], None] = print) -> None:
        self._kubectl, self._name, self._tell = kubectl, name, tell
        self._began = time.monotonic()
        self._last: tuple[str, ...] = ()

    def look(self) -> Object | None:
        """Read the object; tell its row when readiness or speculation differ from the last look."""
        obj = self._kubectl.get("specm", self._name)
        if obj:
            ready = condition(obj, "Ready")
            now = (*speculation(obj), ready.get("status", ""), ready.get("reason", ""))
            if now != self._last:
                self._row(header=not self._last)
                if now[:2] != self._last[:2]:
                    self._why(obj)
                self._last = now
        return obj

    def until(self, step: Step, what: str, reached: Callable[[Object], bool], deadline: float) -> Object:
        """Follow until `reached`; raises StepError at the deadline."""

        def look() -> tuple[Object | None, str]:
            obj = self.look()
            running = (obj or {}).get("status", {}).get("speculativeDecoding", {}).get("runningConcurrency", "?")
            state, reason = speculation(obj)
            return (obj if obj and reached(obj) else None), f"{state} {reason}, running {running}"

        return step.wait(what, look, deadline)

    def _row(self, *, header: bool) -> None:
        lines = self._kubectl("get", "specm", self._name).rstrip().splitlines()
        elapsed = f"{time.monotonic() - self._began:5.0f} s  "  # nine wide
        if header:
            self._tell(f"{'':9}{lines[0]}")
        self._tell(elapsed + lines[-1])

    def _why(self, obj: Object) -> None:
        found = condition(obj, "SpeculationActive")
        if found.get("message"):
            self._tell(f"{'':9}{found['reason']}: {found['message']}")
