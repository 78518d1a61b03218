"""Messages between the ranks of a run, for which no rank waits."""

from __future__ import annotations

import json
import os
import socket
from collections import deque
from contextlib import suppress
from ipaddress import IPv4Address
from typing import TYPE_CHECKING, Any

from lightning_perf.errors import DAMAGE
from lightning_perf.files import finite, parsed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_LOCAL = "127.0.0.1"
#: The message of a rank whose run has ended by an exception.
_FAILED = {"failed": True}
#: Bytes of a message, messages that are read at once, and bytes that the kernel keeps, at most.
_LONGEST, _MOST_MESSAGES, _BUFFER = 8192, 10_000, 1 << 22


class Mailbox:
    """Sends datagrams to the other ranks, which read them when they like; some may be lost.

    Neither blocks nor raises, whatever became of the others: torch's store and its groups do until
    the other side runs. A message counts if it has the key of its sender.

    Args:
        nodes: How many nodes the run has; with one, nothing from elsewhere is received.
    """

    def __init__(self, nodes: int) -> None:
        self._key = int.from_bytes(os.urandom(6), "big")
        self._rank = 0
        # The addresses and keys of the other ranks.
        self._others: dict[int, tuple[tuple[str, int], int]] = {}
        self._socket: socket.socket | None = None
        # Messages that `has_failed` has received; and whether one says that its sender has failed.
        self._unread: deque[tuple[int, Any]] = deque()
        self._failed = False
        self._main = _LOCAL
        #: The key, address and port of this rank, for `connect` on the others.
        self.address = [0, 0, 0]
        with suppress(OSError, KeyError):
            host = _LOCAL
            if nodes > 1:
                self._main = socket.gethostbyname(os.environ["MASTER_ADDR"])
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                    probe.connect((self._main, 9))  # sends nothing
                    host = probe.getsockname()[0]
            own = self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            own.bind((_LOCAL if nodes == 1 else "", 0))
            own.setblocking(False)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            self.address = [self._key, int(IPv4Address(host)), own.getsockname()[1]]

    def connect(self, rank: int, addresses: Sequence[Sequence[int]]) -> None:
        """Take this rank's number, and the addresses of all."""
        self._rank = rank
        for other, (key, host, port) in enumerate(addresses):
            if other != rank and port:
                address = IPv4Address(int(host))
                # The node of rank 0 may resolve its own name to a loopback address.
                found = self._main if address.is_loopback else str(address)
                self._others[other] = ((found, int(port)), int(key))

    def send(self, content: Mapping[str, Any]) -> None:
        """Send plain values to all other ranks."""
        message = {"rank": self._rank, "key": self._key, "content": finite(content)}
        data = json.dumps(message).encode()
        for address, _ in self._others.values():
            with suppress(OSError):  # too long, or the network does not take it
                if self._socket is not None:
                    self._socket.sendto(data, address)

    def fail(self) -> None:
        """Report to all other ranks that the run of this one has ended by an exception."""
        self.send(_FAILED)

    def has_failed(self) -> bool:
        """Whether another rank has reported that; on any thread."""
        self._unread.extend(self._received())
        return self._failed

    def receive(self) -> Iterator[tuple[int, Any]]:
        """The other messages that have arrived: the sender's rank, and what it has sent."""
        self.has_failed()
        while self._unread:
            yield self._unread.popleft()

    def _received(self) -> Iterator[tuple[int, Any]]:
        with suppress(OSError):  # there are no more
            for _ in range(_MOST_MESSAGES if self._socket is not None else 0):
                assert self._socket is not None  # as above
                data = self._socket.recv(_LONGEST)
                with suppress(*DAMAGE):
                    message = parsed(data)
                    rank = int(message["rank"])
                    if message["key"] != self._others[rank][1]:
                        continue
                    if message["content"] == _FAILED:
                        self._failed = True
                    else:
                        yield rank, message["content"]

    def close(self) -> None:
        """Receive no more; may be called more than once."""
        if self._socket is not None:
            self._socket.close()
