"""Every word of the API that is not a field: condition types, reasons, states, event reasons. Once, as enums."""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    READY = "Ready"
    ACCEPTED = "Accepted"
    MODEL_READY = "ModelReady"
    DRAFT_READY = "DraftReady"
    AVAILABLE = "Available"
    SCALING_ACTIVE = "ScalingActive"
    SPECULATION_ACTIVE = "SpeculationActive"
    RECONCILING = "Reconciling"  # present only while True (kstatus)
    STALLED = "Stalled"  # present only while True (kstatus)


class Status(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Reason(StrEnum):
    """Why a condition is what it is. A user searches for these words, so they never change meaning."""

    # the way to Ready
    PENDING = "Pending"
    ACCEPTED = "Accepted"
    READY = "Ready"
    LOADING = "Loading"
    LOADED = "Loaded"
    NOT_REQUIRED = "NotRequired"
    AVAILABLE = "Available"
    TOO_FEW_REPLICAS = "TooFewReplicas"
    ROLLING_OUT = "RollingOut"
    SUSPENDED = "Suspended"
    # refusals and failures
    INVALID_SPEC = "InvalidSpec"
    NAME_CONFLICT = "NameConflict"
    UNSUPPORTED_PARALLELISM = "UnsupportedParallelism"
    UNSUPPORTED_MODEL = "UnsupportedModel"
    POD_TEMPLATE_REFUSED = "PodTemplateRefused"
    APPLY_FAILED = "ApplyFailed"
    INSUFFICIENT_GPU = "InsufficientGPU"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    MISSING_SECRET = "MissingSecret"
    UNAUTHORIZED = "Unauthorized"
    MODEL_NOT_FOUND = "ModelNotFound"
    OUT_OF_SPACE = "OutOfSpace"
    OUT_OF_MEMORY = "OutOfMemory"
    DOES_NOT_FIT = "DoesNotFit"
    TOKENIZER_MISMATCH = "TokenizerMismatch"
    DRAFT_UNAVAILABLE = "DraftUnavailable"
    CRASH_LOOPING = "CrashLooping"
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    METRICS_UNAVAILABLE = "MetricsUnavailable"
    # scaling
    FIXED_REPLICAS = "FixedReplicas"
    SCALING = "Scaling"
    WITHIN_TARGET = "WithinTarget"
    REPLICAS_OWNED_ELSEWHERE = "ReplicasOwnedElsewhere"
    # speculation
    DRAFTING = "Drafting"
    NO_GAIN = "NoGain"
    NO_TRAFFIC = "NoTraffic"
    SATURATED = "Saturated"
    LOW_ACCEPTANCE = "LowAcceptance"
    DISABLED_BY_SPEC = "DisabledBySpec"


class SpeculationState(StrEnum):
    """`status.speculativeDecoding.state`; the first three are also the states of a policy."""

    ACTIVE = "Active"
    SUSPENDED = "Suspended"
    DISABLED = "Disabled"
    UNAVAILABLE = "Unavailable"


class EventReason(StrEnum):
    SPECULATION_SUSPENDED = "SpeculationSuspended"
    SPECULATION_RESUMED = "SpeculationResumed"
    SCALED_UP = "ScaledUp"
    SCALED_DOWN = "ScaledDown"
    MODEL_LOADED = "ModelLoaded"
    ROLLOUT_STARTED = "RolloutStarted"
    ROLLOUT_COMPLETE = "RolloutComplete"
    DRAFT_REJECTED = "DraftRejected"
    REFUSED = "Refused"
    POD_FAILED = "PodFailed"


WARNINGS = frozenset({EventReason.DRAFT_REJECTED, EventReason.REFUSED, EventReason.POD_FAILED})
