"""Our own writes: what the API server answers goes into the cache, and their echo on the watches wakes nobody.

A frame often overtakes the answer. Its object is being worked on then, so without this about every other new object
would be looked at once more, to find that nothing is left to do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from outrider_operator.cache import Cache, Entry, Key
from outrider_operator.kube import Body, Kube
from outrider_operator.queue import Queue


class Writes:
    def __init__(self, kube: Kube, cache: Cache, queue: Queue) -> None:
        self._kube, self._cache, self._queue = kube, cache, queue
        # what frames said of an object while a write of it was under way: whom each version would have woken
        self._held: dict[tuple[str, Key], dict[int, frozenset[Key]]] = {}

    async def apply(self, body: Body) -> dict[str, Any]:
        return await self._send(self._kube.apply, body)

    async def overwrite(self, body: Body) -> dict[str, Any]:
        return await self._send(self._kube.overwrite, body)

    async def apply_status(self, body: Body) -> dict[str, Any]:
        """The model's. Where the answer shows that somebody else changed it since it was last seen, it is looked at
        again: its own frame may come later still, and would be taken for old news."""
        place = _place(body)
        before = self._cache.get(*place)
        answer = await self._send(self._kube.apply_status, body)
        after = self._cache.get(*place)
        if before and after and _unwritten(before) != _unwritten(after):
            self._queue.add(after.model)
        return answer

    def is_awaited(self, body: Mapping[str, Any], models: frozenset[Key]) -> bool:
        """Whether a frame came while a write of ours of that object is under way. The answer will tell whether it is
        our own echo, and the models are woken then if it is not."""
        held = self._held.get(_place(body))
        if held is None:
            return False
        held[int(body["metadata"]["resourceVersion"])] = models
        return True

    async def _send(self, send: Callable[[Body], Awaitable[dict[str, Any]]], body: Body) -> dict[str, Any]:
        place = _place(body)
        held = self._held[place] = {}
        try:
            answer = await send(body)
            self._cache.put(answer)
            held.pop(int(answer["metadata"]["resourceVersion"]), None)
            return answer
        finally:
            del self._held[place]
            for model in frozenset().union(*held.values()):
                self._queue.add(model)


def _place(body: Mapping[str, Any]) -> tuple[str, Key]:
    metadata = body["metadata"]
    return body["kind"], Key(metadata["namespace"], metadata["name"])


def _unwritten(model: Entry) -> dict[str, Any]:
    """What a write of its status leaves alone; `generation` stands for the spec."""
    return {field: value for field, value in model.body["metadata"].items() if field != "resourceVersion"}
