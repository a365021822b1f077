"""Where things live."""

from __future__ import annotations

from pathlib import Path

import pytest
from localcluster.errors import ClusterError
from localcluster.paths import Home, Place


def test_home_is_the_users_cache_unless_outrider_home_says_otherwise(tmp_path: Path) -> None:
    assert Home.of({}).root == Path("~/.cache/outrider").expanduser().resolve()
    assert Home.of({"OUTRIDER_HOME": ""}).root == Home.of({}).root
    assert Home.of({"OUTRIDER_HOME": str(tmp_path)}).root == tmp_path.resolve()


@pytest.mark.parametrize("name", ["", "A", "a/b", "..", "-a", "a-", "a" * 21, "a b"])
def test_a_name_that_is_no_plain_word_is_refused(name: str) -> None:
    with pytest.raises(ClusterError, match="cluster name"):
        Place.of(Home(Path("/h")), name)


def test_a_home_too_long_for_sockets_is_refused_before_anything_fails_on_it() -> None:
    with pytest.raises(ClusterError, match="OUTRIDER_HOME is too long"):
        Place.of(Home(Path("/" + "h" * 100)), "default")
    assert Place.of(Home(Path("/" + "h" * 50)), "default").name == "default"


def test_the_lock_is_outside_the_folder_that_purge_removes() -> None:
    place = Place.of(Home(Path("/h")), "default")
    assert place.root not in place.lock.parents
