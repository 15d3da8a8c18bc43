"""Imports go down only, and each heavy library comes in at one place."""

import ast
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]

# A module may import those of its own layer and of the layers that it names here, by longest prefix.
ALLOWED = {
    "ragen_jax.errors": set(),
    "ragen_jax.types": set(),
    "ragen_jax.config": {"ragen_jax.errors"},
    "ragen_jax.loggers": {"ragen_jax.errors"},
    "ragen_jax.checkpoint": {"ragen_jax.errors"},
    "ragen_jax.text": {"envs_jax", "ragen_jax.errors"},
    "ragen_jax.models": {"ragen_jax.errors"},
    "ragen_jax.algo": set(),
    "ragen_jax.rollout": {
        "envs_jax",
        "ragen_jax.errors",
        "ragen_jax.types",
        "ragen_jax.text",
        "ragen_jax.models",
    },
    "ragen_jax.train": {
        "envs_jax",
        "ragen_jax.errors",
        "ragen_jax.types",
        "ragen_jax.config",
        "ragen_jax.loggers",
        "ragen_jax.checkpoint",
        "ragen_jax.text",
        "ragen_jax.models",
        "ragen_jax.algo",
        "ragen_jax.rollout",
    },
    "ragen_jax.viewer": {"ragen_jax.errors", "ragen_jax.loggers", "ragen_jax.text"},
    "envs_jax": set(),
}
ABOVE_ALL = {"ragen_jax", "ragen_jax.cli"}
ONLY_IN = {
    "transformers": {"ragen_jax.text.tokenizer"},
    "tokenizers": {"ragen_jax.text.tiny", "ragen_jax.text.tokenizer"},
    "safetensors": {"ragen_jax.models.hf"},
    "orbax": {"ragen_jax.checkpoint"},
    "omegaconf": {"ragen_jax.config", "ragen_jax.viewer"},
    "typer": {"ragen_jax.cli"},
    "wandb": {"ragen_jax.loggers"},
    "torch": set(),
}


def modules():
    for package in ("ragen_jax", "envs_jax"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield name, path


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module
            # `from package import module` names a module too.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer(name):
    fitting = [prefix for prefix in ALLOWED if name == prefix or name.startswith(prefix + ".")]
    return max(fitting, key=len, default=None)


def test_imports_go_down_only():
    known = {name for name, _ in modules()}
    for name, path in modules():
        if name in ABOVE_ALL:
            continue
        here = layer(name)
        assert here, f"{name} belongs to no layer"
        for target in imports(path):
            if target in known and target != "ragen_jax":
                assert layer(target) in {here, *ALLOWED[here]}, f"{name} imports {target}"


def test_heavy_libraries_come_in_at_one_place():
    for name, path in modules():
        for target in imports(path):
            root = target.split(".")[0]
            assert name in ONLY_IN.get(root, {name}), f"{name} imports {root}"


def test_algorithms_and_text_know_no_models_and_worlds_know_jax_alone():
    for name, path in modules():
        roots = {target.split(".")[0] for target in imports(path)}
        if name.startswith(("ragen_jax.algo", "ragen_jax.text")):
            assert not roots & {"flax", "orbax", "omegaconf"}, name
        if name.startswith("envs_jax"):
            outside = roots - sys.stdlib_module_names
            assert outside <= {"jax", "jaxtyping", "numpy", "chex", "jumanji", "envs_jax"}, name
