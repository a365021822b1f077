"""Runs steps on the device: draft, forward, sample, verify. Launches are asynchronous; results are read when wanted.

Everything here is in the order of one stream. So a block, or a slot, that is given to somebody else after a step was
launched is written only when that step is done with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider_runtime.config import EngineConfig
from outrider_runtime.engine import capture
from outrider_runtime.engine.capture import Draft, DraftRead, Extend, Forward, Program, Sample, Widths
from outrider_runtime.engine.device_step import drawing, gather_batch, update_tables
from outrider_runtime.engine.feed import AT_THE_END, BlockUpdate, Feed, FeedBuffer, FeedShape, Share, shape_of
from outrider_runtime.engine.request import Request
from outrider_runtime.engine.results import Results, Ticket
from outrider_runtime.engine.scheduler import Chunk
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.engine.tree_step import gather_tree_batch
from outrider_runtime.graphs import Graphs, bucket, buckets, seconds, unpadded
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.kv.compaction import Path, compact_kv, compact_rows
from outrider_runtime.layers.rows import take_rows
from outrider_runtime.models.causal import CausalLM, Weighted
from outrider_runtime.sampling.logprobs import logprobs as logprobs_of
from outrider_runtime.sampling.params import MAX_LOGPROBS
from outrider_runtime.sampling.sampler import sample
from outrider_runtime.sampling.table import Mode, SamplingTable
from outrider_runtime.speculation.allocation import Captured
from outrider_runtime.speculation.cost import StepShape
from outrider_runtime.speculation.greedy import greedy_tokens
from outrider_runtime.speculation.proposer import Proposer, Read
from outrider_runtime.speculation.registry import Setting, make_proposer
from outrider_runtime.speculation.verify import commit, commit_tree, draw_lots, draw_runs, stands_by_lot

log = logging.getLogger(__name__)

MOST_UPDATES = 1024  # of block tables, in one feed
DRAFT_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # that draft loops are captured for


class Runner:
    """Owns all that lies on the device but for the models' weights."""

    def __init__(
        self,
        config: EngineConfig,
        target: CausalLM,
        draft: Weighted | None,
        *,
        num_blocks: int,
        max_model_len: int,
        eos_token_ids: Collection[int],
    ) -> None:
        self.target, device = target, target.device
        self._most_drafts = config.speculation.most_drafts
        self._block_size, self._num_blocks = config.cache.block_size, num_blocks
        slots = config.scheduler.max_concurrency
        width = max_model_len + 2 * (1 + self._most_drafts)  # a text's end is known a step late
        tree = config.speculation.tree
        blocks = -(-width // self._block_size)
        self._state = DeviceState(slots, width, blocks, device, 0 if tree is None else self._most_drafts)
        self._table = SamplingTable(self._state.tokens, eos_token_ids)
        self._cache = KVCache(target.config, num_blocks, self._block_size, target.dtype, device)
        draft_cache = None
        if draft is not None:
            draft_cache = KVCache(draft.config, num_blocks, self._block_size, draft.dtype, draft.device)
        self.proposer: Proposer | None = make_proposer(
            Setting(config, target, draft, draft_cache, self._state, self._table)
        )
        self._extends = self.proposer is not None and self.proposer.extends
        # Drafts of a request by the turns of the loop that makes them
        self.draft_sizes = tuple(range(config.speculation.max_tokens + 1))
        self._tree = None if self.proposer is None else self.proposer.tree
        if self._tree is not None:
            last = len(self._tree.sizes) - 1
            self.draft_sizes = tuple(self._tree.sizes[min(turns, last)] for turns in self.draft_sizes)
        self._graphs = Graphs(device)
        tokens = config.scheduler.max_batched_tokens
        self._largest = FeedShape(slots, tokens, min(tokens, slots * (1 + self._most_drafts)), MOST_UPDATES)
        turns = config.speculation.max_tokens
        lengths = (*(length for length in DRAFT_LENGTHS if length < turns), turns)
        self.widths = Widths(
            buckets(tokens),
            buckets(self._largest.rows),
            buckets(slots),
            lengths if self.proposer is not None else (),
            reads=self.proposer is not None and self.proposer.reads,
            extends=self._extends,
            draft_sizes=self.draft_sizes,
        )
        # What a step's size counts as, where it is not padded to one of the widths.
        self.sizes = self.widths if self._graphs.active else replace(self.widths, tokens=unpadded(tokens))
        self._captured_sizes: dict[tuple[Mode, bool], tuple[int, Captured]] = {}  # as of so many graphs
        self._uncaptured: list[Program] = []  # the next one last
        self._feeds, self._read_feeds = (FeedBuffer(self._largest, slots, device) for _ in range(2))
        # What one program leaves for the next, and the last one for the host.
        self._hidden = torch.zeros(tokens, target.config.hidden_size, dtype=target.dtype, device=device)
        self._positions = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._places = self._positions  # of KV; in a tree not the positions in the text
        if self._tree is not None:
            self._places = torch.zeros_like(self._positions)
            nodes = torch.zeros(slots, self._tree.depth, dtype=torch.int32, device=device)
            self._path = Path(torch.zeros(slots, dtype=torch.int32, device=device), nodes)
        self._results = Results(slots, self._largest.rows, self._most_drafts, device)
        self._meant = torch.full((slots,), self._most_drafts, dtype=torch.int32, device=device)
        self._lots: Tensor | None = None  # benchmarks only

    @property
    def on_host(self) -> bool:
        """Whether steps run while they are launched."""
        return self._state.tokens.device.type != "cuda"

    def force_accepted_length(self, mean: float, *, shared: bool) -> None:
        """For benchmarks, before the first step: the number of tokens a step yields, whatever the drafts are."""
        self._lots = draw_lots(mean, self._state.nobody + 1, self._state.tokens.device, shared=shared)

    def force_acceptance(self, chance: float) -> None:
        """For benchmarks, before the first step: a draft's behind one that stands, whatever it is."""
        self._lots = draw_runs(chance, self._state.nobody + 1, self._state.tokens.device)

    def admit(self, request: Request) -> None:
        """Its text and parameters, into the slot that it was given."""
        assert request.slot is not None
        self._state.admit(request.slot, request.tokens)
        self._table.write(request.slot, request.params, request.seed, request.prompt_length)

    def launch(
        self,
        chunks: Sequence[Chunk],
        updates: Sequence[BlockUpdate],
        *,
        turns: int = 0,
        reads: Sequence[Read] = (),
        extend: bool = False,
    ) -> Ticket:
        """Start a step, whose chunks draft as much as they say, in a loop of so many turns, after these reads; with
        `extend`, the draft follows it then. The ticket's chunks may draft less, and come in another order."""
        updates = self._send_ahead(updates)
        chunks = _drafting_first(chunks)
        mode = max(chunk.request.mode for chunk in chunks)
        logprobs = any(chunk.samples and chunk.request.params.logprobs is not None for chunk in chunks)
        if reads:
            shares = [self._share(read.request, read.start, read.length) for read in reads]
            self._read(self._pack(self._read_feeds, shares, updates))
        feed = self._feed(chunks, updates)
        if drafting := sum(chunk.draft_length > 0 for chunk in chunks):
            self._draft(feed, drafting, turns, mode)
            if not self._graphs.active:  # the host may look, and what was not found need not be verified
                for chunk, meant in zip(chunks, self._meant[: len(chunks)].tolist(), strict=True):
                    chunk.draft_length = min(chunk.draft_length, meant)
                chunks = _drafting_first(chunks)
                feed = self._feed(chunks, updates)
                self._meant.fill_(self._most_drafts)
        small = all(chunk.length + chunk.draft_length <= self.widths.few for chunk in chunks)
        narrow = all(chunk.length + chunk.draft_length == 1 for chunk in chunks)
        self._forward(feed, small=small, narrow=narrow)
        if any(chunk.samples for chunk in chunks):
            self._sample(feed, mode, logprobs=logprobs)
        else:
            self._results.tokens.zero_()
        ticket = self._results.send(chunks, logprobs=logprobs)
        if extend and self.proposer is not None:  # the host need not wait for that
            self.proposer.extended(chunks)
            self._extend(feed, small=small)
        return ticket

    def capture(self, draft_tokens: int, report: Callable[[str], None]) -> None:
        """What a server needs before it is ready; what follows is idle()'s. Nothing where there are no graphs.

        Programs run for a feed of nobody: no text, table or KV of a request changes.
        """
        if not self._graphs.active:
            return
        programs = capture.first(self.widths, draft_tokens)
        if not self.on_host:
            self._compile(programs, report)
        begin = time.monotonic()
        report(f"capturing {len(programs)} graphs")
        for program in programs:
            self._prepare(program)
        self._uncaptured = capture.rest(self.widths, programs)[::-1]
        report(f"captured {len(programs)} graphs in {time.monotonic() - begin:.1f} s; {len(self._uncaptured)} to come")

    def _compile(self, programs: Collection[Program], report: Callable[[str], None]) -> None:
        """The kernels that the programs launch, all at once instead of one where the other has run."""
        from outrider_runtime.kernels.compiling import compile_ahead  # Triton is there with CUDA only

        with self._graphs.holding() as held:
            for program in programs:
                self._prepare(program)
        compile_ahead(held, self._state.tokens.device, report)

    def captured(self, program: Program) -> bool:
        return program in self._graphs

    def captured_sizes(self, mode: Mode, longest: int) -> Captured:
        """What a step that samples in this way may be padded to without capturing anything; the request that brings
        most tokens, drafts apart, brings `longest`."""
        key, count = (mode, longest <= self.widths.few), len(self._graphs)
        if (known := self._captured_sizes.get(key)) is None or known[0] != count:
            known = count, capture.captured_sizes(self.sizes, self.captured, *key)
            self._captured_sizes[key] = known
        return known[1]

    def capture_for(self, requests: int, longest: int, mode: Mode) -> None:
        """One of the programs that so many requests need to draft up to so many tokens each, if any is missing. Between
        two steps: it keeps them waiting."""
        if self._graphs.active:
            missing = (each for each in capture.wanted(self.widths, requests, longest, mode) if not self.captured(each))
            if (program := next(missing, None)) is not None:
                self._try(program)

    def idle(self) -> bool:
        """Capture one more, while no step is to be launched. Whether there are more."""
        while self._uncaptured:
            if not self.captured(program := self._uncaptured.pop()):
                if not self._try(program):
                    self._uncaptured.clear()
                break
        return bool(self._uncaptured)

    def _try(self, program: Program) -> bool:
        """False where memory does not suffice."""
        try:
            self._prepare(program)
        except torch.OutOfMemoryError:
            log.warning("no memory for more graphs", extra={"program": str(program)})
            return False
        return True

    def measure(self, shape: StepShape) -> float:
        """Seconds of such a step, drafts' own reads and prompts apart. Only while no request runs: it is for nobody, or
        where its contexts are long in free slots."""
        rows = min(shape.tokens, self._largest.rows)
        padded = replace(self._largest, tokens=shape.tokens, rows=rows)
        if self._graphs.active:
            padded = replace(
                padded, tokens=bucket(self.widths.tokens, shape.tokens), rows=bucket(self.widths.rows, rows)
            )
        shares = list[Share]()
        if shape.kv_tokens > shape.tokens:
            start = shape.kv_tokens // shape.tokens - 1
            self._spread_tables()
            shares = [Share(slot, start, 1, 0, capacity=0, samples=False) for slot in range(shape.tokens)]

        def step() -> None:
            feed = self._feeds.pack(shares, [], padded)
            if shape.draft_length:
                self._draft(feed, shape.draft_requests, shape.draft_length, Mode.GREEDY)
            self._forward(feed, small=True, narrow=not shape.draft_length)
            self._sample(feed, Mode.GREEDY, logprobs=False)
            if self._extends and shape.draft_length:
                self._extend(feed, small=True)

        took = seconds(self._state.tokens.device, step)
        self._meant.fill_(self._most_drafts)
        return took

    def _spread_tables(self) -> None:
        """As if each slot had blocks of its own, as far as there are any."""
        tables = self._state.block_tables[:-1]
        tables.copy_(torch.arange(tables.numel(), device=tables.device).remainder(self._num_blocks).view_as(tables))

    def _prepare(self, program: Program) -> None:
        match program:
            case Forward(tokens, small, narrow):
                self._forward(self._nobody(self._feeds, tokens=tokens), small=small, narrow=narrow)
            case Sample(rows, mode, logprobs):
                self._sample(self._nobody(self._feeds, rows=rows), mode, logprobs=logprobs)
            case Draft(requests, length, mode):
                self._draft(self._nobody(self._feeds), requests, length, mode)
            case DraftRead(tokens):
                self._read(self._nobody(self._read_feeds, tokens=tokens))
            case Extend(tokens, small):
                self._extend(self._nobody(self._feeds, tokens=tokens), small=small)

    def _nobody(self, buffer: FeedBuffer, **sizes: int) -> Feed:
        return buffer.pack([], [], replace(self._largest, **sizes))

    def _send_ahead(self, updates: Sequence[BlockUpdate]) -> Sequence[BlockUpdate]:
        """What does not fit into a step's feed."""
        while len(updates) > MOST_UPDATES:
            update_tables(self._state, self._pack(self._feeds, [], updates[:MOST_UPDATES]))
            updates = updates[MOST_UPDATES:]
        return updates

    def _read(self, feed: Feed) -> None:
        def program() -> None:
            assert self.proposer is not None
            update_tables(self._state, feed)
            self.proposer.read(feed)

        self._graphs.run(DraftRead(len(feed.owners)), program)

    def _draft(self, feed: Feed, requests: int, length: int, mode: Mode) -> None:
        """`requests` are the first of the feed; with graphs, some more are drafted for in vain."""
        if self._graphs.active:
            requests = bucket(self.widths.requests, requests)

        def program() -> None:
            assert self.proposer is not None
            update_tables(self._state, feed)
            if (meant := self.proposer.draft(feed, requests, length, mode)) is not None:
                self._meant[:requests] = meant

        self._graphs.run(Draft(requests, length, mode), program)

    def _forward(self, feed: Feed, *, small: bool, narrow: bool = False) -> None:
        tokens = len(feed.owners)

        def program() -> None:
            update_tables(self._state, feed)
            shape = self.target.attention_shape
            places = self._places[:tokens]
            if self._tree is None or narrow:
                batch = gather_batch(self._state, feed, self._cache, shape, places, small=small, narrow=narrow)
            else:
                depth = self._tree.depth
                batch = gather_tree_batch(self._state, feed, self._cache, shape, places, small=small, depth=depth)
            if self._tree is not None:
                self._positions[:tokens] = batch.positions
            self._hidden[:tokens] = self.target(batch, self._cache)

        self._graphs.run(Forward(tokens, small, narrow), program)

    def _extend(self, feed: Feed, *, small: bool) -> None:
        tokens = len(feed.owners)

        def program() -> None:
            assert self.proposer is not None
            self.proposer.extend(feed, self._hidden[:tokens], self._places[:tokens], small=small)

        self._graphs.run(Extend(tokens, small), program)

    def _sample(self, feed: Feed, mode: Mode, *, logprobs: bool) -> None:
        owners = self._feeds.views(self._largest).owners  # all, since a graph serves steps of any number of tokens

        def program() -> None:
            stands = None if self._lots is None else stands_by_lot(self._state, feed, self._lots)
            sampled = None
            if mode is Mode.GREEDY and not logprobs:
                sampled = greedy_tokens(self.target, self._hidden, self._state, feed, stands, chains=self._tree is None)
            if sampled is None:
                slots, positions = drawing(feed, owners, self._positions)
                logits = self.target.logits(take_rows(self._hidden, feed.rows))
                sampled = sample(logits, slots, positions, self._table, mode)
                if logprobs:
                    self._results.tell(logprobs_of(logits, sampled, min(MAX_LOGPROBS, logits.shape[-1])))
            requests = len(feed.slots) - 1
            meant, results = self._meant[:requests], self._results.tokens[:requests]
            if self._tree is None:
                commit(self._state, feed, sampled, meant, results, stands)
            else:
                path = Path(self._path.ends[:requests], self._path.nodes[:requests])
                commit_tree(self._state, feed, sampled, meant, results, path, stands)
                self._compact(feed, path)

        self._graphs.run(Sample(len(feed.rows), mode, logprobs), program)

    def _compact(self, feed: Feed, path: Path) -> None:
        """Let all that a step leaves lie as after a chain. Who drafts comes first, and has two rows at least."""
        requests = min(len(path.ends), len(feed.rows) // 2)
        if requests == 0:
            return
        path = Path(path.ends[:requests], path.nodes[:requests])
        compact_kv(self._cache, self._state.block_tables, feed.slots[:requests], path)
        compact_rows(self._results.logprobs, feed.first_rows[:requests], path)
        compact_rows(self._hidden, feed.query_starts[:requests], path)
        if self.proposer is not None and self.proposer.taps is not None:
            compact_rows(self.proposer.taps, feed.query_starts[:requests], path)

    def _feed(self, chunks: Sequence[Chunk], updates: Sequence[BlockUpdate]) -> Feed:
        shares = [
            self._share(
                chunk.request,
                AT_THE_END if chunk.decodes else chunk.start,
                chunk.length,
                chunk.draft_length,
                samples=chunk.samples,
                written=chunk.request.published * self._block_size,
            )
            for chunk in chunks
        ]
        return self._pack(self._feeds, shares, updates)

    def _share(
        self, request: Request, start: int, length: int, drafts: int = 0, *, samples: bool = False, written: int = 0
    ) -> Share:
        assert request.slot is not None
        return Share(request.slot, start, length, drafts, len(request.blocks) * self._block_size, samples, written)

    def _pack(self, buffer: FeedBuffer, shares: Sequence[Share], updates: Sequence[BlockUpdate]) -> Feed:
        """With graphs, padded to what one was or will be captured for."""
        shape = shape_of(shares, updates)
        if self._graphs.active:
            tokens, rows = bucket(self.widths.tokens, shape.tokens), bucket(self.widths.rows, shape.rows)
            shape = replace(self._largest, tokens=tokens, rows=rows)
        return buffer.pack(shares, updates, shape)


def _drafting_first(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The longest drafts first, so that those who draft are the first of a batch."""
    return sorted(chunks, key=lambda chunk: -chunk.draft_length)
