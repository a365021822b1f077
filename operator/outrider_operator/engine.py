"""How the runtime is started: its command line, ports, environment and folders. Another engine would join beside it."""

from __future__ import annotations

from typing import Any

from outrider_operator.api.v1alpha1 import Device, Method, SecretKey, SpeculativeModelSpec
from outrider_operator.observe import Model
from outrider_operator.render.meta import policy_name
from outrider_operator.render.policy import POLICY_KEY

PORT = 8000
ADMIN_PORT = 8001
CONTAINER = "server"

CACHE_DIR = "/var/cache/outrider"
CLAIMS_DIR = "/mnt/models"  # pvc://CLAIM/PATH is at CLAIMS_DIR/CLAIM/PATH
ADMIN_DIR = "/etc/outrider/admin"

_METHODS = {
    Method.DRAFT_MODEL: "draft-model",
    Method.NGRAM: "ngram",
    Method.SUFFIX: "suffix",
    Method.EAGLE3: "eagle3",
    Method.EAGLE: "eagle",
    Method.MEDUSA: "medusa",
}


def arguments(model: Model, spec: SpeculativeModelSpec, tier: int) -> list[str]:
    """Arguments after the image's entry point. `tier` is the draft length the runtime prepares for.

    Nothing that may change without a restart is in here: those things travel in the policy.
    """
    speculation, engine = spec.speculative_decoding, spec.engine
    args = ["serve", "--model", spec.model.uri]
    if spec.model.revision is not None:
        args += ["--revision", spec.model.revision]
    args += ["--served-model-name", spec.model.name or model.name]
    args += ["--speculative-method", _METHODS[speculation.effective_method]]
    if speculation.draft is not None:
        args += ["--draft-model", speculation.draft.uri]
        if speculation.draft.revision is not None:
            args += ["--draft-revision", speculation.draft.revision]
    args += ["--max-speculative-tokens", str(tier)]
    if speculation.tree is not None:
        args += ["--tree-top-k", str(speculation.tree.top_k), "--tree-max-tokens", str(speculation.tree.max_tokens)]
    args += ["--device", engine.device.lower(), "--dtype", engine.dtype.lower()]
    if engine.max_model_length is not None:
        args += ["--max-model-len", str(engine.max_model_length)]
    args += ["--max-concurrency", str(engine.max_concurrency)]
    args += ["--gpu-memory-utilization", f"{engine.memory_utilization_percent / 100:.2f}"]
    args += ["--tensor-parallel-size", str(engine.tensor_parallel_size)]
    args += ["--port", str(PORT), "--admin-port", str(ADMIN_PORT)]
    args += ["--admin-token-file", f"{ADMIN_DIR}/token"]
    args += ["--drain-timeout", str(spec.rollout.drain_timeout_seconds)]
    args += ["--download-dir", f"{CACHE_DIR}/models"]
    return args + list(engine.extra_args)


def environment(model: Model, spec: SpeculativeModelSpec) -> list[dict[str, Any]]:
    """The container's variables, the user's own last and instead of ours where they share a name."""
    downloads = any(uri.startswith("hf://") for uri in uris(spec))
    ours: list[dict[str, Any]] = [
        {
            "name": "OUTRIDER_POLICY",
            "valueFrom": {"configMapKeyRef": {"name": policy_name(model.name), "key": POLICY_KEY, "optional": True}},
        },
        {"name": "HF_HUB_OFFLINE", "value": "0" if downloads else "1"},
    ]
    if spec.model.token_secret_ref is not None:
        ours.append(_from_secret("HF_TOKEN", spec.model.token_secret_ref))
    if spec.engine.api_key_secret_ref is not None:
        ours.append(_from_secret("OUTRIDER_API_KEY", spec.engine.api_key_secret_ref))
    if spec.engine.device is Device.CPU and "cpu" in spec.resources.limits:
        # torch would start a thread for each core of the node, whatever the container may use
        cores = {"containerName": CONTAINER, "resource": "limits.cpu", "divisor": "1"}
        ours.append({"name": "OMP_NUM_THREADS", "valueFrom": {"resourceFieldRef": cores}})
    users = [variable.model_dump(by_alias=True, exclude_none=True) for variable in spec.engine.env]
    return list({variable["name"]: variable for variable in ours + users}.values())


def uris(spec: SpeculativeModelSpec) -> list[str]:
    """Where weights come from: the target's and, when there is one, the draft's."""
    draft = spec.speculative_decoding.draft
    return [spec.model.uri, *([draft.uri] if draft else [])]


def claims(spec: SpeculativeModelSpec) -> list[str]:
    """Claims that hold weights, each once."""
    found = [uri.removeprefix("pvc://").split("/", 1)[0] for uri in uris(spec) if uri.startswith("pvc://")]
    return list(dict.fromkeys(found))


def _from_secret(name: str, ref: SecretKey) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": ref.name, "key": ref.key}}}
