"""The commands as a user runs them: what they leave behind, and how they refuse."""

import json
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from ragen_jax import cli
from ragen_jax.checkpoint import Checkpoints
from ragen_jax.config import load_config
from ragen_jax.loggers import read_metrics
from ragen_jax.models.hf import load_pretrained
from ragen_jax.text.tokenizer import load_tokenizer
from ragen_jax.train.program import build
from ragen_jax.train.state import init_state

# Small enough to train in seconds; the shapes are those of tests/programs.py where they can be.
MINIATURE = """
preset: starpo_s
model: {path: tiny, remat: false, tiny: {layers: 1, width: 32, mlp_width: 64}}
env: {name: bandit}
rollout: {groups: 4, group_size: 4, max_turns: 1, max_actions_per_turn: 1, max_actions: 1,
          max_new_tokens: 40, repeat_format: false, instructions: false}
train: {iterations: 2, minibatch: 2, microbatch: 2, actor_lr: 1.0e-3, critic_lr: 1.0e-3,
        eval_every: 1, save_every: 1, rollouts_every: 1}
sft: {steps: 2, batch: 4}
eval: {levels: 16}
"""


@pytest.fixture
def ragen(monkeypatch, capsys):
    """Runs a command line; returns its exit code, output and errors."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["ragen-jax", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return stopped.value.code, out, err

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of the miniature, its config file and what the command printed."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "mini.yaml").write_text(MINIATURE)
    run = folder / "run"
    patch = pytest.MonkeyPatch()
    patch.setattr(sys, "argv", ["ragen-jax", "train", str(folder / "mini.yaml"), f"run_dir={run}"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    patch.undo()
    assert not stopped.value.code
    return run, folder / "mini.yaml"


def test_train_leaves_a_whole_run_folder(trained, ragen):
    run, config = trained
    assert (run / "config.yaml").is_file()
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    last = lines[-1]
    for key in (
        "reward/mean", "success/bandit", "reward/in_group_std", "policy/entropy", "policy/grad_norm",
        "policy/clip_fraction", "policy/kl_behaviour", "response/length", "response/format_valid",
        "filter/kept_ratio", "time/rollout_s", "time/update_s", "throughput/generated_tokens_per_s",
        "eval/bandit/success",
    ):  # fmt: skip
        assert key in last, key
    assert {p.name for p in (run / "rollouts").iterdir()} >= {"eval_000000.jsonl", "train_000003.jsonl"}
    code, out, _ = ragen("train", config, f"run_dir={run}")
    assert not code
    for words in ("before training", "after the warm start", "after 2 RL iterations", "optimal play"):
        assert words in out


def test_eval_of_a_run_repeats_its_last_evaluation(trained, ragen):
    run, config = trained
    code, out, _ = ragen("eval", run)
    assert not code
    recorded = read_metrics(run / "metrics.jsonl")[-1]["eval/bandit/reward"]
    assert f"eval/bandit/reward {recorded:.4f}" in out
    code, out, _ = ragen("eval", config)
    assert not code
    assert "success" in out


def test_export_writes_the_newest_policy_and_its_tokenizer(trained, ragen, tmp_path):
    run, _ = trained
    code, _, _ = ragen("export", run, "--out", tmp_path / "model")
    assert not code
    program = build(load_config(run / "config.yaml"))
    checkpoints = Checkpoints(run / "checkpoints")
    restored = checkpoints.restore(init_state(program.config, program.model))
    checkpoints.close()
    exported = nnx.state(load_pretrained(str(tmp_path / "model")))
    trained_leaves, leaves = jax.tree.leaves(restored[1].policy), jax.tree.leaves(exported)
    for a, b in zip(trained_leaves, leaves, strict=True):
        np.testing.assert_array_equal(a, b)
    assert load_tokenizer(str(tmp_path / "model")).encode("Up") == program.tokenizer.encode("Up")
    code, _, err = ragen("export", run, "--out", tmp_path / "model")
    assert code == 2
    assert "choose another --out" in err


def test_an_exported_model_is_a_model_to_train(trained, ragen, tmp_path):
    run, config = trained
    ragen("export", run, "--out", tmp_path / "model", "--dtype", "bfloat16")
    words = (f"model.path={tmp_path / 'model'}", f"run_dir={tmp_path / 'next'}", "sft.steps=0")
    code, _, _ = ragen("train", config, *words)
    assert not code
    assert [line["step"] for line in read_metrics(tmp_path / "next" / "metrics.jsonl")] == [0, 1, 2]


def test_sft_exports_its_model(trained, ragen, tmp_path):
    _, config = trained
    code, out, _ = ragen("sft", config, f"run_dir={tmp_path / 'warm'}")
    assert not code
    assert (tmp_path / "warm" / "model" / "model.safetensors").is_file()
    assert "after the warm start" in out
    code, _, err = ragen("sft", config, "sft.steps=0")
    assert code == 2
    assert "sft.steps" in err
    run, _ = trained
    assert "no warm start alone" in refused(ragen, "sft", config, f"run_dir={run}")
    assert not (run / "model").exists()


def test_view_writes_a_page_with_the_episodes(trained, ragen):
    run, _ = trained
    code, out, _ = ragen("view", run)
    assert not code
    page = (run / "view.html").read_text()
    episode = json.loads((run / "rollouts" / "train_000003.jsonl").read_text().splitlines()[0])
    assert json.dumps(episode["system"])[1:-1] in page
    assert "view.html" in out


def test_envs_lists_every_world(ragen):
    code, out, _ = ragen("envs")
    assert not code
    for words in ("bandit", "frozen_lake", "sokoban", "Phoenix", "Left, Down, Right, Up"):
        assert words in out


def refused(ragen, *words):
    code, _, err = ragen(*words)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    return err


def test_bad_input_is_one_sentence_and_exit_code_2(trained, ragen, tmp_path):
    run, config = trained
    out = f"run_dir={tmp_path / 'run'}"
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    cases = {
        "There is no config file": ["nowhere.yaml"],
        "There is no model folder ./nowhere": [config, out, "model.path=./nowhere"],
        "empty": [config, out, f"model.path={empty}"],
        "did you mean train.actor_lr?": [config, out, "train.actor_rl=1"],
        "train.iterations": [config, out, "train.iterations=soon"],
        "set rollout.group_size to 2": [config, out, "rollout.group_size=1"],
        "rollout.context is 20, which cannot hold one turn": [config, out, "rollout.context=20"],
        "rollout.max_new_tokens is 3": [config, out, "rollout.max_new_tokens=3"],
        "unknown environment 'chess'": [config, out, "env.name=chess"],
        "must be even": [config, out, "model.tiny.width=36"],
        "env: ": [config, out, "env.options.colour=red"],
        "holds a run with other settings (algo": [config, f"run_dir={run}", "algo=starpo"],
    }
    for says, words in cases.items():
        assert says in refused(ragen, "train", *words), says
    (tmp_path / "file").touch()
    assert "file: File exists." in refused(ragen, "train", config, f"run_dir={tmp_path / 'file'}")
    assert "Not a directory." in refused(ragen, "train", config, f"run_dir={tmp_path / 'file' / 'run'}")
    assert not (tmp_path / "run").exists()
    assert "neither a run folder" in refused(ragen, "eval", empty)
    assert "There is no run folder" in refused(ragen, "view", tmp_path / "nowhere")
    assert "--dtype" in refused(ragen, "export", run, "--out", tmp_path / "x", "--dtype", "int8")


def test_an_interrupt_says_how_to_go_on(trained, ragen, tmp_path, monkeypatch):
    _, config = trained

    def interrupted(run):
        raise KeyboardInterrupt

    monkeypatch.setattr("ragen_jax.train.loop.Run.reinforce", interrupted)
    code, out, err = ragen("train", config, f"run_dir={tmp_path / 'run'}")
    assert code == 130
    assert "the same command goes on" in out
    assert "Traceback" not in err
    # What was done before it is on disk.
    assert sorted(int(p.name) for p in (tmp_path / "run/checkpoints").glob("[0-9]*"))[-1:] == [2]


def test_a_run_whose_checkpoints_are_all_damaged_is_left_as_it_is(trained, ragen, tmp_path):
    import shutil

    run, config = trained
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    for path in (copy / "checkpoints").rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")
    before = {p.relative_to(copy): p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    message = refused(ragen, "train", config, f"run_dir={copy}", "train.iterations=3")
    assert "can be read" in message
    after = {p.relative_to(copy): p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    assert before == after
