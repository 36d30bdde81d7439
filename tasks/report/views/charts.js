"use strict";
// Draws the charts of the page's data, in the page's colours, and lets the reader choose: a variant
// of each chart, the recipes that are shown in all of them, and a budget.

const data = JSON.parse(document.getElementById("data").textContent);
const MAX_BANDS = 4; // recipes that are shown with their intervals
const COLOURS = new Set(["color", "fillcolor", "bgcolor", "colorscale"]);
const onTouch = matchMedia("(pointer: coarse)").matches;
const SETTINGS = {
  responsive: true,
  displaylogo: false,
  displayModeBar: onTouch ? false : "hover",
  modeBarButtons: [["toImage"], ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
};
const hidden = new Set(); // recipes
const chosen = {}; // the variant of each chart, by its place in the list
const canvas = document.createElement("canvas").getContext("2d");

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function rgb(name) {
  const style = getComputedStyle(document.documentElement);
  canvas.fillStyle = style.getPropertyValue(`--${name}`).trim();
  return [1, 3, 5].map((at) => parseInt(canvas.fillStyle.slice(at, at + 2), 16));
}

// "@c0" is a colour of the page, "@c0:0.5" half way to its paper, "@c0~0.2" see-through
function colour(words) {
  const [, name, kind, amount] = /^@([\w-]+)([:~]?)(.*)$/.exec(words);
  const own = rgb(name);
  if (kind === "~") return `rgba(${own.join(",")},${amount})`;
  const share = kind ? Number(amount) : 1;
  const paper = rgb("paper");
  return `rgb(${own.map((c, i) => Math.round(share * c + (1 - share) * paper[i])).join(",")})`;
}

function coloured(value, key) {
  if (Array.isArray(value)) return value.map((inner) => coloured(inner, key));
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v, k)]));
  }
  const isColour = typeof value === "string" && value.startsWith("@") && COLOURS.has(key);
  return isColour ? colour(value) : value;
}

function axis(own) {
  const lines = { gridcolor: colour("@line"), linecolor: colour("@soft"), zerolinecolor: colour("@soft") };
  const title = { font: { color: colour("@soft"), size: 13 }, standoff: 8, ...(own?.title || {}) };
  return { automargin: true, zeroline: false, fixedrange: onTouch, ...lines, ...own, title };
}

function layout(own) {
  const font = { family: getComputedStyle(document.body).fontFamily, color: colour("@ink"), size: 13 };
  return {
    height: 380,
    margin: { l: 56, r: 12, t: onTouch ? 10 : 30, b: 44 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("@soft"), activecolor: colour("@ink") },
    showlegend: false, // `drawKey` draws it
    hovermode: "closest",
    hoverlabel: { bgcolor: colour("@raised"), bordercolor: colour("@soft"), font: { ...font }, namelength: -1 },
    dragmode: onTouch ? false : "zoom", // a finger on a chart scrolls the page
    ...own,
    font,
    xaxis: axis(own.xaxis),
    yaxis: axis(own.yaxis),
  };
}

function draw(name) {
  const place = document.querySelector(`[data-chart="${name}"] .plot`);
  if (!place.checkVisibility()) return; // it is drawn when its part of the page opens
  const variant = data.charts[name].variants[chosen[name]];
  const traces = variant.data.filter((trace) => !hidden.has(trace.legendgroup));
  const groups = new Set(traces.map((trace) => trace.legendgroup).filter(Boolean));
  const few = traces.filter((trace) => !trace.meta?.crowded || groups.size <= MAX_BANDS);
  const shown = layout(withRowsOf(few, variant.layout));
  place.style.height = `${shown.height}px`; // plotly forgets it when the window changes its size
  Plotly.react(place, few.map((trace) => coloured(trace)), shown, SETTINGS);
  drawKey(place.nextElementSibling, few, variant.name);
}

// the colours of a chart by recipe, or by trace where it has several of one recipe
function drawKey(place, traces, recipe) {
  const hue = (trace) => trace.colorscale?.[1][1] ?? (trace.marker ?? trace.line).color;
  const named = traces.filter((trace) => trace.showlegend !== false);
  const first = new Map(named.reverse().map((trace) => [trace.legendgroup || trace.name || recipe, hue(trace)]));
  const spans = [...first].reverse().map(([words]) => element("span", {}, element("i"), words));
  spans.forEach((span) => (span.firstChild.style.background = colour(first.get(span.textContent))));
  place.replaceChildren(...spans);
}

// a layout of rows with a name each, without those that nothing is shown of
function withRowsOf(traces, own) {
  const rows = own.yaxis?.categoryarray;
  if (!rows) return own;
  const names = new Set(traces.flatMap((trace) => trace.y));
  const categoryarray = rows.filter((name) => names.has(name));
  const height = 90 + ((own.height - 90) * Math.max(1, categoryarray.length)) / rows.length;
  return { ...own, height, yaxis: { ...own.yaxis, categoryarray } };
}

function choose(name, index) {
  chosen[name] = index;
  draw(name);
  if (name === "budget") advise();
}

function advise() {
  const { name } = data.charts.budget.variants[chosen.budget];
  const slider = document.getElementById("budget");
  const words = data.advice[name][slider.value - 1];
  document.getElementById("advice").textContent = words;
  slider.setAttribute("aria-valuetext", words);
}

function start(figure) {
  const name = figure.dataset.chart;
  const { label, variants } = data.charts[name];
  const place = element("div", { className: "plot" });
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", label);
  if (!variants.length) {
    figure.prepend(element("p", { textContent: "Nothing was measured." }));
    return;
  }
  figure.prepend(place, element("div", { className: "note key-of" }));
  chosen[name] = Math.max(0, variants.findIndex((variant) => variant.name === data.account));
  if (variants.length > 1) {
    const options = variants.map((variant, value) => element("option", { value, textContent: variant.name }));
    const choice = element("select", {}, ...options);
    choice.value = chosen[name];
    choice.addEventListener("change", () => choose(name, Number(choice.value)));
    const words = `${figure.dataset.choice || "show"} `;
    figure.prepend(element("label", { className: "choice" }, words, choice));
  }
  draw(name);
}

function drawAll() {
  Object.keys(chosen).forEach(draw);
}

function show(button, isShown) {
  button.setAttribute("aria-pressed", String(isShown));
  hidden[isShown ? "delete" : "add"](button.dataset.recipe);
}

const buttons = [...document.querySelectorAll("[data-recipe]")];
for (const button of buttons) {
  button.addEventListener("click", () => {
    show(button, hidden.has(button.dataset.recipe));
    drawAll();
  });
}
for (const [id, isShown] of [["show-all", true], ["show-none", false]]) {
  document.getElementById(id).addEventListener("click", () => {
    buttons.forEach((button) => show(button, isShown));
    drawAll();
  });
}
document.querySelectorAll("[data-chart]").forEach(start);
document.querySelectorAll("details").forEach((part) => part.addEventListener("toggle", drawAll));
for (const place of document.querySelectorAll("[data-measured]")) {
  const cells = [...place.closest("tr").cells].slice(-2); // measured.js sets `measured`, if it exists
  globalThis.measured?.cells[place.dataset.measured]?.shown.forEach((words, at) => (cells[at].textContent = words));
}
for (const { caption, cells } of globalThis.imported ?? []) {
  const [head, ...body] = cells.map((texts, row) => // external.js sets `imported`, if it exists
    element("tr", {}, ...texts.map((textContent) => element(row ? "td" : "th", { textContent }))));
  const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
  const place = document.getElementById("other-trainers");
  place.append(element("p", { textContent: caption }), element("div", { className: "scroll" }, table));
  place.hidden = false;
}
document.getElementById("budget").addEventListener("input", advise);
advise();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
