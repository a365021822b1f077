"""How long steps take on this machine, before any request tells: what the cost table starts from."""

from __future__ import annotations

import time

from outrider_runtime.engine.runner import Runner
from outrider_runtime.speculation.cost import CostTable, StepShape

FEW_REQUESTS = 16  # as many as a server has captured graphs for when it is ready
CONTEXT = 2048  # tokens of each request, in the step that reads long ones
HOST_SECONDS = 0.15  # to spend where the host does a step's work


class Calibration:
    """Of a table, by a runner, while no request runs."""

    def __init__(self, table: CostTable, runner: Runner, cached_tokens: int, max_model_len: int) -> None:
        """`cached_tokens`: how many the KV cache holds."""
        self._table, self._runner = table, runner
        self._cached_tokens, self._longest = cached_tokens, min(CONTEXT, max_model_len // 2)
        self._left: list[StepShape] = []  # the next one last
        self._measured: list[tuple[StepShape, float]] = []

    def begin(self) -> None:
        """Fit the table to steps of a few requests: in a second, or on a host to as many as there is time for."""
        points = self._points(FEW_REQUESTS)
        if self._runner.on_host:
            points = sorted((shape for shape in points if not _is_long(shape)), key=lambda shape: shape.tokens)
        else:
            self._left = self._points(self._runner.sizes.requests[-1])[::-1]
        measured, spent, last = list[tuple[StepShape, float]](), 0.0, 0.0
        for shape in points:
            if self._runner.on_host and spent + 2.0 * last > HOST_SECONDS:
                break
            last = self._measure(measured, shape)
            spent += last
        self._table.fit(measured)

    def advance(self) -> bool:
        """One more of the steps whose graphs come later, once those are there; after the last, the table is fitted to
        them. Whether there are more."""
        if self._left:
            self._measure(self._measured, self._left.pop())
            if not self._left:
                self._table.fit(self._measured)
        return bool(self._left)

    def _points(self, requests: int) -> list[StepShape]:
        """For at most so many requests."""
        requests = min(requests, self._runner.sizes.requests[-1])
        context = max(1, min(self._longest, self._cached_tokens // requests))
        return self._table.calibration(requests, context)

    def _measure(self, measured: list[tuple[StepShape, float]], shape: StepShape) -> float:
        """Returns how long that took."""
        begin = time.perf_counter()
        measured.append((shape, self._runner.measure(shape)))
        return time.perf_counter() - begin


def _is_long(shape: StepShape) -> bool:
    return shape.kv_tokens > shape.tokens
