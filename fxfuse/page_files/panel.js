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

/* The table; choose(record) is called for a row. */
function showTable(section, choose) {
  if (!RECORDS.length) {
    section.replaceChildren(element("p", { class: "empty" }, "No candidate: no convolution is followed by the next op of a chain."));
    return;
  }
  const head = element("tr", {}, ...["", "chain", "choice", "where", "why", "µs", "Inductor's µs", "script"].map(name => element("th", { class: name.includes("µs") ? "number" : null, scope: "col" }, name)));
  const body = element("tbody");
  for (const record of RECORDS) body.append(...rows(record, choose));
  section.replaceChildren(element("table", {}, element("thead", {}, head), body));
}

function rows(record, choose) {
  const chosen = record.candidates.find(way => way.op === record.op);
  const choice = element("td", {}, choiceOf(record), ...(record.op ? [element("br"), element("code", {}, record.op)] : []));
  const where = record.location ? briefly(record.location) : record.node ?? record.nodes[0];
  const row = element("tr", { class: `record ${record.verdict}`, "data-number": record.number, tabindex: "0" },
    element("td", {}, element("i", { class: `key ${record.verdict === "fused" ? "fused" : "miss"}` }), String(record.number)),
    element("td", {}, element("code", {}, record.chain), ...(PICTURES.length > 1 ? [element("br"), `graph ${record.graph}${record.body && ` ${record.body}`}`] : [])),
    choice,
    element("td", { title: record.location }, element("code", {}, where)),
    element("td", {}, record.verdict === "fused" ? `${record.choice}; ${record.shapes}` : `stopped behind ${record.reached}: ${record.reason}`),
    times(chosen?.us), times(chosen?.inductor_us),
    element("td", { title: record.no_repro }, record.repro ? element("a", { href: encodeURIComponent(record.repro) }, "repro") : "–"),
  );
  row.onclick = () => choose(record);
  row.onkeydown = event => { if (event.key === "Enter") choose(record); };
  const others = record.candidates.filter(way => way !== chosen).map(way => element("tr", { class: "way" },
    element("td"), element("td"), element("td", {}, element("code", {}, way.op), way.kernel ? ` (${way.kernel})` : ""), element("td"),
    element("td", {}, way.verdict), times(way.us), times(way.op === "inductor" ? null : way.inductor_us), element("td")));
  return [row, ...others];
}

function times(value) {
  return element("td", { class: "number" }, microseconds(value) || "–");
}
