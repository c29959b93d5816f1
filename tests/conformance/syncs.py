"""Every way of agreeing, a row each. A new one is one line here, and is then held to everything in this folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import manyhands as mh


@dataclass(frozen=True, kw_only=True)
class Row:
    """A way of agreeing, and what it promises beyond what all of them do."""

    name: str
    make: Callable[[], object]
    exact: bool = False
    """Ends in the same bits for any number of workers, and whoever dies."""
    servers: int = 0
    lag: float = 0.02
    """How far the test accuracy of a short run may be below that of all-reduce."""


ROWS = [
    Row(name="allreduce", make=lambda: "allreduce", exact=True),
    Row(name="server", make=lambda: "server", exact=True, servers=1),
    Row(name="server-2", make=lambda: mh.Server(servers=2), exact=True, servers=2),
    Row(name="allreduce-int8", make=lambda: "allreduce:int8", exact=True),
    Row(name="allreduce-topk", make=lambda: mh.AllReduce(codec="topk:0.1"), exact=True, lag=0.04),
    Row(name="server-int8", make=lambda: mh.Server(codec="int8"), exact=True, servers=1),
    Row(name="local", make=lambda: mh.Local(every=4), exact=True),
    Row(name="local-int8", make=lambda: mh.Local(every=4, codec="int8"), exact=True),
    Row(name="async-local", make=lambda: mh.Local(every=4, asynchronous=True), servers=1, lag=0.04),
    Row(name="async-local-2", make=lambda: mh.Local(every=4, asynchronous=True, servers=2), servers=2, lag=0.04),
    Row(name="async-local-int8", make=lambda: mh.Local(every=4, outer="delayed", codec="int8"), servers=1, lag=0.04),
    Row(name="async-local-average", make=lambda: mh.Local(outer="average", asynchronous=True), servers=1, lag=0.06),
    Row(name="mixing", make=lambda: mh.Server(policy="mixing", every=4), servers=1, lag=0.06),
    Row(name="mixing-2", make=lambda: mh.Server(policy="mixing", beta=0.4, servers=2), servers=2, lag=0.06),
    Row(name="local-fragments", make=lambda: mh.Local(every=4, codec="int8", fragments=2), exact=True),
    Row(name="local-quorum", make=lambda: mh.Local(every=4, quorum=0.5, pace="speed"), exact=True),
    Row(name="async", make=lambda: "async", servers=1),
    Row(name="async-ahead", make=lambda: mh.Server(policy="async", ahead=True), servers=1, lag=0.04),
    Row(name="async-2", make=lambda: mh.Server(policy="async", servers=2), servers=2),
    Row(name="async-socket", make=lambda: mh.Server(policy="async", transport="socket"), servers=1),
    Row(name="async-replicas", make=lambda: mh.Server(policy="async", replicas=1), servers=2),
    Row(
        name="async-socket-int8",
        make=lambda: mh.Server(policy="async", transport="socket", codec="int8", pull_codec="int8"),
        servers=1,
    ),
    Row(name="bounded-replicas", make=lambda: mh.Server(policy="bounded", replicas=1), servers=2),
    Row(name="compensated-socket", make=lambda: mh.Server(policy="compensated", transport="socket"), servers=1),
    Row(name="rennala-socket", make=lambda: mh.Server(policy="rennala", transport="socket"), servers=1, lag=0.06),
    Row(name="backup-socket", make=lambda: mh.Server(policy="backup", transport="socket"), servers=1, lag=0.06),
    Row(name="async-int8", make=lambda: mh.Server(policy="async", codec="int8"), servers=1),
    Row(name="bounded", make=lambda: "bounded", servers=1),
    Row(name="plain", make=lambda: mh.Server(policy="plain"), servers=1),
    Row(name="scaled", make=lambda: mh.Server(policy="scaled"), servers=1, lag=0.06),
    Row(name="compensated", make=lambda: mh.Server(policy="compensated"), servers=1),
    Row(name="rennala", make=lambda: mh.Server(policy="rennala"), servers=1, lag=0.06),
    Row(name="backup", make=lambda: mh.Server(policy="backup"), servers=1, lag=0.06),
]
