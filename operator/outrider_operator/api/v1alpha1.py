"""SpeculativeModel, outrider.dev/v1alpha1: spec and status. Defaults and rules live here and nowhere else."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from outrider_operator.api.schema import ApiModel, Rule

GROUP = "outrider.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "SpeculativeModel"
PLURAL = "speculativemodels"

# the draft lengths a runtime can be started for; a spec takes the smallest that holds it
CAPTURE_TIERS = (4, 8, 16)

FreeObject = dict[str, Any]
Quantity = int | str
Name = Annotated[str, Field(min_length=1, max_length=253)]

_URI = re.compile(r"^(hf://[^/\s]+/[^/\s]+|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[^\s]+)$")
_URI_CEL = r"self.uri.matches('^(hf://[^/\\s]+/[^/\\s]+|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[^\\s]+)$')"


def _uri_rule(field: str) -> Rule:
    return Rule(
        _URI_CEL,
        f"{field}.uri must be hf://ORGANISATION/NAME or pvc://CLAIM/PATH",
        lambda source: _URI.match(source.uri) is not None,
    )


class Mode(StrEnum):
    AUTO = "Auto"
    ENABLED = "Enabled"
    DISABLED = "Disabled"


class Method(StrEnum):
    DRAFT_MODEL = "DraftModel"
    NGRAM = "NGram"


class Device(StrEnum):
    CUDA = "CUDA"
    CPU = "CPU"


class DType(StrEnum):
    AUTO = "Auto"
    BFLOAT16 = "BFloat16"
    FLOAT16 = "Float16"
    FLOAT32 = "Float32"


class SecretKey(ApiModel):
    """A key of a Secret in the object's namespace."""

    name: Name = Field(description="Name of the Secret.")
    key: Name = Field(description="Key in the Secret's data.")


class ModelSource(ApiModel):
    """The target model: what is served."""

    RULES: ClassVar[tuple[Rule, ...]] = (_uri_rule("model"),)

    uri: str = Field(
        min_length=1,
        max_length=1024,
        description="Where the weights are: hf://ORGANISATION/NAME or pvc://CLAIM/PATH.",
    )
    revision: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Branch, tag or commit, for hf. The resolved commit is in status.",
    )
    name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Name served in the OpenAI API. Default: the object's name.",
    )
    token_secret_ref: SecretKey | None = Field(None, description="Credentials for the source.")


class DraftSource(ApiModel):
    """The draft model. Its tokenizer must be the target's."""

    RULES: ClassVar[tuple[Rule, ...]] = (_uri_rule("draft"),)

    uri: str = Field(
        min_length=1,
        max_length=1024,
        description="Where the weights are: hf://ORGANISATION/NAME or pvc://CLAIM/PATH.",
    )
    revision: str | None = Field(
        None, min_length=1, max_length=256, description="Branch, tag or commit, for hf."
    )


class Saturation(ApiModel):
    """When batches are too full for speculation to pay."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.enableAtConcurrency) || has(self.disableAtConcurrency)",
            "saturation.enableAtConcurrency needs disableAtConcurrency: set both, or leave enableAtConcurrency out",
            lambda s: s.enable_at_concurrency is None or s.disable_at_concurrency is not None,
        ),
        Rule(
            "!has(self.enableAtConcurrency) || !has(self.disableAtConcurrency)"
            " || self.enableAtConcurrency < self.disableAtConcurrency",
            "saturation.enableAtConcurrency must be below disableAtConcurrency",
            lambda s: (
                s.enable_at_concurrency is None
                or s.disable_at_concurrency is None
                or s.enable_at_concurrency < s.disable_at_concurrency
            ),
        ),
    )

    disable_at_concurrency: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="Mean running requests per ready replica at which speculation is suspended. "
        "Absent: the break-even the runtimes measured, if any.",
    )
    enable_at_concurrency: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Mean running requests per ready replica at or below which speculation resumes. "
        "Default: three quarters of disableAtConcurrency, rounded down, at least 1 (0 when disableAtConcurrency is 1).",
    )
    stabilization_window_seconds: int = Field(
        30, ge=0, le=3600, description="How long either must hold before speculation changes."
    )


class SpeculativeDecoding(ApiModel):
    """How tokens are drafted, and when not."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.method) || self.method != 'DraftModel' || has(self.draft)",
            "speculativeDecoding.draft is required with method DraftModel: set draft.uri, or use method NGram",
            lambda s: s.method is not Method.DRAFT_MODEL or s.draft is not None,
        ),
        Rule(
            "!has(self.method) || self.method != 'NGram' || !has(self.draft)",
            "speculativeDecoding.draft has no use with method NGram: remove draft, or use method DraftModel",
            lambda s: s.method is not Method.NGRAM or s.draft is None,
        ),
    )

    mode: Mode = Field(
        Mode.AUTO,
        description="Auto: adaptive length, suspended at saturation or low acceptance. Enabled: always "
        "numSpeculativeTokens, never suspended. Disabled: plain decoding. A change restarts nothing.",
    )
    method: Method | None = Field(
        None, description="How tokens are drafted. Default: DraftModel when draft is given, else NGram."
    )
    draft: DraftSource | None = Field(
        None, description="The draft model; required by DraftModel, forbidden with NGram."
    )
    num_speculative_tokens: int = Field(
        4, ge=1, le=16, description="The most tokens drafted per step; Auto may use fewer."
    )
    min_acceptance_percent: int | None = Field(
        None, ge=0, le=100, description="Acceptance below which speculation is suspended (LowAcceptance)."
    )
    saturation: Saturation = Field(default_factory=Saturation)

    @property
    def effective_method(self) -> Method:
        return self.method or (Method.DRAFT_MODEL if self.draft else Method.NGRAM)

    @property
    def capture_tier(self) -> int:
        """The draft length a runtime is started for: the smallest tier that holds numSpeculativeTokens."""
        return next(tier for tier in CAPTURE_TIERS if tier >= self.num_speculative_tokens)


class EnvVar(ApiModel):
    """An environment variable of the runtime container."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.value) || !has(self.valueFrom)",
            "engine.env: give value or valueFrom, not both",
            lambda e: e.value is None or e.value_from is None,
        ),
    )

    name: Name
    value: str | None = Field(None, max_length=32768)
    value_from: FreeObject | None = Field(None, description="As in core/v1 EnvVarSource.")


class Engine(ApiModel):
    """The runtime in each pod."""

    image: str | None = Field(
        None, min_length=1, max_length=512, description="Overrides the operator's default runtime image."
    )
    device: Device = Field(
        Device.CUDA,
        description="CUDA asks for one nvidia.com/gpu per tensor-parallel rank unless resources says otherwise.",
    )
    tensor_parallel_size: int = Field(1, ge=1, le=64, description="GPUs one replica is spread over.")
    dtype: DType = Field(DType.AUTO, description="Type of weights and KV cache. Auto: the checkpoint's own.")
    max_model_length: int | None = Field(
        None,
        ge=1,
        le=16777216,
        description="Longest prompt plus completion, in tokens. Default: the model's.",
    )
    max_concurrency: int = Field(
        256, ge=1, le=65536, description="Most requests that run at once in one replica."
    )
    memory_utilization_percent: int = Field(
        90, ge=1, le=99, description="Share of the device's memory for weights, KV cache and graphs."
    )
    extra_args: list[Annotated[str, Field(max_length=4096)]] = Field(
        default_factory=list, max_length=64, description="Further arguments of the runtime's command line."
    )
    env: list[EnvVar] = Field(default_factory=list, max_length=128)
    api_key_secret_ref: SecretKey | None = Field(
        None, description="Key that clients of the OpenAI API must send as a bearer token."
    )


class Autoscaling(ApiModel):
    """Replicas by in-flight requests."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.minReplicas <= self.maxReplicas",
            "autoscaling.minReplicas must not be above maxReplicas",
            lambda a: a.min_replicas <= a.max_replicas,
        ),
    )

    min_replicas: int = Field(1, ge=1, le=10000)
    max_replicas: int = Field(ge=1, le=10000)
    target_concurrency: int = Field(
        ge=1, le=65536, description="In-flight requests (running and waiting) per replica to aim at."
    )
    scale_up_max_step: int = Field(
        4, ge=1, le=10000, description="Most replicas added per minute, or doubling if that is more."
    )
    scale_down_window_seconds: int = Field(
        300, ge=0, le=86400, description="Replicas go down to the highest need within this window."
    )


class EmptyDirCache(ApiModel):
    size_limit: Quantity | None = None


class Cache(ApiModel):
    """Where downloads go: an existing claim, a claim of the operator's own, or the node's disk."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "[has(self.claimName), has(self.size), has(self.emptyDir)].exists_one(given, given)",
            "cache takes exactly one of claimName, size, emptyDir",
            lambda c: sum(x is not None for x in (c.claim_name, c.size, c.empty_dir)) == 1,
        ),
        Rule(
            "has(self.size) || (!has(self.storageClassName) && !has(self.retain))",
            "cache.storageClassName and cache.retain go with cache.size",
            lambda c: c.size is not None or (c.storage_class_name is None and c.retain is None),
        ),
        Rule(
            "has(self.claimName) == has(oldSelf.claimName) && (!has(self.claimName) || self.claimName == oldSelf.claimName)"
            " && has(self.emptyDir) == has(oldSelf.emptyDir)"
            " && has(self.storageClassName) == has(oldSelf.storageClassName)"
            " && (!has(self.storageClassName) || self.storageClassName == oldSelf.storageClassName)",
            "cache identity is immutable: delete the SpeculativeModel and create it again with the other cache",
            None,
        ),
    )

    claim_name: Name | None = Field(None, description="An existing PersistentVolumeClaim.")
    size: Quantity | None = Field(None, description="Size of a claim NAME-cache that the operator owns.")
    storage_class_name: Name | None = None
    retain: bool | None = Field(
        None, description="Keep the claim NAME-cache when the object is deleted. Default: true."
    )
    empty_dir: EmptyDirCache | None = None


class Resources(ApiModel):
    """As in core/v1 ResourceRequirements."""

    requests: dict[str, Quantity] = Field(default_factory=dict, max_length=64)
    limits: dict[str, Quantity] = Field(default_factory=dict, max_length=64)


class Toleration(ApiModel):
    """As in core/v1."""

    key: str | None = Field(None, max_length=512)
    operator: Literal["Exists", "Equal"] | None = None
    value: str | None = Field(None, max_length=512)
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None


class LocalObjectReference(ApiModel):
    name: Name


def _zero(value: Quantity | None) -> bool:
    return value in (0, "0", "0%")


class Rollout(ApiModel):
    """How pods are replaced. Default: CUDA maxSurge 0 and maxUnavailable 1, CPU 1 and 0."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.maxSurge) || !has(self.maxUnavailable)"
            " || !(string(self.maxSurge) in ['0', '0%'] && string(self.maxUnavailable) in ['0', '0%'])",
            "rollout.maxSurge and rollout.maxUnavailable must not both be 0: no pod could be replaced",
            lambda r: not (_zero(r.max_surge) and _zero(r.max_unavailable)),
        ),
    )

    max_surge: Quantity | None = Field(
        None, description="Pods above the desired number, a count or a percentage."
    )
    max_unavailable: Quantity | None = Field(
        None, description="Pods below the desired number, a count or a percentage."
    )
    drain_timeout_seconds: int = Field(
        60, ge=0, le=86400, description="How long streams may run on in a leaving pod."
    )
    progress_deadline_seconds: int = Field(
        1800,
        ge=30,
        le=86400,
        description="How long a rollout may make no progress before the object is Stalled.",
    )

    @field_validator("max_surge", "max_unavailable")
    @classmethod
    def _count_or_percentage(cls, value: Quantity | None) -> Quantity | None:
        valid = value is None or (
            re.fullmatch(r"[0-9]{1,3}%", value) is not None if isinstance(value, str) else 0 <= value <= 10000
        )
        if not valid:
            raise ValueError(f"must be a count of pods or a percentage such as 25%, not {value!r}")
        return value


class SpeculativeModelSpec(ApiModel):
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.autoscaling) || self.autoscaling.targetConcurrency <= self.engine.maxConcurrency",
            "autoscaling.targetConcurrency must not be above engine.maxConcurrency: it could never be reached",
            lambda s: s.autoscaling is None or s.autoscaling.target_concurrency <= s.engine.max_concurrency,
        ),
        Rule(
            "has(self.cache) == has(oldSelf.cache)",
            "cache cannot be added or removed: delete the SpeculativeModel and create it again",
            None,
        ),
    )

    model: ModelSource
    speculative_decoding: SpeculativeDecoding = Field(default_factory=SpeculativeDecoding)
    engine: Engine = Field(default_factory=Engine)
    replicas: int = Field(
        1,
        ge=0,
        le=10000,
        description="Number of pods; an HPA or KEDA may own it through /scale. Ignored with autoscaling.",
    )
    autoscaling: Autoscaling | None = None
    cache: Cache | None = Field(None, description="Where downloads go. Default: an emptyDir.")
    resources: Resources = Field(default_factory=Resources)
    node_selector: dict[str, str] = Field(default_factory=dict, max_length=64)
    tolerations: list[Toleration] = Field(default_factory=list, max_length=64)
    affinity: FreeObject | None = Field(None, description="As in core/v1.")
    topology_spread_constraints: list[FreeObject] = Field(
        default_factory=list, max_length=16, description="As in core/v1."
    )
    priority_class_name: Name | None = None
    runtime_class_name: Name | None = None
    service_account_name: Name | None = None
    image_pull_secrets: list[LocalObjectReference] = Field(default_factory=list, max_length=16)
    pod_template: FreeObject | None = Field(
        None,
        description="Merged over the rendered pod template: containers, initContainers, env and volumes by name, "
        "volumeMounts by mountPath; all else replaced.",
    )
    rollout: Rollout = Field(default_factory=Rollout)
    suspend: bool = Field(False, description="Zero replicas; the object and its Service are kept.")


# -- status --------------------------------------------------------------------------------------------------------


class Condition(ApiModel):
    """As in meta/v1."""

    type: str
    status: Literal["True", "False", "Unknown"]
    observed_generation: int | None = None
    last_transition_time: str
    reason: str
    message: str = ""


class ModelStatus(ApiModel):
    resolved_revision: str | None = None
    parameters: int | None = None
    dtype: str | None = None


class DraftStatus(ApiModel):
    resolved_revision: str | None = None
    parameters: int | None = None


class SpeculativeDecodingStatus(ApiModel):
    state: Literal["Active", "Suspended", "Disabled", "Unavailable"] | None = None
    reason: str | None = None
    effective_tokens: str | None = Field(
        None, description="Mean tokens drafted per request and step, such as 2.6."
    )
    acceptance_percent: int | None = Field(
        None, description="Accepted of the drafted tokens over the last minute."
    )
    accepted_length: str | None = Field(
        None, description="Mean tokens per verification, the target's own included."
    )
    speedup: str | None = Field(None, description="Tokens per second now over plain decoding, such as 2.31.")
    running_concurrency: str | None = Field(None, description="Mean running requests per ready replica.")
    break_even_concurrency: int | None = Field(
        None, description="Running requests at which drafting no longer pays."
    )
    last_transition_time: str | None = None


class ScalingDecision(ApiModel):
    time: str
    from_: int = Field(alias="from")
    to: int
    reason: str


class AutoscalingStatus(ApiModel):
    last_scale_time: str | None = None
    recent_decisions: list[ScalingDecision] = Field(default_factory=list, max_length=5)


class SpeculativeModelStatus(ApiModel):
    observed_generation: int | None = None
    replicas: int | None = None
    ready_replicas: int | None = None
    updated_replicas: int | None = None
    desired_replicas: int | None = None
    selector: str | None = Field(None, description="For /scale: the label selector of the pods.")
    url: str | None = None
    model: ModelStatus | None = None
    draft: DraftStatus | None = None
    speculative_decoding: SpeculativeDecodingStatus | None = None
    autoscaling: AutoscalingStatus | None = None
    conditions: list[Condition] = Field(default_factory=list, max_length=16)
