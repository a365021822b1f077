"""How many tokens each request drafts in the next step: those that yield the most tokens a second.

Expected tokens come from acceptance.py, seconds from cost.py, and the best use of each draft length from
allocation.py. Here is what keeps that steady over time: a change must be worth more than its noise; while nothing is
drafted, cheap probes keep looking; and a draft model reads what it missed only where that is repaid, little by little.
The policy caps all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider_runtime.speculation.acceptance import Acceptance
from outrider_runtime.speculation.allocation import (
    HOPE,
    NOTHING_READ,
    Allocation,
    Captured,
    Ints,
    Mask,
    Offer,
    Reading,
    longest_captured,
    uniform,
)
from outrider_runtime.speculation.cost import CostTable, Floats, StepShape
from outrider_runtime.speculation.policy import Policy

MARGIN = 0.01  # gains below it are equal,
LENGTH_MARGIN = 0.002  # but between two lengths: to change costs nothing, and shows what the other takes now
REGRET_SECONDS = 0.012  # what staying must have cost, by all that is known, before the length changes (for one request;
REGRET_STEPS = 0.15  # with more there is less luck in it), but at least so much of a step
PROBE_SHARE = 0.004  # of the time, in what a probe adds to its step,
SOON_PROBE_SHARE = 0.008  # but this while drafting has stopped for less than so many seconds:
SOON_PROBED = 10.0  # what paid a moment ago is likelier to pay again
PROBE_REQUESTS = 4
DEEP_PROBES = 8  # one in so many looks further than the first position
CATCH_UP_SHARE = 0.015  # of the time, to read what the draft missed, and half of what drafting gains
CATCH_UP_CREDIT = 0.03  # seconds, the most saved up
MANY_READS = 1024  # as cheap as can be, each
BREAK_EVEN_GAIN = 1.03
TRIALS_TO_KNOW = 32  # of the first position
SPEEDUP_SECONDS = 1.0  # over which it is averaged
SPEEDUP_LEAST = 0.25  # seconds of steps, to say something
REFRESH_SECONDS = 1.0  # of the break-even
NEARLY = 0.95  # full
FEW_REQUESTS = 16  # whose prompts a draft reads in any case, though it may not draft now: they take little of the time
MORE_DRAFTED = 0.25  # of a request than in the last step: so much room prompts leave, that more may be chosen
KEPT_SECONDS = 0.02  # for which a choice stands unexamined, while as many requests decode


@dataclass(frozen=True, slots=True)
class Decoding:
    """The requests that decode in the next step, by slot; each [n]."""

    slots: Ints
    contexts: Ints  # tokens their attention reads
    caps: Ints  # the most each may draft: its own wish, room, blocks; 0 while it cannot
    missed: Ints  # positions a draft model must read before it can draft; 0 for other methods
    remaining: Ints  # tokens it may still generate


@dataclass(frozen=True, slots=True)
class Decision:
    """What the next step drafts. A request reads first, and drafts only when nothing it missed is left."""

    lengths: Ints  # [n]
    reads: Ints  # [n] missed positions for the draft to read in this step
    turns: int  # of the draft loop: a captured length, or 0 when nothing of the draft runs
    follows: bool  # the draft reads the step's prompts too
    shape: StepShape  # for observe(), with what the step took


@dataclass(slots=True)
class _Kept:
    """A choice that stands for a few steps."""

    conditions: tuple[int, int, int, int, Captured]
    until: float
    lengths: Ints  # [slots]; those of requests that were not there are its longest
    steps: int = 1  # that it has stood for


class Adaptive:
    """Of one method. Not thread-safe. `now` is monotonic seconds, everywhere."""

    def __init__(
        self,
        table: CostTable,
        policy: Policy,
        *,
        max_concurrency: int,
        reads_prompts: bool = False,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """`reads_prompts`: the method has a KV of its own, which prompts fill too unless the policy forbids it. `sizes`
        are its trees' (tree.py), whose turns are what lengths count; by default it drafts chains."""
        self.table = table
        self.policy = policy
        self.captured = Captured.all(table.token_buckets, table.request_buckets, table.draft_lengths)  # for decide()
        self.effective_tokens = 0.0  # mean length of the last decision; probes do not count
        self._max_concurrency = max_concurrency
        self._reads_prompts = reads_prompts
        self._deepest = int(table.draft_lengths[-1])
        self._sizes = np.array(range(self._deepest + 1) if sizes is None else sizes, dtype=np.int64)
        self._acceptance = Acceptance(max_concurrency, self._deepest)
        self._length: int | None = None  # in force: turns of the loop
        self._regret = 0.0
        self._probe_credit = 0.0
        self._probe_price = 0.0
        self._probes = 0
        self._probing = False  # plain decoding, but for probes
        self._drafted_at = -math.inf
        self._catch_up_credit = CATCH_UP_CREDIT
        self._catching_up = 0  # requests, once begun
        self._compared = policy  # under which the next two were summed, of the last steps
        self._spent = self._plainly = 0.0  # seconds; what plain decoding would have taken for the same tokens
        self._break_even: tuple[float, int | None] | None = None
        self._last = -math.inf
        self._gaining: tuple[float, Mask | None] | None = None  # the numbers of requests that gain, for prompts
        self._lasting = True  # drafting is to be expected, also when all have come
        self._idle = False  # the last step drafted nothing
        self._drafted = math.inf  # of a request, on average, in the last step in which drafting paid
        self._follows = False  # the draft reads the step's prompts
        self._kept: _Kept | None = None

    @property
    def allowed(self) -> int:
        """The most that the policy lets a request draft."""
        return self.policy.allowed_tokens(self._deepest)

    @property
    def free(self) -> bool:
        """To choose, rather than bound to what is allowed."""
        return self.policy.mode != "Enabled" and self.table.known

    @property
    def expected(self) -> float:
        """Drafts that a request is likely to have in the next step, on average: a few more than in the last one."""
        if not self._lasting and self._idle:
            return 0.0
        longest = self.allowed if self._length is None or not self.free else min(self.allowed, self._length)
        return min(float(self._sizes[longest]), self._drafted + MORE_DRAFTED)

    def decide(self, decoding: Decoding, prompt_tokens: int, now: float, arriving: int = 0) -> Decision:
        """The next step, which also reads so many prompt tokens. `arriving`: requests that will decode as soon as
        their prompts are read, in this step and later ones."""
        longest = self.allowed
        count = len(decoding.slots)
        everyone = count + arriving
        few = everyone < FEW_REQUESTS
        self._lasting = few or self.will_pay(everyone, _mean(decoding.contexts), now)
        self._follows = self._reads_prompts and longest > 0 and (few or (self._lasting and self._length != 0))
        self._probing = False
        nothing = np.zeros(count, dtype=np.int64)
        if longest == 0:
            self._length = 0
        if longest == 0 or count == 0:
            decision = self._decision(decoding, nothing, nothing, prompt_tokens)
        elif self.free:
            return self._adapt(decoding, uniform(decoding.caps, longest), longest, prompt_tokens, arriving, now)
        else:
            decision = self._obey(decoding, uniform(decoding.caps, longest), prompt_tokens)
        self._took(decision)
        return decision

    def observe(
        self,
        slots: Sequence[int] | Ints,
        drafted: Sequence[int] | Ints,
        accepted: Sequence[int] | Ints,
        shape: StepShape,
        seconds: float | None,
        now: float,
    ) -> None:
        """A step has ended. `drafted` are the positions verified for each request, `accepted` those that stood, before
        the request's own end cut any. `seconds` is since the end of the step before it, None if the device was idle in
        between."""
        columns = [np.asarray(column, dtype=np.int64) for column in (slots, drafted, accepted)]
        self._acceptance.observe(columns[0], columns[1], columns[2], now, probe=self._probing)
        self._compare(shape, int(columns[2].sum()))
        if seconds is not None:
            self.table.observe(shape, seconds, now)

    def forget(self, slot: int) -> None:
        """The slot's request has ended."""
        self._acceptance.forget(slot)

    def speedup(self) -> float | None:
        """Tokens a second over plain decoding's of the same requests, by the table; None until known of the policy."""
        if self._compared != self.policy or self._spent < SPEEDUP_LEAST:
            return None
        return self._plainly / self._spent

    def break_even(self, context: float, now: float) -> int | None:
        """The fewest running requests of this mean context for which no length gains 3 %; None if there is no such
        number up to the most that run, or not yet known. Renewed once a second."""
        if self._break_even is None or now - self._break_even[0] >= REFRESH_SECONDS:
            gains = self._gains(context)
            self._break_even = (now, None if gains is None or gains.all() else int(gains.argmin()) + 1)
        return self._break_even[1]

    def _obey(self, decoding: Decoding, caps: Ints, prompt_tokens: int) -> Decision:
        """What the policy says, whether it pays or not; those first that are nearly ready."""
        gaps = np.where(caps > 0, decoding.missed, 0)
        order = np.argsort(gaps, kind="stable")
        before = np.cumsum(gaps[order]) - gaps[order]
        reads = np.zeros(len(caps), dtype=np.int64)
        reads[order] = np.clip(self._most_reads(prompt_tokens) - before, 0, gaps[order])
        return self._decision(decoding, caps, reads, prompt_tokens)

    def will_pay(self, requests: int, context: float, now: float) -> bool:
        """Whether drafting is to be expected of so many, of this mean context: else nothing is read for it. What was
        not read, should that be wrong, still can be."""
        if not self.free:
            return True
        if self._gaining is None or now - self._gaining[0] >= REFRESH_SECONDS:
            self._gaining = (now, self._gains(context))
        gains = self._gaining[1]
        return gains is None or requests == 0 or bool(gains[min(requests, len(gains)) - 1])

    def _reading(self, decoding: Decoding, prompt_tokens: int, arriving: int) -> Reading:
        """Of the step's prompts, behind which `arriving` requests will decode."""
        if prompt_tokens == 0:
            return NOTHING_READ
        count, attended = len(decoding.slots), int(decoding.contexts.sum())
        everyone = count + arriving
        plain = StepShape(count, count, attended)
        later = StepShape(everyone, everyone, attended * everyone // max(1, count))
        own = self.table.seconds(plain)
        mixed = replace(plain, tokens=count + prompt_tokens, prompt_tokens=prompt_tokens)
        seconds = max(0.0, self.table.seconds(mixed) - own)
        brought = arriving * own / self.table.seconds(later)
        reserved = round(count * self.expected)  # for drafts, when the step's prompts were chosen
        full = count + reserved + prompt_tokens >= self.table.token_buckets[-1] * NEARLY
        displaced = (count + brought) / own * seconds / (prompt_tokens + reserved) if full else 0.0
        return Reading(prompt_tokens, seconds, brought, displaced)

    def _adapt(
        self, decoding: Decoding, caps: Ints, longest: int, prompt_tokens: int, arriving: int, now: float
    ) -> Decision:
        behind = (decoding.missed > 0) & (caps > 0)
        conditions = len(caps), prompt_tokens, arriving, longest, self.captured
        if (kept := self._standing(conditions, now)) and (not self._length or not behind.any()):
            lengths = np.minimum(kept.lengths[decoding.slots], caps)
            rows = len(caps) + int(self._sizes[lengths].sum())
            if rows + prompt_tokens <= self.table.token_buckets[-1]:  # others have come in the place of some
                kept.steps += 1
                return self._carried_out(decoding, caps, lengths, np.zeros_like(caps), longest, prompt_tokens)
        chances, shifts = self._acceptance.hoped()[:longest], self._acceptance.shifts(decoding.slots)
        grid = self.table.grid(prompt_tokens, int(decoding.contexts.sum()), float(decoding.contexts.mean()))

        reading = self._reading(decoding, prompt_tokens, arriving)

        def offers(caps: Ints) -> tuple[Allocation, list[Offer]]:
            allocation = Allocation(chances, shifts, caps, np.diff(self._sizes)[:longest])
            return allocation, allocation.offers(grid, self.captured, longest, reading)

        missed = decoding.missed
        allocation, offered = offers(caps)
        reads = np.zeros(len(caps), dtype=np.int64)
        if behind.any():
            best = max(offered, key=lambda offer: offer.rate)
            saved = 1.0 / offered[0].rate - 1.0 / best.rate  # seconds a token
            repaid = (missed * self._seconds_per_read() <= saved * decoding.remaining) & self._lasting
            if not repaid[behind].all():
                allocation, offered = offers(np.where(behind & ~repaid, 0, caps))
            wish = self._settled(offered, len(caps))
            if wish.length > 0:
                gaps = np.where(behind & repaid, missed, 0)
                # Whoever the plan leaves out anyway need not catch up.
                needed = wish.requests - int(((caps > 0) & ~behind).sum())

                def rate(ready: Mask) -> float:
                    return max(offer.rate for offer in offers(np.where(ready, caps, 0))[1])

                reads = self._catch_up(gaps, needed, ~behind, self._most_reads(prompt_tokens), rate)
                allocation, offered = offers(np.where(missed > reads, 0, caps))
                wish = max((offer for offer in offered if offer.length <= wish.length), key=lambda offer: offer.rate)
        else:
            wish = self._settled(offered, len(caps))
        self._account(offered[0], wish, now)
        lengths = allocation.lengths(wish)
        by_slot = np.full(self._max_concurrency, wish.length)
        by_slot[decoding.slots] = lengths
        self._kept = _Kept(conditions, now + KEPT_SECONDS, by_slot)
        return self._carried_out(decoding, caps, lengths, reads, longest, prompt_tokens)

    def _standing(self, conditions: tuple[int, int, int, int, Captured], now: float) -> _Kept | None:
        kept = self._kept
        if kept is None or now >= kept.until:
            return None
        same = kept.conditions[:-1] == conditions[:-1] and kept.conditions[-1] is conditions[-1]
        return kept if same else None

    def _carried_out(
        self, decoding: Decoding, caps: Ints, lengths: Ints, reads: Ints, longest: int, prompt_tokens: int
    ) -> Decision:
        # A length may be in force that nobody is ready for, nor worth the while to be made ready.
        self._probing = not self._length or not (lengths.any() or reads.any())
        if self._probing:
            self.effective_tokens = 0.0
            return self._probe(decoding, caps, longest, prompt_tokens)
        decision = self._decision(decoding, lengths, reads, prompt_tokens)
        self._took(decision)
        return decision

    def _settled(self, offers: Sequence[Offer], count: int) -> Offer:
        """The best, or what is in force until staying has cost too much."""
        if len(offers) == 1:
            return offers[0]  # nobody may draft now, which says nothing about whether it pays
        best = max(offers, key=lambda offer: offer.rate)
        current = next((offer for offer in offers if offer.length == self._length), None)
        if current is not None and best is not current:
            begins_or_ends = not best.length or not current.length
            gain = best.rate / current.rate - 1.0 - (MARGIN if begins_or_ends else LENGTH_MARGIN)
            steps = 1 if self._kept is None else self._kept.steps
            self._regret = max(0.0, self._regret + gain * current.seconds * steps)
            if self._regret < max(REGRET_SECONDS / math.sqrt(count), REGRET_STEPS * current.seconds):
                return current
        if best.length != self._length:
            self._length = best.length
        self._regret = 0.0
        return best

    def _account(self, plain: Offer, chosen: Offer, now: float) -> None:
        """Credit for probes and catching up, over the time since the last decision."""
        elapsed = min(max(now - self._last, 0.0), 1.0) if self._last > -math.inf else 0.0
        self._last = now
        gained = max(0.0, 1.0 - plain.rate / chosen.rate)
        self._catch_up_credit = min(self._catch_up_credit + elapsed * (CATCH_UP_SHARE + 0.5 * gained), CATCH_UP_CREDIT)
        if not chosen.length:
            share = SOON_PROBE_SHARE if now - self._drafted_at < SOON_PROBED else PROBE_SHARE
            self._probe_credit = min(self._probe_credit + elapsed * share, max(self._probe_price, 0.01))
        else:
            self._drafted_at = now

    def _compare(self, shape: StepShape, stood: int) -> None:
        """A step, of which so many drafts stood, with plain decoding, which would have read its prompts once, too."""
        if self._compared != self.policy:  # the step was launched under the one before
            self._compared, self._spent, self._plainly = self.policy, 0.0, 0.0
        elif shape.requests and self.table.known:
            took = plainly = self.table.seconds(shape, HOPE)
            if shape.draft_length or shape.draft_reads:
                count, prompt = shape.requests, shape.prompt_tokens
                plain = StepShape(count, count, shape.kv_tokens)
                plainly = self.table.seconds(replace(plain, tokens=count + prompt, prompt_tokens=prompt), HOPE)
                plainly += stood / count * self.table.seconds(plain, HOPE)
            kept = math.exp(-took / SPEEDUP_SECONDS)
            self._spent, self._plainly = kept * self._spent + took, kept * self._plainly + plainly

    def _seconds_per_read(self) -> float:
        """In a chunk of many."""
        return float(self.table.read_seconds(MANY_READS)) / MANY_READS

    def _catch_up(self, gaps: Ints, needed: int, ready: Mask, most: int, rate: Callable[[Mask], float]) -> Ints:
        """Positions to read in this step, `most` at most, the shortest gaps first; `rate` is of the requests that may
        draft.

        Who caught up falls behind again unless enough of them are there to draft. So the credit is saved up until it
        does for all, or is all there can be; is spent only if that buys something; and then to the end."""
        reads = np.zeros(len(gaps), dtype=np.int64)
        order = np.argsort(np.where(gaps > 0, gaps, np.iinfo(np.int64).max), kind="stable")[: max(0, needed)]
        order = order[gaps[order] > 0]
        if not self._catching_up:
            prices = self.table.read_seconds(np.cumsum(gaps[order]).astype(np.float64))
            affordable = int((prices <= self._catch_up_credit).sum())
            if affordable == 0 or (affordable < len(order) and self._catch_up_credit < 0.95 * CATCH_UP_CREDIT):
                return reads
            able = ready.copy()
            able[order[:affordable]] = True
            if rate(able) <= (1.0 + MARGIN) * rate(ready):
                return reads
            self._catching_up = affordable
        chosen = order[: self._catching_up]
        total = int(gaps[chosen].sum())
        budget = min(total, most)
        if budget:
            self._catch_up_credit -= float(self.table.read_seconds(budget))
            reads[chosen] = np.clip(budget - (np.cumsum(gaps[chosen]) - gaps[chosen]), 0, gaps[chosen])
        if budget == total or self._catch_up_credit < -CATCH_UP_CREDIT:
            self._catching_up = 0
        return reads

    def _probe(self, decoding: Decoding, caps: Ints, longest: int, prompt_tokens: int) -> Decision:
        """Plain decoding, and now and then a few drafts to see how they fare."""
        nothing = np.zeros(len(caps), dtype=np.int64)
        plain = self._decision(decoding, nothing, nothing, prompt_tokens)
        if self._probe_credit <= 0.0 or self._probe_credit < 0.9 * self._probe_price or not caps.any():
            return plain
        gap = np.where(caps > 0, decoding.missed, np.iinfo(np.int64).max)
        members = np.argsort(gap, kind="stable")[: min(PROBE_REQUESTS, int((caps > 0).sum()))]
        chosen = nothing.copy()
        chosen[members] = 1
        reads = chosen * decoding.missed

        def probe(length: int) -> tuple[float, Decision]:
            turns = longest_captured(self.captured, len(members), length)
            decision = self._decision(decoding, chosen * uniform(caps, turns), reads, prompt_tokens)
            return self.table.seconds(decision.shape) - self.table.seconds(plain.shape), decision

        price, decision = probe(1)
        deep_price, deep = probe(min(4, longest))
        if deep_price <= 1.25 * price or self._probes % DEEP_PROBES == DEEP_PROBES - 1:
            price, decision = deep_price, deep
        self._probe_price = price
        room = decision.shape.tokens <= self.table.token_buckets[-1] and reads.sum() <= self._most_reads(prompt_tokens)
        if decision.turns == 0 or self._probe_credit < price or not room:
            return plain
        self._probe_credit -= max(price, 0.0)
        self._probes += 1
        return decision

    def _decision(self, decoding: Decoding, lengths: Ints, reads: Ints, prompt_tokens: int) -> Decision:
        lengths = np.where(decoding.missed > reads, 0, lengths)
        drafting = lengths > 0
        requests, rows = int(drafting.sum()), len(lengths) + int(self._sizes[lengths].sum())
        turns = self._turns(int(lengths.max(initial=0)), requests)
        self._idle = turns == 0
        shape = StepShape(
            tokens=rows + prompt_tokens,
            rows=rows,
            requests=len(lengths),
            kv_tokens=int(decoding.contexts.sum()),
            draft_requests=requests,
            draft_length=turns,
            draft_kv_tokens=int(decoding.contexts[drafting].sum()),
            draft_reads=int(reads.sum()) + (prompt_tokens if self._follows else 0),
            prompt_tokens=prompt_tokens,
        )
        return Decision(lengths, reads, turns, self._follows, shape)

    def _took(self, decision: Decision) -> None:
        if len(decision.lengths):
            self.effective_tokens = float(decision.lengths.mean())
            self._drafted = float(self._sizes[decision.lengths].mean())

    def _most_reads(self, prompt_tokens: int) -> int:
        """That a step has room for, beside its prompts."""
        return max(0, int(self.table.token_buckets[-1]) - (prompt_tokens if self._follows else 0))

    def _turns(self, needed: int, requests: int) -> int:
        """The shortest captured loop that drafts as much; without any, the shortest."""
        if needed == 0:
            return 0
        captured = self.captured
        bucket = min(int(np.searchsorted(captured.requests, requests)), len(captured.requests) - 1)
        first = int(np.searchsorted(captured.lengths, needed))
        ready = captured.loops_ready[first:, bucket]
        return int(captured.lengths[first + int(ready.argmax())])

    def _gains(self, context: float) -> Mask | None:
        """Of 1, 2, … running requests of this mean context: whether some length gains 3 %; None until known."""
        longest = replace(self.policy, mode="Auto", state="Active").allowed_tokens(self._deepest)
        if not self.table.known or self._acceptance.trials < TRIALS_TO_KNOW:
            return None
        table, most = self.table, self._max_concurrency
        grid = table.grid(0, int(most * context), context)
        counts = np.arange(1, most + 1)
        attention = counts / most * grid.attention
        loops = np.minimum(np.searchsorted(table.request_buckets, counts), len(table.request_buckets) - 1)
        tokens = np.concatenate([[1.0], 1.0 + np.cumsum(np.cumprod(self._acceptance.pooled()))])  # by length

        def rates(length: int, draft: Floats | float) -> Floats:
            sizes = counts * (1 + self._sizes[length])
            bucket = np.minimum(np.searchsorted(table.token_buckets, sizes), len(table.token_buckets) - 1)
            seconds = grid.target[bucket] + attention + draft
            return np.where(sizes <= table.token_buckets[bucket], counts * tokens[length] / seconds, 0.0)

        best = np.zeros(most)
        for row, length in enumerate(table.draft_lengths[table.draft_lengths <= longest].tolist()):
            best = np.maximum(best, rates(length, grid.draft[row, loops]))  # captured or not: it will be
        return np.asarray(best >= BREAK_EVEN_GAIN * rates(0, 0.0))


def _mean(contexts: Ints) -> float:
    return float(contexts.mean()) if len(contexts) else 0.0
