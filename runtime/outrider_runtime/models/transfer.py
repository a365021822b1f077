"""From a checkpoint's files into a model's tensors, without a second copy of the weights in the host's memory.

Threads read pieces of the files. On a CPU a piece is read to where it belongs; for a CUDA device into pinned memory,
and while it is copied from there, the next is read.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from outrider_runtime.models.weights import Place, SafetensorsWeights, Weights, torn

PIECE = 8 << 20  # bytes; two for each thread are what a transfer takes of the host's memory
READERS = {"cuda": 8, "cpu": 2}  # threads at most; for a CPU the memory's own speed is the limit
CONVERTERS = 8
REPORT_SECONDS = 5.0
LOOK_SECONDS = 0.2

Report = Callable[[str], None]


def fill(shards: Mapping[str, Tensor], weights: Weights, name: str, report: Report) -> None:
    """Copy each tensor of `shards`, all on one device, from the checkpoint, converting its dtype.

    `report` gets a line every few seconds and one at the end; a terminal gets a bar. `weights` hold all of `shards`, in
    the same shapes. Raises Refusal when a file ends early.
    """
    if isinstance(weights, SafetensorsWeights):
        places = {tensor: place for tensor, place in weights.places.items() if tensor in shards}
        progress = Progress(name, sum(place.nbytes for place in places.values()), report)
        _transfer([(place, shards[tensor]) for tensor, place in places.items()], progress)
    else:
        progress = Progress(name, sum(shard.nbytes for shard in shards.values()), report)
        _convert(shards, weights, progress)
    progress.end()


class Progress:
    def __init__(self, name: str, total: int, report: Report) -> None:
        """`total` in bytes."""
        self.done = 0
        self._name, self._total, self._report = name, total, report
        self._start = self._said = time.monotonic()
        self._bar = sys.stderr.isatty()

    def tell(self, done: int) -> None:
        self.done = done
        if self._bar:
            part = min(1.0, done / max(self._total, 1))
            sys.stderr.write(f"\r{self._name}: [{'#' * round(30 * part):30}] {self._rate()} ")
        if (now := time.monotonic()) - self._said > REPORT_SECONDS:
            self._said = now
            self._report(f"{self._name}: {self._rate()} so far, of {self._total / 1e9:.2f} GB")

    def end(self) -> None:
        if self._bar:
            sys.stderr.write("\n")
        self._report(f"{self._name}: weights loaded, {self._rate()}")

    def _rate(self) -> str:
        gigabytes, seconds = self.done / 1e9, time.monotonic() - self._start
        return f"{gigabytes:.2f} GB in {seconds:.1f} s, {gigabytes / max(seconds, 1e-6):.2f} GB/s"


@dataclass(frozen=True, slots=True)
class _Piece:
    file: Path
    offset: int  # in bytes
    dtype: torch.dtype  # in the file
    target: Tensor  # [elements]

    @property
    def nbytes(self) -> int:
        return self.target.numel() * self.dtype.itemsize


def _convert(shards: Mapping[str, Tensor], weights: Weights, progress: Progress) -> None:
    """What does not lie in its file as it is in memory: whole tensors, a few at once."""

    def read(name: str) -> int:
        shards[name].copy_(weights.read(name))
        return shards[name].nbytes

    with ThreadPoolExecutor(min(CONVERTERS, os.cpu_count() or 1), "weights") as pool:
        for nbytes in pool.map(read, shards):
            progress.tell(progress.done + nbytes)


def _transfer(tensors: list[tuple[Place, Tensor]], progress: Progress) -> None:
    if not tensors:
        return
    device = tensors[0][1].device
    pieces: SimpleQueue[_Piece] = SimpleQueue()
    for piece in _cut(tensors):
        pieces.put(piece)
    files = {place.file for place, _ in tensors}
    descriptors = {file: os.open(file, os.O_RDONLY) for file in files}
    threads = min(READERS[device.type], os.cpu_count() or 1)
    done = [0] * threads
    try:
        with ThreadPoolExecutor(threads, "weights") as pool:
            work = [pool.submit(_work, pieces, descriptors, device, done, index) for index in range(threads)]
            waiting = set(work)
            while waiting:
                ended, waiting = wait(waiting, LOOK_SECONDS, FIRST_EXCEPTION)
                progress.tell(sum(done))
                if any(each.exception() for each in ended):
                    while _next(pieces):  # the others need not go on
                        pass
        for each in work:
            each.result()
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _cut(tensors: list[tuple[Place, Tensor]]) -> Iterator[_Piece]:
    for place, target in tensors:
        flat, size = target.view(-1), place.dtype.itemsize
        for start in range(0, len(flat), PIECE // size):
            part = flat[start : start + PIECE // size]
            yield _Piece(place.file, place.offset + start * size, place.dtype, part)


def _work(
    pieces: SimpleQueue[_Piece], descriptors: Mapping[Path, int], device: torch.device, done: list[int], index: int
) -> None:
    lane = _Lane(descriptors, device)
    while (piece := _next(pieces)) is not None:
        lane.move(piece)
        done[index] += piece.nbytes
    lane.finish()


class _Lane:
    """A thread's way to the device: its own stream and buffers."""

    def __init__(self, descriptors: Mapping[Path, int], device: torch.device) -> None:
        self._descriptors = descriptors
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
            self._stream.wait_stream(torch.cuda.current_stream(device))  # which may still use the targets' memory
        pinned = self._stream is not None
        self._buffers = cycle([_Buffer(torch.empty(PIECE, dtype=torch.uint8, pin_memory=pinned)) for _ in "ab"])

    def move(self, piece: _Piece) -> None:
        if self._stream is None and piece.dtype == piece.target.dtype:
            return self._read(piece, piece.target)
        buffer = next(self._buffers)
        if buffer.copied is not None:
            buffer.copied.synchronize()
        staged = buffer.bytes[: piece.nbytes].view(piece.dtype)
        self._read(piece, staged)
        if self._stream is None:
            piece.target.copy_(staged)
            return None
        with torch.cuda.stream(self._stream):
            if piece.dtype != piece.target.dtype:  # a copy that also converts would do so on the host, and wait
                staged = staged.to(piece.target.device, non_blocking=True)
            piece.target.copy_(staged, non_blocking=True)
        buffer.copied = self._stream.record_event()
        return None

    def finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _read(self, piece: _Piece, target: Tensor) -> None:
        view, done = target.view(torch.uint8).numpy().data, 0
        while done < len(view):
            got = os.preadv(self._descriptors[piece.file], [view[done:]], piece.offset + done)
            if not got:
                raise torn(piece.file, f"ended at {piece.offset + done} bytes while it was read")
            done += got


@dataclass(slots=True)
class _Buffer:
    bytes: Tensor
    copied: torch.cuda.Event | None = None  # what it held is on the device once this has come


def _next(pieces: SimpleQueue[_Piece]) -> _Piece | None:
    try:
        return pieces.get_nowait()
    except Empty:
        return None
