"""Events as users read them in `kubectl describe`: one per transition, and never a reason for anything to fail."""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from outrider_operator import labels
from outrider_operator.api.reasons import WARNINGS, EventReason
from outrider_operator.api.v1alpha1 import API_VERSION, KIND
from outrider_operator.cache import Key
from outrider_operator.errors import NotFound, OutriderError, Unavailable
from outrider_operator.kinds import KINDS
from outrider_operator.kube import Kube
from outrider_operator.observe import Model
from outrider_operator.plan import Event

log = logging.getLogger(__name__)
SAME = 300.0  # seconds in which the same words about the same object are one event
# what makes the same words news again: the way there and back within minutes are two transitions
_ENDS = {
    EventReason.SPECULATION_SUSPENDED: (EventReason.SPECULATION_RESUMED,),
    EventReason.SPECULATION_RESUMED: (EventReason.SPECULATION_SUSPENDED,),
    EventReason.SCALED_UP: (EventReason.SCALED_DOWN,),
    EventReason.SCALED_DOWN: (EventReason.SCALED_UP,),
    EventReason.ROLLOUT_STARTED: (EventReason.ROLLOUT_COMPLETE, EventReason.MODEL_LOADED),
    EventReason.ROLLOUT_COMPLETE: (EventReason.ROLLOUT_STARTED,),
}
_KEPT = 20  # events of one object that wait for an API server that does not answer
_LONGEST_NOTE = 1024  # bytes, the API's limit


class Publisher:
    def __init__(self, kube: Kube, instance: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube, self._instance, self._clock = kube, instance, clock
        self._waiting: dict[Key, deque[dict[str, Any]]] = {}
        self._said: dict[Key, dict[EventReason, tuple[str, float]]] = {}

    async def publish(self, model: Model, events: Sequence[Event]) -> None:
        """Post them, and those that could not be posted before. A transition whose reconcile is retried says the
        same again, so equal words within a few minutes are posted once."""
        key = Key(model.namespace, model.name)
        waiting = self._waiting.setdefault(key, deque(maxlen=_KEPT)) if events else self._waiting.get(key)
        for event in events:
            if self._is_new(key, event) and waiting is not None:
                log.info(event.message, extra={"object": str(key), "event": str(event.reason)})
                waiting.append(rendered(model, event, self._instance, datetime.now(UTC)))
        while waiting:
            try:
                await self._kube.create(waiting[0])
            except Unavailable as error:
                log.warning("an event has to wait: %s", error, extra={"object": str(key)})
                return
            except OutriderError as error:
                # a namespace that ends takes no events
                level = logging.DEBUG if isinstance(error, NotFound) else logging.WARNING
                log.log(level, "an event was refused: %s", error, extra={"object": str(key)})
            waiting.popleft()
        self._waiting.pop(key, None)

    def forget(self, key: Key) -> None:
        self._waiting.pop(key, None)
        self._said.pop(key, None)

    def _is_new(self, key: Key, event: Event) -> bool:
        said, now = self._said.setdefault(key, {}), self._clock()
        words, at = said.get(event.reason, ("", float("-inf")))
        if words == event.message and now - at < SAME:
            return False
        said[event.reason] = (event.message, now)
        for ended in _ENDS.get(event.reason, ()):
            said.pop(ended, None)
        return True


def rendered(model: Model, event: Event, instance: str, wall: datetime) -> dict[str, Any]:
    return {
        "apiVersion": KINDS["Event"].api_version,
        "kind": "Event",
        "metadata": {"namespace": model.namespace, "name": f"{model.name}.{secrets.token_hex(8)}"},
        "eventTime": wall.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "reportingController": f"outrider.dev/{labels.FIELD_MANAGER}",
        "reportingInstance": instance,
        "action": "Reconcile",
        "type": "Warning" if event.reason in WARNINGS else "Normal",
        "reason": str(event.reason),
        "note": event.message.encode(errors="replace")[:_LONGEST_NOTE].decode(errors="ignore"),
        "regarding": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "namespace": model.namespace,
            "name": model.name,
            "uid": model.uid,
        },
    }
