from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_operator.cache import Cache, Key, pack

LLAMA = Key("team", "llama")


def child(
    version: int, kind: str = "ConfigMap", name: str = "llama-policy", model: str = "llama", **more: Any
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {
            "namespace": "team",
            "name": name,
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "labels": {"outrider.dev/model": model},
            "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:data": {}}}],
        },
        "data": {"at": str(version)},
        **more,
    }


def test_an_object_is_found_by_key_and_by_its_model() -> None:
    cache = Cache()
    assert cache.put(child(1)) == {LLAMA}
    entry = cache.get("ConfigMap", Key("team", "llama-policy"))
    assert entry is not None
    assert entry.body["data"] == {"at": "1"}
    assert cache.of_model(LLAMA) == [entry]


def test_a_model_does_not_belong_to_itself() -> None:
    cache = Cache()
    model = child(1, kind="SpeculativeModel", name="llama", apiVersion="outrider.dev/v1alpha1")
    assert cache.put(model) == {LLAMA}
    assert cache.of_model(LLAMA) == []
    assert cache.models() == [LLAMA]


def test_an_older_or_equal_version_says_nothing_new() -> None:
    cache = Cache()
    cache.put(child(5))
    assert cache.put(child(5)) == set()
    assert cache.put(child(4)) == set()
    assert cache.get("ConfigMap", Key("team", "llama-policy")).body["data"] == {"at": "5"}


def test_a_change_that_nobody_reads_wakes_nobody_but_moves_the_version() -> None:
    cache = Cache()
    cache.put(child(5, data={"same": "x"}))
    later = child(6, data={"same": "x"})
    later["metadata"]["managedFields"] = []
    assert cache.put(later) == set()
    assert cache.get("ConfigMap", Key("team", "llama-policy")).version == 6


def test_what_is_not_needed_is_not_kept() -> None:
    body = child(1)
    body["metadata"]["annotations"] = {
        "kubectl.kubernetes.io/last-applied-configuration": "x" * 10_000,
        "outrider.dev/hash": "h",
    }
    entry = pack(body)
    assert "managedFields" not in entry.body["metadata"]
    assert entry.body["metadata"]["annotations"] == {"outrider.dev/hash": "h"}
    assert len(entry.packed) < 500


def test_who_owns_replicas_is_kept_of_managed_fields() -> None:
    body = child(1, kind="Deployment", name="llama", apiVersion="apps/v1")
    body["metadata"]["managedFields"] = [
        {"manager": "hpa", "operation": "Update", "subresource": "scale", "fieldsV1": {"f:spec": {"f:replicas": {}}}},
        {"manager": "kubelet", "operation": "Update", "fieldsV1": {"f:status": {"f:replicas": {}}}},
    ]
    assert [owner["manager"] for owner in pack(body).body["metadata"]["managedFields"]] == ["hpa"]


def test_of_a_pod_only_what_explains_it_is_kept() -> None:
    pod = child(1, kind="Pod", name="llama-1", spec={"containers": [{"name": "server", "env": ["big"]}]})
    pod["status"] = {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "conditions": [{"type": "Ready", "status": "True"}, {"type": "Initialized", "status": "True"}],
        "containerStatuses": [{"name": "server", "imageID": "long", "state": {"running": {}}, "restartCount": 2}],
    }
    kept = pack(pod).body
    assert "spec" not in kept
    assert [condition["type"] for condition in kept["status"]["conditions"]] == ["Ready"]
    assert kept["status"]["containerStatuses"] == [{"name": "server", "state": {"running": {}}, "restartCount": 2}]


def test_an_object_that_changes_its_model_wakes_both() -> None:
    cache = Cache()
    cache.put(child(1))
    assert cache.put(child(2, model="qwen")) == {LLAMA, Key("team", "qwen")}
    assert cache.of_model(LLAMA) == []
    assert len(cache.of_model(Key("team", "qwen"))) == 1


def test_a_removed_object_is_gone_and_an_older_frame_does_not_bring_it_back() -> None:
    cache = Cache()
    cache.put(child(1))
    assert cache.remove(child(3)) == {LLAMA}
    assert cache.put(child(2)) == set()
    assert cache.of_model(LLAMA) == []
    assert cache.put(child(4)) == {LLAMA}


def test_a_late_removal_does_not_remove_what_was_made_anew() -> None:
    cache = Cache()
    cache.put(child(5))
    assert cache.remove(child(3)) == set()
    assert len(cache.of_model(LLAMA)) == 1


def test_a_list_finds_what_the_watch_did_not_tell() -> None:
    cache = Cache()
    cache.put(child(1))
    cache.put(child(2, name="gone", model="qwen"))
    changes = cache.replace("ConfigMap", None, [pack(child(3)), pack(child(4, name="new", model="phi"))], version=5)
    assert changes.models == {LLAMA, Key("team", "qwen"), Key("team", "phi")}
    assert changes.missed == 3


def test_a_list_that_tells_nothing_new_wakes_nobody() -> None:
    cache = Cache()
    cache.put(child(1))
    changes = cache.replace("ConfigMap", None, [pack(child(1))], version=9)
    assert (changes.models, changes.missed) == (set(), 0)


def test_a_list_does_not_remove_what_is_newer_than_itself() -> None:
    cache = Cache()
    cache.put(child(7))
    cache.replace("ConfigMap", None, [], version=6)
    assert len(cache.of_model(LLAMA)) == 1


@pytest.mark.parametrize(("namespace", "left"), [("team", 0), ("other", 1), (None, 0)])
def test_a_list_of_a_namespace_speaks_for_that_namespace(namespace: str | None, left: int) -> None:
    cache = Cache()
    cache.put(child(1))
    cache.replace("ConfigMap", namespace, [], version=6)
    assert len(cache.of_model(LLAMA)) == left


def test_tombstones_do_not_pile_up() -> None:
    cache = Cache()
    for number in range(50):
        cache.put(child(number * 2 + 1, name=f"c{number}"))
        cache.remove(child(number * 2 + 2, name=f"c{number}"))
    cache.replace("ConfigMap", None, [], version=200)
    cache.replace("ConfigMap", None, [], version=300)
    assert not cache._gone


history = st.lists(st.booleans(), min_size=1, max_size=8)  # at each version the object is there, or deleted


@given(history, st.data())
def test_frames_in_any_order_and_number_lead_to_the_last_state(there: list[bool], data: st.DataObject) -> None:
    frames = [(version, present) for version, present in enumerate(there, start=1)]
    order = data.draw(st.permutations(frames))
    doubled = data.draw(st.lists(st.sampled_from(frames)))
    cache = Cache()
    for version, present in [*order, *doubled]:
        (cache.put if present else cache.remove)(child(version))
    entry = cache.get("ConfigMap", Key("team", "llama-policy"))
    assert (entry.version if entry else None) == (len(there) if there[-1] else None)
    assert len(cache.of_model(LLAMA)) == there[-1]


@given(history, st.integers(0, 8), st.data())
def test_a_list_in_the_middle_of_late_frames_leads_there_too(there: list[bool], at: int, data: st.DataObject) -> None:
    frames = [(version, present) for version, present in enumerate(there, start=1)]
    order = data.draw(st.permutations(frames))
    version = min(at, len(there))
    listed = [pack(child(version))] if version and there[version - 1] else []
    when = data.draw(st.integers(0, len(frames)))
    cache = Cache()
    for step, (number, present) in enumerate([*order, (0, False)]):
        if step == when:
            cache.replace("ConfigMap", None, listed, version)
        if number:
            (cache.put if present else cache.remove)(child(number))
    assert len(cache.of_model(LLAMA)) == there[-1]
