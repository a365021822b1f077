"""The short memory of measurements: samples are appended, old ones dropped, and pods that left are told apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from outrider_operator.api.v1alpha1 import SpeculativeModelSpec
from outrider_operator.fleet.samples import Fleet, Sample
from outrider_operator.fleet.windows import PERIOD, periods

LOAD_WINDOW = 30.0  # seconds over which load is averaged on the way up
REPORT_WINDOW = 60.0  # seconds over which status and acceptance are averaged

_FINE = 3600.0  # seconds in which every sample is kept; older ones are thinned, which their integrals survive
_COARSE = 60.0  # seconds between thinned samples


def window(spec: SpeculativeModelSpec) -> float:
    """The longest window, in seconds and whole periods, that any decision about this model looks at."""
    saturation = spec.speculative_decoding.saturation.stabilization_window_seconds
    down = spec.autoscaling.scale_down_window_seconds if spec.autoscaling else 0
    return PERIOD * periods(max(LOAD_WINDOW, REPORT_WINDOW, saturation, down))


def remember(fleet: Fleet, samples: Mapping[str, Sample], now: float, keep: float) -> Fleet:
    """The fleet after one more round of reading its ready pods.

    `samples` holds one sample of each pod that is ready now; `keep` is in seconds, see `window`. Pods not in it move
    to `gone` and are forgotten once all they said is older than that.
    """
    since = now - keep
    past = {**fleet.gone, **fleet.samples}
    ready = {name: _kept((*past.pop(name, ()), sample), since, now) for name, sample in samples.items()}
    gone = {name: _kept(those, since, now) for name, those in past.items() if those and those[-1].at >= since}
    return Fleet(samples=ready, gone=gone)


def is_still(fleet: Fleet) -> bool:
    """Whether the last round found every ready pod as the round before did: nothing ran, and nothing else changed."""
    return all(len(those) > 1 and _same(those[-2], those[-1]) for those in fleet.samples.values())


def _same(before: Sample, after: Sample) -> bool:
    if before.answer is None or after.answer is None:
        return before.answer is after.answer and before.error == after.error
    uptime = after.answer.counters.uptime_seconds
    if uptime < before.answer.counters.uptime_seconds:
        return False
    counters = replace(before.answer.counters, uptime_seconds=uptime)
    return replace(before.answer, counters=counters) == after.answer


def _kept(samples: tuple[Sample, ...], since: float, now: float) -> tuple[Sample, ...]:
    """Drop what is older than the window, but for one sample: the interval it opens reaches into the window."""
    first = 0
    while first + 1 < len(samples) and samples[first + 1].at <= since:
        first += 1
    samples = samples[first:]
    if samples[0].at >= now - _FINE - _COARSE:
        return samples
    kept = [samples[0]]
    for sample, following in pairwise(samples[1:]):
        if sample.at > now - _FINE or following.at - kept[-1].at > _COARSE or sample.answer is None:
            kept.append(sample)
    return (*kept, samples[-1]) if len(samples) > 1 else samples
