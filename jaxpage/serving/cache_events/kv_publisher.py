"""Sends numbered batches of KV events over ZeroMQ, and again those that a subscriber missed.

The wire format is that of vLLM.
"""

from __future__ import annotations

import queue
import threading
from collections import deque

import msgpack
import zmq

from jaxpage.errors import ConfigError
from jaxpage.serving.cache_events.kv_events import Batch

NUM_KEPT = 10_000  # the most batches that can be sent again
REPLAY_SECONDS = 0.05  # the longest time that a subscriber waits until its request is looked at
END = (-1).to_bytes(8, "big", signed=True)  # the number that follows the last batch of a replay


class KVPublisher:
    """Publishes batches on a thread of its own.

    A message is [topic, number as 8 bytes, batch as msgpack]. A slow subscriber loses batches, and
    sees this from their numbers.
    """

    def __init__(
        self, endpoint: str, *, replay_endpoint: str | None = None, topic: str = ""
    ) -> None:
        """Opens the endpoints.

        Args:
            endpoint: The address on which batches are published.
            replay_endpoint: The address at which subscribers ask for batches that they missed, or
                None.
            topic: The topic of the messages.

        Raises:
            ConfigError: An endpoint cannot be bound.
        """
        self._topic = topic.encode()
        self._number = 0
        self._waiting: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._published: deque[tuple[int, bytes]] = deque(maxlen=NUM_KEPT)
        self._context = zmq.Context()
        self._sending = self._bind("kv_events", zmq.PUB, endpoint)
        self._replaying = (
            self._bind("kv_events_replay", zmq.ROUTER, replay_endpoint) if replay_endpoint else None
        )
        self._thread = threading.Thread(target=self._run, name="jaxpage-kv-events", daemon=True)
        self._thread.start()

    def send(self, batch: Batch) -> None:
        """Puts a batch into the queue of the thread, without waiting."""
        self._waiting.put(batch)

    def close(self) -> None:
        """Ends the thread after it has published the batches that are in its queue.

        It waits five seconds at most.
        """
        self._waiting.put(None)
        self._thread.join(5)

    def _bind(self, setting: str, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 1000  # milliseconds
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"{setting}: cannot listen on {endpoint}: {error.strerror}") from None
        return socket

    def _run(self) -> None:
        patience = None if self._replaying is None else REPLAY_SECONDS
        while True:
            try:
                if (batch := self._waiting.get(timeout=patience)) is None:
                    break
                self._publish(batch)
            except queue.Empty:
                pass
            while self._replaying is not None and self._replaying.poll(0):
                self._replay(self._replaying)
        self._context.destroy()

    def _publish(self, batch: Batch) -> None:
        packed = msgpack.packb(batch)
        self._published.append((self._number, packed))
        self._sending.send_multipart([self._topic, self._number.to_bytes(8, "big"), packed])
        self._number += 1

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        """Answers a request for the batches from a number on: sends these, then `END`.

        A request is [sender, empty, the first number]; other messages are ignored.
        """
        match socket.recv_multipart():
            case [who, b"", bytes(first)] if len(first) == 8:
                for number, packed in self._published:
                    if number >= int.from_bytes(first, "big"):
                        socket.send_multipart([who, b"", number.to_bytes(8, "big"), packed])
                socket.send_multipart([who, b"", END, b""])
