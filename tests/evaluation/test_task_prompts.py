"""How a task's prompts become tokens, and where an answer to them ends."""

import torch
from byte_tokenizer import byte_tokenizer
from methods import tiny_model

from evaluation.reading import full_cache
from evaluation.tasks.item import prompt_pieces
from evaluation.tasks.prompts import Prompts


def test_a_chat_template_goes_around_context_and_question():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    pieces = prompt_pieces(tokenizer, "The context.", " A question?", " It is", chat=True)
    assert [tokenizer.decode(each) for each in pieces] == ["<user>The context.", " A question?</><assistant>It is"]
    bare = prompt_pieces(tokenizer, "The context.", " A question?", " It is")
    assert [tokenizer.decode(each) for each in bare] == ["The context.", " A question? It is"]


def test_a_template_that_tells_the_date_asks_the_same_on_every_day():
    tokenizer = byte_tokenizer()
    date = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %} {{ date_string }}"
    tokenizer.chat_template = date + "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
    context, question = prompt_pieces(tokenizer, "It is.", " What?", chat=True)
    assert tokenizer.decode([*context, *question]) == "26 Jul 2024 26 Jul 2024<It is. What?>"


def test_generation_stops_where_an_answer_is_settled_or_ends():
    model, tokenizer = tiny_model(vocab_size=257, eos_token_id=0), byte_tokenizer()
    fresh = Prompts(model, {"full": lambda: full_cache(model)}, step=16).of("full")
    prompt = [30, 31, 32, 33]
    ids = torch.tensor([prompt])
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, 4:]
    whole = fresh(prompt).generate(tokenizer, 12)
    assert whole == tokenizer.decode(expected, skip_special_tokens=True)
    reader = fresh(prompt)
    assert reader.generate(tokenizer, 12, is_done=lambda text: len(text) >= 3) == whole[:3]
    assert reader.num_read == 4 + 2  # the last token of an answer is not read
    model.generation_config.eos_token_id = [int(expected[5])]
    cut = tokenizer.decode(expected[: expected.tolist().index(int(expected[5]))], skip_special_tokens=True)
    assert fresh(prompt).generate(tokenizer, 12) == cut
