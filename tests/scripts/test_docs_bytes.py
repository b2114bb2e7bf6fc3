"""The table of model shapes in docs/bytes.md says what the package plans."""

import re
from pathlib import Path

import pytest

from lowrank_kv.hf.cache.windowed.own_directions import OwnDirections
from lowrank_kv.hf.cache.windowed.planned_sequence import PlannedSequence
from lowrank_kv.hf.cache.windowed.retention import RetentionSchedule
from lowrank_kv.hf.geometry import KVGeometry
from lowrank_kv.hf.rope import POSITION_BYTES
from ojakv import OjaKVConfig
from ojakv.basis_plan import plan_of_shapes
from ojakv.planned_bytes import break_even_tokens, planned_nbytes

PAGE = Path(__file__).parents[2] / "docs/bytes.md"
BF16, TOKENS, MIB = 2, 32_768, 2**20
# Layers, KV heads, head dim of the models' published configurations.
SHAPES = {
    "SmolLM2-135M": (30, 3, 64),
    "Qwen2.5-7B": (28, 4, 128),
    "Llama-3.1-8B": (32, 8, 128),
    "Qwen3-8B": (36, 8, 128),
    "Llama-2-7B": (32, 32, 128),
    "Llama-3.1-70B": (80, 8, 128),
}


def planned(layers: int, heads: int, head_dim: int) -> list[int]:
    """The row of a shape: full cache, a plan of a tenth and a sequence's own bases in MiB, from how many tokens they pay."""
    geometry = KVGeometry(layers=tuple(range(layers)), num_kv_heads=heads, head_dim=head_dim)
    token = geometry.full_nbytes(1, BF16)
    sequence = PlannedSequence.after(
        RetentionSchedule(OjaKVConfig.preset("static-joint-pf")), prompt=TOKENS, tokens=TOKENS
    )
    positions = layers * sequence.position_bytes(1) + POSITION_BYTES * sequence.length
    tenth = sequence.low_rank_capacity * token / 10 + sequence.full_rank_capacity * token + positions
    online = plan_of_shapes(geometry, OjaKVConfig.preset("ojakv-joint", rate=0.3, ranks="fraction"))
    bases = sum(4 * initial.vectors_PWR.numel() for kv in online.layers.values() for initial in kv)
    return [
        *(round(nbytes / MIB) for nbytes in (TOKENS * token, tenth, bases)),
        break_even_tokens(online, BF16),
    ]


@pytest.mark.parametrize("name", SHAPES)
def test_the_table_of_shapes_says_what_is_planned(name):
    assert row_of(name, "## By model shape") == planned(*SHAPES[name])


def own_nbytes(name: str, rate: float) -> tuple[int, float]:
    """What a sequence has of its own at a shape: directions of `adaptive-mixed`, and bases of `ojakv-joint`."""
    layers, heads, head_dim = SHAPES[name]
    geometry = KVGeometry(layers=tuple(range(layers)), num_kv_heads=heads, head_dim=head_dim)
    directions = OwnDirections.nbytes(geometry.width, OjaKVConfig.preset("adaptive-mixed").own_directions)
    # A basis that follows the text is what a cache holds beyond one whose bases stay as they are.
    online, fixed = (
        planned_nbytes(
            plan_of_shapes(geometry, OjaKVConfig.preset("ojakv-joint", rate=rate, ranks="fraction", tracker=tracker)),
            prompt=1024,
            tokens=1024,
            itemsize=BF16,
        )
        for tracker in ("oja", "fixed")
    )
    return 2 * layers * directions, online - fixed


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Llama-3.1-8B"])
@pytest.mark.parametrize("rate", [0.1, 0.3, OjaKVConfig.preset("ojakv-joint").rate])
def test_own_directions_hold_at_most_a_tenth_of_what_own_bases_hold(name, rate):
    directions, bases = own_nbytes(name, rate)
    assert 0 < directions <= bases / 10


def test_the_page_says_what_own_directions_hold():
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    said = re.search(
        r"All together that is (\d+) KiB at the shapes of SmolLM2-135M and (\d+) KiB at those of Llama-3.1-8B", page
    )
    found = {name: own_nbytes(name, 0.3) for name in ("SmolLM2-135M", "Llama-3.1-8B")}
    assert [int(each) for each in said.groups()] == [round(directions / 1024) for directions, _ in found.values()]
    [share] = map(int, re.findall(r"at most a (\d+)th of what a sequence's bases of `ojakv-joint`", page))
    assert share == int(min(bases / directions for directions, bases in found.values()))


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Qwen2.5-7B", "Llama-3.1-8B", "Llama-3.1-70B"])
def test_the_table_of_shared_bases_is_six_times_as_much_for_joint_rows(name):
    """Of a layer's keys, and of its values: encoder, decoder, and that of all coefficients for own directions; fp32."""
    layers, heads, head_dim = SHAPES[name]
    nbytes = layers * 2 * 3 * (heads * head_dim) ** 2 * 4
    saved_by_thousand = 0.9 * 1000 * 2 * layers * heads * head_dim * BF16
    assert row_of(name, "## Bases that all caches share") == [
        round(nbytes / MIB),
        round(6 * nbytes / MIB),
        round(nbytes * 3 / 2 / saved_by_thousand),
        round(6 * nbytes * 4 / 3 / saved_by_thousand),
    ]


def row_of(name: str, heading: str) -> list[int]:
    """The numbers behind a name in the table below a heading."""
    section = PAGE.read_text(encoding="utf-8").split(heading + "\n")[1].split("\n## ")[0]
    [row] = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", section, re.MULTILINE)
    return [int(cell.replace(",", "")) for cell in row.split("|")]
