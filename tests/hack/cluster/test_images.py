"""Images written by hand."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

from localcluster import images


def read(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]  # all files


def test_an_image_of_one_program_names_its_layer_by_what_is_in_it() -> None:
    files = read(images.docker_archive("outrider.local/x:1", {"x": b"program"}, ["/x"]))
    manifest, config = (json.loads(files[name]) for name in ("manifest.json", "config.json"))
    assert manifest == [{"Config": "config.json", "RepoTags": ["outrider.local/x:1"], "Layers": ["layer.tar"]}]
    assert config["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(files["layer.tar"]).hexdigest()]
    assert config["config"]["Entrypoint"] == ["/x"]
    assert read(files["layer.tar"]) == {"x": b"program"}


def test_the_same_files_make_the_same_image() -> None:
    one, two = (images.docker_archive("a:b", {"x": b"1"}, ["/x"]) for _ in range(2))
    assert one == two


def test_an_entry_whose_tag_a_newer_build_took_is_dropped(tmp_path: Path) -> None:
    newer = {"digest": "sha256:2", "annotations": {images.TAG: "name"}}
    entries = [{"digest": "sha256:1"}, newer, {"digest": "sha256:3", "annotations": {"other": "x"}}]
    (tmp_path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))
    images._drop_untagged(tmp_path)
    assert json.loads((tmp_path / "index.json").read_text()) == {"schemaVersion": 2, "manifests": [newer]}
