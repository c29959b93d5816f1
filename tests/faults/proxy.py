"""Stands between processes that talk by sockets, and loses, doubles, reorders and damages what they say."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from manyhands.comm.links import Wire

COORDINATOR = "0"


class Proxy:
    """Whoever opens a link in ``detour`` reaches the process of the same name in the folder of ``wire``.

    Links to the coordinator are left alone. Every share is that of all envelopes, in both directions.
    """

    def __init__(self, wire: Wire, detour: Path, share: float, seed: int = 0) -> None:
        assert wire.folder is not None
        self._folder, self._detour, self._token, self._share = Path(wire.folder), detour, wire.token.encode(), share
        self._dice = random.Random(seed)
        self.done: Counter[str] = Counter()
        (detour / COORDINATOR).symlink_to(self._folder / COORDINATOR)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy")
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(10)

    def _run(self) -> None:
        with zmq.Context() as context, contextlib.ExitStack() as sockets:
            context.linger = 0  # of all of its sockets
            self._serve(lambda kind: sockets.enter_context(context.socket(kind)))

    def _serve(self, make: Callable[[int], zmq.Socket[bytes]]) -> None:
        poller = zmq.Poller()
        guard = make(zmq.REP)
        guard.bind("inproc://zeromq.zap.01")
        poller.register(guard, zmq.POLLIN)
        doors: dict[zmq.Socket[bytes], str] = {}
        ways: dict[tuple[zmq.Socket[bytes], bytes], zmq.Socket[bytes]] = {}
        callers: dict[zmq.Socket[bytes], tuple[zmq.Socket[bytes], bytes]] = {}
        late: list[tuple[zmq.Socket[bytes], list[Any]]] = []
        while not self._over.is_set():
            names = {path.name for path in self._folder.glob("*")}  # nothing once the run is over
            for name in names - {COORDINATOR, *doors.values()}:
                door = make(zmq.ROUTER)
                door.plain_server, door.zap_domain = True, b"proxy"
                door.bind(f"ipc://{self._detour / name}")
                doors[door] = name
                poller.register(door, zmq.POLLIN)
            ready = dict(poller.poll(5))
            out: list[tuple[zmq.Socket[bytes], list[Any]]] = []
            for socket in ready:
                parts = socket.recv_multipart()
                if socket is guard:
                    guard.send_multipart([parts[0], parts[1], b"200", b"", b"", b""])
                elif socket in doors:
                    caller = (socket, parts[0])
                    if caller not in ways:
                        way = ways[caller] = make(zmq.DEALER)
                        callers[way] = caller
                        way.plain_username, way.plain_password = b"manyhands", self._token
                        way.connect(f"ipc://{self._folder / doors[socket]}")
                        poller.register(way, zmq.POLLIN)
                    out += self._disturb(ways[caller], parts[1:], late)
                else:
                    door, route = callers[socket]
                    out += [(target, [route, *p]) for target, p in self._disturb(door, parts, late, route)]
            if len(late) > 4 or not ready:  # now come those that others have overtaken
                out += late
                late.clear()
            for target, parts in out:
                target.send_multipart(parts, zmq.NOBLOCK)

    def _disturb(
        self, target: zmq.Socket[bytes], parts: list[bytes], late: list[Any], route: bytes | None = None
    ) -> list[tuple[zmq.Socket[bytes], list[bytes]]]:
        """What becomes of an envelope."""
        dice = {what: self._dice.random() < self._share for what in ("lost", "doubled", "late", "damaged")}
        self.done.update(what for what, happens in dice.items() if happens)
        self.done["envelopes"] += 1
        if dice["lost"]:
            return []
        if dice["damaged"]:
            number = self._dice.choice([n for n, part in enumerate(parts) if part])
            damaged = bytearray(parts[number])
            damaged[self._dice.randrange(len(damaged))] ^= 1 << self._dice.randrange(8)
            parts = [*parts[:number], bytes(damaged), *parts[number + 1 :]]
        if dice["late"]:
            late.append((target, parts if route is None else [route, *parts]))
            return [(target, parts)] if dice["doubled"] else []
        return [(target, parts)] * (1 + dice["doubled"])
