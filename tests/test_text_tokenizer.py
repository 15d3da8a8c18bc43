"""Tokenizers as tables: the chat frame, bytes of tokens, the ban on special tokens; the tiny tokenizer."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from ragen_jax.text import tiny
from ragen_jax.text.tokenizer import ChatFrame, TextTokenizer, TokenizerError, load_tokenizer
from tests.tokenizers import NAMES, REAL, get_tokenizer

TEXT = "Turn 3.\nP_OG\n#√XS\nYou have 5 actions. naïve 漢字 🙂 <think>a</think><answer>Left || Up</answer>\n"


@pytest.mark.parametrize("name", NAMES)
def test_frame_is_the_chat_template(name):
    tokenizer = get_tokenizer(name)
    frame = tokenizer.frame
    chat = [{"role": "system", "content": "Be good."}, {"role": "user", "content": "Turn 1."}]
    want = tokenizer.hf.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    opening = frame.system_open + "Be good." + frame.system_close
    assert opening + frame.user_open + "Turn 1." + frame.user_close == want

    chat += [{"role": "assistant", "content": "Hm."}, {"role": "user", "content": "Turn 2."}]
    want = tokenizer.hf.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    turns = "".join(
        frame.user_open + f"Turn {n}." + frame.user_close + ("Hm." + frame.eot) * (2 - n) for n in (1, 2)
    )
    assert opening + turns == want
    assert frame == ChatFrame(
        system_open="<|im_start|>system\n",
        system_close="<|im_end|>",
        user_open="\n<|im_start|>user\n",
        user_close="<|im_end|>\n<|im_start|>assistant\n",
        eot="<|im_end|>",
    )
    assert tokenizer.encode(frame.eot) == [tokenizer.eot_id]


@pytest.mark.parametrize("name", NAMES)
def test_ids_bytes_and_text(name):
    tokenizer = get_tokenizer(name)
    ids = tokenizer.encode(TEXT + tokenizer.frame.eot)
    assert ids == tokenizer.hf.encode(TEXT + tokenizer.frame.eot, add_special_tokens=False)
    assert tokenizer.decode(ids) == TEXT + tokenizer.frame.eot
    data, offsets = tokenizer.byte_tables(tokenizer.vocab_size + 5)
    assert offsets.shape == (tokenizer.vocab_size + 6,)
    assert (data.dtype, offsets.dtype) == (np.uint8, np.int32)
    spelled = b"".join(data[offsets[i] : offsets[i + 1]].tobytes() for i in ids)
    assert spelled == TEXT.encode()  # the end-of-turn token has no bytes
    assert (np.diff(offsets)[tokenizer.vocab_size :] == 0).all()


@pytest.mark.parametrize("name", ["tiny", "qwen2_5", "qwen3"])  # SmolLM2 lacks some
def test_every_byte_is_a_token(name):
    data, offsets = get_tokenizer(name).byte_tables()
    single = np.flatnonzero(np.diff(offsets) == 1)
    # UTF-8 has no bytes C0, C1 and F5 to FF; vocabularies may lack them.
    assert set(data[offsets[single]].tolist()) >= {*range(0xC0), *range(0xC2, 0xF5)}


@pytest.mark.parametrize("name", NAMES)
def test_sampling_ban(name):
    tokenizer = get_tokenizer(name)
    ban = tokenizer.sampling_ban(tokenizer.vocab_size + 7)
    assert ban[tokenizer.vocab_size :].all()
    assert not ban[tokenizer.eot_id]
    assert not ban[tokenizer.encode(TEXT)].any()
    for marker in ("<|im_start|>", "<|endoftext|>"):
        assert ban[tokenizer.encode(marker)].all()
    assert ban[: tokenizer.vocab_size].sum() == len(tokenizer.special_ids) - 1
    with pytest.raises(TokenizerError, match="token rows"):
        tokenizer.sampling_ban(tokenizer.vocab_size - 1)


def test_think_tags_of_qwen3_are_text():
    tokenizer = get_tokenizer("qwen3")
    (think,) = tokenizer.encode("<think>")
    assert not tokenizer.sampling_ban(151_936)[think]
    data, offsets = tokenizer.byte_tables(151_936)
    assert data[offsets[think] : offsets[think + 1]].tobytes() == b"<think>"


@pytest.mark.parametrize("name", ["tiny", "smollm2"])
def test_saved_tokenizers_load_again(name, tmp_path):
    tokenizer = get_tokenizer(name)
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.encode(TEXT) == tokenizer.encode(TEXT)
    assert (again.frame, again.eot_id) == (tokenizer.frame, tokenizer.eot_id)


class TestFrames:
    """Templates of other families, put on the tiny tokenizer."""

    LOOP = "{% for m in messages %}"
    REST = "{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"

    def wrap(self, template):
        hf = load_tokenizer("tiny").hf
        hf.chat_template = template
        return TextTokenizer(hf)

    def test_generation_prompt_that_opens_a_thought(self):
        opened = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
        frame = self.wrap(self.LOOP + "<|im_start|>" + self.REST + opened).frame
        assert frame == load_tokenizer("tiny").frame

    def test_history_with_an_empty_thought(self):
        history = self.LOOP + (
            "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
            "{{ m.content }}<|im_end|>\n{% endfor %}"
        )
        frame = self.wrap(history + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}").frame
        assert frame == load_tokenizer("tiny").frame

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            (None, "no chat template"),
            ("{{ raise_exception('no system role') }}", "no system role"),
            (
                LOOP + "{% if m.role != 'system' %}<|im_start|>" + REST.replace("{% e", "{% endif %}{% e"),
                "drops",
            ),
            (LOOP + "[{{ m.content }}]{% endfor %}", "special token"),
            (LOOP + "<|im_start|>" + REST + "<|im_start|>bot\n", "generation prompt"),
        ],
    )
    def test_unusable_templates(self, template, message):
        with pytest.raises(TokenizerError, match=message):
            self.wrap(template)


def test_unusable_files(tmp_path):
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="cannot load a tokenizer from 'no/such-model'"):
        load_tokenizer("no/such-model")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    with pytest.raises(TokenizerError, match="not a byte-level BPE"):
        load_tokenizer(tmp_path)


def test_tiny_is_rebuilt_the_same(tmp_path):
    tiny.main(str(tmp_path))
    shipped = load_tokenizer("tiny").hf.name_or_path
    for file in ("tokenizer.json", "tokenizer_config.json"):
        with open(f"{shipped}/{file}") as old:
            assert json.loads((tmp_path / file).read_text()) == json.load(old)


def test_tiny_vocabulary():
    tokenizer = load_tokenizer("tiny")
    assert 256 < tokenizer.vocab_size < 650
    words = [*"P_OGXS#√ABW.@C\n", " Left", " Right", " Up", " Down", "Left", " ||", " goal", " down", " left",
             " up", " right", " box", " Phoenix", " Dragon", "Turn", "State", "user", "assistant", "system",
             "<think>", "</think>", "<answer>", "</answer>", "<|im_start|>", "<|im_end|>"]  # fmt: skip
    for word in words:
        assert len(tokenizer.encode(word)) == 1, word


def test_tiny_cells_do_not_merge():
    tokenizer = load_tokenizer("tiny")
    rng = np.random.default_rng(0)
    for symbols in ("P_OGX√", "#_OX√PS"):
        for _ in range(200):
            row = "".join(rng.choice(list(symbols), size=8))
            ids = tokenizer.encode(f"{row}\n{row}\n")
            assert [tokenizer.decode([i]) for i in ids] == [*row, "\n", *row, "\n"]
            spaced = tokenizer.encode(" " + " ".join(row) + "\n")
            assert spaced[-1:] == tokenizer.encode("\n")


@pytest.mark.parametrize("name", REAL)
def test_unknown_ids_are_not_hidden(name):
    with pytest.raises(IndexError):
        get_tokenizer(name).decode([10**6])
