"""Linear layers that hold several of a checkpoint's matrices as one, so that a step launches one product for them.

What stands around a product (norm, gate, residual, rotation) is asked of it, since on a CUDA device a product of few
rows, which costs what reading its weights costs, does it on the way.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider_runtime.layers.norm import RMSNorm
from outrider_runtime.layers.rope import Turn, split_qkv, turn_and_store
from outrider_runtime.layers.rows import take_rows

SKINNY_ROWS = 32  # up to which our kernel, with what it fuses, beats the vendor's library and kernels around it
SPARED_QUERIES = 512  # from so many on that nobody asks for, they cost more than a second product for the others
FOLDED_NORM_ROWS = 16  # up to which norming them again in each program costs less than a kernel before them does


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
    """[rows, inputs], normed first if a norm is given, by [outputs, inputs]: [rows, outputs]."""
    if _skinny(x):
        return _skinny_product(x, weight, bias, norm=norm)
    return F.linear(x if norm is None else norm(x), weight, bias)


class MergedLinear(nn.Module):
    """`outputs` maps the checkpoint's names of the parts, in order, to their output sizes.

    Takes [tokens, in_features], gives [tokens, sum of the sizes].
    """

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.outputs = dict(outputs)
        total = sum(outputs.values())
        self.weight = nn.Parameter(torch.empty(total, in_features, dtype=dtype, device=device), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(total, dtype=dtype, device=device), requires_grad=False) if bias else None

    def forward(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        return linear(x, self.weight, self.bias, norm)

    def gated(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """SiLU of the first half of the outputs times the second half."""
        if _skinny(x):
            return _skinny_product(x, self.weight, self.bias, norm=norm, gated=True)
        x = norm(x)
        if x.is_cuda:
            from outrider_runtime.kernels.activation import silu_gate
            from outrider_runtime.kernels.tall import gated_product, gating_pays

            if self.bias is None and gating_pays(len(x), self.weight):
                return gated_product(x, self.weight)
            return silu_gate(F.linear(x, self.weight, self.bias))
        gate, up = F.linear(x, self.weight, self.bias).chunk(2, dim=-1)
        return F.silu(gate) * up

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """The outputs plus `residual`, which may be overwritten."""
        if _skinny(x):
            return _skinny_product(x, self.weight, self.bias, residual=residual)
        if x.is_cuda:  # within the product, so that nothing is written only to be read again
            residual.addmm_(x, self.weight.T)
            return residual if self.bias is None else residual.add_(self.bias)
        return residual + F.linear(x, self.weight, self.bias)

    def turned(
        self,
        x: Tensor,
        norm: RMSNorm | None,
        turn: Turn,
        head_norms: tuple[RMSNorm, RMSNorm] | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """turn_and_store() of outputs that are the heads of queries, keys and values; of `rows`, the queries alone."""
        if rows is not None and len(x) - len(rows) >= SPARED_QUERIES:
            x, queries = x if norm is None else norm(x), next(iter(self.outputs.values()))
            bias, kv_bias = (None, None) if self.bias is None else (self.bias[:queries], self.bias[queries:])
            query = linear(take_rows(x, rows), self.weight[:queries], bias)
            kv = linear(x, self.weight[queries:], kv_bias)
            return turn_and_store(query, kv, turn, head_norms, rows)
        query = self._turned(x, norm, turn, head_norms)
        return query if rows is None else take_rows(query.flatten(1), rows).view(len(rows), *query.shape[1:])

    def _turned(
        self, x: Tensor, norm: RMSNorm | None, turn: Turn, head_norms: tuple[RMSNorm, RMSNorm] | None
    ) -> Tensor:
        if head_norms is None and _skinny(x):
            return _skinny_product(x, self.weight, self.bias, norm=norm, turn=turn)
        if head_norms is None and x.is_cuda:
            from outrider_runtime.kernels.tall import turned_product, turning_pays

            if turning_pays(len(x), self.weight, turn):
                return turned_product(x if norm is None else norm(x), self.weight, self.bias, turn)
        return turn_and_store(*split_qkv(linear(x, self.weight, self.bias, norm), turn), turn, head_norms)

    def shards(self, name: str) -> dict[str, Tensor]:
        """The part of this layer that each of the checkpoint's tensors fills."""
        sizes = list(self.outputs.values())
        shards = {
            f"{name}.{part}.weight": view
            for part, view in zip(self.outputs, torch.split(self.weight, sizes), strict=True)
        }
        if self.bias is not None:
            shards |= {
                f"{name}.{part}.bias": view
                for part, view in zip(self.outputs, torch.split(self.bias, sizes), strict=True)
            }
        return shards


def _skinny(x: Tensor) -> bool:
    return x.is_cuda and x.shape[0] <= SKINNY_ROWS


def _skinny_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: RMSNorm | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    turn: Turn | None = None,
) -> Tensor:
    from outrider_runtime.kernels.skinny import product

    # float16: the weighted, not yet normed rows may leave its range
    if norm is not None and (x.dtype is torch.float16 or x.shape[0] > FOLDED_NORM_ROWS):
        x, norm = norm(x), None
    return product(
        x,
        weight,
        norm=None if norm is None else norm.weight,
        eps=0.0 if norm is None else norm.eps,
        bias=bias,
        residual=residual,
        gated=gated,
        turn=turn,
    )
