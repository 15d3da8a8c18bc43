"""The page of a run: its data arrive whole, a policy's text is never markup, curves have the given points."""

import base64
import hashlib
import html.parser
import json
import re

import pytest

from ragen_jax.errors import UserError
from ragen_jax.viewer import draw_curves, write_page

HOSTILE = "<think></script><script>alert(1)</script><!-- {{DATA}} {{NAME}}\u2028</think><answer>Up</answer>"


def make_episode(step=3, group=0, member=0, reply="<think>up</think><answer>Up</answer>", **changes):
    turn = {
        "user": "Turn 1:\nP_\nOG",
        "reply": reply,
        "actions": ["Up"],
        "reward": -0.1,
        "env_reward": 0.0,
        "format_valid": False,
        "board": "P_\nOG",
    }
    episode = {
        "step": step,
        "env": "frozen_lake",
        "group": group,
        "member": member,
        "success": False,
        "return": -0.1,
        "system": "Walk over the <b>lake</b>.",
        "turns": [turn],
        "final_board": "P_\nOG",
        "tokens": [7, 8, 9, 10, 11],
        "loss_mask": [0, 0, 1, 1, 0],
        "logprobs": [0.0, 0.0, -0.5, -2.25, 0.0],
    }
    return {**episode, **changes}


def make_run(folder, files=None, metrics=(), config="env:\n  name: frozen_lake\nmodel:\n  path: no/such\n"):
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (folder / "rollouts").mkdir(exist_ok=True)
    for name, episodes in (files or {}).items():
        (folder / "rollouts" / name).write_text("".join(json.dumps(e) + "\n" for e in episodes))
    return folder


class Page(html.parser.HTMLParser):
    """What a browser would see: every element, and the text of each script."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.text, self.in_script = [], [], "", False
        self.feed(text)
        self.head, *self.episodes = [json.loads(line) for line in self.scripts[0].split("\n")]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
            self.in_script = True

    def handle_endtag(self, tag):
        self.in_script = False

    def handle_data(self, data):
        if self.in_script:
            self.scripts[-1] += data
        self.text += data


def read_page(run, tmp_path, **options):
    count = write_page(run, tmp_path / "view.html", **options)
    return count, Page((tmp_path / "view.html").read_text(encoding="utf-8"))


def test_data_arrive_whole(tmp_path):
    run = make_run(tmp_path / "run", {"train_000003.jsonl": [make_episode()]})
    count, page = read_page(run, tmp_path)
    assert count == 1
    (episode,) = page.episodes
    assert episode["turns"] == make_episode()["turns"]
    assert episode["final_board"] == "P_\nOG"
    assert page.head["systems"][episode["system"]] == "Walk over the <b>lake</b>."
    assert episode["tokens"] == [7, 8, 9, 10, 11]
    assert episode["runs"] == [2, 2, 1]  # two out of the loss, two in it, one out
    assert episode["logprobs"] == [-500, -2250]  # of the sampled tokens, in thousandths
    assert page.head["index"] == [
        {
            "kind": "train",
            "step": 3,
            "group": 0,
            "member": 0,
            "success": False,
            "return": -0.1,
            "turns": 1,
            "invalid": 1,
        }
    ]


def test_mask_that_begins_in_the_loss(tmp_path):
    episode = make_episode(loss_mask=[1, 0, 0, 0, 1])
    _, page = read_page(make_run(tmp_path / "run", {"train_000003.jsonl": [episode]}), tmp_path)
    assert page.episodes[0]["runs"] == [0, 1, 3, 1]


def test_hostile_text_stays_text(tmp_path):
    episode = make_episode(reply=HOSTILE, system=HOSTILE, env=HOSTILE)
    config = f"env:\n  name: '{HOSTILE}'\nmodel:\n  path: no/such\n"
    run = make_run(tmp_path / "run", {"train_000003.jsonl": [episode]}, config=config)
    _, page = read_page(run, tmp_path)
    assert [tag for tag, _ in page.elements].count("script") == 2
    assert page.episodes[0]["turns"][0]["reply"] == HOSTILE
    assert "<" not in page.scripts[0]


def test_only_the_own_script_may_run_and_nothing_is_fetched(tmp_path):
    _, page = read_page(make_run(tmp_path / "run", {"train_000003.jsonl": [make_episode()]}), tmp_path)
    (policy,) = [a["content"] for t, a in page.elements if t == "meta" and "http-equiv" in a]
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    addresses = [value for _, a in page.elements for key, value in a.items() if key in ("src", "href")]
    assert all(value.startswith("#") for value in addresses)


def test_script_parses_no_html():
    from ragen_jax.viewer import _asset

    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", _asset("page.js"))


def test_lone_surrogates_survive(tmp_path):
    run = make_run(tmp_path / "run", {"train_000003.jsonl": [make_episode(reply="a\ud800b")]})
    _, page = read_page(run, tmp_path)
    assert page.episodes[0]["turns"][0]["reply"] == "a\ud800b"


def test_numbers_that_are_not_finite_are_null(tmp_path):
    episode = make_episode(logprobs=[0.0, 0.0, float("nan"), float("-inf"), 0.0], **{"return": float("nan")})
    _, page = read_page(make_run(tmp_path / "run", {"train_000003.jsonl": [episode]}), tmp_path)
    assert page.episodes[0]["logprobs"] == [None, None]
    assert page.head["index"][0]["return"] is None


def test_newest_first_with_groups_together_and_the_rest_counted(tmp_path):
    files = {
        "eval_000000.jsonl": [make_episode(0, group) for group in range(3)],
        "eval_000010.jsonl": [make_episode(10, group) for group in range(2)],
        "train_000009.jsonl": [make_episode(9, 0, 0)],
        "train_000010.jsonl": [make_episode(10, 1, 0), make_episode(10, 0, 1), make_episode(10, 0, 0)],
    }
    count, page = read_page(make_run(tmp_path / "run", files), tmp_path, max_episodes=6)
    order = [(e["kind"], e["step"], e["group"], e["member"]) for e in page.head["index"]]
    assert count == 6
    assert order == [
        ("train", 10, 0, 0),
        ("train", 10, 0, 1),
        ("train", 10, 1, 0),
        ("eval", 10, 0, 0),
        ("eval", 10, 1, 0),
        ("train", 9, 0, 0),
    ]
    assert "3 older episodes are not in this page, which holds the 6 newest of 9." in page.text


def test_token_texts_come_from_the_tokenizer(tmp_path):
    from ragen_jax.text.tokenizer import load_tokenizer

    tokens = load_tokenizer("tiny").encode("<|im_start|>user\nUp √")
    zeros = [0] * len(tokens)
    episode = make_episode(tokens=tokens, loss_mask=zeros, logprobs=zeros)
    run = make_run(tmp_path / "run", {"train_000003.jsonl": [episode]}, config="model:\n  path: tiny\n")
    _, page = read_page(run, tmp_path)
    texts = [page.head["texts"][str(token)] for token in tokens]
    assert texts[0] == "<|im_start|>"
    assert "".join(texts).startswith("<|im_start|>user\nUp ")


def test_ids_without_a_tokenizer(tmp_path):
    _, page = read_page(make_run(tmp_path / "run", {"train_000003.jsonl": [make_episode()]}), tmp_path)
    assert page.head["texts"] == {}


def test_curves_have_the_points_given():
    metrics = [
        {"step": 0, "phase": "sft", "eval/bandit/success": 0.0},
        {"step": 10, "phase": "sft", "eval/bandit/success": 0.5, "reward/mean": None},
        {"step": 20, "phase": "rl", "eval/bandit/success": 1.0, "reward/mean": 2.0},
    ]
    curves = draw_curves(metrics, eval_levels=None)
    data = [json.loads(html.unescape(text)) for text in re.findall(r'data-points="(.*?)"', curves)]
    # The wide figure's axes span x 44..648 and y 176..12; the small one's end at 308.
    assert data[0] == [
        [0, 0.0, "sft", 44.0, 176.0],
        [10, 0.5, "sft", 346.0, 94.0],
        [20, 1.0, "rl", 648.0, 12.0],
    ]
    assert '<polyline class="line sft" points="44.0,176.0 346.0,94.0"/>' in curves
    assert '<polyline class="line rl" points="346.0,94.0 648.0,12.0"/>' in curves
    assert '<rect class="warm" x="44" y="12" width="302.0" height="164"/>' in curves
    ((step, value, phase, x, _),) = data[1]  # the null is skipped
    assert (step, value, phase, x) == (20, 2.0, "rl", 308.0)


def test_error_band_is_one_standard_error():
    metrics = [{"step": 0, "phase": "rl", "eval/bandit/success": 0.5}]
    curves = draw_curves(metrics, eval_levels=25)  # sqrt(0.5 * 0.5 / 25) = 0.1, 16.4 of 164 high
    assert '<polygon class="error" points="44.0,77.6 44.0,110.4"/>' in curves


@pytest.mark.parametrize("values", [[0.0], [3.0, 3.0], [-2e-7, 1e-7], [1e12, -5.0]])
def test_curves_of_any_range_stay_in_their_figure(values):
    metrics = [{"step": i, "phase": "rl", "policy/grad_norm": value} for i, value in enumerate(values)]
    (text,) = re.findall(r'data-points="(.*?)"', draw_curves(metrics, eval_levels=None))
    assert all(44 <= x <= 308 and 12 <= y <= 136 for *_, x, y in json.loads(html.unescape(text)))


def test_metrics_alone_are_shown(tmp_path):
    count, page = read_page(make_run(tmp_path / "run", metrics=[{"step": 1, "reward/mean": 1.0}]), tmp_path)
    assert count == 0
    assert "This run has written no episodes yet." in page.text


def test_empty_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="nothing to show"):
        write_page(make_run(tmp_path / "run"), tmp_path / "view.html")
    assert not (tmp_path / "view.html").exists()


def test_damaged_rollouts_name_the_line(tmp_path):
    run = make_run(tmp_path / "run", {"train_000003.jsonl": [make_episode()]})
    path = run / "rollouts" / "train_000003.jsonl"
    path.write_text(path.read_text() + '{"step": 3\n')
    with pytest.raises(UserError, match=r"line 2 of .*train_000003\.jsonl is not JSON"):
        write_page(run, tmp_path / "view.html")
    path.write_text('{"step": 3}\n')
    with pytest.raises(UserError, match="lacks env, final_board, group"):
        write_page(run, tmp_path / "view.html")
