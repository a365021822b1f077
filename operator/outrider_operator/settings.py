"""Every knob of the operator: an environment variable OUTRIDER_NAME and a flag --name each, checked once at start."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def _own_namespace() -> str:
    try:
        return _OWN_NAMESPACE.read_text().strip()
    except OSError:
        return "outrider-system"


def _identity() -> str:
    """One for each process of a machine, and the same again when a pod's container restarts."""
    return f"{socket.gethostname()}_{os.getpid()}"


class Settings(BaseSettings):
    """Outrider's operator: reconciles SpeculativeModel objects.

    Every flag is also an environment variable: --runtime-image is OUTRIDER_RUNTIME_IMAGE.
    """

    model_config = SettingsConfigDict(
        env_prefix="OUTRIDER_",
        extra="ignore",
        frozen=True,
        cli_prog_name="outrider-operator",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    # what is served
    runtime_image: str = Field(
        "outrider-runtime:latest",
        min_length=1,
        description="Image of the runtime for objects without spec.engine.image; recorded on each Deployment.",
    )
    network_policy: bool = Field(False, description="Give each object a NetworkPolicy that guards its admin port.")
    monitoring_namespace: str = Field(
        "monitoring", description="Namespace that a NetworkPolicy lets read metrics, beside the operator's own."
    )

    # where it looks
    namespaces: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Namespaces to watch, separated by commas; none means all of them."
    )
    kubeconfig: str = Field("", description="Kubeconfig file; default: the pod's own account, then KUBECONFIG.")
    context: str = Field("", description="Context of the kubeconfig; default: its current one.")

    # how it works
    concurrency: int = Field(16, ge=1, le=256, description="Objects reconciled at once.")
    api_timeout_seconds: float = Field(15, gt=0, description="How long one API request may take.")
    relist_seconds: float = Field(
        600, gt=0, description="How often everything is listed anew, give or take a tenth, to repair drift."
    )
    measure_seconds: float = Field(
        5, gt=0, le=10, description="How often each ready pod is measured; decisions need it at least every 10 s."
    )
    measure_concurrency: int = Field(64, ge=1, description="Pods measured at once.")
    retry_seconds: float = Field(0.2, gt=0, description="First delay after a failure; it doubles with each.")
    retry_limit_seconds: float = Field(120, gt=0, description="Longest delay after failures.")

    # leadership
    leader_elect: bool = Field(True, description="Work only while holding the Lease.")
    lease_name: str = Field("outrider-operator", min_length=1, description="Name of the Lease.")
    lease_seconds: int = Field(15, ge=3, description="How long a silent leader keeps the Lease.")
    namespace: str = Field(
        default_factory=_own_namespace, min_length=1, description="The operator's own namespace, of the Lease."
    )
    identity: str = Field(default_factory=_identity, min_length=1, description="Who holds the Lease; the pod's name.")

    # how it is watched
    bind_address: str = Field("0.0.0.0", description="Address of the health and metrics ports.")
    health_port: int = Field(8080, ge=0, le=65535, description="Port of /healthz; 0 turns it off.")
    metrics_port: int = Field(8081, ge=0, le=65535, description="Port of /metrics; 0 turns it off.")
    log_format: Literal["json", "console"] = Field("json", description="One JSON object a line, or plain text.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")

    @field_validator("namespaces", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            return parts
        return tuple(name for part in parts for name in str(part).replace(" ", "").split(",") if name)
