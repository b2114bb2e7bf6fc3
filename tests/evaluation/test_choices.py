"""Multiple choice, lookup and boxed answers: files of every form, and log-likelihoods through a cache."""

import gzip
import json
import math

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from methods import tiny_model

from evaluation.reading import full_cache
from evaluation.tasks.boxed import boxed_items
from evaluation.tasks.choices import choice_items, read_choices
from evaluation.tasks.lookup import lookup_items
from evaluation.tasks.matching import BeginsWith, BoxedInteger, boxed_integer
from evaluation.tasks.prompts import Prompts
from lowrank_kv.utils.errors import UserError


@pytest.fixture
def written(tmp_path):
    def call(*rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return call


ARC = {
    "id": "1",
    "question": {"stem": "Why?", "choices": [{"text": "so", "label": "A"}, {"text": "for fun", "label": "B"}]},
    "answerKey": "B",
}
ARC_OF_HUB = {"question": "Why?", "choices": {"text": ["so", "for fun"], "label": ["1", "2"]}, "answerKey": "2"}
BOOK = {"question_stem": "Why", "choices": {"text": ["so", "for fun"], "label": ["A", "B"]}, "answerKey": "B"}
PIQA = {"goal": "Why?", "sol1": "so", "sol2": "for fun", "label": 1}
WINO = {"sentence": "He saw _ and ran.", "option1": "it", "option2": "Ann", "answer": "2"}
SWAG = {
    "activity_label": "Running",
    "ctx_a": "A man runs [header] fast.",
    "ctx_b": "he",
    "endings": ["stops.", "[substeps] goes on."],
    "label": 1,
}


@pytest.mark.parametrize(
    ("name", "row", "questions", "continuations"),
    [
        ("arc_easy", ARC, "Question: Why?\nAnswer:", (" so", " for fun")),
        ("arc_challenge", ARC_OF_HUB, "Question: Why?\nAnswer:", (" so", " for fun")),
        ("openbookqa", BOOK, "Why", (" so", " for fun")),
        ("piqa", PIQA, "Question: Why?\nAnswer:", (" so", " for fun")),
        ("winogrande", WINO, ("He saw it", "He saw Ann"), (" and ran.", " and ran.")),
        ("hellaswag", SWAG, "Running: A man runs fast. He", (" stops.", "  goes on.")),
    ],
)
def test_rows_become_questions(written, name, row, questions, continuations):
    [found] = read_choices(name, written(row))
    assert found.questions == ([questions] * 2 if isinstance(questions, str) else list(questions))
    assert found.continuations == list(continuations)
    assert found.right == 1
    assert found.shown == found.questions[1] + found.continuations[1]


def test_labels_may_have_a_file_of_their_own(written, tmp_path):
    row = {key: value for key, value in PIQA.items() if key != "label"}
    labels = tmp_path / "labels.lst"
    labels.write_text("0\n1\n")
    found = read_choices("piqa", written(row, row), str(labels))
    assert [each.right for each in found] == [0, 1]
    labels.write_text("1\n2\n")
    assert [each.right for each in read_choices("arc_challenge", written(ARC_OF_HUB, ARC_OF_HUB), str(labels))] == [
        0,
        1,
    ]
    with pytest.raises(UserError, match="`labels` must be as long as .*, which has 1 rows"):
        read_choices("piqa", written(row), str(labels))


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("piqa", {"goal": "x", "sol1": "y"}, "row 1 has no `sol2`, only goal, sol1"),
        ("piqa", PIQA | {"label": 2}, "row 1 names the answer 2, which is none of 0, 1"),
        ("piqa", PIQA | {"goal": None}, "row 1 has None as `goal`, which must be a text"),
        ("winogrande", WINO | {"sentence": "He ran."}, "row 1 has the sentence 'He ran.', without a gap `_`"),
        ("hellaswag", SWAG | {"endings": "wxyz"}, "row 1 has 'wxyz' as `endings`, which must be a list of texts"),
        ("arc_easy", {"question": "Why?", "answerKey": "A"}, "row 1 has no `choices`, only question, answerKey"),
        ("arc_easy", ARC_OF_HUB | {"choices": ["so"]}, "as `choices`, which must be a list of objects"),
        (
            "arc_easy",
            ARC_OF_HUB | {"choices": {"text": ["so"], "label": ["1", "2"]}},
            "row 1 has 2 labels of 1 choices",
        ),
    ],
)
def test_rows_of_another_form_are_named(written, name, row, message):
    with pytest.raises(UserError, match=message):
        read_choices(name, written(row))


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(UserError, match="cannot read `nowhere.jsonl`: No such file"):
        read_choices("piqa", "nowhere.jsonl")
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\nnot json\n')
    with pytest.raises(UserError, match="line 2 is not JSON"):
        read_choices("piqa", str(path))
    path.write_text('{"a": 1}\n["one", "two"]\n')
    with pytest.raises(UserError, match="line 2 must hold one object; got list; check `file`"):
        read_choices("piqa", str(path))
    path.write_text("\n")
    with pytest.raises(UserError, match="x.jsonl` has no rows; check `file`"):
        read_choices("piqa", str(path))
    path.write_bytes("é".encode("latin1"))
    with pytest.raises(UserError, match="is not UTF-8 text"):
        read_choices("piqa", str(path))
    packed = tmp_path / "x.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"a": 1}')[:-9])
    with pytest.raises(UserError, match=r"cannot read `.*x.jsonl.gz`: Compressed file ended"):
        read_choices("piqa", str(packed))
    content = bytearray(gzip.compress(b'{"a": 1}' * 99))
    content[10] |= 6  # a kind of block that there is none of
    packed.write_bytes(content)
    with pytest.raises(UserError, match=r"cannot read `.*x.jsonl.gz`: Error -3 while decompressing data"):
        read_choices("piqa", str(packed))


def rows(count):
    texts = [{"goal": f"Question {i}?", "sol1": f"no {i}", "sol2": f"yes, {i * 37}"} for i in range(count)]
    return [text | {"label": i % 2} for i, text in enumerate(texts)]


def test_examples_are_not_asked_and_likelihoods_are_those_of_one_pass(written):
    model, tokenizer = tiny_model(vocab_size=257, max_position_embeddings=2048), byte_tokenizer()
    items = choice_items("piqa", tokenizer, written(*rows(8)), shots=3, count=None, seed=1)
    assert len(items) == 5
    context = tokenizer.decode(items[0].context)
    assert context.count("Question: ") == context.count("\nAnswer: ") == 3
    assert {item.context for item in items} == {items[0].context}
    fresh = Prompts(model, {"full": lambda: full_cache(model)}, step=16).of("full")
    shared = fresh(items[0].context)
    for item in items:
        question = tokenizer.decode(item.questions[0]).split("\n")[0]
        assert question not in context
        expected = []
        for question_ids, continuation in zip(item.questions, item.continuations, strict=True):
            ids = torch.tensor([[*item.context, *question_ids, *continuation]])
            with torch.no_grad():
                log_TV = model(ids).logits[0].log_softmax(-1)
            begin = ids.shape[1] - len(continuation)
            expected.append(float(log_TV[begin - 1 : -1].gather(-1, ids[0, begin:, None]).sum()))
            reader = shared.copy()
            reader.read(question_ids)
            assert reader.log_likelihood(continuation)[0] == pytest.approx(expected[-1], abs=1e-3)
        best = expected.index(max(expected))
        lengths = [len(text) for text in item.texts]
        divided = [value / length for value, length in zip(expected, lengths, strict=True)]
        for score in (item.answer_after(shared), item.answer_within(fresh)):
            assert score.score == score.values["acc"] == float(best == item.right)
            assert score.values["acc_norm"] == float(divided.index(max(divided)) == item.right)
            assert score.answer == item.texts[best]
            assert score.cache_bytes == score.full_bytes
    assert shared.num_read == len(items[0].context)  # the shared context stays as it is


def test_a_likely_continuation_is_told_to_be_greedy():
    model = tiny_model()
    reader = Prompts(model, {"full": lambda: full_cache(model)}, step=16).of("full")([5, 6, 7])
    likely = int(reader.logits_V.argmax())
    log, greedy = reader.copy().log_likelihood([likely])
    assert greedy
    assert log == pytest.approx(float(reader.logits_V.log_softmax(-1).max()), abs=1e-5)
    assert math.exp(log) > 1 / 97
    assert not reader.copy().log_likelihood([(likely + 1) % 97])[1]


@pytest.mark.parametrize(
    ("name", "rows", "clusters"),
    [
        (
            "winogrande",
            [WINO | {"qID": "3ABC-1", "sentence": "Bob ran as _ won."}, WINO | {"qID": "3ABC-2"}, WINO | {"qID": "3A"}],
            2,
        ),
        # Without an identifier, sentences that are equal up to the gap.
        ("winogrande", [WINO, WINO | {"sentence": "He saw _ and sat."}, WINO | {"sentence": "She saw _ and ran."}], 2),
        ("piqa", [PIQA, PIQA | {"sol1": "since"}, PIQA | {"goal": "How?"}], 2),
        ("arc_easy", [ARC, ARC, ARC | {"question": ARC["question"] | {"stem": "How?"}}], 2),
        (
            "hellaswag",
            [SWAG | {"source_id": "v_1"}, SWAG | {"source_id": "v_1", "ctx_b": "she"}, SWAG | {"source_id": "v_2"}],
            2,
        ),
        ("hellaswag", [SWAG, SWAG | {"endings": ["sits.", "runs."]}, SWAG | {"ctx_b": "she"}], 2),
    ],
)
def test_questions_about_the_same_are_drawn_together(written, name, rows, clusters):
    items = choice_items(name, byte_tokenizer(), written(*rows), shots=0, count=None, seed=0)
    numbers = [item.cluster for item in items]
    assert len(set(numbers)) == clusters
    about = [each.about for each in read_choices(name, written(*rows))]
    assert about[0] == about[1] != about[2]


def test_too_few_rows_are_refused(written):
    with pytest.raises(UserError, match="`items` must be at most 5, which .* has besides the `shots`; got 6"):
        choice_items("piqa", byte_tokenizer(), written(*rows(8)), shots=3, count=6, seed=0)
    with pytest.raises(UserError, match="`shots` must be below 8, the rows of .*; got 16"):
        choice_items("piqa", byte_tokenizer(), written(*rows(8)), shots=16, count=None, seed=0)


def test_lookup_asks_for_facts_that_stand_twice_in_its_list():
    tokenizer = byte_tokenizer()
    items = lookup_items(tokenizer, count=7, facts=10, questions=3, seed=0)
    assert len(items) == 7
    assert [item.cluster for item in items] == [0, 0, 0, 1, 1, 1, 2]
    assert len({item.context for item in items}) == 3
    for item in items:
        context, question = tokenizer.decode(item.context), tokenizer.decode(item.question)
        assert context.count("\n") == 20
        assert context.count(f'{question}{item.references[0]}",\n') == 2
        assert item.max_new_tokens == 3
    asked = [tokenizer.decode(item.question) for item in items[:3]]
    assert len(set(asked)) == 3


def test_the_answer_to_a_lookup_is_a_beginning():
    metric = BeginsWith()
    assert metric.score('482",', ["482"]) == 1
    assert metric.score(" 482", ["482"]) == 0
    assert metric.is_settled("49", ["482"])
    assert not metric.is_settled("48", ["482"])
    assert metric.is_settled("482", ["482"])


@pytest.mark.parametrize(
    ("text", "integer"),
    [
        (r"so \boxed{204}.", 204),
        (r"\boxed{" + 5000 * "1" + "}", None),
        (r"\boxed{1} no, \boxed{ 025 }", 25),
        (r"\boxed{1{,}234}", 1234),
        (r"\boxed{1,234}", 1234),
        (r"\boxed{1\,234\,567}", 1234567),
        (r"\boxed{-1 234}", -1234),
        (r"\boxed{1234}", 1234),
        # Several numbers are no integer.
        (r"\boxed{1,2}", None),
        (r"\boxed{20,4}", None),
        (r"\boxed{1 2}", None),
        (r"\boxed{1, 234}", None),
        (r"\boxed{12,34,567}", None),
        (r"\boxed{1234,567}", None),
        (r"\boxed{0,123}", None),
        (r"\boxed{" + "1" + 1400 * ",111" + "}", None),
        (r"\boxed{-3}", -3),
        (r"\boxed{$7$}", 7),
        (r"\boxed{7\text{ apples}}", 7),
        (r"\boxed{\frac{1}{2}}", None),
        (r"\boxed{}", None),
        ("204", None),
        (r"\boxed{20", None),
    ],
)
def test_boxed_integers(text, integer):
    assert boxed_integer(text) == integer
    assert BoxedInteger().score(text, ["204"]) == float(integer == 204)


def test_problems_are_read_from_either_key(written):
    path = written({"problem": "1+1?", "answer": 2}, {"question": "2+2?", "answer": "004"})
    items = boxed_items(byte_tokenizer(), path, count=None, max_new_tokens=9, chat=False)
    assert [item.references for item in items] == [("2",), ("004",)]
    assert BoxedInteger().score(r"\boxed{4}", items[1].references) == 1
    with pytest.raises(UserError, match="row 1 has the answer 'x', and an integer is needed"):
        boxed_items(byte_tokenizer(), written({"problem": "?", "answer": "x"}), count=1, max_new_tokens=9, chat=False)
    with pytest.raises(UserError, match="`items` must be at most 1, the rows of"):
        boxed_items(byte_tokenizer(), path, count=2, max_new_tokens=9, chat=False)
    with pytest.raises(UserError, match="`chat` is true, and this model's tokenizer has no chat template"):
        boxed_items(byte_tokenizer(), written({"problem": "?", "answer": 1}), count=1, max_new_tokens=9, chat=True)
