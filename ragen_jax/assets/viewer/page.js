"use strict";
// Text of a run reaches the page through text nodes only; nothing here parses HTML.
const byId = (id) => document.getElementById(id);
function el(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children.filter((child) => child !== null && child !== ""));
  return node;
}
function button(label, className, action) {
  const node = el("button", className, label);
  node.type = "button";
  node.addEventListener("click", action);
  return node;
}
const number = (x, digits = 3) =>
  x === null ? "n/a" : String(Number(x.toFixed(digits))).replace("-", "−");

// The data: a head line, then one line an episode, parsed when it is first read.
const lines = byId("data").textContent.split("\n");
const { index, systems, texts } = JSON.parse(lines[0]);
const parsed = new Map();
function episode(i) {
  if (!parsed.has(i)) parsed.set(i, JSON.parse(lines[i + 1]));
  return parsed.get(i);
}
const haystacks = new Map();
function haystack(i) {
  if (!haystacks.has(i)) {
    const turns = JSON.parse(lines[i + 1]).turns; // not kept: a search reads every episode
    haystacks.set(i, turns.map((t) => [t.user, t.reply, t.actions.join(" ")].join("\n")).join("\n").toLowerCase());
  }
  return haystacks.get(i);
}
const groupKey = (e) => `${e.kind}-${e.step}-${e.group}`;
const groups = new Map();
index.forEach((e, i) => {
  if (!groups.has(groupKey(e))) groups.set(groupKey(e), []);
  groups.get(groupKey(e)).push(i);
});

const BOARDS = {
  frozen_lake: {
    P: ["player", "you"], _: ["ice", "ice"], O: ["hole", "hole"], G: ["goal", "goal"],
    X: ["lost", "you, in a hole"], "√": ["won", "you, on the goal"],
  },
  sokoban: {
    P: ["player", "you"], S: ["player-on-target", "you, on a target"], X: ["box", "box"], O: ["target", "target"],
    "√": ["won", "box on its target"], _: ["floor", "floor"], "#": ["wall", "wall"],
  },
};
function symbolsOf(env) {
  const name = Object.keys(BOARDS).find((known) => env.startsWith(known));
  return name ? BOARDS[name] : null;
}
function cell(symbols, symbol) {
  const node = el("span", `cell ${symbols[symbol][0]}`, symbol);
  node.title = symbols[symbol][1];
  return node;
}
function board(env, text) {
  const symbols = symbolsOf(env);
  const rows = text.replace(/\n+$/, "").split("\n").map((row) => [...row]);
  const grid = symbols && rows.every((row) => row.length === rows[0].length && row.every((s) => Object.hasOwn(symbols, s)));
  if (!grid) return el("pre", "board-text", text);
  const node = el("div", "board", ...rows.flat().map((symbol) => cell(symbols, symbol)));
  node.style.gridTemplateColumns = `repeat(${rows[0].length}, max-content)`;
  return node;
}
function legend(env) {
  const symbols = symbolsOf(env);
  if (!symbols) return "";
  return el("div", "legend", ...Object.keys(symbols).map((s) => el("span", "", cell(symbols, s), symbols[s][1])));
}

// A reply, whole and unchanged: its parts are styled by the tags around them.
function reply(text) {
  const node = el("div", "reply");
  let inside = "";
  for (const part of text.split(/(<\/?(?:think|answer)>)/)) {
    const tag = /^<(\/?)(think|answer)>$/.exec(part);
    if (tag) inside = tag[1] ? "" : tag[2];
    node.append(el("span", tag ? "tag" : { think: "thought", answer: "answer", "": "" }[inside], part));
  }
  return node;
}
function turn(env, t, i) {
  const actions = t.actions.length
    ? [el("span", "soft", "executed"), ...t.actions.map((a) => el("span", "action", a))]
    : [el("span", "soft", "no action executed")];
  const numbers = el("span", "numbers", "reward ", el("b", "", number(t.reward)));
  numbers.append(el("span", "soft", `  ·  environment ${number(t.env_reward)}`));
  const result = el("div", "result", ...actions);
  if (!t.format_valid) result.append(el("span", "badge bad", "invalid format"));
  result.append(numbers);
  return el("div", "turn", el("h4", "", `Turn ${i + 1}`), board(env, t.board),
    el("div", "said", el("pre", "user", t.user), reply(t.reply), result));
}

// Every token of the episode; those in the loss are underlined and the warmer, the less likely they were.
function tokens(e) {
  const known = Object.keys(texts).length > 0;
  const body = el("div", known ? "tokens" : "tokens ids");
  let at = 0, sampled = 0;
  e.runs.forEach((length, run) => {
    for (const end = at + length; at < end; at++) {
      const id = e.tokens[at];
      const node = el("span");
      const text = known && Object.hasOwn(texts, id) ? texts[id] : `${id}`;
      text.split("\n").forEach((piece, n) => {
        if (n) node.append(el("span", "newline"), "\n");
        if (piece) node.append(piece);
      });
      if (run % 2) {
        const logprob = e.logprobs[sampled++];
        node.className = "sampled";
        if (logprob === null) node.title = `token ${id}, in the loss, log-probability not finite`;
        else {
          node.title = `token ${id}, in the loss\nlog-probability ${number(logprob / 1000, 3)}, probability ${number(100 * Math.exp(logprob / 1000), 1)}%`;
          node.style.setProperty("--doubt", `${Math.min(85, Math.max(0, -logprob / 1000 / 4 * 85)).toFixed(0)}%`);
        }
      } else node.title = `token ${id}, not in the loss`;
      body.append(node);
    }
  });
  const help = el("p", "token-help", `${sampled} of ${e.tokens.length} tokens are in the loss: sampled by the policy and underlined. Likely`,
    el("span", "scale"), "unlikely (log-probability −4 or less). Point at a token for its number.");
  if (!known) help.append(" The run's tokenizer could not be loaded, so these are ids.");
  return el("div", "", help, body);
}

const view = { shown: [], rows: [], at: -1, tokens: false, side: false };
const outcome = (e) => el("span", e.success ? "good" : "bad", e.success ? "✓" : "✗");
function showEpisode(i) {
  const head = index[i], e = episode(i);
  const title = el("h3", "", el("span", `badge ${head.success ? "good" : "bad"}`, head.success ? "success" : "failed"),
    el("span", "", `step ${head.step}, ${head.kind}, group ${head.group}, member ${head.member}`),
    el("span", "soft", `return ${number(head.return)} · ${head.turns} turn${head.turns === 1 ? "" : "s"}`));
  if (head.invalid) title.append(el("span", "badge bad", `invalid format ×${head.invalid}`));
  const system = el("details", "system", el("summary", "", "system prompt"), el("pre", "", systems[e.system]));
  const body = view.tokens ? [tokens(e)] : [system, ...e.turns.map((t, n) => turn(e.env, t, n)),
    el("div", "final", el("h4", "", "Final board"), board(e.env, e.final_board), legend(e.env))];
  return el("article", "episode", title, ...body);
}
function toggle(label, key) {
  const node = button(label, "", () => { view[key] = !view[key]; show(); });
  node.setAttribute("aria-pressed", view[key]);
  return node;
}
function show() {
  const reader = byId("reader");
  if (view.at < 0) {
    reader.replaceChildren(el("p", "empty", index.length ? "No episode fits these filters." : "There are no episodes."));
    return;
  }
  const members = groups.get(groupKey(index[view.at]));
  const bar = el("div", "members");
  if (members.length > 1) {
    bar.append("group:");
    for (const i of members) {
      const chip = button("", i === view.at ? "here" : "", () => select(i));
      chip.append(outcome(index[i]), " ", el("b", "", `#${index[i].member}`), `  ${number(index[i].return)}`);
      chip.title = `member ${index[i].member}, return ${number(index[i].return)}`;
      bar.append(chip);
    }
  }
  const toggles = el("span", "right");
  if (members.length > 1) toggles.append(toggle("side by side", "side"));
  toggles.append(toggle("tokens", "tokens"));
  bar.append(toggles);
  if (view.side && members.length > 1) {
    const side = el("div", "side", ...members.map(showEpisode));
    const here = side.children[members.indexOf(view.at)];
    here.classList.add("here");
    reader.replaceChildren(bar, side);
    reader.scrollLeft = here.offsetLeft - side.children[0].offsetLeft;
  } else reader.replaceChildren(bar, showEpisode(view.at));
  markFound();
}
function select(i, { link = true } = {}) {
  view.at = i;
  byId("reader").scrollTop = 0;
  show();
  if (i >= 0) {
    const row = view.rows.indexOf(i), list = byId("list");
    if (row >= 0) {
      const top = row * ROW;
      if (top < list.scrollTop + ROW) list.scrollTop = top - ROW;
      else if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
    }
    if (link) history.replaceState(null, "", `#${groupKey(index[i])}-${index[i].member}`);
  }
  drawRows();
}

// The list draws only the rows in sight.
const ROW = 30;
function drawRows() {
  const list = byId("list"), first = Math.max(0, Math.floor(list.scrollTop / ROW) - 10);
  const visible = view.rows.slice(first, first + Math.ceil(list.clientHeight / ROW) + 20);
  byId("rows").style.height = `${view.rows.length * ROW}px`;
  byId("rows").replaceChildren(...visible.map((row, n) => {
    let node;
    if (typeof row === "string") {
      const members = groups.get(row), e = index[members[0]];
      node = el("div", "row group", el("b", "", `step ${e.step}`), `${e.kind}, group ${e.group}`,
        el("span", "right", `${members.filter((i) => index[i].success).length}/${members.length} ✓`));
    } else {
      const e = index[row];
      node = el("div", row === view.at ? "row chosen" : "row", outcome(e), `member ${e.member}`,
        el("span", "soft", `${e.turns} turn${e.turns === 1 ? "" : "s"}`));
      if (e.invalid) node.append(el("span", "bad", "format"));
      node.append(el("span", "right", number(e.return)));
      node.addEventListener("click", () => select(row));
    }
    node.style.top = `${(first + n) * ROW}px`;
    return node;
  }));
}
function filter({ link = true } = {}) {
  const needle = byId("search").value.trim().toLowerCase();
  const [kind, step, success] = ["kind", "step", "outcome"].map((id) => byId(id).value);
  view.shown = [...index.keys()].filter((i) => {
    const e = index[i];
    return (!kind || e.kind === kind) && (!step || String(e.step) === step) &&
      (!success || e.success === (success === "1")) && (!byId("invalid").checked || e.invalid > 0) &&
      (!needle || haystack(i).includes(needle));
  });
  view.rows = [];
  let group = null;
  for (const i of view.shown) {
    if (groupKey(index[i]) !== group) view.rows.push((group = groupKey(index[i])));
    view.rows.push(i);
  }
  const won = view.shown.filter((i) => index[i].success).length;
  byId("count").textContent = view.shown.length
    ? `${view.shown.length} of ${index.length}, ${number((100 * won) / view.shown.length, 0)}% success` : `0 of ${index.length}`;
  select(view.shown.includes(view.at) ? view.at : view.shown.length ? view.shown[0] : -1, { link });
}
function markFound() {
  if (!window.Highlight) return;
  CSS.highlights.clear();
  const needle = byId("search").value.trim().toLowerCase();
  if (!needle) return;
  const found = new Highlight();
  const walker = document.createTreeWalker(byId("reader"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.toLowerCase();
    if (text.length !== walker.currentNode.data.length) continue;
    for (let at = text.indexOf(needle); at >= 0; at = text.indexOf(needle, at + needle.length)) {
      const range = new Range();
      range.setStart(walker.currentNode, at);
      range.setEnd(walker.currentNode, at + needle.length);
      found.add(range);
    }
  }
  CSS.highlights.set("found", found);
}

function move(by) {
  if (!view.shown.length) return;
  const at = view.shown.indexOf(view.at);
  const next = at < 0 ? 0 : Math.min(view.shown.length - 1, Math.max(0, at + by));
  byId("episodes").scrollIntoView();
  select(view.shown[next]);
}
function moveGroup(by) {
  const heads = view.shown.filter((i, n) => !n || groupKey(index[i]) !== groupKey(index[view.shown[n - 1]]));
  const at = heads.findLastIndex((i) => i <= view.at);
  byId("episodes").scrollIntoView();
  if (heads.length) select(heads[Math.min(heads.length - 1, Math.max(0, at + by))]);
}
const KEYS = {
  j: () => move(1), k: () => move(-1), "]": () => moveGroup(1), "[": () => moveGroup(-1),
  t: () => { view.tokens = !view.tokens; show(); }, g: () => { view.side = !view.side; show(); },
  "/": () => { byId("episodes").scrollIntoView(); byId("search").focus(); },
};
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest && event.target.closest("input[type=search], select");
  if (event.key === "Escape" && typing) event.target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(KEYS, event.key)) return;
  event.preventDefault();
  KEYS[event.key]();
});

for (const figure of document.querySelectorAll(".curve")) {
  const svg = figure.querySelector("svg"), points = JSON.parse(svg.dataset.points);
  const [line, dot] = svg.querySelectorAll(".cursor"), output = figure.querySelector("output");
  const say = ([step, value, phase]) => {
    output.className = phase === "sft" ? "sft" : "";
    output.textContent = `step ${step}: ${String(Number(value.toPrecision(4))).replace("-", "−")}`;
  };
  const rest = () => {
    for (const mark of [line, dot]) mark.setAttribute("visibility", "hidden");
    say(points[points.length - 1]);
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const near = points.reduce((best, p) => (Math.abs(p[3] - x) < Math.abs(best[3] - x) ? p : best));
    line.setAttribute("x1", near[3]);
    line.setAttribute("x2", near[3]);
    dot.setAttribute("cx", near[3]);
    dot.setAttribute("cy", near[4]);
    for (const mark of [line, dot]) mark.setAttribute("visibility", "visible");
    say(near);
  });
  svg.addEventListener("pointerleave", rest);
  rest();
}

function options(id, all, values) {
  byId(id).append(...[["", all], ...values].map(([value, label]) => {
    const node = el("option", "", label);
    node.value = value;
    return node;
  }));
}
const distinct = (key) => [...new Set(index.map((e) => e[key]))];
options("kind", "all kinds", distinct("kind").map((kind) => [kind, kind]));
options("step", "all steps", distinct("step").map((step) => [step, `step ${step}`]));
let typed;
byId("search").addEventListener("input", () => { clearTimeout(typed); typed = setTimeout(filter, 200); });
for (const id of ["kind", "step", "outcome", "invalid"]) byId(id).addEventListener("change", filter);
byId("list").addEventListener("scroll", drawRows);
window.addEventListener("resize", drawRows);
byId("theme").addEventListener("click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
});
const wanted = decodeURIComponent(location.hash.slice(1));
view.at = index.findIndex((e) => `${groupKey(e)}-${e.member}` === wanted);
if (view.at >= 0) byId("episodes").scrollIntoView();
filter({ link: view.at >= 0 });
