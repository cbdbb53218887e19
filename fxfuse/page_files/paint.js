// The texts in a node's box, and the canvas.
"use strict";

const FONT = { name: "600 12.5px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace", small: "11.5px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace", text: "12px system-ui, sans-serif", mark: "10px system-ui, sans-serif" };
const BOX = { least: 150, wide: 300, badge: 26, padding: 9, line: 16 };
// Below this scale a node is its colour and mark alone.
const LEGIBLE = 0.42;
const MARK = 9;

/* Gives every drawn node of a side its lines of text and the size of its box. */
function measure(side, context) {
  for (const entry of side.drawn) {
    const told = entry.records.filter(record => entry.role === "miss" && record.node === entry.name);
    const lines = [{ font: "name", text: titleOf(entry) }, { font: "small", text: entry.values.slice(0, 2).map(shapeOf).join(", ") }];
    if (entry.stands) lines.push({ font: "text", text: choiceOf(entry.stands) }, { font: "text", text: timesOf(entry.stands) });
    const badge = BOX.badge * Math.sqrt(badgeOf(entry).length), needed = Math.max(...lines.map(line => widthOf(context, line))) + badge + 2 * BOX.padding;
    const width = told.length ? BOX.wide : Math.ceil(Math.min(BOX.wide, Math.max(BOX.least, needed))), inner = width - 2 * BOX.padding;
    entry.lines = lines.filter(({ text }) => text).map(line => ({ ...line, text: cut(context, line, inner - badge) }));
    for (const record of told) for (const text of wrapped(context, `${record.number}: ${record.chain} stops here. ${record.reason}`, inner)) entry.lines.push({ font: "text", text });
    entry.box = { width, height: 2 * BOX.padding - 4 + entry.lines.length * BOX.line };
  }
}

function titleOf(entry) {
  const target = entry.target.split("::").pop();
  return entry.kind === "call" && !entry.name.startsWith(target) ? `${entry.name}  ${target}` : entry.name;
}

function badgeOf(entry) {
  return entry.role === "fused" || entry.role === "miss" ? [...new Set(entry.records.map(record => record.number))].join(" ") : "";
}

function widthOf(context, { font, text }) {
  context.font = FONT[font];
  return context.measureText(text).width;
}

function cut(context, line, width) {
  const { text } = line;
  if (widthOf(context, line) <= width) return text;
  let length = text.length;
  while (length > 1 && context.measureText(`${text.slice(0, length)}…`).width > width) length--;
  return `${text.slice(0, length)}…`;
}

// Lines of a sentence; a word wider than a line is broken.
function wrapped(context, sentence, width) {
  context.font = FONT.text;
  const lines = [];
  let line = "";
  for (const word of sentence.split(/\s+/)) {
    const longer = line ? `${line} ${word}` : word;
    if (context.measureText(longer).width <= width) { line = longer; continue; }
    if (line) lines.push(line);
    line = word;
    while (context.measureText(line).width > width) {
      let length = line.length;
      while (length > 1 && context.measureText(line.slice(0, length)).width > width) length--;
      lines.push(line.slice(0, length));
      line = line.slice(length);
    }
  }
  return line ? [...lines, line] : lines;
}

function coloursOf(element) {
  const style = getComputedStyle(element), colours = {};
  for (const name of ["ground", "ink", "muted", "line", "node", "edge", "fused", "fused-edge", "miss", "miss-edge", "select", "hit"]) colours[name] = style.getPropertyValue(`--${name}`).trim();
  return colours;
}

/* Draws both panes and the links between them. state: {view, selected, hits}. */
function paint(canvas, state) {
  const ratio = devicePixelRatio || 1, { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d"), colours = state.colours;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.fillStyle = colours.ground;
  context.fillRect(0, 0, width, height);
  // Links lie between edges and nodes, so that every text stays readable.
  for (const name of ["before", "after"]) inPane(context, state, name, ratio, paintEdges);
  paintLinks(context, state);
  for (const name of ["before", "after"]) inPane(context, state, name, ratio, paintNodes);
  context.fillStyle = colours.line;
  context.fillRect(width / 2 - 0.5, 0, 1, height);
}

// Runs draw(context, state, side, seen) in the coordinates of a pane's drawing; seen: the part that is in view.
function inPane(context, state, name, ratio, draw) {
  const { view } = state, side = view.sides[name], pane = view.pane(name), center = view.center(name), { scale } = view;
  context.save();
  context.beginPath();
  context.rect(pane.left, 0, pane.width, pane.height);
  context.clip();
  const left = center.x - pane.width / 2 / scale, right = center.x + pane.width / 2 / scale;
  const top = center.y - pane.height / 2 / scale, bottom = center.y + pane.height / 2 / scale;
  context.setTransform(ratio * scale, 0, 0, ratio * scale, ratio * (pane.left - left * scale), ratio * -top * scale);
  context.lineJoin = "round";
  draw(context, state, side, { left, right, top, bottom });
  context.restore();
}

function paintNodes(context, state, side, { left, right, top, bottom }) {
  const inView = ({ x, y, width, height }) => x + width / 2 > left && x - width / 2 < right && y + height / 2 > top && y - height / 2 < bottom;
  const seen = side.drawn.filter(({ box }) => inView(box));
  for (const entry of seen) paintNode(context, state, entry);
  for (const entry of seen) paintMark(context, state, entry);
}

function paintEdges(context, { view, colours, selected }, side, seen) {
  const marked = [];
  context.beginPath();
  side.edges.forEach(([from, to], at) => {
    const way = side.layout.edges[at], { bounds } = way;
    if (bounds.right < seen.left || bounds.left > seen.right || bounds.bottom < seen.top || bounds.top > seen.bottom) return;
    const ends = [side.drawn[from], side.drawn[to]];
    if (selected && ends.some(entry => entry.name === selected.name)) marked.push(way);
    else trace(context, way);
  });
  context.strokeStyle = colours.edge;
  context.lineWidth = Math.max(1, 0.7 / view.scale);
  context.stroke();
  context.beginPath();
  for (const way of marked) trace(context, way);
  context.strokeStyle = colours.select;
  context.lineWidth = Math.max(2, 1.5 / view.scale);
  context.stroke();
}

function trace(context, { points, far }) {
  context.moveTo(points[0].x, points[0].y);
  for (let at = 1; at < points.length - 1; at++) {
    const next = points[at + 1];
    if (far) context.arcTo(points[at].x, points[at].y, next.x, next.y, 10);
    else context.quadraticCurveTo(points[at].x, points[at].y, (points[at].x + next.x) / 2, (points[at].y + next.y) / 2);
  }
  const last = points[points.length - 1];
  context.lineTo(last.x, last.y);
  // The head: which end reads the other.
  if (far) arrow(context, last, -1, 0);
  else arrow(context, last, 0, 1);
}

function arrow(context, { x, y }, dx, dy) {
  context.moveTo(x - 4 * (dx + dy), y - 5 * (dx + dy));
  context.lineTo(x, y);
  context.lineTo(x - 4 * (dx - dy), y - 5 * (dy - dx));
}

function paintNode(context, { view, colours, selected, twin, hits }, entry) {
  const { x, y, width, height } = entry.box, left = x - width / 2, top = y - height / 2, { role } = entry;
  const thin = Math.max(1, 0.8 / view.scale), thick = Math.max(2, 1.6 / view.scale);
  context.beginPath();
  context.roundRect(left, top, width, height, entry.kind === "call" ? 5 : 16);
  context.fillStyle = role === "fused" ? colours.fused : role === "miss" ? colours.miss : colours.node;
  context.fill();
  context.setLineDash(role === "miss" ? [9, 4] : role === "partial" ? [2, 4] : []);
  context.strokeStyle = role === "fused" ? colours["fused-edge"] : role ? colours["miss-edge"] : colours.edge;
  context.lineWidth = role ? thick : thin;
  context.stroke();
  context.setLineDash([]);
  if (selected === entry || twin === entry || hits.has(entry)) {
    const gap = 4 + thick;
    context.beginPath();
    context.roundRect(left - gap, top - gap, width + 2 * gap, height + 2 * gap, 9);
    context.strokeStyle = colours.select;
    context.lineWidth = selected === entry ? thick * 1.6 : thin;
    context.stroke();
  }
  if (view.scale >= LEGIBLE) paintText(context, colours, entry, left, top);
}

function paintText(context, colours, entry, left, top) {
  context.textBaseline = "middle";
  context.textAlign = "left";
  entry.lines.forEach(({ font, text }, at) => {
    context.font = FONT[font];
    context.fillStyle = font === "small" ? colours.muted : colours.ink;
    context.fillText(text, left + BOX.padding, top + BOX.padding - 2 + (at + 0.5) * BOX.line);
  });
}

// The record's number in a corner: a disc for what is fused, a triangle for a near miss; of the same size at every scale below 1.
function paintMark(context, { view, colours }, entry) {
  const number = badgeOf(entry);
  if (!number) return;
  const { x, y, width, height } = entry.box, legible = view.scale >= LEGIBLE;
  // Two digits need a larger mark, above all in a triangle.
  const size = legible ? MARK * (1 + 0.25 * (number.length - 1)) : MARK * Math.max(1, 0.6 / view.scale);
  const at = legible ? { x: x + width / 2 - size - 4, y: y - height / 2 + size + 4 } : { x, y };
  context.beginPath();
  if (entry.role === "fused") context.arc(at.x, at.y, size, 0, 2 * Math.PI);
  else {
    context.moveTo(at.x, at.y - 1.15 * size);
    context.lineTo(at.x + 1.15 * size, at.y + 0.85 * size);
    context.lineTo(at.x - 1.15 * size, at.y + 0.85 * size);
    context.closePath();
  }
  context.fillStyle = colours[entry.role === "fused" ? "fused-edge" : "miss-edge"];
  context.fill();
  if (!legible) return;
  context.font = number.length > 1 ? FONT.mark : FONT.text;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillStyle = colours.ground;
  context.fillText(number, at.x, at.y + (entry.role === "fused" ? 1 : 2));
}

// From each fused chain to what it became.
function paintLinks(context, { view, colours, selected }) {
  for (const op of view.sides.after.drawn) {
    if (!op.stands) continue;
    const chain = op.stands.nodes.map(name => view.sides.before.all.get(name).box);
    const from = view.toCanvas("before", { x: Math.max(...chain.map(box => box.x + box.width / 2)), y: chain.reduce((sum, box) => sum + box.y, 0) / chain.length });
    const to = view.toCanvas("after", { x: op.box.x - op.box.width / 2, y: op.box.y });
    const { width, height } = view.pane("before"), inside = from.x < width;
    from.x = Math.min(from.x, width);
    to.x = Math.max(to.x, width);
    if ((from.y < 0 && to.y < 0) || (from.y > height && to.y > height)) continue;
    const ends = [-1, 1].map(way => view.toCanvas("before", { x: 0, y: way < 0 ? Math.min(...chain.map(box => box.y - box.height / 2)) : Math.max(...chain.map(box => box.y + box.height / 2)) }).y);
    const middle = (from.x + to.x) / 2, x = from.x + (inside ? 8 : 0);
    context.beginPath();
    if (inside) {
      context.moveTo(x - 5, ends[0]);
      context.lineTo(x, ends[0]);
      context.lineTo(x, ends[1]);
      context.lineTo(x - 5, ends[1]);
    }
    context.moveTo(x, from.y);
    context.bezierCurveTo(middle, from.y, middle, to.y, to.x - 4, to.y);
    arrow(context, { x: to.x - 2, y: to.y }, 1, 0);
    context.strokeStyle = colours["fused-edge"];
    context.lineWidth = selected && selected.records.includes(op.stands) ? 3 : 1.5;
    context.stroke();
  }
}
