"""SpeculativeModel, outrider.dev/v1alpha1: spec and status. Defaults and rules live here and nowhere else."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Strict

from outrider_operator.api.schema import ApiModel, ListMap, Rule

GROUP = "outrider.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "SpeculativeModel"
PLURAL = "speculativemodels"

# the draft lengths a runtime can be started for; a spec takes the smallest that holds it
CAPTURE_TIERS = (4, 8, 16)

FreeObject = dict[str, Any]
Name = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
DataKey = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
EnvName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")]
Timestamp = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Quantity = (
    Annotated[int, Field(ge=0)]
    | Annotated[
        str,
        Field(
            max_length=64,
            pattern=r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][-+]?[0-9]+)?$",
        ),
    ]
)
CountOrPercent = (
    Annotated[int, Field(ge=0, le=10000)] | Annotated[str, Field(max_length=4, pattern=r"^(0|[1-9][0-9]{0,2})%$")]
)

_URI = r"^(hf://[^/\s]+/[^/\s]+|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[^\s]+)$"
_DOTS = r"/[.][.](/|$)"
_OBJECT_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
_NAME_LIMIT = 52  # leaves room for what Kubernetes and the operator append to it in 63 characters


def _source_rules(field: str) -> tuple[Rule, ...]:
    return (
        Rule(
            f"self.uri.matches(r'{_URI}') && !self.uri.matches(r'{_DOTS}')",
            f"{field}.uri must be hf://ORGANISATION/NAME or pvc://CLAIM/PATH, without '..' in it",
            lambda source: re.fullmatch(_URI, source.uri) is not None and re.search(_DOTS, source.uri) is None,
        ),
        Rule(
            "!has(self.revision) || self.uri.startsWith('hf://')",
            f"{field}.revision goes with hf:// only: remove it",
            lambda source: source.revision is None or source.uri.startswith("hf://"),
        ),
    )


class Mode(StrEnum):
    AUTO = "Auto"
    ENABLED = "Enabled"
    DISABLED = "Disabled"


class Method(StrEnum):
    DRAFT_MODEL = "DraftModel"
    NGRAM = "NGram"
    SUFFIX = "Suffix"
    EAGLE3 = "Eagle3"
    EAGLE = "Eagle"
    MEDUSA = "Medusa"

    @property
    def has_weights(self) -> bool:
        """Whether it needs a draft."""
        return self not in (Method.NGRAM, Method.SUFFIX)

    @property
    def is_head(self) -> bool:
        """Whether it drafts from the target's hidden states, and so can draft trees."""
        return self in (Method.EAGLE3, Method.EAGLE, Method.MEDUSA)


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
    key: DataKey = Field(description="Key in the Secret's data.")


class ModelSource(ApiModel):
    """The target model: what is served."""

    RULES: ClassVar[tuple[Rule, ...]] = _source_rules("model")

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

    RULES: ClassVar[tuple[Rule, ...]] = _source_rules("draft")

    uri: str = Field(
        min_length=1,
        max_length=1024,
        description="Where the weights are: hf://ORGANISATION/NAME or pvc://CLAIM/PATH.",
    )
    revision: str | None = Field(None, min_length=1, max_length=256, description="Branch, tag or commit, for hf.")


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


class Tree(ApiModel):
    """Several candidates for each position in place of one. The defaults fit any numSpeculativeTokens."""

    top_k: int = Field(4, ge=1, le=16, description="Candidates behind each token.")
    max_tokens: int = Field(60, ge=1, le=63, description="The most tokens of a tree, all of which are verified.")

    def fits(self, depth: int) -> bool:
        """Whether it holds what the draft reads meanwhile: topK tokens at each position but the last."""
        return (depth - 1) * self.top_k <= self.max_tokens


class SpeculativeDecoding(ApiModel):
    """How tokens are drafted, and when not."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.method) || self.method in ['NGram', 'Suffix'] || has(self.draft)",
            "speculativeDecoding.draft is required with methods DraftModel, Eagle3, Eagle and Medusa: set draft.uri, "
            "or use method NGram",
            lambda s: s.method is None or not s.method.has_weights or s.draft is not None,
        ),
        Rule(
            "!has(self.method) || self.method != 'NGram' || !has(self.draft)",
            "speculativeDecoding.draft has no use with method NGram: remove draft, or use method DraftModel",
            lambda s: s.method is not Method.NGRAM or s.draft is None,
        ),
        Rule(
            "!has(self.method) || self.method != 'Suffix' || !has(self.draft)",
            "speculativeDecoding.draft has no use with method Suffix: remove draft, or use method DraftModel",
            lambda s: s.method is not Method.SUFFIX or s.draft is None,
        ),
        Rule(
            "!has(self.tree) || (has(self.method) && self.method in ['Eagle3', 'Eagle', 'Medusa'])",
            "speculativeDecoding.tree goes with methods Eagle3, Eagle and Medusa only, the others draft chains: remove "
            "tree, or use one of these methods",
            lambda s: s.tree is None or (s.method is not None and s.method.is_head),
        ),
        Rule(
            f"!has(self.tree) || ({list(CAPTURE_TIERS)}.filter(tier, tier >= self.numSpeculativeTokens)[0] - 1)"
            " * self.tree.topK <= self.tree.maxTokens",
            "speculativeDecoding.tree.maxTokens must be at least 3 times topK with numSpeculativeTokens up to 4, 7 "
            "times up to 8, and 15 times above: raise maxTokens, or lower topK or numSpeculativeTokens",
            lambda s: s.tree is None or s.tree.fits(s.capture_tier),
        ),
    )

    mode: Annotated[Mode, Strict(False)] = Field(
        Mode.AUTO,
        description="Auto: adaptive length, suspended at saturation or low acceptance. Enabled: always "
        "numSpeculativeTokens, never suspended. Disabled: plain decoding. A change restarts nothing.",
    )
    method: Annotated[Method, Strict(False)] | None = Field(
        None, description="How tokens are drafted. Default: DraftModel when draft is given, else NGram."
    )
    draft: DraftSource | None = Field(
        None,
        description="The draft model, or the head trained for this model; required by DraftModel, Eagle3, Eagle and "
        "Medusa, forbidden with NGram and Suffix.",
    )
    num_speculative_tokens: int = Field(
        4,
        ge=1,
        le=16,
        description="The most tokens drafted per step, in a tree along one branch; Auto may use fewer.",
    )
    tree: Tree | None = Field(
        None,
        description="Candidate trees in place of chains, for Eagle3, Eagle and Medusa: they pay at few running "
        "requests. Default: chains. A change restarts pods.",
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

    name: EnvName = Field(description="Name of the variable.")
    value: str | None = Field(None, max_length=32768, description="Its value.")
    value_from: FreeObject | None = Field(None, description="As in core/v1 EnvVarSource.")


# Of the runtime's command line, as engine.py writes it
_FLAGS_OF_FIELDS = (
    "^--(model|revision|served-model-name|speculative-method|draft-model|draft-revision|max-speculative-tokens"
    "|tree-top-k|tree-max-tokens|device|dtype|max-model-len|max-concurrency|gpu-memory-utilization"
    "|tensor-parallel-size|port|admin-port|admin-token-file|drain-timeout|download-dir)(=|$)"
)


class Engine(ApiModel):
    """The runtime in each pod."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"!has(self.extraArgs) || !self.extraArgs.exists(arg, arg.matches(r'{_FLAGS_OF_FIELDS}'))",
            "engine.extraArgs has a flag that the operator sets itself: remove it, and use its field where it has one, "
            "such as engine.maxConcurrency for --max-concurrency",
            lambda e: not any(re.match(_FLAGS_OF_FIELDS, arg) for arg in e.extra_args),
        ),
    )

    image: str | None = Field(
        None, min_length=1, max_length=512, description="Overrides the operator's default runtime image."
    )
    device: Annotated[Device, Strict(False)] = Field(
        Device.CUDA,
        description="CUDA asks for one nvidia.com/gpu per tensor-parallel rank unless resources says otherwise.",
    )
    tensor_parallel_size: int = Field(1, ge=1, le=64, description="GPUs one replica is spread over.")
    dtype: Annotated[DType, Strict(False)] = Field(
        DType.AUTO, description="Type of weights and KV cache. Auto: the checkpoint's own."
    )
    max_model_length: int | None = Field(
        None,
        ge=2,
        le=16777216,
        description="Longest prompt plus completion, in tokens. Default: the model's.",
    )
    max_concurrency: int = Field(256, ge=1, le=65536, description="Most requests that run at once in one replica.")
    memory_utilization_percent: int = Field(
        90, ge=1, le=99, description="Share of the device's memory for weights, KV cache and graphs."
    )
    extra_args: list[Annotated[str, Field(max_length=4096)]] = Field(
        default_factory=list,
        max_length=64,
        description="Further arguments of the runtime's command line, which no field is for.",
    )
    env: Annotated[list[EnvVar], ListMap("name")] = Field(
        default_factory=list, max_length=128, description="Further environment variables of the runtime."
    )
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

    min_replicas: int = Field(1, ge=1, le=10000, description="Fewest replicas.")
    max_replicas: int = Field(ge=1, le=10000, description="Most replicas.")
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
    """Downloads go to the node's disk and are gone with the pod."""

    size_limit: Quantity | None = Field(None, description="Most the cache may take. Default: no limit.")


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
            "has(self.claimName) == has(oldSelf.claimName)"
            " && (!has(self.claimName) || self.claimName == oldSelf.claimName)"
            " && has(self.emptyDir) == has(oldSelf.emptyDir)"
            " && has(self.storageClassName) == has(oldSelf.storageClassName)"
            " && (!has(self.storageClassName) || self.storageClassName == oldSelf.storageClassName)",
            "cache identity is immutable: delete the SpeculativeModel and create it again with the other cache",
            None,
        ),
    )

    claim_name: Name | None = Field(None, description="An existing PersistentVolumeClaim.")
    size: Quantity | None = Field(None, description="Size of a claim NAME-cache that the operator owns.")
    storage_class_name: Name | None = Field(None, description="StorageClass of the claim. Default: the cluster's.")
    retain: bool | None = Field(
        None, description="Keep the claim NAME-cache when the object is deleted. Default: true."
    )
    empty_dir: EmptyDirCache | None = None


class Resources(ApiModel):
    """As in core/v1 ResourceRequirements."""

    requests: dict[str, Quantity] = Field(
        default_factory=dict, max_length=64, description="What a pod is scheduled for."
    )
    limits: dict[str, Quantity] = Field(default_factory=dict, max_length=64, description="What a pod may use at most.")


class Toleration(ApiModel):
    """As in core/v1."""

    key: str | None = Field(None, max_length=512, description="The taint's key; absent with Exists: any.")
    operator: Literal["Exists", "Equal"] | None = Field(None, description="How value is compared. Default: Equal.")
    value: str | None = Field(None, max_length=512, description="The taint's value.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="The taint's effect; absent: any."
    )
    toleration_seconds: int | None = Field(None, description="How long a NoExecute taint is tolerated.")


class LocalObjectReference(ApiModel):
    """An object of the same namespace."""

    name: Name = Field(description="Its name.")


def _zero(value: int | str | None) -> bool:
    return value in (0, "0%")


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

    max_surge: CountOrPercent | None = Field(
        None, description="Pods above the desired number, a count or a percentage."
    )
    max_unavailable: CountOrPercent | None = Field(
        None, description="Pods below the desired number, a count or a percentage."
    )
    drain_timeout_seconds: int = Field(60, ge=0, le=86400, description="How long streams may run on in a leaving pod.")
    progress_deadline_seconds: int = Field(
        1800,
        ge=30,
        le=86400,
        description="How long a rollout may make no progress before the object is Stalled.",
    )


class SpeculativeModelSpec(ApiModel):
    """What is served, how, and by how many."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.autoscaling) || self.autoscaling.targetConcurrency <= self.engine.maxConcurrency",
            "autoscaling.targetConcurrency must not be above engine.maxConcurrency: it could never be reached",
            lambda s: s.autoscaling is None or s.autoscaling.target_concurrency <= s.engine.max_concurrency,
        ),
        Rule(
            "self.engine.device != 'CUDA' || has(self.rollout.maxSurge) || !has(self.rollout.maxUnavailable)"
            " || !(string(self.rollout.maxUnavailable) in ['0', '0%'])",
            "rollout.maxUnavailable 0 needs rollout.maxSurge of at least 1: with engine.device CUDA its default is 0",
            lambda s: (
                not (
                    s.engine.device is Device.CUDA and s.rollout.max_surge is None and _zero(s.rollout.max_unavailable)
                )
            ),
        ),
        Rule(
            "self.engine.device != 'CPU' || has(self.rollout.maxUnavailable) || !has(self.rollout.maxSurge)"
            " || !(string(self.rollout.maxSurge) in ['0', '0%'])",
            "rollout.maxSurge 0 needs rollout.maxUnavailable of at least 1: with engine.device CPU its default is 0",
            lambda s: (
                not (s.engine.device is Device.CPU and s.rollout.max_unavailable is None and _zero(s.rollout.max_surge))
            ),
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
    autoscaling: Autoscaling | None = Field(None, description="Replicas by in-flight requests.")
    cache: Cache | None = Field(None, description="Where downloads go. Default: an emptyDir.")
    resources: Resources = Field(default_factory=Resources)
    node_selector: dict[str, str] = Field(
        default_factory=dict,
        max_length=64,
        description="As in core/v1.",
        json_schema_extra={"x-kubernetes-map-type": "atomic"},
    )
    tolerations: list[Toleration] = Field(default_factory=list, max_length=64, description="As in core/v1.")
    affinity: FreeObject | None = Field(None, description="As in core/v1.")
    topology_spread_constraints: list[FreeObject] = Field(
        default_factory=list, max_length=16, description="As in core/v1."
    )
    priority_class_name: Name | None = Field(None, description="As in core/v1.")
    runtime_class_name: Name | None = Field(None, description="As in core/v1.")
    service_account_name: Name | None = Field(None, description="As in core/v1; its token is not mounted.")
    image_pull_secrets: Annotated[list[LocalObjectReference], ListMap("name")] = Field(
        default_factory=list, max_length=16, description="As in core/v1."
    )
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

    type: str = Field(max_length=316, description="What it is about.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    observed_generation: int | None = Field(None, description="The metadata.generation it was computed from.")
    last_transition_time: Timestamp = Field(description="When status last changed.")
    reason: str = Field(max_length=1024, description="Why, in one CamelCase word.")
    message: str = Field("", max_length=32768, description="Why, in a sentence that says what to change.")


class ModelStatus(ApiModel):
    """The target as the runtimes loaded it."""

    resolved_revision: str | None = Field(None, description="The commit, for hf.")
    parameters: int | None = Field(None, description="Number of weights.")
    dtype: str | None = Field(None, description="Type of the weights in use.")


class DraftStatus(ApiModel):
    """The draft as the runtimes loaded it."""

    resolved_revision: str | None = Field(None, description="The commit, for hf.")
    parameters: int | None = Field(None, description="Number of weights.")


class SpeculativeDecodingStatus(ApiModel):
    """Whether tokens are drafted, and what it brings."""

    state: Literal["Active", "Suspended", "Disabled", "Unavailable"] | None = Field(
        None, description="The operator's decision. A runtime that drafts nothing for a moment leaves it Active."
    )
    reason: str | None = Field(None, description="Why, in one CamelCase word.")
    method: str | None = Field(None, description="How tokens are drafted.")
    effective_tokens: str | None = Field(None, description="Mean tokens drafted per request and step, such as 2.6.")
    acceptance_percent: int | None = Field(None, description="Accepted of the drafted tokens over the last minute.")
    accepted_length: str | None = Field(None, description="Mean tokens per verification, the target's own included.")
    speedup: str | None = Field(
        None,
        description="Tokens per second now over plain decoding, such as 2.31; absent until known, 1.00 while nobody "
        "may draft.",
    )
    running_concurrency: str | None = Field(None, description="Mean running requests per ready replica.")
    break_even_concurrency: int | None = Field(
        None, description="Running requests at which drafting no longer pays; absent when there is none."
    )
    last_transition_time: Timestamp | None = Field(None, description="When state last changed.")


class ScalingDecision(ApiModel):
    """One change of the number of replicas."""

    time: Timestamp = Field(description="When.")
    from_: int = Field(alias="from", description="Replicas before.")
    to: int = Field(description="Replicas after.")
    reason: str = Field(description="Why, in words.")


class AutoscalingStatus(ApiModel):
    """What autoscaling did."""

    last_scale_time: Timestamp | None = Field(None, description="When the number of replicas last changed.")
    recent_decisions: list[ScalingDecision] = Field(
        default_factory=list, max_length=5, description="The last five changes."
    )


class SpeculativeModelStatus(ApiModel):
    """What the operator last saw and decided."""

    observed_generation: int | None = Field(
        None, description="The metadata.generation that the rest was computed from; -1 before the first look."
    )
    replicas: int | None = Field(None, description="Pods there are.")
    ready_replicas: int | None = Field(None, description="Pods that serve.")
    updated_replicas: int | None = Field(None, description="Pods of the newest template.")
    desired_replicas: int | None = Field(None, description="Pods there should be.")
    selector: str | None = Field(None, description="For /scale: the label selector of the pods.")
    url: str | None = Field(None, description="Where the OpenAI API is served inside the cluster.")
    model: ModelStatus | None = None
    draft: DraftStatus | None = None
    speculative_decoding: SpeculativeDecodingStatus | None = None
    autoscaling: AutoscalingStatus | None = None
    conditions: Annotated[list[Condition], ListMap("type")] = Field(
        default_factory=list, max_length=16, description="Ready sums them up; see the API reference for each."
    )


# -- the object ----------------------------------------------------------------------------------------------------


def _nameable(model: SpeculativeModel) -> bool:
    name = str(model.metadata.get("name", ""))
    return len(name) <= _NAME_LIMIT and re.fullmatch(_OBJECT_NAME, name) is not None


class SpeculativeModel(ApiModel):
    """A language model served with speculative decoding: pods, an OpenAI-compatible Service, and a fleet that
    scales with load and stops speculating while its batches are full."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"self.metadata.name.matches(r'{_OBJECT_NAME}') && size(self.metadata.name) <= {_NAME_LIMIT}",
            "metadata.name must be lower-case letters, digits and '-', start with a letter, end with a letter or"
            f" digit, and have at most {_NAME_LIMIT} characters: it becomes Service, label and pod names",
            _nameable,
        ),
    )

    api_version: str = Field(description=API_VERSION)
    kind: str = Field(description=KIND)
    metadata: FreeObject
    spec: SpeculativeModelSpec
    status: SpeculativeModelStatus = SpeculativeModelStatus(observed_generation=-1)
