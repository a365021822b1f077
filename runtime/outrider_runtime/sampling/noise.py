"""Counter-based Gumbel noise: a function of (seed, position, token id) alone.

Adding Gumbel noise to log probabilities and taking the largest samples from them. Since the noise is computed from
what it belongs to, not drawn from a stream, it is the same on every device, in every batch, for target and draft.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: consecutive token ids land far apart


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """[rows] seeds and positions (int64, any values) to standard Gumbel noise, [rows, vocab] float32."""
    words = random_words(seeds, positions, vocab_size)
    # With v uniform, -log(1 - v) is exponential, and small exactly where v is: there the winners lie. Double
    # precision, so that rounding to float32 hides the last-place differences between devices.
    exponential = words.to(torch.float64).add_(0.5).mul_(2.0**-32).neg_().log1p_().neg_()
    return exponential.log_().neg_().to(torch.float32)


def random_words(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """The uniform 32-bit words beneath the noise, [rows, vocab] int64."""
    row = _mix(_mix(_mix((seeds & _WORD) ^ _GOLDEN) ^ ((seeds >> 32) & _WORD)) ^ (positions & _WORD))
    # A second word, since two of many rows may share their first. Mixed twice: if it were near mix(row + golden), the
    # second token's noise would be extreme in one row of a million.
    other = _mix(_mix(row ^ _GOLDEN))
    words = torch.arange(vocab_size, dtype=torch.int64, device=seeds.device).mul_(_GOLDEN)
    words = words.unsqueeze(0).add(row.unsqueeze(1)).bitwise_and_(_WORD)
    return _mix(_mix(words).bitwise_xor_(other.unsqueeze(1)))


def _mix(words: Tensor) -> Tensor:
    """A bijection on 32-bit words (held in int64) that spreads every bit: the finaliser of MurmurHash3 (Appleby)."""
    words = words ^ (words >> 16)
    words.mul_(0x85EBCA6B).bitwise_and_(_WORD)
    words ^= words >> 13
    words.mul_(0xC2B2AE35).bitwise_and_(_WORD)
    words ^= words >> 16
    return words
