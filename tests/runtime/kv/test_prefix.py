"""The prefix cache gives back exactly the blocks whose whole history is the same, while they last."""

from __future__ import annotations

from outrider_runtime.kv.prefix import PrefixCache, extend_chain

SIZE = 4


def chain(tokens: list[int]) -> list[bytes]:
    digests: list[bytes] = []
    extend_chain(digests, tokens, SIZE, len(tokens))
    return digests


def published(cache: PrefixCache, tokens: list[int], draft_blocks: int = 0) -> list[int]:
    """As a finished request leaves them."""
    digests = chain(tokens)
    blocks = cache.pool.allocate(len(digests))
    for index, (block, digest) in enumerate(zip(blocks, digests, strict=True)):
        cache.publish(block, digest)
        if index < draft_blocks:
            cache.mark_draft_valid(block)
    cache.pool.release(reversed(blocks))
    return blocks


def test_a_chain_covers_full_blocks_and_each_with_all_before_it():
    assert len(chain([1, 2, 3])) == 0
    assert len(chain(list(range(11)))) == 2
    one, other = chain([1, 2, 3, 4, 5, 6, 7, 8]), chain([1, 2, 3, 0, 5, 6, 7, 8])
    assert one[1] != other[1]
    assert chain([1, 2, 3, 4, 9, 9, 9, 9])[0] == one[0]


def test_a_chain_grown_in_pieces_is_the_same():
    tokens = list(range(40))
    grown: list[bytes] = []
    for length in (3, 4, 17, 40):
        extend_chain(grown, tokens, SIZE, length)
    assert grown == chain(tokens)


def test_the_longest_known_prefix_is_taken():
    cache = PrefixCache(8)
    blocks = published(cache, list(range(12)))
    hit = cache.take(chain([*range(8), 99, 99, 99, 99]))
    assert hit.blocks == blocks[:2]
    assert [cache.pool.refs(block) for block in blocks] == [1, 1, 0]
    assert cache.take(chain([7, *range(1, 12)])).blocks == []


def test_draft_blocks_end_where_the_first_lacks_draft_kv():
    cache = PrefixCache(8)
    published(cache, list(range(12)), draft_blocks=2)
    assert cache.take(chain(list(range(12)))).draft_blocks == 2


def test_a_block_can_become_draft_valid_later():
    cache = PrefixCache(8)
    blocks = published(cache, list(range(4)))
    hit = cache.take(chain(list(range(4))))
    assert hit.draft_blocks == 0
    cache.mark_draft_valid(hit.blocks[0])
    assert cache.take(chain(list(range(4)))).draft_blocks == 1
    assert blocks == hit.blocks


def test_of_two_equal_blocks_the_first_is_kept():
    cache = PrefixCache(4)
    (digest,) = chain(list(range(4)))
    first, second = cache.pool.allocate(2)
    cache.publish(first, digest)
    cache.publish(second, digest)
    cache.mark_draft_valid(second)  # not the one that is kept: this says nothing of it
    cache.pool.release([first, second])
    hit = cache.take([digest])
    assert (hit.blocks, hit.draft_blocks) == ([first], 0)


def test_an_equal_block_with_the_drafts_kv_takes_the_place_of_one_without():
    cache = PrefixCache(4)
    (digest,) = chain(list(range(4)))
    first, second, third = cache.pool.allocate(3)
    cache.publish(first, digest)
    cache.publish(second, digest, draft_valid=True)
    cache.publish(third, digest, draft_valid=True)
    cache.mark_draft_valid(first)
    cache.pool.release([first, second, third])
    assert cache.pool.available == 4
    hit = cache.take([digest])
    assert (hit.blocks, hit.draft_blocks) == ([second], 1)
    assert set(cache.pool.allocate(3)) == {first, third, 3}


def test_a_block_that_was_given_away_is_forgotten():
    cache = PrefixCache(2)
    published(cache, list(range(8)), draft_blocks=2)
    taken = cache.pool.allocate(1)
    assert len(cache.take(chain(list(range(8)))).blocks) == 1  # the tail went first
    assert cache.take(chain(list(range(4)))).draft_blocks == 1
    assert taken is not None


def test_nothing_is_kept_when_switched_off():
    cache = PrefixCache(4, enabled=False)
    published(cache, list(range(8)))
    assert cache.take(chain(list(range(8)))).blocks == []
