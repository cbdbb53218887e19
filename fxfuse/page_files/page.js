// The page: which graph is shown, what is selected, search and keys.
"use strict";

const byId = id => document.getElementById(id);
const canvas = byId("picture");
const state = { graph: null, view: null, selected: null, twin: null, hits: new Set(), found: [], hit: -1, colours: coloursOf(document.body), pending: false };

function redraw() {
  if (state.pending || !state.view) return;
  state.pending = true;
  requestAnimationFrame(() => { state.pending = false; paint(canvas, state); });
}

// In a worker the page stays alive meanwhile; where a browser gives none to a file, here.
function layouter() {
  const source = byId("layout-source").textContent;
  try {
    const workers = { before: startWorker(source), after: startWorker(source) };
    return (graph, side) => new Promise((done, failed) => {
      workers[side].onmessage = ({ data }) => done(data);
      workers[side].onerror = failed;
      workers[side].postMessage(graph);
    });
  } catch {
    document.head.append(element("script", {}, source));
    return async graph => window.layout(graph);
  }
}

function startWorker(source) {
  return new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
}

const layOut = layouter();

async function open(number) {
  try {
    await opened(number);
  } catch (error) {
    byId("wait").textContent = `the graph could not be laid out: ${error.message}`;
    throw error;
  }
}

async function opened(number) {
  const graph = graphOf(number), context = canvas.getContext("2d");
  byId("wait").hidden = false;
  byId("graph").disabled = true;
  await Promise.all([graph.before, graph.after].map(async side => {
    measure(side, context);
    side.layout = await layOut({ nodes: side.drawn.map(({ box }) => box), edges: side.edges }, side.name);
    side.layout.nodes.forEach((at, index) => Object.assign(side.drawn[index].box, at));
    for (const way of side.layout.edges) way.bounds = boundsOf(way.points);
  }));
  Object.assign(state, { graph, selected: null, twin: null, hits: new Set(), found: [], hit: -1, view: new View(graph, () => [canvas.clientWidth, canvas.clientHeight]) });
  byId("details").hidden = true;
  byId("wait").hidden = true;
  byId("graph").disabled = false;
  start(graph, state.view);
  search();
  redraw();
}

function boundsOf(points) {
  const xs = points.map(({ x }) => x), ys = points.map(({ y }) => y);
  return { left: Math.min(...xs), right: Math.max(...xs), top: Math.min(...ys), bottom: Math.max(...ys) };
}

// All of it where that can be read, else the first chain that the report names.
function start(graph, view) {
  view.fit();
  if (view.scale >= 0.6) return;
  const first = graph.records.map(entryOf).find(Boolean) ?? graph.before.drawn[0];
  if (first) view.show(first);
}

function entryOf(record) {
  return state.graph.before.all.get(record.verdict === "fused" ? record.nodes[0] : record.node);
}

/* Selects a node, brings it into view and tells what is known of it; a parameter by the side of its first reader. */
function go(entry) {
  const shown = entry.at >= 0 ? entry : state.graph[entry.side].drawn.find(reader => reader.inputs.includes(entry.name));
  if (shown) state.view.show(shown);
  select(entry, shown);
}

function select(entry, shown = entry) {
  state.selected = shown ?? null;
  state.twin = shown ? counterpart(state.graph, shown) : null;
  showDetails(byId("details"), state.graph, entry, go, close);
  const numbers = new Set(entry.records.map(record => String(record.number)));
  for (const row of document.querySelectorAll("tr.record")) row.classList.toggle("selected", row.dataset.numbers.split(" ").some(number => numbers.has(number)));
  redraw();
}

function close() {
  state.selected = state.twin = null;
  byId("details").hidden = true;
  for (const row of document.querySelectorAll("tr.selected")) row.classList.remove("selected");
  redraw();
}

async function choose(record) {
  if (!byId("wait").hidden) return;
  const picture = pictureOf(record);
  if (picture !== state.graph.number) {
    byId("graph").value = picture;
    await open(picture);
  }
  const entry = entryOf(record);
  if (entry) go(entry);
}

function search() {
  if (!state.graph) return;
  const wanted = byId("search").value.trim().toLowerCase();
  const matches = entry => [entry.name, entry.target, entry.line, ...entry.values.map(shapeOf)].some(text => text.toLowerCase().includes(wanted));
  const { before, after } = state.graph;
  // A node that is on both sides is found once, on the left.
  state.found = wanted ? [...before.all.values(), ...[...after.all.values()].filter(entry => !before.all.has(entry.name))].filter(matches) : [];
  state.hits = new Set(state.found);
  state.hit = -1;
  tellHits();
  redraw();
}

function nextHit(step) {
  if (!state.found.length) return;
  state.hit = (state.hit + step + state.found.length) % state.found.length;
  go(state.found[state.hit]);
  tellHits();
}

function tellHits() {
  const { length } = state.found;
  byId("hits").textContent = byId("search").value.trim() ? (state.hit < 0 ? `${length} found` : `${state.hit + 1} of ${length}`) : "";
}

function pointOf(event) {
  const { left, top } = canvas.getBoundingClientRect();
  return { x: event.clientX - left, y: event.clientY - top };
}

function listen() {
  let pressed = null;
  canvas.onpointerdown = event => { pressed = { ...pointOf(event), moved: false }; canvas.setPointerCapture(event.pointerId); };
  canvas.onpointermove = event => {
    if (!pressed || !state.view) return;
    const { x, y } = pointOf(event), dx = x - pressed.x, dy = y - pressed.y;
    if (!pressed.moved && Math.hypot(dx, dy) < 4) return;
    state.view.pan(dx, dy);
    pressed = { x, y, moved: true };
    redraw();
  };
  canvas.onpointercancel = () => { pressed = null; };
  canvas.onpointerup = event => {
    const clicked = pressed && !pressed.moved && state.view && state.view.nodeAt(pointOf(event));
    pressed = null;
    if (clicked) select(clicked);
  };
  canvas.onwheel = event => {
    event.preventDefault();
    if (!state.view) return;
    // A pinch on a touchpad comes as a wheel with Ctrl.
    if (event.ctrlKey || event.metaKey) state.view.zoom(Math.exp(-event.deltaY * 0.003), pointOf(event));
    else state.view.pan(-event.deltaX, -event.deltaY);
    redraw();
  };
  canvas.onkeydown = event => {
    const step = { ArrowUp: [0, 60], ArrowDown: [0, -60], ArrowLeft: [60, 0], ArrowRight: [-60, 0] }[event.key];
    const factor = { "+": 1.25, "-": 0.8 }[event.key], middle = { x: canvas.clientWidth / 4, y: canvas.clientHeight / 2 };
    if (step) state.view?.pan(...step);
    else if (factor) state.view?.zoom(factor, middle);
    else return;
    event.preventDefault();
    redraw();
  };
  byId("search").oninput = search;
  byId("search").onkeydown = event => { if (event.key === "Enter") nextHit(event.shiftKey ? -1 : 1); };
  byId("fit").onclick = () => { state.view?.fit(); redraw(); };
  byId("graph").onchange = event => open(Number(event.target.value));
  addEventListener("keydown", event => {
    if (event.key === "Escape") close();
    else if (event.key === "/" && document.activeElement !== byId("search")) { event.preventDefault(); byId("search").focus(); }
  });
  new ResizeObserver(redraw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { state.colours = coloursOf(document.body); redraw(); });
}

function head() {
  const { fused, declined, graphs, target, compile_id, number, devices, options, stopped, unmet } = DATA.report;
  const what = target ?? [number === null ? "" : `graph ${number}`, compile_id === null ? "" : `compile id ${compile_id}`].filter(Boolean).join(", ");
  byId("summary").textContent = [`${fused.length} fused, ${declined.length} declined in ${graphs} graph${graphs === 1 ? "" : "s"}`, what, devices.map(({ name }) => name).join(", "), `select ${options.select}`].filter(Boolean).join(" · ");
  document.title = what ? `fxfuse: ${what}` : "fxfuse";
  const told = [...(stopped ? [`stopped: ${stopped}`] : []), ...unmet];
  byId("stopped").textContent = told.join("; ");
  byId("stopped").hidden = !told.length;
  byId("choose-graph").hidden = PICTURES.length < 2;
  byId("graph").append(...PICTURES.map(({ graph, body, before }, at) => element("option", { value: at }, `${graph}${body && ` ${body}`}: ${before.nodes.length} nodes`)));
}

head();
showTable(byId("candidates"), choose);
listen();
if (PICTURES.length) open(0).then(() => document.body.classList.add("ready"));
else byId("wait").textContent = "no graph was captured";
