"""One table of valid and invalid SpeculativeModels, read by the tests of pydantic and of the real API server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
SAMPLES = ROOT / "manifests" / "samples"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_EXAMPLE = re.compile(r"^(?P<indent> *)apiVersion: outrider\.dev/.*\n(?:(?P=indent).*\n)*", re.MULTILINE)
MODEL = {"uri": "hf://Qwen/Qwen2.5-7B-Instruct"}
DRAFT = {"uri": "hf://meta-llama/Llama-3.2-1B-Instruct"}


@dataclass(frozen=True)
class Case:
    """`body` is refused at `path` with `message` in what is said; both programs must agree. Valid without message."""

    name: str
    body: dict[str, Any]
    path: str = ""
    message: str = ""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Update:
    """The spec `before` may become `after`, or is refused with `message`; only the API server sees both."""

    name: str
    before: dict[str, Any]
    after: dict[str, Any]
    message: str = ""

    def __str__(self) -> str:
        return self.name


def model(name: str = "qwen", **spec: Any) -> dict[str, Any]:
    """A SpeculativeModel called `name`, the smallest but for the fields of `spec`."""
    return {
        "apiVersion": "outrider.dev/v1alpha1",
        "kind": "SpeculativeModel",
        "metadata": {"name": name},
        "spec": {"model": MODEL, **spec},
    }


def _speculating(**fields: Any) -> dict[str, Any]:
    return model(speculativeDecoding=fields)


def _scaling(**fields: Any) -> dict[str, Any]:
    return model(autoscaling={"maxReplicas": 8, "targetConcurrency": 10, **fields})


def _without_model() -> dict[str, Any]:
    body = model()
    del body["spec"]["model"]
    return body


VALID = (
    *(
        Case(f"sample {path.name}", body)
        for path in sorted(SAMPLES.glob("*.yaml"))
        for body in yaml.safe_load_all(path.read_text())
        if body and body["kind"] == "SpeculativeModel"
    ),
    *(
        Case(f"{page.name} {body['metadata']['name']}", body)
        for page in PAGES
        for example in _EXAMPLE.finditer(page.read_text())
        for body in [yaml.safe_load(dedent(example[0]))]
    ),
    Case("smallest", model()),
    Case("name of one letter", model(name="a")),
    Case("name of 52 characters", model(name="a" + "b" * 50 + "9")),
    Case("name with digits and dashes", model(name="llama-3-1-8b")),
    Case("model on a claim", model(model={"uri": "pvc://models/llama-8b"})),
    Case("model deep in a claim", model(model={"uri": "pvc://models.v2/a/b/c..d/model.gguf"})),
    Case("revision, served name and token", model(model={
        **MODEL, "revision": "v1.0", "name": "gpt-4", "tokenSecretRef": {"name": "hf", "key": "hf.token_1"}})),
    Case("draft model by its presence", _speculating(draft=DRAFT)),
    Case("head of the model", _speculating(method="Eagle3", draft=DRAFT)),
    Case("draft model by name", _speculating(method="DraftModel", draft={**DRAFT, "revision": "main"})),
    Case("n-gram by name", _speculating(method="NGram")),
    Case("suffix by name", _speculating(method="Suffix")),
    Case("every mode's word: Enabled", _speculating(mode="Enabled")),
    Case("every mode's word: Disabled", _speculating(mode="Disabled")),
    Case("fewest drafted tokens", _speculating(numSpeculativeTokens=1)),
    Case("most drafted tokens", _speculating(numSpeculativeTokens=16)),
    Case("tree by default", _speculating(method="Medusa", draft=DRAFT, tree={})),
    Case("tree at its smallest", _speculating(method="Eagle", draft=DRAFT, tree={"topK": 4, "maxTokens": 12})),
    Case("tree at its deepest", _speculating(
        method="Eagle3", draft=DRAFT, numSpeculativeTokens=9, tree={"topK": 4, "maxTokens": 60})),
    Case("any acceptance is enough", _speculating(minAcceptancePercent=0)),
    Case("no acceptance is enough", _speculating(minAcceptancePercent=100)),
    Case("suspended from the first request on", _speculating(
        saturation={"disableAtConcurrency": 1, "enableAtConcurrency": 0, "stabilizationWindowSeconds": 0})),
    Case("only the upper threshold", _speculating(saturation={"disableAtConcurrency": 16})),
    Case("on CPU in float32", model(engine={"device": "CPU", "dtype": "Float32"})),
    Case("parallelism that the operator may refuse later", model(engine={"tensorParallelSize": 4})),
    Case("arguments, variables and a key", model(engine={
        "image": "localhost/runtime:dev", "extraArgs": ["--seed=1"], "maxConcurrency": 1,
        "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}, {"name": "EMPTY"},
                {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
        "apiKeySecretRef": {"name": "keys", "key": "key"}})),
    Case("no replicas", model(replicas=0)),
    Case("many replicas", model(replicas=10000)),
    Case("smallest autoscaling", _scaling(minReplicas=8)),
    Case("autoscaling beside replicas", model(
        replicas=3, autoscaling={"maxReplicas": 8, "targetConcurrency": 256, "scaleDownWindowSeconds": 0})),
    Case("target at the engine's limit", model(
        engine={"maxConcurrency": 10}, autoscaling={"maxReplicas": 2, "targetConcurrency": 10})),
    Case("cache on an existing claim", model(cache={"claimName": "models"})),
    Case("cache on a claim of its own", model(cache={
        "size": "100Gi", "storageClassName": "nfs", "retain": False})),
    Case("cache size as a number of bytes", model(cache={"size": 107374182400})),
    Case("cache on the node's disk", model(cache={"emptyDir": {}})),
    Case("cache on the node's disk, limited", model(cache={"emptyDir": {"sizeLimit": "1.5Gi"}})),
    Case("resources by count and quantity", model(resources={
        "limits": {"nvidia.com/gpu": 2, "memory": "64Gi", "cpu": "1500m"}, "requests": {"cpu": "0.5"}})),
    Case("scheduling fields", model(
        nodeSelector={"gpu": "h200"}, priorityClassName="high", runtimeClassName="nvidia",
        serviceAccountName="models", imagePullSecrets=[{"name": "a"}, {"name": "b"}],
        tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
                     {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}],
        affinity={"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
        topologySpreadConstraints=[{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}])),
    Case("pod template with anything in it", model(podTemplate={
        "metadata": {"annotations": {"a": "b"}}, "spec": {"containers": [{"name": "runtime", "env": []}]}})),
    Case("rollout by surge", model(rollout={"maxSurge": 1, "maxUnavailable": 0})),
    Case("rollout by percentage", model(rollout={"maxSurge": "25%", "maxUnavailable": "100%"})),
    Case("surge 0 where unavailable is 1 by default", model(rollout={"maxSurge": 0})),
    Case("unavailable 0 where surge is 1 by default", model(engine={"device": "CPU"}, rollout={"maxUnavailable": 0})),
    Case("suspended", model(suspend=True)),
)  # fmt: skip

_NAME = "metadata.name must be lower-case letters"
_URI = "uri must be hf://ORGANISATION/NAME or pvc://CLAIM/PATH"

INVALID = (
    Case("no spec", {key: value for key, value in model().items() if key != "spec"}, "spec", "equired"),
    Case("no model", _without_model(), "spec.model", "equired"),
    # the name
    Case("name starts with a digit", model(name="3b"), "", _NAME),
    Case("name with a dot", model(name="llama-3.1"), "", _NAME),
    Case("name of 53 characters", model(name="a" * 53), "", "at most 52 characters"),
    # where weights come from
    Case("model without uri", model(model={}), "spec.model.uri", "equired"),
    Case("empty uri", model(model={"uri": ""}), "spec.model.uri", "at least 1"),
    Case("uri without scheme", model(model={"uri": "Qwen/Qwen2.5-7B"}), "spec.model", f"model.{_URI}"),
    Case("uri of a later scheme", model(model={"uri": "s3://bucket/model"}), "spec.model", _URI),
    Case("hf without organisation", model(model={"uri": "hf://gpt2"}), "spec.model", _URI),
    Case("hf with three parts", model(model={"uri": "hf://a/b/c"}), "spec.model", _URI),
    Case("claim without path", model(model={"uri": "pvc://models/"}), "spec.model", _URI),
    Case("claim in capitals", model(model={"uri": "pvc://Models/a"}), "spec.model", _URI),
    Case("uri with a space", model(model={"uri": "hf://a/b c"}), "spec.model", _URI),
    Case("uri with a line break", model(model={"uri": "hf://a/b\n"}), "spec.model", _URI),
    Case("path out of the claim", model(model={"uri": "pvc://models/../x"}), "spec.model", "without '..'"),
    Case("path ending above the claim", model(model={"uri": "pvc://models/.."}), "spec.model", "without '..'"),
    Case("uri of 1025 characters", model(model={"uri": "hf://a/" + "b" * 1018}), "spec.model.uri", "1024"),
    Case("revision of a claim", model(model={"uri": "pvc://m/a", "revision": "main"}), "spec.model",
         "model.revision goes with hf:// only"),
    Case("secret without key", model(model={**MODEL, "tokenSecretRef": {"name": "hf"}}),
         "spec.model.tokenSecretRef.key", "equired"),
    Case("secret with capitals", model(model={**MODEL, "tokenSecretRef": {"name": "HF", "key": "k"}}),
         "spec.model.tokenSecretRef.name", "should match"),
    Case("draft by a bad uri", _speculating(draft={"uri": "file:///x"}), "spec.speculativeDecoding.draft",
         f"draft.{_URI}"),
    # speculation
    Case("unknown mode", _speculating(mode="On"), "spec.speculativeDecoding.mode", "Auto"),
    Case("mode in lower case", _speculating(mode="auto"), "spec.speculativeDecoding.mode", "Auto"),
    Case("a later method", _speculating(method="MTP"), "spec.speculativeDecoding.method", "NGram"),
    Case("draft model without draft", _speculating(method="DraftModel"), "spec.speculativeDecoding",
         "draft is required with methods DraftModel, Eagle3, Eagle and Medusa"),
    Case("head without draft", _speculating(method="Eagle3"), "spec.speculativeDecoding",
         "draft is required with methods DraftModel, Eagle3, Eagle and Medusa"),
    Case("n-gram with draft", _speculating(method="NGram", draft=DRAFT), "spec.speculativeDecoding",
         "draft has no use with method NGram"),
    Case("suffix with draft", _speculating(method="Suffix", draft=DRAFT), "spec.speculativeDecoding",
         "draft has no use with method Suffix"),
    Case("no drafted tokens", _speculating(numSpeculativeTokens=0),
         "spec.speculativeDecoding.numSpeculativeTokens", "greater than or equal to 1"),
    Case("17 drafted tokens", _speculating(numSpeculativeTokens=17),
         "spec.speculativeDecoding.numSpeculativeTokens", "less than or equal to 16"),
    Case("half a token", _speculating(numSpeculativeTokens=1.5),
         "spec.speculativeDecoding.numSpeculativeTokens", "integer"),
    Case("n-gram with tree", _speculating(method="NGram", tree={}), "spec.speculativeDecoding",
         "tree goes with methods Eagle3, Eagle and Medusa only"),
    Case("draft model by its presence with tree", _speculating(draft=DRAFT, tree={}), "spec.speculativeDecoding",
         "tree goes with methods Eagle3, Eagle and Medusa only"),
    Case("tree too small for its width", _speculating(
        method="Eagle3", draft=DRAFT, tree={"topK": 4, "maxTokens": 11}), "spec.speculativeDecoding",
        "tree.maxTokens must be at least 3 times topK with numSpeculativeTokens up to 4"),
    Case("tree too small for the draft length's tier", _speculating(
        method="Eagle3", draft=DRAFT, numSpeculativeTokens=5, tree={"topK": 4, "maxTokens": 27}),
        "spec.speculativeDecoding", "raise maxTokens, or lower topK or numSpeculativeTokens"),
    Case("tree without candidates", _speculating(method="Eagle3", draft=DRAFT, tree={"topK": 0}),
         "spec.speculativeDecoding.tree.topK", "greater than or equal to 1"),
    Case("tree of 64 tokens", _speculating(method="Eagle3", draft=DRAFT, tree={"maxTokens": 64}),
         "spec.speculativeDecoding.tree.maxTokens", "less than or equal to 63"),
    Case("acceptance of 101 percent", _speculating(minAcceptancePercent=101),
         "spec.speculativeDecoding.minAcceptancePercent", "less than or equal to 100"),
    Case("acceptance as a ratio", _speculating(minAcceptancePercent="0.5"),
         "spec.speculativeDecoding.minAcceptancePercent", "integer"),
    Case("disabled at nothing", _speculating(saturation={"disableAtConcurrency": 0}),
         "spec.speculativeDecoding.saturation.disableAtConcurrency", "greater than or equal to 1"),
    Case("enabled at the threshold", _speculating(
        saturation={"disableAtConcurrency": 16, "enableAtConcurrency": 16}), "spec.speculativeDecoding.saturation",
        "saturation.enableAtConcurrency must be below disableAtConcurrency"),
    Case("enabled without threshold", _speculating(saturation={"enableAtConcurrency": 4}),
         "spec.speculativeDecoding.saturation", "enableAtConcurrency needs disableAtConcurrency"),
    Case("window of more than an hour", _speculating(saturation={"stabilizationWindowSeconds": 3601}),
         "spec.speculativeDecoding.saturation.stabilizationWindowSeconds", "less than or equal to 3600"),
    # the engine
    Case("unknown device", model(engine={"device": "TPU"}), "spec.engine.device", "CUDA"),
    Case("unknown dtype", model(engine={"dtype": "bfloat16"}), "spec.engine.dtype", "BFloat16"),
    Case("no ranks", model(engine={"tensorParallelSize": 0}), "spec.engine.tensorParallelSize",
         "greater than or equal to 1"),
    Case("all memory", model(engine={"memoryUtilizationPercent": 100}), "spec.engine.memoryUtilizationPercent",
         "less than or equal to 99"),
    Case("no concurrency", model(engine={"maxConcurrency": 0}), "spec.engine.maxConcurrency",
         "greater than or equal to 1"),
    Case("empty image", model(engine={"image": ""}), "spec.engine.image", "at least 1"),
    Case("arguments as one string", model(engine={"extraArgs": "--seed=1"}), "spec.engine.extraArgs", ""),
    Case("number among arguments", model(engine={"extraArgs": [1]}), "spec.engine.extraArgs[0]", "string"),
    Case("too many arguments", model(engine={"extraArgs": ["x"] * 65}), "spec.engine.extraArgs", "64"),
    Case("flag of a field", model(engine={"extraArgs": ["--max-concurrency", "8"]}), "spec.engine",
         "engine.maxConcurrency for --max-concurrency"),
    Case("port of its own", model(engine={"extraArgs": ["--seed=1", "--port=9000"]}), "spec.engine",
         "flag that the operator sets itself"),
    Case("room for no answer", model(engine={"maxModelLength": 1}), "spec.engine.maxModelLength",
         "greater than or equal to 2"),
    Case("variable given twice", model(engine={"env": [{"name": "A", "value": "1"}, {"name": "A"}]}),
         "spec.engine.env", "Duplicate value"),
    Case("variable with two values", model(engine={"env": [{"name": "A", "value": "1", "valueFrom": {}}]}),
         "spec.engine.env[0]", "give value or valueFrom, not both"),
    Case("variable without name", model(engine={"env": [{"value": "1"}]}), "spec.engine.env[0].name", "equired"),
    Case("variable with a space", model(engine={"env": [{"name": "A B"}]}), "spec.engine.env[0].name", "should match"),
    # replicas
    Case("less than no replicas", model(replicas=-1), "spec.replicas", "greater than or equal to 0"),
    Case("replicas in quotes", model(replicas="2"), "spec.replicas", "integer"),
    Case("replicas by truth", model(replicas=True), "spec.replicas", "integer"),
    Case("autoscaling without most", model(autoscaling={"targetConcurrency": 1}),
         "spec.autoscaling.maxReplicas", "equired"),
    Case("autoscaling without target", model(autoscaling={"maxReplicas": 1}),
         "spec.autoscaling.targetConcurrency", "equired"),
    Case("autoscaling to zero", _scaling(minReplicas=0), "spec.autoscaling.minReplicas",
         "greater than or equal to 1"),
    Case("fewest above most", _scaling(minReplicas=9), "spec.autoscaling", "minReplicas must not be above maxReplicas"),
    Case("target that is never reached", _scaling(targetConcurrency=257), "spec",
         "targetConcurrency must not be above engine.maxConcurrency"),
    # cache
    Case("cache of nothing", model(cache={}), "spec.cache", "exactly one of claimName, size, emptyDir"),
    Case("cache of two kinds", model(cache={"claimName": "a", "emptyDir": {}}), "spec.cache", "exactly one of"),
    Case("class of an existing claim", model(cache={"claimName": "a", "storageClassName": "nfs"}), "spec.cache",
         "go with cache.size"),
    Case("retained node disk", model(cache={"emptyDir": {}, "retain": True}), "spec.cache", "go with cache.size"),
    Case("size in words", model(cache={"size": "large"}), "spec.cache.size", "should match"),
    Case("size below zero", model(cache={"size": "-1Gi"}), "spec.cache.size", "should match"),
    Case("size with a space", model(cache={"size": "1 Gi"}), "spec.cache.size", "should match"),
    # the pod
    Case("resource as a list", model(resources={"limits": {"cpu": []}}), "spec.resources.limits.cpu", ""),
    Case("unknown operator of a toleration", model(tolerations=[{"operator": "In"}]),
         "spec.tolerations[0].operator", "Exists"),
    Case("selector with a number", model(nodeSelector={"gpu": 1}), "spec.nodeSelector.gpu", "string"),
    Case("pull secret twice", model(imagePullSecrets=[{"name": "a"}, {"name": "a"}]), "spec.imagePullSecrets",
         "Duplicate value"),
    Case("pod template as text", model(podTemplate="x"), "spec.podTemplate", ""),
    # rollout
    Case("nothing may move", model(rollout={"maxSurge": 0, "maxUnavailable": "0%"}), "spec.rollout",
         "must not both be 0"),
    Case("nothing may move on CUDA", model(rollout={"maxUnavailable": 0}), "spec",
         "rollout.maxUnavailable 0 needs rollout.maxSurge of at least 1"),
    Case("nothing may move on CPU", model(engine={"device": "CPU"}, rollout={"maxSurge": "0%"}), "spec",
         "rollout.maxSurge 0 needs rollout.maxUnavailable of at least 1"),
    Case("surge in words", model(rollout={"maxSurge": "all"}), "spec.rollout.maxSurge", "should match"),
    Case("count in quotes", model(rollout={"maxSurge": "1"}), "spec.rollout.maxSurge", "should match"),
    Case("surge below zero", model(rollout={"maxSurge": -1}), "spec.rollout.maxSurge", "greater than or equal to 0"),
    Case("drain below zero", model(rollout={"drainTimeoutSeconds": -1}), "spec.rollout.drainTimeoutSeconds",
         "greater than or equal to 0"),
    Case("hasty deadline", model(rollout={"progressDeadlineSeconds": 29}), "spec.rollout.progressDeadlineSeconds",
         "greater than or equal to 30"),
    Case("suspended in words", model(suspend="yes"), "spec.suspend", "boolean"),
)  # fmt: skip

# Refused by pydantic; by the API server only when asked to be strict, as kubectl does. Otherwise they are dropped.
UNKNOWN = (
    Case("field of the spec", model(replica=1), "spec.replica"),
    Case("field within", _speculating(numTokens=4), "spec.speculativeDecoding.numTokens"),
    Case("field of a later version", _speculating(lookahead=4), "spec.speculativeDecoding.lookahead"),
    Case("field in an item", model(engine={"env": [{"name": "A", "vaule": "1"}]}), "spec.engine.env[0].vaule"),
)

UPDATES = (
    Update("mode and tokens", {}, {"speculativeDecoding": {"mode": "Disabled", "numSpeculativeTokens": 9}}),
    Update("tree added", {"speculativeDecoding": {"method": "Eagle3", "draft": DRAFT}},
           {"speculativeDecoding": {"method": "Eagle3", "draft": DRAFT, "tree": {}}}),
    Update("longer drafts than the tree holds",
           {"speculativeDecoding": {"method": "Eagle3", "draft": DRAFT, "tree": {"topK": 8}}},
           {"speculativeDecoding": {"method": "Eagle3", "draft": DRAFT, "tree": {"topK": 8},
                                    "numSpeculativeTokens": 9}}, "raise maxTokens, or lower topK"),
    Update("model", {}, {"model": {"uri": "pvc://models/other"}}),
    Update("larger claim", {"cache": {"size": "1Gi"}}, {"cache": {"size": "2Gi", "retain": False}}),
    Update("other limit", {"cache": {"emptyDir": {}}}, {"cache": {"emptyDir": {"sizeLimit": "1Gi"}}}),
    Update("cache added", {}, {"cache": {"claimName": "a"}}, "cache cannot be added or removed"),
    Update("cache removed", {"cache": {"claimName": "a"}}, {}, "cache cannot be added or removed"),
    Update("other claim", {"cache": {"claimName": "a"}}, {"cache": {"claimName": "b"}}, "cache identity is immutable"),
    Update("other kind", {"cache": {"size": "1Gi"}}, {"cache": {"emptyDir": {}}}, "cache identity is immutable"),
    Update("other class", {"cache": {"size": "1Gi"}}, {"cache": {"size": "1Gi", "storageClassName": "nfs"}},
           "cache identity is immutable"),
)  # fmt: skip
