"""Train the small tokenizer that the package ships: `python -m ragen_jax.text.tiny OUT`.

It is a byte-level BPE with Qwen's markers and chat format, for models small enough to train on a laptop.
It is trained on the sentences below, which hold the words of the prompts but no boards, so that no two
cells of a board ever merge: a cell is a token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

__all__ = ["build", "main"]

VOCAB_SIZE = 640  # an upper bound; training stops when the words are whole
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")  # text: they may be sampled, and have bytes

# Contractions, letters with one sign or space before them, single digits, signs with the newlines after
# them, newlines, other space.
SPLIT = (
    r"(?i:'(?:s|t|re|ve|m|ll|d))|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Words that should be one token at the start of a line and one after a space.
BOTH = (
    "Left Right Up Down left right up down Turn turn State state Reward reward Actions actions action "
    "Goal goal box player wall empty hole target Box Player Target Phoenix Dragon "
    "system user assistant answer think Answer You The the Arms"
)
# Words that are one token after a space.
SPACED = (
    "is on in at to of a and or an with for one you your it not no so be by then now per most more "
    "floor ice frozen push move step steps reach boxes targets holes slip cell row column arm arms pull "
    "reply format words tokens example symbols board grid each first last try from into next moves game "
    "below above only can will may are this that here choice Teacher "
    "Engineer Trader Librarian Use Give"
)
SENTENCES = (
    "Turn 1.\nState:\n",
    "You have 5 actions left.\n",
    "Reward: 0.1\nReward: -0.1\nReward: 10.9\n",
    "The goal is down left, so I go Down and then Left.\n",
    "The goal is up right, so I go Up and then Right.\n",
    "The box is right of me; I push it Right.\n",
    "Push the box on the target. Do not walk into a wall.\n",
    "Reach the goal. Do not step into a hole.\n",
    "Symbols: player, wall, empty floor, box, target, hole, goal, player on goal, box on target.\n",
    "Left || Right || Up || Down\n",
    "goal: down left || goal: up right\n",
    "Always reply with your thoughts, then the answer. Max length: 100 words (tokens).\n",
    "I pull the Phoenix arm. I pull the Dragon arm.\n",
    "(0, 1), (2, 3) -> (4, 5); rows and columns count from 0.\n",
    "You are a helpful assistant.\n",
    "√ is the player on the goal; a box on a target is √ too.\n",
)


def build() -> Tokenizer:
    """Train the tokenizer; the result is the same on every call."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=8,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    return tokenizer


def _corpus() -> list[str]:
    words = [f"{word}\n {word}\n" for word in BOTH.split()] + [f" {word}\n" for word in SPACED.split()]
    return [*SENTENCES * 8, *words * 8]


def main(folder: str) -> None:
    """Write the Hugging Face files of the tokenizer into `folder`."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    build().save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
