"""Every word of the API that is not a field: condition types, reasons, states, event reasons. Once, as enums.

What stands under a member is its meaning in the API reference.
"""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    READY = "Ready"
    """True while the model is served as the spec says: accepted, no pod of an earlier template left, and enough
    replicas available. A suspended object, or one of no replicas, is Ready too, so that waiting for it ends."""
    ACCEPTED = "Accepted"
    """False when the spec asks for what cannot be; the message says what to change. Nothing is touched then, except
    with ApplyFailed, where all is applied that was not refused."""
    MODEL_READY = "ModelReady"
    """True once a replica has loaded the model."""
    DRAFT_READY = "DraftReady"
    """True once the draft is loaded and fits the model, and where none is needed."""
    AVAILABLE = "Available"
    """True while enough replicas answer requests, of whichever template they are."""
    SCALING_ACTIVE = "ScalingActive"
    """True while autoscaling decides the number of replicas."""
    SPECULATION_ACTIVE = "SpeculationActive"
    """True while tokens are really drafted. False says why not, Unknown that nothing was asked of the model."""
    RECONCILING = "Reconciling"
    """Present only while a change of the spec is being carried out."""
    STALLED = "Stalled"
    """Present only while a change of the spec cannot be carried out without somebody's help."""


class Status(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Reason(StrEnum):
    """Why a condition is what it is. A user searches for these words, so they never change meaning."""

    # the way to Ready
    PENDING = "Pending"
    """Not looked at yet, or being created."""
    ACCEPTED = "Accepted"
    """The spec is being served. The message may warn of a combination that is allowed but unusual."""
    READY = "Ready"
    """The model is served."""
    LOADING = "Loading"
    """Pods have started and load weights; the first time they download them."""
    LOADED = "Loaded"
    """The weights are in memory."""
    NOT_REQUIRED = "NotRequired"
    """The method needs no draft model."""
    AVAILABLE = "Available"
    """Enough replicas answer."""
    TOO_FEW_REPLICAS = "TooFewReplicas"
    """Some replicas answer, but fewer than replicas or minReplicas asks for."""
    ROLLING_OUT = "RollingOut"
    """Pods are being replaced by ones of the current template."""
    SUSPENDED = "Suspended"
    """Nothing is to run: spec.suspend is true, or spec.replicas is 0."""

    # refusals and failures
    INVALID_SPEC = "InvalidSpec"
    """The spec does not parse, as one from another version of the API may not. Compare it with this reference."""
    NAME_CONFLICT = "NameConflict"
    """An object of the name that is needed belongs to somebody else and is left alone. Rename either of them."""
    UNSUPPORTED_PARALLELISM = "UnsupportedParallelism"
    """The model cannot be spread over so many GPUs. Lower engine.tensorParallelSize."""
    UNSUPPORTED_MODEL = "UnsupportedModel"
    """The runtime does not know this architecture or weight format."""
    POD_TEMPLATE_REFUSED = "PodTemplateRefused"
    """podTemplate touches what the operator relies on; the message names the path."""
    APPLY_FAILED = "ApplyFailed"
    """The API server refused an object made from the spec, for instance because of a quota or a policy."""
    INSUFFICIENT_GPU = "InsufficientGPU"
    """No node has as many free GPUs as a replica asks for."""
    UNSCHEDULABLE = "Unschedulable"
    """No node takes the pod, for another reason than GPUs: memory, taints, affinity, a volume's zone, or none made for
    a claim within 15 s."""
    IMAGE_PULL_FAILED = "ImagePullFailed"
    """The runtime image cannot be pulled. Check engine.image and imagePullSecrets."""
    MISSING_SECRET = "MissingSecret"
    """A Secret or a key of it that the pod refers to does not exist."""
    UNAUTHORIZED = "Unauthorized"
    """The source refused the token, or wants one. Check model.tokenSecretRef and that its owner was granted access."""
    MODEL_NOT_FOUND = "ModelNotFound"
    """There is nothing, or no complete model, at model.uri or draft.uri."""
    OUT_OF_SPACE = "OutOfSpace"
    """The cache is too small for the weights. Give a larger cache.size or emptyDir.sizeLimit."""
    OUT_OF_MEMORY = "OutOfMemory"
    """The container was killed for memory, or the device ran out of it. Raise resources.limits.memory, or lower
    engine.memoryUtilizationPercent."""
    DOES_NOT_FIT = "DoesNotFit"
    """Weights and the smallest useful KV cache exceed the device's memory. Lower engine.maxModelLength or use more
    or larger GPUs."""
    TOKENIZER_MISMATCH = "TokenizerMismatch"
    """The draft's tokenizer is not the model's. Use a draft of the same family."""
    DRAFT_UNAVAILABLE = "DraftUnavailable"
    """The draft could not be loaded. With mode Auto or Disabled the model is served without it."""
    CRASH_LOOPING = "CrashLooping"
    """The container ends again and again; the message holds its last words."""
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    """A rollout made no progress within rollout.progressDeadlineSeconds."""
    METRICS_UNAVAILABLE = "MetricsUnavailable"
    """Fewer than half of the ready replicas can be measured, so nothing is decided. The message says why."""

    # scaling
    FIXED_REPLICAS = "FixedReplicas"
    """Replicas are as given; there is no autoscaling."""
    SCALING = "Scaling"
    """The number of replicas is changing; the message says why."""
    WITHIN_TARGET = "WithinTarget"
    """The number of replicas fits the load, as far as the bounds let it; the message says so where they do not."""
    REPLICAS_OWNED_ELSEWHERE = "ReplicasOwnedElsewhere"
    """Somebody else writes the Deployment's replicas. Let it scale the SpeculativeModel instead."""

    # speculation
    DRAFTING = "Drafting"
    """Tokens are drafted and verified."""
    NO_GAIN = "NoGain"
    """The runtimes find plain decoding faster at this load and acceptance, for now."""
    NO_TRAFFIC = "NoTraffic"
    """No request ran within the last minute."""
    SATURATED = "Saturated"
    """Batches are too full for speculation to pay; it resumes when they are emptier."""
    LOW_ACCEPTANCE = "LowAcceptance"
    """Fewer drafted tokens were accepted than minAcceptancePercent; it is tried again later."""
    DISABLED_BY_SPEC = "DisabledBySpec"
    """speculativeDecoding.mode is Disabled."""


class SpeculationState(StrEnum):
    """`status.speculativeDecoding.state`; the first three are also the states of a policy."""

    ACTIVE = "Active"
    SUSPENDED = "Suspended"
    DISABLED = "Disabled"
    UNAVAILABLE = "Unavailable"


class EventReason(StrEnum):
    SPECULATION_SUSPENDED = "SpeculationSuspended"
    """Drafting was stopped; the message says whether for load or for acceptance."""
    SPECULATION_RESUMED = "SpeculationResumed"
    """Drafting was started again."""
    SCALED_UP = "ScaledUp"
    """Replicas were added."""
    SCALED_DOWN = "ScaledDown"
    """Replicas were removed."""
    MODEL_LOADED = "ModelLoaded"
    """A replica serves the model."""
    ROLLOUT_STARTED = "RolloutStarted"
    """Pods are being replaced."""
    ROLLOUT_COMPLETE = "RolloutComplete"
    """All pods are of the current template."""
    DRAFT_REJECTED = "DraftRejected"
    """The draft cannot be used."""
    REFUSED = "Refused"
    """The spec cannot be served as it is."""
    POD_FAILED = "PodFailed"
    """A pod does not come up, or fell over."""


WARNINGS = frozenset({EventReason.DRAFT_REJECTED, EventReason.REFUSED, EventReason.POD_FAILED})
