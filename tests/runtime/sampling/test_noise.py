"""The noise is Gumbel noise, and depends on seed, position and token id alone."""

from __future__ import annotations

import math

import pytest
import torch

from outrider_runtime.sampling.noise import gumbel, random_words

VOCAB = 1000
KNOWN_WORDS = [[1514324805, 1215765456, 3130654751], [1835210075, 3404824681, 2226016241]]


def rows(seeds: list[int], positions: list[int], vocab_size: int = VOCAB) -> torch.Tensor:
    return gumbel(torch.tensor(seeds), torch.tensor(positions), vocab_size)


def test_it_is_the_same_in_every_batch_and_for_every_vocabulary():
    whole = rows([1, 2, 3, -4], [10, 11, 12, 13])
    for index, (seed, position) in enumerate(zip([1, 2, 3, -4], [10, 11, 12, 13], strict=True)):
        assert torch.equal(rows([seed], [position])[0], whole[index])
        assert torch.equal(rows([seed], [position], 37)[0], whole[index, :37])


def test_it_is_the_same_today_as_when_a_seed_was_written_down():
    """A seed promises a text: these values must never change."""
    words = random_words(torch.tensor([0, 2**63 - 1]), torch.tensor([0, 70_000]), 3)
    assert words.tolist() == KNOWN_WORDS


def distance_to_gumbel(noise: torch.Tensor) -> float:
    """Kolmogorov and Smirnov's, times the root of the count: above 1.95 by chance once in a thousand."""
    ordered = noise.double().flatten().sort().values
    empirical = (torch.arange(len(ordered)) + 0.5) / len(ordered)
    return float((torch.exp(-torch.exp(-ordered)) - empirical).abs().max() * math.sqrt(len(ordered)))


def test_over_tokens_it_is_gumbel_noise():
    assert distance_to_gumbel(rows(list(range(1000)), [5] * 1000)) < 1.95


@pytest.mark.parametrize("token", range(4))
@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_over_rows_each_tokens_noise_is_gumbel_noise(along, token):
    """A token that wins too often in a few rows in a thousand would be a token that comes up too often."""
    count = 200_000
    fixed, running = [3] * count, list(range(count))
    noise = rows(fixed, running, 4) if along == "positions" else rows(running, fixed, 4)
    assert distance_to_gumbel(noise[:, token]) < 1.95


@pytest.mark.parametrize("along", ["seeds", "positions", "tokens"])
def test_neighbours_are_independent(along):
    """Kendall-like: of neighbouring pairs, each order occurs as often; and uncorrelated."""
    count = 200_000
    if along == "tokens":
        line = rows([3], [3], count)[0]
    elif along == "seeds":
        line = rows(list(range(count)), [3] * count, 1)[:, 0]
    else:
        line = rows([3] * count, list(range(count)), 1)[:, 0]
    for distance in (1, 2, 64):
        one, other = line[:-distance].double(), line[distance:].double()
        correlation = torch.corrcoef(torch.stack((one, other)))[0, 1]
        assert abs(correlation) < 4 / math.sqrt(count)


def test_every_bit_of_the_words_is_a_fair_coin():
    words = random_words(torch.arange(500), torch.arange(500), VOCAB).flatten()
    for bit in range(32):
        heads = ((words >> bit) & 1).sum().item()
        assert abs(heads - len(words) / 2) < 4 * math.sqrt(len(words)) / 2


def test_large_seeds_and_positions_count_in_full():
    seeds = [0, 1 << 32, 1 << 62, -1, -(1 << 63)]
    noise = rows([*seeds, 0], [*[0] * len(seeds), 1 << 20])
    assert len({tuple(row.tolist()) for row in noise}) == len(seeds) + 1
    assert torch.isfinite(noise).all()
