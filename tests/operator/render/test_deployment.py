"""What rolls pods and what never does; the recorded image and capture tier; replicas outside of it all."""

from __future__ import annotations

import pytest
from tests.operator.build import DRAFTED, HEAD, child, merged, model

from outrider_operator import labels
from outrider_operator.render.deployment import deployment, recorded, rollout_steps, template_hash
from outrider_operator.render.meta import sealed

TREE = merged(HEAD, {"speculativeDecoding": {"tree": {"topK": 8, "maxTokens": 32}}})


def _deployment(*parts, live=None, image="runtime:1", replicas=1, **fields):
    target = model(*parts, **fields)
    return sealed(deployment(target, target.spec, replicas, recorded(target, target.spec, live, image)))


def _template(*parts, **kwargs):
    return template_hash(_deployment(*parts, **kwargs))


def _image(rendered):
    return rendered["spec"]["template"]["spec"]["containers"][0]["image"]


# The hashes below hold the rendered template to what released operators rendered: a change of one of them restarts
# every pod of every user on upgrade. Add rows for new features; change a row only with that in the changelog.
@pytest.mark.parametrize(
    ("parts", "golden"),
    [
        ({}, "fe942393ca"),
        (DRAFTED, "03875353b2"),
        ({"engine": {"device": "CPU"}, "model": {"uri": "pvc://w/m"}, "cache": {"size": "1Gi"}}, "21c2464751"),
        ({"podTemplate": {"metadata": {"annotations": {"a": "b"}}, "spec": {"hostIPC": True}}}, "b7e06626be"),
        (TREE, "48f0b7c3da"),
    ],
    ids=("smallest", "drafted", "cpu", "overlaid", "tree"),
)
def test_templates_are_what_they_were(parts, golden):
    assert _template(parts) == golden


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"uri": "hf://other/model"}},
        {"model": {"revision": "v2"}},
        {"model": {"name": "chat"}},
        {"model": {"tokenSecretRef": {"name": "x", "key": "y"}}},
        {"speculativeDecoding": {"draft": {"uri": "hf://other/draft"}}},
        {"speculativeDecoding": {"draft": None, "method": "NGram"}},
        {"speculativeDecoding": {"numSpeculativeTokens": 9}},
        {"engine": {"image": "mine:1"}},
        {"engine": {"maxConcurrency": 99}},
        {"engine": {"extraArgs": ["--x"]}},
        {"engine": {"env": [{"name": "A", "value": "1"}]}},
        {"resources": {"limits": {"memory": "1Gi"}}},
        {"nodeSelector": {"a": "b"}},
        {"cache": {"claimName": "shared"}},
        {"podTemplate": {"spec": {"hostIPC": True}}},
        {"rollout": {"drainTimeoutSeconds": 61}},
    ],
    ids=str,
)
def test_what_a_pod_is_started_with_rolls_pods(change):
    assert _template(DRAFTED, change) != _template(DRAFTED)


@pytest.mark.parametrize(
    "change",
    [
        {"speculativeDecoding": {"mode": "Enabled"}},
        {"speculativeDecoding": {"mode": "Disabled"}},
        {"speculativeDecoding": {"numSpeculativeTokens": 8}},
        {"speculativeDecoding": {"saturation": {"disableAtConcurrency": 99, "enableAtConcurrency": 1}}},
        {"speculativeDecoding": {"minAcceptancePercent": 40}},
        {"autoscaling": None, "replicas": 7},
        {"autoscaling": {"maxReplicas": 99}},
        {"rollout": {"maxSurge": 3, "progressDeadlineSeconds": 99}},
        {"suspend": True},
    ],
    ids=str,
)
def test_what_pods_are_told_later_rolls_nothing(change):
    assert _template(DRAFTED, change) == _template(DRAFTED)


@pytest.mark.parametrize(
    "change",
    [None, {"topK": 9}, {"maxTokens": 33}],
    ids=("gone", "another width", "another size"),
)
def test_a_tree_is_what_a_pod_is_started_with(change):
    assert _template(TREE, {"speculativeDecoding": {"tree": change}}) != _template(TREE)


def test_replicas_and_the_objects_annotations_roll_nothing():
    assert _template(replicas=5) == _template() == _template(annotations={"team": "a"})


def test_a_new_operators_image_rolls_nothing():
    live = _deployment(image="runtime:1")
    assert _image(_deployment(image="runtime:2", live=live)) == "runtime:1"
    assert _template(image="runtime:2", live=live) == template_hash(live)


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"engine": {"maxConcurrency": 12}}, {}),
        ({}, {"annotations": {labels.UPGRADE: "today"}}),
    ],
    ids=("engine", "annotation"),
)
def test_the_new_image_is_taken_when_asked_for_and_kept_then(change, fields):
    live = _deployment(image="runtime:1")
    taken = _deployment(change, image="runtime:2", live=live, **fields)
    assert _image(taken) == "runtime:2"
    assert _image(_deployment(change, image="runtime:3", live=taken, **fields)) == "runtime:2"


def test_the_users_own_image_wins_and_leaves_no_trace():
    live = _deployment({"engine": {"image": "mine:1"}})
    assert _image(live) == "mine:1"
    assert _image(_deployment(live=live)) == "runtime:1"


@pytest.mark.parametrize(
    ("tokens", "live_tier", "tier"),
    [(4, None, 4), (5, None, 8), (9, None, 16), (4, "8", 8), (16, "8", 16), (4, "nonsense", 4), (4, "7", 4)],
)
def test_the_capture_tier_grows_with_the_spec_and_never_shrinks_by_itself(tokens, live_tier, tier):
    live = {"metadata": {"annotations": {labels.CAPTURE_TIER: live_tier}}} if live_tier else None
    rendered = _deployment({"speculativeDecoding": {"numSpeculativeTokens": tokens}}, live=live)
    args = rendered["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[args.index("--max-speculative-tokens") + 1] == str(tier)
    assert rendered["metadata"]["annotations"][labels.CAPTURE_TIER] == str(tier)


@pytest.mark.parametrize(("max_tokens", "tier"), [(56, 8), (55, 4)])
def test_a_tree_that_is_too_wide_for_the_tier_there_was_takes_its_own(max_tokens, tier):
    live = {"metadata": {"annotations": {labels.CAPTURE_TIER: "8"}}}
    rendered = _deployment(TREE, {"speculativeDecoding": {"tree": {"maxTokens": max_tokens}}}, live=live)
    assert rendered["metadata"]["annotations"][labels.CAPTURE_TIER] == str(tier)


@pytest.mark.parametrize(
    ("parts", "steps"),
    [
        ({}, (0, 1)),
        ({"engine": {"device": "CPU"}}, (1, 0)),
        ({"rollout": {"maxSurge": "25%"}}, ("25%", 1)),
        ({"rollout": {"maxSurge": 2, "maxUnavailable": 0}}, (2, 0)),
    ],
    ids=str,
)
def test_a_gpu_is_freed_before_its_successor_needs_it(parts, steps):
    target = model(parts)
    assert rollout_steps(target.spec) == steps


def test_the_selector_is_one_label_for_ever():
    rendered = _deployment(DRAFTED, {"podTemplate": {"metadata": {"labels": {"team": "a"}}}})
    pods = rendered["spec"]["template"]["metadata"]["labels"]
    assert rendered["spec"]["selector"] == {"matchLabels": {"outrider.dev/model": "llama"}}
    assert pods["outrider.dev/model"] == "llama"
    assert pods["team"] == "a"
    assert pods[labels.TEMPLATE] == template_hash(rendered)


def test_a_child_carries_its_hash_and_another_number_of_replicas_another_one():
    one, two = child(_deployment(replicas=1)), child(_deployment(replicas=2))
    assert one.hash == child(_deployment(replicas=1)).hash != two.hash
