"""Write the tables, figures and numbers of the documents from the runs under results/, or check that they stand there.

    python -m scripts.report           # write
    python -m scripts.report --check   # change nothing; fail where a document says something else than the results

`results/published.yaml` says what is published; `evaluation/report/` how.
"""

import argparse
import sys
from pathlib import Path

from evaluation.report.publish import problems, publish
from lowrank_kv.utils import cli
from lowrank_kv.utils.paths import path_of


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, and fail where something would be")
    parser.add_argument("--root", type=path_of, default=Path(), metavar="DIR", help="of the repository [default: .]")
    arguments = parser.parse_args(argv)
    if arguments.check:
        found = problems(arguments.root)
        print("\n".join(found) if found else "the documents say what the results say")
        sys.exit(1 if found else 0)
    changed = publish(arguments.root)
    print("\n".join(f"wrote {path}" for path in changed) if changed else "nothing to write")


if __name__ == "__main__":
    cli.run(main)
