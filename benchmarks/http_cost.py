"""What HTTP costs: processor time per token of the HTTP process, in front of an engine that only makes up tokens.

    python benchmarks/http_cost.py [--streams 1,64,256] [--rate 24000] [--tokens 1] [--seconds 5] [--profile]

At `--rate` tokens a second each step gives every stream one token, as plain decoding does; rate 0 is as fast as the
HTTP process takes them. Prints a JSON line for each number of streams.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import http.client
import json
import os
import pstats
import queue
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from itertools import cycle
from pathlib import Path
from typing import cast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "runtime"))

from outrider_runtime.config import EngineConfig, SchedulerConfig, ServerConfig, SourceConfig  # noqa: E402
from outrider_runtime.engine import process  # noqa: E402
from outrider_runtime.engine.channel import Channel  # noqa: E402
from outrider_runtime.engine.client import EngineProcess  # noqa: E402
from outrider_runtime.engine.messages import (  # noqa: E402
    AddRequest,
    DraftState,
    EngineStats,
    LoadedModel,
    Ready,
    StepOutput,
    ToEngine,
    TokenDelta,
)
from outrider_runtime.speculation.policy import Policy  # noqa: E402

VOCABULARY = 32_000
CONTEXT = 1 << 24


class Echo:
    """An engine whose every step gives every request the next `tokens` ids, at most `rate` tokens a second."""

    def __init__(self, rate: float, tokens: int) -> None:
        self._rate = rate
        self._tokens = tokens
        self._left: dict[str, int] = {}
        self._due = time.monotonic()
        self._ids = cycle([tuple(range(i, i + tokens)) for i in range(300, VOCABULARY - tokens, 7)])
        self._made = 0

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add(self, message: AddRequest) -> None:
        self._left[message.request_id] = message.params.max_tokens

    def abort(self, request_id: str) -> None:
        self._left.pop(request_id, None)

    def set_policy(self, policy: Policy) -> None:
        pass

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._left), generated_tokens=self._made, accepted_per_position=(3, 2, 1, 0))

    def step(self) -> StepOutput:
        if self._rate:
            self._due = max(self._due + len(self._left) * self._tokens / self._rate, time.monotonic() - 0.05)
            time.sleep(max(0.0, self._due - time.monotonic()))
        deltas = []
        for request_id, left in list(self._left.items()):
            tokens = next(self._ids)[:left]
            self._left[request_id] = left = left - len(tokens)
            self._made += len(tokens)
            if not left:
                del self._left[request_id]
            deltas.append(TokenDelta(request_id, tokens, None if left else "length"))
        return StepOutput(tuple(deltas), self.stats())


def run_engine(fd: int, rate: float, tokens: int, folder: str) -> None:
    channel = Channel(socket.socket(fileno=fd))
    model = LoadedModel("", 0, "BFloat16")
    channel.send(Ready(folder, CONTEXT, VOCABULARY, (), 4, model, DraftState(ok=True, reason="NotRequired")))
    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
    threading.Thread(target=process.receive, args=(channel, inbox), daemon=True).start()
    with contextlib.suppress(ConnectionError):  # the server has gone
        process.run(Echo(rate, tokens), inbox, channel.send)


class _Engine:
    """Stands for client.EngineProcess."""

    def __init__(self, rate: str, tokens: str, folder: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, "engine", str(theirs.fileno()), rate, tokens, folder]
            self._child = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self.channel = Channel(ours)

    def ending(self) -> str:
        return f"exited with code {self._child.wait()}"

    def stop(self) -> None:
        self._child.wait(5)


def run_server(fds: tuple[int, int], rate: str, tokens: str, folder: str) -> None:
    from outrider_runtime.server.lifecycle import serve

    engine = EngineConfig(SourceConfig("made-up"), scheduler=SchedulerConfig(max_concurrency=1024))
    sockets = [socket.socket(fileno=fd) for fd in fds]

    stand_in = cast(EngineProcess, _Engine(rate, tokens, folder))

    async def main() -> None:
        await serve(engine, ServerConfig("made-up"), stand_in, sockets)

    if "OUTRIDER_PROFILE" not in os.environ:
        asyncio.run(main())
        return
    profile = cProfile.Profile()
    profile.runcall(asyncio.run, main())
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(30)


def make_tokenizer(folder: Path) -> None:
    """A byte-level vocabulary of a space and four letters, about what a token of English is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    for i in range(len(letters), VOCABULARY):
        vocabulary["Ġ" + "".join(chr(97 + i // 26**place % 26) for place in range(4))] = i
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def cpu_seconds(pid: int) -> float:
    """Of all its threads, to the nanosecond."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def tokens_made(admin: int) -> int:
    return int(json.loads(get(admin, "/v1/speculation")[1])["counters"]["generated_tokens"])


class Streams:
    """Many of them in one thread, which does nothing but count events and bytes."""

    def __init__(self, port: int, count: int) -> None:
        ask = {"model": "made-up", "prompt": [300, 301], "max_tokens": CONTEXT // 2, "stream": True}
        body = json.dumps(ask).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        self._selector = selectors.DefaultSelector()
        self._buffer = bytearray(1 << 18)
        self._connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
        self.events = self.bytes = 0
        self.begun: set[int] = set()
        for connection in self._connections:
            connection.sendall(head + body)
            self._selector.register(connection, selectors.EVENT_READ)

    def read(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                assert isinstance(key.fileobj, socket.socket)
                count = key.fileobj.recv_into(self._buffer)
                if not count:
                    raise SystemExit("a stream ended early")
                self.begun.add(key.fd)
                self.bytes += count
                self.events += self._buffer.count(b"data: ", 0, count)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def measure(ports: tuple[int, int], pids: tuple[int, int], streams: int, seconds: float) -> dict[str, float]:
    load = Streams(ports[0], streams)
    while len(load.begun) < streams:
        load.read(0.1)
    load.read(1.0)
    load.events = load.bytes = 0
    start, tokens = time.monotonic(), tokens_made(ports[1])
    cpu = [cpu_seconds(pid) for pid in pids]
    load.read(seconds)
    server, engine = (cpu_seconds(pid) - before for pid, before in zip(pids, cpu, strict=True))
    wall, tokens = time.monotonic() - start, tokens_made(ports[1]) - tokens
    load.close()
    return {
        "streams": streams,
        "tokens_per_second": round(tokens / wall),
        "events_per_second": round(load.events / wall),
        "bytes_per_event": round(load.bytes / load.events),
        "server_core_share": round(server / wall, 3),
        "server_us_per_token": round(server / tokens * 1e6, 2),
        "engine_us_per_token": round(engine / tokens * 1e6, 2),
        "tokens_per_second_of_a_core": round(tokens / server),
    }


def run(flags: argparse.Namespace, streams: int, folder: str) -> dict[str, float]:
    api, admin = (socket.create_server(("127.0.0.1", 0), backlog=1024) for _ in range(2))
    ports = (api.getsockname()[1], admin.getsockname()[1])
    fds = (api.fileno(), admin.fileno())
    command = [sys.executable, __file__, "server", *map(str, fds), str(flags.rate), str(flags.tokens), folder]
    environment = {**os.environ, "OUTRIDER_PROFILE": "1"} if flags.profile else None
    log = None if flags.profile else subprocess.DEVNULL
    with subprocess.Popen(command, pass_fds=fds, stderr=log, env=environment) as server:
        api.close()
        admin.close()
        try:
            while get(ports[0], "/health")[0] != 200:
                time.sleep(0.05)
            (engine,) = map(int, Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split())
            return measure(ports, (server.pid, engine), streams, flags.seconds)
        finally:
            server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,64,256", help="numbers of streams, one after the other")
    parser.add_argument("--rate", type=float, default=24_000, help="tokens a second of all streams; 0: no limit")
    parser.add_argument("--tokens", type=int, default=1, help="of each stream in each step")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--profile", action="store_true", help="where the time goes, on stderr")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(Path(folder))
        for streams in map(int, flags.streams.split(",")):
            print(json.dumps(run(flags, streams, folder)), flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["engine", fd, rate, tokens, folder]:
            run_engine(int(fd), float(rate), int(tokens), folder)
        case ["server", api, admin, rate, tokens, folder]:
            run_server((int(api), int(admin)), rate, tokens, folder)
        case _:
            main()
