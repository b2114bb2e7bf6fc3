"""Count what a reader of a README meets: words, the first line of Python, figures, folded sections.

    python -m scripts.count_readme README.md ~/other/README.md

Words are those of the file with its markup, as `wc -w` counts, and those of its prose: without code, HTML, pictures and
targets of links. A figure is a picture that is no badge: badges link to services that draw them, or lie in a folder of that
name. Only what a README shows itself counts, not what it links to.
"""

import argparse
import re

from lowrank_kv.utils import cli
from lowrank_kv.utils.paths import path_of

_PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)[^)]*\)|<img[^>]*\ssrc=[\"']([^\"']+)[\"']")
_BADGE = re.compile(r"shields\.io|badge|pepy\.tech|dcbadge|gurubase", re.I)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=path_of, metavar="FILE", help="READMEs")
    print("| README | lines | words | of prose | first Python at line | figures | folded sections |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for path in parser.parse_args(argv).files:
        found = counts(path.read_text(encoding="utf-8"))
        print(f"| {path} | {' | '.join('–' if value is None else f'{value:,}' for value in found.values())} |")


def counts(text: str) -> dict[str, int | None]:
    """Lines, words, words of prose, the line of the first Python (None where there is none), figures, folded sections."""
    lines = text.splitlines()
    fences = (number for number, line in enumerate(lines, 2) if re.match(r"\s*```\s*(python|py)\b", line, re.I))
    pictures = [markdown or tag for markdown, tag in _PICTURE.findall(text)]
    return {
        "lines": len(lines),
        "words": len(text.split()),
        "prose": len(_prose(text).split()),
        "python": next(fences, None),
        "figures": sum(not _BADGE.search(picture) for picture in pictures),
        "folded": len(re.findall(r"<details\b", text, re.I)),
    }


def _prose(text: str) -> str:
    text = re.sub(r"```.*?```|<!--.*?-->|<[^>]+>|!\[[^\]]*\]\([^)]*\)", " ", text, flags=re.S)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


if __name__ == "__main__":
    cli.run(main)
