"""Keeps a number of requests in flight, for as long as a `with` block lasts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from types import TracebackType

import openai

from . import chat

QUESTIONS = ("Tell me a long story about a lighthouse.", "Explain how bread is made, step by step.",
             "Describe a walk through a forest.", "Write a letter to a friend about the sea.")  # fmt: skip
COPYING = tuple(chat.COPYING.replace("numbers", name) for name in ("prices", "lengths", "scores", "weights"))


class Load:
    """`concurrency` threads that each ask one question after another until the block ends."""

    def __init__(
        self,
        service: openai.OpenAI,
        model: str,
        concurrency: int,
        max_tokens: int = 200,
        questions: Sequence[str] = QUESTIONS,
    ) -> None:
        self._service, self._model, self._max_tokens = service, model, max_tokens
        self._questions = questions
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(n,), daemon=True) for n in range(concurrency)]
        self.outcomes: Counter[str] = Counter()  # "answered", or the name of what went wrong

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        while not self._stop.is_set():
            try:
                stream = self._service.chat.completions.create(
                    model=self._model,
                    messages=[{"role": "user", "content": self._questions[number % len(self._questions)]}],
                    max_tokens=self._max_tokens,
                    temperature=0,  # as the demo's own questions: a sampled answer strays from what it should copy
                    stream=True,
                )
                with stream:
                    for _ in stream:
                        if self._stop.is_set():
                            return  # closing the stream cancels the request
                self.outcomes["answered"] += 1
            except openai.APIError as error:
                self.outcomes[type(error).__name__] += 1
                self._stop.wait(0.5)
