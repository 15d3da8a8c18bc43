"""Metrics files that survive a kill and a resume; what is handed to Weights & Biases."""

import json
import sys
import types

import pytest

from ragen_jax.errors import UserError
from ragen_jax.loggers import MetricsFile, WandbRun, read_metrics, require_wandb


def test_a_resumed_file_holds_each_step_once_and_nothing_past_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, resume_step=-1)
    for step in range(4):
        first.write(step, {"loss": step / 2, "broken": float("nan")})
    first.close()
    path.write_text(path.read_text() + '{"step": 4, "lo')  # a kill in the middle of a line
    again = MetricsFile(path, resume_step=2)
    again.write(3, {"loss": 9.0})
    again.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]  # whole lines alone
    assert lines == read_metrics(path)
    assert [(line["step"], line["loss"]) for line in lines] == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 9.0)]
    assert lines[0]["broken"] is None


class FakeWandb(types.ModuleType):
    """Remembers what it is told; refuses to begin where `refuse` is set."""

    def __init__(self):
        super().__init__("wandb")
        self.errors = types.SimpleNamespace(Error=RuntimeError)
        self.calls, self.refuse = [], None

    def init(self, **settings):
        if self.refuse:
            raise RuntimeError(self.refuse)
        self.calls.append(("init", settings))
        return self

    def log(self, values, step):
        self.calls.append(("log", step, values))

    def finish(self):
        self.calls.append("finish")


def test_wandb_gets_the_numbers_and_a_resumed_run_keeps_its_id(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        run = WandbRun("ice", tmp_path, {"seed": 3})
        run.write(7, {"loss": 0.5})
        run.close()
    (_, first), logged, finished, (_, second), *_ = fake.calls
    assert (first["project"], first["config"], first["resume"]) == ("ice", {"seed": 3}, "allow")
    assert first["id"] == second["id"]
    assert (logged, finished) == (("log", 7, {"loss": 0.5}), "finish")
    fake.refuse = "no login\nlong help"
    with pytest.raises(UserError, match=r"\(no login\)"):
        WandbRun("ice", tmp_path, {})


def test_wandb_without_the_package_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="not installed"):
        require_wandb()
