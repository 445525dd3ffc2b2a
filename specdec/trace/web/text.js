"use strict";
/* A text in the colours of its tokens' origins and sources, and the keys to them.  Knows tokens, no page around them. */
const SpecdecText = (() => {
  const DEEPEST = 6; // deeper tokens have its colour

  function made(name, properties = {}, ...inside) {
    const element = Object.assign(document.createElement(name), properties);
    element.append(...inside);
    return element;
  }

  const depthKind = (origin) => (origin ? `d${Math.min(origin, DEEPEST)}` : "own");
  const sourceKind = (source) => (source.includes("+") ? "several" : source);

  /* One token.  origin: its depth, 0 for the target's own.  source: who drafted it, where there are several.  before, after: what its title says more. */
  function token(text, origin, source = "", before = "", after = "") {
    const how = origin ? `drafted${source && ` from ${source}`}, accepted at depth ${origin}` : "the target's own";
    const by = origin && source ? ` source ${sourceKind(source)}` : "";
    return made("span", { className: `token ${depthKind(origin)}${by}`, title: `${before}${how}${after}` }, text);
  }

  /* Keys to the colours of a text.  deepest: of its tokens. */
  function depthKeys(deepest) {
    const keys = [];
    for (let depth = 1; depth <= Math.min(DEEPEST, deepest); depth++) {
      const name = depth === 1 ? "accepted at depth 1" : depth === DEEPEST && deepest > DEEPEST ? `${DEEPEST} and deeper` : `${depth}`;
      keys.push(made("span", { className: `key d${depth}` }, name));
    }
    return [...keys, made("span", { className: "key own" }, "the target's own")];
  }

  /* Keys to sources, whose names are empty where there is one. */
  function sourceKeys(sources) {
    const names = [...new Set([...sources].filter(Boolean).map(sourceKind))].sort((a, b) => (a === "several") - (b === "several") || (a < b ? -1 : 1));
    return names.map((name) => made("span", { className: `key source ${name}` }, name === "several" ? "several sources" : `from ${name}`));
  }

  return { made, token, depthKeys, sourceKeys };
})();
