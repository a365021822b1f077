"""Taking turns."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from localcluster import locks
from localcluster.api import poll


def test_the_second_waits_and_is_told_so_until_the_first_is_done(tmp_path: Path) -> None:
    path, order, waits = tmp_path / "made" / "lock", [], []

    def second() -> None:
        with locks.hold(path, lambda: waits.append(1)):
            order.append("second")

    thread = threading.Thread(target=second)
    with locks.hold(path):
        thread.start()
        assert poll(lambda: bool(waits), 60)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]


def test_a_killed_holder_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    program = (
        "import sys, pathlib; from localcluster import locks\n"
        "with locks.hold(pathlib.Path(sys.argv[1])):\n    print(flush=True); sys.stdin.read()"
    )
    source = str(Path(locks.__file__).parent.parent)
    with subprocess.Popen(
        [sys.executable, "-c", program, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PYTHONPATH": source}
    ) as holder:
        assert holder.stdout
        holder.stdout.readline()
        assert locks.is_held(path)
        holder.kill()
    assert not locks.is_held(path)


def test_a_folder_can_be_held_too_and_a_path_that_is_not_there_is_free(tmp_path: Path) -> None:
    assert not locks.is_held(tmp_path / "nothing")
    with locks.hold(tmp_path):
        assert locks.is_held(tmp_path)


def test_a_lock_deleted_by_its_holder_is_still_one_at_a_time(tmp_path: Path) -> None:
    path, inside, most = tmp_path / "lock", [], []

    def take() -> None:
        for _ in range(5):
            with locks.hold(path):
                inside.append(1)
                most.append(len(inside))
                inside.pop()
                path.unlink()  # gives it up: from here on the next one may be in

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1] * 15
    assert not path.exists()
