"""Logits of a model folder in this package and in `transformers`, on replies that it writes itself.

    python benchmarks/compare_export.py runs/bandit_smollm2/model

Prints the largest absolute difference of float32 logits, and exits with 1 where it is above 1e-3.
Needs the extra `parity`.
"""

from __future__ import annotations

import argparse
import sys

import jax.numpy as jnp
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragen_jax.models.hf import load_pretrained

QUESTIONS = (
    "Which arm do you choose, Phoenix or Dragon?",
    "What is the capital of France?",
    "Count to five.",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    peer = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).eval()
    ours = load_pretrained(args.folder, dtype=jnp.float32, param_dtype=jnp.float32)
    worst = 0.0
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            ids = peer.generate(**inputs, max_new_tokens=32, do_sample=False)
            expected = peer(ids).logits.numpy()
        tokens = jnp.asarray(ids.numpy(), jnp.int32)
        positions = jnp.arange(tokens.shape[1])[None, :]
        logits = ours.logits(ours(tokens, positions, jnp.ones(tokens.shape, bool)))
        error = float(np.abs(np.asarray(logits) - expected).max())
        worst = max(worst, error)
        reply = tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        print(f"{tokens.shape[1]} tokens, difference {error:.2e}: {question} -> {reply[:60]!r}")
    print(f"largest difference {worst:.2e}, of logits up to {np.abs(expected).max():.1f}")
    sys.exit(worst > 1e-3)


if __name__ == "__main__":
    main()
