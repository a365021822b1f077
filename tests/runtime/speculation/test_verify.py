"""Drafts stand while they are the target's own tokens."""

from __future__ import annotations

import pytest

from outrider_runtime.speculation.verify import walk


@pytest.mark.parametrize(
    ("drafted", "target", "accepted"),
    [
        ([], [7], 0),
        ([7], [7, 8], 1),
        ([6], [7, 8], 0),
        ([7, 8, 9], [7, 8, 9, 1], 3),
        ([7, 0, 9], [7, 8, 9, 1], 1),  # one behind a refused draft does not stand, equal or not
    ],
)
def test_accepted_are(drafted, target, accepted):
    assert walk(drafted, target) == accepted
