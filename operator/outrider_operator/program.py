"""The operator put together: what each part is given, in which order they start, and in which they end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp

from outrider_operator import handlers, health, kinds
from outrider_operator.cache import Cache
from outrider_operator.clock import REAL, Clock
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
from outrider_operator.writes import Writes

log = logging.getLogger(__name__)
STUCK = 120.0  # seconds after which work on one object counts as stuck; requests time out far sooner
GRACE = 5.0  # seconds that everything gets to end

Wrap = Callable[[Kube], Kube]
Duty = Coroutine[Any, Any, Any]


async def run(
    settings: Settings,
    stop: asyncio.Event,
    wrap: Wrap = lambda kube: kube,
    watching: Callable[[], None] = lambda: None,
    clock: Clock = REAL,
) -> None:
    """Work until `stop` is set. Raises OutriderError when it cannot go on; the Lease is released in any case.

    `wrap` may put something between the operator and the API server; `watching` is called once the watches run;
    by `clock` the fleet is measured and decided about.
    """
    configuration = await load(settings.kubeconfig, settings.context)
    async with AsyncExitStack() as stack:
        await Operator(settings, stack, clock).run(configuration, stop, wrap, watching)


class Operator:
    def __init__(self, settings: Settings, stack: AsyncExitStack, clock: Clock) -> None:
        """`stack` closes what is opened, in reverse."""
        self._settings, self._stack, self._clock = settings, stack, clock
        self._cache = Cache()
        self._queue = Queue(settings.retry_seconds, settings.retry_limit_seconds)
        self._metrics = Metrics(self._cache, self._queue)
        self._kinds = kinds.watched()
        self._checks: dict[str, health.Check] = {"queue": self._stuck}
        self._tasks: dict[str, asyncio.Task[Any]] = {}  # all run until the end; one that ends is the end

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
        self._start("stop", stop.wait())
        try:
            if settings.leader_elect and not await self._lead(kube):
                return
            self._metrics.leader.set(1)
            await self._work(client, kube, watching)
        finally:
            await self._end()

    async def _lead(self, kube: Kube) -> bool:
        settings = self._settings
        leader = Leader(kube, settings.namespace, settings.lease_name, settings.identity, settings.lease_seconds)
        self._stack.push_async_callback(leader.release)
        async with self._servers():  # a waiting replica is healthy too
            if not await self._went_well(leader.acquire()):
                return False
        self._start("lease", leader.keep())
        return True

    async def _work(self, client: Client, kube: Kube, watching: Callable[[], None]) -> None:
        settings, cache, queue = self._settings, self._cache, self._queue
        lister = Lister(kube, cache, queue, self._kinds, settings.namespaces, settings.relist_seconds)
        self._checks["watches"] = lister.trouble
        writes = Writes(kube, cache, queue)
        frames = handlers.Frames(cache, queue, lister, writes)
        watches = handlers.Watches(self._kinds, frames, client.credentials, settings.namespaces, watching)
        async with self._servers(), self._reconciler(kube, writes) as reconciler:
            # lists come first: nothing is decided before all is known
            if not await self._went_well(lister.first()):
                return
            log.info("watching and working", extra={"objects": cache.count()})
            self._start("lists", lister.run())
            for number in range(settings.concurrency):
                self._start(f"worker {number}", reconciler.work())
            self._start("watches", watches.run())
            await self._went_well(asyncio.Event().wait())
            await self._end(but="watches")
        watches.stop()
        await asyncio.wait([self._tasks["watches"]], timeout=GRACE)

    @asynccontextmanager
    async def _reconciler(self, kube: Kube, writes: Writes) -> AsyncIterator[Reconciler]:
        settings, clock = self._settings, self._clock
        connector, slots = aiohttp.TCPConnector(limit=0), asyncio.Semaphore(settings.measure_concurrency)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def read(pods: Sequence[Pod]) -> Mapping[str, Sample]:
                samples = await read_pods(session, pods, clock=clock.monotonic, slots=slots)
                for sample in samples.values():
                    self._metrics.measurements.labels("read" if sample.answer else "unreadable").inc()
                return samples

            async def put(pod: Pod, policy: Policy, token: str) -> Answer:
                answer = await put_policy(session, pod, policy, token)
                self._metrics.measurements.labels("told").inc()
                return answer

            rounds = Rounds(read, self._queue.add, settings.measure_seconds, clock)
            tokens = Tokens(kube)
            teller = Teller(put, rounds, tokens)
            publisher = Publisher(kube, settings.identity)
            defaults = Defaults(
                runtime_image=settings.runtime_image,
                network_policy=settings.network_policy,
                operator_namespace=settings.namespace,
                monitoring_namespace=settings.monitoring_namespace,
            )
            parts = (rounds, tokens, teller, publisher, self._metrics, defaults)
            try:
                yield Reconciler(kube, self._cache, self._queue, writes, *parts, clock=clock.monotonic, wall=clock.wall)
            finally:
                await rounds.close()

    @asynccontextmanager
    async def _servers(self) -> AsyncIterator[None]:
        settings = self._settings
        servers = (
            (settings.health_port, health.health(self._checks)),
            (settings.metrics_port, health.exposition(self._metrics.registry)),
        )
        async with AsyncExitStack() as stack:
            for port, application in servers:
                if port:
                    try:
                        runner = await health.serve(application, settings.bind_address, port)
                    except OSError as error:
                        raise OutriderError(f"cannot listen on port {port}: {error}; choose another") from error
                    stack.push_async_callback(runner.cleanup)
            yield

    def _stuck(self) -> str:
        age = self._queue.oldest()
        return f"an object has waited or been worked on for {age:.0f} s" if age > STUCK else ""

    # -- tasks -------------------------------------------------------------------------------------------------------

    def _start(self, name: str, duty: Duty) -> None:
        self._tasks[name] = asyncio.create_task(duty, name=name)

    async def _went_well(self, work: Duty) -> bool:
        """Whether `work` ended before we were told to stop. Raises what it, or any of the tasks, raised."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([task, *self._tasks.values()], return_when=asyncio.FIRST_COMPLETED)
            for name, other in self._tasks.items():
                if other.done() and name != "stop":
                    other.result()
                    raise OutriderError(f"{name} ended by itself")
            if self._tasks["stop"].done():
                return False
            task.result()
            return True
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _end(self, but: str = "") -> None:
        tasks = [task for name, task in self._tasks.items() if name != but]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE)
