"""Models of the Hugging Face hub, hf://ORG/NAME: the files that are needed, at one commit, into a cache on disk.

HF_ENDPOINT names another hub, HF_TOKEN authorises, HF_HUB_OFFLINE=1 uses what is in the cache alone.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path, PurePosixPath
from typing import TypeVar

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import disable_progress_bars

from outrider_runtime.config import SourceConfig
from outrider_runtime.errors import Refusal
from outrider_runtime.models.host import writable
from outrider_runtime.models.sources.found import Found

RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0)  # between tries while the hub cannot be reached or answers 5xx
# Of weights, the first there is
FORMATS = (
    ("model", ".safetensors"),
    ("pytorch_model", ".bin"),
    ("medusa_lm_head", ".safetensors"),
    ("medusa_lm_head", ".pt"),
    ("", ".gguf"),
)
WORKERS = 8
SPARE_BYTES = 100 * 10**6  # left free on the disk

T = TypeVar("T")


def find(source: SourceConfig, cache: Path, report: Callable[[str], None], weights: bool) -> Found:
    """Raises Refusal: Unauthorized, ModelNotFound, UnsupportedModel, OutOfSpace."""
    disable_progress_bars()
    repo = source.uri.removeprefix("hf://")
    if constants.HF_HUB_OFFLINE:
        return _cached(source, repo, cache, "HF_HUB_OFFLINE is set")
    try:
        info = _patiently(
            lambda: HfApi(_endpoint()).model_info(repo, revision=source.revision, files_metadata=True), source, report
        )
    except _Unreachable as error:
        return _cached(source, repo, cache, str(error))
    commit = info.sha or ""
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    wanted = files(list(sizes), weights)
    if (several := sum(name.endswith(".gguf") for name in wanted)) > 1:
        raise Refusal(
            "UnsupportedModel",
            f"{source.uri}: {several} GGUF files in it, and none can be named; give a repository of one, or download "
            "one and give its path",
        )
    missing = [name for name in wanted if not isinstance(try_to_load_from_cache(repo, name, cache, commit), str)]
    if missing:
        _make_room(cache, sum(sizes[name] for name in missing))
        try:
            _download(source, repo, commit, {name: sizes[name] for name in missing}, cache, report)
        except _Unreachable as error:
            raise Refusal("ModelNotFound", f"{source.uri}: {error}; check the network, or HF_ENDPOINT") from error
    entry = cache / repo_folder_name(repo_id=repo, repo_type="model")
    folder = entry / "snapshots" / commit
    if not folder.is_dir():
        raise Refusal("ModelNotFound", f"{source.uri}: no file of a model in it; correct the name")
    if weights:  # from now on the name leads to this commit without the hub, too
        ref = entry / "refs" / (source.revision or constants.DEFAULT_REVISION)
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)
    return Found(folder, commit, complete=weights)


def files(names: list[str], weights: bool) -> list[str]:
    """Which of a repository's files to download: what describes the model, and its weights in one format."""
    top = [name for name in names if len(PurePosixPath(name).parts) == 1]
    described = [name for name in top if PurePosixPath(name).suffix in (".json", ".jinja")]
    for prefix, suffix in FORMATS:
        found = [name for name in top if name.startswith(prefix) and name.endswith(suffix)]
        if found:
            return described + (found if weights or suffix == ".gguf" else [])  # which describes itself
    return described


class _Unreachable(Exception):
    """Network trouble that outlived the retries."""


def _download(
    source: SourceConfig,
    repo: str,
    commit: str,
    sizes: dict[str, int],
    cache: Path,
    report: Callable[[str], None],
) -> None:
    def one(name: str) -> str:
        _patiently(
            lambda: hf_hub_download(repo, name, revision=commit, cache_dir=cache, endpoint=_endpoint()), source, report
        )
        return name

    total, done, start = sum(sizes.values()), 0, time.monotonic()
    report(f"{source.uri}: downloading {len(sizes)} files, {total / 1e9:.2f} GB")
    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            for future in as_completed([pool.submit(one, name) for name in sizes]):
                done += sizes[future.result()]
                seconds = max(time.monotonic() - start, 1e-6)
                report(
                    f"{source.uri}: {done / 1e9:.2f} of {total / 1e9:.2f} GB, {done / 1e9 / seconds:.2f} GB/s, "
                    f"{seconds:.0f} s"
                )
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _patiently(call: Callable[[], T], source: SourceConfig, report: Callable[[str], None]) -> T:
    """The call's result; tried again on network trouble, refused at once on what trying again cannot mend."""
    for pause in (*RETRY_SECONDS, None):
        try:
            return call()
        except HFValidationError as error:
            raise _misnamed(source) from error
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status < 500 and status != 429:
                raise _refusal(source, error, status) from error
            trouble = f"the hub answered {status}"
        except (HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
            trouble = f"the hub cannot be reached ({type(error).__name__})"
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise Refusal("OutOfSpace", "the disk filled up while downloading; give a larger cache") from error
            raise
        if pause is None:
            break
        report(f"{source.uri}: {trouble}; trying again in {pause:.0f} s")
        time.sleep(pause)
    raise _Unreachable(f"{trouble}, {len(RETRY_SECONDS) + 1} times")


def _refusal(source: SourceConfig, error: HfHubHTTPError, status: int) -> Refusal:
    if status in (401, 403):
        # The hub says so of a gated repository; without a token a private one and a misspelt name look the same
        hidden = isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError)
        told = ", as it does to names that do not exist; correct the name or" if hidden else ";"
        return Refusal(
            "Unauthorized",
            f"{source.uri}: the hub answered {status}{told} set model.tokenSecretRef to a token with access",
        )
    if isinstance(error, RevisionNotFoundError):
        return Refusal("ModelNotFound", f"{source.uri}: no revision {source.revision}; correct it")
    return Refusal("ModelNotFound", f"{source.uri}: the hub answered {status}; correct the name")


def _misnamed(source: SourceConfig) -> Refusal:
    return Refusal("InvalidArgument", f"{source.uri}: not hf://ORG/NAME; correct it")


def _cached(source: SourceConfig, repo: str, cache: Path, why: str) -> Found:
    try:
        folder = snapshot_download(repo, revision=source.revision, cache_dir=cache, local_files_only=True)
    except HFValidationError as error:
        raise _misnamed(source) from error
    except LocalEntryNotFoundError as error:
        raise Refusal("ModelNotFound", f"{source.uri}: {why}, and it is not in the cache {cache}") from error
    return Found(Path(folder), Path(folder).name)


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT")


def _make_room(cache: Path, needed: int) -> None:
    free = shutil.disk_usage(writable(cache)).free
    if needed + SPARE_BYTES > free:
        raise Refusal(
            "OutOfSpace",
            f"{needed / 1e9:.1f} GB to download, {free / 1e9:.1f} GB free in the cache; give a larger cache",
        )
