"""The step as workers live it, here in threads: who must wake whom."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import numpy as np
import torch
from rig import Rig

from manyhands.sync.allreduce import Stepper

STEPS = 30


def test_a_leader_without_work_is_woken_by_who_has_it_all() -> None:
    """After a death the heir of everything need not be the leader; one that is not woken looks every 0.1 s only."""
    with closing(Rig(torch.optim.SGD, slots=2)) as rig:
        control, steps = rig.arena.control, []
        rig.fill_lanes()
        control.write_plan(1, 0, [1, 1], np.ones(len(rig.arena.spec.units), np.int64))
        control.proposed = 1
        control.horizon = STEPS + 1
        control.commit(0, 1)

        def work(slot: int) -> None:
            stepper = Stepper(rig.arena, slot, rig.appliers[slot], lambda step: [1, 1])
            while stepper.turn(STEPS) == "step":
                for lane in stepper.lanes():
                    stepper.begin_lane(lane)
                    stepper.end_lane(lane)
                assert stepper.finish()
            steps.append(control.steps)
            if stepper._demand._file is not None:  # a worker keeps it to its end
                stepper._demand._file.close()

        threads = [threading.Thread(target=work, args=(slot,)) for slot in range(2)]
        begun = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert steps == [STEPS, STEPS]
        assert time.monotonic() - begun < 0.1 * STEPS / 2
