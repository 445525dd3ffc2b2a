"use strict";
/* The playground: asks the server as any other client does, and shows what comes back and what /metrics says. */
(() => {
  const { draw } = SpecdecTree, { made, token, depthKeys, sourceKeys } = SpecdecText;
  const at = (id) => document.getElementById(id);
  const now = { model: "", key: "", rounds: [], pieces: {}, round: -1, follows: true, stopper: null, seen: [], deepest: 1, sources: new Set() };
  const MINUTE = 60_000, LOOK = 2000;

  const headers = () => ({ "content-type": "application/json", ...(now.key ? { authorization: `Bearer ${now.key}` } : {}) });
  const piece = (token) => (token < 0 ? "not finite" : now.pieces[token] ?? `token ${token}`);

  /* ---- asking ---- */

  async function messageOf(response) {
    try {
      return (await response.json()).error.message;
    } catch {
      return `the server answered with status ${response.status}`;
    }
  }

  async function connect() {
    const response = await fetch("v1/models", { headers: headers() });
    at("key-row").hidden = !(now.key || response.status === 401);
    if (!response.ok) {
      at("state").textContent = response.status === 401 ? (now.key ? "this API key is wrong" : "this server wants its API key") : await messageOf(response);
      return false;
    }
    now.model = (await response.json()).data[0].id;
    at("model").textContent = `model ${now.model}`;
    at("state").textContent = "ready";
    return true;
  }

  function bodyOf(speculate) {
    const isChat = at("mode").value === "chat", seed = at("seed").value, temperature = Number(at("temperature").value);
    const text = at("prompt").value;
    return {
      model: now.model, stream: true, stream_options: { include_usage: true }, speculate, return_trees: speculate,
      max_tokens: Number(at("max-tokens").value), temperature, ...(seed && temperature ? { seed: Number(seed) } : {}),
      ...(isChat ? { messages: [{ role: "user", content: text }] } : { prompt: text }),
    };
  }

  /* The events of a stream, one after the other. */
  async function* eventsOf(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      held += value;
      const whole = held.split("\n\n");
      held = whole.pop();
      for (const event of whole) {
        const data = event.replace(/^data: /, "");
        if (data !== "[DONE]") yield JSON.parse(data);
      }
    }
  }

  /* One answer; returns what it wrote, in how many seconds after its first piece. */
  async function ask(speculate, onChunk) {
    const path = at("mode").value === "chat" ? "v1/chat/completions" : "v1/completions";
    const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(bodyOf(speculate)), signal: now.stopper.signal });
    if (!response.ok) throw new Error(await messageOf(response));
    let first = 0, tokens = 0, before = 0, text = "";
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) tokens = event.usage.completion_tokens;
      const choice = event.choices?.[0];
      if (!choice) continue;
      const thought = choice.delta?.reasoning_content ?? "", content = choice.text ?? choice.delta?.content ?? "", piece = thought + content;
      if (piece && !first) {
        first = performance.now();
        before = choice.specdec?.origins.length ?? 1;
      }
      text += piece;
      onChunk(thought, content, choice.specdec);
    }
    return { tokens, text, rate: (tokens - before) / Math.max(1e-3, (performance.now() - first) / 1000) };
  }

  /* ---- showing an answer ---- */

  function colour(text, said) {
    if (!said) return [made("span", {}, text)];
    const from = now.sources.size ? said.sources : [];
    if (said.pieces.join("") !== text) return [token(text, said.origins.at(-1), from.at(-1))];
    return said.pieces.map((word, i) => token(word, said.origins[i], from[i]));
  }

  /* Grows with what the answer has, so that nothing stands there that it lacks. */
  function legend(said) {
    now.deepest = Math.max(now.deepest, ...said.origins);
    for (const source of said.rounds.flatMap((one) => one.sources)) if (source) now.sources.add(source);
    at("legend").replaceChildren(...depthKeys(now.deepest), ...sourceKeys(now.sources));
  }

  function take(thought, content, said) {
    if (said) legend(said);
    for (const [text, thinks] of [[thought, true], [content, false]]) {
      if (!text) continue;
      if (now.thinks && !thinks) at("text").append("\n\n");
      now.thinks = thinks;
      const words = colour(text, said);
      for (const word of words) word.classList.toggle("thought", thinks);
      at("text").append(...words);
    }
    if (!said) return;
    Object.assign(now.pieces, said.texts);
    now.rounds.push(...said.rounds);
    if (now.follows) now.round = now.rounds.length - 1;
    requestAnimationFrame(round);
  }

  function round() {
    const last = now.rounds.length - 1, each = now.rounds[now.round];
    at("before").disabled = now.round <= 0;
    at("after").disabled = now.round >= last;
    if (!each) return;
    at("where").textContent = `round ${now.round + 1} of ${last + 1}: ${each.accepted} of ${each.tokens.length - 1} accepted`;
    draw(at("tree"), each, piece);
  }

  function go(step) {
    now.round = Math.max(0, Math.min(now.rounds.length - 1, now.round + step));
    now.follows = now.round === now.rounds.length - 1;
    round();
  }

  function speed(name, found) {
    return made("div", { className: "speed" }, made("b", {}, `${found.rate.toFixed(found.rate < 100 ? 1 : 0)} tok/s`), made("span", {}, `${name}, ${found.tokens} tokens`));
  }

  async function run() {
    now.key = at("key").value;
    Object.assign(now, { rounds: [], pieces: {}, round: -1, follows: true, stopper: new AbortController(), deepest: 1, sources: new Set(), thinks: false });
    at("error").textContent = "";
    at("text").replaceChildren();
    at("tree").replaceChildren();
    at("speeds").replaceChildren();
    at("where").textContent = "no round yet";
    at("run").disabled = true;
    at("stop").disabled = false;
    at("legend").replaceChildren();
    try {
      if (!(await connect())) throw new Error(at("state").textContent);
      const fast = await ask(true, take);
      at("speeds").append(speed("with speculation", fast));
      if (at("compare").checked) {
        const plain = await ask(false, () => {});
        at("speeds").append(speed("without", plain));
        const times = made("div", { className: "speed" }, made("b", {}, `${(fast.rate / plain.rate).toFixed(2)} times`));
        const same = at("temperature").value === "0" || at("seed").value ? (fast.text === plain.text ? "the same text" : "another text") : "sampled anew";
        times.append(made("span", {}, same));
        at("speeds").append(times);
      }
    } catch (error) {
      at("error").textContent = error.name === "AbortError" ? "stopped" : error.message;
    } finally {
      at("run").disabled = false;
      at("stop").disabled = true;
    }
  }

  /* ---- what all callers do together ---- */

  function metricsOf(text) {
    const found = {};
    for (const line of text.split("\n")) {
      const parts = /^(specdec_\w+)(?:\{(.*)\})? ([-+.\deE]+)$/.exec(line);
      if (!parts) continue;
      const [, name, labels, value] = parts, depth = /(?:^|,)depth="(\d+)"/.exec(labels ?? "");
      if (depth) (found[name] ??= {})[depth[1]] = Number(value);
      else found[name] = Number(value);
    }
    return found;
  }

  function load(found) {
    const facts = [["running", found.specdec_running], ["waiting", found.specdec_waiting], ["pages used", `${found.specdec_pages_used} of ${found.specdec_pages}`], ["accepted of drafted", found.specdec_drafted_total ? `${((100 * found.specdec_accepted_total) / found.specdec_drafted_total).toFixed(0)} %` : "none yet"]];
    at("load").replaceChildren(...facts.map(([name, value]) => made("div", {}, made("dt", {}, name), made("dd", {}, String(value)))));
  }

  function depths(found) {
    const time = performance.now(), reached = found.specdec_reached_by_depth_total ?? {}, accepted = found.specdec_accepted_by_depth_total ?? {};
    now.seen.push({ time, reached, accepted });
    while (now.seen.length > 2 && now.seen[1].time < time - MINUTE) now.seen.shift();
    const old = now.seen[0], shares = [];
    for (const depth of Object.keys(reached).map(Number).sort((a, b) => a - b)) {
      const tried = reached[depth] - (old.reached[depth] ?? 0), taken = (accepted[depth] ?? 0) - (old.accepted[depth] ?? 0);
      if (!tried) continue;
      const share = (100 * taken) / tried;
      shares.push({ parts: [{ value: share, kind: "accepted" }], label: String(depth), mark: `${share.toFixed(0)} %`, title: `depth ${depth}: accepted in ${taken} of the ${tried} rounds that reached it` });
    }
    at("depth-said").textContent = shares.length ? "" : "no round in the last minute";
    if (shares.length) SpecdecCharts.bars(at("depth"), shares, { unit: " %", widest: 80, name: "share of the rounds that reached a depth in which it was accepted" });
    else at("depth").replaceChildren();
  }

  async function look() {
    try {
      const found = metricsOf(await (await fetch("metrics")).text());
      load(found);
      depths(found);
      at("state").classList.remove("failed");
      if (at("state").textContent === "the server does not answer") at("state").textContent = "ready";
    } catch {
      at("state").textContent = "the server does not answer";
      at("state").classList.add("failed");
    }
    setTimeout(look, LOOK);
  }

  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  at("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !at("run").disabled) at("ask").requestSubmit();
  });
  at("stop").addEventListener("click", () => now.stopper?.abort());
  at("before").addEventListener("click", () => go(-1));
  at("after").addEventListener("click", () => go(1));
  document.addEventListener("keydown", (event) => {
    if (["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey || !now.rounds.length) return;
    if (event.key === "ArrowLeft") go(-1);
    else if (event.key === "ArrowRight") go(1);
    else return;
    event.preventDefault();
  });
  addEventListener("resize", round); // a tree is drawn for the width that there is
  connect().catch(() => { at("state").textContent = "the server does not answer"; });
  look();
})();
