"""Show records of comparisons as one page that opens in any browser, without a network.

    lowrank-kv report runs/comparison/quality/20261125T101530-3f9a1c.json --output report.html

Several records are shown together: of rows with the same method and text the last record's. `lowrank-kv compare` writes the
page of its own record beside it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowrank_kv.utils import cli, run_record
from lowrank_kv.utils.arguments import ArgumentParser
from lowrank_kv.utils.atomic_write import write_text
from lowrank_kv.utils.paths import path_of

from .build import page


def main(argv: list[str]) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument(
        "records", type=path_of, nargs="+", metavar="RECORD", help="a run record, as `quality/RUN.json`"
    )
    parser.add_argument(
        "--output", type=cli.output_file, default=Path("report.html"), metavar="FILE", help="[default: %(default)s]"
    )
    arguments = parser.parse_args(argv)
    write_page([run_record.load(path) for path in arguments.records], arguments.output)
    print(f"wrote {arguments.output}")


def write_page(records: Sequence[Mapping[str, Any]], output: Path) -> None:
    """Write the page of these records, whole or not at all."""
    write_text(output, page(records))
