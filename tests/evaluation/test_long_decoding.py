"""Where the positions of a long text are divided."""

from evaluation.tasks.long_decoding import position_edges


def test_positions_double_from_512():
    assert position_edges(8192) == (512, 1024, 2048, 4096, 8192)
    assert position_edges(600) == (512, 600)
    assert position_edges(100) == (100,)
