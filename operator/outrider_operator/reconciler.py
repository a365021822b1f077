"""One object from what is to what should be: key -> observe -> plan -> apply -> status -> tell pods.

It looks at the whole each time and never at what happened: killed between any two writes, the next look goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from outrider_operator.api.v1alpha1 import API_VERSION, KIND
from outrider_operator.apply import Applier
from outrider_operator.cache import Cache, Key
from outrider_operator.errors import Conflict, NameConflict, NotFound, OutriderError, Rejected, Unavailable
from outrider_operator.events import Publisher
from outrider_operator.facts import foreign_writer, live_replicas
from outrider_operator.fleet.autoscale import REMEMBERED
from outrider_operator.fleet.history import window
from outrider_operator.kinds import MODEL
from outrider_operator.kube import Kube
from outrider_operator.metrics import Metrics
from outrider_operator.observation import model_of, observe
from outrider_operator.observe import Model, Observed, Pod
from outrider_operator.plan import Defaults, Plan, plan
from outrider_operator.queue import Queue
from outrider_operator.rounds import Rounds
from outrider_operator.secret import Tokens
from outrider_operator.status import differs, scaling_step, status
from outrider_operator.telling import Teller
from outrider_operator.writes import Writes

log = logging.getLogger(__name__)
TRIES = 3  # of an apply that the server answers with 500 before status says so
CONTESTED = 60.0  # seconds for which somebody who wrote the Deployment's replicas is named; autoscalers write oftener


class Reconciler:
    def __init__(
        self,
        kube: Kube,
        cache: Cache,
        queue: Queue,
        writes: Writes,
        rounds: Rounds,
        tokens: Tokens,
        teller: Teller,
        publisher: Publisher,
        metrics: Metrics,
        defaults: Defaults,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._cache, self._queue, self._writes, self._rounds = cache, queue, writes, rounds
        self._tokens, self._teller, self._publisher, self._metrics = tokens, teller, publisher, metrics
        self._defaults, self._clock, self._wall = defaults, clock, wall
        self._applier = Applier(kube, cache, writes)
        self._apply_errors: dict[Key, str] = {}
        self._status_written: dict[Key, float] = {}
        # what was wanted and what the server made of it, where others keep fields: to write it again changes nothing
        self._status_left: dict[Key, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
        # steps of autoscaling, kept from before each is taken until a status tells of it: the write of that may fail
        self._untold: dict[Key, tuple[Mapping[str, Any], ...]] = {}
        self._replicas_written: dict[Key, tuple[str, float]] = {}  # by whom else, and when that was last seen

    async def work(self) -> None:
        """One worker; several may run at once."""
        while True:
            key = await self._queue.get()
            started, outcome = self._clock(), "failed"
            try:
                outcome = await self._attempt(key)
            finally:
                self._queue.done(key)
                self._metrics.reconcile.labels(outcome).observe(self._clock() - started)

    async def reconcile(self, key: Key) -> None:
        """Bring one object forward as far as it goes now; what changes, its pods' measurements and the plan itself are
        what make it be looked at again.

        Raises OutriderError when it has to be tried again.
        """
        entry = self._cache.get(MODEL, key)
        model = model_of(entry.body) if entry else None
        if model is None or model.deleting:
            self._forget(key)
            return
        observed = self._observe(model)
        self._follow(observed)
        planned = plan(observed, self._defaults)
        trouble: Rejected | None = None
        before = observed
        if planned.refusal is None:
            try:
                conflicts = await self._conflicts(observed, planned)
                if conflicts:
                    observed = replace(observed, conflicts=conflicts)
                    planned = plan(observed, self._defaults)
                else:
                    observed = await self._apply(observed, planned)
            except Rejected as error:
                trouble, observed = error, self._complaint(observed, error)
                planned = plan(observed, self._defaults)  # for its event
                if not self._applier.holds(planned.children, "Deployment"):
                    planned = planned.unscaled
        await self._say(model, planned)
        if planned.look_again is not None:
            self._queue.add_after(key, planned.look_again)
        unwritten: OutriderError | None = None
        try:
            written = await self._write_status(observed, planned)
        except OutriderError as error:  # such as of an older CRD's: what pods are to do does not wait for it
            written, unwritten = True, error
        settled = not (written or planned.events or observed is not before)
        if trouble is None or self._applier.holds(planned.children, "ConfigMap"):
            settled &= await self._tell(observed, planned)
        if trouble is not None:
            raise trouble
        if isinstance(planned.refusal, NameConflict):
            raise planned.refusal  # no watch shows the object in the way, so only looking again tells when it is gone
        self._rounds.settled(key, settled)
        if unwritten is not None:
            raise unwritten

    async def _attempt(self, key: Key) -> str:
        try:
            await self.reconcile(key)
        except (Unavailable, Conflict, NotFound, Rejected, NameConflict) as error:
            retry_after = error.retry_after if isinstance(error, Unavailable) else None
            delay = self._queue.retry(key, retry_after)
            known = isinstance(error, NameConflict)  # status and an event say it
            expected = known or (isinstance(error, Conflict) and self._queue.failures(key) == 1)
            log.log(
                logging.DEBUG if expected else logging.WARNING,
                "will try again: %s",
                error,
                extra={"object": str(key), "seconds": round(delay, 1)},
            )
            return type(error).__name__.lower()
        except Exception:
            delay = self._queue.retry(key)
            log.exception("a reconcile failed", extra={"object": str(key), "seconds": round(delay, 1)})
            return "failed"
        self._queue.succeeded(key)
        return "done"

    def _observe(self, model: Model) -> Observed:
        key = Key(model.namespace, model.name)
        observed = observe(
            model,
            self._cache.of_model(key),
            self._rounds.fleet(key),
            self._clock(),
            self._wall(),
            apply_error=self._apply_errors.get(key, ""),
            status_written_at=self._status_written.get(key),
        )
        return replace(
            observed, replicas_writer=self._replicas_writer(key, observed), untold=self._taken(key, observed)
        )

    def _replicas_writer(self, key: Key, observed: Observed) -> str:
        """Setting replicas back takes the field from its writer, who would be named for no more than a moment."""
        if writer := foreign_writer(observed.deployment):
            self._replicas_written[key] = writer, observed.now
        writer, seen = self._replicas_written.get(key, ("", float("-inf")))
        return writer if observed.now - seen < CONTESTED else ""

    def _taken(self, key: Key, observed: Observed) -> tuple[Mapping[str, Any], ...]:
        """Steps that status has yet to tell of. The last was not taken if replicas are what they were before it."""
        steps = self._untold.get(key, ())
        return steps[:-1] if steps and steps[-1]["from"] == live_replicas(observed.deployment) else steps

    def _follow(self, observed: Observed) -> None:
        model = observed.model
        if model.spec is not None:
            self._rounds.follow(Key(model.namespace, model.name), _ready(observed), window(model.spec))

    async def _conflicts(self, observed: Observed, planned: Plan) -> tuple[str, ...]:
        """Names we need and others hold. The Secret comes last, so that nothing is made where something is taken."""
        conflicts = await self._applier.conflicts(observed.model, planned.children)
        if conflicts:
            return conflicts
        try:
            await self._tokens.ensure(observed.model, fresh=observed.deployment is None)
        except NameConflict as error:
            return (error.message,)
        return ()

    async def _apply(self, observed: Observed, planned: Plan) -> Observed:
        key = Key(observed.model.namespace, observed.model.name)
        if (step := scaling_step(planned.scaling, observed.wall)) is not None:
            self._untold[key] = (*observed.untold, step)[-REMEMBERED:]
        sent = await self._applier.apply(planned.children)
        await self._applier.prune(observed.model, planned.prune)
        recovered = self._apply_errors.pop(key, None) is not None
        self._metrics.drift.inc(sent)
        if not sent and not recovered:
            return observed
        return replace(self._observe(observed.model), now=observed.now, wall=observed.wall, fleet=observed.fleet)

    def _complaint(self, observed: Observed, error: Rejected) -> Observed:
        """What the API server refused for good is the user's to know; a 500 may pass, so it gets a few tries."""
        key = Key(observed.model.namespace, observed.model.name)
        if error.status < 500 or self._queue.failures(key) + 1 >= TRIES:
            self._apply_errors[key] = str(error)
        return replace(observed, apply_error=self._apply_errors.get(key, ""))

    async def _tell(self, observed: Observed, planned: Plan) -> bool:
        """Whether there was nobody to tell. Only what the ConfigMap holds by now may be told."""
        if planned.refusal is not None or planned.policy is None:
            return True
        key = Key(observed.model.namespace, observed.model.name)
        return await self._teller.tell(key, _ready(observed), observed.fleet, planned.policy_of)

    async def _say(self, model: Model, planned: Plan) -> None:
        for event in planned.events:
            self._metrics.decisions.labels(str(event.reason)).inc()
        await self._publisher.publish(model, planned.events)

    async def _write_status(self, observed: Observed, planned: Plan) -> bool:
        """Whether there was something to write."""
        model = observed.model
        key, wanted = Key(model.namespace, model.name), status(observed, planned)
        if not differs(wanted, model.status) or self._status_left.get(key) == (wanted, model.status):
            self._untold.pop(key, None)
            return False
        metadata = {"namespace": model.namespace, "name": model.name, "uid": model.uid}
        try:
            answer = await self._writes.apply_status(
                {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": wanted}
            )
        except NotFound:
            return True  # deleted meanwhile; the watch will say so
        self._status_written[key] = self._clock()
        self._untold.pop(key, None)
        left = answer.get("status") or {}
        if differs(wanted, left):
            self._status_left[key] = wanted, left
        else:
            self._status_left.pop(key, None)
        return True

    def _forget(self, key: Key) -> None:
        """Nothing to undo: what it owns is collected by its ownerReferences."""
        for memory in (self._rounds, self._tokens, self._publisher, self._teller, self._applier, self._queue):
            memory.forget(key)
        self._apply_errors.pop(key, None)
        self._status_written.pop(key, None)
        self._status_left.pop(key, None)
        self._untold.pop(key, None)
        self._replicas_written.pop(key, None)


def _ready(observed: Observed) -> list[Pod]:
    return [pod for pod in observed.pods if pod.ready and not pod.deleting]
