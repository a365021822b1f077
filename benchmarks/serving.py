"""Latency and throughput through the HTTP server, under a closed-loop or an open-loop load; prints JSON.

    python benchmarks/serving.py --url http://127.0.0.1:8000 --concurrency 64 --requests 256 --input 128 --output 256
    python benchmarks/serving.py --serve FOLDER --rate 4 --requests 200 --prompts prompts.jsonl -- --device cuda

Closed loop: --concurrency requests run at any time. Open loop: requests arrive at --rate a second with Poisson gaps,
however many still run. Prompts are random token ids of --input tokens, no two alike, or the lines of a file: text, or
JSON with `prompt` or `messages`. --serve starts the runtime on a model folder, with the flags behind `--`. --offline
then runs the same prompts, as many at once, in the engine without a server: what HTTP costs is the difference.

Works with any server of OpenAI's streaming API. Tokens are counted from its usage, since several may share a chunk;
the client does no more per chunk than note the time, and its own share of a core is told.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
READY_SECONDS = 600.0
_TEXT = re.compile(rb'"(?:text|content)":"[^"]')  # of an event that has some
_TAIL_BYTES = 8192  # holds the last events: usage and the end


@dataclass
class Answer:
    """Times in seconds of the process's clock."""

    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of each read with text in it
    ended: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def tokens(self) -> int:
        return int(self.usage.get("completion_tokens", 0))


class Exchange(asyncio.Protocol):
    """One request on a connection of its own, which the server closes behind the answer."""

    def __init__(self, request: bytes) -> None:
        self.answer = Answer()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._tail = b""
        self._status = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._status:
            self._status = data[9:12]  # HTTP/1.1 200
        if self.answer.arrivals or _TEXT.search(data):
            self.answer.arrivals.append(time.perf_counter())
        self._tail = (self._tail + data)[-_TAIL_BYTES:]

    def connection_lost(self, error: Exception | None) -> None:
        answer = self.answer
        answer.ended = time.perf_counter()
        usage = self._tail.rfind(b'"usage":{')
        if self._status != b"200":
            answer.error = f"status {self._status.decode(errors='replace') or 'none'}"
        elif b"data: [DONE]" not in self._tail:
            answer.error = "error event" if b'"error"' in self._tail else "cut off"
        elif usage < 0:
            answer.error = "no usage"
        else:
            answer.usage, _ = json.JSONDecoder().raw_decode(self._tail[usage + 8 :].decode(errors="replace"))
        self.done.set_result(None)


class Client:
    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._key = api_key

    def model(self) -> str:
        """The first one served."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=30)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        connection.request("GET", "/v1/models", headers=headers)
        body = json.loads(connection.getresponse().read())
        connection.close()
        return str(body["data"][0]["id"])

    async def ask(self, body: dict[str, Any]) -> Answer:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\nConnection: close\r\n"
        head += f"Authorization: Bearer {self._key}\r\n\r\n" if self._key else "\r\n"
        sent = time.perf_counter()
        try:
            _, exchange = await asyncio.get_running_loop().create_connection(
                lambda: Exchange(head.encode() + data), self._host, self._port
            )
        except OSError as error:
            return Answer(sent=sent, ended=time.perf_counter(), error=f"connection: {type(error).__name__}")
        exchange.answer.sent = sent
        await exchange.done
        return exchange.answer


async def closed_loop(client: Client, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Answer]:
    waiting = iter(bodies)
    answers: list[Answer] = []

    async def worker() -> None:
        for body in waiting:
            answers.append(await client.ask(body))

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return answers


async def open_loop(client: Client, bodies: Sequence[dict[str, Any]], rate: float, seed: int) -> list[Answer]:
    gaps = random.Random(seed)
    tasks = []
    due = time.perf_counter()
    for body in bodies:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(client.ask(body)))
        due += gaps.expovariate(rate)
    return list(await asyncio.gather(*tasks))


def synthetic(count: int, tokens: int, vocabulary: int, seed: int) -> Iterator[dict[str, Any]]:
    """Random ids from the part of a vocabulary that holds no control tokens in the models we know."""
    ids = random.Random(seed)
    low, high = min(100, vocabulary // 4), vocabulary * 3 // 4
    for _ in range(count):
        yield {"prompt": [ids.randrange(low, high) for _ in range(tokens)]}


def from_file(path: Path, count: int) -> Iterator[dict[str, Any]]:
    """The file's prompts in order, again from the start when there are too few."""
    prompts: list[dict[str, Any]] = []
    for line in filter(str.strip, path.read_text().splitlines()):
        given = json.loads(line) if line.startswith("{") else {"prompt": line}
        prompts.append({name: given[name] for name in ("prompt", "messages") if name in given})
    if not all(prompts) or not prompts:
        raise SystemExit(f"{path}: each line must be text, or JSON with `prompt` or `messages`")
    return itertools.islice(itertools.cycle(prompts), count)


def summary(answers: Sequence[Answer], core_seconds: float) -> dict[str, Any]:
    """Latencies in milliseconds. `inter_token_ms` is each request's mean, `gap_ms` what lies between two arrivals."""
    good = [answer for answer in answers if not answer.error and answer.arrivals]
    errors = Counter(answer.error or "no text" for answer in answers if answer.error or not answer.arrivals)
    seconds = max(answer.ended for answer in answers) - min(answer.sent for answer in answers)
    tokens = sum(answer.tokens for answer in good)
    details = [answer.usage.get("completion_tokens_details") or {} for answer in good]
    accepted, rejected = (
        sum(detail.get(f"{name}_prediction_tokens") or 0 for detail in details) for name in ("accepted", "rejected")
    )
    between = [(a.arrivals[-1] - a.arrivals[0]) / (a.tokens - 1) for a in good if a.tokens > 1]
    return {
        "completed": len(good),
        "errors": dict(errors),
        "seconds": round(seconds, 3),
        "requests_per_second": round(len(good) / seconds, 3),
        "prompt_tokens": sum(int(answer.usage.get("prompt_tokens", 0)) for answer in good),
        "output_tokens": tokens,
        "output_tokens_per_second": round(tokens / seconds, 1),
        "tokens_per_read": round(tokens / max(1, sum(len(answer.arrivals) for answer in good)), 2),
        "acceptance": round(accepted / (accepted + rejected), 3) if accepted + rejected else None,
        "ttft_ms": _spread([answer.arrivals[0] - answer.sent for answer in good]),
        "inter_token_ms": _spread(between),
        "gap_ms": _spread([b - a for answer in good for a, b in itertools.pairwise(answer.arrivals)]),
        "e2e_ms": _spread([answer.ended - answer.sent for answer in good]),
        "client_core_share": round(core_seconds / seconds, 3),
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {name: round(value * 1e3, 3) for value in seconds for name in ("mean", "p50", "p90", "p99")}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    shown = {"mean": statistics.fmean(seconds), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}
    return {name: round(value * 1e3, 3) for name, value in shown.items()}


@contextmanager
def serving(folder: Path, flags: Sequence[str]) -> Iterator[tuple[str, float]]:
    """The runtime on a model folder: its URL, and the seconds until it was ready."""
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(str(free.getsockname()[1]))
    command = [sys.executable, "-m", "outrider_runtime", "serve", "--model", str(folder), "--host", "127.0.0.1"]
    command += ["--port", ports[0], "--admin-port", ports[1], *flags]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'runtime'}:{os.environ.get('PYTHONPATH', '')}"}
    started = time.perf_counter()
    with subprocess.Popen(command, env=environment) as server:
        try:
            while not _is_ready(int(ports[1])):
                if server.poll() is not None or time.perf_counter() - started > READY_SECONDS:
                    raise SystemExit(f"the server is not ready (exit code {server.poll()})")
                time.sleep(0.05)
            yield f"http://127.0.0.1:{ports[0]}", time.perf_counter() - started
        finally:
            server.send_signal(signal.SIGTERM)


def _is_ready(admin_port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", admin_port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def vocabulary_of(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    return int(config.get("vocab_size") or config["text_config"]["vocab_size"])


def bodies_of(flags: argparse.Namespace, model: str, vocabulary: int) -> list[dict[str, Any]]:
    """Of the warm-up's requests, then of the measured ones."""
    asked = {
        "model": model,
        "max_tokens": flags.output,
        "temperature": flags.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if not flags.prompts or flags.ignore_eos else {}),
    }
    count = flags.warmup + flags.requests
    prompts = (
        from_file(flags.prompts, count) if flags.prompts else synthetic(count, flags.input, vocabulary, flags.seed)
    )
    return [{**asked, **prompt} for prompt in prompts]


def run(flags: argparse.Namespace, url: str, vocabulary: int) -> dict[str, Any]:
    client = Client(url, flags.api_key)
    bodies = bodies_of(flags, flags.model or client.model(), vocabulary)

    async def load() -> tuple[list[Answer], float]:
        await closed_loop(client, bodies[: flags.warmup], max(1, flags.warmup))
        measured = bodies[flags.warmup :]
        before = time.process_time()
        if flags.rate:
            answers = await open_loop(client, measured, flags.rate, flags.seed)
        else:
            answers = await closed_loop(client, measured, flags.concurrency)
        return answers, time.process_time() - before

    return summary(*asyncio.run(load()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="of a running server")
    where.add_argument("--serve", type=Path, metavar="FOLDER", help="start the runtime on this model")
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument("--concurrency", type=int, help="closed loop: requests at any time")
    load.add_argument("--rate", type=float, help="open loop: requests a second")
    add("--requests", type=int, default=100)
    add("--warmup", type=int, default=2, help="requests before, all at once, not counted (2)")
    add("--input", type=int, default=128, help="tokens of a random prompt (128)")
    add("--output", type=int, default=256, help="tokens of an answer, EOS or not; with --prompts at most (256)")
    add("--prompts", type=Path, metavar="FILE", help="instead of random ones")
    add("--ignore-eos", action="store_true", help="with --prompts too")
    add("--temperature", type=float, default=0.0)
    add("--vocabulary", type=int, default=32_000, help="random ids are below it (32000, with --serve the model's)")
    add("--model", help="the name to ask for (the first that is served)")
    add("--api-key")
    add("--offline", action="store_true", help="with --serve, --concurrency and random prompts: compare with no server")
    add("--seed", type=int, default=0)
    own, server_flags = _split(sys.argv[1:])
    flags = parser.parse_args(own)
    if flags.offline and not (flags.serve and flags.concurrency and not flags.prompts):
        parser.error("--offline goes with --serve, --concurrency and random prompts")
    settings = {
        name: getattr(flags, name)
        for name in ("concurrency", "rate", "requests", "input", "output", "temperature", "seed")
    }
    if flags.serve:
        vocabulary = vocabulary_of(flags.serve)
        with serving(flags.serve, server_flags) as (url, ready_seconds):
            result = {"ready_seconds": round(ready_seconds, 2), **run(flags, url, vocabulary)}
        if flags.offline:
            measured = bodies_of(flags, "", vocabulary)[flags.warmup :]
            alone = offline(flags.serve, server_flags, measured, flags.concurrency)
            result |= {
                "offline_output_tokens_per_second": round(alone, 1),
                "http_share": round(1.0 - result["output_tokens_per_second"] / alone, 4),
            }
    else:
        result = run(flags, flags.url, flags.vocabulary)
    print(json.dumps({**settings, "flags": server_flags, **result}, indent=2))


def offline(folder: Path, server_flags: Sequence[str], bodies: Sequence[dict[str, Any]], concurrency: int) -> float:
    """Tokens a second of a closed loop in this process."""
    sys.path.insert(0, str(ROOT / "runtime"))
    from outrider_runtime import Engine, SamplingParams
    from outrider_runtime.engine.messages import AddRequest

    named = iter(server_flags)
    engine = Engine.load(str(folder), **{flag.removeprefix("--").replace("-", "_"): next(named) for flag in named})
    engine.capture(lambda line: print(line, file=sys.stderr))
    while engine.idle():
        pass
    waiting = [
        AddRequest(
            str(index),
            tuple(body["prompt"]),
            SamplingParams(max_tokens=body["max_tokens"], temperature=body["temperature"], ignore_eos=True),
        )
        for index, body in enumerate(bodies)
    ][::-1]
    running = tokens = 0
    begin = time.perf_counter()
    while waiting or engine.has_work:
        while waiting and running < concurrency:
            engine.add(waiting.pop())
            running += 1
        for delta in engine.step().deltas:
            tokens += len(delta.token_ids)
            running -= delta.finish_reason is not None
    return tokens / (time.perf_counter() - begin)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    main()
