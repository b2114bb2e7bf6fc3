"""RULER's generator against the definitions of its tasks, and its scoring."""

import collections
import dataclasses
import json
import random
import re
import uuid
from pathlib import Path

import pytest
from byte_tokenizer import byte_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from evaluation.tasks.matching import AllContained, AnyContained
from evaluation.tasks.ruler import NEED_ESSAY, OFFLINE, longest_sample, ruler_items, ruler_task
from evaluation.tasks.ruler.needles import DEPTHS, NEEDLE_TASKS, NOISE
from evaluation.tasks.ruler.word_counts import FrequentWords
from evaluation.tasks.ruler.words import listed
from lowrank_kv.utils.errors import UserError

# A byte is a token here.
LENGTH = 6000
ESSAY = tuple(f"Sentence {i} of the essay tells of {i * i} ordinary things." for i in range(400))
NEEDLE = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def of_noise():
    """A tokenizer that learned the words of a chain and its noise."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([f"{NOISE}\nVAR"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def task(name):
    return ruler_task(name, essay=ESSAY if name in NEED_ESSAY else ())


def sample(name, tokenizer, index=0, length=None):
    return longest_sample(task(name), tokenizer, length or length_of(name), f"42:{name}", index)


def length_of(name):
    """Common words stand 30 times from 4,096 tokens on, which takes more bytes."""
    return 2 * LENGTH if name == "cwe" else LENGTH


@pytest.mark.parametrize("name", OFFLINE)
def test_samples_are_as_long_as_they_may_be_and_hold_their_answers(name, tokenizer):
    for index in range(3):
        found = sample(name, tokenizer, index)
        size = len(found.context) + len(found.question) + len(found.answer_prefix) + found.max_new_tokens
        assert found.num_tokens(tokenizer) == size <= length_of(name)
        # One unit more, a sentence or a word that stands some times, would not fit.
        assert size > length_of(name) - 250
        for reference in found.references:
            assert reference in found.context
        assert found.max_new_tokens == {"vt": 30, "cwe": 120, "fwe": 50}.get(name, 128)


@pytest.mark.parametrize("name", ["niah_single_2", "fwe", "vt"])
def test_a_chat_template_s_own_tokens_count_as_those_of_the_prompt(name):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = f"{'A system prompt. ' * 30}<user>{{{{ messages[0]['content'] }}}}</><assistant>"
    items = ruler_items(name, task(name), tokenizer, length=LENGTH, count=3, seed=1, chat=True)
    sizes = [len(item.context) + item.num_after for item in items]
    assert all(LENGTH - 250 < size <= LENGTH for size in sizes)


def test_samples_differ_from_one_another_and_are_the_same_again(tokenizer):
    for name in OFFLINE:
        contexts = [sample(name, tokenizer, index).context for index in range(3)]
        assert len(set(contexts)) == 3
        assert sample(name, tokenizer, 1).context == contexts[1]


@pytest.mark.parametrize("name", NEEDLE_TASKS)
def test_needles_are_as_many_and_of_the_kinds_that_the_task_has(name, tokenizer):
    definition = NEEDLE_TASKS[name]
    found = sample(name, tokenizer)
    needles = NEEDLE.findall(found.context)
    by_key = {}
    for kind, key, value in needles:
        assert kind == definition.value
        by_key.setdefault(key, []).append(value)
    if definition.haystack != "needles":
        assert len(by_key) == definition.num_keys
        assert {len(values) for values in by_key.values()} == {definition.num_values}
    else:
        assert len(needles) > 20
        assert len(needles) == found.context.count("\n")  # a line each, below the instruction
    # The answer's values are those of the keys that the question names, in the question's order.
    asked = re.search(r"for (.*) mentioned in the provided text", found.question).group(1)
    keys = asked.replace(", and ", ", ").split(", ")
    assert len(keys) == definition.num_queries
    assert sorted(found.references) == sorted(value for key in keys for value in by_key[key])
    one = definition.num_queries * definition.num_values == 1
    kind = definition.value.removesuffix("s") if one else definition.value
    assert found.context.startswith(
        f"{'A' if one else 'Some'} special magic {kind} {'is' if one else 'are'} hidden within the following text. Make "
        f"sure to memorize it. I will quiz you about the {kind} afterwards.\n"
    )
    are = "is" if one else "are all"
    assert found.question == f"\nWhat {are} the special magic {kind} for {asked} mentioned in the provided text?"
    assert found.answer_prefix == (
        f" The special magic {kind} for {asked} mentioned in the provided text {'is' if one else 'are'}"
    )
    for value in found.references:
        if definition.value == "numbers":
            assert re.fullmatch(r"[1-9]\d{6}", value)
        else:
            assert uuid.UUID(value).version == 4
    for key in by_key:
        if definition.key == "words":
            assert "-" in key
        else:
            assert uuid.UUID(key).version == 4


def test_four_queries_are_joined_as_a_list(tokenizer):
    assert re.search(r"for \S+, \S+, \S+, and \S+ mentioned", sample("niah_multiquery", tokenizer).question)


def test_haystacks_are_what_they_are_called(tokenizer):
    noise = sample("niah_single_1", tokenizer).context.split("\n")[1:]
    assert noise.count(NOISE) == len(noise) - 1
    essay = NEEDLE.sub("", sample("niah_single_2", tokenizer).context.split("\n", 1)[1]).replace("  ", " ").strip()
    assert essay in " ".join(ESSAY * 2)
    assert len(DEPTHS) == 40
    assert (DEPTHS[0], DEPTHS[1], DEPTHS[-1]) == (0, 3, 100)


def test_a_needle_does_not_always_stand_at_the_same_place(tokenizer):
    places = []
    for index in range(12):
        context = sample("niah_single_1", tokenizer, index).context
        places.append(NEEDLE.search(context).start() / len(context))
    assert min(places) < 0.35
    assert max(places) > 0.65


def test_a_chain_of_variables_can_be_followed(tokenizer):
    found = sample("vt", tokenizer)
    example, asked = found.context.rsplit("Memorize and track", 1)
    for text, answers, letters in ((example, None, 3), (asked, found.references, 5)):
        first = re.findall(r"VAR ([A-Z]+) = (\d{5})\n", text)
        assert len(first) == 1
        chain = [first[0][0]]
        for after, before in re.findall(r"VAR ([A-Z]+) = VAR ([A-Z]+) ", text):
            assert before == chain[-1]
            chain.append(after)
        assert len(chain) == 5
        assert {len(name) for name in chain} == {letters}
        assert answers in (None, chain)
        if answers is None:
            assert text.rstrip().endswith(" ".join(chain))
            assert f"assigned the value {first[0][1]}, they are: " in text
        else:
            assert f"assigned the value {first[0][1]} in the text above." in found.question


def test_the_example_of_variables_has_500_tokens_however_many_are_generated(of_noise):
    definition, shown = task("vt"), set()
    for new_tokens in (definition.max_new_tokens, 100, 400):
        longer = dataclasses.replace(definition, max_new_tokens=new_tokens)
        context = longer.sample(random.Random(1), 0, 30, 4096, of_noise).context
        shown.add(context.rsplit("\n\nMemorize and track", 1)[0])
    [example] = shown
    prompt = example.rsplit("they are: ", 1)[0] + "they are: "
    assert len(of_noise(prompt).input_ids) <= 500 < len(of_noise(NOISE + "\n" + prompt).input_ids)
    # RULER's own example has two spaces in front of its answer, one of them its prompt's last character.
    assert re.fullmatch(r".*they are:  [A-Z]{3}( [A-Z]{3}){4}", example, re.DOTALL)


@pytest.mark.parametrize(("length", "times", "example"), [(4000, (6, 1), (20, 3, 1)), (12000, (30, 3), (40, 10, 3))])
def test_common_words_stand_more_often(tokenizer, length, times, example):
    found = sample("cwe", tokenizer, length=length)
    shown, asked = (
        re.findall(r"\d+\. (\S+)", text.split("Question:")[0]) for text in found.context.split("most often.\n")[1:]
    )
    counts = {word: asked.count(word) for word in asked}
    assert [counts[word] for word in found.references] == [times[0]] * 10
    assert {counts[word] for word in counts if word not in found.references} == {times[1]}
    words, common, other = example
    counts = sorted((shown.count(word) for word in set(shown)), reverse=True)
    assert counts == [common] * 10 + [other] * (words - 10)


def test_common_words_are_as_many_as_asked_for_beyond_the_list_of_words(tokenizer):
    definition, listed_words = task("cwe"), set(listed("NOUNS", "ADJECTIVES", "VERBS"))
    least, most = definition.units(0, 1 << 18)
    assert least < len(listed_words) + 500 < most
    found = definition.sample(random.Random(0), 0, len(listed_words) + 500, 1 << 18, tokenizer)
    # By the numbers: some words of the list have a space in them.
    asked = re.split(r"(?:^| )\d+\. ", found.context.split("most often.\n")[2])[1:]
    counts = collections.Counter(asked)
    assert len(counts) == len(listed_words) + 500
    assert [counts.pop(word) for word in found.references] == [30] * 10
    assert set(counts.values()) == {3}
    assert all("-" in word for word in set(counts) - listed_words)


def test_coded_words_fall_in_frequency(tokenizer):
    found = sample("fwe", tokenizer)
    coded = found.context.rsplit("coded words. ", 1)[1].split(" ")
    counts = {word: coded.count(word) for word in coded}
    ranked = sorted(counts, key=counts.get, reverse=True)
    assert ranked[0] == "..."
    assert ranked[1:4] == found.references
    assert all(len(word) == 6 for word in ranked[1:])
    # By hand: ζ(2) = π²/6 = 1.644934; of 1,000 units the k-th stands ⌊1000 / (1.644934 k²)⌋ times.
    assert [FrequentWords().times(k, 1000) for k in (1, 2, 3, 4, 5)] == [607, 151, 67, 37, 24]


@pytest.fixture
def squad(tmp_path):
    path = tmp_path / "squad.json"
    articles = [
        {
            "paragraphs": [
                {
                    "context": f"Paragraph {p} of article {a} says that the river {a}{p} is {a + p} miles long.",
                    "qas": [
                        {"question": f"How long is river {a}{p}?", "answers": [{"text": f"{a + p} miles"}]},
                        {"question": "Who knows?", "answers": [], "is_impossible": True},
                    ],
                }
                for p in range(4)
            ]
        }
        for a in range(6)
    ]
    path.write_text(json.dumps({"data": articles}))
    return str(path)


@pytest.fixture
def hotpot(tmp_path):
    path = tmp_path / "hotpot.json"
    rows = [
        {
            "question": f"Which is the {i}-th?",
            "answer": f"answer{i}",
            "supporting_facts": [[f"T{i}a", 0], [f"T{i}b", 1]],
            "context": [[f"T{i}{c}", [f"Sentence of {i}{c}. ", f"It has answer{i}." * (c == "b")]] for c in "xaybz"],
        }
        for i in range(5)
    ]
    path.write_text(json.dumps(rows))
    return str(path)


def test_squad_questions_stand_among_documents_of_their_article_and_others(tokenizer, squad):
    items = ruler_items("qa_1", ruler_task("qa_1", file=squad), tokenizer, length=1500, count=8, seed=0)
    places = []
    for item in items:
        context = tokenizer.decode(item.context)
        question = tokenizer.decode(item.question)
        river = re.search(r"How long is river (\d)(\d)\?", question)
        documents = re.split(r"Document \d+:\n", context)[1:]
        right = [i for i, document in enumerate(documents) if f"the river {river[1]}{river[2]} is" in document]
        assert len(right) == 1
        places += right
        assert item.references == (f"{int(river[1]) + int(river[2])} miles",)
        assert sum(f"of article {river[1]} " in document for document in documents) == 4
        assert len(item.context) + len(item.question) + 32 <= 1500
        assert item.metric.name == AnyContained.name
    assert len(set(places)) > 3  # not always at the same place


def test_questions_about_one_paragraph_are_drawn_together(tokenizer, squad, tmp_path):
    content = json.loads(Path(squad).read_text())
    for paragraph in content["data"][0]["paragraphs"][:2]:
        paragraph["qas"] = [{"question": f"{i}?", "answers": [{"text": "river"}]} for i in range(3)]
    path = tmp_path / "several.json"
    path.write_text(json.dumps(content))
    items = ruler_items("qa_1", ruler_task("qa_1", file=str(path)), tokenizer, length=1500, count=8, seed=0)
    first, second, *others = [item.cluster for item in items][::3]
    assert [item.cluster for item in items] == [first] * 3 + [second] * 3 + [others[0], items[7].cluster]
    assert len({first, second, others[0], items[7].cluster}) == 4


def test_hotpot_keeps_what_holds_the_answer_however_short_the_prompt(tokenizer, hotpot):
    for length in (640, 900):
        items = ruler_items("qa_2", ruler_task("qa_2", file=hotpot), tokenizer, length=length, count=5, seed=0)
        for i, item in enumerate(items):
            context = tokenizer.decode(item.context)
            assert f"T{i}a\n" in context
            assert f"It has answer{i}." in context
    assert "Document 5:" in context


def test_scores_by_hand():
    assert AllContained().score("They are Red and GREEN.", ["red", "green", "blue", "yellow"]) == 0.5
    assert AllContained().score("nothing", ["red"]) == 0
    assert AnyContained().score("They are Red and GREEN.", ["blue", "green"]) == 1
    assert AnyContained().score("nothing", ["blue", "green"]) == 0
    assert AllContained().is_settled("red green", ["Red", "green"])
    assert not AllContained().is_settled("red", ["red", "green"])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qa_1", {}, "`file` must be given for `qa_1`: squad's published JSON"),
        ("qa_1", {"file": "nowhere.json"}, "cannot read the questions `nowhere.json`"),
        ("niah_single_2", {}, "`essay` must be given for `niah_single_2`"),
    ],
)
def test_what_is_missing_is_named(name, options, message):
    with pytest.raises(UserError, match=message):
        ruler_task(name, **options)


def test_a_file_of_another_form_is_named(tmp_path):
    path = tmp_path / "squad.json"
    path.write_text("[1]")
    with pytest.raises(UserError, match="is not squad's published JSON"):
        ruler_task("qa_1", file=str(path))
    path.write_text('{"data": []}')
    with pytest.raises(UserError, match="squad.json` has no question with an answer; check `file`"):
        ruler_task("qa_1", file=str(path))


def test_a_length_that_is_too_short_is_refused(tokenizer):
    with pytest.raises(UserError, match="`length` 300 leaves room for 0 of the 2 samples of `vt`"):
        ruler_items("vt", task("vt"), tokenizer, length=300, count=2, seed=0)


def test_a_short_essay_is_repeated_until_the_prompt_is_as_long_as_it_says(tokenizer):
    short = ruler_task("niah_single_2", essay=ESSAY[:30])
    [item] = ruler_items("niah_single_2", short, tokenizer, length=LENGTH, count=1, seed=42)
    assert 0.95 * LENGTH < len(item.context) + item.num_after <= LENGTH
