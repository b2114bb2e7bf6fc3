"""Texts behind a context become the tokens that they have there, also where a tokenizer puts a space before each text."""

import json

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from evaluation.tasks.choices import choice_items
from evaluation.tasks.continuation import encode_beginning, encode_behind
from evaluation.tasks.item import prompt_pieces
from lowrank_kv.utils.errors import UserError

LINES = ["The capital of France is Paris.", "Question: what is the capital of Italy?", "Answer: Rome"] * 20
CONTEXT, QUESTION, CHOICES = (
    "The capital of France is Paris.\n\n",
    "Question: what is the capital?\nAnswer:",
    (" Paris", " Rome"),
)


def trained(tokenizer, trainer, lines=LINES):
    """A tokenizer of transformers."""
    tokenizer.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def without_first_space():
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(steps)


def metaspace():
    """As Mistral's is written now: the first piece of a text has a space put before it, where it has none."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = without_first_space()
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=["<unk>", "<0x0A>"], show_progress=False)
    return trained(tokenizer, trainer)


def prepended():
    """As Llama 2's is written: a space is put before every text, one with a space of its own included."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = without_first_space()
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=["<unk>", "<0x0A>"], show_progress=False)
    return trained(tokenizer, trainer, [word for line in LINES for word in line.split()])


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace()
    lines = [line.replace(" ", "\n", 1) for line in LINES] + LINES
    trainer = trainers.UnigramTrainer(vocab_size=90, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    return trained(tokenizer, trainer, lines)


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    # Line breaks join with one another, as in Llama 3's.
    pieces = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+|\s*[\r\n]+|\s+|[^\sA-Za-z]"), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    return trained(tokenizer, trainer, ["\n\n".join(LINES)] * 3)


SENTENCEPIECE = [metaspace, prepended, unigram]


@pytest.mark.parametrize("make", SENTENCEPIECE)
def test_pieces_are_the_whole_text_where_a_space_is_put_before_it(make):
    tokenizer = make()
    for context, question in ((CONTEXT, QUESTION), (CONTEXT + QUESTION, CHOICES[0]), (CONTEXT, "\n" + QUESTION)):
        pieces = prompt_pieces(tokenizer, context, question)
        assert tokenizer.decode([*pieces[0], *pieces[1]]) == context + question
        assert [*pieces[0], *pieces[1]] == tokenizer(context + question).input_ids
    assert encode_behind(tokenizer, "") == ()


def test_an_end_of_text_that_a_tokenizer_adds_stands_in_no_prompt():
    tokenizer = byte_level()
    plain = tokenizer(CONTEXT).input_ids
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    end = tokenizer.eos_token_id
    adds = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])
    tokenizer.backend_tokenizer.post_processor = adds
    assert tokenizer(CONTEXT).input_ids == [*plain, end]
    assert encode_beginning(tokenizer, CONTEXT) == tuple(plain)
    assert prompt_pieces(tokenizer, CONTEXT, QUESTION)[0] == tuple(plain)
    assert encode_beginning(tokenizer, CONTEXT + "</s>") == (*plain, end), "this one is the text's own"


@pytest.mark.parametrize("make", SENTENCEPIECE)
def test_choices_are_the_whole_text_where_a_space_is_put_before_it(make, tmp_path):
    choices = {"text": [text.strip() for text in CHOICES], "label": ["A", "B"]}
    rows = [{"question": f"what is {word}?", "choices": choices, "answerKey": "A"} for word in ("the", "capital", "of")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make()
    for shots in (0, 1):
        for item in choice_items("arc_easy", tokenizer, str(path), shots=shots, count=2, seed=0):
            for question, continuation in zip(item.questions, item.continuations, strict=True):
                ids = [*item.context, *question, *continuation]
                text = tokenizer.decode(ids)
                assert ids == tokenizer(text).input_ids
                assert text.count("Question: what") == text.count("\n\nQuestion: what") + 1 == shots + 1
                assert text.endswith(("Answer: Paris", "Answer: Rome"))


@pytest.mark.parametrize("text", [QUESTION, *CHOICES, "\n\n" + QUESTION, "\n", "a", "", "1", ".\n"])
def test_a_tokenizer_that_puts_no_space_encodes_texts_as_they_are(text):
    tokenizer = byte_level()
    assert len(tokenizer("\n\n").input_ids) == 1
    assert encode_behind(tokenizer, text) == tuple(tokenizer(text).input_ids)
    context = CONTEXT.strip() + "\n"  # whose line break the text may not join
    assert prompt_pieces(tokenizer, context, text) == (
        tuple(tokenizer(context).input_ids),
        tuple(tokenizer(text).input_ids),
    )


def test_a_text_that_joins_with_all_that_may_stand_before_it_is_refused():
    tokenizer = Tokenizer(
        models.WordLevel({"▁a": 0, "\n": 1, "\na": 2, ".": 3, "▁\n": 4, "▁.": 5, "?": 6}, unk_token="?")
    )
    tokenizer.normalizer = normalizers.Prepend("▁")
    with pytest.raises(UserError, match="puts a space before each text, and joins 'a'"):
        encode_behind(PreTrainedTokenizerFast(tokenizer_object=tokenizer), "a")
