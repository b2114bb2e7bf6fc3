"""LongBench's metrics against cases worked by hand, and its runner on files of the published form."""

import json
from pathlib import Path

import pytest
from byte_tokenizer import byte_tokenizer

from evaluation.tasks.longbench import NAMES, longbench_items, without_middle
from evaluation.tasks.longbench.datasets import DATASETS
from evaluation.tasks.longbench.metrics import (
    LongBenchMetric,
    classification,
    code_similarity,
    count,
    f1,
    f1_zh,
    retrieval,
    retrieval_zh,
    rouge,
    rouge_zh,
)
from lowrank_kv.utils.errors import UserError


def test_f1_by_hand():
    # "cat sat" and "cat sat down": 2 common of 2 and 3 words.
    assert f1("The cat sat!", "a cat sat down") == pytest.approx(2 * 2 / (2 + 3))
    assert f1("dog", "cat") == 0
    assert f1("", "cat") == 0
    # Words count as often as they stand in both: 1 common of 2 and 1.
    assert f1("yes yes", "Yes.") == pytest.approx(2 / 3)


def test_f1_of_chinese_words_by_hand():
    # 我 来到 北京 and 我 在 北京: 2 common of 3 and 3; marks do not count.
    assert f1_zh("我来到北京。", "我在北京") == pytest.approx(2 / 3)


def test_rouge_by_hand():
    # The longest common subsequence of "a b c d" and "a c e" is "a c": precision 2/4, recall 2/3.
    assert rouge("a b c d", "a c e") == pytest.approx(2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3), abs=1e-6)
    # Sentence by sentence: "x y" in the first, "z" in the second; all 3 words of the reference, 3 of the text's 4.
    assert rouge("x q y. z", "x y. z") == pytest.approx(2 * 0.75 / 1.75, abs=1e-6)
    # Different words count once each.
    assert rouge("a a a", "a") == pytest.approx(1, abs=1e-6)
    assert rouge("", "a") == 0
    assert rouge("...", "a") == 0
    # 我 来到 北京 and 我 在 北京.
    assert rouge_zh("我来到北京", "我在北京") == pytest.approx(2 / 3, abs=1e-6)


def test_classes_by_hand():
    classes = ["Other location", "location", "City", "State"]
    assert classification("City", "City", classes) == 1
    assert classification("City or State", "City", classes) == 0.5
    # A class whose name is a part of the right one's does not count; the other way round it does.
    assert classification("Other location", "Other location", classes) == 1
    assert classification("Other location", "location", classes) == 0.5
    assert classification("Country", "City", classes) == 0


def test_counts_and_paragraphs_by_hand():
    assert count("There are 7, not 8 and not 9; 7.", "7") == 0.5
    assert count("none", "7") == 0
    assert count("17", "7") == 0
    assert retrieval("Paragraph 3", "Paragraph 3") == 1
    assert retrieval("3 or 4 or 5", "Paragraph 4") == pytest.approx(1 / 3)
    assert retrieval_zh("段落12", "段落12") == 1


def test_code_by_hand():
    # Only the first line that is no comment: "x = 1" and "x = 2" share 4 of 5 characters.
    assert code_similarity("\n# a comment\n```\nx = 1\ny", "x = 2") == 0.8
    assert code_similarity("# only\n// comments", "x = 2") == 0


def test_the_best_reference_and_the_first_line_count():
    metric = LongBenchMetric("F1", first_line=True)
    assert metric.score("\n\nParis\nLyon", ["Lyon", "Paris"]) == 1
    assert metric.score("\nLyon\nParis", ["Paris"]) == 0
    assert metric.is_settled("\nParis\n", ["Paris"])
    assert not metric.is_settled("\nParis", ["Paris"])
    assert not LongBenchMetric("F1").is_settled("Paris\n", ["Paris"])


def test_data_sets_are_the_published_ones():
    assert len(NAMES) == 21
    assert {name: DATASETS[name].max_new_tokens for name in ("narrativeqa", "gov_report", "trec", "musique")} == {
        "narrativeqa": 128,
        "gov_report": 512,
        "trec": 64,
        "musique": 32,
    }
    without_question = {name for name in NAMES if "{input}" not in DATASETS[name].prompt}
    assert without_question == {"gov_report", "multi_news", "vcsum", "passage_count", "lcc"}
    assert {name for name in NAMES if DATASETS[name].first_line} == {"trec", "triviaqa", "samsum", "lsht"}
    as_they_are = {name for name in NAMES if not DATASETS[name].chat}
    assert as_they_are == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}


@pytest.fixture
def written(tmp_path):
    def call(**changed):
        row = {
            "input": "What colour is it?",
            "context": "It is {blue}. " * 40,
            "answers": ["blue", "navy"],
            "all_classes": None,
            "length": 120,
            "dataset": "musique",
        }
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row | changed) + "\n")
        return str(path)

    return call


def test_a_row_becomes_a_context_and_a_question(written):
    tokenizer = byte_tokenizer()
    [item] = longbench_items("musique", tokenizer, written(), count=None, max_length=4000)
    context, question = tokenizer.decode(item.context), tokenizer.decode(item.question)
    assert context.startswith("Answer the question based on the given passages.")
    assert context.endswith("The following are given passages.\n" + "It is {blue}. " * 40)
    assert question.startswith("\n\nAnswer the question based on the given passages.")
    assert question.endswith("\n\nQuestion: What colour is it?\nAnswer:")
    assert item.references == ("blue", "navy")
    assert item.max_new_tokens == 32


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("musique", {"answers": "blue"}, "row 1 has 'blue' as `answers`, which must be a list of texts"),
        ("musique", {"input": None}, "row 1 has None as `input`, which must be a text"),
        ("trec", {}, "row 1 has None as `all_classes`, which must be a list of texts"),
        ("trec", {"all_classes": "blue navy"}, "row 1 has 'blue navy' as `all_classes`, which must be a list of texts"),
        ("passage_retrieval_en", {}, r"row 1 has the answers \['blue', 'navy'\], which do not all name a paragraph"),
    ],
)
def test_rows_of_another_form_are_named(written, name, changed, message):
    with pytest.raises(UserError, match=message):
        longbench_items(name, byte_tokenizer(), written(**changed), count=None, max_length=4000)


def test_rows_of_one_context_are_drawn_together(written):
    path = Path(written())
    row = json.loads(path.read_text())
    rows = [row, row | {"input": "How large is it?"}, row | {"context": "It is {red}. " * 40}, row | {"input": "Why?"}]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    items = longbench_items("musique", byte_tokenizer(), str(path), count=None, max_length=4000)
    assert [item.cluster for item in items] == [1, 1, 3, 1]


def test_the_middle_of_a_long_prompt_is_left_out(written):
    tokenizer = byte_tokenizer()
    [item] = longbench_items("musique", tokenizer, written(), count=1, max_length=532)
    prompt = tokenizer.decode((*item.context, *item.question))
    assert len(prompt) == 500
    [full] = longbench_items("musique", tokenizer, written(), count=1, max_length=4000)
    whole = tokenizer.decode((*full.context, *full.question))
    assert prompt == whole[:250] + whole[-250:]
    assert item.question == full.question


@pytest.mark.parametrize("chat", [False, True])
def test_a_length_without_room_for_a_prompt_is_refused(written, chat):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "<{{ messages[0]['content'] }}>"
    own = len(DATASETS["gov_report"].prompt.replace("{context}", "")) + 2 * chat
    options = {"count": 1, "chat": chat}
    for length in (100, 512, own + 512):
        with pytest.raises(UserError, match=f"`length` must be above {own + 512}, .* 512 of an answer; got {length}"):
            longbench_items("gov_report", tokenizer, written(), max_length=length, **options)
    [item] = longbench_items("gov_report", tokenizer, written(), max_length=own + 513, **options)
    assert len(item.context) + len(item.question) == own + 1
    longbench_items("gov_report", tokenizer, written(), max_length=own + 2, max_new_tokens=1, **options)


@pytest.mark.parametrize(
    ("length", "context", "question"),
    [(9, "abcdef", "xyz"), (7, "abcd", "xyz"), (6, "abc", "xyz"), (4, "ab", "yz"), (1, "a", "")],
)
def test_halves_by_hand(length, context, question):
    found = without_middle("abcdef", "xyz", length)
    assert tuple("".join(each) for each in found) == (context, question)
