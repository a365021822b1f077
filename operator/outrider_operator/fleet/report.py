"""What the fleet is doing, in the numbers of status: means over the last minute of the pods that can be measured."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_operator.api.reasons import SpeculationState
from outrider_operator.fleet.breakeven import break_even
from outrider_operator.fleet.history import REPORT_WINDOW
from outrider_operator.fleet.samples import Answer
from outrider_operator.fleet.windows import View


@dataclass(frozen=True, slots=True)
class Report:
    """None is what nobody can say: nothing measured, nothing generated, or nothing drafted."""

    running: float | None  # mean running requests per ready pod
    effective_tokens: float | None  # mean tokens drafted per request and step
    acceptance: float | None  # accepted of the drafted tokens, 0 to 1
    accepted_length: float | None  # tokens per verification, the target's own included
    speedup: float | None  # tokens per second now over plain decoding, of the pods that may draft
    break_even: int | None  # running requests at which drafting no longer pays
    answers: tuple[Answer, ...]  # the last of each pod that can be measured, by pod name

    @property
    def traffic(self) -> bool:
        return self.effective_tokens is not None


def report(view: View) -> Report:
    since = view.end - REPORT_WINDOW
    found = [[i for i in track.intervals if i.start >= since] for track in view.tracks.values()]
    everything = [interval for those in found for interval in those]
    running = [
        sum(i.running * (i.end - i.start) for i in those) / sum(i.end - i.start for i in those)
        for those in found
        if those
    ]
    drafts = sum(i.drafts for i in everything)
    drafted = sum(i.draft_tokens for i in everything)
    accepted = sum(i.accepted_tokens for i in everything)
    generated = sum(i.generated_tokens for i in everything)
    steps = max(generated - accepted, drafts)  # each step of a request gives one token of the target's own
    answers = tuple(answer for _, answer in sorted(view.fresh.items()))
    # a pod that is told to draft may not know it yet, and what it said before is of plain decoding
    speedups = [a.speedup for a in answers if a.speedup is not None and a.state == SpeculationState.ACTIVE]
    even = break_even(view)
    return Report(
        running=sum(running) / len(running) if running else None,
        effective_tokens=drafted / steps if generated and steps else None,
        acceptance=min(1.0, accepted / drafted) if drafted else None,
        accepted_length=(accepted + drafts) / drafts if drafts else None,
        speedup=sum(speedups) / len(speedups) if speedups else None,
        break_even=None if even is None else int(even),
        answers=answers,
    )
