"""`make sanitize` sees a race between two of OpenMP's threads, and none where there is none."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

OPENMP = Path(__file__).with_name("openmp_by_threads.c")
PROGRAM = """
#include <stdint.h>
int64_t sum[4], last[64]; /* of the whole program, so that no store to them is left out */
int main(void) {
    int64_t failed = 0;
#pragma omp parallel for num_threads(4) schedule(static)
    for (int64_t t = 0; t < 64; t++) sum[SUM] += t;
#pragma omp parallel for num_threads(4) schedule(dynamic, 1) reduction(| : failed)
    for (int64_t t = 0; t < 64; t++) {
        last[LAST] = t;
        failed |= t > 63;
    }
    const int64_t all = sum[0] + sum[1] + sum[2] + sum[3];
    return failed || (!RACES && (all != 63 * 32 || last[63] != 63));
}
"""


@pytest.mark.parametrize(
    ("sum_", "last", "races"),
    [("t / 16", "t", False), ("0", "t", True), ("t / 16", "0", True)],
    ids=["none", "in equal shares", "in chunks by turns"],
)
def test_a_race_is_seen_and_nothing_else(sum_, last, races, tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    program, built = tmp_path / "program.c", tmp_path / "program"
    program.write_text(PROGRAM)
    macros = [f"-DSUM={sum_}", f"-DLAST={last}", f"-DRACES={races:d}"]
    command = [
        "gcc",
        "-fopenmp",
        "-fsanitize=thread",
        "-g",
        "-O1",
        *macros,
        str(program),
        str(OPENMP),
        "-o",
        str(built),
    ]
    compiled = subprocess.run(command, capture_output=True, text=True)
    if "tsan" in compiled.stderr:
        pytest.skip("gcc has no ThreadSanitizer here")
    assert not compiled.returncode, compiled.stderr
    done = subprocess.run([built], capture_output=True, text=True, env={**os.environ, "TSAN_OPTIONS": "exitcode=66"})
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run under this kernel")
    assert (done.returncode, "data race" in done.stderr) == (66 if races else 0, races), done.stderr
