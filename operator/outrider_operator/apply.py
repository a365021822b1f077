"""Making it so: children that differ from the plan are applied, leftovers removed, and nothing else is sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from outrider_operator import labels
from outrider_operator.cache import Cache, Entry, Key
from outrider_operator.drift import differences
from outrider_operator.errors import NotFound, Rejected, Unavailable
from outrider_operator.kube import Kube
from outrider_operator.observe import Model
from outrider_operator.ownership import foreign_owner, of_predecessor
from outrider_operator.writes import Writes

log = logging.getLogger(__name__)
Rendered = Mapping[str, Any]


class Applier:
    def __init__(self, kube: Kube, cache: Cache, writes: Writes) -> None:
        self._kube, self._cache, self._writes = kube, cache, writes
        # the hash last sent for each child, and the version the server made of it: while that version stands the
        # child is as we left it, even where an admission webhook has its own mind about it
        self._sent: dict[tuple[str, Key], tuple[str, int]] = {}

    async def conflicts(self, model: Model, children: Sequence[Rendered]) -> tuple[str, ...]:
        """Names among the children's that somebody else holds. Objects the watches do not show are asked for.

        Raises Unavailable while one still belongs to a deleted SpeculativeModel of the same name.
        """
        owners = await asyncio.gather(*(self._owner(model, child) for child in children))
        return tuple(
            f"{child['kind']} {child['metadata']['name']} ({owner})"
            for child, owner in zip(children, owners, strict=True)
            if owner is not None
        )

    async def apply(self, children: Sequence[Rendered]) -> int:
        """Apply those that are not in step, in order; returns how many were sent. Each carries its hash already.

        Raises Rejected, which names all that the API server refused, after the others were sent.
        """
        sent = 0
        refused: list[Rejected] = []
        for child in children:
            live = self._live(child)
            if live is not None and self._in_step(child, live):
                continue
            try:
                await self._send(child, live)
            except Rejected as error:  # a claim that may not grow is no reason to leave the Deployment as it was
                refused.append(error)
            else:
                sent += 1
        if refused:
            raise Rejected("; ".join(map(str, refused)), min(error.status for error in refused))
        return sent

    def holds(self, children: Sequence[Rendered], kind: str) -> bool:
        """Whether the one of that kind is live as it is rendered."""
        found = [(child, self._live(child)) for child in children if child["kind"] == kind]
        return any(live is not None and self._in_step(child, live) for child, live in found)

    async def prune(self, model: Model, leftovers: Sequence[tuple[str, str]]) -> None:
        for kind, name in leftovers:
            live = self._cache.get(kind, Key(model.namespace, name))
            if live is None or foreign_owner(live.body, model) is not None:
                continue
            log.info("removing a child no longer needed", extra={"kind": kind, "child": name})
            try:
                await self._kube.delete(kind, model.namespace, name, live.uid)
            except NotFound:
                continue

    def forget(self, model: Key) -> None:
        for place in [place for place in self._sent if place[1].namespace == model.namespace]:
            if self._cache.get(*place) is None:
                del self._sent[place]

    async def _owner(self, model: Model, child: Rendered) -> str | None:
        live = self._live(child)
        if live is not None and live.controller == model.uid:
            return None
        if live is not None:
            body = live.body
        else:
            try:
                body = await self._kube.peek(child["kind"], model.namespace, child["metadata"]["name"])
            except NotFound:
                return None
        owner = foreign_owner(body, model)
        if owner is not None and of_predecessor(body, model):
            raise Unavailable(
                f"{body['kind']} {body['metadata']['name']} of the SpeculativeModel before is still there"
            )
        if owner is None and live is None:
            self._cache.put(body)  # ours, but without the label that the watch looks for: drift, to be repaired
        return owner

    def _live(self, child: Rendered) -> Entry | None:
        metadata = child["metadata"]
        return self._cache.get(child["kind"], Key(metadata["namespace"], metadata["name"]))

    def _in_step(self, child: Rendered, live: Entry) -> bool:
        if self._sent.get((live.kind, live.key)) == (_hash(child), live.version):
            return True
        body = live.body
        if "deletionTimestamp" in body["metadata"]:
            return True  # nothing to repair in it; when it is gone it is made anew
        changed = differences(child, body)
        if changed and _hash(body) == _hash(child):
            log.info(
                "repairing a child that was changed",
                extra={"kind": live.kind, "child": live.key.name, "fields": changed},
            )
        return not changed

    async def _send(self, child: Rendered, live: Entry | None) -> None:
        # the uid makes it a change of that very object: one that took its name meanwhile is not touched
        body = {**child, "metadata": {**child["metadata"], "uid": live.uid}} if live else child
        try:
            answer = await self._writes.apply(body)
        except Rejected:
            if live is None or _hash(live.body) != _hash(child):
                raise
            # somebody changed the key of a list item we own: our own beside it may be one too many, such as two
            # ports of one name, and apply cannot remove what is theirs
            await self._writes.overwrite({part: value for part, value in body.items() if part != "status"})
            answer = await self._writes.apply(body)
        metadata = answer["metadata"]
        place = (str(answer["kind"]), Key(metadata["namespace"], metadata["name"]))
        self._sent[place] = (_hash(child), int(metadata["resourceVersion"]))


def _hash(body: Rendered) -> str:
    return str(body["metadata"].get("annotations", {}).get(labels.HASH, ""))
