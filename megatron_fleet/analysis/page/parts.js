"use strict";
// Parts of the report and of the live page. Trajectories are untrusted text: everything reaches the page through
// textContent, never as markup. A page defines imageOf(digest, number), piecesOf(record) and labelOf(category).
function make(tag, name, text, title) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  if (title) element.title = title;
  return element;
}
const tone = (row) => (row.result === "solved" ? "good" : row.result === "unknown" ? "warn" : "bad");
const shownReward = (reward) => (reward === null ? "unknown" : String(Number(reward.toFixed(4))));

/* Tables: a click on a head sorts. */
function sortByHead(table) {
  table.querySelectorAll("th").forEach((head, column) => {
    const sort = () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent;
      const compare = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
      const rows = [...table.tBodies[0].rows].sort((a, b) => compare(key(a), key(b)) * (descending ? -1 : 1));
      table.tBodies[0].append(...rows);
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  });
}

/* Charts: the pointer reads values off the nearest step. */
function answerPointer(plot) {
  const { labels: names, lines, top, bottom } = JSON.parse(plot.dataset.chart);
  const figure = plot.closest("figure"), readout = figure.querySelector(".readout");
  const legend = [...figure.querySelectorAll(".legend span")];
  const cross = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cross.setAttribute("class", "cross");
  cross.setAttribute("y1", top);
  cross.setAttribute("y2", bottom);
  const nearest = (points, x) => points.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best));
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * plot.viewBox.baseVal.width;
    const at = nearest(lines.map((points) => nearest(points, x)), x);
    cross.setAttribute("x1", at[0]);
    cross.setAttribute("x2", at[0]);
    plot.append(cross);
    readout.textContent = "step " + Number(at[1].toFixed(1));
    lines.forEach((points, i) => {
      const point = nearest(points, at[0]);
      legend[i].textContent = names[i] + (point[1] === at[1] ? " " + point[2] : "");
      legend[i].classList.toggle("picked", point[1] === at[1]);
    });
  });
  plot.addEventListener("pointerleave", () => {
    cross.remove();
    readout.textContent = "";
    legend.forEach((entry, i) => { entry.textContent = names[i]; entry.classList.remove("picked"); });
  });
}

/* Messages and tokens of one trajectory. */
function message([role, text, shown], number, side) {
  const names = ["message", ["system", "user", "assistant", "tool"].includes(role) ? role : "other"];
  if (role === "tool" && /^\s*(Error( \(|:| \d)|\{"error": ?[^n])/i.test(text)) names.push("error");
  const box = make("div", names.join(" "));
  box.append(make("div", "role", (side ? side + " · " : "") + role + " · " + (number + 1)));
  const body = make("pre");
  const parts = role === "assistant" ? text.split(/(<think>[^]*?(?:<\/think>|$)|<tool_call>[^]*?(?:<\/tool_call>|$))/) : [text];
  for (const part of parts) {
    if (part) body.append(make("span", part.startsWith("<think>") ? "think" : part.startsWith("<tool_call>") ? "call" : "", part));
  }
  box.append(body, ...(shown ?? []).map((digest, i) => imageOf(digest, i + 1)));
  return box;
}

function tokens(record) {
  const pieces = piecesOf(record), box = make("div", "tokens");
  const prompt = make("details");
  prompt.append(make("summary", "quiet", `first prompt: ${record.runs[0]} tokens`));
  box.append(make("p", "quiet", "Grey: not sampled. Underlined: sampled by the policy, on a darker ground where less likely. Hold the pointer over a token for its id and log-probability."), prompt);
  if (record.cut) box.append(make("p", "quiet", `The first ${record.ids.length} of ${record.cut} tokens are shown.`));
  let at = 0, sampledBefore = 0;
  record.runs.forEach((length, run) => {
    for (const end = at + length; at < end; at++) {
      if (record.segments.includes(at)) box.append(make("p", "parting", "A new segment: the history was rewritten here."));
      const id = record.ids[at], text = pieces[id] ?? `‹${id}›`;
      const shown = text.replaceAll("\n", "↵\n");
      if (run % 2 === 0) {
        (run === 0 ? prompt : box).append(make("span", "seen", shown, `id ${id} · not sampled`));
      } else {
        const logprob = record.logprobs[sampledBefore++];
        const shade = [-0.1, -0.7, -2, -5].filter((limit) => logprob < limit).length;
        const place = at, version = record.versions.findLast(([start]) => start <= place);
        const details = `id ${id} · log-prob ${logprob} · p ${Math.exp(logprob).toPrecision(3)}` + (version ? ` · weight version ${version[1]}` : "");
        box.append(make("span", shade ? `s s${shade}` : "s", shown, details));
      }
    }
  });
  return box;
}

/* A row of the list of trajectories. */
function listed(row) {
  const link = make("a", "row"), more = make("span", "more");
  link.href = "#trajectory=" + row.id;
  link.dataset.id = row.id;
  more.append(make("span", "pill " + tone(row), shownReward(row.reward)), `${row.env} · ${row.set} · ${row.outcome} · ${row.turns} turns`);
  link.append(make("span", "task", `${row.task} #${row.sample}`), more);
  return link;
}

function chips(row, record) {
  const box = make("div", "chips");
  box.append(make("span", "pill " + tone(row), "reward " + shownReward(record.reward)), make("span", "pill", record.outcome), make("span", "pill", record.env), make("span", "pill", row.set));
  for (const [key, why] of Object.entries(record.failures)) box.append(make("span", "pill warn", labelOf(key), why));
  return box;
}

/* Head, reward, conversation and tokens of a trajectory. */
function trajectory(row, record) {
  const metrics = Object.entries(record.metrics).map(([name, value]) => `${name} ${value}`).join(" · ");
  const head = make("h3", "", `${record.task} #${record.sample}`);
  const reason = make("p", "quiet", [record.reason, record.answer === null ? "no final answer" : "final answer: " + record.answer].filter(Boolean).join(" · "));
  const body = make("div", "messages"), tabs = make("div", "tabs");
  const views = { Conversation: () => record.messages.map((said, i) => message(said, i)), Tokens: () => [record.ids ? tokens(record) : make("p", "quiet", "There are no tokens on record.")] };
  const choose = (name) => {
    body.replaceChildren(...views[name]());
    for (const tab of tabs.children) tab.setAttribute("aria-pressed", String(tab.textContent.startsWith(name)));
  };
  for (const name of Object.keys(views)) {
    const tab = make("button", "", name === "Tokens" ? `Tokens (${record.tokens}, ${record.sampled} sampled)` : name);
    tab.type = "button";
    tab.addEventListener("click", () => choose(name));
    tabs.append(tab);
  }
  choose("Conversation");
  return [head, chips(row, record), reason, make("p", "quiet", metrics), tabs, body];
}
