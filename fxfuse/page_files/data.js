// What is drawn of a graph: its nodes but for parameters and buffers, which their readers list, and what the report says of each.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);

/* The report's chains, in its order: {number, verdict: "fused" | "declined", ...the record of the report}. */
const RECORDS = [
  ...DATA.report.fused.map(record => ({ ...record, verdict: "fused" })),
  ...DATA.report.declined.map(record => ({ ...record, verdict: "declined" })),
].map((record, at) => ({ ...record, number: at + 1 }));

/* Every graph, and behind it each body of a higher-order op below it: {graph, body, before, after}; a body that was not rewritten is the same on both sides. */
const PICTURES = DATA.graphs.flatMap(({ before, after }, graph) => [
  { graph, body: "", before, after },
  ...Object.entries(before.bodies).map(([body, picture]) => ({ graph, body, before: picture, after: after.bodies[body] ?? picture })),
]);

/* Where a record's chain is drawn. */
function pictureOf(record) {
  return PICTURES.findIndex(picture => picture.graph === record.graph && picture.body === record.body);
}

/* The records that share a row of the table, as in the printed one. */
const FOLDS = DATA.folds.map(positions => positions.map(position => RECORDS[position]));

/* Both sides of a graph: {before, after}, each {all: Map by name, drawn: [entry], edges: [[from, to]], stacks}.
   An entry is the node with readers, at (index in drawn, -1 for state), role and records. */
function graphOf(number) {
  const records = RECORDS.filter(record => pictureOf(record) === number), picture = PICTURES[number];
  const graph = { number, records, before: sideOf(picture.before, "before"), after: sideOf(picture.after, "after") };
  for (const record of records) mark(graph, record);
  return graph;
}

function sideOf(picture, name) {
  const all = new Map(picture.nodes.map(node => [node.name, { ...node, side: name, readers: [], at: -1, line: node.at, role: "", records: [], stands: null }]));
  for (const entry of all.values()) for (const input of entry.inputs) all.get(input)?.readers.push(entry.name);
  const drawn = [...all.values()].filter(entry => entry.kind !== "state");
  drawn.forEach((entry, at) => { entry.at = at; });
  const edges = drawn.flatMap(entry => entry.inputs.map(input => all.get(input)).filter(input => input && input.at >= 0).map(input => [input.at, entry.at]));
  return { name, all, drawn, edges, stacks: picture.stacks };
}

// Gives the nodes of a chain their roles on both sides.
function mark(graph, record) {
  if (record.verdict === "fused") {
    record.became = [...graph.after.all.values()].filter(entry => entry.stands_for.join() === record.nodes.join()).map(entry => entry.name);
    for (const name of record.nodes) {
      give(graph.before.all.get(name), "fused", record);
      give(graph.after.all.get(name), "fused", record);
    }
    for (const name of record.became) give(graph.after.all.get(name), "fused", record);
    const op = graph.after.all.get(record.became[record.became.length - 1]);
    if (op) op.stands = record;
    return;
  }
  for (const side of [graph.before, graph.after]) {
    for (const name of record.nodes) give(side.all.get(name), "partial", record);
    give(side.all.get(record.node), "miss", record);
  }
}

const ROLES = ["", "partial", "miss", "fused"];

function give(entry, role, record) {
  if (!entry) return;
  if (ROLES.indexOf(role) > ROLES.indexOf(entry.role)) entry.role = role;
  if (!entry.records.includes(record)) entry.records.push(record);
}

/* The way that was chosen for a chain, for people. */
function choiceOf(record) {
  if (record.verdict === "declined") return "left to Inductor";
  const kernel = record.candidates.find(way => way.op === record.op)?.kernel;
  return kernel ? `${kernel} kernel` : "fused";
}

function microseconds(value) {
  return value === null || value === undefined ? "" : value >= 100 ? value.toFixed(0) : value.toPrecision(3);
}

/* The chosen op's times as a line; empty where there are none. */
function timesOf(record) {
  const way = record.candidates.find(way => way.op === record.op);
  if (!way || way.us === null) return "";
  return `${microseconds(way.us)} µs ${way.measured ? "measured" : "predicted"}, Inductor ${way.measured ? "" : "at least "}${microseconds(way.inductor_us)}`;
}

function shapeOf(value) {
  return value.text ?? `${value.dtype}[${value.shape.join(", ")}]`;
}

/* The module's path, and the location's last part and line, the whole of which is in the details; the node where neither is known. */
function placeOf(record) {
  const place = [record.module, briefly(record.location)].filter(Boolean);
  return place.length ? place : [record.node ?? record.nodes[0]];
}

function briefly(location) {
  return location.slice(location.lastIndexOf("/") + 1);
}
