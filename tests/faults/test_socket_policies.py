"""Every policy over sockets, judged as in the shared arena: nothing is lost or doubled, whoever dies when."""

from __future__ import annotations

from pathlib import Path

import pytest
from counting import BATCH, SAMPLES, Storm, UntilOver, counting_data, counting_trainer, effects
from scenes import Cnn, Scene, proof

import manyhands as mh
from manyhands.core.policies import Backup, Bounded, Compensated, Policy, Rennala

pytestmark = pytest.mark.fault

QUIET = {"batch_size": BATCH, "progress": "quiet"}


@pytest.mark.parametrize("policy", [Bounded(0), Compensated(), Rennala(2), Backup(0)], ids=lambda p: type(p).__name__)
def test_one_worker_gives_the_bits_of_the_shared_arena(policy: Policy) -> None:
    made = {"schedule": "cosine", "clip": 1.0}
    first = Scene(Cnn, trainer={**made, "sync": mh.Server(policy=policy)}, lanes=1).run(1)
    second = Scene(Cnn, trainer={**made, "sync": mh.Server(policy=policy, servers=2, replicas=1)}, lanes=1).run(1)
    assert second.digest == first.digest


@pytest.mark.parametrize(
    "policy", [Bounded(0), Bounded(2), Rennala(3), Backup(1), Compensated()], ids=lambda p: repr(p).replace(" ", "")
)
def test_a_storm_of_kills(policy: Policy, tmp_path: Path) -> None:
    trainer = counting_trainer(mh.Server(policy=policy, servers=2, replicas=1), workers=3, height=64)
    with Storm(trainer, most=10, pause_s=(0.1, 0.4)) as storm:
        history = trainer.fit(counting_data(), epochs=1000, run_dir=tmp_path, callbacks=[UntilOver(storm)], **QUIET)
    assert storm.done
    assert proof(tmp_path).exact and len(proof(tmp_path).epochs) == len(history)
    assert history.updates["applied"] == len(history) * SAMPLES // BATCH
    if isinstance(policy, Bounded):  # the others weigh updates, and the weights do not count any more
        assert effects(trainer.model) == {float(len(history))}
        assert history.updates["staleness_most"] <= policy.staleness


def test_updates_of_one_step_are_taken_together_or_not_at_all(tmp_path: Path) -> None:
    """A single worker is a step of its own, at half the rate; so its weights count, whoever dies."""
    trainer = counting_trainer(mh.Server(policy=Rennala(2), replicas=1), workers=1, height=64)
    with Storm(trainer, most=8, pause_s=(0.1, 0.4)) as storm:
        history = trainer.fit(counting_data(), epochs=1000, run_dir=tmp_path, callbacks=[UntilOver(storm)], **QUIET)
    assert storm.done and effects(trainer.model) == {len(history) / 2}


def test_a_step_waits_for_as_many_updates_as_its_policy_says() -> None:
    """Three workers that wait for each other: a third of the steps, and the mean of three gradients each."""
    trainer = counting_trainer(mh.Server(policy=Rennala(3), transport="socket"), workers=3)
    history = trainer.fit(counting_data(), epochs=3, run_dir=False, **QUIET)
    assert history.updates["staleness_most"] == 0
    counts = effects(trainer.model)
    assert max(counts) <= 3.0 and min(counts) >= 1.0  # a third of an effect in each of three epochs, or more at the end
