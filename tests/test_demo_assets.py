"""What the demo's texts are made from."""

import runpy
from pathlib import Path

import pytest

from lowrank.errors import UserError

fetch = runpy.run_path(str(Path(__file__).parent.parent / "scripts/fetch_demo_assets.py"))

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


def test_a_damaged_file_is_refused():
    with pytest.raises(UserError, match="dump has SHA-256 .*, expected 00; the file is damaged or replaced"):
        fetch["check_digest"]("dump", b"something else", "00")
