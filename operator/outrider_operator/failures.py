"""Why a pod does not serve, in the words a user searches for. The container's own last words come first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outrider_operator.api.reasons import Reason
from outrider_operator.observe import Pod

# exit code of a runtime that refuses to start, and the reason it gives (tests/contract/termination.json)
EXIT_CODES = {
    64: Reason.UNSUPPORTED_PARALLELISM,
    65: Reason.UNSUPPORTED_MODEL,
    66: Reason.MODEL_NOT_FOUND,
    70: Reason.OUT_OF_MEMORY,
    71: Reason.DOES_NOT_FIT,
    73: Reason.OUT_OF_SPACE,
    76: Reason.TOKENIZER_MISMATCH,
    77: Reason.UNAUTHORIZED,
    78: Reason.DRAFT_UNAVAILABLE,
}

_PULL = {
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
    "SignatureValidationFailed",
}
_CONFIG = {"CreateContainerConfigError", "CreateContainerError"}
_BACK_OFF = re.compile(r'^Back-off pulling image "[^"]*": (ErrImagePull: )?')
_SECRET = re.compile(r"secret", re.IGNORECASE)
_UNBOUND = re.compile(r"unbound immediate PersistentVolumeClaims")
_GPU = re.compile(r"Insufficient (nvidia\.com/\S+|\S*gpu\S*)", re.IGNORECASE)
_DEVICE = re.compile(r"nvidia\.com/|gpu", re.IGNORECASE)
_HABIT = 2  # pods turned away
_WORDS = re.compile(r"^(?P<reason>[A-Z][A-Za-z]+): (?P<message>.+)$", re.DOTALL)
_LONGEST = 500  # characters of somebody else's message


@dataclass(frozen=True, slots=True)
class Failure:
    reason: Reason
    message: str
    pod: str  # empty where none could be created


def failure(pods: Iterable[Pod]) -> Failure | None:
    """What keeps these pods from serving: the failure nearest to its cause, then the first pod's by name.

    None while all are ready or on their way, so that a reason goes when its pod recovers.
    """
    found = [found for pod in pods if (found := pod_failure(pod)) is not None]
    return min(found, key=lambda each: (_ORDER.index(each.reason), each.pod), default=None)


def awaits_volume(pod: Pod, since: str) -> bool:
    """Whether it waits for the volume of a claim, as every pod of a new claim does for a moment where volumes are made
    at once. `since` is a time from which a pod is so new that this explains nothing."""
    return bool(_UNBOUND.search(pod.unschedulable)) and pod.created >= since


def turned_away(pods: Iterable[Pod], replicas: int, since: str) -> Failure | None:
    """Why nodes turn away the pods that they were given, before anything of them runs: each is replaced at once, and
    none lives to tell. `since` is a time from which one may have been an accident and several are a habit."""
    every = sorted((pod for pod in pods if not pod.deleting), key=lambda pod: pod.name)
    taken = [p for p in every if p.phase == "Running" or (p.phase == "Pending" and p.waiting_reason)]
    refused = [p for p in every if p.phase == "Failed" and p.exit_code is None and p.termination_reason]
    if len(taken) >= replicas or len([pod for pod in refused if pod.created >= since]) < _HABIT:
        return None
    words = f"{refused[0].termination_reason}: {refused[0].termination_message}"
    reason = Reason.INSUFFICIENT_GPU if _DEVICE.search(words) else Reason.UNSCHEDULABLE
    return Failure(reason, _short(f"nodes turn away pod after pod: {words}"), "")


def pod_failure(pod: Pod) -> Failure | None:
    if pod.ready or pod.deleting or pod.phase in ("Failed", "Succeeded"):
        return None  # a pod that ended is replaced by its ReplicaSet; the new one says what is wrong
    for judge in _CHAIN:
        verdict = judge(pod)
        if verdict is not None:
            reason, message = verdict
            return Failure(reason, _short(message), pod.name)
    return None


Verdict = tuple[Reason, str]


def _unscheduled(pod: Pod) -> Verdict | None:
    if not pod.unschedulable:
        return None
    reason = Reason.INSUFFICIENT_GPU if _GPU.search(pod.unschedulable) else Reason.UNSCHEDULABLE
    return reason, pod.unschedulable


def _unpulled(pod: Pod) -> Verdict | None:
    if pod.waiting_reason not in _PULL:
        return None
    # kubelet alternates between the error and a back-off that quotes it; both are one failure with one message
    return Reason.IMAGE_PULL_FAILED, _BACK_OFF.sub("", pod.waiting_message) or pod.waiting_reason


def _unconfigured(pod: Pod) -> Verdict | None:
    if pod.waiting_reason not in _CONFIG:
        return None
    if _SECRET.search(pod.waiting_message):
        return Reason.MISSING_SECRET, pod.waiting_message
    return Reason.CRASH_LOOPING, f"the container cannot be created: {pod.waiting_message or pod.waiting_reason}"


def _own_words(pod: Pod) -> Verdict | None:
    """What the runtime wrote before it exited: `Reason: message`, believed when the exit code says the same."""
    known = EXIT_CODES.get(pod.exit_code) if pod.exit_code is not None else None
    if known is None:
        return None
    words = _WORDS.match(pod.termination_message.strip())
    if words is None or words["reason"] != known:
        return None
    return known, words["message"]


def _out_of_memory(pod: Pod) -> Verdict | None:
    if pod.termination_reason != "OOMKilled":
        return None
    return Reason.OUT_OF_MEMORY, "the container was killed for memory; raise resources.limits.memory"


def _crashed(pod: Pod) -> Verdict | None:
    # one restart may be a node's reboot; two, or kubelet's own word for it, are a habit
    if pod.waiting_reason != "CrashLoopBackOff" and pod.restarts < 2:
        return None
    code = "" if pod.exit_code is None else f" with code {pod.exit_code}"
    last = pod.termination_message.strip().splitlines()
    return Reason.CRASH_LOOPING, f"the container exits{code}{': ' + last[-1] if last else ''}"


_CHAIN: tuple[Callable[[Pod], Verdict | None], ...] = (
    _unscheduled,
    _unpulled,
    _unconfigured,
    _own_words,
    _out_of_memory,
    _crashed,
)

# of several pods' failures the one to show: what the runtime itself says tells most, waiting for room least
_ORDER = (
    *EXIT_CODES.values(),
    Reason.MISSING_SECRET,
    Reason.IMAGE_PULL_FAILED,
    Reason.CRASH_LOOPING,
    Reason.INSUFFICIENT_GPU,
    Reason.UNSCHEDULABLE,
)
FAILURES = frozenset((*_ORDER, Reason.APPLY_FAILED))  # the last where no pod can be created


def _short(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
