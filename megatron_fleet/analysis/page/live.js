/* The live page: asks what is new, and changes only that, so that the reader's place stays. */
const SILENT = "The server of this page does not answer; what is shown is old.";
const POLL_MS = 2000, HIDDEN_MS = 30000, PAGE = 100;
const byId = (id) => document.getElementById(id);
const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const tags = new Map(), drawn = { charts: 0, episodes: 0 };

/* Answer of the server; null: the same as the last one. */
async function ask(name, address) {
  const last = tags.get(name);
  const headers = last?.address === address ? { "If-None-Match": last.tag } : {};
  const answer = await fetch(address, { headers, cache: "no-store" }).catch(() => { throw Object.assign(new Error(SILENT), { status: 0 }); });
  if (answer.status === 304) return null;
  if (!answer.ok) throw Object.assign(new Error(await answer.text()), { status: answer.status });
  const content = await answer.json();
  tags.set(name, { address, tag: answer.headers.get("ETag") });
  return content;
}

/* Make the children of a node those of the items, reusing the ones with the same key. */
function sync(parent, items, key, create, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let at = parent.firstElementChild;
  for (const item of items) {
    const id = String(key(item));
    let node = old.get(id);
    if (node) old.delete(id);
    else (node = create(item)).dataset.key = id;
    if (node === at) at = at.nextElementSibling;
    else parent.insertBefore(node, at);
    update(node, item);
  }
  for (const node of old.values()) node.remove();
}

/* Run an update; what the reader looks at stays where it is. */
function keepPlace(update) {
  const list = byId("list"), height = list.scrollHeight;
  const under = scrollY > 0 && document.elementFromPoint(innerWidth / 2, document.querySelector("header").offsetHeight + 12);
  const anchor = under && under.closest("figure, tr, .row, .message, .fact, .bar, .viewer, section");
  const top = anchor && anchor.getBoundingClientRect().top;
  const read = list.scrollTop > 0 && [...byId("rows").children].find((row) => row.offsetTop + row.offsetHeight > list.scrollTop);
  const offset = read && read.offsetTop;
  update();
  if (read && read.isConnected && list.scrollHeight !== height) list.scrollTop += read.offsetTop - offset;
  if (anchor && anchor.isConnected) scrollBy(0, anchor.getBoundingClientRect().top - top);
}

/* Tables, in the order that the reader chose. */
function fillTable(table, block) {
  table.block = block;
  if (!table.tHead) {
    table.append(make("thead"), make("tbody"));
    table.tHead.append(make("tr"));
  }
  const heads = block.rows.length ? block.head.map((text, column) => ({ text, column })) : [];
  sync(table.tHead.rows[0], heads, (head) => head.text, () => {
    const cell = make("th");
    cell.tabIndex = 0;
    const choose = () => {
      const descending = cell.getAttribute("aria-sort") === "ascending";
      for (const other of cell.parentNode.cells) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", descending ? "descending" : "ascending");
      fillTable(table, table.block);
    };
    cell.addEventListener("click", choose);
    cell.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(); });
    return cell;
  }, (cell, { text, column }) => {
    setText(cell, text);
    cell.title = block.titles?.[column] ?? "";
    cell.classList.toggle("n", block.numbers.includes(column));
  });
  const rows = [...block.rows], sorted = [...table.tHead.rows[0].cells].findIndex((cell) => cell.ariaSort);
  if (sorted >= 0) {
    const way = table.tHead.rows[0].cells[sorted].ariaSort === "descending" ? -1 : 1;
    const value = (row) => row[sorted].sort ?? row[sorted].text;
    rows.sort((a, b) => way * (typeof value(a) === "number" && typeof value(b) === "number" ? value(a) - value(b) : String(value(a)).localeCompare(String(value(b)))));
  }
  sync(table.tBodies[0], rows, (row) => row[0].text, () => make("tr"), (line, row) => {
    while (line.cells.length < row.length) line.append(make("td"));
    row.forEach((cell, column) => {
      const box = line.cells[column], number = block.numbers.includes(column);
      box.className = [number ? "n" : "", cell.tone].filter(Boolean).join(" ");
      if (box.title !== cell.title) box.title = cell.title;
      if (box.textContent === cell.text && !box.firstElementChild === !(["good", "bad", "warn"].includes(cell.tone) && !number)) return;
      box.replaceChildren(["good", "bad", "warn"].includes(cell.tone) && !number ? make("span", "pill " + cell.tone, cell.text) : cell.text);
    });
  });
  table.parentNode.hidden = !block.rows.length;
}

function fillFacts(facts) {
  sync(byId("facts"), facts, (fact) => fact.label, (fact) => {
    const box = make("div");
    box.append(make("span", "label", fact.label), make("span", "value"), make("span", "detail"));
    return box;
  }, (box, fact) => {
    box.className = "fact " + fact.tone;
    setText(box.children[1], fact.value);
    setText(box.children[2], fact.detail);
  });
}

function fillAlerts(alerts) {
  byId("alerts").hidden = !alerts.length;
  const seen = new Map();
  const key = (alert) => {
    const text = alert.time + alert.text, count = (seen.get(text) ?? 0) + 1;
    seen.set(text, count);
    return text + " " + count;
  };
  sync(byId("alert-list"), alerts, key, (alert) => {
    const line = make("li"), when = new Date(alert.time * 1000);
    line.append(make("span", "quiet", when.toLocaleTimeString(), when.toLocaleString()), make("span", "pill " + (alert.level === "WARNING" ? "warn" : "bad"), alert.level.toLowerCase()), make("span", "", alert.text));
    return line;
  }, () => {});
}

/* Bars of the steps: phases that run at once have lanes below each other. */
function fillTimeline({ steps, current, legend }) {
  const all = [...(current ? [{ ...current, current: true }] : []), ...steps];
  const longest = Math.max(...all.map((step) => step.seconds), 0.001);
  sync(byId("bars"), all, (step) => (step.current ? "current " : "") + step.step, () => {
    const bar = make("div");
    bar.append(make("b"), make("div", "track"), make("span", "quiet"));
    return bar;
  }, (bar, step) => {
    bar.className = step.current ? "bar current" : "bar";
    setText(bar.children[0], step.step);
    setText(bar.children[2], step.text);
    const ends = [];
    step.parts.forEach((part, index) => {
      let lane = ends.findIndex((end) => end <= part.start + longest / 500);
      if (lane < 0) lane = ends.length;
      ends[lane] = part.start + part.seconds;
      part.lane = lane;
      part.index = index;
    });
    bar.children[1].style.height = `${14 * Math.max(ends.length, 1)}px`;
    sync(bar.children[1], step.parts, (part) => part.index, () => make("span"), (box, part) => {
      box.className = `part ${part.kind}` + (part.running ? " running" : "");
      box.title = part.text;
      box.style.left = `${(100 * part.start) / longest}%`;
      box.style.width = `${(100 * part.seconds) / longest}%`;
      box.style.top = `${14 * part.lane}px`;
    });
  });
  sync(byId("phases"), legend, ([kind]) => kind, ([kind, label]) => make("span", kind, label), () => {});
  byId("timeline").hidden = !all.length;
}

function fill(now) {
  setText(byId("name"), now.name);
  setText(byId("subtitle"), now.subtitle);
  document.title = `${now.facts[0].value} · ${now.name}`;
  const state = byId("state");
  state.className = "pill " + now.state.tone;
  state.title = now.state.detail;
  setText(state, now.state.text);
  byId("notes").hidden = !now.notes.length;
  sync(byId("notes"), now.notes, (note) => note, (note) => make("li", "", note), () => {});
  fillFacts(now.facts);
  fillAlerts(now.alerts);
  fillTimeline(now.timeline);
  fillTable(byId("memory"), now.tables.memory);
  fillTable(byId("awaited-table"), now.tables.awaited);
  fillTable(byId("engine-table"), now.tables.engines);
  fillTable(byId("environment-table"), now.tables.environments);
  for (const id of ["awaited", "engines", "environments"]) byId(id).hidden = byId(id).querySelector(".scroll").hidden;
  const select = byId("filters").elements.env;
  sync(select, ["", ...now.environments], (env) => env, (env) => new Option(env || "all", env), () => {});
}

/* Curves, drawn by the server like those of the report. */
let pointerAt = 0;
addEventListener("pointermove", (event) => { pointerAt = event.clientX; }, { capture: true, passive: true });
function fillCharts(charts) {
  byId("no-curves").hidden = charts.length > 0;
  sync(byId("charts"), charts, (chart) => chart.title, (chart) => {
    const figure = make("figure");
    figure.append(make("figcaption", "", chart.title), make("div", "legend"), make("div", "readout"));
    return figure;
  }, (figure, chart) => {
    if (figure.drawn === chart.svg) return;
    figure.drawn = chart.svg;
    const plot = document.importNode(new DOMParser().parseFromString(chart.svg, "image/svg+xml").documentElement, true);
    figure.querySelector(".plot")?.remove();
    figure.querySelector(".readout").textContent = "";
    figure.querySelector(".legend").replaceChildren(...chart.lines.map((line, i) => make("span", `c${i % 8}`, line)));
    figure.firstElementChild.after(plot);
    answerPointer(plot);
    if (figure.matches(":hover")) plot.dispatchEvent(new PointerEvent("pointermove", { clientX: pointerAt }));
  });
}

/* Trajectories: the list, its filters, and the open one. */
const filters = byId("filters");
let limit = PAGE, rows = [], first = true, labels = {}, wantedId = null;
const labelOf = (category) => labels[category] ?? category;
const piecesOf = (record) => record.pieces;
function imageOf(digest, number) {
  const image = make("img", "shot", undefined, `image ${number}, in the run's folder: images/${digest}`);
  image.alt = `image ${number}`;
  image.addEventListener("error", () => image.replaceWith(make("p", "quiet", `image ${number}: cannot be shown; its file is images/${digest}`)));
  image.src = `data/image/${digest}`;
  return image;
}

async function list() {
  const wanted = new URLSearchParams([...new FormData(filters)].filter(([, value]) => value));
  wanted.set("limit", limit);
  const found = await ask("list", `data/trajectories?${wanted}`);
  if (!found) return;
  rows = found.rows;
  keepPlace(() => {
    const fresh = !first;
    sync(byId("rows"), rows, (row) => row.id, (row) => {
      const link = listed(row);
      if (fresh) link.classList.add("new");
      return link;
    }, (link, row) => link.classList.toggle("open", row.id === openId()));
    first = false;
    byId("older").hidden = !found.more;
    const back = found.searched_to === null ? "" : `, searched back to step ${found.searched_to}`;
    setText(byId("count"), `${rows.length} trajectories, newest first${found.more ? back + "; there are older ones" : ""}`);
  });
}
const openId = () => /^#trajectory=(.+)$/.exec(location.hash)?.[1] ?? null;

async function show() {
  const id = openId(), viewer = byId("viewer");
  if (!id) return;
  wantedId = id;
  let nodes;
  try {
    const found = await ask("trajectory", `data/trajectory/${encodeURIComponent(id)}`);
    if (!found) return;
    labels = found.labels;
    nodes = trajectory(found.row, found.record);
  } catch (error) {
    nodes = [make("p", "quiet", error.message)];
    if (error.status === undefined) reportError(error);
  }
  if (wantedId !== id) return; // another one was chosen meanwhile
  viewer.replaceChildren(...nodes);
  for (const row of document.querySelectorAll(".row")) row.classList.toggle("open", row.dataset.id === id);
  document.querySelector(".row.open")?.scrollIntoView({ block: "nearest" });
  const box = viewer.getBoundingClientRect();
  if (box.top > innerHeight * 0.6 || box.bottom < 80) byId("trajectories").scrollIntoView({ block: "start" });
}

let typing = 0;
function search() {
  clearTimeout(typing);
  typing = setTimeout(() => {
    limit = PAGE;
    first = true;
    byId("list").scrollTop = 0;
    list().catch(lost);
  }, 150);
}
filters.addEventListener("input", search);
filters.addEventListener("reset", search);
filters.addEventListener("submit", (event) => event.preventDefault());
byId("older").addEventListener("click", () => {
  if (rows.length >= limit) limit += PAGE;
  tags.delete("list");
  first = true;
  list().catch(lost);
});
addEventListener("hashchange", show);
addEventListener("keydown", (event) => {
  const way = { j: 1, k: -1 }[event.key];
  if (!way || /INPUT|SELECT/.test(event.target.tagName) || !rows.length) return;
  const open = rows.findIndex((row) => row.id === openId());
  location.hash = "trajectory=" + rows[Math.min(Math.max(open + way, 0), rows.length - 1)].id;
});

/* The clock of the page. */
let timer = 0;
function lost(error) {
  const box = byId("lost");
  box.hidden = !error;
  if (!error) return;
  setText(box, error.status === 403 ? "The server was started anew: open the address that it printed." : error.message);
  if (error.status === undefined) reportError(error);
}
async function tick() {
  clearTimeout(timer);
  try {
    const now = await ask("now", "data/now");
    if (now) {
      keepPlace(() => fill(now));
      if (drawn.charts !== now.versions.charts) {
        const charts = await ask("charts", "data/charts");
        if (charts) keepPlace(() => fillCharts(charts));
        drawn.charts = now.versions.charts;
      }
      if (drawn.episodes !== now.versions.episodes) {
        await list();
        drawn.episodes = now.versions.episodes;
      }
    }
    lost(null);
  } catch (error) {
    lost(error);
  }
  clearTimeout(timer);
  timer = setTimeout(tick, document.hidden ? HIDDEN_MS : POLL_MS);
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) tick(); });
tick().then(show);
