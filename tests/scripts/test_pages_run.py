"""What the README, the pages and the notebook show runs as printed, and gives what they say."""

import ast
import builtins
import contextlib
import importlib
import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evaluation.page.demo import Continuation, demo_page
from lowrank_kv.utils import run_record

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def printed_in(code: str) -> list[str]:
    """The outputs that a block shows: the comments on the lines after `print`."""
    lines = code.splitlines()
    return [
        after.removeprefix("# ") for before, after in zip(lines, lines[1:], strict=False) if before.startswith("print(")
    ]


@pytest.mark.slow
@pytest.mark.demo
def test_the_readmes_first_lines_print_what_they_say(run, demo_dir, tmp_path):
    """The commands of the README in their order, in an empty directory with the files that they name."""
    [code] = re.findall(r"```python\n(.*?)```", README, re.S)
    bases = os.environ.get("LOWRANK_KV_DEMO_BASES")  # of the same command, made before
    if bases is None:
        bases = tmp_path / "runs/demo-bases"
        run("-m", "lowrank_kv_cli", "calibrate", "--config", "configs/calibrate-demo.yaml", "--output", bases)
    else:
        shutil.copytree(bases, tmp_path / "runs/demo-bases")
    shutil.copy(ROOT / "LICENSE", tmp_path)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LOWRANK_KV_HOME": str(demo_dir.parent)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == printed_in(code)


class Names:
    """What the Python of a page imports and binds, block after block.

    Attributes:
        imported: by their names in the block.
        bound: all names that are imported or assigned; a page may take a loaded model for granted.
    """

    def __init__(self):
        self.imported: dict[str, object] = {}
        self.bound = {*dir(builtins), "model", "tokenizer", "inputs", "base"}

    def read(self, block: ast.Module) -> None:
        for node in ast.walk(block):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = importlib.import_module(alias.name)
            elif isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                self.imported.update({alias.asname or alias.name: getattr(module, alias.name) for alias in node.names})
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.bound.add(node.id)
        self.bound.update(self.imported)

    def value(self, node: ast.expr) -> object:
        """What an expression such as `ojakv.OjaKVConfig.preset` stands for; None of what no import gives."""
        if isinstance(node, ast.Attribute):
            holder = self.value(node.value)
            return None if holder is None else getattr(holder, node.attr)
        return self.imported.get(node.id) if isinstance(node, ast.Name) else None


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.stem
)
def test_the_python_of_a_page_names_what_there_is(path):
    """Imports, attributes and arguments, without running anything: most blocks need a trained compressor."""
    names = Names()
    for code in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.S):
        block = ast.parse(code)
        names.read(block)
        for node in ast.walk(block):
            if isinstance(node, ast.Name):
                assert node.id in names.bound, f"the page imports no `{node.id}`"
            elif isinstance(node, ast.Attribute):
                names.value(node)
            elif isinstance(node, ast.Call) and (called := names.value(node.func)) is not None:
                given = {each.arg: None for each in node.keywords if each.arg is not None}
                inspect.signature(called).bind(*node.args, **given)


@pytest.mark.slow
@pytest.mark.demo
def test_the_notebook_runs(demo_dir):
    """Its cells, one after another in one namespace, on fewer tokens."""
    cells = json.loads((ROOT / "notebooks/first_look.ipynb").read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") for cell in cells)
    names, output = {}, io.StringIO()
    with contextlib.redirect_stdout(output):
        for cell in cells:
            if cell["cell_type"] == "code":
                code = "".join(cell["source"]).replace("TOKENS, LENGTH = 4096, 512", "TOKENS, LENGTH = 1536, 512")
                exec(compile(code, "first_look.ipynb", "exec"), names)
    rates, kls = zip(*((held, kl) for _, held, kl in names["table"]), strict=True)
    assert list(rates) == sorted(rates, reverse=True)
    assert list(kls) == sorted(kls)
    assert 0 <= kls[0] < 0.05
    assert names["sizes"].unique().numel() > 1  # tokens differ
    assert "uncompressed" in output.getvalue()


@pytest.fixture
def comparison(tmp_path) -> Path:
    row = {"dataset": "speeches", "perplexity_ratio": 1.01}
    rows = [
        {**row, "method": "full", "rate": 1.0, "kl": 0.001},
        {**row, "method": "learned 0.06", "rate": 0.08, "kl": 0.01},
        {**row, "method": "rotated-int2", "rate": 0.155, "kl": 0.1},
    ]
    record = run_record.new_record(
        "quality", config={"model": "tiny"}, inputs=[], n={"windows": 1}, rows=rows, argv=["x"]
    )
    run_record.write(record, tmp_path / "comparison")
    return tmp_path / "comparison"


def test_the_demo_ends_with_a_page(here, checkpoint, comparison, text_file, tmp_path):
    command = ("scripts/show_demo.py", "--checkpoint", checkpoint, "--comparison", comparison, "--text", text_file)
    options = ("--output", tmp_path / "demo", "--prompt-tokens", 200, "--tokens", 12, "--dtype", "float32")
    said = here(*command, *options)
    shown = (tmp_path / "demo/index.html").read_text()
    assert str(tmp_path / "demo/index.html") in said
    assert 'aria-label="KL by method, speeches"' in shown
    sizes = [int(size.replace(",", "")) for size in re.findall(r"<p>([\d,]+) bytes", shown)]
    assert sizes[0] == 2 * 2 * 32 * 4 * 211  # the last token is never cached
    assert 0 < sizes[1] < sizes[0]
    commands = re.findall(r"^  (lowrank-kv .*)$", said, re.M)
    assert len(commands) == 3
    assert "http" not in shown  # it loads nothing


def test_a_demo_without_a_comparison_says_what_to_run(mistake, checkpoint, text_file, tmp_path):
    command = ("scripts/show_demo.py", "--checkpoint", checkpoint, "--comparison", tmp_path, "--text", text_file)
    assert "run `lowrank-kv compare` first" in mistake(*command, "--output", tmp_path / "demo")


def test_the_page_marks_the_words_that_differ_and_escapes_them(comparison):
    texts = [
        Continuation(label="full", text="a <b> c", nbytes=100),
        Continuation(label="ours", text="a d c", nbytes=10),
    ]
    [record] = [run_record.load(path) for path in (comparison / "quality").glob("*.json")]
    shown = demo_page(record, "the <end>", texts, ["next < 1"])
    assert "<p>a <mark>&lt;b&gt;</mark> c</p>" in shown
    assert "<p>a <mark>d</mark> c</p>" in shown
    assert "10 bytes, 10.0% of the full cache" in shown
    assert "… the &lt;end&gt;" in shown
    assert "<h1>What the demo made</h1>" in shown
    assert "next &lt; 1" in shown
