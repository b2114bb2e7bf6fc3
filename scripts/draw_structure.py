"""Draw the project's parts and their imports, from the sources' own import statements.

    python -m scripts.draw_structure            # writes docs/figures/structure.svg
    python -m scripts.draw_structure --check    # fails when the picture is not what the sources say

A part stands one floor above the highest part that it imports. An arrow is an import; one that a longer way implies is left
out.
"""

import argparse
from html import escape
from pathlib import Path

from lowrank_kv.utils import cli
from lowrank_kv.utils.atomic_write import write_text
from lowrank_kv.utils.errors import UserError
from scripts.import_graph import CORE, Graph, floors, part_graph, without_shortcuts

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/figures/structure.svg"
WHAT = {
    "lowrank_kv.utils": "configuration, errors, files",
    "lowrank_kv.bases": "PCA, loss-weighted, ranks",
    "lowrank_kv.stores": "coefficients: ragged, paged",
    "lowrank_kv.eviction": "seam: tokens to forget",
    "lowrank_kv.codec": "seam: states ↔ coefficients",
    "lowrank_kv.ops": "attention: eager, C, Triton",
    "lowrank_kv.hf": "transformers; cache layers",
    "lowrank_kv.calibration": "moments of a text",
    "dynakv": "learned ranks",
    "ojakv": "online bases",
    "lowrank_kv_auto": "one call for every method",
    "training": "the loop, engines, data",
    "evaluation": "quality at equal bytes",
    "lowrank_kv_vllm": "compressed pages in vLLM",
    "lowrank_kv_cli": "the lowrank-kv command",
    "benchmarks": "speed, as ratios",
    "scripts": "commands of a checkout",
}
BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, MARGIN = 208, 58, 26, 46, 20
COLORS = {True: ("#e8f0fe", "#3b6fc4"), False: ("#fdf3e1", "#b7791f")}  # of the core's parts, and of the others


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the picture is out of date")
    drawn = draw(ROOT)
    if not parser.parse_args(argv).check:
        PICTURE.parent.mkdir(parents=True, exist_ok=True)
        write_text(PICTURE, drawn)
    elif not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != drawn:
        raise UserError(
            f"{PICTURE.relative_to(ROOT)} is not what the imports say; run python -m scripts.draw_structure"
        )


def draw(root: Path) -> str:
    """The picture as SVG; equal sources give equal text."""
    graph = part_graph(root)
    floor_of = floors(graph)
    place = _places(floor_of)
    height = MARGIN * 2 + (max(floor_of.values()) + 1) * (BOX_HEIGHT + GAP_Y) - GAP_Y
    width = MARGIN + max(x for x, _ in place.values()) + BOX_WIDTH
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif">',
            "<title>The parts of lowrank-kv and what they import</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0 L8 4 L0 8 z" fill="#888"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *_arrows(without_shortcuts(graph), place),
            *(_box(part, *place[part]) for part in sorted(place)),
            "</svg>",
            "",
        ]
    )


def _places(floor_of: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Part → the upper left corner of its box; the highest floor is on top, and each floor is centred."""
    top = max(floor_of.values())
    by_floor = [sorted(part for part, floor in floor_of.items() if floor == top - row) for row in range(top + 1)]
    widest = max(len(parts) for parts in by_floor)
    step = BOX_WIDTH + GAP_X
    return {
        part: (MARGIN + (widest - len(parts)) * step // 2 + column * step, MARGIN + row * (BOX_HEIGHT + GAP_Y))
        for row, parts in enumerate(by_floor)
        for column, part in enumerate(parts)
    }


def _arrows(graph: Graph, place: dict[str, tuple[int, int]]) -> list[str]:
    arrows = []
    for part in sorted(graph):
        for other in sorted(graph[part]):
            x1, y1 = place[part][0] + BOX_WIDTH // 2, place[part][1] + BOX_HEIGHT
            x2, y2 = place[other][0] + BOX_WIDTH // 2, place[other][1]
            bend = (y2 - y1) // 2
            arrows.append(
                f'<path d="M{x1} {y1} C{x1} {y1 + bend} {x2} {y2 - bend} {x2} {y2 - 2}" fill="none" stroke="#888" '
                'stroke-width="1.2" marker-end="url(#head)"/>'
            )
    return arrows


def _box(part: str, x: int, y: int) -> str:
    fill, stroke = COLORS[part.startswith(f"{CORE}.")]
    middle = x + BOX_WIDTH // 2
    return (
        f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="{fill}" stroke="{stroke}"/>'
        f'<text x="{middle}" y="{y + 23}" text-anchor="middle" font-size="14" font-weight="bold">{escape(part)}</text>'
        f'<text x="{middle}" y="{y + 43}" text-anchor="middle" font-size="12" fill="#444">{escape(WHAT[part])}</text>'
    )


if __name__ == "__main__":
    cli.run(main)
