"""The generated CRD: up to date, structural, bounded, and with the columns and subresources users rely on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client import V1CustomResourceDefinition

from outrider_operator.api import crd
from outrider_operator.api.schema import ApiModel

ROOT = Path(__file__).parents[3]
ALLOWED = {
    "description", "type", "default", "enum", "format", "properties", "required", "items", "additionalProperties",
    "minimum", "maximum", "minLength", "maxLength", "pattern", "maxItems", "maxProperties",
    "x-kubernetes-validations", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type",
}  # fmt: skip


def schema() -> dict[str, Any]:
    version: dict[str, Any] = crd.definition()["spec"]["versions"][0]
    return version["schema"]["openAPIV3Schema"]


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema within `node` and its path."""
    yield path, node
    for name, field in node.get("properties", {}).items():
        yield from nodes(field, f"{path}.{name}".lstrip("."))
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")
    if "additionalProperties" in node:
        yield from nodes(node["additionalProperties"], f"{path}.*")


NODES = dict(nodes(schema()))
FIELDS = [pytest.param(node, id=path) for path, node in NODES.items()]


def test_the_committed_file_is_what_the_models_say(tmp_path: Path) -> None:
    crd.main([str(tmp_path)])
    made, committed = (folder / crd.FILE for folder in (tmp_path, ROOT / "crds"))
    assert made.read_text() == committed.read_text(), "run `make crds` and commit crds/"


def test_the_file_holds_the_definition() -> None:
    assert yaml.safe_load(crd.render()) == crd.definition()


def test_the_kubernetes_client_knows_every_field_of_it() -> None:
    V1CustomResourceDefinition.model_validate(crd.definition())


@pytest.mark.parametrize("node", FIELDS)
def test_every_schema_is_structural(node: dict[str, Any]) -> None:
    assert node.keys() <= ALLOWED
    kind = node.get("type")
    if node.get("x-kubernetes-int-or-string"):
        assert kind is None
        return
    assert kind in {"object", "array", "string", "integer", "boolean"}, "and never number: ratios are strings"
    assert ("items" in node) == (kind == "array")
    if kind == "object":
        ways = {"properties", "additionalProperties", "x-kubernetes-preserve-unknown-fields"} & node.keys()
        assert len(ways) == 1 or node == {"type": "object"}
    assert set(node.get("required", ())) <= node.get("properties", {}).keys()


@pytest.mark.parametrize("node", FIELDS)
def test_every_default_is_one_the_schema_allows(node: dict[str, Any]) -> None:
    default = node.get("default")
    if default is None:
        return
    kinds = {"object": dict, "integer": int, "string": str, "boolean": bool}
    assert isinstance(default, kinds[node["type"]])
    assert default in node.get("enum", [default])
    if node["type"] == "object":
        assert set(node.get("required", ())) <= default.keys()
        assert default.keys() <= node["properties"].keys()


@pytest.mark.parametrize("node", FIELDS)
def test_every_list_says_how_it_is_merged(node: dict[str, Any]) -> None:
    if node.get("type") == "array":
        keys = node.get("x-kubernetes-list-map-keys", [])
        assert (node["x-kubernetes-list-type"] == "map") == bool(keys)
        assert set(keys) <= set(node["items"].get("required", ()))
        assert "maxItems" in node


def test_lists_that_several_may_write_to_are_merged_by_key() -> None:
    keys = {
        path: node["x-kubernetes-list-map-keys"] for path, node in NODES.items() if "x-kubernetes-list-map-keys" in node
    }
    assert keys == {
        "spec.engine.env": ["name"],
        "spec.imagePullSecrets": ["name"],
        "status.conditions": ["type"],
    }


def test_every_field_of_spec_and_status_explains_itself() -> None:
    obvious = {"apiVersion", "kind", "metadata"}
    for path, node in NODES.items():
        if "properties" in node:
            silent = {
                name
                for name, field in node["properties"].items()
                if not field.get("description") and not (path == "" and name in obvious)
            }
            assert not silent, path


def test_strings_of_the_spec_are_bounded_so_that_rules_stay_cheap() -> None:
    for path, node in NODES.items():
        if path.startswith("spec.") and node.get("type") == "string" and not path.endswith(".*"):
            assert "maxLength" in node or "enum" in node, path


def test_what_no_default_fills_gets_no_default() -> None:
    filled = {path for path, node in NODES.items() if node.get("default") == {}}
    assert filled == {"spec.speculativeDecoding", "spec.speculativeDecoding.saturation", "spec.engine", "spec.rollout"}


def test_status_says_from_the_start_that_nobody_has_looked() -> None:
    assert NODES["status"]["default"] == {"observedGeneration": -1}


def test_names_are_those_people_type() -> None:
    spec = crd.definition()["spec"]
    assert spec["scope"] == "Namespaced"
    assert spec["names"]["shortNames"] == ["specm", "specmodel"]
    assert spec["names"]["categories"] == ["outrider"]


def test_columns_show_state_first_and_the_rest_when_asked() -> None:
    columns = crd.definition()["spec"]["versions"][0]["additionalPrinterColumns"]
    shown = [column["name"] for column in columns if not column.get("priority")]
    wide = [column["name"] for column in columns if column.get("priority") == 1]
    assert shown == ["Ready", "Reason", "Desired", "Available", "Speculation", "Accept%", "Speedup", "Age"]
    assert wide == ["Model", "Method", "Draft", "Running", "URL"]


def test_every_column_and_scale_path_reads_a_field_that_exists() -> None:
    version = crd.definition()["spec"]["versions"][0]
    paths = [column["jsonPath"] for column in version["additionalPrinterColumns"] if column["name"] != "Age"]
    paths += version["subresources"]["scale"].values()
    for path in paths:
        plain = path.lstrip(".").replace('[?(@.type=="Ready")]', "[]")
        assert plain in NODES, path


def test_a_union_other_than_a_quantity_is_refused_when_generating() -> None:
    class Odd(ApiModel):
        either: int | bool

    with pytest.raises(TypeError, match="no union of"):
        crd.structural(Odd)
