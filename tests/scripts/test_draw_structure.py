"""The picture of the structure: what it shows, and that it is not redrawn by chance."""

import pytest

from scripts import draw_structure
from scripts.import_graph import circles, floors, without_shortcuts

GRAPH = {"top": {"middle", "bottom"}, "middle": {"bottom"}, "bottom": set()}


def test_a_part_stands_above_all_that_it_imports():
    assert floors(GRAPH) == {"top": 2, "middle": 1, "bottom": 0}
    with pytest.raises(ValueError, match="import one another"):
        floors({"a": {"b"}, "b": {"a"}})


def test_only_arrows_that_no_longer_way_implies_are_drawn():
    assert without_shortcuts(GRAPH) == {"top": {"middle"}, "middle": {"bottom"}, "bottom": set()}


def test_circles_are_found_however_long():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_the_picture_shows_every_part_and_is_the_same_each_time():
    drawn = draw_structure.draw(draw_structure.ROOT)
    assert drawn == draw_structure.draw(draw_structure.ROOT)
    for part in draw_structure.WHAT:
        assert f">{part}</text>" in drawn
