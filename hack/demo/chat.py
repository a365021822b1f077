"""Asks the served model through its Service, with the client that everybody uses."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import openai

QUESTION = "Why is the sky blue?"
# Its answer repeats its prompt nearly word for word: what n-gram speculation is for.
COPYING = """Rename the variable `total` to `result` in this Python function and show the whole function:

```python
def mean_of_positive_numbers(numbers):
    total = 0
    count = 0
    for number in numbers:
        if number > 0:
            total = total + number
            count = count + 1
    if count == 0:
        return 0
    return total / count
```"""


@dataclass(frozen=True)
class Answer:
    """One completion. `seconds` from the first token to the last; `accepted` drafted tokens that were kept."""

    text: str
    tokens: int
    accepted: int
    drafted: int
    seconds: float

    @property
    def forwards(self) -> int:
        """Passes through the target: each gives one token of its own on top of the drafted ones it accepts."""
        return self.tokens - self.accepted

    @property
    def tokens_per_second(self) -> float:
        return (self.tokens - 1) / self.seconds if self.seconds else 0.0


def client(url: str) -> openai.OpenAI:
    """For a service at `url`; proxies of the environment are not for cluster addresses."""
    transport = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=transport, max_retries=0, timeout=120)


def ask(
    service: openai.OpenAI,
    model: str,
    question: str,
    *,
    max_tokens: int,
    speculative: bool = True,
    show: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Stream a greedy answer; `show` is called with each piece as it arrives."""
    stream = service.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={} if speculative else {"speculative": False},
    )
    pieces, usage, first = [], None, None
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.monotonic()
            pieces.append(chunk.choices[0].delta.content)
            show(pieces[-1])
        usage = chunk.usage or usage
    ended = time.monotonic()
    if usage is None:
        raise openai.APIError("the stream ended without usage", request=stream.response.request, body=None)
    details = usage.completion_tokens_details
    accepted = (details and details.accepted_prediction_tokens) or 0
    rejected = (details and details.rejected_prediction_tokens) or 0
    seconds = ended - first if first else 0.0
    return Answer("".join(pieces), usage.completion_tokens, accepted, accepted + rejected, seconds)


def await_endpoints(service: openai.OpenAI, deadline: float = 60) -> None:
    """Ready is the operator's word; the node's proxy hears of new endpoints a moment later."""
    end = time.monotonic() + deadline
    while True:
        try:
            service.models.list()
        except openai.APIConnectionError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
        else:
            return
