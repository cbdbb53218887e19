// The panel of one node and the table of all candidates. Text from the user's code enters as text, never as markup.
"use strict";

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(name, value);
  made.append(...children.filter(child => child !== null && child !== ""));
  return made;
}

/* Fills the panel with a node; go(entry) is called for another one. */
function showDetails(panel, graph, entry, go, close) {
  const side = graph[entry.side], button = element("button", { class: "close", type: "button", "aria-label": "close" }, "×");
  button.onclick = close;
  panel.replaceChildren(
    button,
    element("h2", {}, entry.name),
    element("div", {}, `${KINDS[entry.kind]}, ${entry.side}`),
    ...entry.records.map(record => recordNote(graph, record, go)),
    facts(entry),
    ...stack(entry, side),
    ...neighbours("reads", entry.inputs, side, go),
    ...neighbours("read by", entry.readers, side, go),
  );
  panel.hidden = false;
  panel.scrollTop = 0;
}

const KINDS = { input: "input", state: "parameter, buffer or constant", call: "call", output: "output" };

function facts(entry) {
  const list = element("dl"), add = (name, text) => text && list.append(element("dt", {}, name), element("dd", {}, text));
  add("calls", entry.kind === "call" ? entry.target : "");
  add("arguments", entry.arguments);
  entry.values.forEach((value, at) => {
    if (entry.values.length > 1) list.append(element("dt", {}, `value ${at}`), element("dd"));
    if (value.text !== undefined) return add("value", value.text);
    add("shape", `[${value.shape.join(", ")}]`);
    add("dtype", value.dtype);
    add("strides", `[${value.stride.join(", ")}]`);
    add("device", value.device);
  });
  if (!entry.values.length && entry.kind !== "output") add("value", "not known to the graph");
  add("line", entry.line);
  return list;
}

function stack(entry, side) {
  if (entry.stack < 0) return [];
  const text = side.stacks[entry.stack].trimEnd(), lines = text.split("\n");
  const source = lines[lines.findIndex(line => entry.line && line.includes(`File "${entry.line.replace(/:\d+$/, "")}", line ${entry.line.match(/\d+$/)}`)) + 1];
  return [...(entry.line && source ? [element("pre", { class: "source" }, source.trim())] : []), element("h3", {}, "stack"), element("pre", { class: "stack" }, text)];
}

function neighbours(title, names, side, go) {
  if (!names.length) return [];
  return [element("h3", {}, title), ...names.map(name => nodeButton(side.all.get(name), go))];
}

function nodeButton(entry, go) {
  const button = element("button", { class: "node", type: "button" }, entry.name, " ", element("small", {}, entry.values.slice(0, 2).map(shapeOf).join(", ")));
  button.onclick = () => go(entry);
  return button;
}

function recordNote(graph, record, go) {
  const note = element("div", { class: `note ${record.verdict}` }, element("strong", {}, `${record.number}: ${record.chain}, ${choiceOf(record)}`));
  if (record.verdict === "declined") note.append(element("div", {}, `got to ${record.reached}, stopped at ${record.node}: ${record.reason}`));
  else note.append(element("div", {}, record.choice), element("div", {}, record.choice.startsWith("predicted") ? "" : timesOf(record)), element("div", {}, record.shapes), record.calls > 1 ? element("div", {}, `called ${record.calls} times`) : "");
  const chain = record.nodes.map(name => graph.before.all.get(name));
  note.append(...chain.filter(Boolean).map(entry => nodeButton(entry, go)));
  const became = (record.became ?? []).map(name => graph.after.all.get(name)).filter(entry => entry.at >= 0);
  if (became.length) note.append(element("div", {}, "became"), ...became.map(entry => nodeButton(entry, go)));
  return note;
}

/* The table: like records share a row, which opens into one for each; choose(record) is called for a row. */
function showTable(section, choose) {
  if (!RECORDS.length) {
    section.replaceChildren(element("p", { class: "empty" }, "No candidate: no convolution is followed by the next op of a chain."));
    return;
  }
  const head = element("tr", {}, ...["", "chain", "choice", "where", "why", "µs", "Inductor's µs", "script"].map(name => element("th", { class: name.includes("µs") ? "number" : null, scope: "col" }, name)));
  const body = element("tbody");
  for (const [first, ...others] of FOLDS) {
    const more = others.flatMap(record => rows(record, choose));
    for (const row of more) row.hidden = true;
    body.append(...rows(first, choose, others, more), ...more);
  }
  section.replaceChildren(element("table", {}, element("thead", {}, head), body));
}

/* A record's row and one for each other way; others are records that the row stands for too until their rows, `more`, are shown. */
function rows(record, choose, others = [], more = []) {
  const chosen = record.candidates.find(way => way.op === record.op);
  const choice = element("td", {}, choiceOf(record), ...(record.op ? [element("br"), element("code", {}, record.op)] : []));
  const where = element("td", { title: record.location }, ...placeOf(record).map(text => element("div", {}, element("code", {}, text))));
  const differ = others.some(other => (other.choice ?? other.reason) !== (record.choice ?? record.reason)) ? element("small", {}, " (of the first; others differ in numbers or names)") : "";
  const row = element("tr", { class: `record ${record.verdict}`, "data-numbers": [record, ...others].map(({ number }) => number).join(" "), tabindex: "0" },
    element("td", {}, element("i", { class: `key ${record.verdict === "fused" ? "fused" : "miss"}` }), String(record.number)),
    element("td", {}, element("code", {}, record.chain), ...(PICTURES.length > 1 ? [element("br"), `graph ${record.graph}${record.body && ` ${record.body}`}`] : [])),
    choice,
    where,
    element("td", {}, record.verdict === "fused" ? `${record.choice}; ${record.shapes}` : `stopped behind ${record.reached}: ${record.reason}`, differ),
    times(chosen?.us), times(chosen?.inductor_us),
    element("td", { title: record.no_repro }, record.repro ? element("a", { href: encodeURIComponent(record.repro) }, "repro") : "–"),
  );
  row.onclick = () => choose(record);
  row.onkeydown = event => { if (event.key === "Enter") choose(record); };
  if (others.length) where.append(moreButton(record, row, others, more, differ));
  const ways = record.candidates.filter(way => way !== chosen).map(way => element("tr", { class: "way" },
    element("td"), element("td"), element("td", {}, element("code", {}, way.op), way.kernel ? ` (${way.kernel})` : ""), element("td"),
    element("td", {}, way.verdict), times(way.us), times(way.op === "inductor" ? null : way.inductor_us), element("td")));
  return [row, ...ways];
}

/* Shows the rows of the other records that a row stands for. */
function moreButton(record, row, others, more, differ) {
  const button = element("button", { class: "more", type: "button" }, `and ${others.length} more`);
  button.onkeydown = event => event.stopPropagation();
  button.onclick = event => {
    event.stopPropagation();
    for (const other of more) other.hidden = false;
    row.dataset.numbers = record.number;
    button.remove();
    if (differ) differ.remove();
  };
  return button;
}

function times(value) {
  return element("td", { class: "number" }, microseconds(value) || "–");
}
