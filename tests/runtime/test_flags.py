"""Flags, environment and the flags people paste become configuration; bad ones a line that says what to change."""

from __future__ import annotations

import json

import pytest

from outrider_runtime.config import (
    CacheConfig,
    EngineConfig,
    SchedulerConfig,
    ServerConfig,
    SourceConfig,
    SpeculationConfig,
    TreeConfig,
)
from outrider_runtime.errors import Refusal
from outrider_runtime.flags import engine_config, parse, server_config
from outrider_runtime.speculation.policy import Policy

MODEL = ["serve", "--model", "hf://org/model"]
POLICY = {
    "revision": "r1",
    "mode": "Auto",
    "state": "Suspended",
    "reason": "Saturated",
    "numSpeculativeTokens": 3,
    "minAcceptancePercent": 40,
}


def configure(*argv, **environment):
    flags, warnings = parse([*MODEL, *argv])
    return engine_config(flags, environment), server_config(flags, environment), warnings


def test_a_model_alone_is_enough():
    engine, server, warnings = configure()
    assert engine == EngineConfig(
        SourceConfig("hf://org/model"),
        scheduler=SchedulerConfig(256, 256),
        policy=Policy(num_speculative_tokens=4),
    )
    assert server == ServerConfig("org/model")
    assert warnings == []


@pytest.mark.parametrize(
    ("argv", "tokens"),
    [
        ("", 256),
        ("--device cuda", 2048),
        ("--max-concurrency 300", 300),
        ("--device cuda --max-concurrency 4096", 4096),
    ],
)
def test_the_token_budget_suits_the_device_and_holds_every_running_request(argv, tokens):
    engine, _, _ = configure(*argv.split())
    assert engine.scheduler.max_batched_tokens == tokens


def test_every_flag_the_operator_renders_arrives(tmp_path):
    key = tmp_path / "key"
    key.write_text("secret\n")
    flags = """
        --revision main --served-model-name name --speculative-method draft-model --draft-model pvc://claim/draft
        --draft-revision v2 --max-speculative-tokens 8 --device cuda --dtype bfloat16 --max-model-len 4096
        --max-concurrency 32 --gpu-memory-utilization 0.85 --tensor-parallel-size 1 --host 127.0.0.1 --port 9000
        --admin-port 9001 --admin-token-file /etc/token --drain-timeout 30 --download-dir /cache --kv-blocks 100
        --block-size 32 --max-batched-tokens 512 --no-prefix-caching
    """
    engine, server, warnings = configure(
        *flags.split(),
        "--api-key-file",
        str(key),
        OUTRIDER_POLICY=json.dumps(POLICY),
    )
    assert engine.model == SourceConfig("hf://org/model", "main")
    assert engine.speculation == SpeculationConfig("draft-model", SourceConfig("pvc://claim/draft", "v2"), 8)
    assert engine.cache == CacheConfig(32, 100, 0.85, prefix_caching=False)
    assert engine.scheduler == SchedulerConfig(32, 512)
    assert (engine.device, engine.dtype, engine.max_model_len) == ("cuda", "bfloat16", 4096)
    assert str(engine.download_dir) == "/cache"
    assert engine.policy.to_json() == POLICY
    assert (server.served_model_name, server.host, server.port, server.admin_port) == ("name", "127.0.0.1", 9000, 9001)
    assert (server.api_key, str(server.admin_token_file), server.drain_timeout) == ("secret", "/etc/token", 30.0)
    assert warnings == []


def test_suffix_flags_of_another_engine_are_understood():
    flags, warnings = parse(
        [
            *("serve", "--model", "hf://o/m", "--speculative-config"),
            '{"method": "suffix", "suffix_decoding_min_token_prob": 0.1, "suffix_decoding_max_cached_requests": 0}',
        ]
    )
    speculation = engine_config(flags, {}).speculation
    assert (speculation.method, speculation.draft) == ("suffix", None)
    assert (speculation.suffix_min_probability, speculation.suffix_cache_tokens) == (0.1, 0)
    assert len(warnings) == 1


def test_a_tree_is_asked_for_by_its_width_and_its_size():
    argv = (
        "serve --model hf://o/m --speculative-method medusa --draft-model hf://o/d --tree-top-k 8 --tree-max-tokens 26"
    )
    flags, _ = parse(argv.split())
    speculation = engine_config(flags, {}).speculation
    assert speculation.tree == TreeConfig(top_k=8, max_tokens=26)
    assert (speculation.max_tokens, speculation.most_drafts) == (4, 26)


@pytest.mark.parametrize(
    ("argv", "method", "draft", "tokens", "ngram"),
    [
        ("--speculative-model [ngram] --num-speculative-tokens 5", "ngram", None, 5, (2, 4)),
        ("--speculative-model=hf://o/d --num-speculative-tokens=3", "draft-model", "hf://o/d", 3, (2, 4)),
        ("--spec-method draft_model --spec-model hf://o/d --spec-tokens 2", "draft-model", "hf://o/d", 2, (2, 4)),
        ("--speculative-algorithm NGRAM --speculative-num-steps 6", "ngram", None, 6, (2, 4)),
        ("--spec-method eagle3 --spec-model hf://o/d --spec-tokens 2", "eagle3", "hf://o/d", 2, (2, 4)),
        (
            "--speculative-algorithm EAGLE --speculative-draft-model-path hf://o/d --speculative-num-steps 3",
            "eagle",
            "hf://o/d",
            3,
            (2, 4),
        ),
        (
            "--speculative-algorithm STANDALONE --speculative-draft-model-path hf://o/d",
            "draft-model",
            "hf://o/d",
            4,
            (2, 4),
        ),
        (
            '--speculative-config {"method":"ngram","num_speculative_tokens":7,"prompt_lookup_max":6,'
            '"prompt_lookup_min":3}',
            "ngram",
            None,
            7,
            (3, 6),
        ),
        (
            '-sc {"model":"hf://o/d","num_speculative_tokens":5,"draft_tensor_parallel_size":1}',
            "draft-model",
            "hf://o/d",
            5,
            (2, 4),
        ),
    ],
)
def test_flags_of_other_engines_are_understood_with_a_warning_each(argv, method, draft, tokens, ngram):
    engine, _, warnings = configure(*argv.split())
    speculation = engine.speculation
    assert speculation.method == method
    assert speculation.draft == (SourceConfig(draft) if draft else None)
    assert speculation.max_tokens == engine.policy.num_speculative_tokens == tokens
    assert (speculation.ngram_min, speculation.ngram_max) == ngram
    assert len(warnings) == argv.count(" -") + 1
    assert all("is deprecated; use --" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("--port 0", ["--port", "1 to 65535", "'0'"]),
        ("--port http", ["--port", "1 to 65535", "'http'"]),
        ("--admin-port 8000", ["--port", "--admin-port", "8000"]),
        ("--device tpu", ["--device", "'tpu'", "'cuda', 'cpu'"]),
        ("--dtype int4", ["--dtype", "'int4'", "'bfloat16'"]),
        ("--max-speculative-tokens 17", ["--max-speculative-tokens", "1 to 16", "'17'"]),
        ("--max-concurrency 0", ["--max-concurrency", "'0'"]),
        ("--max-model-len 1", ["--max-model-len", "at least 2", "'1'"]),  # a token to read and one to answer with
        ("--max-batched-tokens 8", ["--max-batched-tokens 8", "--max-concurrency 256"]),
        ("--gpu-memory-utilization 90", ["--gpu-memory-utilization", "0.01 to 1.0", "'90'"]),
        ("--gpu-memory-utilization nan", ["--gpu-memory-utilization", "'nan'"]),
        ("--drain-timeout -1", ["--drain-timeout", "0 to 86400"]),
        ("--speculative-method draft-model", ["--speculative-method draft-model", "--draft-model"]),
        ("--speculative-method eagle3", ["--speculative-method eagle3", "--draft-model"]),
        ("--speculative-method ngram --draft-model hf://o/d", ["--speculative-method ngram", "hf://o/d"]),
        ("--draft-revision v1", ["--draft-revision v1", "--draft-model"]),
        ("--speculative-method suffix --draft-model hf://o/d", ["--speculative-method suffix", "hf://o/d"]),
        ("--suffix-min-probability 1.5", ["--suffix-min-probability", "1.0"]),
        ("--suffix-cache-tokens -1", ["--suffix-cache-tokens", "at least 0"]),
        (
            '--speculative-config {"method":"suffix","suffix_decoding_max_cached_requests":9}',
            ["suffix_decoding_max_cached_requests 9", "--suffix-cache-tokens"],
        ),
        (
            '--speculative-config {"method":"suffix","suffix_decoding_max_tree_depth":24}',
            ["suffix_decoding_max_tree_depth", "suffix_decoding_min_token_prob"],
        ),
        ("--ngram-min 5", ["--ngram-min 5", "--ngram-max 4"]),
        ("--tree-top-k 4", ["--tree-top-k", "--tree-max-tokens", "together"]),
        ("--tree-top-k 4 --tree-max-tokens 16", ["--tree-top-k", "--speculative-method ngram", "chains"]),
        (
            "--speculative-method eagle --draft-model hf://o/d --tree-top-k 10 --tree-max-tokens 20",
            ["--tree-max-tokens 20", "from 30", "to 63"],
        ),
        ("--speculative-config {", ["--speculative-config", "'{'", "not JSON"]),
        ('--speculative-config {"method":"mtp"}', ["method", "mtp", "ngram", "eagle3"]),
        ('--speculative-config {"quantization":"fp8"}', ["quantization", "prompt_lookup_max"]),
        ("--num-speculative-tokens", ["--num-speculative-tokens", "needs a value"]),
        ("--speculative-draft-tensor-parallel-size 2", ["--speculative-draft-tensor-parallel-size", "2"]),
        ("--api-key-file /does/not/exist", ["--api-key-file", "/does/not/exist"]),
        ("--served-model-name=", ["--served-model-name", "empty"]),
        ("--no-such-flag 3", ["--no-such-flag", "--help"]),
    ],
)
def test_a_bad_value_names_flag_value_and_fix_on_one_line(argv, named):
    with pytest.raises(Refusal) as caught:
        configure(*argv.split())
    assert caught.value.reason == "InvalidArgument"
    assert "\n" not in str(caught.value)
    assert [part for part in named if part not in caught.value.message] == []


def test_more_than_one_device_is_refused_in_the_contracts_words():
    with pytest.raises(Refusal) as caught:
        configure("--tensor-parallel-size", "4")
    assert str(caught.value) == "UnsupportedParallelism: --tensor-parallel-size 4; only 1 is supported"
    assert caught.value.exit_code == 64


@pytest.mark.parametrize("text", ["{", "[]", '{"mode": "Auto"}', json.dumps({**POLICY, "mode": "Sometimes"})])
def test_a_bad_policy_in_the_environment_is_refused(text):
    with pytest.raises(Refusal, match="OUTRIDER_POLICY"):
        configure(OUTRIDER_POLICY=text)


def test_an_empty_policy_is_none():
    assert configure(OUTRIDER_POLICY=" ")[0].policy == Policy()


def test_the_api_key_comes_from_the_flag_before_the_environment():
    assert configure(OUTRIDER_API_KEY="env")[1].api_key == "env"
    assert configure("--api-key", "flag", OUTRIDER_API_KEY="env")[1].api_key == "flag"
    assert configure(OUTRIDER_API_KEY="")[1].api_key is None


@pytest.mark.parametrize(
    ("uri", "name"),
    [("hf://org/model", "org/model"), ("pvc://claim/some/folder/", "folder"), ("/models/tiny.gguf", "tiny.gguf")],
)
def test_the_served_name_follows_the_model(uri, name):
    flags, _ = parse(["serve", "--model", uri])
    assert server_config(flags, {}).served_model_name == name


@pytest.mark.parametrize("argv", [[], ["bench"], ["serve"], ["check", "--model", "m", "--port", "1"]])
def test_only_what_works_is_offered(argv):
    with pytest.raises(Refusal):
        parse(argv)
