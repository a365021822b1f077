"""Server-sent events: one write per stream and step, and an error event where a stream cannot go on."""

from __future__ import annotations

from aiohttp import web

from outrider_runtime.errors import RuntimeFault
from outrider_runtime.server.answers import Chunks, error_event
from outrider_runtime.server.generation import Generation

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def stream(request: web.Request, generation: Generation, chunks: Chunks) -> web.StreamResponse:
    """Raises ConnectionError when the client has gone."""
    response = web.StreamResponse(headers=_HEADERS)
    await response.prepare(request)
    pending = chunks.opening()
    finished = False
    while not finished:
        try:
            piece = await generation.next()
        except RuntimeFault as fault:
            generation.failed(fault)
            await response.write(pending + error_event(fault))
            break
        if piece.text:
            pending += chunks.text(piece.text, None)
        if piece.finish_reason is not None:
            pending += chunks.text("", piece.finish_reason) + chunks.closing(generation.usage)
            finished = True
        if pending:
            await response.write(pending)
            pending = b""
    await response.write_eof()
    return response
