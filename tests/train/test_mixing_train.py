"""``sync="mixing"``: against elastic averaging in plain PyTorch, validation, and going on under other ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import ROWS, X, Y, mlp, one_thread, train
from torch.nn import functional

import manyhands as mh
from manyhands.core.order import epoch_order
from manyhands.train.callbacks import Lambda
from manyhands.train.ledger_file import read_ledger

BATCH, EPOCHS, EVERY, BETA = 16, 3, 4, 0.3
BATCHES = -(-ROWS // BATCH)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


@pytest.mark.parametrize("validation", [None, (X[:31], Y[:31])])
def test_one_worker_is_plain_torch(validation: Any) -> None:
    """Validation uses the servers' parameters, and must leave those of the worker alone."""
    sync = mh.Server(policy="mixing", beta=BETA, every=EVERY)
    fit = {"epochs": EPOCHS, "batch_size": BATCH, "validation": validation}
    trainer, history = train(optimizer=adam, sync=sync, workers=1, fit=fit)
    centre, own, losses = mlp(), mlp(), []
    inner = adam(own.parameters())
    with one_thread():
        for epoch in range(EPOCHS):
            order, total = epoch_order(0, epoch, ROWS), 0.0
            for batch in range(BATCHES):
                rows = torch.from_numpy(order[batch * BATCH : (batch + 1) * BATCH])
                inner.zero_grad()
                loss = functional.cross_entropy(own(X[rows]), Y[rows])
                loss.backward()
                inner.step()
                total += float(loss.detach()) * len(rows)
                if batch % EVERY == EVERY - 1 or batch == BATCHES - 1:
                    with torch.no_grad():
                        for agreed, mine in zip(centre.parameters(), own.parameters(), strict=True):
                            step = BETA * (agreed - mine)
                            agreed -= step
                            mine += step
            losses.append(total / ROWS)
    assert history.metrics["loss"] == pytest.approx(losses, rel=1e-4)
    for found, expected in zip(trainer.model.parameters(), centre.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    if validation is not None:
        assert trainer.evaluate(validation)["loss"] == pytest.approx(history.metrics["val_loss"][-1], rel=1e-6)


def test_it_goes_on_under_other_ways_and_they_under_it(tmp_path: Path) -> None:
    def run(sync: Any, until: int | None = None) -> mh.History:
        stop = Lambda(on_step_end=lambda state: state.stop("for the test") if state.step >= (until or 0) else None)
        fit = {"run_dir": tmp_path / "run", "epochs": 4, "batch_size": BATCH, "callbacks": [stop] if until else []}
        return train(optimizer="adamw", sync=sync, fit=fit)[1]

    for sync, until in (("allreduce", 2), ("mixing", 6), ("async-local", 10), ("local", 12), ("mixing", 16)):
        run(sync, until)
    history = run("async")
    assert history.epochs == [0, 1, 2, 3]
    proof = read_ledger(tmp_path / "run" / "ledger").verify()
    assert proof.exact and [epoch.once for epoch in proof.epochs] == [ROWS] * 4


def test_the_header_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    train(sync=mh.Server(policy="mixing", every=3), fit={"progress": "plain"})
    told = capsys.readouterr()
    assert "mixed with them every 3 batches" in told.out + told.err
    assert "staleness p50" in told.out + told.err
