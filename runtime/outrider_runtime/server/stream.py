"""Server-sent events: one write for each choice and step, and an error event where a stream cannot go on."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from outrider_runtime.errors import RuntimeFault
from outrider_runtime.server.answers import Chunks, error_event
from outrider_runtime.server.generation import Generation, Piece

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def stream(request: web.Request, generation: Generation, choices: Sequence[Chunks]) -> web.StreamResponse:
    """`choices` in order of their index. Raises ConnectionError when the client has gone."""
    response = web.StreamResponse(headers=_HEADERS)
    if request.version.minor:
        response.enable_chunked_encoding()
    else:  # of HTTP/1.0: that the connection ends is how a client knows the end
        response.force_close()
    writer = await response.prepare(request)
    if writer is None:
        raise ConnectionResetError("the client has gone")
    sink = _EventSink(request, writer, choices, chunked=response.chunked)
    try:
        await generation.run(sink)
        last = choices[0].closing(generation.usage)
    except RuntimeFault as fault:
        generation.failed(fault)
        last = error_event(fault)
    await response.write_eof(last)
    return response


class _EventSink:
    """Writes to the transport itself, in the encoding that aiohttp's writer began: per event that costs a third."""

    def __init__(
        self, request: web.Request, writer: AbstractStreamWriter, choices: Sequence[Chunks], *, chunked: bool
    ) -> None:
        self._protocol = request.protocol
        self._writer = writer
        self._choices = choices
        self._chunked = chunked
        self._opening = b"".join(choice.opening() for choice in choices)

    def take(self, index: int, piece: Piece) -> bool:
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has gone")
        data = self._choices[index].event(*piece)
        if self._opening:
            self._opening, data = b"", self._opening + data
        if data:
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return not self._protocol.writing_paused

    async def ready(self) -> None:
        await self._writer.drain()
