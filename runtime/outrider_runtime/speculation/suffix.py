"""Drafts what came after a text's end before: in the text itself, or in finished outputs of all requests.

(SuffixDecoding, Oliaro et al., arXiv 2411.04975.) The host finds them, and for that it must know the text. Where drafts
promise enough, a step is launched only when the one before is read; where nothing matches, the host stays a step ahead
and looks while the device works, so that looking costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from outrider_runtime.engine.device_step import place
from outrider_runtime.engine.feed import Feed
from outrider_runtime.engine.request import Request
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.sampling.table import Mode
from outrider_runtime.speculation.proposer import Proposer
from outrider_runtime.speculation.suffix_index import Chain, Outputs, Text

if TYPE_CHECKING:
    from outrider_runtime.engine.scheduler import Chunk

WORTH = 0.1  # tokens a request that drafts must promise, on average: what the device's wait for the host costs
MOST_PATIENT = 32  # steps between two offers of drafts that are not wanted


class Suffix(Proposer):
    name = "suffix"
    bounded = True

    def __init__(self, state: DeviceState, longest: int, outputs: Outputs | None, least: float) -> None:
        """For drafts of up to `longest` tokens, each of a chance of `least`. `outputs` None: nobody drafts from what
        others got."""
        self._state = state
        self._longest, self._least = longest, least
        self._outputs = outputs
        self._texts: dict[Request, Text] = {}
        self._chains: dict[Request, Chain] = {}  # of the texts as they are
        self._finished: list[Text] = []
        device = state.tokens.device
        self._drafts = torch.zeros(state.nobody + 1, longest, dtype=torch.int32, device=device)  # by slot
        pinned = device.type == "cuda"
        self._host = [torch.zeros(self._drafts.shape, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._refused = False  # something was found for the last step, and nothing of it drafted
        self._patience = self._wait = 0  # steps that drafts are not offered

    def awaits(self, chunks: Sequence[Chunk]) -> bool:
        """Here is done what needs time, and no results."""
        for text in self._finished:
            text.finish()
        self._finished.clear()
        requests = [
            chunk.request
            for chunk in chunks
            if chunk.samples and chunk.request.slot is not None and chunk.request.params.speculative != 0
        ]
        promised = sum(sum(self._chain(request).chances) for request in requests)
        if self._refused:  # drafting does not pay now: offer it less and less often
            self._patience = min(2 * self._patience + 1, MOST_PATIENT)
            self._wait = self._patience
        self._refused = False
        if not requests or promised < WORTH * len(requests):
            return False
        self._wait -= 1
        return self._wait < 0

    def most(self, chunk: Chunk) -> int:
        """None while its text is not known to the end."""
        if chunk.draft_length == 0 or chunk.request.flight is not None:
            return 0
        found = len(self._chain(chunk.request).tokens)
        self._refused |= found > 0
        return found

    def send(self, chunks: Sequence[Chunk]) -> None:
        self._refused, self._patience, self._wait = False, 0, 0
        self._host.reverse()
        drafts = self._host[0].numpy()
        for chunk in chunks:
            if (length := chunk.draft_length) > 0:
                drafts[chunk.request.slot, :length] = self._chain(chunk.request).tokens[:length]
        self._drafts.copy_(self._host[0], non_blocking=True)

    def draft(self, feed: Feed, requests: int, length: int, mode: Mode) -> None:
        slots = feed.slots[:requests]
        place(self._state, slots, self._state.lengths[slots], self._drafts[slots, :length])

    def observe(self, request: Request, end: int, drafted: int, accepted: int) -> None:
        self._chains.pop(request, None)
        if (text := self._texts.get(request)) is None:
            self._text(request)
        else:
            text.extend(request.tokens[end:])

    def forget(self, request: Request) -> None:
        """What it got may help others from the next step on."""
        self._chains.pop(request, None)
        if (text := self._texts.pop(request, None)) is not None:
            self._finished.append(text)

    def _chain(self, request: Request) -> Chain:
        if (chain := self._chains.get(request)) is None:
            chain = self._chains[request] = self._text(request).draft(self._longest, self._least)
        return chain

    def _text(self, request: Request) -> Text:
        if (text := self._texts.get(request)) is None:
            text = self._texts[request] = Text(request.tokens[: request.prompt_length], self._outputs)
            text.extend(request.tokens[request.prompt_length :])
        return text
