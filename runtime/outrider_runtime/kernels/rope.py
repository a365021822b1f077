"""Rotary embedding: a step's cosines and sines, and what lies between a layer's projection and its attention.

Where few rows are projected, kernels.skinny does the latter on the way. Doing it in the attention kernel when a step
only decodes was tried and does not pay: on an H200 that takes 9.9 us a layer for one request and 99 for 256, apart it
is 2.0 + 7.2 and 3.1 + 56.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider_runtime.kernels.once import compiled_once
from outrider_runtime.layers.rope import Turn


def rotation(positions: Tensor, frequencies: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    """Of [tokens] positions and [dim / 2] radians per position: cosines and sines, each [tokens, 1, dim] float32.

    As layers.rope.rotate() takes them: both halves of the cosines are the same, those of the sines of opposite signs.
    """
    tokens, half = positions.shape[0], frequencies.shape[0]
    cosines = torch.empty(tokens, 1, 2 * half, dtype=torch.float32, device=positions.device)
    sines = torch.empty_like(cosines)
    _rotation[(tokens,)](
        positions,
        frequencies,
        cosines,
        sines,
        HALF=half,
        MAGNITUDE=magnitude,
        BLOCK=triton.next_power_of_2(half),
        num_warps=1,
    )
    return cosines, sines


def turn_and_store(
    queries: Tensor,
    kv: Tensor,
    turn: Turn,
    rows: Tensor | None = None,
    *,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """layers.rope.turn_and_store, turning by what rotation() returned; the norms given by their weights, [dim] each."""
    kv_heads, dim = turn.keys.shape[1:]
    heads = queries.shape[1] // dim
    turned = torch.empty(len(queries), heads, dim, dtype=queries.dtype, device=queries.device)
    group = math.gcd(heads, kv_heads, 8)  # heads a program: all of its own kind
    half = triton.next_power_of_2(dim // 2)
    _turn_and_store[(len(kv), (heads + 2 * kv_heads) // group)](
        queries,
        kv,
        turn.cosines,
        turn.sines,
        turned,
        turn.keys,
        turn.values,
        turn.slots,
        rows,
        len(queries),
        *(norms or (None, None)),
        QUERY_STRIDE=queries.stride(0),
        KV_STRIDE=kv.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        EPS=eps,
        GROUP=group,
        HALF=half,
        num_warps=2 if group * half >= 256 else 1,
    )
    return turned


@compiled_once
def _rotation(
    positions: tl.tensor,
    frequencies: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    HALF: tl.constexpr,
    MAGNITUDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + pair, mask=inside, other=0.0)
    cosine, sine = tl.cos(angle) * MAGNITUDE, tl.sin(angle) * MAGNITUDE
    at = token * 2 * HALF + pair
    tl.store(cosines + at, cosine, mask=inside)
    tl.store(cosines + at + HALF, cosine, mask=inside)
    tl.store(sines + at, -sine, mask=inside)
    tl.store(sines + at + HALF, sine, mask=inside)


@triton.jit(do_not_specialize=["row_count"])
def _turn_and_store(
    queries: tl.tensor,
    kv: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    turned: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    rows: tl.tensor,
    row_count: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    QUERY_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    EPS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUP
    head = tl.arange(0, GROUP)[:, None]
    pair = tl.arange(0, HALF)
    inside = (pair < DIM // 2)[None, :] & (head >= 0)  # [group, half] on all ways through the branches below
    within = head * DIM + pair[None, :]  # of the group, an element of the first half of a head
    place = token  # which is turned for
    if first < HEADS:
        if rows is not None:
            place = tl.load(rows + tl.minimum(token, row_count - 1)).to(tl.int64)
        source = queries + token * QUERY_STRIDE + first * DIM + within
        inside &= token + tl.zeros_like(head) < row_count  # [group, 1]: a mask must not be a scalar
    else:
        source = kv + token * KV_STRIDE + (first - HEADS) * DIM + within
    one = tl.load(source, mask=inside, other=0.0)
    other = tl.load(source + DIM // 2, mask=inside, other=0.0)
    slot = tl.load(slots + token + tl.zeros_like(head)).to(tl.int64)  # [group, 1], too
    if first >= HEADS + KV_HEADS:
        target = values + (slot * KV_HEADS + first - HEADS - KV_HEADS) * DIM + within
        tl.store(target, one, mask=inside & (slot >= 0))
        tl.store(target + DIM // 2, other, mask=inside & (slot >= 0))
    else:
        cosine = tl.load(cosines + place * DIM + pair, mask=pair < DIM // 2, other=0.0)[None, :]
        sine = tl.load(sines + place * DIM + DIM // 2 + pair, mask=pair < DIM // 2, other=0.0)[None, :]
        a, b = one.to(tl.float32), other.to(tl.float32)
        if first < HEADS:
            a, b = _norm(a, b, query_norm, pair, DIM, EPS)
            target = turned + (token * HEADS + first) * DIM + within
            stored = inside
        else:
            a, b = _norm(a, b, key_norm, pair, DIM, EPS)
            target = keys + (slot * KV_HEADS + first - HEADS) * DIM + within
            stored = inside & (slot >= 0)
        tl.store(target, (a * cosine - b * sine).to(one.dtype), mask=stored)
        tl.store(target + DIM // 2, (b * cosine + a * sine).to(one.dtype), mask=stored)


@triton.jit
def _norm(
    a: tl.tensor, b: tl.tensor, weight: tl.tensor, pair: tl.tensor, DIM: tl.constexpr, EPS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """RMS norm of heads given as two halves, [heads, dim / 2] each; nothing without weights."""
    if weight is not None:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / DIM + EPS)[:, None]
        a *= scale * tl.load(weight + pair, mask=pair < DIM // 2, other=0.0).to(tl.float32)[None, :]
        b *= scale * tl.load(weight + DIM // 2 + pair, mask=pair < DIM // 2, other=0.0).to(tl.float32)[None, :]
    return a, b
