"use strict";
/* Draws a round's tree as SVG.  Knows a round's columns and texts of tokens, no page around them. */
const SpecdecTree = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const WIDTH = 118, HEIGHT = 38, GAP_X = 34, GAP_Y = 8, MOST = 13;

  /* An SVG element; texts go in as text, never as markup. */
  function made(name, attributes = {}, text = null) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== null) element.textContent = text;
    return element;
  }

  /* A token's text with its spaces and ends of lines visible, and no longer than `most` characters. */
  function shown(text, most = Infinity) {
    const visible = (text ?? "").replace(/ /g, "\u00b7").replace(/\n/g, "\u23ce").replace(/\t/g, "\u21e5")
      .replace(/[\u0000-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");
    const letters = Array.from(visible);
    return letters.length > most ? letters.slice(0, most - 1).join("") + "\u2026" : visible || "\u2205";
  }

  /* The nodes that the target accepted, the root first. */
  function pathOf(round) {
    const path = [0];
    while (path.length <= round.accepted) {
      const at = path[path.length - 1];
      const next = round.tokens.findIndex((token, n) => n > at && round.parents[n] === at && token === round.chosen[at]);
      if (next < 0) break;
      path.push(next);
    }
    return path;
  }

  function percent(score) {
    const value = 100 * Math.exp(score);
    return value >= 10 ? `${value.toFixed(0)} %` : value >= 0.1 ? `${value.toFixed(1)} %` : "<0.1 %";
  }

  /* Where each node stands: its depth, and its row, counted in leaves; the target's own token has a place too. */
  function places(round, path) {
    const children = round.tokens.map(() => []);
    round.parents.forEach((parent, n) => { if (n) children[parent].push(n); });
    const own = round.tokens.length, end = path[path.length - 1];
    children[end] = [...children[end], own];
    children.push([]);
    const depth = new Array(own + 1).fill(0), row = new Array(own + 1).fill(0);
    let leaves = 0;
    const order = [[0, false]];
    while (order.length) {
      const [n, isDone] = order.pop();
      if (isDone) {
        row[n] = children[n].length ? (row[children[n][0]] + row[children[n][children[n].length - 1]]) / 2 : leaves++;
        continue;
      }
      order.push([n, true]);
      for (const child of [...children[n]].reverse()) {
        depth[child] = depth[n] + 1;
        order.push([child, false]);
      }
    }
    return { depth, row, leaves, own, end };
  }

  /* Draws the tree into `container`.  piece: a token's text. */
  function draw(container, round, piece) {
    const path = pathOf(round), taken = new Set(path);
    const { depth, row, leaves, own, end } = places(round, path);
    const x = (n) => 4 + depth[n] * (WIDTH + GAP_X), y = (n) => 4 + row[n] * (HEIGHT + GAP_Y);
    const width = 8 + (Math.max(...depth) + 1) * (WIDTH + GAP_X) - GAP_X, height = 8 + leaves * (HEIGHT + GAP_Y) - GAP_Y;
    const svg = made("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
    const emitted = path.slice(1).map((n) => piece(round.tokens[n])).concat(piece(round.chosen[end]));
    svg.append(made("title", {}, `${round.tokens.length} nodes, ${round.accepted} accepted: ${emitted.map((t) => shown(t, 40)).join(" ")}`));
    const edges = made("g", { class: "edges" }), nodes = made("g", { class: "nodes" });
    const parentOf = (n) => (n === own ? end : round.parents[n]);
    for (let n = 1; n <= own; n++) {
      const from = parentOf(n), x0 = x(from) + WIDTH, y0 = y(from) + HEIGHT / 2, x1 = x(n), y1 = y(n) + HEIGHT / 2, middle = (x0 + x1) / 2;
      const kind = n === own ? "own" : taken.has(n) ? "accepted" : "rejected";
      edges.append(made("path", { class: `edge ${kind}`, d: `M${x0},${y0}C${middle},${y0} ${middle},${y1} ${x1},${y1}` }));
    }
    for (let n = 0; n <= own; n++) {
      const kind = n === own ? "own" : n === 0 ? "root" : taken.has(n) ? "accepted" : "rejected";
      const token = n === own ? round.chosen[end] : round.tokens[n];
      const group = made("g", { class: `node ${kind}`, transform: `translate(${x(n)},${y(n)})`, "data-node": n, "data-token": token });
      const score = n && n < own && round.scores.length ? percent(round.scores[n]) : "";
      const source = n && n < own && round.sources ? round.sources[n] : "";
      const chosen = n < own ? `\u2192 ${shown(piece(round.chosen[n]), MOST - 1 - score.length)}` : "target's own";
      const label = n === 0 ? "the last token of the text" : n === own ? "the target's own token" : `${kind}, depth ${depth[n]}`;
      const more = [score && `survival ${score}`, source && `from ${source}`, n < own && `the target's choice after it: ${shown(piece(round.chosen[n]), 60)}`];
      group.append(made("title", {}, [`${shown(piece(token), 200)} (token ${token})`, label, ...more].filter(Boolean).join("\n")));
      group.append(made("rect", { width: WIDTH, height: HEIGHT, rx: 6 }));
      if (source) group.append(made("rect", { class: `source ${source.includes("+") ? "several" : source}`, width: 5, height: HEIGHT, rx: 2 }));
      group.append(made("text", { x: 9, y: 16, class: "token", direction: "ltr" }, shown(piece(token), MOST)));
      group.append(made("text", { x: 9, y: 31, class: "small", direction: "ltr" }, [score, chosen].filter(Boolean).join(" ")));
      nodes.append(group);
    }
    svg.append(edges, nodes);
    container.replaceChildren(svg);
    /* Of a tree that is too high: the middle of the path taken, or of as much of it as fits beside the root. */
    const high = container.clientHeight, middle = (y(0) + y(own) + HEIGHT - high) / 2;
    container.scrollTop = Math.min(y(0) - 4, Math.max(y(0) + HEIGHT + 4 - high, middle));
    return path;
  }

  return { draw, made, pathOf, percent, shown };
})();
