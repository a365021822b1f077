"""Compiles the components, once per content of hack/cluster/go: minutes the first time, nothing after that.

Nobody ships a kube-apiserver as a package, so all of them are compiled from Go modules, into one binary that
looks at the name it is called by.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from . import disk, locks, toolchain
from .errors import NotBuilt
from .paths import SOURCES, Home
from .progress import Progress, bar
from .toolchain import Go

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy",
            "kubectl", "coredns")  # fmt: skip
SPACE_FROM_NOTHING, SPACE_CACHED = 8 * disk.GB, 1 * disk.GB  # modules 3.3, build cache 3.3, temporary files 1
OLD = 24 * 3600  # seconds: a checkout that is worked in uses its folder more often
_FLAGS = ("-trimpath", "-buildvcs=false")


def content_hash(sources: Path = SOURCES) -> str:
    """Twelve hex digits over the names and contents of all files of the Go module."""
    digest = hashlib.sha256()
    for path in sorted(p for p in sources.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(sources)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def binaries(home: Home) -> Path:
    """The folder that holds, or will hold, the programs of this checkout's sources."""
    return home.bin / content_hash()


def ensure(home: Home) -> Path:
    """The folder of the programs, compiled first if they are not; waits for a compilation that is running.

    Raises NotBuilt when it cannot be done here.
    """
    folder = binaries(home)
    if folder.exists():
        os.utime(folder)
        return folder
    progress = Progress("cluster build")
    go = toolchain.find()
    cached = (home.go_build / "00").exists()
    disk.require(home.root, SPACE_CACHED if cached else SPACE_FROM_NOTHING, "compiling", NotBuilt)
    with locks.hold(_lock(home), lambda: progress.update(f"another is at it, {_shared(home)}")):
        if not folder.exists():
            _compile(home, go, folder, progress)
            for old in _unused(home):
                doomed = old.rename(old.with_name(f".new-{old.name}"))  # a torn one must not pass for a whole one
                shutil.rmtree(doomed)
    return folder


def in_background(home: Home, command: list[str]) -> str:
    """Start `command` (a `cluster build`) detached from this process; says in a line what is going on."""
    log = home.bin / "build.log"
    if binaries(home).exists():
        return "cluster build: nothing to do"
    if locks.is_held(_lock(home)):
        return f"cluster build: already running, {_shared(home)}; its log is {log}"
    toolchain.find()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    (home.bin / "build.pid").write_text(f"{process.pid}\n")
    return f"cluster build: started in the background, pid {process.pid}; its log is {log}"


def _unused(home: Home) -> Iterator[Path]:
    """Folders of other sources (145 MB each) that nobody asked for in a day and no process runs from."""
    running = {_folder_of(entry) for entry in Path("/proc").glob("[0-9]*")}
    for folder in home.bin.glob("[0-9a-f]" * 12):
        if folder not in running and time.time() - folder.stat().st_mtime > OLD:
            yield folder


def _folder_of(process: Path) -> Path | None:
    """Where a process's program lies; `process` is its folder in /proc."""
    try:
        return (process / "exe").readlink().parent
    except OSError:  # ended meanwhile, a kernel thread, or another user's
        return None


def _lock(home: Home) -> Path:
    return home.bin / ".build.lock"


def _shared(home: Home) -> str:
    """What the process that holds the lock last said of its progress."""
    try:
        return (home.bin / ".build.progress").read_text()
    except FileNotFoundError:
        return "starting"


def _compile(home: Home, program: str, folder: Path, progress: Progress) -> None:
    def show(state: str) -> None:
        (home.bin / ".build.progress").write_text(state)
        progress.update(state)

    for cache in (home.go_build, home.go_mod):
        cache.mkdir(parents=True, exist_ok=True)
    for torn in home.bin.glob(".new-*"):  # a killed build's: nobody else holds the lock
        shutil.rmtree(torn)
    go = Go(program, home, show)
    [version] = go.query("-m", "-f", "{{.Version}}", "k8s.io/kubernetes")
    flags = [*_FLAGS, "-ldflags", _linker_flags(version)]
    stale = go.query(*flags, "-deps", "-f", "{{.Stale}}", ".")
    total, done = len(stale), stale.count("false")
    minutes = "about 6 minutes of two free cores" if done < total / 2 else "a minute or so"
    progress.say(f"{total - done} of {total} packages to compile, {minutes}")
    spare = Path(tempfile.mkdtemp(dir=home.bin, prefix=".new-"))
    try:
        for package, name in (("./pause", "pause"), (".", "kube")):

            def state(compiled: int, before: int = done) -> str:
                count = min(before + compiled, total)
                return f"{bar(count, total)} {count} of {total} packages" + (", linking" if count == total else "")

            done += go.build(*flags, "-o", str(spare / name), package, state=state)
        for name in PROGRAMS:
            (spare / name).symlink_to("kube")
        spare.chmod(0o755)
        spare.rename(folder)
    finally:
        shutil.rmtree(spare, ignore_errors=True)
    progress.done(f"{folder / 'kube'} ({(folder / 'kube').stat().st_size / 1e6:.0f} MB)")


def _linker_flags(version: str) -> str:
    """Without the stamps the server calls itself v0.0.0-master and its clients' version checks go wrong."""
    major, minor, _ = version.lstrip("v").split(".", 2)
    stamps = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return "-s -w " + " ".join(f"-X k8s.io/component-base/version.{k}={v}" for k, v in stamps.items())
