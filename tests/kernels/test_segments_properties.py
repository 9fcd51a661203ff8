"""What holds of the metadata for any assignment of rows to adapters. Apart from the rest: it needs hypothesis."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.lora import chunk_bound, chunk_rows_for
from kernels.reference import segments as reference

rows = st.lists(st.sampled_from([-1, 0, 1, 2, 5, 1000, 2**31 - 2]), max_size=40)


@settings(max_examples=25, deadline=None)
@given(token_adapter=rows, chunk_rows=st.sampled_from([1, 2, 16, 128]))
def test_equals_the_definition(
    check_segments: Callable[[list[int], int], None], token_adapter: list[int], chunk_rows: int
) -> None:
    check_segments(token_adapter, chunk_rows)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-1, 40), min_size=1, max_size=400))
def test_the_grid_holds_every_chunk(token_adapter: list[int]) -> None:
    active = len(set(token_adapter) - {-1})
    if active:
        chunk_rows = chunk_rows_for(len(token_adapter), active)
        chunks = reference.segments(token_adapter, chunk_rows).chunks
        assert len(chunks) <= chunk_bound(len(token_adapter), active, chunk_rows) <= len(token_adapter)
        assert all(1 <= length <= chunk_rows for _, _, length in chunks)
