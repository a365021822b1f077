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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import disk, locks
from .errors import NotBuilt
from .paths import SOURCES, Home
from .progress import Progress, bar

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy",
            "kubectl", "coredns")  # fmt: skip
SPACE_FROM_NOTHING, SPACE_CACHED = 8 * disk.GB, 1 * disk.GB  # modules 3.3, build cache 3.3, temporary files 1
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
        return folder
    progress = Progress("cluster build")
    go = _go()
    cached = (home.go_build / "00").exists()
    disk.require(home.root, SPACE_CACHED if cached else SPACE_FROM_NOTHING, "compiling", NotBuilt)
    with locks.hold(_lock(home), lambda: progress.update(f"another is at it, {_shared(home)}")):
        if not folder.exists():
            _compile(home, go, folder, progress)
    return folder


def in_background(home: Home, command: list[str]) -> str:
    """Start `command` (a `cluster build`) detached from this process; says in a line what is going on."""
    log = home.bin / "build.log"
    if binaries(home).exists():
        return "cluster build: nothing to do"
    if locks.is_held(_lock(home)):
        return f"cluster build: already running, {_shared(home)}; its log is {log}"
    _go()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    (home.bin / "build.pid").write_text(f"{process.pid}\n")
    return f"cluster build: started in the background, pid {process.pid}; its log is {log}"


def _lock(home: Home) -> Path:
    return home.bin / ".build.lock"


def _shared(home: Home) -> str:
    """What the process that holds the lock last said of its progress."""
    try:
        return (home.bin / ".build.progress").read_text()
    except FileNotFoundError:
        return "starting"


def _go() -> str:
    found = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if not found:
        raise NotBuilt(
            "Go is missing: the components are compiled with it; install Go 1.24 or newer and have `go` on PATH"
        )
    return found


def _environment(home: Home) -> Mapping[str, str]:
    # the user's own flags would make another cache key of each package
    settings = {
        "GOCACHE": str(home.go_build),
        "GOMODCACHE": str(home.go_mod),
        "CGO_ENABLED": "0",
        "GOFLAGS": "-mod=readonly",
    }
    return {**os.environ, **settings}


def _compile(home: Home, go: str, folder: Path, progress: Progress) -> None:
    environment = _environment(home)
    for cache in (home.go_build, home.go_mod, home.bin):
        cache.mkdir(parents=True, exist_ok=True)
    progress.say("reading modules (they are downloaded the first time)")
    version = _output([go, "list", "-m", "-f", "{{.Version}}", "k8s.io/kubernetes"], environment).strip()
    flags = [*_FLAGS, "-ldflags", _linker_flags(version)]
    stale = _output([go, "list", *flags, "-deps", "-f", "{{.Stale}}", "."], environment).split()
    total, done = len(stale), stale.count("false")
    minutes = "about 6 minutes of two free cores" if done < total / 2 else "a minute or so"
    progress.say(f"{total - done} of {total} packages to compile, {minutes}")
    spare = Path(tempfile.mkdtemp(dir=home.bin, prefix=".new-"))
    try:
        for package, name in (("./pause", "pause"), (".", "kube")):
            command = [go, "build", "-v", *flags, "-o", str(spare / name), package]
            done += _run_build(home, command, environment, done, total, progress)
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


def _output(command: list[str], environment: Mapping[str, str]) -> str:
    result = subprocess.run(command, cwd=SOURCES, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise NotBuilt(f"`{' '.join(command[:3])}` failed: {_tail(result.stderr.splitlines())}")
    return result.stdout


def _run_build(
    home: Home, command: list[str], environment: Mapping[str, str], done: int, total: int, progress: Progress
) -> int:
    """Runs `go build -v`, which names each package as it is compiled; returns how many there were."""
    compiled, said = 0, []
    # should this process be killed, the compiler must not go on beside the next one
    command = ["setpriv", "--pdeathsig", "TERM", *command]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=SOURCES, env=environment, text=True, **pipes) as process:
        assert process.stderr
        try:
            for line in process.stderr:
                if line.startswith(("#", "\t")) or ": " in line:
                    said.append(line.rstrip())
                else:
                    compiled += 1
                state = f"{bar(done + compiled, total)} {done + compiled} of {total} packages"
                if line.startswith("go: downloading"):
                    state = line.removeprefix("go: ").strip()
                (home.bin / ".build.progress").write_text(state)
                progress.update(state)
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise NotBuilt(f"compiling failed: {_tail(said)}")
    return compiled


def _tail(lines: list[str]) -> str:
    return " / ".join(line.strip() for line in lines[-5:] if line.strip()) or "it said nothing"
