"use strict";
/* Draws bars as SVG: stacks along an axis, with a scale and labels.  Knows numbers and names alone. */
const SpecdecCharts = (() => {
  const { made } = SpecdecTree;
  const BOTTOM = 22, TOP = 16;

  /* A step of 1, 2 or 5 times a power of ten that cuts `most` into about four. */
  function stepOf(most) {
    const rough = most / 4, power = 10 ** Math.floor(Math.log10(rough || 1));
    return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) || 1;
  }

  /* bars: [{ parts: [{ value, kind }], title, label, mark }].  unit: after numbers of the scale.  onPick(i): a bar was clicked. */
  function bars(container, given, { unit = "", height = 150, widest = 64, picked = -1, onPick = null, name = "", line = null } = {}) {
    const sums = given.map((bar) => bar.parts.reduce((sum, part) => sum + part.value, 0));
    const step = stepOf(Math.max(...sums, 1e-9)), most = step * Math.ceil(Math.max(...sums, step) / step);
    const digits = step < 1 ? Math.ceil(-Math.log10(step)) : 0, left = 14 + 8 * (most.toFixed(digits) + unit).length;
    const room = Math.max(240, container.clientWidth - 2), inner = room - left - 8;
    const each = Math.min(widest, Math.max(2, inner / Math.max(1, given.length)));
    const width = left + each * given.length + 8, full = height - TOP - BOTTOM;
    const y = (value) => TOP + full * (1 - value / most);
    const svg = made("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
    svg.append(made("title", {}, name));
    for (let tick = 0; tick <= most + step / 2; tick += step) {
      svg.append(made("line", { class: "grid", x1: left, x2: width - 4, y1: y(tick), y2: y(tick) }));
      svg.append(made("text", { class: "tick", x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, tick.toFixed(digits) + unit));
    }
    const gap = each > 6 ? Math.min(8, each * 0.2) : each > 3 ? 1 : 0, every = Math.ceil(28 / each);
    const longest = Math.max(0, ...given.map((bar) => (bar.mark ?? "").length)), everyMark = Math.ceil((4 + 7 * longest) / each);
    given.forEach((bar, i) => {
      const group = made("g", { class: `bar${i === picked ? " picked" : ""}`, "data-bar": i });
      if (bar.title) group.append(made("title", {}, bar.title));
      group.append(made("rect", { class: "behind", x: left + i * each, y: TOP, width: each, height: full }));
      let at = 0;
      for (const part of bar.parts) {
        const top = y(at + part.value);
        group.append(made("rect", { class: `part ${part.kind}`, x: left + i * each + gap / 2, y: top, width: each - gap, height: Math.max(0, y(at) - top) }));
        at += part.value;
      }
      const middle = left + i * each + each / 2;
      if (bar.mark && i % everyMark === 0) group.append(made("text", { class: "mark", x: middle, y: y(at) - 4, "text-anchor": "middle" }, bar.mark));
      if (bar.label && i % every === 0) group.append(made("text", { class: "tick", x: middle, y: height - 6, "text-anchor": "middle" }, bar.label));
      if (onPick) group.addEventListener("click", () => onPick(i));
      svg.append(group);
    });
    if (line !== null) svg.append(made("line", { class: "mean", x1: left, x2: left + each * given.length, y1: y(line), y2: y(line) }));
    container.replaceChildren(svg);
  }

  return { bars };
})();
