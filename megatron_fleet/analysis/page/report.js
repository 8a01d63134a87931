const json = (id) => JSON.parse(document.getElementById(id).textContent);
const index = json("index").map(([id, set, env, task, sample, outcome, reward, result, failures, turns, tokens]) =>
  ({ id, set, env, task, sample, outcome, reward, result, failures, turns, tokens }));
const labels = json("labels");
const known = new Map(index.map((row) => [row.id, row]));
const MOST_ROWS = 300;
let pieces = null, images = null;

for (const table of document.querySelectorAll("table")) sortByHead(table);
for (const plot of document.querySelectorAll(".plot")) answerPointer(plot);

/* Messages and tokens of one trajectory. */
const labelOf = (category) => labels[category] ?? category;
const piecesOf = () => (pieces = pieces ?? json("pieces"));
function imageOf(digest, number) {
  images = images ?? json("images");
  if (!images[digest]) return make("p", "quiet", `image ${number}: not on this page; its file is images/${digest}`);
  const image = make("img", "shot", undefined, `image ${number}, in the run's folder: images/${digest}`);
  image.src = images[digest];
  image.alt = `image ${number}`;
  return image;
}

/* Records are gzip in base64, unpacked when they are looked at. */
async function load(id) {
  const element = document.getElementById("t-" + id);
  if (!element) return null;
  const bytes = Uint8Array.from(atob(element.textContent), (c) => c.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(unpacked).text());
}

let asked = null;
async function show(id) {
  asked = id;
  const viewer = document.getElementById("viewer"), row = known.get(id), record = await load(id);
  if (!row || !record || asked !== id) return;
  viewer.replaceChildren(...trajectory(row, record));
  for (const other of document.querySelectorAll(".row")) other.classList.toggle("open", other.dataset.id === id);
  document.querySelector(".row.open")?.scrollIntoView({ block: "nearest" });
}

/* The list and its filters. */
const filters = document.getElementById("filters");
let matching = [];
function fill(name, values, label) {
  for (const value of values) filters.elements[name].append(new Option(label ? label(value) : value, value));
}
function list() {
  const wanted = Object.fromEntries(new FormData(filters));
  const text = wanted.text.toLowerCase();
  matching = index.filter((row) => (!wanted.set || row.set === wanted.set) && (!wanted.env || row.env === wanted.env) && (!wanted.outcome || row.outcome === wanted.outcome) &&
    (!wanted.result || row.result === wanted.result) && (!wanted.failure || row.failures.includes(wanted.failure)) && (!text || row.task.toLowerCase().includes(text)));
  document.getElementById("list").replaceChildren(...matching.slice(0, MOST_ROWS).map((row) => {
    const link = listed(row);
    link.classList.toggle("open", link.hash === location.hash);
    return link;
  }));
  const cut = matching.length > MOST_ROWS ? `; the first ${MOST_ROWS} are listed, narrow the filters to see others` : "";
  document.getElementById("count").textContent = `${matching.length} of ${index.length} trajectories${cut}`;
}
async function follow() {
  const id = /^#trajectory=(.+)$/.exec(location.hash)?.[1];
  if (!id || !known.has(id)) return;
  if (!matching.some((row) => row.id === id)) { filters.reset(); list(); }
  await show(id);
  const viewer = document.getElementById("viewer");
  if (viewer.getBoundingClientRect().top > innerHeight * 0.6 || viewer.getBoundingClientRect().bottom < 80) viewer.scrollIntoView({ block: "start" });
}
if (filters) {
  const distinct = (of) => [...new Set(index.flatMap(of))].sort();
  fill("set", [...new Set(index.map((row) => row.set))].sort((a, b) => a.split(" ")[0].localeCompare(b.split(" ")[0]) || a.split(" ")[1] - b.split(" ")[1]));
  fill("env", distinct((row) => row.env));
  fill("outcome", distinct((row) => row.outcome));
  fill("failure", distinct((row) => row.failures), labelOf);
  filters.addEventListener("input", list);
  filters.addEventListener("submit", (event) => event.preventDefault());
  filters.addEventListener("reset", () => setTimeout(list));
  addEventListener("hashchange", follow);
  addEventListener("keydown", (event) => {
    const way = { j: 1, k: -1 }[event.key];
    if (!way || /INPUT|SELECT/.test(event.target.tagName) || !matching.length) return;
    const open = matching.findIndex((row) => "#trajectory=" + row.id === location.hash);
    const next = matching[Math.min(Math.max(open + way, 0), matching.length - 1)];
    location.hash = "trajectory=" + next.id;
  });
  list();
  follow();
}

/* Before and after: filled when opened. */
async function compare(pair) {
  const sides = make("div", "sides"), before = await load(pair.dataset.before), after = await load(pair.dataset.after);
  const parting = Number(pair.dataset.divergence);
  if (!before || !after) return make("p", "quiet", "Left out: the page has no room for these trajectories.");
  const equal = make("details", "whole");
  const shared = parting < 0 ? before.messages.length : parting;
  equal.append(make("summary", "quiet", `${shared} equal messages`), ...before.messages.slice(0, shared).map((said, i) => message(said, i)));
  sides.append(equal);
  sides.append(make("div", "parting", parting < 0 ? "The conversations are equal." : `First difference: message ${parting + 1}`));
  if (parting < 0) return sides;
  for (let i = parting; i < Math.max(before.messages.length, after.messages.length); i++) {
    for (const [name, side] of [["before", before], ["after", after]]) sides.append(side.messages[i] ? message(side.messages[i], i, name) : make("div"));
  }
  for (const [name, side] of [["before", before], ["after", after]]) sides.append(make("p", "quiet", `${name}: ${side.outcome}, reward ${shownReward(side.reward)} ${side.reason}`));
  return sides;
}
for (const pair of document.querySelectorAll(".pair")) {
  pair.addEventListener("toggle", async () => { pair.append(await compare(pair)); }, { once: true });
}
