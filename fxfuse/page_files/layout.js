// Positions of a graph's nodes and the way of its edges: dagre's, piece by piece. Runs in a worker.
"use strict";

// An edge over more ranks than this is led along the side: every rank it passes costs dagre a node (minutes for a dense graph).
const FAR = { sparse: 16, dense: 8 };
// Pieces as small as this are laid out as one; deeper ones are cut anywhere, for dagre walks them by recursion.
const ENOUGH = 60, DEEPEST = 300;
const GAP = { nodes: 24, ranks: 26, side: 26 };

/* graph: {nodes: [{width, height}], edges: [[from, to]]}, indexes in an order in which every edge points forward.
   Returns {nodes: [{x, y}] (centres), edges: [{points, far}], width, height}. */
function layout(graph) {
  const rank = ranks(graph);
  const order = graph.nodes.map((_, node) => node).sort((a, b) => rank[a] - rank[b] || a - b);
  const far = graph.edges.length > 2 * graph.nodes.length ? FAR.dense : FAR.sparse;
  const near = graph.edges.filter(([from, to]) => rank[to] - rank[from] <= far);
  const placed = graph.nodes.map(() => null), paths = new Map();
  for (const piece of pieces(order, near, rank)) place(piece, graph, near, placed, paths);
  const edges = graph.edges.map(([from, to]) => {
    const points = paths.get(`${from} ${to}`);
    return points ? { points, far: false } : { points: aside(graph, order, rank, placed, from, to), far: true };
  });
  return framed(graph, placed, edges);
}

// The longest way from a source; a source comes right before its first reader.
function ranks({ nodes, edges }) {
  const rank = nodes.map(() => 0), readers = nodes.map(() => []), sources = new Set(nodes.keys());
  for (const [from, to] of edges) readers[from].push(to), sources.delete(to);
  for (const node of nodes.keys()) for (const reader of readers[node]) rank[reader] = Math.max(rank[reader], rank[node] + 1);
  for (const node of sources) if (readers[node].length) rank[node] = Math.min(...readers[node].map(reader => rank[reader])) - 1;
  return rank;
}

// Stretches of the order, {nodes, shared}: cut at nodes that no edge passes by; such a node is in both pieces (shared: the first node is).
function pieces(order, edges, rank) {
  const position = new Map(order.map((node, at) => [node, at])), reach = order.map(() => 0);
  for (const [from, to] of edges) reach[position.get(from)] = Math.max(reach[position.get(from)], position.get(to));
  const found = [];
  let start = 0, shared = false, furthest = 0;
  order.forEach((node, at) => {
    const deep = rank[node] - rank[order[start]] > DEEPEST && rank[node] > rank[order[at - 1]];
    if (furthest <= at && at - start >= ENOUGH) {
      found.push({ nodes: order.slice(start, at + 1), shared, closed: true });
      [start, shared] = [at, true];
    } else if (deep) {
      found.push({ nodes: order.slice(start, at), shared, closed: false });
      [start, shared] = [at, false];
    }
    furthest = Math.max(furthest, reach[at]);
  });
  found.push({ nodes: order.slice(start), shared, closed: false });
  return found;
}

// Lays out one piece and puts it below what is placed already, its shared first node where that one is.
function place(piece, graph, near, placed, paths) {
  const inside = new Set(piece.nodes), edges = near.filter(([from, to]) => inside.has(from) && inside.has(to));
  const made = new dagre.graphlib.Graph().setGraph({ nodesep: GAP.nodes, ranksep: GAP.ranks }).setDefaultEdgeLabel(() => ({}));
  for (const node of piece.nodes) made.setNode(String(node), { ...graph.nodes[node] });
  for (const [from, to] of edges) made.setEdge(String(from), String(to), { weight: 1 });
  const first = piece.nodes[0], last = piece.nodes[piece.nodes.length - 1];
  for (const node of piece.nodes) {
    // The nodes in which pieces meet stay alone in the first and the last rank.
    if (piece.shared && node !== first && !made.inEdges(String(node)).length) made.setEdge(String(first), String(node), { weight: 0 });
    if (piece.closed && node !== last && !made.outEdges(String(node)).length) made.setEdge(String(node), String(last), { weight: 0 });
  }
  dagre.layout(made);
  const bounds = placed.reduce((most, at, node) => (at ? Math.max(most, at.y + graph.nodes[node].height / 2) : most), -GAP.ranks);
  const anchor = placed[first], own = made.node(String(first));
  const dx = anchor ? anchor.x - own.x : -made.graph().width / 2, dy = anchor ? anchor.y - own.y : bounds + GAP.ranks;
  for (const node of piece.nodes) placed[node] = { x: made.node(String(node)).x + dx, y: made.node(String(node)).y + dy };
  for (const [from, to] of edges) {
    const { points } = made.edge(String(from), String(to));
    paths.set(`${from} ${to}`, points.map(({ x, y }) => ({ x: x + dx, y: y + dy })));
  }
}

// The way of a far edge: out to the right of everything between its ends, down, and back.
function aside(graph, order, rank, placed, from, to) {
  const right = node => placed[node].x + graph.nodes[node].width / 2;
  let lane = Math.max(right(from), right(to));
  for (const node of order) if (rank[node] >= rank[from] && rank[node] <= rank[to]) lane = Math.max(lane, right(node));
  lane += GAP.side;
  return [{ x: right(from), y: placed[from].y }, { x: lane, y: placed[from].y }, { x: lane, y: placed[to].y }, { x: right(to), y: placed[to].y }];
}

// Everything shifted to positive coordinates, and the size of it all.
function framed(graph, placed, edges) {
  let left = 0, top = 0, right = 0, bottom = 0;
  const include = (x, y, width, height) => {
    left = Math.min(left, x - width / 2), right = Math.max(right, x + width / 2);
    top = Math.min(top, y - height / 2), bottom = Math.max(bottom, y + height / 2);
  };
  placed.forEach(({ x, y }, node) => include(x, y, graph.nodes[node].width, graph.nodes[node].height));
  for (const { points } of edges) for (const { x, y } of points) include(x, y, 0, 0);
  const moved = ({ x, y }) => ({ x: x - left, y: y - top });
  return {
    nodes: placed.map(moved),
    edges: edges.map(({ points, far }) => ({ points: points.map(moved), far })),
    width: right - left,
    height: bottom - top,
  };
}

if (typeof WorkerGlobalScope !== "undefined") onmessage = ({ data }) => postMessage(layout(data));
