"""Messages between the two processes over a socket: pickled, each behind its length.

Reading takes all that has arrived in one system call, so that a reader who is late catches up.
"""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")
_READ_BYTES = 1 << 18
_BUFFER_BYTES = 1 << 22  # asked for; the kernel gives what it allows


class Channel:
    """One end. Sending and receiving may be on different threads, each on one at a time."""

    def __init__(self, end: socket.socket) -> None:
        """Takes a blocking stream socket over, and closes it in the end."""
        self._socket = end
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        self._arrived = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Blocks while the other side is far behind. Raises OSError when it is gone."""
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, *, wait: bool = True) -> list[Any]:
        """Messages in order: at least one, or with `wait` false perhaps none. Raises EOFError or OSError at the end."""
        while True:
            try:
                data = self._socket.recv(_READ_BYTES, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return []
            if not data:
                raise EOFError
            self._arrived += data
            messages = self._complete()
            if messages or not wait:
                return messages

    def close(self) -> None:
        self._socket.close()

    def _complete(self) -> list[Any]:
        messages = []
        begin, end = 0, len(self._arrived)
        with memoryview(self._arrived) as view:
            while begin + _LENGTH.size <= end:
                (length,) = _LENGTH.unpack_from(view, begin)
                body = begin + _LENGTH.size
                if body + length > end:
                    break
                messages.append(pickle.loads(view[body : body + length]))
                begin = body + length
        del self._arrived[:begin]
        return messages
