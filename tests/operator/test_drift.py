from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from outrider_operator.drift import differences, quantity


@pytest.mark.parametrize(
    ("rendered", "live", "expected"),
    [
        pytest.param({"a": 1}, {"a": 1, "b": 2}, [], id="fields of others are none of ours"),
        pytest.param({"a": {"b": 1}}, {"a": {"b": 2}}, ["a.b"], id="a changed field"),
        pytest.param({"a": {"b": 1}}, {"a": {}}, ["a.b"], id="a removed field"),
        pytest.param({"a": {"b": 1}}, {}, ["a"], id="a removed object"),
        pytest.param(
            {"a": 0, "b": "", "c": [], "d": {}, "e": False, "f": None}, {}, [], id="what omitempty leaves out"
        ),
        pytest.param({"a": 0}, {"a": 1}, ["a"], id="zero is not one"),
        pytest.param({"args": ["a", "b"]}, {"args": ["a", "b"]}, [], id="an equal list"),
        pytest.param({"args": ["a", "b"]}, {"args": ["b", "a"]}, ["args[0]", "args[1]"], id="order matters in a list"),
        pytest.param({"args": ["a"]}, {"args": ["a", "b"]}, ["args"], id="an added item in a list that is one whole"),
        pytest.param(
            {"tolerations": [{"key": "gpu"}]},
            {"tolerations": [{"key": "gpu"}, {"operator": "Exists"}]},
            ["tolerations"],
            id="an added toleration",
        ),
        pytest.param(
            {"env": [{"name": "A", "value": "1"}]},
            {"env": [{"name": "B", "value": "2"}, {"name": "A", "value": "1"}]},
            [],
            id="an env variable of somebody else",
        ),
        pytest.param(
            {"env": [{"name": "A", "value": "1"}]},
            {"env": [{"name": "A", "value": "2"}]},
            ["env[A].value"],
            id="a changed env variable",
        ),
        pytest.param({"env": [{"name": "A", "value": ""}]}, {"env": [{"name": "A"}]}, [], id="an empty env variable"),
        pytest.param(
            {"containers": [{"name": "server", "image": "a"}]},
            {"containers": [{"name": "server", "image": "a", "imagePullPolicy": "Always"}]},
            [],
            id="a default in a container",
        ),
        pytest.param(
            {"containers": [{"name": "server"}]}, {"containers": []}, ["containers[server]"], id="a removed container"
        ),
        pytest.param(
            {"ports": [{"name": "http", "port": 80}]},
            {"ports": [{"name": "http", "port": 80, "protocol": "TCP"}]},
            [],
            id="the default protocol is part of a port's key",
        ),
        pytest.param(
            {"limits": {"nvidia.com/gpu": 1, "memory": "1024Mi", "cpu": "0.5"}},
            {"limits": {"nvidia.com/gpu": "1", "memory": "1Gi", "cpu": "500m"}},
            [],
            id="quantities as the server writes them",
        ),
        pytest.param(
            {"requests": {"memory": "1Gi"}}, {"requests": {"memory": "2Gi"}}, ["requests.memory"], id="other memory"
        ),
        pytest.param(
            {"emptyDir": {"sizeLimit": "2048Mi"}}, {"emptyDir": {"sizeLimit": "2Gi"}}, [], id="an emptyDir's size"
        ),
        pytest.param({"emptyDir": {}}, {"emptyDir": {}}, [], id="an empty object"),
        pytest.param({"maxSurge": "25%"}, {"maxSurge": "25%"}, [], id="a percentage"),
    ],
)
def test_only_owned_fields_that_changed_are_differences(rendered: Any, live: Any, expected: list[str]) -> None:
    assert differences(rendered, live) == expected


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1),
        (1, 1),
        ("1.5", "1.5"),
        ("500m", "0.5"),
        ("1Ki", 1024),
        ("1Gi", 1024**3),
        ("1G", 10**9),
        ("1e3", 1000),
        ("1E", 10**18),
        ("2Ei", 2 * 1024**6),
    ],
)
def test_quantities_are_read_as_kubernetes_writes_them(text: object, number: object) -> None:
    assert quantity(text) == Decimal(str(number))


@pytest.mark.parametrize("text", ["", "one", "1Q", "1.2.3", None])
def test_what_is_no_quantity_is_none(text: object) -> None:
    assert quantity(text) is None
