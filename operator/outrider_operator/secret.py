"""The admin tokens: Secret NAME-admin is made once with a random token, and never changed.

The operator may get and create single Secrets and nothing else, so it does not watch them; a deleted one is found by
looking, and a new one made. Pods see it late (the kubelet refreshes mounts within a minute or two), so the token
before it is kept in memory and still offered.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider_operator.cache import Key
from outrider_operator.errors import Conflict, NameConflict, NotFound, Unavailable
from outrider_operator.kube import Kube
from outrider_operator.observe import Model
from outrider_operator.ownership import foreign_owner, of_predecessor
from outrider_operator.render.secret import TOKEN_KEY, admin_secret

LOOK_AGAIN = 300.0  # seconds after which a Secret seen is looked for again; lists, every ten minutes, ask for it
BOTH_VALID = 120.0  # seconds that runtimes accept the token before the newest


@dataclass(frozen=True, slots=True)
class _Known:
    model_uid: str
    token: str
    seen: float
    before: str = ""
    changed: float = 0.0


class Tokens:
    def __init__(self, kube: Kube, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube, self._clock = kube, clock
        self._known: dict[Key, _Known] = {}

    async def ensure(self, model: Model, fresh: bool) -> None:
        """See to it that the Secret exists; `fresh` says that none is expected yet.

        Raises NameConflict, whose message is the Secret and its owner, when it is somebody else's.
        """
        key, now = Key(model.namespace, model.name), self._clock()
        known = self._known.get(key)
        if known and known.model_uid != model.uid:
            known = None
        if known and now - known.seen < LOOK_AGAIN:
            return
        token = await self._read_or_create(model, fresh)
        if known and known.token != token:
            self._known[key] = _Known(model.uid, token, now, known.token, now)
        else:
            self._known[key] = _Known(model.uid, token, now, *((known.before, known.changed) if known else ()))

    def of(self, key: Key) -> tuple[str, ...]:
        """The tokens a pod may know, newest first."""
        known = self._known.get(key)
        if known is None:
            return ()
        both = known.before and self._clock() - known.changed < BOTH_VALID
        return (known.token, known.before) if both else (known.token,)

    def doubt(self, key: Key) -> None:
        """A pod knew none of them: read the Secret again next time."""
        known = self._known.get(key)
        if known:
            self._known[key] = _Known(known.model_uid, known.token, float("-inf"), known.before, known.changed)

    def forget(self, key: Key) -> None:
        self._known.pop(key, None)

    async def _read_or_create(self, model: Model, fresh: bool) -> str:
        body = admin_secret(model)
        name = body["metadata"]["name"]
        if not fresh:
            try:
                return self._token(await self._kube.get("Secret", model.namespace, name), model)
            except NotFound:
                pass
        token = secrets.token_urlsafe(32)
        try:
            await self._kube.create({**body, "stringData": {TOKEN_KEY: token}})
        except Conflict:  # it is there after all, from before a crash or by somebody else's hand
            return self._token(await self._kube.get("Secret", model.namespace, name), model)
        return token

    def _token(self, secret: dict[str, Any], model: Model) -> str:
        name = secret["metadata"]["name"]
        owner = foreign_owner(secret, model)
        if owner is not None:
            if of_predecessor(secret, model):
                raise Unavailable(f"Secret {name} of the SpeculativeModel before this one is still there")
            raise NameConflict(f"Secret {name} ({owner})")
        token = base64.b64decode((secret.get("data") or {}).get(TOKEN_KEY, ""))
        return token.decode(errors="replace").strip()  # as runtimes read it: whoever wrote it may have ended the line
