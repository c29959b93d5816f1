"""Nobody is late before a quorum, before there is somebody to take over, or before the time is up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.lateness import Lateness

looks = st.lists(
    st.tuples(
        st.floats(0.01, 1.0),  # seconds since the look before
        st.integers(0, 1),  # whether a round was committed meanwhile
        st.floats(0, 1),
        st.dictionaries(st.integers(0, 3), st.integers(0, 7)),
        st.dictionaries(st.integers(4, 6), st.floats(0.01, 3.0)),
    ),
    max_size=40,
)


@given(looks, st.floats(0.1, 0.9), st.floats(0.01, 3.0))
def test_nobody_is_late_without_a_reason(looks: list[tuple], quorum: float, grace_s: float) -> None:  # type: ignore[type-arg]
    """Against the whole past, written down look by look."""
    lateness, now, number = Lateness(quorum, grace_s), 0.0, 0
    seen: list[tuple[float, int, float, dict[int, int]]] = []
    for passed, committed, done, at_work, finished in looks:
        now, number = now + passed, number + committed
        seen.append((now, number, done, at_work))
        late = lateness.late(number, done, at_work, finished, now)
        assert set(late) <= at_work.keys()
        if done < quorum or not finished:
            assert not late
        for slot in late:
            assert now - min(at for at, of, part, _ in seen if of == number and part >= quorum) > grace_s
            begun = now
            for at, of, _, working in reversed(seen):  # as long as it has been at this share without a break
                if of != number or working.get(slot) != at_work[slot]:
                    break
                begun = at
            assert now - begun > max(finished.values()) + grace_s - 1e-9


def test_whoever_takes_over_has_as_long_as_anybody() -> None:
    lateness = Lateness(0.5, 1.0)
    assert lateness.late(3, 0.5, {0: 1}, {2: 4.0}, 10.0) == []
    assert lateness.late(3, 0.75, {0: 1}, {2: 4.0}, 14.9) == []
    assert lateness.late(3, 0.75, {0: 1}, {2: 4.0}, 15.1) == [0]
    assert lateness.late(3, 0.75, {2: 1}, {3: 4.0}, 15.2) == [], "it has only begun"
    assert lateness.late(3, 0.75, {2: 1}, {3: 4.0}, 20.3) == [2]
    assert lateness.late(4, 0.75, {2: 1}, {3: 4.0}, 20.4) == [], "another round"
