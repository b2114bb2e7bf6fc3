"""Record to the bit what the package computes, and compare recordings.

    python tests/golden/record.py --output tests/golden/baseline-amd-avx512.json  # tiny models
    python tests/golden/record.py --demo --output tests/golden/demo-amd-avx512.json  # the demo model
    python tests/golden/record.py --add tests/golden/baseline-amd-avx512.json  # labels that are not there yet, no others
    python tests/golden/record.py --compare A.json B.json  # labels that differ; status 1 if any does

What is recorded is this checkout, wherever the package is installed from. A file is the same, byte for byte, whenever one
commit is recorded on one machine. `test_golden.py` compares with the files here, which are recorded again only where results
are meant to change; a new row of `tests/methods.py` or `tests/families.py` is added with its commit, to each on the machine
that its header names. Where that is not at hand, labels whose results were meant to change are deleted, and `--add` gets
them when it is.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from cells import DEMO, TINY, record
from recording import Recording, commit, differences, machine, read, write


def compare(before: Path, after: Path) -> int:
    """Print what differs; the exit status."""
    one, other = read(before), read(after)
    changed = [key for key in one.machine if one.machine[key] != other.machine[key]]
    for key in changed:
        print(f"{key}: {one.machine[key]} | {other.machine[key]}")
    lines = differences(one.entries, other.entries, exact=not changed)
    print(*lines, f"{len(lines)} labels of {len(one.entries)} differ{' beyond tolerances' * bool(changed)}", sep="\n")
    return int(bool(lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--output", type=Path, help="file to record to")
    task.add_argument("--add", type=Path, help="recording that gets the labels it does not have yet")
    task.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="recordings to compare")
    parser.add_argument("--demo", action="store_true", help="record the demo model instead of tiny ones")
    arguments = parser.parse_args()
    if arguments.compare:
        return compare(*arguments.compare)
    before = read(arguments.add) if arguments.add else None
    if before and before.machine != machine():
        parser.error(f"`--add` {arguments.add} is of {before.machine}, and this is {machine()}; `--output` a new file")
    entries = {label: entry for group in (DEMO if arguments.demo else TINY) for label, entry in record(group).items()}
    if before:
        write(arguments.add, Recording(before.machine, before.commit, {**entries, **before.entries}))
    else:
        write(arguments.output, Recording(machine(), commit(), entries))
    return 0


if __name__ == "__main__":
    sys.exit(main())
