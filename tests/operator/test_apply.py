from __future__ import annotations

from typing import Any

import pytest
from tests.operator.fake_kube import FakeKube

from outrider_operator.apply import Applier
from outrider_operator.cache import Cache, Key
from outrider_operator.errors import Conflict, Rejected, Unavailable
from outrider_operator.observe import Model
from outrider_operator.queue import Queue
from outrider_operator.render.meta import metadata, sealed
from outrider_operator.writes import Writes

MODEL = Model(namespace="team", name="llama", uid="u1", generation=1, spec=None)


def child(name: str = "llama", kind: str = "Service", port: int = 80) -> dict[str, Any]:
    return sealed(
        {
            "apiVersion": "v1",
            "kind": kind,
            "metadata": metadata(MODEL, name),
            "spec": {"ports": [{"name": "http", "port": port}]},
        }
    )


@pytest.fixture
def kube() -> FakeKube:
    return FakeKube()


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def applier(kube: FakeKube, cache: Cache) -> Applier:
    return Applier(kube, cache, Writes(kube, cache, Queue()))


async def test_a_missing_child_is_sent_and_a_child_in_step_is_not(kube: FakeKube, applier: Applier) -> None:
    assert await applier.apply([child()]) == 1
    assert await applier.apply([child()]) == 0
    assert kube.writes == [("apply", "Service", "llama")]


async def test_children_are_sent_in_the_order_of_the_plan(kube: FakeKube, applier: Applier) -> None:
    await applier.apply([child("b"), child("a"), child("c")])
    assert [name for _, _, name in kube.writes] == ["b", "a", "c"]


async def test_a_changed_mind_is_sent(kube: FakeKube, applier: Applier) -> None:
    await applier.apply([child()])
    assert await applier.apply([child(port=81)]) == 1
    assert kube.objects["Service", "team", "llama"]["spec"]["ports"][0]["port"] == 81


async def test_what_is_refused_keeps_nothing_else_from_being_sent_and_all_of_it_is_named(
    kube: FakeKube, applier: Applier
) -> None:
    def fault(verb: str, kind: str, name: str) -> None:
        if name in ("b", "d"):
            raise Rejected(f"apply {name}: exceeded quota", {"b": 500, "d": 403}[name])

    kube.fault = fault
    with pytest.raises(Rejected, match=r"^apply b: exceeded quota; apply d: exceeded quota$") as refused:
        await applier.apply([child("a"), child("b"), child("c"), child("d"), child("e")])
    assert [name for _, _, name in kube.writes] == ["a", "c", "e"]
    assert refused.value.status == 403  # one of them is refused for good


async def test_an_owned_field_that_somebody_changed_is_repaired(kube: FakeKube, cache: Cache, applier: Applier) -> None:
    await applier.apply([child()])
    live = kube.objects["Service", "team", "llama"]
    cache.put(kube.put({**live, "spec": {"ports": [{"name": "http", "port": 9999}]}}))
    assert await applier.apply([child()]) == 1
    assert kube.objects["Service", "team", "llama"]["spec"]["ports"][0]["port"] == 80


async def test_a_field_that_somebody_added_is_left_alone(kube: FakeKube, cache: Cache, applier: Applier) -> None:
    await applier.apply([child()])
    live = kube.objects["Service", "team", "llama"]
    cache.put(kube.put({**live, "spec": {**live["spec"], "sessionAffinity": "ClientIP"}}))
    assert await applier.apply([child()]) == 0


async def test_what_a_webhook_makes_of_an_apply_is_not_fought_over(kube: FakeKube, applier: Applier) -> None:
    apply = kube.apply

    async def webhook(body: Any) -> dict[str, Any]:
        return await apply({**body, "spec": {"ports": [{"name": "http", "port": 8080}]}})

    kube.apply = webhook  # type: ignore[method-assign]  # an admission webhook with a mind of its own
    assert await applier.apply([child()]) == 1
    assert await applier.apply([child()]) == 0


async def test_an_object_that_took_the_name_meanwhile_is_not_touched(kube: FakeKube, applier: Applier) -> None:
    await applier.apply([child()])
    del kube.objects["Service", "team", "llama"]
    kube.put({**child(port=1), "metadata": {"name": "llama", "namespace": "team"}})
    with pytest.raises(Conflict):
        await applier.apply([child(port=81)])
    assert kube.objects["Service", "team", "llama"]["spec"]["ports"][0]["port"] == 1


async def test_a_child_being_deleted_is_left_to_go(kube: FakeKube, cache: Cache, applier: Applier) -> None:
    await applier.apply([child()])
    live = kube.objects["Service", "team", "llama"]
    cache.put(kube.put({**live, "metadata": {**live["metadata"], "deletionTimestamp": "now"}}))
    assert await applier.apply([child(port=81)]) == 0


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({}, "not made by this operator"),
        (
            {"ownerReferences": [{"kind": "Gateway", "name": "edge", "uid": "x", "controller": True}]},
            "owned by Gateway edge",
        ),
        (
            {"ownerReferences": [{"kind": "Gateway", "name": "edge", "uid": "u1", "controller": False}]},
            "not made by this operator",
        ),
    ],
)
async def test_a_name_held_by_somebody_else_is_a_conflict(
    kube: FakeKube, applier: Applier, theirs: dict[str, Any], words: str
) -> None:
    kube.put({**child(), "metadata": {"name": "llama", "namespace": "team", **theirs}})
    assert await applier.conflicts(MODEL, [child(), child("free")]) == (f"Service llama ({words})",)
    assert kube.writes == []


async def test_names_that_are_free_or_ours_are_no_conflict(kube: FakeKube, applier: Applier) -> None:
    await applier.apply([child()])
    assert await applier.conflicts(MODEL, [child(), child("free")]) == ()


async def test_a_child_whose_label_was_taken_off_is_found_again(kube: FakeKube, cache: Cache, applier: Applier) -> None:
    await applier.apply([child()])
    live = kube.objects["Service", "team", "llama"]
    stripped = kube.put({**live, "metadata": {**live["metadata"], "labels": {}}})
    cache.remove(stripped)  # a watch with a selector says DELETED
    assert await applier.conflicts(MODEL, [child()]) == ()
    assert await applier.apply([child()]) == 1
    assert kube.objects["Service", "team", "llama"]["metadata"]["labels"]["outrider.dev/model"] == "llama"


async def test_children_orphaned_by_hand_are_taken_back(kube: FakeKube, cache: Cache, applier: Applier) -> None:
    orphan = child()
    del orphan["metadata"]["ownerReferences"]
    cache.put(kube.put(orphan))
    assert await applier.conflicts(MODEL, [child()]) == ()
    assert await applier.apply([child()]) == 1
    assert kube.objects["Service", "team", "llama"]["metadata"]["ownerReferences"][0]["uid"] == "u1"


async def test_a_predecessors_child_is_waited_for(kube: FakeKube, applier: Applier) -> None:
    before = Model(namespace="team", name="llama", uid="u0", generation=1, spec=None)
    kube.put({**child(), "metadata": metadata(before, "llama")})
    with pytest.raises(Unavailable, match="before"):
        await applier.conflicts(MODEL, [child()])


async def test_an_owned_leftover_is_removed_and_nothing_else(kube: FakeKube, cache: Cache, applier: Applier) -> None:
    await applier.apply([child("leftover"), child("kept")])
    cache.put(kube.put({**child("foreign"), "metadata": {"name": "foreign", "namespace": "team"}}))
    await applier.prune(MODEL, [("Service", "leftover"), ("Service", "foreign"), ("Service", "never-was")])
    assert sorted(name for _, _, name in kube.objects) == ["foreign", "kept"]


async def test_a_leftover_that_is_gone_already_is_no_failure(kube: FakeKube, applier: Applier) -> None:
    await applier.apply([child("leftover")])
    del kube.objects["Service", "team", "leftover"]
    await applier.prune(MODEL, [("Service", "leftover")])


def test_keys_are_readable() -> None:
    assert str(Key("team", "llama")) == "team/llama"
