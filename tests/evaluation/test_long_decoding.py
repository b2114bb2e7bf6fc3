"""Where the positions of a long text are divided, and whose texts they are."""

from byte_tokenizer import byte_tokenizer
from methods import tiny_model

from evaluation.tasks.long_decoding import TEXTS, long_items, position_edges


def test_positions_double_from_512():
    assert position_edges(8192) == (512, 1024, 2048, 4096, 8192)
    assert position_edges(600) == (512, 600)
    assert position_edges(100) == (100,)


def test_another_model_of_the_same_configuration_writes_texts_of_its_own(tmp_path):
    tokenizer, texts = byte_tokenizer(), []
    for seed in (0, 1, 0):
        [item] = long_items(
            tiny_model(seed, vocab_size=len(tokenizer)),
            tokenizer,
            ["Tell me."],
            tmp_path,
            length=20,
            temperature=1.0,
            seed=0,
            chat=False,
            edges=position_edges(20),
        )
        texts.append(item.text)
    assert texts[0] == texts[2] != texts[1]
    assert len(list((tmp_path / TEXTS).iterdir())) == 2
