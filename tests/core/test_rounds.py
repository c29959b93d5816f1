"""What local rounds decide, held to what must be true of any counts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.rounds import agreed_before, cut_fragments, due, usual_momentum, warm_momentum
from manyhands.errors import UsageError


@given(st.integers(1, 10_000), st.floats(0.01, 0.999))
def test_momentum_grows_and_never_beyond_what_was_asked_for(agreements: int, most: float) -> None:
    now, later = warm_momentum(agreements, most), warm_momentum(agreements + 1, most)
    assert 0 <= now <= later <= most
    assert now < 1 - 1 / (agreements + 1), "no older changes than there are"


def test_momentum_begins_at_nothing_and_arrives() -> None:
    assert [warm_momentum(agreements, 0.9) for agreements in (1, 2, 6, 11)] == [0, 1 / 6, 0.5, pytest.approx(2 / 3)]
    assert warm_momentum(45, 0.9) < 0.9 == warm_momentum(46, 0.9)


def test_short_rounds_have_less_momentum() -> None:
    usual = [usual_momentum(every) for every in range(1, 100)]
    assert usual == sorted(usual) and usual[0] == 0.2
    assert usual[3] == 0.5 and usual[14] < 0.8 and set(usual[15:]) == {0.8}


@given(st.integers(1, 40), st.integers(1, 9))
def test_every_round_counts_once_for_every_fragment(rounds: int, fragments: int) -> None:
    """What one agreement on a fragment counts begins where the one before it ended, and nothing of an epoch is left."""
    counted: list[list[int]] = [[] for _ in range(fragments)]
    for within in range(rounds):
        for fragment in due(within, rounds, fragments):
            counted[fragment] += range(agreed_before(within, fragment, fragments), within + 1)
        if within < rounds - 1:
            assert list(due(within, rounds, fragments)) == [within % fragments], "one at a time, in turns"
    assert counted == [list(range(rounds))] * fragments


@st.composite
def models(draw: st.DrawFn) -> tuple[list[str], list[int]]:
    """The layer and the size of each parameter."""
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=7))
    layers = [str(layer) for layer, count in enumerate(counts) for _ in range(count)]
    return layers, draw(st.lists(st.integers(1, 50), min_size=len(layers), max_size=len(layers)))


@given(models(), st.integers(1, 7))
def test_fragments_are_whole_layers_and_no_cut_is_more_even(model: tuple[list[str], list[int]], fragments: int) -> None:
    layers, sizes = model
    names = list(dict.fromkeys(layers))
    if fragments > len(names):
        with pytest.raises(UsageError, match=rf"fragments received {fragments}; valid is 1 to {len(names)}"):
            cut_fragments(layers, sizes, fragments)
        return
    cut = cut_fragments(layers, sizes, fragments)
    assert cut == sorted(cut) and set(cut) == set(range(fragments)), "neighbours, and none is empty"
    assert len({(layer, fragment) for layer, fragment in zip(layers, cut, strict=True)}) == len(names)
    weights = [sum(size for layer, size in zip(layers, sizes, strict=True) if layer == name) for name in names]
    every = itertools.combinations(range(1, len(names)), fragments - 1)
    best = min(max(sum(weights[a:b]) for a, b in itertools.pairwise([0, *bounds, len(names)])) for bounds in every)
    largest = max(sum(s for s, f in zip(sizes, cut, strict=True) if f == fragment) for fragment in range(fragments))
    assert largest == best
