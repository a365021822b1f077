"""hf:// against a hub on loopback: what is fetched, what is tried again, and what is refused."""

from __future__ import annotations

import errno
import shutil

import pytest
from huggingface_hub import constants
from tests.runtime.models.fake_hub import COMMIT, FakeHub

from outrider_runtime.config import CacheConfig, EngineConfig, SourceConfig, SpeculationConfig
from outrider_runtime.errors import Refusal
from outrider_runtime.models.checkpoint import open_checkpoint
from outrider_runtime.models.loader import load
from outrider_runtime.models.sources import find, hub

MODEL = SourceConfig("hf://org/model")


@pytest.fixture
def server(tiny_model_dir, tmp_path, monkeypatch):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "repository")
    for name in ("README.md", "consolidated.safetensors", "pytorch_model.bin", "model.gguf"):
        (folder / name).write_bytes(b"not wanted")
    with FakeHub(folder) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", "")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub, "RETRY_SECONDS", (0.01, 0.01))
        yield server


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def refusal(cache, source=MODEL, weights=True):
    with pytest.raises(Refusal) as caught:
        find(source, cache, lambda line: None, weights)
    return caught.value.reason, caught.value.message


def test_a_model_is_downloaded_whole_at_one_commit_and_nothing_else(server, cache):
    lines = []
    found = find(MODEL, cache, lines.append)
    assert (found.revision, found.complete) == (COMMIT, True)
    names = {file.name for file in found.path.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    checkpoint = open_checkpoint("m", found.path, cache)
    assert dict(checkpoint.weights()).keys() == checkpoint.weights().shapes.keys()
    assert checkpoint.vocabulary()
    assert lines[0] == "hf://org/model: downloading 6 files, 0.00 GB"
    assert len(lines) == 7


def test_the_description_comes_without_the_weights_and_then_the_weights_alone(server, cache):
    found = find(MODEL, cache, lambda line: None, weights=False)
    assert not found.complete
    assert not (found.path / "model.safetensors").exists()
    open_checkpoint("m", found.path, cache).vocabulary()
    assert find(SourceConfig(MODEL.uri, COMMIT), cache, lambda line: None).path == found.path
    assert (found.path / "model.safetensors").exists()
    assert server.requests["GET config.json"] == 1


def test_a_draft_of_another_tokenizer_is_refused_without_its_weights(server, cache, foreign_draft_dir, tiny_model_dir):
    shutil.rmtree(server.folder)
    shutil.copytree(foreign_draft_dir, server.folder)
    config = EngineConfig(
        SourceConfig(str(tiny_model_dir)),
        speculation=SpeculationConfig("draft-model", MODEL),
        cache=CacheConfig(num_blocks=4),
        download_dir=cache,
    )
    assert load(config, lambda line: None).draft_state.reason == "TokenizerMismatch"
    assert not server.requests["GET model.safetensors"]


def test_a_target_of_the_hub_is_loaded_at_the_commit_that_was_checked(server, cache):
    loaded = load(EngineConfig(MODEL, cache=CacheConfig(num_blocks=4), download_dir=cache), lambda line: None)
    assert loaded.target.loaded.resolved_revision == COMMIT
    assert loaded.tokenizer_path.is_relative_to(cache)


def test_a_cache_that_cannot_be_made_is_refused(server, tmp_path):
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file" / "cache") == (
        "InvalidArgument",
        f"{tmp_path}/file/cache cannot be made (Not a directory); give another --download-dir",
    )


def test_what_is_in_the_cache_is_not_downloaded_again(server, cache):
    find(MODEL, cache, lambda line: None)
    server.requests.clear()
    lines = []
    assert find(MODEL, cache, lines.append).revision == COMMIT
    assert [request for request in server.requests if request != "GET main"] in ([], ["GET model"])
    assert lines == []


def test_a_hub_that_is_away_is_no_trouble_once_the_model_is_in_the_cache(server, cache):
    find(MODEL, cache, lambda line: None)
    server.failures = 1000
    assert find(MODEL, cache, lambda line: None).revision == COMMIT


def test_offline_only_the_cache_is_asked(server, cache, monkeypatch):
    find(MODEL, cache, lambda line: None)
    server.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find(MODEL, cache, lambda line: None).revision == COMMIT
    assert not server.requests
    assert refusal(cache, SourceConfig("hf://org/other")) == (
        "ModelNotFound",
        f"hf://org/other: HF_HUB_OFFLINE is set, and it is not in the cache {cache}",
    )


@pytest.mark.parametrize("failures", [2, -2], ids=["503", "dropped connections"])
def test_network_trouble_is_tried_again(server, cache, failures):
    server.failures = failures
    lines = []
    assert find(MODEL, cache, lines.append).revision == COMMIT
    assert any("trying again" in line for line in lines)


def test_trouble_that_lasts_is_refused_in_the_end(server, cache):
    server.failures = 1000
    reason, message = refusal(cache)
    assert reason == "ModelNotFound"
    assert message == f"hf://org/model: the hub answered 503, 3 times, and it is not in the cache {cache}"


def test_the_token_is_sent(server, cache, monkeypatch):
    server.token = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert find(MODEL, cache, lambda line: None).revision == COMMIT


@pytest.mark.parametrize(("status", "code"), [(401, "GatedRepo"), (403, "GatedRepo"), (403, "")])
def test_a_hub_that_denies_access_asks_for_a_token(server, cache, status, code):
    server.denied, server.denial = status, code
    assert refusal(cache) == (
        "Unauthorized",
        f"hf://org/model: the hub answered {status}; set model.tokenSecretRef to a token with access",
    )


def test_a_name_that_the_hub_may_not_know_is_to_be_looked_at_before_a_token_is_fetched(server, cache):
    server.denied, server.denial = 401, "RepoNotFound"
    assert refusal(cache, SourceConfig("hf://org/misspelt")) == (
        "Unauthorized",
        "hf://org/misspelt: the hub answered 401, as it does to names that do not exist; correct the name or set "
        "model.tokenSecretRef to a token with access",
    )


def test_a_wrong_token_is_refused_and_not_shown(server, cache, monkeypatch):
    server.token = "hf_right"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    reason, message = refusal(cache)
    assert reason == "Unauthorized"
    assert "hf_wrong" not in message


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (SourceConfig("hf://org/nothing"), "hf://org/nothing: the hub answered 404; correct the name"),
        (SourceConfig("hf://org/model", "nowhere"), "hf://org/model: no revision nowhere; correct it"),
    ],
)
def test_a_model_or_revision_that_is_not_there_is_refused(server, cache, source, told):
    assert refusal(cache, source) == ("ModelNotFound", told)


@pytest.mark.parametrize("uri", ["hf://org/model/more", "hf://", "hf://a b/c"])
@pytest.mark.parametrize("offline", [False, True])
def test_a_name_that_is_none_is_refused(server, cache, monkeypatch, uri, offline):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    assert refusal(cache, SourceConfig(uri))[0] == "InvalidArgument"


def test_of_a_repository_of_many_gguf_files_none_is_downloaded(server, cache):
    (server.folder / "model.safetensors").unlink()
    (server.folder / "pytorch_model.bin").unlink()
    (server.folder / "other.gguf").write_bytes(b"not wanted")
    for weights in (True, False):
        assert refusal(cache, weights=weights) == (
            "UnsupportedModel",
            "hf://org/model: 2 GGUF files in it, and none can be named; give a repository of one, or download one and "
            "give its path",
        )
    assert server.requests.keys() <= {"GET main", "GET model"}


def test_too_small_a_cache_is_refused_before_anything_is_downloaded(server, cache):
    server.claimed_size = 10**15
    reason, message = refusal(cache)
    assert reason == "OutOfSpace"
    assert message.startswith("6000000.0 GB to download, ")
    assert message.endswith(" GB free in the cache; give a larger cache")
    assert server.requests.keys() <= {"GET main", "GET model"}


def test_a_disk_that_fills_up_on_the_way_is_refused(server, cache, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub, "hf_hub_download", full)
    assert refusal(cache) == ("OutOfSpace", "the disk filled up while downloading; give a larger cache")


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["model-1-of-2.safetensors", "model-2-of-2.safetensors", "consolidated.safetensors"], None),
        (["pytorch_model.bin", "tf_model.h5", "m.gguf"], ["pytorch_model.bin"]),
        (["m.gguf", "README.md"], ["m.gguf"]),
        (["original/model.safetensors", "pytorch_model.bin"], ["pytorch_model.bin"]),
    ],
)
def test_weights_are_wanted_in_one_format(names, wanted):
    found = hub.files(["config.json", *names], weights=True)
    assert found == ["config.json", *(names[:2] if wanted is None else wanted)]
    described = ["config.json"] if found[1] != "m.gguf" else found  # which describes itself
    assert hub.files(["config.json", *names], weights=False) == described
