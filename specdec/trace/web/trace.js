"use strict";
/* The page of a trace: shows one text, one round of it, and what its rounds did together. */
(() => {
  const { draw, pathOf, percent, shown } = SpecdecTree, { made, token, depthKeys, sourceKeys } = SpecdecText;
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const now = { text: 0, round: 0 };
  const PHASES = ["draft", "verify", "decode", "extend", "host"];
  const text = () => data.texts[now.text];
  const piece = (token) => (token < 0 ? "not finite" : data.pieces[token] ?? `token ${token}`);

  function median(values) {
    const sorted = [...values].sort((a, b) => a - b), half = sorted.length >> 1;
    return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
  }

  /* The round that emitted each token; -1 for the first, which the prompt's own pass chose. */
  function roundsOfTokens(each) {
    const of = each.tokens.map(() => -1);
    each.rounds.forEach((round, r) => { for (let i = round.first; i < Math.min(of.length, round.first + round.accepted + 1); i++) of[i] = r; });
    return of;
  }

  /* Who drafted each token of the text; empty where there is one source, and for the target's own. */
  function sourcesOfTokens(each) {
    const of = each.tokens.map(() => "");
    for (const one of each.rounds) if (one.sources.length) pathOf(one).slice(1).forEach((n, i) => { if (one.first + i < of.length) of[one.first + i] = one.sources[n]; });
    return of;
  }

  function legend() {
    at("legend").replaceChildren(...depthKeys(Math.max(0, ...text().origins)), ...sourceKeys(sourcesOfTokens(text())));
  }

  function numbers() {
    const each = text(), rounds = each.rounds, emitted = rounds.reduce((sum, round) => sum + round.accepted + 1, 0);
    const drafted = rounds.reduce((sum, round) => sum + round.tokens.length - 1, 0);
    const facts = [
      ["tokens", each.tokens.length], ["rounds", rounds.length],
      ["tokens a round", rounds.length ? (emitted / rounds.length).toFixed(2) : "none"],
      ["drafted", drafted], ["accepted", emitted - rounds.length], ["tokens of the prompt", each.prompt_tokens], ["ended by", each.finish],
    ];
    at("numbers").replaceChildren(...facts.map(([name, value]) => made("div", {}, made("dt", {}, name), made("dd", {}, String(value)))));
  }

  function words() {
    const each = text(), of = roundsOfTokens(each), from = sourcesOfTokens(each), spans = [made("span", { className: "prompt", title: "the prompt" }, each.prompt)];
    each.pieces.forEach((word, i) => {
      const where = of[i] < 0 ? "the prompt's own pass" : `round ${of[i] + 1}`;
      const span = token(word, each.origins[i], from[i], `${shown(piece(each.tokens[i]), 80)} \u2014 `, `, ${where}`);
      span.dataset.round = of[i];
      if (of[i] >= 0) span.addEventListener("click", () => go(of[i]));
      spans.push(span);
    });
    at("text").replaceChildren(...spans);
  }

  function round() {
    const each = text(), rounds = each.rounds;
    at("rounds").textContent = String(rounds.length);
    at("round").max = String(rounds.length);
    at("round").value = String(now.round + 1);
    for (const [id, off] of [["first", !now.round], ["before", !now.round], ["after", now.round >= rounds.length - 1], ["last", now.round >= rounds.length - 1]]) at(id).disabled = off;
    for (const span of at("text").querySelectorAll(".now")) span.classList.remove("now");
    for (const span of at("text").querySelectorAll(`[data-round="${now.round}"]`)) span.classList.add("now");
    if (!rounds.length) {
      at("said").textContent = "No round ran: the prompt's own pass chose the only token.";
      at("tree").replaceChildren();
      return;
    }
    const shownRound = rounds[now.round], path = draw(at("tree"), shownRound, piece), end = path[path.length - 1];
    const drafts = shownRound.tokens.length - 1;
    const accepted = drafts ? `${shownRound.accepted} of ${drafts} drafted nodes accepted` : "a plain step, without drafts";
    const score = path.length > 1 && shownRound.scores.length ? `, survival of the last ${percent(shownRound.scores[end])}` : "";
    const after = path.slice(1).map((n) => piece(shownRound.tokens[n])).join("");
    const emitted = shown(after + piece(shownRound.chosen[end]), 120).replace(/\u00b7/g, " ");
    at("said").textContent = `${accepted}${score}. It emits \u201c${emitted}\u201d.`;
  }

  function charts() {
    const each = text(), rounds = each.rounds;
    const emitted = rounds.map((one) => one.accepted + 1), mean = emitted.reduce((a, b) => a + b, 0) / Math.max(1, rounds.length);
    SpecdecCharts.bars(at("along"), rounds.map((one, r) => ({
      parts: [{ value: one.accepted, kind: "accepted" }, { value: 1, kind: "own" }], label: String(r + 1), title: `round ${r + 1}: ${one.accepted} accepted, 1 of the target's own`,
    })), { picked: now.round, onPick: go, line: rounds.length ? mean : null, name: `tokens of each of ${rounds.length} rounds, ${mean.toFixed(2)} on average` });
    const depths = Math.max(0, ...rounds.map((one) => deepestOf(one))), shares = [];
    for (let depth = 1; depth <= depths; depth++) {
      const reached = rounds.filter((one) => one.accepted >= depth - 1 && deepestOf(one) >= depth).length, accepted = rounds.filter((one) => one.accepted >= depth).length;
      if (!reached) break; // deeper nodes stood on branches that nobody took
      const share = (100 * accepted) / reached;
      shares.push({ parts: [{ value: share, kind: "accepted" }], label: String(depth), mark: `${share.toFixed(0)} %`, title: `depth ${depth}: accepted in ${accepted} of the ${reached} rounds that reached it` });
    }
    SpecdecCharts.bars(at("depth"), shares, { unit: " %", widest: 80, name: "share of the rounds that reached a depth in which it was accepted" });
    times();
  }

  function deepestOf(one) {
    const depths = [0];
    for (let n = 1; n < one.tokens.length; n++) depths.push(depths[one.parents[n]] + 1);
    return Math.max(...depths);
  }

  function times() {
    const found = text().times ?? [];
    at("times-section").hidden = !found.length;
    if (!found.length) return;
    const split = found.map(({ wall, ...phases }) => ({ ...phases, host: Math.max(0, wall - Object.values(phases).reduce((a, b) => a + b, 0)) }));
    const kinds = PHASES.filter((phase) => split.some((one) => one[phase]));
    const middles = kinds.map((kind) => [kind, median(split.map((one) => one[kind] ?? 0))]);
    const chart = made("div"), key = made("p", { className: "legend" }, ...middles.map(([kind, value]) => made("span", { className: `key ${kind}` }, `${kind} ${value.toFixed(2)} ms`)));
    at("times").replaceChildren(key, chart);
    SpecdecCharts.bars(chart, split.map((one, r) => ({
      parts: kinds.map((kind) => ({ value: one[kind] ?? 0, kind })), label: String(r + 1), title: `round ${r + 1}: ${kinds.map((kind) => `${kind} ${(one[kind] ?? 0).toFixed(2)} ms`).join(", ")}`,
    })), { unit: " ms", name: `milliseconds of each round; medians: ${middles.map(([kind, value]) => `${kind} ${value.toFixed(2)}`).join(", ")}` });
  }

  function go(index) {
    now.round = Math.max(0, Math.min(text().rounds.length - 1, index));
    round();
    for (const bar of at("along").querySelectorAll(".bar")) bar.classList.toggle("picked", Number(bar.dataset.bar) === now.round);
  }

  function choose(index) {
    now.text = index;
    now.round = 0;
    numbers();
    legend();
    words();
    round();
    charts();
  }

  function begin() {
    at("about").replaceChildren(...Object.entries(data.about).map(([name, value]) => made("tr", {}, made("th", { scope: "row" }, name), made("td", {}, value))));
    at("choice").hidden = data.texts.length < 2;
    at("texts").replaceChildren(...data.texts.map((each, i) => made("option", { value: String(i) }, `${i + 1}: ${shown(each.prompt, 40)}`)));
    at("texts").addEventListener("change", () => choose(Number(at("texts").value)));
    const kinds = [["accepted", "accepted"], ["rejected", "rejected"], ["own", "the target's own token"]];
    const keys = kinds.map(([kind, name]) => made("span", { className: `key ${kind}` }, name));
    keys.push(...sourceKeys(data.texts.flatMap((each) => each.rounds.flatMap((one) => one.sources))));
    at("tree-legend").replaceChildren(...keys, made("span", { className: "hint" }, "In a node: its token, the estimated chance that it survives, and after the arrow what the target chose there."));
    at("first").addEventListener("click", () => go(0));
    at("before").addEventListener("click", () => go(now.round - 1));
    at("after").addEventListener("click", () => go(now.round + 1));
    at("last").addEventListener("click", () => go(text().rounds.length - 1));
    at("round").addEventListener("change", () => go(Number(at("round").value) - 1));
    document.addEventListener("keydown", (event) => {
      if (["INPUT", "SELECT"].includes(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
      const to = { ArrowLeft: now.round - 1, ArrowRight: now.round + 1, Home: 0, End: text().rounds.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      go(to);
    });
    let width = 0;
    new ResizeObserver(() => { if (Math.abs(document.body.clientWidth - width) > 4) { width = document.body.clientWidth; charts(); round(); } }).observe(document.body);
    choose(0);
  }

  if (data.texts.length) begin();
})();
