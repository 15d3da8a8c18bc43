"""One static page of a run: learning curves and every episode, readable without a server or a network.

The page is `assets/viewer/page.html` with its style, its script and the run's data filled in. The data are
JSON lines in a script element of a type that browsers do not run: a head line, then one line an episode,
which the page parses only when it is read. Whatever a policy wrote reaches the page as text: `<` is escaped
in the JSON, the script makes text nodes alone, and the page's content policy lets no script run but its own,
by hash.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import itertools
import json
import math
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from omegaconf import OmegaConf

from ragen_jax.errors import UserError
from ragen_jax.loggers import read_metrics

__all__ = ["write_page"]


def write_page(run: pathlib.Path, out: pathlib.Path, *, max_episodes: int = 2000) -> int:
    """Write the page of a run folder to `out`; returns the number of episodes in it.

    At most `max_episodes` episodes are put in, the newest steps first; the page says how many were left out.

    Raises:
      UserError: the folder has neither metrics nor episodes, or a rollout file is damaged.
    """
    metrics = read_metrics(run / "metrics.jsonl")
    episodes, left_out = _read_rollouts(run / "rollouts", max_episodes)
    if not metrics and not episodes:
        raise UserError(
            f"{run} has nothing to show yet, neither metrics.jsonl nor episodes in rollouts/; give the "
            "folder of a run that has begun training."
        )
    config_text, config = _read_config(run / "config.yaml")
    ids = {token for episode in episodes for token in episode["tokens"]}
    texts = _token_texts([run / "model", _get(config, "model.path")], ids)
    script = _asset("page.js")
    parts = {
        "NAME": html.escape(run.resolve().name),
        "FACTS": _facts(config, metrics),
        "CONFIG": html.escape(config_text),
        "CURVES": draw_curves(metrics, eval_levels=_get(config, "eval.levels")),
        "NOTE": html.escape(_note(len(episodes), left_out)),
        "STYLE": _asset("page.css"),
        "SCRIPT": script,
        "SCRIPT_HASH": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "DATA": _data_lines(episodes, texts),
    }
    # One pass: a placeholder that a policy wrote into its reply is not filled in.
    page = re.sub(r"\{\{([A-Z_]+)\}\}", lambda match: parts[match[1]], _asset("page.html"))
    out.parent.mkdir(parents=True, exist_ok=True)
    # A lone surrogate is no UTF-8; its backslash form is the JSON escape of the same character.
    out.write_text(page, encoding="utf-8", errors="backslashreplace", newline="\n")
    return len(episodes)


def _asset(name: str) -> str:
    return (importlib.resources.files("ragen_jax") / "assets" / "viewer" / name).read_text(encoding="utf-8")


def _read_rollouts(folder: pathlib.Path, limit: int) -> tuple[list[dict[str, Any]], int]:
    """Up to `limit` episodes, newest step first and the members of a group together; and how many are left.

    A file is named by the kind of its episodes and the step, as `train_000120.jsonl`; the kind is put in.
    """

    def newest_first(path: pathlib.Path) -> tuple[int, int, str]:
        kind, step = _kind_and_step(path)
        return -step, kind != "train", path.name

    episodes: list[dict[str, Any]] = []
    left_out = 0
    for path in sorted(folder.glob("*.jsonl"), key=newest_first):
        with path.open(encoding="utf-8") as file:
            lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
            for number, line in itertools.islice(lines, limit - len(episodes)):
                episodes.append(_parse_episode(line, _kind_and_step(path)[0], f"line {number} of {path}"))
            left_out += sum(1 for _ in lines)
    episodes.sort(key=lambda e: (-e["step"], e["kind"] != "train", e["kind"], e["group"], e["member"]))
    return episodes, left_out


def _kind_and_step(path: pathlib.Path) -> tuple[str, int]:
    match = re.fullmatch(r"(.*?)_?(\d+)", path.stem)
    return (match[1], int(match[2])) if match else (path.stem, 0)


_NEEDED = {"step", "env", "group", "member", "success", "return", "system", "turns", "final_board"}
_NEEDED |= {"tokens", "loss_mask", "logprobs"}


def _parse_episode(line: str, kind: str, place: str) -> dict[str, Any]:
    try:
        episode = json.loads(line, parse_constant=lambda _: None)  # NaN and infinities are no JSON
    except json.JSONDecodeError as error:
        raise UserError(f"The {place} is not JSON ({error.msg}); delete the line or the file.") from error
    missing = sorted(_NEEDED - episode.keys()) if isinstance(episode, dict) else sorted(_NEEDED)
    if missing:
        raise UserError(
            f"The {place} is no episode: it lacks {', '.join(missing)}; delete the line or the file."
        )
    return {"kind": kind, **episode}


def _read_config(path: pathlib.Path) -> tuple[str, Any]:
    """The text of a config and its values; a page is worth having without them."""
    if not path.is_file():
        return "", {}
    text = path.read_text(encoding="utf-8")
    try:
        return text, OmegaConf.to_container(OmegaConf.create(text))
    except Exception:  # the parser's errors come in many types
        return text, {}


def _get(config: Any, key: str) -> Any:
    """The value at a dotted key, None where there is none."""
    for name in key.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config


def _facts(config: Any, metrics: list[dict[str, Any]]) -> str:
    """What the run is, as terms and values."""
    algo, estimator = _get(config, "algo.name"), _get(config, "algo.estimator")
    rollout = f"{_get(config, 'rollout.groups')} groups of {_get(config, 'rollout.group_size')}"
    facts = {
        "environment": _get(config, "env.name"),
        "model": _get(config, "model.path"),
        "algorithm": f"{algo} ({estimator})" if algo and estimator else algo,
        "rollout": rollout if _get(config, "rollout.groups") else None,
        "seed": _get(config, "seed"),
        "last step": max((line["step"] for line in metrics), default=None),
    }
    shown = ((term, "unknown" if value is None else str(value)) for term, value in facts.items())
    return "".join(f"<div><dt>{term}</dt><dd>{html.escape(value)}</dd></div>" for term, value in shown)


def _note(count: int, left_out: int) -> str:
    if not count:
        return "This run has written no episodes yet."
    if not left_out:
        return ""
    return (
        f"{left_out:,} older episode{'s are' if left_out > 1 else ' is'} not in this page, which holds the "
        f"{count:,} newest of {count + left_out:,}."
    )


def _token_texts(sources: Iterable[Any], ids: set[int]) -> dict[int, str]:
    """The text of each id by the first tokenizer that loads; bytes that are no text alone as `\\xe2`.

    Empty if none loads: the page then shows ids.
    """
    for source in sources if ids else ():
        if not source or (isinstance(source, pathlib.Path) and not source.is_dir()):
            continue
        try:
            from ragen_jax.text.tokenizer import load_tokenizer

            tokenizer = load_tokenizer(source)
            known = (i for i in ids if 0 <= i < tokenizer.vocab_size)
            return {i: tokenizer.token_text(i).decode("utf-8", errors="backslashreplace") for i in known}
        except Exception:  # whatever the reason, ids can still be read
            continue
    return {}


def _data_lines(episodes: list[dict[str, Any]], texts: dict[int, str]) -> str:
    """The head line, then an episode a line. The head has what the list and its filters need."""
    systems: dict[str, int] = {}
    index = [
        {
            **{key: e[key] for key in ("kind", "step", "group", "member", "success", "return")},
            "turns": len(e["turns"]),
            "invalid": sum(not turn["format_valid"] for turn in e["turns"]),
        }
        for e in episodes
    ]
    lines = [_compact(e, systems) for e in episodes]
    head = {"index": index, "systems": list(systems), "texts": texts}
    return "\n".join(_json(line) for line in [head, *lines])


def _compact(episode: dict[str, Any], systems: dict[str, int]) -> dict[str, Any]:
    """An episode in less room: system prompts by number, the mask as run lengths (of 0 first), and
    log-probabilities of the tokens in the loss alone, in thousandths."""
    runs = [0] if episode["loss_mask"] and episode["loss_mask"][0] else []
    runs += [len(list(same)) for _, same in itertools.groupby(episode["loss_mask"])]
    pairs = zip(episode["loss_mask"], episode["logprobs"], strict=True)
    return {
        "env": episode["env"],
        "system": systems.setdefault(episode["system"], len(systems)),
        "turns": episode["turns"],
        "final_board": episode["final_board"],
        "tokens": episode["tokens"],
        "runs": runs,
        "logprobs": [None if value is None else round(1000 * value) for mask, value in pairs if mask],
    }


def _json(value: Any) -> str:
    """JSON that may stand in a script element: nothing in it can end the element or open a comment."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


# Curves: key pattern (the group is shown after the title), title, whether it is a rate in 0..1, wide.
_CURVES = (
    (r"eval/(.+)/success", "Evaluation success", True, True),
    (r"success/(.+)", "Training success", True, False),
    (r"reward/mean", "Mean reward", False, False),
    (r"reward/in_group_std", "Spread within groups", False, False),
    (r"response/format_valid", "Valid format", True, False),
    (r"policy/entropy", "Entropy", False, False),
    (r"policy/grad_norm", "Gradient norm", False, False),
    (r"response/length", "Response length", False, False),
    (r"sft/loss", "Warm-start loss", False, False),
)
_Point = tuple[int, float, str]  # step, value, phase


def draw_curves(metrics: list[dict[str, Any]], *, eval_levels: int | None) -> str:
    """A figure for each curve that has a value, on one axis of steps. Nulls are skipped, not drawn as 0."""
    keys = sorted({key for line in metrics for key in line})
    last_step = max((line["step"] for line in metrics), default=0)
    warm = max((line["step"] for line in metrics if line.get("phase") == "sft"), default=0)
    figures = []
    for pattern, title, rate, wide in _CURVES:
        matches = [match for key in keys if (match := re.fullmatch(pattern, key))]
        for match in matches:
            key = match[0]
            points = _points(metrics, key)
            if points:
                levels = eval_levels if key.startswith("eval/") else None
                svg = _svg(points, last_step=last_step, warm=warm, rate=rate, wide=wide, levels=levels)
                label = f"{title}: {match[1]}" if len(matches) > 1 else title
                error = " (band: one standard error)" if levels else ""
                figures.append(
                    f'<figure class="curve{" wide" if wide else ""}" title="{html.escape(key + error)}">'
                    f"<figcaption><span>{html.escape(label)}</span><output></output></figcaption>{svg}</figure>"
                )
    return "".join(figures) or '<p class="empty">This run has written no metrics yet.</p>'


def _points(metrics: list[dict[str, Any]], key: str) -> list[_Point]:
    lines = (line for line in metrics if isinstance(line.get(key), int | float))
    return [(line["step"], float(line[key]), line.get("phase", "rl")) for line in lines]


def _svg(
    points: list[_Point], *, last_step: int, warm: int, rate: bool, wide: bool, levels: int | None
) -> str:
    """One curve with its axes. `data-points` holds step, value, phase, x and y of each, for the pointer."""
    width, height = (660, 200) if wide else (320, 160)
    left, right, top, bottom = 44, width - 12, 12, height - 24
    values = [value for _, value, _ in points]
    y_ticks = [0.0, 0.25, 0.5, 0.75, 1.0] if rate else _ticks(min(values), max(values), 4)
    low, high = min(*values, *y_ticks), max(*values, *y_ticks)

    def x(step: float) -> float:
        return round(left + (right - left) * step / max(last_step, 1), 1)

    def y(value: float) -> float:
        return round(bottom - (bottom - top) * (value - low) / (high - low), 1)

    marks = []
    if warm:
        marks.append(
            f'<rect class="warm" x="{left}" y="{top}" width="{x(warm) - left:.1f}" height="{bottom - top}"/>'
        )
    for tick in y_ticks:
        marks.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y(tick)}" y2="{y(tick)}"/>')
        marks.append(f'<text class="y" x="{left - 6}" y="{y(tick) + 3.5:.1f}">{_number(tick)}</text>')
    for tick in _ticks(0, last_step, 8 if wide else 4):
        if tick == int(tick) and tick <= last_step:
            marks.append(f'<text class="x" x="{x(tick)}" y="{bottom + 16}">{tick:.0f}</text>')
    if levels:
        errors = [(step, value, math.sqrt(max(value * (1 - value), 0) / levels)) for step, value, _ in points]
        rim = [f"{x(s)},{y(min(v + e, high))}" for s, v, e in errors]
        rim += [f"{x(s)},{y(max(v - e, low))}" for s, v, e in reversed(errors)]
        marks.append(f'<polygon class="error" points="{" ".join(rim)}"/>')
    previous: list[_Point] = []
    for phase, group in itertools.groupby(points, key=lambda point: point[2]):
        run = list(group)
        joined = previous[-1:] + run  # a phase goes on from the last value of the one before
        line = " ".join(f"{x(step)},{y(value)}" for step, value, _ in joined)
        marks.append(f'<polyline class="line {_phase(phase)}" points="{line}"/>')
        if len(points) <= 60:
            marks += [
                f'<circle class="dot {_phase(phase)}" cx="{x(s)}" cy="{y(v)}" r="2.5"/>' for s, v, _ in run
            ]
        previous = run
    data = json.dumps([[step, value, phase, x(step), y(value)] for step, value, phase in points])
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" data-points="{html.escape(data)}">{"".join(marks)}'
        f'<line class="cursor" y1="{top}" y2="{bottom}" visibility="hidden"/>'
        '<circle class="cursor" r="4" visibility="hidden"/></svg>'
    )


def _phase(phase: str) -> str:
    return "sft" if phase == "sft" else "rl"


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers that cover `low..high` in about `count` steps of 1, 2 or 5 times a power of ten."""
    if high <= low:
        low, high = low - abs(low) / 2 - 0.5, high + abs(high) / 2 + 0.5
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _number(value: float) -> str:
    return f"{value:.6g}".replace("-", "−")
