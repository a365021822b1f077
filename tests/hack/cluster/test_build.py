"""Compiling once per content, one at a time. `go` is a script here: the real one takes minutes."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from localcluster import build
from localcluster.errors import NotBuilt
from localcluster.paths import Home

GO = """#!/bin/sh
echo "$@" >> "$GOCACHE/../calls"
case "$1 $2" in
"list -m") echo v1.34.4 ;;
"list "*) printf 'false\\ntrue\\ntrue\\n' ;;
"build "*)
    echo k8s.io/kubernetes/pkg >&2
    if [ -e "$GOCACHE/../broken" ]; then echo "./main.go:9: undefined: x" >&2; exit 1; fi
    while [ "$1" != -o ]; do shift; done
    echo "$GOFLAGS $GOMODCACHE" > "$2" ;;
esac
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home with nothing built, and a `go` that notes its calls."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "go").write_text(GO)
    (tools / "go").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("GOFLAGS", "-race")
    monkeypatch.setattr(build, "SPACE_FROM_NOTHING", 0)
    monkeypatch.setattr(build, "SPACE_CACHED", 0)
    return Home(tmp_path / "home")


def calls(home: Home) -> list[str]:
    path = home.root / "go" / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_all_programs_are_links_to_one_binary_beside_the_pause_program(home: Home) -> None:
    folder = build.ensure(home)
    assert {path.name for path in folder.iterdir()} == {"kube", "pause", *build.PROGRAMS}
    assert (folder / "kubectl").resolve() == folder / "kube"


def test_what_is_built_is_not_built_again(home: Home) -> None:
    build.ensure(home)
    before = calls(home)
    build.ensure(home)
    assert calls(home) == before


def test_the_caches_are_the_homes_and_the_users_flags_do_not_spoil_them(home: Home) -> None:
    assert (build.ensure(home) / "kube").read_text() == f"-mod=readonly {home.go_mod}\n"


def test_two_at_once_compile_once(home: Home) -> None:
    threads = [threading.Thread(target=build.ensure, args=(home,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len([call for call in calls(home) if call.startswith("build")]) == 2, "pause and kube"
    assert build.binaries(home).exists()


def test_a_compile_error_is_shown_and_leaves_nothing_half_built(home: Home) -> None:
    (home.root / "go").mkdir(parents=True)
    (home.root / "go" / "broken").touch()
    with pytest.raises(NotBuilt, match="undefined: x"):
        build.ensure(home)
    assert not [path for path in home.bin.iterdir() if path.is_dir()]


def test_without_go_it_says_what_to_install(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(NotBuilt, match=r"Go is missing.*install Go 1\.24"):
        build.ensure(home)


def test_too_little_disk_is_said_before_compiling(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SPACE_FROM_NOTHING", 10**18)
    with pytest.raises(NotBuilt, match="too little disk: compiling needs"):
        build.ensure(home)
    assert not calls(home)


def older(home: Home, name: str, hours: float) -> Path:
    """A folder of other sources, last used so many hours ago."""
    folder = home.bin / name
    folder.mkdir(parents=True)
    shutil.copy("/bin/sleep", folder / "kube")
    then = time.time() - hours * 3600
    os.utime(folder, (then, then))
    return folder


@contextmanager
def running(program: Path) -> Iterator[None]:
    with subprocess.Popen([program, "600"]) as process:
        yield
        process.kill()


def test_a_new_build_removes_old_ones_but_those_that_run_or_were_used_today(home: Home) -> None:
    old, used, recent = older(home, "a" * 12, 25), older(home, "b" * 12, 25), older(home, "c" * 12, 23)
    (home.bin / "build.log").touch()
    with running(used / "kube"):
        new = build.ensure(home)
    assert {path for path in home.bin.iterdir() if path.is_dir()} == {used, recent, new}
    assert not old.exists()
    assert (home.bin / "build.log").exists()


def test_a_build_that_is_asked_for_again_counts_as_used(home: Home) -> None:
    folder = build.ensure(home)
    os.utime(folder, (0, 0))
    build.ensure(home)
    assert time.time() - folder.stat().st_mtime < build.OLD


def test_another_content_has_another_folder(tmp_path: Path) -> None:
    (tmp_path / "a.go").write_text("package a")
    first = build.content_hash(tmp_path)
    assert build.content_hash(tmp_path) == first
    (tmp_path / "a.go").write_text("package b")
    assert build.content_hash(tmp_path) != first


def test_the_server_is_stamped_with_its_version() -> None:
    flags = build._linker_flags("v1.34.4")
    assert "version.gitVersion=v1.34.4" in flags
    assert "version.gitMajor=1 " in flags
    assert "version.gitMinor=34 " in flags
