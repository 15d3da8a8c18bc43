"""Configs: what ships loads; what cannot run is refused with one sentence that names the mend."""

import pathlib

import pytest

from ragen_jax.config import ConfigError, kept_groups, load_config, save_config, update_shape

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_configs_load_and_survive_being_saved(path, tmp_path):
    config = load_config(path)
    assert config.run_dir == f"runs/{path.stem}"
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_shipped_configs_say_how_to_run_them():
    for path in CONFIGS.glob("*.yaml"):
        assert f"configs/{path.name}" in path.read_text(), path


def test_v1_settings():
    """RAGEN's settings (arXiv 2504.20073, appendix): 8 groups of 16, 5 turns, 5 actions a turn, 10 in all."""
    for name in ("sokoban", "frozen_lake"):
        rollout = load_config(CONFIGS / f"{name}.yaml").rollout
        assert (rollout.groups, rollout.group_size) == (8, 16)
        assert (rollout.max_turns, rollout.max_actions_per_turn, rollout.max_actions) == (5, 5, 10)
        assert (rollout.max_new_tokens, rollout.context, rollout.format_penalty) == (400, 3600, -0.1)
    bandit = load_config(CONFIGS / "bandit.yaml").rollout
    assert (bandit.max_turns, bandit.max_actions_per_turn, bandit.max_actions) == (1, 1, 1)


def test_a_preset_on_the_command_line_overrides_the_files_and_a_key_overrides_both():
    config = load_config(QUICKSTART)
    assert (config.algo.name, config.algo.keep_groups, config.algo.clip_high) == ("starpo_s", 0.25, 0.28)
    config = load_config(QUICKSTART, ["algo=starpo"])
    assert (config.algo.name, config.algo.keep_groups, config.algo.kl_coef) == ("starpo", 1.0, 0.001)
    config = load_config(QUICKSTART, ["algo.kl_coef=0.5", "algo=starpo_grpo"])
    assert (config.algo.estimator, config.algo.kl_coef) == ("grpo", 0.5)


def test_overrides_are_typed():
    config = load_config(QUICKSTART, ["train.actor_lr=1e-3", "env.options.size=5", "model.remat=true"])
    assert config.train.actor_lr == 1e-3
    assert config.env.options["size"] == 5
    assert config.model.remat is True


def test_shapes_of_the_update():
    config = load_config(QUICKSTART, ["rollout.groups=16", "rollout.group_size=8", "train.minibatch=16"])
    assert kept_groups(config) == 4  # a quarter of 16
    assert update_shape(config) == (2, 16)  # 32 episodes in two gradient steps


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.learning_rate=1", "Unknown config key train.learning_rate"),
        ("rollout.goups=4", "did you mean rollout.groups?"),
        ("actor_lr=1", "did you mean train.actor_lr?"),
        ("train.iterations=many", "train.iterations"),
        ("model.remat=7.5", "model.remat"),
        ("train.iterations", "write key=value"),
        ("algo=ppo", "known: starpo, starpo_grpo, starpo_s"),
        ("algo.estimator=ppo", "choose one of 'gae', 'grpo'"),
        ("rollout.group_size=1", "set rollout.group_size to 2 or more"),
        ("algo.keep_groups=0", "above 0 and at most 1"),
        ("train.minibatch=7", "does not divide the 32 episodes"),
        ("train.microbatch=3", "does not divide the minibatch of 16"),
        ("sft.batch=24", "does not divide the sft.batch of 24"),
        ("rollout.temperature=0", "must be above 0 (evaluation may use temperature 0)"),
        ("rollout.max_turns=0", "must be at least 1"),
        ("model.tiny.layers=0", "must be at least 1"),
        ("rollout.block=-1", "must be 0 or more"),
        ("train.actor_lr=-1", "must be 0 or more, and finite"),
        ("train.actor_lr=nan", "must be 0 or more, and finite"),
        ("train.grad_clip=0", "must be above 0"),
        ("train.adam_b2=1", "from 0 to below 1"),
        ("algo.gamma=2", "from 0 to 1"),
        ("algo.dual_clip=0.5", "above 1, or 0 for none"),
        ("algo.entropy_coef=inf", "must be finite"),
        ("seed=-1", "from 0 to"),
        ("eval.seed=4294967296", "from 0 to"),
    ],
)
def test_what_cannot_run_is_refused(override, says):
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, [override])
    message = str(caught.value)
    assert says in message
    assert "\n" not in message


def test_the_batch_of_a_warm_start_that_is_not_run_binds_nothing():
    load_config(QUICKSTART, ["sft.steps=0", "sft.batch=24"])


def test_a_file_that_is_missing_or_broken_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="There is no config file"):
        load_config(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("train: {iterations: 3")
    with pytest.raises(ConfigError, match=r"broken\.yaml is not valid YAML"):
        load_config(broken)
    broken.write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match="must hold keys and values"):
        load_config(broken)
    misspelt = tmp_path / "misspelt.yaml"
    misspelt.write_text("train: {iteration: 3}\n")
    with pytest.raises(ConfigError, match=r"did you mean train\.iterations"):
        load_config(misspelt)
