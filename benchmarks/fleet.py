"""A simulated fleet under changing load: Outrider's decisions beside a rule like the HPA's and an oracle's.

    python benchmarks/fleet.py [--seed 0]

Pods are the simulator of tests/fleet, a queueing model on a cost table; decisions are the operator's own `plan`, status
and memory included, on what those pods answer. Time is simulated and arrivals are seeded, so a run repeats exactly.
Writes benchmarks/results/fleet.json and prints a table. Exit code 1 when a limit is not held.

Goodput counts the tokens of requests that waited at most 5 s and then got at least 12 tokens a second. The oracle
knows the load and what is to come: its replicas are ready when they are needed, and its pods always draft what pays.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "operator"), str(ROOT / "runtime")]

from tests.fleet import loads  # noqa: E402
from tests.fleet.costs import Costs  # noqa: E402
from tests.fleet.drivers import EVERY, Driver, Hpa, Oracle, Outrider  # noqa: E402
from tests.fleet.pod import Pod  # noqa: E402
from tests.fleet.simulation import PACE, PROMPT, WARM, Result, run  # noqa: E402

from outrider_operator.api.v1alpha1 import SpeculativeModelSpec  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMITS = {"goodput_of_oracle": 0.9, "oscillations": 0, "runaways": 0, "resaturations": 0}
STARTS_IN = 90.0  # seconds that a pod takes to load its model
SPEC: dict[str, Any] = {
    "model": {"uri": "hf://meta-llama/Llama-3.1-8B-Instruct"},
    "speculativeDecoding": {
        "draft": {"uri": "hf://meta-llama/Llama-3.2-1B-Instruct"},
        "saturation": {"disableAtConcurrency": 16, "enableAtConcurrency": 12},
    },
    "autoscaling": {"minReplicas": 1, "maxReplicas": 8, "targetConcurrency": 10},
}


def drivers(load: loads.Load, spec: SpeculativeModelSpec) -> Iterator[tuple[str, Driver]]:
    """The oracle first: the others are measured by it."""
    scaling, pod = spec.autoscaling, Pod()
    assert scaling is not None
    yield "oracle", Oracle(scaling, load, pod.costs, pod.acceptance, spec.speculative_decoding.num_speculative_tokens)
    yield "outrider", Outrider(SPEC)
    yield "hpa", Hpa(scaling)


def row(name: str, policy: str, result: Result, goodput: float, spec: SpeculativeModelSpec) -> dict[str, Any]:
    assert spec.autoscaling is not None
    window = spec.speculative_decoding.saturation.stabilization_window_seconds
    return {
        "load": name,
        "policy": policy,
        "goodput_of_oracle": round(result.goodput / goodput, 3),
        "goodput_tokens_per_second": round(result.goodput, 1),
        "toggles": len(result.toggles),
        "scale_steps": len(result.scale_steps),
        "p99_queue_seconds": round(result.p99_queue_seconds, 2),
        "active_seconds": result.seconds_in("Active"),
        "suspended_seconds": result.seconds_in("Suspended"),
        "replica_hours": round(result.pod_seconds / 3600, 2),
        "most_replicas": max(moment.replicas for moment in result.moments),
        "requests": len(result.requests),
        "turned_away": result.turned_away,
        "oscillations": len(result.oscillations(window)),
        "runaways": len(result.runaways(spec.autoscaling.target_concurrency)),
        "resaturations": len(result.resaturations()),
    }


SHOWN = {
    "load": "load",
    "policy": "policy",
    "goodput_of_oracle": "goodput",
    "toggles": "toggles",
    "scale_steps": "steps",
    "p99_queue_seconds": "p99 queue s",
    "active_seconds": "active s",
    "suspended_seconds": "suspended s",
    "replica_hours": "replica h",
    "turned_away": "turned away",
}


def show(cells: list[str]) -> None:
    print("  ".join(f"{cell:>11}" for cell in cells), flush=True)


def broken(rows: list[dict[str, Any]]) -> list[str]:
    """What does not hold, in words."""
    ours = [each for each in rows if each["policy"] == "outrider"]
    found = [f"{r['load']}: {r['goodput_of_oracle']} of the oracle's goodput" for r in ours if not _enough(r)]
    names = ("oscillations", "runaways", "resaturations")
    return found + [f"{r['load']}: {r[name]} {name}" for r in ours for name in names if r[name] > LIMITS[name]]


def _enough(row: dict[str, Any]) -> bool:
    return bool(row["goodput_of_oracle"] >= LIMITS["goodput_of_oracle"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "fleet.json")
    arguments = parser.parse_args()
    spec, rows = SpeculativeModelSpec.model_validate(SPEC), []
    show(list(SHOWN.values()))
    for make in loads.ALL:
        load, goodput = make(), 0.0
        for policy, driver in drivers(load, spec):
            result = run(load, driver, starts_in=STARTS_IN, seed=arguments.seed)
            goodput = goodput or result.goodput
            rows.append(row(load.name, policy, result, goodput, spec))
            show([str(rows[-1][name]) for name in SHOWN])
    pod = Pod()
    settings = {
        "spec": SPEC,
        "seed": arguments.seed,
        "starts_in_seconds": STARTS_IN,
        "look_every_seconds": EVERY,
        "costs_seconds": asdict(pod.costs),
        "break_even_concurrency": Costs().break_even(4, pod.acceptance),
        "acceptance_per_position": pod.acceptance,
        "max_running": pod.max_running,
        "max_waiting": pod.max_waiting,
        "good": {"queue_seconds": PROMPT, "seconds_per_token": round(PACE, 4), "after_seconds": WARM},
    }
    versions = {"python": platform.python_version(), "pydantic": version("pydantic")}
    result_file = {"rows": rows, "limits": LIMITS, "settings": settings, "versions": versions}
    arguments.output.write_text(json.dumps(result_file, indent=2) + "\n")
    failures = broken(rows)
    for failure in failures:
        print(f"not held: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
