"use strict";
/* Draws a round's tree as SVG.  Knows a round's columns and texts of tokens, no page around them. */
const SpecdecTree = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const WIDTH = 118, HEIGHT = 38, GAP_X = 34, GAP_Y = 8;
  const LEAST_WIDTH = 66, LEAST_GAP = 14, LINE = 22, LINE_GAP = 3, INDENT = 22, PAD = 9, LETTER = 7.9, SMALL = 6.7;

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

  /* Each node's depth, its row, counted in leaves, and its line in an outline, where the path taken comes before other branches.
     The target's own token has these too. */
  function places(round, path) {
    const children = round.tokens.map(() => []);
    round.parents.forEach((parent, n) => { if (n) children[parent].push(n); });
    const own = round.tokens.length, end = path[path.length - 1];
    children[end] = [...children[end], own];
    children.push([]);
    const depth = new Array(own + 1).fill(0), row = new Array(own + 1).fill(0), line = new Array(own + 1).fill(0);
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
    const lines = [0];
    for (let count = 0; lines.length; count++) {
      const n = lines.pop(), first = children[n].find((child) => child === own || path.includes(child));
      line[n] = count;
      lines.push(...children[n].filter((child) => child !== first).reverse(), ...(first === undefined ? [] : [first]));
    }
    return { depth, row, line, leaves, own, end };
  }

  /* The tree from left to right, as narrow as `room` asks for: boxes of two lines, or of one where two are higher than `high`. */
  function across(found, room, high) {
    const columns = Math.max(...found.depth) + 1;
    const gap = Math.max(LEAST_GAP, Math.min(GAP_X, (room - columns * WIDTH) / Math.max(1, columns - 1)));
    const width = Math.min(WIDTH, Math.floor((room - gap * (columns - 1)) / columns));
    if (width < LEAST_WIDTH) return null;
    const isHigh = found.leaves * (HEIGHT + GAP_Y) > high, height = isHigh ? LINE : HEIGHT, gapY = isHigh ? LINE_GAP : GAP_Y;
    const x = (n) => 4 + found.depth[n] * (width + gap), y = (n) => 4 + found.row[n] * (height + gapY);
    const edge = (from, to) => {
      const x0 = x(from) + width, y0 = y(from) + height / 2, x1 = x(to), y1 = y(to) + height / 2, middle = (x0 + x1) / 2;
      return `M${x0},${y0}C${middle},${y0} ${middle},${y1} ${x1},${y1}`;
    };
    const all = [8 + columns * (width + gap) - gap, 8 + found.leaves * (height + gapY) - gapY];
    return { x, y, edge, width, height, all, second: isHigh ? null : [PAD, 31, width - PAD] };
  }

  /* The tree as an outline, a line for each node, where there is no room for its levels beside each other. */
  function outline(found, room) {
    const columns = Math.max(...found.depth) + 1, indent = Math.max(3, Math.min(INDENT, (room - 2 * WIDTH) / Math.max(1, columns - 1)));
    const width = Math.max(WIDTH, Math.min(2 * WIDTH, room - indent * (columns - 1))), half = LINE / 2;
    const x = (n) => 4 + found.depth[n] * indent, y = (n) => 4 + found.line[n] * (LINE + LINE_GAP);
    const edge = (from, to) => `M${x(from) + indent / 2},${y(from) + LINE}V${y(to) + half}H${x(to)}`;
    const all = [8 + (columns - 1) * indent + width, 8 + found.depth.length * (LINE + LINE_GAP) - LINE_GAP];
    return { x, y, edge, width, height: LINE, all, second: width < 1.5 * WIDTH ? null : [WIDTH, 15, width - WIDTH] };
  }

  /* Draws the tree into `container`, in its width.  piece: a token's text. */
  function draw(container, round, piece) {
    const path = pathOf(round), taken = new Set(path), found = places(round, path), { depth, own, end } = found;
    const room = (container.clientWidth || 1200) - 8, most = parseFloat(getComputedStyle(container).maxHeight) || Infinity;
    const { x, y, edge, width, height, all, second } = across(found, room, most) ?? outline(found, room);
    const svg = made("svg", { width: all[0], height: all[1], viewBox: `0 0 ${all[0]} ${all[1]}`, role: "img" });
    const emitted = path.slice(1).map((n) => piece(round.tokens[n])).concat(piece(round.chosen[end]));
    svg.append(made("title", {}, `${round.tokens.length} nodes, ${round.accepted} accepted: ${emitted.map((t) => shown(t, 40)).join(" ")}`));
    const edges = made("g", { class: "edges" }), nodes = made("g", { class: "nodes" });
    const kindOf = (n) => (n === own ? "own" : n === 0 ? "root" : taken.has(n) ? "accepted" : "rejected");
    for (let n = 1; n <= own; n++) edges.append(made("path", { class: `edge ${kindOf(n)}`, d: edge(n === own ? end : round.parents[n], n) }));
    const first = Math.floor(((second && second[0] > PAD ? second[0] : width) - PAD - 4) / LETTER);
    for (let n = 0; n <= own; n++) {
      const kind = kindOf(n), token = n === own ? round.chosen[end] : round.tokens[n];
      const group = made("g", { class: `node ${kind}`, transform: `translate(${x(n)},${y(n)})`, "data-node": n, "data-token": token });
      const score = n && n < own && round.scores.length ? percent(round.scores[n]) : "";
      const source = n && n < own && round.sources ? round.sources[n] : "";
      const label = n === 0 ? "the last token of the text" : n === own ? "the target's own token" : `${kind}, depth ${depth[n]}`;
      const more = [score && `survival ${score}`, source && `from ${source}`, n < own && `the target's choice after it: ${shown(piece(round.chosen[n]), 60)}`];
      group.append(made("title", {}, [`${shown(piece(token), 200)} (token ${token})`, label, ...more].filter(Boolean).join("\n")));
      group.append(made("rect", { width, height, rx: Math.min(6, height / 4) }));
      if (source) group.append(made("rect", { class: `source ${source.includes("+") ? "several" : source}`, width: 5, height, rx: 2 }));
      group.append(made("text", { x: PAD, y: 16, class: "token", direction: "ltr" }, shown(piece(token), first)));
      if (second) {
        const [left, top, wide] = second, letters = Math.floor((wide - 4) / SMALL), rest = letters - (score ? score.length + 1 : 0) - 2;
        const chosen = n === own ? (letters < 12 ? "target" : "target's own") : rest > 1 ? `\u2192 ${shown(piece(round.chosen[n]), rest)}` : "";
        group.append(made("text", { x: left, y: top, class: "small", direction: "ltr" }, [score, chosen].filter(Boolean).join(" ")));
      }
      nodes.append(group);
    }
    svg.append(edges, nodes);
    container.replaceChildren(svg);
    /* Of a tree that is too high: the middle of the path taken, or of as much of it as fits beside the root. */
    const high = container.clientHeight, middle = (y(0) + y(own) + height - high) / 2;
    container.scrollTop = Math.min(y(0) - 4, Math.max(y(0) + height + 4 - high, middle));
    return path;
  }

  return { draw, made, pathOf, percent, shown };
})();
