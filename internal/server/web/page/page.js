"use strict";
// Deployments are made of events alone; everything else is what /state says.

const stages = ["admitted", "resolved", "tables", "mounted", "created", "started", "restored", "ready"];
const words = {
  admitted: "waited for its turn", resolved: "manifest read", tables: "tables read", mounted: "tree mounted", created: "container created",
  started: "process started", restored: "processes restored", ready: "serving",
};
const most = 200; // deployments that are shown

const $ = (id) => document.getElementById(id);

function element(name, text, ...classes) {
  const e = document.createElement(name);
  if (text !== undefined) e.textContent = text;
  if (classes.length) e.classList.add(...classes);
  return e;
}

function size(n) {
  if (!n) return "0";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (n < 1000 || unit === "GB") return (n < 10 && unit !== "B" ? n.toFixed(1) : Math.round(n)) + " " + unit;
    n /= 1000;
  }
}

const seconds = (s) => s.toFixed(2) + " s";

// --- deployments -----------------------------------------------------------

const deployments = new Map(); // by name, the running or last one of it

function take(e) {
  if (e.kind === "resync") return forget();
  if (e.kind === "stage" && e.name) {
    let d = deployments.get(e.name);
    if (!d || d.ended || d.stages[e.stage] !== undefined) {
      d = { name: e.name, image: e.image, stages: {}, begun: Date.parse(e.time) - e.at * 1000, ended: false };
      deployments.delete(e.name);
      deployments.set(e.name, d);
    }
    d.stages[e.stage] = e.at;
    if (e.stage === "ready") said(`${d.name} is ready after ${seconds(e.at)}`);
    show(d);
  } else if (e.kind === "record" && e.name && e.record) {
    const d = deployments.get(e.name) || { name: e.name, stages: {} };
    Object.assign(d, { image: e.record.image, stages: e.record.stages, record: e.record, ended: true });
    deployments.set(e.name, d);
    if (e.record.error) said(`${d.name}: ${e.record.error}`);
    show(d);
  }
  while (deployments.size > most) {
    const [name, d] = deployments.entries().next().value;
    deployments.delete(name);
    d.row?.remove();
  }
}

// forget drops what was under way: how it went on was missed, and what still goes on is told anew.
function forget() {
  for (const [name, d] of deployments) {
    if (d.ended || d.stages.ready !== undefined) continue;
    deployments.delete(name);
    d.row?.remove();
  }
}

let spoken = "";
function said(text) {
  if (text !== spoken) $("said").textContent = spoken = text;
}

function show(d) {
  const body = $("deployment-table").tBodies[0];
  if (!d.row) {
    d.row = element("tr");
    for (let i = 0; i < 8; i++) d.row.append(i ? element("td") : Object.assign(element("th"), { scope: "row" }));
    d.row.children[3].classList.add("number");
    for (const i of [5, 6, 7]) d.row.children[i].classList.add("number");
    d.row.children[2].append(bar());
    for (const old of [...body.rows].filter((r) => r.children[0].textContent === d.name)) old.remove();
    body.prepend(d.row);
    $("deployment-table").hidden = false;
    $("no-deployments").hidden = true;
  }
  const [name, image, , ready, way, registry, pop, here] = d.row.children;
  name.textContent = d.name;
  image.textContent = d.image;
  const failed = d.record?.error;
  d.row.classList.toggle("running", !d.ended && d.stages.ready === undefined);
  ready.textContent = failed ? "failed" : d.stages.ready !== undefined ? seconds(d.stages.ready) : "";
  ready.classList.toggle("bad", !!failed);
  way.replaceChildren();
  if (d.record) {
    const w = d.record.way || {};
    way.append(element("div", [w.pull, w.start].filter(Boolean).join(", ")));
    const why = failed ? [failed] : w.why || [];
    for (const line of why) way.append(element("div", line, "note"));
    registry.textContent = size(d.record.bytes.registry);
    pop.textContent = size(d.record.bytes.pop);
    here.textContent = size(d.record.bytes.local);
    steps(d);
  }
  scale();
}

// steps shows the pieces of the work of a deployment that has ended, each in its place in time.
// They are made when somebody opens them.
function steps(d) {
  const cell = d.row.children[2];
  cell.querySelector("details")?.remove();
  const list = d.record.spans || [];
  if (!list.length) return;
  const box = element("details");
  box.append(element("summary", `${list.length} steps`));
  box.addEventListener("toggle", () => {
    if (!box.open || box.children.length > 1) return;
    const whole = Math.max(...list.map((s) => s.to), 0.001);
    const ol = element("ol", undefined, "steps");
    for (const s of [...list].sort((a, b) => a.from - b.from || b.to - a.to)) {
      const track = element("span", undefined, "track"), part = element("i");
      part.style.left = (100 * s.from) / whole + "%";
      part.style.width = (100 * (s.to - s.from)) / whole + "%";
      track.append(part);
      const path = s.name.split("/"), name = element("span", path.at(-1));
      name.style.paddingLeft = path.length - 1 + "em";
      const took = element("span", ((s.to - s.from) * 1000).toFixed(1) + " ms", "number");
      const li = element("li");
      li.title = [s.name, `from ${seconds(s.from)}`, ...Object.entries(s.attributes || {}).map(([k, v]) => `${k} ${v}`)].join(", ");
      li.append(name, track, took);
      ol.append(li);
    }
    box.append(ol);
  });
  cell.append(box);
}

function bar() {
  const b = element("div", undefined, "bar");
  b.setAttribute("role", "img");
  b.tabIndex = 0;
  return b;
}

// scale draws all waterfalls to the scale of the slowest that is shown.
let drawing = false;
function scale() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    let longest = 0;
    for (const d of deployments.values()) longest = Math.max(longest, until(d));
    for (const d of deployments.values()) waterfall(d, longest);
  });
}

function until(d) {
  const at = stages.map((s) => d.stages[s]).filter((t) => t !== undefined);
  const last = at.length ? Math.max(...at) : 0;
  return d.ended || d.stages.ready !== undefined ? last : Math.max(last, (Date.now() - d.begun + ahead) / 1000);
}

function waterfall(d, longest) {
  const b = d.row.children[2].firstChild;
  const reached = stages.filter((s) => d.stages[s] !== undefined).sort((x, y) => d.stages[x] - d.stages[y]);
  const parts = [];
  let from = 0;
  for (const s of reached) {
    parts.push([s, d.stages[s] - from]);
    from = d.stages[s];
  }
  if (!d.ended && d.stages.ready === undefined) {
    parts.push([stages[Math.min(stages.indexOf(reached.at(-1)) + 1, stages.length - 1)], Math.max(0, until(d) - from)]);
  }
  b.replaceChildren(...parts.map(([s, took]) => {
    const p = element("span", undefined, s);
    p.style.width = longest ? (100 * took) / longest + "%" : "0";
    p.title = `${words[s]}: ${seconds(took)}`;
    return p;
  }));
  b.setAttribute("aria-label", reached.map((s) => `${words[s]} at ${seconds(d.stages[s])}`).join(", ") || "begun");
}

// --- state -----------------------------------------------------------------

let ahead = 0; // of the node's clock to this browser's, milliseconds

function draw(s) {
  ahead = Date.parse(s.now) - Date.now();
  $("node").textContent = s.version.node;
  document.title = "Dewpoint " + s.version.node;
  $("about").textContent = [s.version.version, s.version.engine, "Linux " + s.version.kernel, s.version.mount].filter(Boolean).join(" · ");
  containers(s.containers || []);
  queue(s.queue || {}, Date.parse(s.now));
  layers(s.layers || [], Date.parse(s.now));
  pop(s.pop);
}

function rows(table, list, none, cells) {
  table.hidden = list.length === 0;
  if (none) none.hidden = list.length > 0;
  table.tBodies[0].replaceChildren(...list.map((x) => {
    const r = element("tr");
    r.append(...cells(x));
    return r;
  }));
}

function containers(list) {
  const sorted = [...list].sort((a, b) => Date.parse(b.created) - Date.parse(a.created));
  rows($("container-table"), sorted, $("no-containers"), (c) => {
    const status = element("td", c.status === "exited" ? `exited, status ${c.exit_code}` : c.status);
    if (c.read_error) status.append(element("div", "reads fail: " + c.read_error, "note", "bad"));
    const ports = (c.ports || []).map((p) => `${p.host_ip ? p.host_ip + ":" : ""}${p.host}→${p.container}/${p.protocol}`).join(", ");
    const name = Object.assign(element("th", c.name), { scope: "row" });
    return [name, element("td", c.image), status, element("td", c.ip || ""), element("td", ports), element("td", new Date(c.created).toLocaleString())];
  });
}

const reasons = { turn: "its turn", memory: "memory", cpu: "processors", link: "the link", disk: "the disk" };

function queue(q, now) {
  const first = q.first || [];
  $("queue-section").hidden = !q.total;
  $("queue-note").textContent = q.total > first.length ? `${q.total} wait, the first ${first.length} are shown` : q.total ? `${q.total} wait` : "";
  rows($("queue-table"), first, null, (d) => [
    element("td", d.position || "", "number"), Object.assign(element("th", d.name), { scope: "row" }), element("td", d.image),
    element("td", reasons[d.waits] || d.waits || ""), element("td", d.caller || ""), element("td", seconds(Math.max(0, (now - Date.parse(d.asked)) / 1000)), "number"),
  ]);
}

const shown = new Map(); // layers' elements by diffID

function layers(list, now) {
  $("no-layers").hidden = list.length > 0;
  for (const [id, li] of shown) {
    if (!list.some((l) => l.diff_id === id)) {
      li.remove();
      shown.delete(id);
    }
  }
  for (const l of list) {
    let li = shown.get(l.diff_id);
    if (!li) {
      li = element("li");
      li.append(element("div"), element("canvas"), missed(li));
      li.children[1].setAttribute("role", "img");
      shown.set(l.diff_id, li);
      $("layers").append(li);
    }
    const share = l.present.reduce((a, b) => a + b, 0) / Math.max(1, l.present.length);
    const waits = l.waits || [];
    const text = `${Math.floor(share * 100)} % of ${size(l.size)} ` + (l.pulled ? "fetched, waited for as a whole" : `here, ${l.waited} waited for`);
    li.layer = l;
    li.firstChild.replaceChildren(element("span", (l.image || "") + " "), element("span", `${l.diff_id.slice(7, 19)}: ${text}`, "note"));
    li.children[1].setAttribute("aria-label", text);
    paint(li.children[1], l.present, waits, now);
    const box = li.lastChild;
    box.hidden = waits.length === 0;
    box.firstChild.textContent = `what was waited for${l.waited > waits.length ? `, the last ${waits.length} times` : ""}`;
    if (box.open) tell(box, l, now);
  }
}

// missed is the list of what was waited for in a layer; it is made when somebody opens it.
function missed(li) {
  const box = element("details");
  box.append(element("summary"), element("ol", undefined, "waits"));
  box.addEventListener("toggle", () => box.open && tell(box, li.layer, Date.now() + ahead));
  return box;
}

// tell says of each wait where it was, when, and how long, the latest first.
function tell(box, l, now) {
  box.lastChild.replaceChildren(...[...l.waits].reverse().map((w) =>
    element("li", `at ${size(w.at * l.size)} of ${size(l.size)}, ${Math.max(0, Math.round((now - Date.parse(w.begun)) / 1000))} s ago, for ${seconds(w.took)}`)));
}

// paint draws what is here of a layer, and above it where it was waited for: the later the stronger.
function paint(canvas, present, waits, now) {
  const style = getComputedStyle(document.documentElement);
  const width = (canvas.width = canvas.clientWidth * devicePixelRatio);
  const height = (canvas.height = canvas.clientHeight * devicePixelRatio);
  const c = canvas.getContext("2d");
  c.fillStyle = style.getPropertyValue("--local");
  present.forEach((p, i) => {
    c.globalAlpha = p;
    c.fillRect((i * width) / present.length, height / 3, width / present.length + 1, (2 * height) / 3);
  });
  c.fillStyle = style.getPropertyValue("--wait");
  for (const w of waits) {
    c.globalAlpha = Math.max(0.15, 1 - (now - Date.parse(w.begun)) / 60000);
    c.fillRect(w.at * (width - 2 * devicePixelRatio), 0, 2 * devicePixelRatio, height / 3);
  }
}

function pop(p) {
  $("pop-section").hidden = !p;
  if (!p) return;
  $("pop-name").textContent = p.name || "";
  const store = p.store.state === "none" ? "no shared store" : `store ${p.store.path || ""}: ${p.store.state}, ${size(p.store.bytes)} of layers, ${size(p.store.free)} free of ${size(p.store.total)}`;
  $("pop-store").textContent = [store + (p.store.why ? ` (${p.store.why})` : ""), `coordinator ${p.coordinator.kind}: ${p.coordinator.state}`].join(" · ");
  rows($("pop-table"), p.nodes || [], null, (n) => {
    const from = { local: n.local, pop: { layers: n.store.layers + n.peer.layers, bytes: n.store.bytes + n.peer.bytes }, registry: n.registry };
    const all = from.local.layers + from.pop.layers + from.registry.layers;
    const b = bar();
    const says = { local: "this node", pop: "the PoP", registry: "the registry" };
    for (const [k, h] of Object.entries(from)) {
      const part = element("span", undefined, "from-" + k);
      part.style.width = all ? (100 * h.layers) / all + "%" : "0";
      part.title = `${says[k]}: ${h.layers} layers, ${size(h.bytes)}`;
      if (h.layers) b.append(part);
    }
    b.setAttribute("aria-label", Object.entries(from).map(([k, h]) => `${h.layers} layers from ${says[k]}`).join(", "));
    const cell = element("td");
    cell.append(b);
    const hits = all ? Math.round((100 * (all - from.registry.layers)) / all) + " %" : "";
    const fetching = (n.fetching || []).map((f) => `${f.layer.slice(7, 19)} ${f.size ? Math.floor((100 * f.done) / f.size) : 0} %`).join(", ");
    const name = Object.assign(element("th", n.name), { scope: "row" });
    return [name, element("td", n.address || ""), cell, element("td", hits, "number"), element("td", size(n.cache), "number"), element("td", fetching)];
  });
}

// --- the node --------------------------------------------------------------

function link(text, cut) {
  if ($("link").textContent !== text) $("link").textContent = text;
  $("link").classList.toggle("cut", cut);
}

async function look() {
  try {
    const r = await fetch("state", { signal: AbortSignal.timeout(8000) });
    if (!r.ok) throw new Error(await r.text());
    draw(await r.json());
    link("live", false);
  } catch (e) {
    link("the node does not answer: " + e.message, true);
  }
  if (document.hidden) await new Promise((ok) => document.addEventListener("visibilitychange", ok, { once: true }));
  setTimeout(look, 1000);
}

for (const s of stages.filter((s) => s !== "restored")) {
  const li = element("li");
  li.append(element("i", undefined, s), s === "started" ? "process started or restored" : words[s]);
  $("legend").append(li);
}
const events = new EventSource("events");
events.onmessage = (m) => take(JSON.parse(m.data));
setInterval(() => [...deployments.values()].some((d) => !d.ended && d.stages.ready === undefined) && scale(), 200);
look();
