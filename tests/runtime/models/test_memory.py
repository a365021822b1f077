"""The memory plan, in numbers, and what a CPU process may use."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from tests.runtime.tiny import tiny_pair

from outrider_runtime.config import CacheConfig, EngineConfig, SchedulerConfig, SourceConfig, SpeculationConfig
from outrider_runtime.engine.runner import Runner
from outrider_runtime.errors import Refusal
from outrider_runtime.models.config import model_config
from outrider_runtime.models.host import cpu_memory
from outrider_runtime.models.memory import Memory, kv_bytes, parameters, plan
from outrider_runtime.models.workspace import CUDA_OVERHEAD, sampled_rows, workspace

GB = 10**9

LLAMA_8B = model_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    }
)
LLAMA_1B = replace(
    LLAMA_8B, hidden_size=2048, intermediate_size=8192, num_layers=16, head_dim=64, tie_word_embeddings=True
)
GPU = EngineConfig(SourceConfig("m"), device="cuda")
CPU = EngineConfig(SourceConfig("m"), device="cpu", scheduler=SchedulerConfig(max_concurrency=4))


def test_parameters_are_those_the_model_cards_give():
    assert parameters(LLAMA_8B) == 8_030_261_248
    assert parameters(LLAMA_1B) == 1_235_814_400


def test_a_gpu_gives_its_share_less_what_others_hold_to_weights_then_workspace_then_blocks():
    found = plan(GPU, LLAMA_8B, LLAMA_1B, 2, Memory(total=80 * GB, free=78 * GB))
    assert found.budget == 70 * GB
    assert found.weights == 2 * parameters(LLAMA_8B)
    assert found.draft_weights == 2 * parameters(LLAMA_1B)
    assert found.workspace == workspace(GPU, LLAMA_8B, LLAMA_1B, 2, 131072)
    assert found.block == 16 * (kv_bytes(LLAMA_8B, 2) + kv_bytes(LLAMA_1B, 2))
    taken = found.weights + found.draft_weights + found.workspace + found.num_blocks * found.block
    assert 0 <= found.budget - taken < found.block
    assert found.max_model_len == 131072


def test_a_workspace_holds_what_steps_keep_and_the_widest_of_their_programs():
    rows = 256 * 5  # a token and four drafts of each request
    texts = 257 * 131072 * 4
    logits = rows * 128256 * 2
    whole_pipeline = (1 << 24) * 8
    found = workspace(GPU, LLAMA_8B, None, 2, 131072)
    assert found > texts + logits + whole_pipeline + CUDA_OVERHEAD
    assert found < 2 * (texts + logits + whole_pipeline + CUDA_OVERHEAD)
    assert found - workspace(GPU, LLAMA_8B, None, 2, 8192) == pytest.approx(texts * 15 / 16, rel=0.1)
    longer = replace(GPU, speculation=SpeculationConfig(max_tokens=6))
    assert workspace(longer, LLAMA_8B, None, 2, 8192) > workspace(GPU, LLAMA_8B, None, 2, 8192) + logits // 4
    assert sampled_rows(replace(longer, scheduler=SchedulerConfig(max_batched_tokens=512))) == 512


@pytest.mark.parametrize(("concurrency", "max_model_len"), [(1, 64), (8, 96), (64, 300)])
def test_it_counts_the_engines_own_arrays(concurrency, max_model_len):
    config = replace(CPU, scheduler=SchedulerConfig(concurrency, max_batched_tokens=64), max_model_len=max_model_len)
    config = replace(config, cache=CacheConfig(num_blocks=64))
    target = tiny_pair()[1]
    runner = Runner(config, target, None, num_blocks=64, max_model_len=max_model_len, eos_token_ids=())
    state, table = runner._state, runner._table
    kept = (state.tokens, state.lengths, state.block_tables, table.rows, runner._hidden, runner._positions)
    counted = workspace(config, target.config, None, 4, max_model_len)
    assert counted > sum(tensor.nbytes for tensor in kept)


def test_without_a_draft_its_share_goes_to_the_cache():
    memory = Memory(80 * GB, 80 * GB)
    assert plan(GPU, LLAMA_8B, None, 2, memory).num_blocks > plan(GPU, LLAMA_8B, LLAMA_1B, 2, memory).num_blocks


def test_what_does_not_fit_is_refused_with_the_numbers_and_the_fix():
    with pytest.raises(Refusal) as refusal:
        plan(GPU, LLAMA_8B, LLAMA_1B, 2, Memory(16 * GB, 16 * GB))
    assert refusal.value.reason == "DoesNotFit"
    assert refusal.value.message == (
        "weights 16.1 GB + draft 2.5 GB + workspace 1.8 GB + KV cache of 2048 tokens 0.3 GB of 14.4 GB; "
        "use a larger GPU, a smaller model or a shorter engine.maxModelLength"
    )


def test_a_context_nobody_asked_for_shrinks_to_what_the_cache_holds():
    found = plan(GPU, LLAMA_8B, None, 2, Memory(24 * GB, 24 * GB))
    assert 2048 <= found.max_model_len == found.num_blocks * 16 < 131072


def test_a_context_that_was_asked_for_is_kept_or_refused():
    memory = Memory(24 * GB, 24 * GB)
    assert plan(replace(GPU, max_model_len=8192), LLAMA_8B, None, 2, memory).max_model_len == 8192
    with pytest.raises(Refusal, match=r"KV cache of 100000 tokens 13\.1 GB of 21\.6 GB"):
        plan(replace(GPU, max_model_len=100_000), LLAMA_8B, None, 2, memory)
    with pytest.raises(Refusal, match="max model length 200000 is more than the model's own 131072"):
        plan(replace(GPU, max_model_len=200_000), LLAMA_8B, None, 2, Memory(800 * GB, 800 * GB))


def test_a_given_number_of_blocks_is_taken_as_it_is():
    config = replace(CPU, cache=CacheConfig(num_blocks=4))
    found = plan(config, LLAMA_1B, None, 4, Memory(32 * GB, 32 * GB))
    assert (found.num_blocks, found.max_model_len) == (4, 64)
    with pytest.raises(Refusal, match="max model length 65 is more than the 64 tokens of 4 KV blocks"):
        plan(replace(config, max_model_len=65), LLAMA_1B, None, 4, Memory(32 * GB, 32 * GB))


def test_a_cpu_gives_the_cache_no_more_than_the_requests_can_use():
    found = plan(replace(CPU, max_model_len=100), LLAMA_1B, None, 4, Memory(64 * GB, 64 * GB))
    assert found.num_blocks == 4 * 7  # 100 tokens are 7 blocks of 16


def test_a_cpu_keeps_most_of_its_free_memory_for_others():
    found = plan(CPU, LLAMA_1B, None, 4, Memory(64 * GB, 32 * GB))
    assert found.num_blocks * found.block <= 4 * GB


@given(
    free=st.integers(1, 200),
    concurrency=st.integers(1, 512),
    drafted=st.integers(1, 16),
    asked=st.none() | st.integers(1, 131072),
    device=st.sampled_from(["cpu", "cuda"]),
    drafting=st.booleans(),
)
def test_a_plan_never_exceeds_its_budget_and_always_holds_one_request(
    free, concurrency, drafted, asked, device, drafting
):
    config = EngineConfig(
        SourceConfig("m"),
        device=device,
        max_model_len=asked,
        scheduler=SchedulerConfig(max_concurrency=concurrency),
        speculation=SpeculationConfig(max_tokens=drafted),
    )
    try:
        found = plan(config, LLAMA_8B, LLAMA_1B if drafting else None, 2, Memory(200 * GB, free * GB))
    except Refusal as refusal:
        event(refusal.reason)
        if refusal.reason != "DoesNotFit":
            raise
        return
    taken = found.weights + found.draft_weights + found.workspace + found.num_blocks * found.block
    assert taken <= found.budget
    assert found.num_blocks * 16 >= found.max_model_len
    assert found.max_model_len == asked or asked is None


MEMINFO = "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 800 kB\n"


def machine(root, cgroup, **files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(folder, limit, used, cache=0):
    prefix = f"{folder}__" if folder else ""
    return {
        f"{prefix}memory.max": f"{limit}\n",
        f"{prefix}memory.current": f"{used}\n",
        f"{prefix}memory.stat": f"anon 5\ninactive_file {cache}\n",
    }


@pytest.mark.parametrize(
    ("cgroup", "files", "total", "free"),
    [
        ("0::/\n", {}, 1_024_000, 819_200),
        ("0::/\n", v2("", "max", 900_000), 1_024_000, 819_200),
        ("0::/\n", v2("", 500_000, 100_000), 500_000, 400_000),
        ("0::/\n", v2("", 500_000, 400_000, cache=300_000), 500_000, 400_000),  # page cache can be had back
        ("0::/a/b\n", {**v2("a", 300_000, 100_000), **v2("a__b", "max", 50_000)}, 300_000, 200_000),
        ("0::/only/on/the/host\n", v2("", 500_000, 100_000), 500_000, 400_000),
        ("0::/\n", v2("", 500_000, 600_000), 500_000, 0),
        (
            "4:memory:/pod\n1:name=systemd:/\n",
            {
                "memory__pod__memory.limit_in_bytes": "600000",
                "memory__pod__memory.usage_in_bytes": "200000",
                "memory__pod__memory.stat": "total_inactive_file 100000",
            },
            600_000,
            500_000,
        ),
    ],
)
def test_a_cpu_process_may_use_what_its_cgroups_leave_it(tmp_path, cgroup, files, total, free):
    assert cpu_memory(machine(tmp_path, cgroup, **files)) == Memory(total, free)


def test_this_machine_can_be_read():
    memory = cpu_memory()
    assert 0 < memory.free <= memory.total
