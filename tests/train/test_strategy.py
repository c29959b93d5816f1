"""The words for a strategy: what does not go together is refused, with what does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.core.policies import Bounded, Mixing, Plain
from manyhands.errors import UsageError
from manyhands.sync.optimizer_state import without_compiler
from manyhands.train.strategy import resolve_sync


@pytest.mark.parametrize(
    "settings, complaint",
    [
        ({"policy": "async", "replicas": 2}, "replicas received 2; valid are 0 and 1"),
        ({"policy": "async", "replicas": True}, "replicas received True; valid are 0 and 1"),
        ({"policy": "async", "replicas": -1}, "replicas received -1"),
        ({"policy": "async", "transport": "sockets"}, "unknown transport 'sockets'. Did you mean 'socket'?"),
        ({"policy": "async", "replicas": 1, "transport": "arena"}, 'reached by sockets; take transport="auto"'),
        ({"policy": "sync", "replicas": 1}, 'policy "sync" and replicas=1: its steps are sums over lanes'),
        ({"policy": "sync", "transport": "socket"}, "Valid over sockets are async, plain, scaled, compensated,"),
        ({"policy": "async", "pull_codec": "int8"}, 'without sockets: in shared memory parameters do not travel'),
        ({"policy": "async", "replicas": 1, "pull_codec": "int9"}, "unknown codec 'int9'"),
        ({"policy": "async", "beta": 0.5}, "beta=0.5 and policy='async': beta goes with policy='mixing'"),
        ({"every": 4}, "every=4 and policy='sync': every goes with policy='mixing'"),
        ({"policy": Plain(), "every": 4}, "every=4 and policy=Plain(): every goes with policy='mixing'"),
        ({"policy": "mixing", "beta": 1.5}, "beta=1.5 of policy mixing: valid: a number above 0 and below 1"),
        ({"policy": "mixing", "every": 0}, "every=0 of policy mixing: valid: at least 1"),
        ({"policy": "mixing", "staleness": 2}, "staleness=2 and policy='mixing': staleness goes with"),
        ({"policy": "mixing", "codec": "int8"}, "and policy 'mixing': valid is None"),
        ({"policy": "mixing", "replicas": 1}, "policy 'mixing' over sockets"),
        ({"policy": "async", "predict": 2}, "predict received 2; valid are True, False and None"),
        ({"predict": True}, "predict=True and policy \"sync\": nothing is ever behind"),
        ({"policy": "async", "rates": [1.0, -2.0]}, "rates[1] received -2.0; valid is a number above 0"),
        ({"policy": "async", "rates": 0.5}, "rates received 0.5; valid: a list"),
        ({"rates": [0.5]}, "rates and policy \"sync\": valid with policies that make steps"),
        ({"policy": "async", "replicas": 1, "rates": [0.5]}, "rates and sockets: valid"),
        ({"policy": "async", "ahead": "yes"}, "ahead received 'yes'; valid are True, False and None"),
        ({"policy": "bounded", "ahead": True}, 'ahead=True: valid with policy="async" or "plain", one server'),
        ({"policy": "async", "ahead": True, "servers": 2}, "ahead=True: valid with"),
        ({"policy": "plain", "ahead": True, "replicas": 1}, "ahead=True: valid with"),
        ({"policy": "async", "ahead": True, "codec": "int8"}, "ahead=True: valid with"),
        ({"policy": "async", "ramp": -1}, "ramp received -1; valid is an integer of at least 0"),
        ({"policy": "async", "replicas": 1, "ramp": 5}, "ramp and sockets: valid"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        mh.Server(**settings)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "sync, sockets, processes",
    [
        (mh.Server(policy="async"), False, 1),
        (mh.Server(policy="async", servers=2, transport="socket"), True, 2),
        (mh.Server(policy="async", servers=2, replicas=1), True, 4),
        (mh.Server(policy=Plain(), replicas=1, transport="socket"), True, 2),
        (mh.Server(policy="bounded", transport="arena"), False, 1),
        (mh.Server(policy=Bounded(2), replicas=1, codec="int8", pull_codec="bf16"), True, 2),
        (mh.Server(policy="mixing", servers=2), False, 2),
    ],
)
def test_how_servers_are_reached(sync: mh.Server, sockets: bool, processes: int) -> None:
    assert (sync.sockets, sync.processes) == (sockets, processes)


@pytest.mark.parametrize(
    "sync, workers, ahead",
    [
        (mh.Server(policy="async"), 2, True),
        (mh.Server(policy="plain"), 2, True),
        (mh.Server(policy="async"), 1, False),
        (mh.Server(policy="async"), 3, False),
        (mh.Server(policy="async", staleness=1), 2, False),
        (mh.Server(policy="async", ahead=False), 2, False),
        (mh.Server(policy="async", ahead=True), 3, True),
        (mh.Server(policy="bounded"), 2, False),
        (mh.Server(policy="async", servers=2), 2, False),
    ],
)
def test_workers_go_ahead_where_a_core_would_be_idle(
    sync: mh.Server, workers: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.train.strategy.cores", lambda: 2)
    model = nn.Linear(2, 1)
    with without_compiler():
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        state = sync.lay_out(model, optimizer, workers, lanes=1, samples=0, stats=2, ring=1)
    assert state.arena.spec.ahead == ahead
    state.arena.close()


def test_mixing_is_one_word() -> None:
    assert resolve_sync("mixing") == mh.Server(policy="mixing")
    assert mh.Server(policy="mixing").lease_batches == 8
    assert mh.Server(policy=Mixing(0.3, every=5)).rule == mh.Server(policy="mixing", beta=0.3, every=5).rule
