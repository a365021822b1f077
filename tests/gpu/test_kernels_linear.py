"""On a CUDA device the kernels around linear layers compute what float64 does, in real shapes and inside graphs."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.marks import ON_A_GPU, ON_HOPPER
from torch.nn import functional as F

from outrider_runtime.layers import linear
from outrider_runtime.layers.linear import MergedLinear
from outrider_runtime.layers.norm import RMSNorm
from outrider_runtime.layers.rope import RotaryEmbedding, Turn, rotate, split_qkv
from outrider_runtime.models.config import ModelConfig

if torch.cuda.is_available():
    from outrider_runtime.kernels import skinny
    from outrider_runtime.kernels.activation import silu_gate
    from outrider_runtime.kernels.norm import rms_norm
    from outrider_runtime.kernels.rope import rotation, turn_and_store
    from outrider_runtime.kernels.skinny import product
    from outrider_runtime.kernels.tall import gated_product, largest_of_product, turned_product

pytestmark = ON_A_GPU

# dtype -> error allowed, of the deviation of what is expected and of each element
TOLERANCE = {torch.bfloat16: (2e-2, 1e-2), torch.float16: (3e-3, 2e-3), torch.float32: (1e-5, 1e-5)}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
# [outputs, inputs], as Llama-3.1-8B, Llama-3.2-1B, Qwen2-0.5B and a tiny model have them
SHAPES = [(6144, 4096), (4096, 14336), (2048, 2048), (2048, 8192), (1152, 896), (61, 48), (96, 33)]
# few, as each of another shape, type or power of two of rows is compiled anew
PRODUCTS = [
    *((outputs, inputs, 5, torch.bfloat16) for outputs, inputs in SHAPES),
    *((2048, 2048, rows, torch.bfloat16) for rows in (1, 16, 33, 64)),
    *((*shape, 5, dtype) for shape in ((2048, 2048), (62, 48)) for dtype in (torch.float16, torch.float32)),
]


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    of_all, of_each = TOLERANCE[result.dtype]
    torch.testing.assert_close(result.double(), expected, rtol=of_each, atol=of_all * expected.std().item())


def gated(merged: torch.Tensor) -> torch.Tensor:
    gate, up = merged.chunk(2, dim=-1)
    return F.silu(gate) * up


def turn(rows: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Turn:
    """With some slots negative, and the same whenever it is asked for."""
    config = ModelConfig("LlamaForCausalLM", 8, dim, dim, 1, 1, 1, dim, 131072)
    turns = rotation(torch.arange(rows, device="cuda") * 3000, RotaryEmbedding(config, "cuda").frequencies, 1.0)
    slots = torch.arange(rows, 0, -1, device="cuda")
    slots[1::4] = -1
    return Turn(*turns, *torch.full((2, rows + 1, kv_heads, dim), 7.0, dtype=dtype, device="cuda"), slots)


@pytest.mark.parametrize(("outputs", "inputs", "rows", "dtype"), PRODUCTS)
def test_products_and_what_they_fuse(outputs, inputs, rows, dtype):
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
    residual, bias = random(rows, outputs, dtype=dtype), random(outputs, dtype=dtype)
    norm = random(inputs, dtype=dtype)
    plain = F.linear(x.double(), weight.double(), bias.double())
    normed = F.rms_norm(x.double(), (inputs,), norm.double(), 1e-5)
    assert_close(product(x, weight, bias=bias, residual=residual), plain + residual.double())
    assert_close(product(x, weight, norm=norm, eps=1e-5), F.linear(normed, weight.double()))
    if outputs % 2 == 0:
        merged = F.linear(normed, weight.double(), bias.double())
        assert_close(product(x, weight, norm=norm, eps=1e-5, bias=bias, gated=True), gated(merged))


def test_a_head_of_many_outputs():
    x, weight = random(5, 2048, dtype=torch.bfloat16), random(128256, 2048, dtype=torch.bfloat16, scale=0.02)
    assert_close(product(x, weight), F.linear(x.double(), weight.double()))


def test_a_graph_replays_chained_products_bit_by_bit():
    x = random(5, 4096, dtype=torch.bfloat16)
    norm = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    up, down = (random(*shape, dtype=torch.bfloat16, scale=0.02) for shape in ((28672, 4096), (4096, 14336)))

    def chain() -> torch.Tensor:
        hidden = x
        for _ in range(4):
            hidden = product(product(hidden, up, norm=norm, eps=1e-5, gated=True), down, residual=hidden)
        return hidden

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain()
    for _ in range(20):
        x.copy_(random(5, 4096, dtype=torch.bfloat16))
        graph.replay()
        assert torch.equal(result, chain())
    assert not skinny._counters(x.device).any()


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(1, 4096), (300, 2048), (17, 896), (3, 32)])
def test_norms(rows, size, dtype):
    x, weight = random(rows, size, dtype=dtype, scale=50), random(size, dtype=dtype)
    assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x.double(), (size,), weight.double(), 1e-5))


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(1, 14336), (300, 8192), (17, 4864), (3, 48)])
def test_gates(rows, size, dtype):
    merged = random(rows, 2 * size, dtype=dtype, scale=4)
    assert_close(silu_gate(merged), gated(merged.double()))


@ON_HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1280, 128256, 4096), (256, 151936, 896), (300, 32000, 2048), (5, 1100, 72)]
)
def test_the_largest_of_products_of_many_rows(rows, outputs, inputs, dtype):
    x, weight = (torch.randint(-2, 3, (size, inputs), device="cuda").to(dtype) for size in (rows, outputs))
    weight[outputs // 2 :] = weight[: outputs // 2].roll(1, 0)  # all are twice
    exact = F.linear(x, weight)  # of whole numbers, so that more are equal when they are rounded
    expected = (exact == exact.amax(1, keepdim=True)).int().argmax(1)
    assert torch.equal(largest_of_product(x, weight).long(), expected)
    count, places = (
        torch.tensor([rows // 3], dtype=torch.int32, device="cuda"),
        torch.arange(rows, 0, -1, device="cuda"),
    )
    out = torch.full((rows + 1,), -1, dtype=torch.int32, device="cuda")
    largest_of_product(x, weight, count=count, places=places.int(), out=out)
    assert torch.equal(out[places[: rows // 3]].long(), expected[: rows // 3])
    assert (out >= 0).sum() == rows // 3


@ON_HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1280, 14336, 4096), (256, 8192, 2048), (300, 4864, 896), (5, 136, 72)]
)
def test_gated_products_of_many_rows(rows, outputs, inputs, dtype):
    x, weight = random(rows, inputs, dtype=dtype), random(2 * outputs, inputs, dtype=dtype, scale=inputs**-0.5)
    expected = gated(F.linear(x.double(), weight.double()))
    first = gated_product(x, weight)
    assert_close(first, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = gated_product(x, weight)
    x.mul_(-1)
    graph.replay()
    assert_close(result, gated(F.linear(x.double(), weight.double())))
    x.mul_(-1)
    graph.replay()
    assert torch.equal(result, first)


@ON_HOPPER
def test_a_layer_of_many_rows_takes_the_gated_product(monkeypatch):
    layer = MergedLinear(4096, {"gate_proj": 14336, "up_proj": 14336}, False, torch.bfloat16, "cuda")
    layer.weight.normal_(std=4096**-0.5)
    norm = RMSNorm(4096, 1e-5, torch.bfloat16, "cuda")
    norm.weight.fill_(1)
    x = random(1280, 4096, dtype=torch.bfloat16)
    ours = layer.gated(x, norm)
    monkeypatch.setattr("outrider_runtime.kernels.tall.gating_pays", lambda *_: False)
    theirs = layer.gated(x, norm)
    assert not torch.equal(ours, theirs)  # which rounds before the activation, too
    assert torch.dist(ours.float(), theirs.float()) < 0.01 * theirs.float().norm()


def test_a_gate_of_extremes_is_finite():
    merged = torch.tensor([[-3e38, -200.0, 200.0, 1.0, 1.0, 1.0]], device="cuda")
    torch.testing.assert_close(silu_gate(merged).cpu(), torch.tensor([[0.0, 0.0, 200.0]]))


@DTYPES
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(32, 8, 128), (32, 8, 64), (14, 2, 64), (32, 32, 96), (4, 2, 8)]
)
def test_rotation_norms_and_kv_writes(heads, kv_heads, dim, normed, dtype):
    tokens = 40
    embedding = RotaryEmbedding(ModelConfig("LlamaForCausalLM", 8, dim, dim, 1, 1, 1, dim, 131072), "cpu")
    positions = torch.arange(tokens) * 3000
    cosines, sines = rotation(positions.cuda(), embedding.frequencies.cuda(), embedding.magnitude)
    twins = embedding(positions, torch.float32)
    torch.testing.assert_close((cosines.cpu(), sines.cpu()), twins, rtol=1e-5, atol=1e-5)

    qkv = random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    norms = (random(dim, dtype=dtype), random(dim, dtype=dtype)) if normed else None
    keys, values = torch.full((2, 50, kv_heads, dim), 7.0, dtype=dtype, device="cuda")
    slots = torch.randperm(50)[:tokens].cuda()
    written, kept = slots.clone(), torch.arange(tokens, device="cuda") % 5 > 0
    slots[~kept] = -1
    given = Turn(cosines, sines, keys, values, slots)
    queries = turn_and_store(*split_qkv(qkv, given), given, norms=norms, eps=1e-6)
    parts = qkv.double().view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    wide = [F.rms_norm(part, (dim,), norm.double(), 1e-6) for part, norm in zip(parts, norms or (), strict=False)]
    turned = [rotate(part, cosines.double(), sines.double()) for part in wide or parts[:2]]
    assert_close(queries, turned[0])
    assert_close(keys[written[kept]], turned[1][kept])
    assert torch.equal(values[written[kept]], parts[2][kept].to(dtype))
    assert (keys[written[~kept]] == 7).all()
    assert (values[written[~kept]] == 7).all()


@pytest.mark.parametrize("rows", [1, 5, 16, 20])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "inputs", "dtype"),
    [
        (32, 8, 128, 4096, torch.bfloat16),
        (32, 8, 64, 2048, torch.bfloat16),
        *((14, 2, 64, 896, dtype) for dtype in TOLERANCE),
        *((4, 4, 96, 64, dtype) for dtype in TOLERANCE),
    ],
)
def test_a_product_turns_and_stores_as_the_kernel_behind_it_does(heads, kv_heads, dim, inputs, rows, dtype):
    outputs = (heads + 2 * kv_heads) * dim
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
    norm, bias = random(inputs, dtype=dtype), random(outputs, dtype=dtype)
    normed = F.rms_norm(x.double(), (inputs,), norm.double(), 1e-5)
    wide = F.linear(normed, weight.double(), bias.double())

    ours, wanted = (turn(rows, kv_heads, dim, of) for of in (dtype, torch.float64))
    queries = product(x, weight, norm=norm, eps=1e-5, bias=bias, turn=ours)
    assert_close(queries, turn_and_store(*split_qkv(wide, wanted), wanted))
    assert_close(ours.keys, wanted.keys)
    assert_close(ours.values, wanted.values)


@ON_HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "inputs"),
    [(1280, 32, 8, 128, 4096), (300, 32, 8, 64, 2048), (130, 4, 2, 128, 8192), (5, 2, 2, 128, 72)],
)
def test_products_of_many_rows_turn_and_store(rows, heads, kv_heads, dim, inputs, dtype):
    outputs = (heads + 2 * kv_heads) * dim
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
    bias = random(outputs, dtype=dtype)
    for with_bias in (None, bias):
        wide = F.linear(x.double(), weight.double(), None if with_bias is None else with_bias.double())
        ours, wanted = (turn(rows, kv_heads, dim, of) for of in (dtype, torch.float64))
        queries = turned_product(x, weight, with_bias, ours)
        assert_close(queries, turn_and_store(*split_qkv(wide, wanted), wanted))
        assert_close(ours.keys, wanted.keys)
        assert_close(ours.values, wanted.values)


@ON_HOPPER
def test_a_layer_of_many_rows_takes_the_turned_product(monkeypatch):
    layer = MergedLinear(4096, {"q": 4096, "k": 1024, "v": 1024}, False, torch.bfloat16, "cuda")
    layer.weight.normal_(std=4096**-0.5)
    x, turns = random(1280, 4096, dtype=torch.bfloat16), [turn(1280, 8, 128, torch.bfloat16) for _ in range(2)]
    ours = layer.turned(x, None, turns[0], None)
    monkeypatch.setattr("outrider_runtime.kernels.tall.turning_pays", lambda *_: False)
    theirs = layer.turned(x, None, turns[1], None)
    assert not torch.equal(ours, theirs)  # which rounds before it turns, too
    assert torch.dist(ours.float(), theirs.float()) < 0.01 * theirs.float().norm()
    assert torch.equal(turns[0].values, turns[1].values)


@DTYPES
@pytest.mark.parametrize("rows", [linear.SKINNY_ROWS, linear.SKINNY_ROWS + 1])
def test_layers_compute_the_same_on_both_sides_of_the_threshold(rows, dtype):
    layer = MergedLinear(256, {"a": 128, "b": 128}, True, dtype, "cuda")
    norm = RMSNorm(256, 1e-5, dtype, "cuda")
    for parameter in (*layer.parameters(), *norm.parameters()):
        parameter.copy_(random(*parameter.shape, dtype=dtype, scale=0.1))
    x, residual = random(rows, 256, dtype=dtype), random(rows, 256, dtype=dtype)
    weight, bias = layer.weight.double(), layer.bias.double()
    normed = F.rms_norm(x.double(), (256,), norm.weight.double(), 1e-5)
    plain = F.linear(x.double(), weight, bias)
    assert_close(layer(x), plain)
    assert_close(layer(x, norm), F.linear(normed, weight, bias))
    assert_close(layer.gated(x, norm), gated(F.linear(normed, weight, bias)))
    ours, wanted = (turn(rows, 1, 64, of) for of in (dtype, torch.float64))
    turned = turn_and_store(*split_qkv(F.linear(normed, weight, bias), wanted), wanted)
    assert_close(layer.turned(x, norm, ours, None), turned)
    assert_close(ours.keys, wanted.keys)
    assert_close(ours.values, wanted.values)
    expected = plain + residual.double()
    assert_close(layer.added(x, residual), expected)


@DTYPES
@pytest.mark.parametrize("spared", [0, linear.SPARED_QUERIES - 1, linear.SPARED_QUERIES])
def test_queries_of_some_rows_are_theirs_whether_the_others_are_computed_or_not(spared, dtype):
    layer = MergedLinear(256, {"q": 128, "k": 64, "v": 64}, True, dtype, "cuda")
    for parameter in layer.parameters():
        parameter.copy_(random(*parameter.shape, dtype=dtype, scale=0.1))
    tokens = 40 + spared
    x, rows = random(tokens, 256, dtype=dtype), torch.randperm(tokens, device="cuda")[:40].to(torch.int32)
    ours, wanted = (turn(tokens, 1, 64, of) for of in (dtype, torch.float64))
    qkv = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    assert_close(layer.turned(x, None, ours, None, rows), turn_and_store(*split_qkv(qkv, wanted), wanted)[rows])
    assert_close(ours.keys, wanted.keys)
    assert_close(ours.values, wanted.values)
