"""From logits to tokens, a whole batch of rows at once, target's and draft's alike, in torch.

The one rule: the token at position j is the one that maximises log p_j + G(seed, j), with p_j what is left after bias,
penalties, bans, temperature, top-k, top-p and min-p, and G the noise; greedy is without noise. No row depends on
another. On CUDA the kernels do the same (../kernels/sampling.py); sampler.py chooses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider_runtime.sampling.noise import gumbel
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.sampling.table import HEADER_WORDS, Layout, Mode, SamplingTable, Settings, mode_of

LOGITS_AT_ONCE = 1 << 23  # elements; each takes several temporaries of up to 8 bytes


@dataclass(frozen=True, slots=True)
class Row:
    """One token to be drawn: behind `tokens`, whose first `prompt_length` are the prompt, and `drafted` ones."""

    params: SamplingParams
    seed: int
    tokens: Sequence[int]
    prompt_length: int
    drafted: Sequence[int] = ()

    @property
    def position(self) -> int:
        return len(self.tokens) + len(self.drafted)


def sample(logits: Tensor, rows: Sequence[Row], eos_token_ids: Collection[int] = ()) -> Tensor:
    """[rows, vocab] logits to [rows] token ids, int64, on the logits' device. The logits are left as they were."""
    return draw(logits, *_tabled(rows, eos_token_ids, logits.device)).long()


def scores(logits: Tensor, rows: Sequence[Row], eos_token_ids: Collection[int] = ()) -> Tensor:
    """What a drawn token has the most of, [rows, vocab] float32: its log probability, up to a constant of the row, and
    its noise; -inf where it cannot be drawn. How near two tokens come to each other says how safe a draw is."""
    return _scored(logits, *_tabled(rows, eos_token_ids, logits.device))


def _tabled(
    rows: Sequence[Row], eos_token_ids: Collection[int], device: torch.device
) -> tuple[Tensor, Tensor, SamplingTable, Mode]:
    """What draw() takes beside logits."""
    mode = max(mode_of(row.params) for row in rows)
    positions = [row.position for row in rows]
    texts = [[0]] * len(rows)
    if mode is Mode.FULL:
        longest = max(positions)
        texts = [[*row.tokens, *row.drafted, *[0] * (longest - row.position)] for row in rows]
    layout = Layout(
        bias=max(len(row.params.logit_bias) for row in rows),
        ends=max(len(row.params.stop_token_ids) for row in rows) + len(eos_token_ids),
        words=max(len(row.params.bad_words) for row in rows),
        word_length=max((len(word) for row in rows for word in row.params.bad_words), default=1),
    )
    table = SamplingTable(torch.tensor(texts, dtype=torch.int32, device=device), eos_token_ids, layout)
    for slot, row in enumerate(rows):
        table.write(slot, row.params, row.seed, row.prompt_length)
    slots = torch.arange(len(rows), dtype=torch.int32, device=device)
    return slots, torch.tensor(positions, dtype=torch.int32, device=device), table, mode


def draw(
    logits: Tensor, slots: Tensor, positions: Tensor, table: SamplingTable, mode: Mode, token_ids: Tensor | None = None
) -> Tensor:
    """sampler.py's sample(), with draft()'s `token_ids`, on any device; it may wait for the device."""
    columns = _drawn(logits, slots, positions, table, mode, token_ids)
    return (columns if token_ids is None else token_ids[columns]).to(torch.int32)


def _drawn(
    logits: Tensor, slots: Tensor, positions: Tensor, table: SamplingTable, mode: Mode, token_ids: Tensor | None
) -> Tensor:
    """Columns of the logits, [rows] int64."""
    if mode is Mode.GREEDY:
        return logits.argmax(-1)
    at_once = max(1, LOGITS_AT_ONCE // max(logits.shape[-1], table.tokens.shape[-1]))
    chunks = [slice(start, start + at_once) for start in range(0, len(logits), at_once)]
    rows = ((logits[chunk], slots[chunk], positions[chunk]) for chunk in chunks)
    return torch.cat([_scored(*chunk, table, mode, token_ids).argmax(-1) for chunk in rows])


def _scored(
    logits: Tensor, slots: Tensor, positions: Tensor, table: SamplingTable, mode: Mode, token_ids: Tensor | None = None
) -> Tensor:
    rows = table.rows[slots] if mode is Mode.FULL else table.rows[slots, :HEADER_WORDS]
    settings = Settings(rows)
    logits = logits.to(torch.float32)
    if mode is Mode.FULL:
        text = table.tokens[slots, : int(positions.max())].long()
        logits = _biased(logits, rows, table.layout)
        logits = _penalised(logits, settings, text, positions)
        logits = _without(logits, rows, table.layout, settings, text, positions)
    drawn = settings.temperature > 0
    logits = logits / torch.where(drawn, settings.temperature, 1).unsqueeze(1)
    if mode is Mode.FULL:
        logits = _truncated(logits, settings)
    if token_ids is None:
        noise = gumbel(settings.seeds, positions.long(), logits.shape[-1])
    else:
        noise = gumbel(settings.seeds, positions.long(), 1 + int(token_ids.max()))[:, token_ids]
    return logits + noise.mul_(drawn.unsqueeze(1))


def _biased(logits: Tensor, rows: Tensor, layout: Layout) -> Tensor:
    ids = rows[:, layout.bias_ids : layout.bias_values]
    if not bool((ids >= 0).any()):
        return logits
    values = rows[:, layout.bias_values : layout.end_ids].view(torch.float32)
    known = (ids >= 0) & (ids < logits.shape[-1])  # a draft may know fewer ids than its target
    return logits.scatter_add(1, torch.where(known, ids, 0).long(), torch.where(known, values, 0))


def _penalised(logits: Tensor, settings: Settings, text: Tensor, positions: Tensor) -> Tensor:
    """Repetition penalty over prompt and generated tokens, then frequency and presence over generated ones."""
    repetition, presence, frequency = (
        penalty.unsqueeze(1)
        for penalty in (settings.repetition_penalty, settings.presence_penalty, settings.frequency_penalty)
    )
    if not bool(((repetition != 1) | (presence != 0) | (frequency != 0)).any()):
        return logits
    index = torch.arange(text.shape[1], device=text.device)
    written = index < positions.unsqueeze(1)
    counts = _counts(text, written & (index >= settings.prompt_length.unsqueeze(1)), logits)
    seen = _counts(text, written, logits) > 0
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - frequency * counts
    return logits - presence * (counts > 0)


def _counts(text: Tensor, counted: Tensor, logits: Tensor) -> Tensor:
    """How often each token id occurs in each text where it is counted, [rows, vocab] float32."""
    known = counted & (text < logits.shape[-1])
    return torch.zeros_like(logits).scatter_add_(1, torch.where(known, text, 0), known.to(torch.float32))


def _without(
    logits: Tensor, rows: Tensor, layout: Layout, settings: Settings, text: Tensor, positions: Tensor
) -> Tensor:
    """What would end the request before min_tokens, or complete a bad word, gets -inf."""
    ends = rows[:, layout.end_ids : layout.bad_words]
    early = positions - settings.prompt_length < settings.min_tokens
    words = rows[:, layout.bad_words : layout.bad_words + layout.words * layout.word_length]
    words = words.reshape(len(rows), layout.words, layout.word_length)
    back = positions.unsqueeze(1) + torch.arange(1 - layout.word_length, 0, device=text.device)
    generated = back >= settings.prompt_length.unsqueeze(1)
    tail = torch.where(generated, text.gather(1, back.clamp(min=0)), -2)  # -2 is no token
    begun = words[..., :-1]
    completed = ((begun == tail.unsqueeze(1)) | (begun < 0)).all(-1)
    banned = torch.cat((torch.where(early.unsqueeze(1), ends, -1), torch.where(completed, words[..., -1], -1)), dim=1)
    row, column = ((banned >= 0) & (banned < logits.shape[-1])).nonzero().unbind(1)
    return logits.index_put((row, banned[row, column].long()), logits.new_tensor(-torch.inf))


def _truncated(logits: Tensor, settings: Settings) -> Tensor:
    """Tokens outside top-k, outside top-p of what that left, or below min_p of the likeliest's probability get -inf.

    Equal logits stay or go together: a token stays if fewer than k, and less than p, are likelier than it. So the
    outcome depends on no order, and the likeliest always stays.
    """
    vocab_size = logits.shape[-1]
    needed = (settings.top_k > 0) | (settings.top_p < 1) | (settings.log_min_p > -torch.inf)
    members = (needed & (settings.temperature > 0)).nonzero().squeeze(1)
    if not len(members):
        return logits
    part, top_k, top_p = logits[members], settings.top_k[members], settings.top_p[members].unsqueeze(1)
    top_k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).long().unsqueeze(1)
    ordered = part.topk(int(top_k.max())).values
    largest = ordered[:, :1]
    floor = ordered.gather(1, top_k - 1)
    mass = (ordered - largest).exp().double()
    before = mass.cumsum(1) - mass
    total = torch.where(part >= floor, (part - largest).exp(), 0).double().sum(1, keepdim=True)
    first = torch.ones_like(ordered, dtype=torch.bool)  # of its equals
    first[:, 1:] = ordered[:, 1:] < ordered[:, :-1]
    inside = first & ((before < top_p.double() * total) | (top_p >= 1))
    inside[:, 0] = True
    floor = torch.maximum(floor, torch.where(inside, ordered, torch.inf).amin(1, keepdim=True))
    floor = torch.maximum(floor, largest + settings.log_min_p[members].unsqueeze(1))
    return logits.index_copy(0, members, part.masked_fill(part < floor, -torch.inf))
