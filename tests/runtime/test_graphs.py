"""Widths of graphs leave little to be computed in vain where steps are bound by computing."""

from __future__ import annotations

import pytest

from outrider_runtime.graphs import bucket, buckets


@pytest.mark.parametrize("largest", [1, 3, 60, 2048, 5000, 20_000])
def test_the_largest_is_one_of_them_and_they_ascend(largest):
    widths = buckets(largest)
    assert widths[-1] == largest
    assert list(widths) == sorted(set(widths))


def test_from_256_tokens_on_less_than_a_tile_of_products_is_padding_and_of_long_prompts_less_than_a_third():
    widths = buckets(8192)
    for tokens in range(256, 8193):
        width = bucket(widths, tokens)
        assert width - tokens < (128 if tokens <= 2048 else width / 3)
