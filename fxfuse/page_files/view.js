// The two panes' view onto their drawings: one scale, and places that belong together side by side.
"use strict";

const SCALE = { least: 0.0005, most: 2.5, start: 0.9 };

class View {
  /* sides: {before, after}, laid out. size: () => [width, height] of the canvas in CSS pixels. */
  constructor(sides, size) {
    this.sides = sides;
    this.size = size;
    this.scale = SCALE.start;
    // The point of the drawing in the middle of the left pane; the right one follows.
    this.middle = { x: sides.before.layout.width / 2, y: 0 };
    // How far to the right the right pane's middle is of the left one's.
    this.shift = (sides.after.layout.width - sides.before.layout.width) / 2;
    this.anchors = anchorsOf(sides);
  }

  /* Where a pane lies on the canvas. */
  pane(name) {
    const [width, height] = this.size();
    return { left: name === "before" ? 0 : width / 2, width: width / 2, height };
  }

  center(name) {
    if (name === "before") return this.middle;
    return { x: this.middle.x + this.shift, y: mapped(this.anchors, this.middle.y, 0, 1) };
  }

  toCanvas(name, { x, y }) {
    const pane = this.pane(name), center = this.center(name);
    return { x: pane.left + pane.width / 2 + (x - center.x) * this.scale, y: pane.height / 2 + (y - center.y) * this.scale };
  }

  toDrawing(name, { x, y }) {
    const pane = this.pane(name), center = this.center(name);
    return { x: center.x + (x - pane.left - pane.width / 2) / this.scale, y: center.y + (y - pane.height / 2) / this.scale };
  }

  sideAt({ x }) {
    return x < this.size()[0] / 2 ? "before" : "after";
  }

  nodeAt(point) {
    const name = this.sideAt(point), { x, y } = this.toDrawing(name, point), side = this.sides[name];
    return side.drawn.find(({ box }) => Math.abs(x - box.x) <= box.width / 2 && Math.abs(y - box.y) <= box.height / 2);
  }

  pan(dx, dy) {
    this.moveTo({ x: this.middle.x - dx / this.scale, y: this.middle.y - dy / this.scale });
  }

  zoom(factor, point) {
    const name = this.sideAt(point), before = this.toDrawing(name, point);
    this.scale = Math.min(SCALE.most, Math.max(SCALE.least, this.scale * factor));
    const after = this.toDrawing(name, point);
    this.moveTo({ x: this.middle.x + before.x - after.x, y: this.middle.y + before.y - after.y });
  }

  moveTo({ x, y }) {
    const { width, height } = this.sides.before.layout;
    this.middle = { x: Math.min(width, Math.max(0, x)), y: Math.min(height, Math.max(0, y)) };
  }

  /* Brings a node to the middle of its pane, and what it is on the other side across to the middle of that one. */
  show(entry) {
    if (this.scale < 0.6) this.scale = SCALE.start;
    const { x, y } = entry.box, across = counterpart(this.sides, entry)?.box.x;
    if (entry.side === "before") {
      this.middle = { x, y };
      if (across !== undefined) this.shift = across - x;
    } else {
      this.middle = { x: across ?? x - this.shift, y: mapped(this.anchors, y, 1, 0) };
      this.shift = x - this.middle.x;
    }
  }

  /* The whole graph, both sides. */
  fit() {
    const { width, height } = this.pane("before"), { before, after } = this.sides;
    const wide = Math.max(before.layout.width, after.layout.width), high = Math.max(before.layout.height, after.layout.height);
    this.scale = Math.max(SCALE.least, Math.min(1.2, (width - 50) / wide, (height - 60) / high));
    this.middle = { x: before.layout.width / 2, y: before.layout.height / 2 };
    this.shift = (after.layout.width - before.layout.width) / 2;
  }
}

// The same node on the other side, or the one that a fused chain became, and the other way round.
function counterpart({ before, after }, entry) {
  const record = entry.records.find(({ verdict }) => verdict === "fused");
  if (entry.side === "after") return before.all.get(record ? record.nodes[record.nodes.length - 1] : entry.name);
  return record ? after.drawn.find(({ stands }) => stands === record) : after.all.get(entry.name);
}

// Heights that belong together, [before, after], both growing: of nodes on both sides, and of the middle of a fused chain and its op.
function anchorsOf({ before, after }) {
  const pairs = [];
  for (const entry of before.drawn) {
    const same = after.all.get(entry.name);
    if (same && same.at >= 0) pairs.push([entry.box.y, same.box.y]);
  }
  for (const { stands, box } of after.drawn) {
    if (!stands) continue;
    const heights = stands.nodes.map(name => before.all.get(name).box.y);
    pairs.push([heights[heights.length - 1], box.y]);
  }
  return [[0, 0], ...growing(pairs), [before.layout.height, after.layout.height]];
}

// As many of the pairs as possible such that both of their numbers grow from one to the next.
function growing(pairs) {
  pairs.sort((a, b) => a[0] - b[0] || b[1] - a[1]);
  // best[n] ends the sequence of n + 1 pairs with the least second number.
  const best = [], before = new Map();
  for (const pair of pairs) {
    let low = 0, high = best.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (best[middle][1] < pair[1]) low = middle + 1;
      else high = middle;
    }
    before.set(pair, best[low - 1]);
    best[low] = pair;
  }
  const found = [];
  for (let pair = best[best.length - 1]; pair; pair = before.get(pair)) found.push(pair);
  return found.reverse();
}

// A height of one side (from: 0 before, 1 after) on the other, on the line between the nearest anchors.
function mapped(anchors, height, from, to) {
  let low = 0, high = anchors.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (anchors[middle][from] <= height) low = middle;
    else high = middle;
  }
  const a = anchors[low], b = anchors[high];
  return a[from] === b[from] ? a[to] + height - a[from] : a[to] + ((height - a[from]) * (b[to] - a[to])) / (b[from] - a[from]);
}
