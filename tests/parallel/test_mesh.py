"""Who owns what: shares of an axis and of heads, for any number of ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trireme.parallel import Group


@given(n=st.integers(1, 5000), unit=st.sampled_from([1, 2, 32, 256]), size=st.integers(1, 17))
def test_spans_cover_the_axis_once(n: int, unit: int, size: int) -> None:
    if n // unit < size:
        return  # too few units are shared, below
    owned = [range(n)[Group(rank, size).span(n, unit)] for rank in range(size)]
    assert [i for share in owned for i in share] == list(range(n))
    assert all(share.start % unit == 0 for share in owned)
    assert Group(0, size).sizes(n, unit) == [len(share) for share in owned]
    whole = [len(share) // unit for share in owned]
    assert max(whole) - min(whole) <= 1


@given(n=st.integers(1, 8), size=st.integers(1, 20))
def test_too_few_units_are_shared(n: int, size: int) -> None:
    owned = [range(n)[Group(rank, size).span(n)] for rank in range(size)]
    assert all(len(share) >= 1 for share in owned)
    assert {i for share in owned for i in share} == set(range(n))


@given(num_kv=st.integers(1, 12), per_kv=st.integers(1, 12), data=st.data())
def test_query_heads_are_owned_once_and_find_their_kv_head(num_kv: int, per_kv: int, data: st.DataObject) -> None:
    heads = num_kv * per_kv
    size = data.draw(st.integers(1, min(heads, 16)))
    shares = [Group(rank, size).heads(heads, num_kv) for rank in range(size)]
    assert [head for q, _ in shares for head in range(heads)[q]] == list(range(heads))
    for q, kv in shares:
        mine, kept = range(heads)[q], range(num_kv)[kv]
        assert mine and {head // per_kv for head in mine} <= set(kept)
        # within a rank, query head i attends with KV head i // (its query heads / its KV heads)
        assert len(mine) % len(kept) == 0
        local = len(mine) // len(kept)
        assert all(head // per_kv == kept[i // local] for i, head in enumerate(mine))
