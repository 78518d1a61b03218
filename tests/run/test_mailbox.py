"""Messages between ranks: what arrives, and what does not count."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack, closing
from typing import Any

import pytest
from helpers.command import until

from lightning_perf.run.mailbox import Mailbox


def post(address: Any, content: bytes) -> None:
    """Send a datagram of somebody else."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.sendto(content, ("127.0.0.1", address[2]))


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_message_reaches_all_other_ranks(monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    """With the rank of its sender; one that has ended changes nothing."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with ExitStack() as stack:
        boxes = [stack.enter_context(closing(Mailbox(nodes))) for _ in range(3)]
        for rank, box in enumerate(boxes):
            box.connect(rank, [each.address for each in boxes])
        boxes[1].close()
        boxes[2].send({"batch": 3})
        assert until(lambda: [*boxes[0].receive()]) == [(2, {"batch": 3})]
        assert [*boxes[1].receive()] == [*boxes[2].receive()] == []


def test_a_failure_reaches_the_other_ranks_besides_their_messages() -> None:
    """Whichever thread reads them: no message is lost."""
    with closing(Mailbox(1)) as box, closing(Mailbox(1)) as other:
        for rank, each in enumerate((box, other)):
            each.connect(rank, [box.address, other.address])
        assert not box.has_failed()
        other.send({"batch": 3})
        other.fail()
        until(box.has_failed)
        assert [*box.receive()] == [(1, {"batch": 3})]
        assert not other.has_failed()


def test_messages_of_strangers_do_not_count() -> None:
    """Without the key, cut short, too long, or of an unknown rank; later ones are read."""
    with closing(Mailbox(1)) as box, closing(Mailbox(1)) as other:
        for rank, each in enumerate((box, other)):
            each.connect(rank, [box.address, other.address])
        key = other.address[0]
        for message in (
            {"rank": 1, "key": key + 1, "content": 1}, {"rank": 2, "key": key, "content": 1},
            {"rank": "x", "key": key, "content": 1}, {"rank": 1, "key": key}, [1], None,
            {"rank": 1, "key": key, "content": "x" * 10_000},
        ):  # fmt: skip
            post(box.address, json.dumps(message).encode())
        post(box.address, b"[" * 8000)
        post(box.address, b"\xff")
        post(box.address, b"")
        other.send({"at": 5, "not in JSON": float("inf")})
        assert until(lambda: [*box.receive()]) == [(1, {"at": 5})]


def test_without_an_address_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as without torch's main address; the run's folder is left."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with closing(Mailbox(2)) as box, closing(Mailbox(1)) as other:
        assert box.address == [0, 0, 0]
        other.connect(1, [box.address, other.address])
        other.send({})
        box.send({})
        assert [*box.receive()] == []
