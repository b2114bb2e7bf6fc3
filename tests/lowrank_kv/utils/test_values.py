"""Arguments of another type are named, and numbers of numpy and torch are Python's own."""

import json

import numpy as np
import pytest
import torch

from lowrank_kv.eviction import Eviction
from lowrank_kv.utils.config import configuration, option
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.values import check_type, number, plain_json, unboxed, whole_number


@pytest.mark.parametrize(
    ("value", "told"), [(None, "None"), ("x", "'x'"), (3, "3"), ([1], "'list'"), (Eviction, "'type'")]
)
def test_an_argument_of_another_type_is_named_with_its_value(value, told):
    check_type("eviction", Eviction(), Eviction, "an eviction")
    with pytest.raises(UserError, match=f"^`eviction` must be an eviction; got {told}$"):
        check_type("eviction", value, Eviction, "an eviction")


@pytest.mark.parametrize(
    "value", [0.5, np.float64(0.5), np.float32(0.5), np.float16(0.5), np.array(0.5), torch.tensor(0.5)], ids=repr
)
def test_a_number_of_numpy_or_torch_is_pythons_own(value):
    for found in (number("rate", value), unboxed(value)):
        assert type(found) is float
        assert found == 0.5


@pytest.mark.parametrize(
    "value", [None, "0.5", True, np.True_, [0.5], np.array([0.5]), torch.ones(1), Eviction], ids=repr
)
def test_what_is_no_number_is_refused(value):
    with pytest.raises(UserError, match="^`rate` must be a number; got "):
        number("rate", value)


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), torch.tensor(3), torch.tensor([3])], ids=repr)
def test_a_whole_number_of_numpy_or_torch_is_pythons_own(value):
    assert type(whole_number("tokens", value)) is int
    with pytest.raises(UserError, match="`tokens` must be a whole number; got 3.5"):
        whole_number("tokens", 3.5)


@configuration
class Options:
    share: float = option(0.1, help="a share")
    count: int = option(1, help="a count")
    is_on: bool = option(False, help="a switch")
    name: str | None = option(None, help="a name")
    shares: list[float] = option([], help="several")


def test_a_configuration_takes_numbers_of_numpy_and_keeps_pythons():
    boxed = {
        "share": np.float32(0.5),
        "count": np.int64(2),
        "is_on": np.True_,
        "name": np.str_("a"),
        "shares": [np.float16(1)],
    }
    options = Options(**boxed)
    assert vars(options) == {"share": 0.5, "count": 2, "is_on": True, "name": "a", "shares": [1.0]}
    assert [type(value) for value in vars(options).values()] == [float, int, bool, str, list]
    for key, value in {"count": np.float32(2.5), "is_on": np.int64(1), "share": np.True_, "name": np.int64(3)}.items():
        with pytest.raises(UserError, match=f"`{key}` must be of type"):
            Options(**{key: value})


def test_what_is_written_as_json_has_pythons_numbers():
    boxed = {"a": np.float32(0.5), "b": [np.int64(3), torch.tensor(2)], "c": {"d": np.float64(0.25)}}
    assert json.dumps(plain_json("summary", boxed)) == '{"a": 0.5, "b": [3, 2], "c": {"d": 0.25}}'


@pytest.mark.parametrize(
    ("value", "told"), [({"a": object()}, "a object"), ({"a": np.zeros(2)}, "a ndarray"), ({(1, 2): 3}, "tuple")]
)
def test_what_json_cannot_hold_is_refused(value, told):
    with pytest.raises(UserError, match=f"`summary` must hold what JSON can: .*{told}"):
        plain_json("summary", value)
