"""What a step will take: a roofline fitted to a few measured steps, corrected by every step since.

The corrections are one Gaussian belief over all graphs (token buckets, draft loops) and attention: a step that ran
corrects its own graphs most and their neighbours a little, and its total is split by what was least certain. So a
draft length that has not run yet is priced from those that have.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from outrider_runtime.models.causal import CausalLM

Floats = NDArray[np.float64]

MAX_POINTS = 8
FORGETTING_SECONDS = 60.0  # live corrections fade back to the measured points in this time
COMMON_DEVIATION = 0.1  # of a whole kind of graph from the roofline, relative
LOCAL_DEVIATION = 0.12  # of one graph from its kind
ATTENTION_DEVIATION = 0.5  # how well it uses the bandwidth varies more
OCTAVES = 2.0  # over which neighbouring graphs deviate alike
POINT_NOISE = 0.01  # of a measured point, relative
DRIFT = 0.03  # of a machine's clock: no measured point stays more certain
OUTLIER = 4.0  # standard deviations
LEAST = 0.1  # of what is expected, whatever was learned of noise: no step takes no time
CONFIRMED = 3  # outliers of a graph in a row, in one direction, are no stall of a single step
SUDDEN = 0.1  # a change that may be none: what is smaller is learned, at no great loss if it passes
ALIKE = 0.25  # of a change: how much less or more another graph may have changed for both to be one
DOUBTED_SECONDS = 0.25  # after which a sudden change is examined; each time that it is still there, twice as long


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a forward moves and computes. `head_parameters` are the output layer's, used by the rows sampled only."""

    body_parameters: float
    head_parameters: float
    kv_bytes_per_token: float
    bytes_per_parameter: float = 2.0

    @classmethod
    def of(cls, model: CausalLM) -> Self:
        config, itemsize = model.config, model.dtype.itemsize
        head = config.vocab_size * config.hidden_size  # as large as the embedding, of which a step reads a few rows
        body = sum(parameter.numel() for parameter in model.parameters()) - head * (2 - config.tie_word_embeddings)
        kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
        return cls(body, head, kv, itemsize)


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step, before padding. Everything is a count."""

    tokens: int  # the target's: one and its drafts for each decoding request, and prompt tokens
    rows: int  # sampled by the target
    kv_tokens: int = 0  # context that the target's attention reads
    draft_requests: int = 0
    draft_length: int = 0  # turns of the draft loop
    draft_kv_tokens: int = 0  # context that each turn reads
    draft_reads: int = 0  # tokens a draft model reads outside its loop: prompts and what it missed
    prompt_tokens: int = 0
    requests: int = 0  # that decode


@dataclass(frozen=True, slots=True)
class Grid:
    """Seconds by graph, to weigh many steps at once: a step takes the sum of its parts."""

    target: Floats  # [token buckets]
    draft: Floats  # [draft lengths, request buckets], attention included
    attention: float  # the target's
    target_deviation: Floats  # [token buckets], standard
    deviation: Floats  # [token buckets, draft lengths, request buckets], of both together


@dataclass(frozen=True, slots=True)
class _Roofline:
    per_byte: float  # seconds
    flops_per_byte: float  # above it a product is bound by arithmetic
    sharpness: float  # of the bend there: a machine does not do both at full speed
    per_step: float = 0.0
    per_turn: float = 0.0  # of the draft loop

    def slower(self, factor: float) -> _Roofline:
        return replace(
            self, per_byte=factor * self.per_byte, per_step=factor * self.per_step, per_turn=factor * self.per_turn
        )

    def products(self, parameters: float, tokens: Floats | float, model: ModelShape) -> Floats:
        """Seconds to multiply so many tokens by all of these weights."""
        relative = 2.0 * np.asarray(tokens) / (self.flops_per_byte * model.bytes_per_parameter)
        bent = (1.0 + relative**self.sharpness) ** (1.0 / self.sharpness)
        return np.asarray(self.per_byte * parameters * model.bytes_per_parameter * bent)


_Parts = tuple[float, list[tuple[int, float]]]  # seconds that nothing corrects; index of a correction, seconds
_Key = tuple[int, int, bool]  # steps that are alike: bucket of tokens, draft length, whether prompts are read
_Belief = tuple[Floats, Floats]  # mean and covariance of the relative corrections


@dataclass(slots=True)
class _Sudden:
    """A change that has not lasted yet. Changes are logarithms of how many times longer steps take."""

    until: float
    before: _Belief
    bucket: int  # of tokens, where it was seen
    change: float
    others: dict[int, list[float]] = field(default_factory=dict)  # of steps since, by bucket


class CostTable:
    """Seconds of a step. Without a draft model (n-gram) a draft loop costs no more than its launch."""

    def __init__(
        self,
        target: ModelShape,
        draft: ModelShape | None,
        *,
        token_buckets: Sequence[int],
        request_buckets: Sequence[int],
        draft_lengths: Sequence[int],
    ) -> None:
        """Buckets are the padded sizes of the graphs, ascending; a larger step counts as the largest."""
        self.token_buckets, self.request_buckets = np.array(token_buckets), np.array(request_buckets)
        self.draft_lengths = np.array(draft_lengths)
        self._tokens, self._requests, self._lengths = list(token_buckets), list(request_buckets), list(draft_lengths)
        self._target, self._draft = target, draft
        self._roofline: _Roofline | None = None
        self._graphs = (np.zeros(0), np.zeros(0), np.zeros(0))
        self._prior = self._make_prior()
        self._reads, self._attention = len(self._prior) - 2, len(self._prior) - 1  # indices behind the graphs'
        self._anchor = self._belief = (np.zeros(len(self._prior)), self._prior)
        self._noise = DRIFT
        self._stretches: dict[_Key, float] = {}  # of a graph's last step: the logarithm of by how much it
        # took longer than by the roofline
        self._suspects: dict[_Key, int] = {}  # outliers in a row; below zero if faster
        self._doubted: set[_Key] = set()  # graphs that have changed suddenly
        self._doubt = DOUBTED_SECONDS
        self._sudden: _Sudden | None = None
        self._last = -math.inf

    @property
    def known(self) -> bool:
        """Whether it has been fitted."""
        return self._roofline is not None

    def calibration(self, max_concurrency: int, context: int) -> list[StepShape]:
        """At most eight steps worth measuring at start. Contexts are short, but for one step of `context` tokens
        each."""
        largest = self._tokens[-1]
        wanted = (1, max_concurrency // 8, max_concurrency // 2, max_concurrency, 2 * max_concurrency)
        sizes = list(dict.fromkeys(_bucket(self._tokens, min(size, largest))[1] for size in wanted))
        points = [StepShape(size, size, size) for size in sizes]
        many = _bucket(self._tokens, max_concurrency // 2)[1]
        points.append(StepShape(many, many, many * context))
        long = self._lengths[min(3, len(self._lengths) - 1)]
        for requests, length in ((1, long), (_bucket(self._requests, max_concurrency)[1], self._lengths[0])):
            tokens = min(requests * (1 + length), largest)
            points.append(StepShape(tokens, tokens, tokens, requests, length, requests))
        return points

    def fit(self, points: Sequence[tuple[StepShape, float]]) -> None:
        """Start from these measured seconds. Raises ValueError for none, more than eight, or one that is not
        positive."""
        if not 1 <= len(points) <= MAX_POINTS or not all(0.0 < seconds < math.inf for _, seconds in points):
            raise ValueError(f"a fit takes 1 to {MAX_POINTS} points of positive seconds; got {list(points)}")
        self._roofline = self._fitted(points)
        self._graphs = self._graph_seconds(self._roofline)
        belief = (np.zeros(len(self._prior)), self._prior)
        for shape, seconds in points:
            belief = _updated(belief, self._parts(shape), seconds, POINT_NOISE * seconds)
        self._anchor = self._belief = (belief[0], belief[1] + DRIFT**2 * np.eye(len(self._prior)))
        self._forget_changes()

    def seconds(self, shape: StepShape, hope: float = 0.0) -> float:
        """Expected, less `hope` standard deviations. Raises RuntimeError before `fit`."""
        parts = self._parts(shape)
        expected = self._expected(parts)
        return lowered(expected, hope * _deviation(self._belief, parts)) if hope else expected

    def observe(self, shape: StepShape, seconds: float, now: float) -> None:
        """Learn from a step that ran; `now` is monotonic. A stall is left out, unless it lasts for a few steps. Then it
        is believed for a moment only: nobody runs again what has become too dear, to see whether it still is. What
        another graph shares is the machine's, and believed of all."""
        if self._roofline is None or not 0.0 < seconds < math.inf:
            return
        self._forget(now)
        if self._sudden is not None and now >= self._sudden.until:
            self._belief, self._sudden = self._sudden.before, None
            self._suspects.clear()
        parts = self._parts(shape)
        if self._sudden is not None and self._all_changed(self._sudden, parts, seconds):
            return
        expected = self._expected(parts)
        # Prompts pay for attention among themselves, which the parts do not hold.
        noise = self._noise * expected * (1.0 + 4.0 * shape.prompt_tokens / max(1, shape.tokens))
        surprise = (seconds - expected) / math.hypot(noise, _deviation(self._belief, parts))
        key = (parts[1][0][0], shape.draft_length, shape.prompt_tokens > 0)
        stretch = math.log(seconds / (parts[0] + sum(part for _, part in parts[1])))
        if abs(surprise) > OUTLIER:
            before, one = self._suspects.get(key, 0), 1 if surprise > 0 else -1
            self._suspects[key] = one + (before if before * one > 0 else 0)
            if abs(self._suspects[key]) < CONFIRMED:
                return
            change = math.log(seconds / expected)
            if key in self._stretches and abs(change) >= SUDDEN:  # else it is news of what was only guessed
                self._put_aside(key, change, now)
            mean, covariance = self._belief  # it has changed: learn as if anew
            self._belief = (mean, 0.5 * (covariance + self._anchor[1]))
        else:
            self._suspects.pop(key, None)
            if self._sudden is None and key in self._doubted:
                self._doubted.clear()  # it is as it was
                self._doubt = DOUBTED_SECONDS
            # What differs from step to step: a miss that stays is no noise, but what there is to learn.
            jitter = stretch - self._stretches.get(key, stretch)
            self._noise = math.sqrt(max(0.01**2, 0.98 * self._noise**2 + 0.02 * jitter**2 / 2))
        self._stretches[key] = stretch
        self._belief = _updated(self._belief, parts, seconds, noise)

    def grid(self, prompt_tokens: int, kv_tokens: int, draft_context: float) -> Grid:
        """Of steps that read so many prompt tokens and so much context; `draft_context` is a drafting request's mean.

        Raises RuntimeError before `fit`."""
        roofline, target, (mean, covariance) = self._fit, self._target, self._belief
        products, turns, loops = self._graphs
        if prompt_tokens:
            rows = np.maximum(1, self.token_buckets - prompt_tokens)
            products = products + roofline.products(target.head_parameters, rows, target)
            products = products - roofline.products(target.head_parameters, self.token_buckets, target)
        graphs, attention = len(self._tokens), max(1.0 + mean[self._attention], LEAST)
        kv: Floats | float = 0.0
        if self._draft is not None:
            per_request = draft_context * self._draft.kv_bytes_per_token * roofline.per_byte * attention
            kv = turns * (self.request_buckets * per_request)
        ours, theirs = slice(0, graphs), slice(graphs, self._reads)
        variances = covariance.diagonal()
        own = products**2 * variances[ours]
        both = products[:, None] * loops.ravel() * covariance[ours, theirs]
        both = own[:, None] + 2.0 * both + loops.ravel() ** 2 * variances[theirs]
        return Grid(
            target=roofline.per_step + products * np.maximum(1.0 + mean[ours], LEAST),
            draft=loops * np.maximum(1.0 + mean[theirs].reshape(loops.shape), LEAST) + kv,
            attention=float(kv_tokens * target.kv_bytes_per_token * roofline.per_byte * attention),
            target_deviation=np.sqrt(own),
            deviation=np.sqrt(np.maximum(both, 0.0)).reshape(graphs, *loops.shape),
        )

    def read_seconds(self, tokens: Floats | float) -> Floats:
        """Of a draft model that reads so many tokens in one forward. Raises RuntimeError before `fit`."""
        return np.asarray(self._read_part(tokens) * max(1.0 + self._belief[0][self._reads], LEAST))

    @property
    def _fit(self) -> _Roofline:
        if self._roofline is None:
            raise RuntimeError("the cost table has not been fitted")
        return self._roofline

    def _expected(self, parts: _Parts, belief: _Belief | None = None) -> float:
        mean = (belief or self._belief)[0]
        return parts[0] + sum(seconds * max(1.0 + float(mean[index]), LEAST) for index, seconds in parts[1])

    def _parts(self, shape: StepShape) -> _Parts:
        roofline, target = self._fit, self._target
        bucket, tokens = _bucket(self._tokens, shape.tokens)
        products = roofline.products(target.body_parameters, tokens, target)
        rows = tokens if shape.rows == shape.tokens else shape.rows
        products = products + roofline.products(target.head_parameters, rows, target)
        moved = shape.kv_tokens * target.kv_bytes_per_token
        parts = [(bucket, float(products))]
        if shape.draft_length > 0:
            length, turns = _bucket(self._lengths, shape.draft_length)
            bucket, requests = _bucket(self._requests, shape.draft_requests)
            loop = roofline.per_turn
            if self._draft is not None:
                parameters = self._draft.body_parameters + self._draft.head_parameters
                loop = turns * (loop + float(roofline.products(parameters, requests, self._draft)))
                moved += turns * shape.draft_kv_tokens * self._draft.kv_bytes_per_token
            parts.append((len(self._tokens) + length * len(self._requests) + bucket, loop))
        if shape.draft_reads > 0 and self._draft is not None:
            parts.append((self._reads, float(self._read_part(shape.draft_reads))))
        parts.append((self._attention, moved * roofline.per_byte))
        return roofline.per_step, parts

    def _read_part(self, tokens: Floats | float) -> Floats:
        if self._draft is None:
            return np.zeros(np.shape(tokens))
        return self._fit.per_turn + self._fit.products(self._draft.body_parameters, tokens, self._draft)

    def _graph_seconds(self, roofline: _Roofline) -> tuple[Floats, Floats, Floats]:
        """By the roofline alone: of the target by tokens when all are sampled; turns of the loops; the loops."""
        products = roofline.products(self._target.body_parameters, self.token_buckets, self._target)
        products = products + roofline.products(self._target.head_parameters, self.token_buckets, self._target)
        turns, loop = np.ones((len(self._lengths), 1)), np.full((1, len(self._requests)), roofline.per_turn)
        if self._draft is not None:
            turns = self.draft_lengths[:, None].astype(np.float64)
            parameters = self._draft.body_parameters + self._draft.head_parameters
            loop = loop + roofline.products(parameters, self.request_buckets, self._draft)
        return products, turns, turns * loop

    def _fitted(self, points: Sequence[tuple[StepShape, float]]) -> _Roofline:
        """Least squares of the relative error, over bandwidth, overheads and the ridge; none of them negative."""
        seconds = np.array([seconds for _, seconds in points])
        best: tuple[float, _Roofline] | None = None
        per_turn = [self._turns(shape) for shape, _ in points]
        for ridge, sharpness in itertools.product(np.geomspace(4.0, 1024.0, 25).tolist(), (1.5, 2.0, 3.0, 8.0)):
            self._roofline = _Roofline(1.0, ridge, sharpness)  # so that the parts count bytes
            moved = [sum(part for _, part in self._parts(shape)[1]) for shape, _ in points]
            columns = np.array([moved, np.ones(len(points)), per_turn]).T / seconds[:, None]
            for used in itertools.chain.from_iterable(itertools.combinations((0, 1, 2), size) for size in (1, 2, 3)):
                if 0 not in used or len(used) > len(points):
                    continue
                solution = np.zeros(3)
                solution[list(used)] = np.linalg.lstsq(columns[:, used], np.ones(len(points)), rcond=None)[0]
                error = float(np.sum((columns @ solution - 1.0) ** 2))
                if solution.min() >= 0.0 and solution[0] > 0.0 and (best is None or error < best[0] - 1e-12):
                    per_byte, per_step, turn = solution.tolist()
                    best = (error, _Roofline(per_byte, ridge, sharpness, per_step, turn))
        assert best is not None  # bandwidth alone always fits, badly perhaps
        return best[1]

    def _turns(self, shape: StepShape) -> int:
        if self._draft is None:
            return int(shape.draft_length > 0)
        return shape.draft_length + int(shape.draft_reads > 0)

    def _make_prior(self) -> Floats:
        """Covariance of the relative deviations from the roofline: [graphs + 2, graphs + 2]."""
        tokens = np.log2(self.token_buckets)[:, None]
        requests = np.log2(self.request_buckets)[None, :] + np.zeros((len(self._lengths), 1))
        lengths = 0.1 * np.log2(self.draft_lengths)[:, None] + np.zeros((1, len(self._requests)))
        # Loops of one bucket repeat the same graph.
        loops = np.stack([requests.ravel(), lengths.ravel()], axis=1)
        graphs, size = len(tokens), len(tokens) + len(loops) + 2
        prior = np.zeros((size, size))
        for block, places in ((slice(0, graphs), tokens), (slice(graphs, size - 2), loops)):
            distance = np.abs(places[:, None, :] - places[None, :, :]).sum(axis=2)
            prior[block, block] = COMMON_DEVIATION**2 + LOCAL_DEVIATION**2 * np.exp(-distance / OCTAVES)
        prior[size - 2, size - 2] = COMMON_DEVIATION**2 + LOCAL_DEVIATION**2
        prior[size - 1, size - 1] = ATTENTION_DEVIATION**2
        return prior

    def _put_aside(self, key: _Key, change: float, now: float) -> None:
        """What is known, until the change has lasted."""
        if self._sudden is None:  # else it is the guess of the change that was wrong, of a graph that has not changed
            self._doubted.add(key)
            self._sudden = _Sudden(now + self._doubt, self._belief, key[0], change)
            self._doubt = min(2.0 * self._doubt, FORGETTING_SECONDS)

    def _all_changed(self, sudden: _Sudden, parts: _Parts, seconds: float) -> bool:
        """Whether by this step another graph has changed like the first one. Then the machine is taken to have (its
        clock, or what else it runs), and so all graphs, by as much; those that are not known to and might be cheap
        will be tried once."""
        bucket = parts[1][0][0]
        if bucket == sudden.bucket:
            return False
        known = sudden.others.setdefault(bucket, [])
        known.append(math.log(seconds / self._expected(parts, sudden.before)))
        change = float(np.median(known))
        if len(known) == 1 or abs(change - sudden.change) > ALIKE * abs(sudden.change):
            return False
        factor = math.exp((change + sudden.change) / 2.0)
        self._roofline = self._fit.slower(factor)
        self._graphs = self._graph_seconds(self._roofline)
        mean, covariance = sudden.before
        unseen = np.zeros(len(mean))
        unseen[: len(self._tokens)] = max(0.0, 1.0 - 1.0 / factor)
        unseen[[bucket, sudden.bucket]] = 0.0
        self._belief = (mean, covariance + np.diag(unseen**2))
        self._forget_changes()
        return True

    def _forget_changes(self) -> None:
        """What was seen and put aside is of another roofline than there is now."""
        self._suspects.clear()
        self._doubted.clear()
        self._stretches.clear()
        self._doubt, self._sudden = DOUBTED_SECONDS, None

    def _forget(self, now: float) -> None:
        if now - self._last < 0.05:
            return  # seldom enough to cost nothing
        kept = math.exp(-(now - self._last) / FORGETTING_SECONDS)
        (mean, covariance), (anchor, widest) = self._belief, self._anchor
        self._belief = (anchor + kept * (mean - anchor), widest + kept**2 * (covariance - widest))
        self._last = now


def lowered(seconds: float, by: float) -> float:
    return max(seconds - by, LEAST * seconds)


def _bucket(buckets: Sequence[int], size: int) -> tuple[int, int]:
    index = min(bisect_left(buckets, size), len(buckets) - 1)
    return index, buckets[index]


def _updated(belief: _Belief, parts: _Parts, seconds: float, noise: float) -> _Belief:
    """Kalman's update by one total."""
    mean, covariance = belief
    together = sum((part * covariance[index] for index, part in parts[1]), np.zeros(len(mean)))
    variance = sum(part * float(together[index]) for index, part in parts[1]) + noise**2
    missed = seconds - parts[0] - sum(part * (1.0 + float(mean[index])) for index, part in parts[1])
    return mean + together * (missed / variance), covariance - np.outer(together, together / variance)


def _deviation(belief: _Belief, parts: _Parts) -> float:
    covariance = belief[1]
    return math.sqrt(sum(a * b * float(covariance[i, j]) for i, a in parts[1] for j, b in parts[1]))
