"""On a CUDA device the compiled kernel computes what float64 does, at the shapes and in the types of real models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.gpu.marks import ON_A_GPU
from tests.runtime.kernels.paged import attended, expected, make_case, planned

pytestmark = ON_A_GPU

TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 2e-5}
DECODE = [(1, 1), (1, 17), (1, 384), (1, 4096), (1, 9000)]
VERIFY = [(5, 390), (2, 65), (17, 3000), (3, 3)]
PREFILL = [(300, 300), (512, 2500), (65, 1000)]


def check(spans, *, small=True, narrow=False, dtype=torch.bfloat16, ancestors=None, **shape):
    case = make_case(spans, dtype=dtype, device="cuda", **{"kv_heads": 8, "shared": 4, "dim": 128} | shape)
    plan = planned(case, small=small, narrow=narrow, ancestors=ancestors)
    tolerance = TOLERANCE[dtype]
    for _ in range(2):  # as another layer, by the same plan
        result = attended(case, plan)
        torch.testing.assert_close(result.double(), expected(case, ancestors), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("small", [True, False])
def test_decode_verification_and_prefill_in_one_batch(small, dtype):
    check([*DECODE, *VERIFY, *PREFILL], small=small, dtype=dtype, padding=7)


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("kv_heads", "shared"), [(2, 7), (4, 1), (1, 8)])
def test_heads_of_any_number_and_size(kv_heads, shared, dim):
    check([(1, 500), (5, 77), (200, 450)], small=False, kv_heads=kv_heads, shared=shared, dim=dim)


@pytest.mark.parametrize(("kv_heads", "shared", "dim"), [(8, 4, 128), (8, 4, 64), (2, 7, 64), (2, 8, 256), (3, 1, 96)])
def test_a_step_of_a_query_or_two_each(kv_heads, shared, dim):
    spans = [*DECODE, (2, 2), (2, 700), (0, 0), (2, 4097)]
    check(spans, narrow=True, kv_heads=kv_heads, shared=shared, dim=dim, padding=5)


@pytest.mark.parametrize("window", [1, 100, 4096])
def test_a_sliding_window(window):
    check([*DECODE, *VERIFY, *PREFILL], small=False, window=window)


@pytest.mark.parametrize("block_size", [1, 32, 256])
def test_blocks_of_any_size(block_size):
    check([(1, 500), (5, 77), (200, 450)], small=False, block_size=block_size)


@pytest.mark.parametrize("small", [True, False])
def test_a_tree(small):
    branches = torch.tensor([1, 3, 5, 11, 19, 37], device="cuda")  # of -1, 0, 0, 1, 1, 2
    check([(6, 700), (6, 6)], small=small, ancestors=branches.repeat(2))


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(
    "contexts",
    [[4224] * 64, [256 + 126 * request for request in range(64)], [300] * 63 + [8192], [400] * 140],
    ids=["alike", "unlike", "one-long", "short"],
)
def test_texts_divided_among_programs_have_the_same_result_each_time(queries, contexts):
    spans = [(queries, context) for context in contexts]
    case = make_case(spans, kv_heads=8, shared=4, dim=128, dtype=torch.bfloat16, device="cuda", padding=3)
    plan = planned(case, small=True, narrow=queries == 1)
    first = attended(case, plan)
    torch.testing.assert_close(first.double(), expected(case), rtol=1.2e-2, atol=1.2e-2)
    for _ in range(20):  # whichever program ends last
        assert torch.equal(attended(case, plan), first)


def test_a_captured_graph_follows_the_lengths():
    contexts = [1, 130, 700, 3000]
    case = make_case([(1, 3000)] * 4, kv_heads=8, shared=4, dim=128, dtype=torch.bfloat16, device="cuda")
    lengths = torch.full((4,), 3000, dtype=torch.int32, device="cuda")
    starts = torch.arange(5, dtype=torch.int32, device="cuda")

    def step():
        from outrider_runtime.kernels.attention import plan_paged

        plan = plan_paged(
            starts,
            lengths,
            case.table_rows,
            case.block_tables,
            tokens=4,
            block_size=case.block_size,
            shape=case.shape,
            dim=128,
            small=False,
        )
        return [attended(case, plan) for _ in range(3)]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for turn in (contexts, contexts[::-1]):
        lengths.copy_(torch.tensor(turn, dtype=torch.int32))
        graph.replay()
        wanted = expected(replace(case, spans=[(1, context) for context in turn]))
        for result in captured:
            torch.testing.assert_close(result.double(), wanted, rtol=1.2e-2, atol=1.2e-2)
