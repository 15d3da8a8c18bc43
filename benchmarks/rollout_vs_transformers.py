"""The quickstart's rollout against a plain `transformers` loop with Python environments, in one run.

    python benchmarks/rollout_vs_transformers.py runs/quickstart

Both play the same levels with the same exported weights, prompts, token budget, actions and temperature.
The peer is what such loops usually are: `model.generate` on the conversation so far, text decoded, parsed by
a regular expression, one Gymnasium FrozenLake a row, the next message tokenised, a batch with left padding.
The two alternate, `--repeats` times after one warm-up each; medians and their ratio are printed, and beside
them the rate at which this machine's measured peaks would bound the same tokens. Needs the extra `bench`.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import statistics
import tempfile
import time

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import torch
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragen_jax.checkpoint import Checkpoints
from ragen_jax.config import load_config
from ragen_jax.train.loop import export_policy
from ragen_jax.train.program import Program, as_temperature, build, level_keys
from ragen_jax.train.state import init_state

REPLY = re.compile(r"<think>(.*?)</think>\s*<answer>(.*?)</answer>", re.DOTALL)
MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}


class PythonLoop:
    """Episodes by `transformers` and Gymnasium."""

    def __init__(self, program: Program, folder: pathlib.Path, boards: list[list[str]]) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.settings, self.boards = program.settings, boards
        frame = program.tokenizer.frame
        self.frame, self.system = frame, frame.system_open + program.env.name + frame.system_close
        self.stop = program.tokenizer.eot_id

    def message(self, env: FrozenLakeEnv, turn: int, reward: float, left: int) -> str:
        grid = [[{"F": "_", "S": "_", "H": "O", "G": "G"}[c.decode()] for c in row] for row in env.desc]
        grid[env.s // env.ncol][env.s % env.ncol] = "P"
        shown = f"Reward: {reward:.1f}\n" if turn else ""
        board = "\n".join("".join(row) for row in grid)
        text = f"{shown}Turn {turn + 1}:\n{board}\nActions left: {left}."
        return self.frame.user_open + text + self.frame.user_close + "<think>"

    @torch.inference_mode()
    def play(self, temperature: float, seed: int) -> tuple[int, float]:
        """Returns the number of sampled tokens and the success rate."""
        torch.manual_seed(seed)
        settings = self.settings
        envs = [FrozenLakeEnv(desc=board, is_slippery=False) for board in self.boards]
        for env in envs:
            env.reset()
        spent, solved, sampled = [0] * len(envs), [False] * len(envs), 0
        texts = [self.system + self.message(env, 0, 0.0, settings.max_actions) for env in envs]
        alive = list(range(len(envs)))
        for turn in range(settings.max_turns):
            batch = self.tokenizer([texts[i] for i in alive], return_tensors="pt", padding=True)
            out = self.model.generate(
                **batch,
                max_new_tokens=settings.max_new_tokens,
                do_sample=True,
                temperature=temperature,
                top_k=0,
                top_p=1.0,
                stop_strings=["</answer>"],
                tokenizer=self.tokenizer,
                eos_token_id=self.stop,
                pad_token_id=self.stop,
            )[:, batch.input_ids.shape[1] :]
            still = []
            for i, ids in zip(alive, out.tolist(), strict=True):
                # Up to and with the token that ended this row; the rest is padding.
                kept = len(ids)
                for n in range(1, len(ids) + 1):
                    if ids[n - 1] == self.stop or "</answer>" in self.tokenizer.decode(ids[:n]):
                        kept = n
                        break
                sampled += kept
                reply = "<think>" + self.tokenizer.decode(ids[:kept])
                match = REPLY.search(reply)
                words = match[2].split("||")[: settings.max_actions_per_turn] if match else []
                reward, done = 0.0, False
                for word in words:
                    if word.strip().lower() not in MOVES or done or spent[i] >= settings.max_actions:
                        continue
                    _, gain, done, _, _ = envs[i].step(MOVES[word.strip().lower()])
                    spent[i], reward = spent[i] + 1, reward + float(gain)
                solved[i] |= reward > 0
                if not done and spent[i] < settings.max_actions and turn + 1 < settings.max_turns:
                    ended = "" if reply.endswith(self.frame.eot) else self.frame.eot
                    left = settings.max_actions - spent[i]
                    texts[i] += reply.removeprefix("<think>") + ended
                    texts[i] += self.message(envs[i], turn + 1, reward, left)
                    still.append(i)
            alive = still
            if not alive:
                break
        return sampled, float(np.mean(solved))


def gym_boards(program: Program, keys: jax.Array, group_size: int) -> list[list[str]]:
    """The engine's own levels as Gymnasium maps, a row for every episode."""
    states, _ = jax.vmap(program.env.reset)(keys)
    size, boards = program.env.size, []
    for g in range(keys.shape[0]):
        cells = np.where(np.asarray(states.holes[g]), "H", "F")
        cells[int(states.goal[g])], cells[int(states.player[g])] = "G", "S"
        boards += [["".join(row) for row in cells.reshape(size, size)]] * group_size
    return boards


def machine_peaks() -> dict[str, float]:
    """Measured float32 matrix products (FLOP/s) and copies (bytes/s read and written), best of five."""

    def best(function, *args):
        function = jax.jit(function)
        jax.block_until_ready(function(*args))
        times = []
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(function(*args))
            times.append(time.perf_counter() - start)
        return min(times)

    a, x = jnp.ones((2048, 2048)), jnp.ones(64_000_000)
    return {"flops": 2 * 2048**3 / best(jnp.matmul, a, a), "bytes": 2 * x.nbytes / best(lambda x: x + 1, x)}


def roofline(program: Program, trajectory, peaks: dict[str, float]) -> float:
    """The larger of the seconds that the arithmetic and the reads of weights and cache take at the peaks."""
    shape = program.model.config
    valid, sampled = np.asarray(trajectory.valid), np.asarray(trajectory.loss_mask)
    embedding = shape.vocab_size * shape.hidden_size
    weights = sum(x.size for x in jax.tree.leaves(program.model)) - embedding
    heads = shape.num_heads * shape.head_dim
    contexts = (np.cumsum(valid, axis=1) * valid).sum()
    flops = 2 * weights * valid.sum() + 2 * embedding * sampled.sum()
    flops += 4 * shape.num_layers * heads * contexts
    cache = 8 * shape.num_layers * shape.num_kv_heads * shape.head_dim  # bytes a token, keys and values
    steps = sampled.any(axis=0).sum()
    reads = 4 * (weights + embedding) * steps + cache * (np.cumsum(valid, axis=1) * sampled).sum()
    return max(flops / peaks["flops"], reads / peaks["bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=pathlib.Path, help="a finished quickstart run")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    config = load_config(args.run / "config.yaml")
    program = build(config)
    checkpoints = Checkpoints(args.run / "checkpoints")
    _, state = checkpoints.restore(init_state(config, program.model))
    checkpoints.close()
    size, temperature = config.rollout.group_size, config.rollout.temperature
    keys = level_keys(config.train_seed, config.rollout.groups)

    def engine(seed: int):
        trajectory = program.engine(
            state.policy, keys, jax.random.key(seed), as_temperature(temperature), group_size=size
        )
        return jax.block_until_ready(trajectory)

    with tempfile.TemporaryDirectory() as folder:
        export_policy(program, state.policy, pathlib.Path(folder))
        loop = PythonLoop(program, pathlib.Path(folder), gym_boards(program, keys, size))
    first = engine(0)
    # The two sides read the very same first message.
    prompt = np.asarray(first.tokens[0])[np.asarray(first.valid[0]) & (np.asarray(first.turn_ids[0]) <= 0)]
    prompt = prompt[: -int(np.sum(np.asarray(first.loss_mask[0]) & (np.asarray(first.turn_ids[0]) == 0)))]
    env = FrozenLakeEnv(desc=loop.boards[0], is_slippery=False)
    env.reset()
    text = loop.system + loop.message(env, 0, 0.0, loop.settings.max_actions)
    assert program.tokenizer.decode(prompt.tolist()) == text, "the two sides read different prompts"
    loop.play(temperature, 0)

    rows, trajectory = [], first
    for repeat in range(1, args.repeats + 1):
        time.sleep(1)  # idle threads of the other side spin for a while
        start = time.perf_counter()
        trajectory = engine(repeat)
        ours = time.perf_counter() - start
        tokens = int(jnp.sum(trajectory.loss_mask))
        time.sleep(1)
        start = time.perf_counter()
        peer_tokens, peer_success = loop.play(temperature, repeat)
        peer = time.perf_counter() - start
        row = {
            "engine_tokens": tokens,
            "engine_tokens_per_s": tokens / ours,
            "engine_success": float(jnp.mean(trajectory.success)),
            "loop_tokens": peer_tokens,
            "loop_tokens_per_s": peer_tokens / peer,
            "loop_success": peer_success,
            "ratio": tokens / ours / (peer_tokens / peer),
        }
        rows.append(row)
        print(json.dumps({k: round(v, 3) for k, v in row.items()}), flush=True)
    median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    peaks = machine_peaks()
    bound = int(jnp.sum(trajectory.loss_mask)) / roofline(program, trajectory, peaks)
    print(f"episodes {keys.shape[0] * size}, medians of {args.repeats}")
    print(f"engine        {median['engine_tokens_per_s']:10.0f} generated tokens/s")
    print(f"python loop   {median['loop_tokens_per_s']:10.0f} generated tokens/s")
    print(f"ratio         {median['ratio']:10.2f}")
    print(
        f"roofline      {bound:10.0f} generated tokens/s at {peaks['flops'] / 1e9:.0f} GFLOP/s and "
        f"{peaks['bytes'] / 1e9:.1f} GB/s; the engine reaches "
        f"{100 * median['engine_tokens_per_s'] / bound:.0f}% of it"
    )
    print(f"versions: jax {jax.__version__}, torch {torch.__version__}, gymnasium {gymnasium.__version__}")


if __name__ == "__main__":
    main()
