"""The operator put together: what each part is given, in which order they start, and in which they end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp

from outrider_operator import handlers, health, kinds
from outrider_operator.cache import Cache
from outrider_operator.errors import OutriderError
from outrider_operator.events import Publisher
from outrider_operator.fleet.measure import put_policy, read_pods
from outrider_operator.fleet.policy import Policy
from outrider_operator.fleet.samples import Answer, Sample
from outrider_operator.kube import Client, Kube, load
from outrider_operator.leader import Leader
from outrider_operator.listing import Lister
from outrider_operator.metrics import Metrics
from outrider_operator.observe import Pod
from outrider_operator.plan import Defaults
from outrider_operator.queue import Queue
from outrider_operator.reconciler import Reconciler
from outrider_operator.rounds import Rounds
from outrider_operator.secret import Tokens
from outrider_operator.settings import Settings
from outrider_operator.telling import Teller

log = logging.getLogger(__name__)
STUCK = 120.0  # seconds after which work on one object counts as stuck; requests time out far sooner
GRACE = 5.0  # seconds that everything gets to end

Wrap = Callable[[Kube], Kube]
Duty = Coroutine[Any, Any, None]


async def run(
    settings: Settings,
    stop: asyncio.Event,
    wrap: Wrap = lambda kube: kube,
    watching: Callable[[], None] = lambda: None,
) -> None:
    """Work until `stop` is set. Raises OutriderError when it cannot go on; the Lease is released in any case.

    `wrap` may put something between the operator and the API server; `watching` is called once the watches run.
    """
    configuration = await load(settings.kubeconfig, settings.context)
    async with AsyncExitStack() as stack:
        await Operator(settings, stack).run(configuration, stop, wrap, watching)


class Operator:
    def __init__(self, settings: Settings, stack: AsyncExitStack) -> None:
        """`stack` closes what it opens, in reverse."""
        self._settings, self._stack = settings, stack
        self._cache = Cache()
        self._queue = Queue(settings.retry_seconds, settings.retry_limit_seconds)
        self._metrics = Metrics(self._cache, self._queue)
        self._kinds = kinds.watched(settings.network_policy)
        self._checks: dict[str, health.Check] = {"queue": self._stuck}

    async def run(self, configuration: Any, stop: asyncio.Event, wrap: Wrap, watching: Callable[[], None]) -> None:
        settings = self._settings
        client = Client(
            configuration,
            timeout=settings.api_timeout_seconds,
            connections=settings.concurrency + 8,
            observer=self._metrics.observe_request,
        )
        self._stack.push_async_callback(client.close)
        kube = wrap(client)
        await self._serve()
        duties: dict[str, Duty] = {}
        if settings.leader_elect:
            leader = Leader(kube, settings.namespace, settings.lease_name, settings.identity, settings.lease_seconds)
            self._stack.push_async_callback(leader.release)
            if not await _unless(stop, leader.acquire()):
                return
            duties["lease"] = leader.keep()
        self._metrics.leader.set(1)
        duties |= await self._duties(client, kube, watching)
        await _until(stop, duties)

    async def _duties(self, client: Client, kube: Kube, watching: Callable[[], None]) -> dict[str, Duty]:
        """What runs while we lead."""
        settings, cache, queue = self._settings, self._cache, self._queue
        connector = aiohttp.TCPConnector(limit=settings.measure_concurrency)
        session = await self._stack.enter_async_context(aiohttp.ClientSession(connector=connector))

        async def read(pods: Sequence[Pod]) -> Mapping[str, Sample]:
            samples = await read_pods(session, pods)
            for sample in samples.values():
                self._metrics.measurements.labels("read" if sample.answer else "unreadable").inc()
            return samples

        async def put(pod: Pod, policy: Policy, token: str) -> Answer:
            answer = await put_policy(session, pod, policy, token)
            self._metrics.measurements.labels("told").inc()
            return answer

        rounds = Rounds(read, queue.add, settings.measure_seconds)
        self._stack.push_async_callback(rounds.close)
        tokens = Tokens(kube)
        teller = Teller(put, rounds, tokens)
        publisher = Publisher(kube, settings.identity)
        defaults = Defaults(
            runtime_image=settings.runtime_image,
            network_policy=settings.network_policy,
            operator_namespace=settings.namespace,
            monitoring_namespace=settings.monitoring_namespace,
        )
        reconciler = Reconciler(kube, cache, queue, rounds, tokens, teller, publisher, self._metrics, defaults)
        lister = Lister(kube, cache, queue, self._kinds, settings.namespaces, settings.relist_seconds)
        self._checks["watches"] = lister.trouble
        registry = handlers.registry(handlers.Frames(cache, queue, lister), self._kinds, client.credentials)

        async def look() -> None:
            """Lists come first: nothing is decided before all is known."""
            await lister.first()
            log.info("watching and working", extra={"objects": cache.count()})
            watches = handlers.watch(registry, handlers.settings(self._kinds), settings.namespaces, watching)
            workers = (reconciler.work() for _ in range(settings.concurrency))
            await asyncio.gather(lister.run(), watches, *workers)

        return {"operator": look()}

    async def _serve(self) -> None:
        settings = self._settings
        servers = (
            (settings.health_port, health.health(self._checks)),
            (settings.metrics_port, health.exposition(self._metrics.registry)),
        )
        for port, application in servers:
            if port:
                try:
                    runner = await health.serve(application, settings.bind_address, port)
                except OSError as error:
                    raise OutriderError(f"cannot listen on port {port}: {error}; choose another") from error
                self._stack.push_async_callback(runner.cleanup)

    def _stuck(self) -> str:
        age = self._queue.oldest()
        return f"an object has waited or been worked on for {age:.0f} s" if age > STUCK else ""


async def _until(stop: asyncio.Event, duties: Mapping[str, Duty]) -> None:
    """Run all until `stop`, or until one ends, which none should: its error is raised."""
    tasks = [asyncio.create_task(duty, name=name) for name, duty in duties.items()]
    stopping = asyncio.create_task(stop.wait(), name="stop")
    everything: list[asyncio.Task[Any]] = [*tasks, stopping]
    try:
        await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
    finally:
        for task in everything:
            task.cancel()
        await asyncio.wait(everything, timeout=GRACE)
    for task in ended:
        if error := task.exception():
            raise error
        if not stop.is_set():
            raise OutriderError(f"{task.get_name()} ended by itself")


async def _unless(stop: asyncio.Event, work: Duty) -> bool:
    """Whether `work` ended before `stop` was set; raises what it raised."""
    task, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    both: list[asyncio.Task[Any]] = [task, stopping]
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        stopping.cancel()
        task.result()
        return True
    task.cancel()
    await asyncio.wait([task])
    return False
