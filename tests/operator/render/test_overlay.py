"""The user's podTemplate: merged by key, replaced elsewhere, refused where it would take the pod out of our hands."""

from __future__ import annotations

import copy

import pytest

from outrider_operator.api.reasons import Reason
from outrider_operator.errors import Refused
from outrider_operator.render.overlay import overlaid

TEMPLATE = {
    "metadata": {"labels": {"outrider.dev/model": "llama"}},
    "spec": {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1},
        "containers": [
            {
                "name": "server",
                "image": "i:1",
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                "securityContext": {"readOnlyRootFilesystem": True},
            }
        ],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    },
}


def _server(overlay):
    return {c["name"]: c for c in overlaid(TEMPLATE, {"spec": overlay})["spec"]["containers"]}["server"]


def test_nothing_to_merge_changes_nothing():
    assert overlaid(TEMPLATE, None) == overlaid(TEMPLATE, {}) == TEMPLATE


def test_containers_are_merged_by_name_and_others_added():
    overlay = {
        "containers": [{"name": "proxy", "image": "p"}, {"name": "server", "image": "i:2"}],
        "initContainers": [{"name": "wait", "image": "w"}],
    }
    spec = overlaid(TEMPLATE, {"spec": overlay})["spec"]
    assert [c["name"] for c in spec["containers"]] == ["server", "proxy"]
    assert spec["containers"][0] == {**TEMPLATE["spec"]["containers"][0], "image": "i:2"}
    assert spec["initContainers"] == [{"name": "wait", "image": "w"}]


def test_env_volumes_and_mounts_are_merged_by_their_keys():
    overlay = {
        "containers": [
            {
                "name": "server",
                "env": [{"name": "B", "valueFrom": {"fieldRef": {}}}, {"name": "C", "value": "3"}],
                "volumeMounts": [
                    {"mountPath": "/tmp", "name": "big"},
                    {"mountPath": "/data", "name": "data", "readOnly": True},
                ],
            }
        ],
        "volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory"}}, {"name": "big", "emptyDir": {}}],
    }
    server = _server(overlay)
    assert server["env"] == [
        {"name": "A", "value": "1"},
        {"name": "B", "valueFrom": {"fieldRef": {}}},
        {"name": "C", "value": "3"},
    ]
    assert [m["name"] for m in server["volumeMounts"]] == ["big", "data"]
    volumes = overlaid(TEMPLATE, {"spec": overlay})["spec"]["volumes"]
    assert volumes == [{"name": "tmp", "emptyDir": {"medium": "Memory"}}, {"name": "big", "emptyDir": {}}]


def test_all_else_is_replaced_and_a_null_removes():
    result = overlaid(TEMPLATE, {"spec": {"securityContext": {"runAsUser": 7}, "hostNetwork": True}})
    assert result["spec"]["securityContext"] == {"runAsUser": 7}
    assert result["spec"]["hostNetwork"] is True
    assert "securityContext" not in overlaid(TEMPLATE, {"spec": {"securityContext": None}})["spec"]
    assert "securityContext" not in _server({"containers": [{"name": "server", "securityContext": None}]})


def test_labels_and_annotations_are_added():
    metadata = overlaid(TEMPLATE, {"metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}}})["metadata"]
    assert metadata == {"labels": {"outrider.dev/model": "llama", "a": "b"}, "annotations": {"c": "d"}}


def test_merging_leaves_its_input_alone():
    before = copy.deepcopy(TEMPLATE)
    overlaid(TEMPLATE, {"spec": {"containers": [{"name": "server", "env": [{"name": "A", "value": "9"}]}]}})
    assert before == TEMPLATE


@pytest.mark.parametrize(
    ("overlay", "path"),
    [
        ({"metadata": {"labels": {"outrider.dev/model": "x"}}}, "podTemplate.metadata.labels[outrider.dev/model]"),
        (
            {"metadata": {"labels": {"outrider.dev/template": "x"}}},
            "podTemplate.metadata.labels[outrider.dev/template]",
        ),
        ({"metadata": {"name": "x"}}, "podTemplate.metadata.name"),
        ({"metadata": {"labels": {"a": 1}}}, "podTemplate.metadata.labels[a]"),
        ({"metadata": []}, "podTemplate.metadata"),
        ({"replicas": 2}, "podTemplate.replicas"),
        ({"spec": "x"}, "podTemplate.spec"),
        ({"spec": {"containers": {}}}, "podTemplate.spec.containers"),
        ({"spec": {"containers": [{"image": "x"}]}}, "podTemplate.spec.containers[0].name"),
        ({"spec": {"containers": ["x"]}}, "podTemplate.spec.containers[0]"),
        ({"spec": {"volumes": [{"emptyDir": {}}]}}, "podTemplate.spec.volumes[0].name"),
        (
            {"spec": {"containers": [{"name": "server", "env": [{"value": "x"}]}]}},
            "podTemplate.spec.containers[server].env[0].name",
        ),
        (
            {"spec": {"initContainers": [{"name": "a", "volumeMounts": [{"name": "x"}]}]}},
            "podTemplate.spec.initContainers[a].volumeMounts[0].mountPath",
        ),
        *(
            (
                {"spec": {"containers": [{"name": "server", field: None}]}},
                f"podTemplate.spec.containers[server].{field}",
            )
            for field in ("command", "args", "ports", "startupProbe", "readinessProbe", "livenessProbe")
        ),
    ],
    ids=str,
)
def test_what_may_not_be_touched_is_refused_by_its_path(overlay, path):
    with pytest.raises(Refused) as refused:
        overlaid(TEMPLATE, overlay)
    assert refused.value.reason is Reason.POD_TEMPLATE_REFUSED
    assert refused.value.message.startswith(f"{path} ")


def test_another_container_may_have_its_own_command_and_ports():
    sidecar = {"name": "proxy", "command": ["run"], "ports": [{"containerPort": 9}], "livenessProbe": {}}
    assert overlaid(TEMPLATE, {"spec": {"containers": [sidecar]}})["spec"]["containers"][1] == sidecar
