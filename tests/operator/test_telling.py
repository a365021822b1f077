from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.operator.build import answer, pod

from outrider_operator.api.reasons import SpeculationState
from outrider_operator.cache import Key
from outrider_operator.errors import Rejected, Unavailable
from outrider_operator.fleet.policy import Policy
from outrider_operator.fleet.samples import Answer, Fleet, Sample
from outrider_operator.observe import Pod
from outrider_operator.telling import Teller

LLAMA = Key("team", "llama")
POLICY = Policy("Auto", SpeculationState.SUSPENDED, "Saturated", 4, None).sealed()


class Setting:
    """Pods that take the policy from who shows their token, and tokens and rounds that remember."""

    def __init__(self, tokens: Sequence[str] = ("new",), accepted: str = "new") -> None:
        self.tokens, self.accepted = tuple(tokens), accepted
        self.fault: Exception | None = None
        self.tried: list[tuple[str, str]] = []
        self.heard: list[tuple[str, str]] = []
        self.doubted = False
        self.own: dict[str, Policy] = {}  # policies of pods that have one of their own
        self.teller = Teller(self.put, self, self)  # type: ignore[arg-type]  # it plays rounds and tokens too

    async def put(self, pod: Pod, policy: Policy, token: str) -> Answer:
        self.tried.append((pod.name, token))
        if self.fault:
            raise self.fault
        if token != self.accepted:
            raise Rejected("the pod answered 401: no", 401)
        return answer(revision=policy.revision)

    def of(self, key: Key) -> tuple[str, ...]:
        return self.tokens

    def doubt(self, key: Key) -> None:
        self.doubted = True

    def told(self, key: Key, pod: str, answer: Answer) -> None:
        self.heard.append((pod, answer.revision))

    def policies(self, pod: str) -> Policy:
        return self.own.get(pod, POLICY)

    async def tell(self, **revisions: str | None) -> bool:
        """Each pod's last sample shows this revision; None stands for no answer."""
        samples = {
            name: (Sample(0.0, None if revision is None else answer(revision=revision)),)
            for name, revision in revisions.items()
        }
        return await self.teller.tell(LLAMA, [pod(name) for name in revisions], Fleet(samples=samples), self.policies)


async def test_only_pods_with_another_revision_are_told() -> None:
    setting = Setting()
    assert not await setting.tell(a="old", b=POLICY.revision, c="older")
    assert await setting.tell(b=POLICY.revision, d=None), "nobody is left to tell"
    assert setting.tried == [("a", "new"), ("c", "new")]
    assert setting.heard == [("a", POLICY.revision), ("c", POLICY.revision)]


async def test_a_pod_on_trial_is_told_a_policy_of_its_own() -> None:
    setting = Setting()
    trial = Policy("Auto", SpeculationState.ACTIVE, "", 4, None).sealed()
    setting.own = {"b": trial}
    await setting.tell(a="old", b=POLICY.revision)
    await setting.tell(a=POLICY.revision, b=trial.revision)
    assert setting.heard == [("a", POLICY.revision), ("b", trial.revision)]


async def test_a_pod_that_did_not_answer_is_not_told() -> None:
    setting = Setting()
    await setting.tell(a=None)
    assert setting.tried == []


async def test_the_token_before_is_tried_when_the_newest_is_refused() -> None:
    setting = Setting(tokens=("new", "old"), accepted="old")
    await setting.tell(a="old")
    assert setting.tried == [("a", "new"), ("a", "old")]
    assert setting.heard == [("a", POLICY.revision)]
    assert not setting.doubted


async def test_a_pod_that_knows_none_of_the_tokens_makes_us_read_the_secret_again() -> None:
    setting = Setting(tokens=("new", "old"), accepted="another")
    await setting.tell(a="old")
    assert setting.doubted


@pytest.mark.parametrize("fault", [Unavailable("no answer"), Rejected("the pod answered 400: no", 400)])
async def test_a_pods_fault_stops_nobody(fault: Exception) -> None:
    setting = Setting(tokens=("new", "old"))
    setting.fault = fault
    await setting.tell(a="old", b="old")
    assert setting.tried == [("a", "new"), ("b", "new")]
    assert not setting.doubted
