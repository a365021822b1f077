"""Requests come and go and policies change, in any order, in engines of any shape: no text does, no block is lost, and
no draft reads what is not its text's.

A failure names its seed. `OUTRIDER_SEED=7` asks for other events than those of every day.
"""

from __future__ import annotations

import os

import pytest
from tests.runtime.losslessness.events import happenings
from tests.runtime.losslessness.shadow import Shadow
from tests.runtime.methods import METHODS

SEED = os.environ.get("OUTRIDER_SEED", "0")
STEPS = 10_000  # of all methods together


@pytest.mark.parametrize("method", METHODS)
def test_no_order_of_events_changes_a_text_loses_a_block_or_spoils_what_a_draft_reads(method):
    shadow, steps, number = Shadow(method), 0, 0
    while steps < STEPS / len(METHODS):
        steps += happenings(f"{SEED}.{number}", method, shadow)
        number += 1
