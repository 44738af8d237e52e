"use strict";
/* Elements and numbers as the page shows them. Texts of runs are put in as text nodes, never as markup. */
const Words = (() => {
  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "style") Object.assign(node.style, value);
      else if (name === "class") node.className = value;
      else node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }
  const cell = (...children) => el("td", {}, ...children);
  const small = (words) => (words ? el("small", {}, words) : null);
  const row = (...cells) => el("tr", {}, ...cells);
  /* A table that scrolls by itself; headings are texts or elements. */
  function table(headings, rows, look) {
    const head = headings.map((words) => (typeof words === "string" ? el("th", {}, words) : words));
    return el("table", look ? { class: look } : {}, el("thead", {}, row(...head)), el("tbody", {}, ...rows));
  }
  /* A panel whose content scrolls sideways, with a hint at the right edge while there is more. */
  function panel(content, look) {
    const inner = el("div", { class: look ? `scroll ${look}` : "scroll", tabindex: "0" }, content);
    const more = el("div", { class: "more", "aria-hidden": "true" }, "›");
    const outer = el("div", { class: "panel flush" }, inner, more);
    const hint = () => outer.classList.toggle("wide", inner.scrollLeft + inner.clientWidth < inner.scrollWidth - 2);
    inner.addEventListener("scroll", hint, { passive: true });
    new ResizeObserver(hint).observe(inner);
    return outer;
  }

  const shade = (style) => Theme.colour(`@c${style % Theme.now().c.length}`);
  const swatch = (style) => el("span", { class: "dot", style: { background: shade(style) } });

  const local = (value) => value.toLocaleString("en");
  const fixed = (digits, scale = 1) => (value) => (value * scale).toFixed(digits);
  const percent = fixed(1, 100), whole = (value) => local(Math.round(value));
  const mega = (value) => { const mb = value / 1e6; return mb.toFixed(mb >= 1000 ? 0 : 1); };
  const seconds = (value) => (value >= 7200 ? `${(value / 3600).toFixed(1)} h` : `${whole(value)} s`);
  const count = (n, one) => `${local(n)} ${one}${n === 1 ? "" : "s"}`;
  const signed = (value) => `${value >= 0 ? "+" : "−"}${Math.abs(100 * value).toFixed(1)}`;
  const capital = (words) => words[0].toUpperCase() + words.slice(1);
  const clip = (words, most) => (words.length > most ? `${words.slice(0, most - 1)}…` : words);
  const ratio = (value, bound) => `${bound === "=" ? "" : bound}${value.toFixed(2)}x`;
  const diverged = (times) => {
    const said = `${times.length} diverged at ${times.map(whole).join(", ")} s`;
    return times.length ? el("small", { class: "bad" }, said) : null;
  };
  const RATIO = "Time vs reference: 1.60x takes 1.6 times as long to the target, 0.50x half as long; "
    + "> where it had not got there when its runs ended, < where the reference had not.";
  /* Kinds of columns (columns.py): how a number is written, and its unit. */
  const KINDS = {
    share: [percent, "(%)"], value: [(value) => String(Number(value.toPrecision(4))), ""],
    seconds: [whole, "(s)"], bytes: [mega, "(MB)"], mean: [fixed(1), ""],
    index: [fixed(3), ""], count: [whole, ""],
  };
  /* Of runs that are ranked with each other: whether they are judged by an accuracy, and what they are to reach. */
  const share = (world) => world.metric.name === "accuracy";
  const target = (world) => (share(world) ? `${Number((100 * world.target).toFixed(1))} %` : String(world.target));
  const change = (world, value) => (share(world) ? signed(value) : KINDS.value[0](value));
  return {
    el, cell, small, row, table, panel, shade, swatch, local, percent, whole, mega, seconds, count, signed, capital,
    clip,
    ratio, diverged, RATIO, KINDS, share, target, change,
  };
})();
