"""What a borrower and a lender say to each other: one datagram each over a Unix socket that keeps their bounds.

A borrower relays through a device that another process of this machine owns; that process is the lender. Descriptors of
shared memory travel with the message that speaks of them.

    borrower -> lender    HELLO      `number`: its process, as the device's runtime names it
                          SEGMENT    `segment`, `nbytes`, its descriptor: host memory that requests will name
                          DROP       `segment`: no request names it any more
                          OPEN       `channel`, `number`: slots asked for, `nbytes` each, `to_device`
                          CARRY      `channel`, `slot`, `segment`, `offset`, `nbytes`: do the leg that touches the host
                          CLOSE      `channel`: its import is closed
                          BYE        every import is closed
    lender -> borrower    GRANTED    `channel`, `number`: slots lent, `text`: the key of their memory, perhaps a descriptor
                          REFUSED    `channel`, `text`: why
                          DONE       `channel`, `slot`: the bytes of its leg are there
                          FAILED     `channel`, `slot`, `text`: why they are not
                          LEAVING    lends no more; waits for BYE
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

_HEAD = struct.Struct("<BBHHxxIQQQ")
_LONGEST = 4096
"""Bytes of a message."""


class Kind(IntEnum):
    HELLO = 1
    SEGMENT = 2
    DROP = 3
    OPEN = 4
    CARRY = 5
    BYE = 6
    GRANTED = 7
    REFUSED = 8
    DONE = 9
    FAILED = 10
    LEAVING = 11
    CLOSE = 12


@dataclass(frozen=True)
class Message:
    kind: Kind
    channel: int = 0
    slot: int = 0
    segment: int = 0
    offset: int = 0
    nbytes: int = 0
    number: int = 0
    to_device: bool = False
    text: str = ""

    def pack(self) -> bytes:
        head = _HEAD.pack(
            self.kind,
            self.to_device,
            self.channel,
            self.slot,
            self.segment,
            self.offset,
            self.nbytes,
            self.number,
        )
        return head + self.text.encode()[: _LONGEST - _HEAD.size]

    @staticmethod
    def unpack(raw: bytes) -> Message:
        """Raises ValueError for bytes that are no message."""
        if len(raw) < _HEAD.size:
            raise ValueError(f"expected a message of at least {_HEAD.size} bytes, got {len(raw)}")
        kind, to_device, channel, slot, segment, offset, nbytes, number = _HEAD.unpack_from(raw)
        text = raw[_HEAD.size :].decode(errors="replace")
        return Message(Kind(kind), channel, slot, segment, offset, nbytes, number, bool(to_device), text)


class Wire:
    """One end of a connection. Any thread may send; one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, message: Message, file: int | None = None) -> None:
        """Raises OSError when the other end is gone."""
        socket.send_fds(self._end, [message.pack()], [] if file is None else [file])

    def receive(self) -> tuple[Message, int | None] | None:
        """The next message, and the descriptor that came with it (the caller's to close); None when the other end has
        gone or `stop` was called."""
        try:
            raw, files, _, _ = socket.recv_fds(self._end, _LONGEST, 1)
        except OSError:
            return None
        if not raw:
            return None
        return Message.unpack(raw), files[0] if files else None

    def stop(self) -> None:
        """Both ends find the connection ended, also one that is receiving."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()


def listen(name: str) -> socket.socket:
    """A socket under a name of this machine that no file stands for; it goes with the process."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.bind(f"\0{name}")
    end.listen(64)
    return end


def connect(name: str) -> Wire:
    """Raises OSError if nobody listens there."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        end.connect(f"\0{name}")
    except OSError:
        end.close()
        raise
    return Wire(end)


def accept(listening: socket.socket) -> Wire | None:
    """The next process that connects; None if it belongs to another user, who has no business here."""
    end, _ = listening.accept()
    raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", raw)
    if user != os.getuid():
        end.close()
        return None
    return Wire(end)
