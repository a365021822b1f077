"""Copies images from buildah's storage into the node, moving only the layers it does not have.

skopeo skips the layers that the OCI layout has, and the archive given to containerd leaves out the blobs that
containerd has. (`buildah push` would compress every layer, every time.)
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from . import disk, locks
from .configure import PAUSE_IMAGE
from .errors import ClusterError
from .paths import Home, Place
from .progress import Progress

TAG = "org.opencontainers.image.ref.name"  # annotation of an entry in a layout's index


def ctr(place: Place, *arguments: str, stdin: bytes | None = None) -> str:
    """containerd's own client in Kubernetes' namespace. Raises ClusterError with what it says."""
    command = ["ctr", "--address", str(place.containerd_socket), "--namespace", "k8s.io", *arguments]
    result = subprocess.run(command, input=stdin, capture_output=True)
    if result.returncode:
        raise ClusterError(f"ctr {' '.join(arguments)}: {result.stderr.decode().strip()}")
    return result.stdout.decode()


def load(home: Home, place: Place, name: str) -> str:
    """Copy the image `name` (like localhost/outrider-runtime:dev); says in a line what was moved."""
    progress, began = Progress(f"load-image {name}"), time.monotonic()
    place.layout.mkdir(exist_ok=True)
    with locks.hold(place.layout / ".lock", lambda: progress.update("waiting for another load-image")):
        source = _storage(home, name)
        manifest = _manifest(source, name)
        if _loaded(place, name) == f"sha256:{hashlib.sha256(manifest).hexdigest()}":
            return f"{name}: 0.000 MB moved, it is there"
        have = set(ctr(place, "content", "ls", "-q").split())
        _check_space(place, manifest, name, have)
        entry = _copy_to_layout(place, source, _tag(name), progress)
        missing = [digest for digest in _blobs_of(place.layout, entry) if digest not in have]
        named = {**entry, "annotations": {"io.containerd.image.name": name}}
        _import(place, named, missing, progress)
        moved = sum(_blob(place.layout, digest).stat().st_size for digest in missing)
        _share_blobs(place, missing)
        _forget_unused(place)
    return f"{name}: {moved / 1e6:.3f} MB moved in {time.monotonic() - began:.1f} s"


def load_pause(place: Place, program: Path) -> None:
    """Make the sandbox image of one static program by hand; there is nowhere to pull it from."""
    if not ctr(place, "images", "ls", "-q", f"name=={PAUSE_IMAGE}").strip():
        archive = docker_archive(PAUSE_IMAGE, {"pause": program.read_bytes()}, ["/pause"])
        ctr(place, "images", "import", "-", stdin=archive)


def docker_archive(name: str, files: Mapping[str, bytes], entrypoint: list[str]) -> bytes:
    """An image of one layer that holds `files`, as `docker save` would write it."""
    layer = _tar(files)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": entrypoint},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    return _tar(
        {"manifest.json": json.dumps(manifest).encode(), "config.json": json.dumps(config).encode(), "layer.tar": layer}
    )


def _tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            _add(tar, name, data)
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o755
    tar.addfile(info, io.BytesIO(data))


def _tag(name: str) -> str:
    """A name's tag in the layout, where slashes and colons are not allowed."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _storage(home: Home, name: str) -> str:
    return f"containers-storage:[overlay@{home.image_storage}+{home.image_run}]{name}"


def _blob(layout: Path, digest: str) -> Path:
    return layout / "blobs" / digest.replace(":", "/")


def _blobs_of(layout: Path, entry: Mapping[str, Any]) -> list[str]:
    """The digests of an image's manifest, configuration and layers."""
    manifest = json.loads(_blob(layout, entry["digest"]).read_bytes())
    return [entry["digest"], manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])]


def _index(layout: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((layout / "index.json").read_text())["manifests"]
    return entries


def _drop_untagged(layout: Path) -> None:
    """skopeo leaves the entry whose tag a newer build took; it would keep that build's layers for ever."""
    tagged = [entry for entry in _index(layout) if TAG in entry.get("annotations", {})]
    spare = layout / "index.json.new"
    spare.write_text(json.dumps({"schemaVersion": 2, "manifests": tagged}))
    spare.replace(layout / "index.json")


def _manifest(source: str, name: str) -> bytes:
    result = subprocess.run(["skopeo", "inspect", "--raw", source], capture_output=True)
    if result.returncode:
        complaint = result.stderr.decode().strip()[-200:]
        raise ClusterError(f"no image {name!r} in buildah's storage; build it first ({complaint})")
    return result.stdout


def _loaded(place: Place, name: str) -> str:
    """The digest of the manifest that containerd knows by `name`; "" if it knows none."""
    lines = ctr(place, "images", "ls", f"name=={name}").splitlines()[1:]
    return lines[0].split()[2] if lines else ""


def _check_space(place: Place, manifest: bytes, name: str, have: Iterable[str]) -> None:
    """A new layer is on disk three times at the worst moment: in the layout, in containerd's content, unpacked."""
    layers = json.loads(manifest)["layers"]
    new = sum(layer["size"] for layer in layers if layer["digest"] not in have)
    disk.require(place.root, 3 * new + disk.GB // 2, f"loading {name} ({new / disk.GB:.1f} GB of new layers)")


def _copy_to_layout(place: Place, source: str, tag: str, progress: Progress) -> dict[str, Any]:
    """Returns the image's entry in the layout's index."""
    spare = place.layout / "tmp"
    shutil.rmtree(spare, ignore_errors=True)  # what a killed copy left
    spare.mkdir()
    for torn in place.layout.glob("oci-put-blob*"):
        torn.unlink()
    command = ["skopeo", "--tmpdir", str(spare), "copy", "--quiet", "--dest-oci-accept-uncompressed-layers",
               source, f"oci:{place.layout}:{tag}"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            said = _await(process, progress, "reading layers from buildah's storage")
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise ClusterError(f"skopeo could not copy {source}: {said}")
    _drop_untagged(place.layout)
    return next(e for e in _index(place.layout) if e["annotations"][TAG] == tag)


def _import(place: Place, entry: Mapping[str, Any], missing: list[str], progress: Progress) -> None:
    """Stream an archive of the index and the missing blobs into containerd, which then unpacks new layers."""
    command = ["ctr", "--address", str(place.containerd_socket), "--namespace", "k8s.io", "images", "import", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stdin
        try:
            _write_archive(process.stdin, place.layout, entry, missing, progress)
            said = _await(process, progress, "unpacking")
        except BrokenPipeError:
            said = _await(process, progress, "unpacking")
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise ClusterError(f"containerd did not take the image: {said}")


def _await(process: subprocess.Popen[bytes], progress: Progress, doing: str) -> str:
    """Wait for the process to end, showing what it is doing; returns what it said on standard error."""
    while True:
        try:
            return process.communicate(timeout=0.5)[1].decode().strip()
        except subprocess.TimeoutExpired:
            progress.update(doing)


def _write_archive(
    pipe: IO[bytes], layout: Path, entry: Mapping[str, Any], missing: list[str], progress: Progress
) -> None:
    index = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    with tarfile.open(fileobj=pipe, mode="w|", bufsize=1 << 20) as tar:
        _add(tar, "oci-layout", (layout / "oci-layout").read_bytes())
        _add(tar, "index.json", index)
        for number, digest in enumerate(missing, 1):
            progress.update(f"moving blob {number} of {len(missing)}")
            tar.add(_blob(layout, digest), str(_blob(layout, digest).relative_to(layout)))


def _share_blobs(place: Place, digests: Iterable[str]) -> None:
    """Keep one copy on disk: the layout's blobs become hard links to containerd's."""
    content = place.containerd / "io.containerd.content.v1.content" / "blobs"
    for digest in digests:
        spare = _blob(place.layout, digest).with_suffix(".link")
        spare.unlink(missing_ok=True)
        os.link(content / digest.replace(":", "/"), spare)
        spare.replace(_blob(place.layout, digest))


def _forget_unused(place: Place) -> None:
    """Drop what only older builds used, in the layout and in containerd."""
    used = {digest.split(":")[1] for entry in _index(place.layout) for digest in _blobs_of(place.layout, entry)}
    for path in (place.layout / "blobs" / "sha256").iterdir():
        if path.name not in used:
            path.unlink()
    # the CRI plugin also names each image by its ID, and that name would keep a rebuilt image's content for ever
    images = [line.split() for line in ctr(place, "images", "ls").splitlines()[1:]]
    named = {digest for reference, _, digest, *_ in images if not reference.startswith("sha256:")}
    stale = [ref for ref, _, digest, *_ in images if ref.startswith("sha256:") and digest not in named]
    if stale:
        ctr(place, "images", "rm", "--sync", *stale)
