"""Keys and certificates, by openssl: elliptic curves, because making an RSA key can take a second."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from .errors import ClusterError

_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")


def _openssl(*arguments: object) -> None:
    try:
        result = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True)
    except FileNotFoundError:
        raise ClusterError("openssl is missing: run `hack/cluster/cluster packages` or install it") from None
    if result.returncode:
        raise ClusterError(f"openssl {arguments[0]} failed: {result.stderr.strip()}")


def signing_key(path: Path) -> Path:
    """A key that ServiceAccount tokens are signed with, in the one of openssl's formats that kube-apiserver reads."""
    _openssl("ecparam", "-genkey", "-noout", "-name", "prime256v1", "-out", path)
    return path


def authority(folder: Path) -> tuple[Path, Path]:
    """A certificate authority for clients: its certificate and its key."""
    certificate, key = folder / "clients.crt", folder / "clients.key"
    subject = "/CN=outrider-clients"
    _openssl("req", "-x509", *_EC, "-keyout", key, "-out", certificate, "-subj", subject, "-days", 365)
    return certificate, key


def client(folder: Path, authority: tuple[Path, Path], user: str, groups: Sequence[str]) -> tuple[Path, Path]:
    """A client certificate that Kubernetes reads as `user` in `groups`, and its key."""
    name = "".join(c if c.isalnum() else "-" for c in user)
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    subject = "".join(f"/{kind}={_escape(value)}" for kind, value in [("CN", user), *(("O", g) for g in groups)])
    ca_certificate, ca_key = authority
    _openssl("req", "-x509", "-CA", ca_certificate, "-CAkey", ca_key, *_EC, "-keyout", key, "-out", certificate,
             "-subj", subject, "-days", 365)  # fmt: skip
    return certificate, key


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("/", "\\/").replace("+", "\\+")
