"""Models that are files already."""

from __future__ import annotations

import pytest

from outrider_runtime.config import SourceConfig
from outrider_runtime.errors import Refusal
from outrider_runtime.models.sources import Found, find


def found(uri, tmp_path):
    return find(SourceConfig(uri), tmp_path, lambda line: None)


def test_a_claim_is_a_folder_under_the_root_of_claims(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_PVC_ROOT", str(tmp_path))
    (tmp_path / "claim/some/model").mkdir(parents=True)
    assert found("pvc://claim/some/model", tmp_path) == Found(tmp_path / "claim/some/model")


def test_a_folder_and_a_gguf_file_are_taken_as_they_are(tmp_path):
    (tmp_path / "m.gguf").touch()
    assert found(str(tmp_path), tmp_path) == Found(tmp_path)
    assert found(f"{tmp_path}/m.gguf", tmp_path) == Found(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("uri", "reason", "told"),
    [
        (
            "pvc://demo-models/smollm",
            "ModelNotFound",
            "pvc://demo-models/smollm: no such folder; mount the claim that holds it or correct model.uri",
        ),
        ("pvc://demo-models/m.gguf", "ModelNotFound", "pvc://demo-models/m.gguf: no such file; mount the claim"),
        ("/no/such/folder", "ModelNotFound", "/no/such/folder: no such folder; correct the path"),
        ("pvc://claim/../../etc", "InvalidArgument", "'..' is not allowed"),
        ("s3://bucket/model", "InvalidArgument", "give hf://ORG/NAME, pvc://CLAIM/PATH, a folder or a GGUF file"),
    ],
)
def test_what_is_not_there_is_refused_with_the_fix(tmp_path, monkeypatch, uri, reason, told):
    monkeypatch.setenv("OUTRIDER_PVC_ROOT", str(tmp_path))
    with pytest.raises(Refusal) as refusal:
        found(uri, tmp_path)
    assert refusal.value.reason == reason
    assert told in refusal.value.message


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(Refusal, match=r"is a file but no \.gguf; give the folder it lies in"):
        found(str(tmp_path / "model.safetensors"), tmp_path)
