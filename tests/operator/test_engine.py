"""The runtime's command line and environment: what pods are started with, and what may change without a restart."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from tests.operator.build import DRAFTED, HEAD, model, spec

from outrider_operator.api.v1alpha1 import Engine
from outrider_operator.engine import arguments, claims, environment
from outrider_runtime.flags import parse as flags_of_the_runtime


def _arguments(*parts, tier=4):
    target = model(*parts)
    return " ".join(arguments(target, target.spec, tier))


def _environment(*parts):
    target = model(*parts)
    return {variable["name"]: variable for variable in environment(target, target.spec)}


def test_the_smallest_object_serves_by_ngram_on_a_gpu_under_its_own_name():
    assert _arguments() == (
        "serve --model hf://Qwen/Qwen2.5-7B-Instruct --served-model-name llama --speculative-method ngram"
        " --max-speculative-tokens 4 --device cuda --dtype auto --max-concurrency 256 --gpu-memory-utilization 0.90"
        " --tensor-parallel-size 1 --port 8000 --admin-port 8001 --admin-token-file /etc/outrider/admin/token"
        " --drain-timeout 60 --download-dir /var/cache/outrider/models"
    )


def test_every_field_of_the_spec_has_its_flag():
    line = _arguments(
        {
            "model": {"uri": "hf://a/b", "revision": "v1", "name": "chat"},
            "speculativeDecoding": {"draft": {"uri": "hf://a/c", "revision": "v2"}},
            "engine": {
                "device": "CPU",
                "dtype": "BFloat16",
                "maxModelLength": 4096,
                "maxConcurrency": 8,
                "memoryUtilizationPercent": 5,
                "extraArgs": ["--log-level", "debug"],
            },
            "rollout": {"drainTimeoutSeconds": 7},
        },
        tier=8,
    )
    for part in (
        "--model hf://a/b --revision v1 --served-model-name chat",
        "--speculative-method draft-model --draft-model hf://a/c --draft-revision v2 --max-speculative-tokens 8",
        "--device cpu --dtype bfloat16 --max-model-len 4096 --max-concurrency 8 --gpu-memory-utilization 0.05",
        "--drain-timeout 7",
    ):
        assert part in line
    assert line.endswith("--log-level debug")


def test_no_flag_of_the_operators_own_is_taken_from_extra_args():
    line = _arguments(
        {
            "model": {"uri": "hf://a/b", "revision": "v1"},
            "speculativeDecoding": {"method": "Eagle3", "tree": {}, "draft": {"uri": "hf://a/c", "revision": "v2"}},
            "engine": {"maxModelLength": 4096},
        }
    )
    flags = [word for word in line.split() if word.startswith("--")]
    assert len(flags) == 20
    for flag in flags:
        for args in ([flag, "x"], ["--seed=1", f"{flag}=x"]):
            with pytest.raises(ValidationError, match=r"engine\.extraArgs has a flag that the operator sets itself"):
                Engine(extraArgs=args)
        assert Engine(extraArgs=[f"{flag}-of-another"]).extra_args


def test_a_tree_is_asked_for_by_both_its_flags_and_a_chain_by_none():
    assert "--tree" not in _arguments(HEAD)
    tree = {"speculativeDecoding": {"tree": {"topK": 8}}}
    assert "--max-speculative-tokens 4 --tree-top-k 8 --tree-max-tokens 60 --device" in _arguments(HEAD, tree)


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (DRAFTED,),
        ({"speculativeDecoding": {"method": "Suffix"}},),
        (HEAD, {"speculativeDecoding": {"tree": {}}}),
        ({"engine": {"device": "CPU", "dtype": "Float16", "maxConcurrency": 1, "memoryUtilizationPercent": 1}},),
    ],
    ids=str,
)
def test_the_runtime_understands_what_it_is_started_with(parts):
    target = model(*parts)
    flags, warnings = flags_of_the_runtime(arguments(target, target.spec, 16))
    assert warnings == []
    assert flags.command == "serve"
    assert flags.model == target.spec.model.uri
    assert flags.max_speculative_tokens == 16
    assert flags.gpu_memory_utilization == target.spec.engine.memory_utilization_percent / 100


@pytest.mark.parametrize(
    "change",
    [
        {"speculativeDecoding": {"mode": "Disabled"}},
        {"speculativeDecoding": {"mode": "Enabled"}},
        {"speculativeDecoding": {"numSpeculativeTokens": 8}},
        {"speculativeDecoding": {"minAcceptancePercent": 50}},
        {"speculativeDecoding": {"saturation": {"disableAtConcurrency": 3, "enableAtConcurrency": 2}}},
    ],
    ids=str,
)
def test_what_travels_in_the_policy_is_not_on_the_command_line(change):
    assert _arguments(DRAFTED, change) == _arguments(DRAFTED)
    assert _environment(DRAFTED, change) == _environment(DRAFTED)


def test_the_policy_comes_from_the_config_map_and_may_be_missing():
    source = _environment()["OUTRIDER_POLICY"]["valueFrom"]["configMapKeyRef"]
    assert source == {"name": "llama-policy", "key": "policy", "optional": True}


def test_the_hub_is_asked_only_where_weights_come_from_it():
    claim = {"model": {"uri": "pvc://weights/a"}}
    hub_draft = {"speculativeDecoding": {"draft": {"uri": "hf://a/b"}}}
    assert _environment()["HF_HUB_OFFLINE"]["value"] == "0"
    assert _environment(claim)["HF_HUB_OFFLINE"]["value"] == "1"
    assert _environment(claim, hub_draft)["HF_HUB_OFFLINE"]["value"] == "0"


def test_secrets_are_referred_to_and_never_read():
    found = _environment(DRAFTED, {"engine": {"apiKeySecretRef": {"name": "api", "key": "k"}}})
    assert found["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hf-token", "key": "token"}}
    assert found["OUTRIDER_API_KEY"]["valueFrom"] == {"secretKeyRef": {"name": "api", "key": "k"}}
    assert not {"HF_TOKEN", "OUTRIDER_API_KEY"} & set(_environment())


def test_threads_follow_the_cpu_limit_on_a_cpu_alone():
    limit = {"resources": {"limits": {"cpu": "2"}}}
    cores = _environment({"engine": {"device": "CPU"}}, limit)["OMP_NUM_THREADS"]["valueFrom"]["resourceFieldRef"]
    assert cores == {"containerName": "server", "resource": "limits.cpu", "divisor": "1"}
    assert "OMP_NUM_THREADS" not in _environment(limit)
    assert "OMP_NUM_THREADS" not in _environment({"engine": {"device": "CPU"}})


def test_a_users_variable_takes_the_place_of_ours():
    from_field = {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    target = model({"engine": {"env": [{"name": "HF_HUB_OFFLINE", "value": "1"}, from_field]}})
    variables = environment(target, target.spec)
    assert [v for v in variables if v["name"] == "HF_HUB_OFFLINE"] == [{"name": "HF_HUB_OFFLINE", "value": "1"}]
    assert from_field in variables


def test_a_claim_that_holds_both_models_is_one_claim():
    both = {"model": {"uri": "pvc://weights/a"}, "speculativeDecoding": {"draft": {"uri": "pvc://weights/b/c"}}}
    assert claims(spec(both)) == ["weights"]
    assert claims(spec(both, {"speculativeDecoding": {"draft": {"uri": "pvc://more/x"}}})) == ["weights", "more"]
    assert claims(spec()) == []
