"""Telling pods the policy: every ready pod that answered with another revision gets a PUT, again until it agrees."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from outrider_operator.cache import Key
from outrider_operator.errors import Rejected, Unavailable
from outrider_operator.fleet.policy import Policy
from outrider_operator.fleet.samples import Answer, Fleet
from outrider_operator.observe import Pod
from outrider_operator.rounds import Rounds
from outrider_operator.secret import Tokens

log = logging.getLogger(__name__)
Put = Callable[[Pod, Policy, str], Awaitable[Answer]]
_UNAUTHORIZED = 401


class Teller:
    def __init__(self, put: Put, rounds: Rounds, tokens: Tokens) -> None:
        self._put, self._rounds, self._tokens = put, rounds, tokens
        self._refused: dict[Key, str] = {}  # last revision that a pod refused, so that it is logged once

    async def tell(
        self, key: Key, pods: Sequence[Pod], fleet: Fleet, policy_of: Callable[[str], Policy | None]
    ) -> bool:
        """Tell each pod the policy that is its own; whether there was nobody to tell. Never raises for a pod's fault:
        the next round shows who still thinks otherwise."""
        policies = ((pod, policy_of(pod.name)) for pod in pods)
        due = [(pod, policy) for pod, policy in policies if policy and _disagrees(fleet, pod, policy)]
        await asyncio.gather(*(self._tell(key, pod, policy) for pod, policy in due))
        return not due

    def forget(self, key: Key) -> None:
        self._refused.pop(key, None)

    async def _tell(self, key: Key, pod: Pod, policy: Policy) -> None:
        context = {"object": str(key), "pod": pod.name, "revision": policy.revision}
        for token in self._tokens.of(key):
            try:
                self._rounds.told(key, pod.name, await self._put(pod, policy, token))
            except Unavailable as error:
                log.debug("a pod could not be told its policy: %s", error, extra=context)
                return
            except Rejected as error:
                if error.status == _UNAUTHORIZED:
                    continue
                if self._refused.get(key) != policy.revision:
                    log.warning("a pod refused its policy: %s", error, extra=context)
                self._refused[key] = policy.revision
                return
            else:
                log.info("a pod was told its policy", extra={**context, "state": str(policy.state)})
                return
        self._tokens.doubt(key)


def _disagrees(fleet: Fleet, pod: Pod, policy: Policy) -> bool:
    """Only pods that answered lately are told: the others would keep everybody waiting."""
    samples = fleet.samples.get(pod.name)
    return bool(samples and samples[-1].answer and samples[-1].answer.revision != policy.revision)
