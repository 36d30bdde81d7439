"use strict";
// The rollouts to read: search, choose, and open a prompt. All that policies wrote is put in as
// text, never as markup.

const { runs, prompts } = data.rollouts;
const fields = Object.fromEntries(["search", "run", "change", "outcome"].map((id) => [id, document.getElementById(id)]));
const list = document.getElementById("prompts");
const found = document.getElementById("found");
const more = document.getElementById("more");
const STEP = 25; // prompts that are listed at once

const percent = (rate) => (rate === null ? "–" : `${Math.round(100 * rate)} %`);

// what is searched in a prompt: all that the page shows of it
const texts = prompts.map((prompt) => {
  const samples = Object.values(prompt.policies).flatMap((policy) => policy.samples);
  const own = [prompt.id, prompt.source, prompt.level, prompt.prompt, prompt.gold];
  return [...own, ...samples.flatMap((sample) => [sample.answer, sample.text])].join("\n").toLowerCase();
});

function card(sample) {
  const name = sample.greedy ? "greedy" : `sample ${sample.index}`;
  const outcome = element("b", { className: `outcome ${sample.outcome}`, textContent: sample.outcome });
  const answer = sample.answer === null ? "no answer found" : `answer: ${sample.answer}`;
  const head = element("p", { className: "head" }, outcome, ` ${name} · ${answer}`);
  return element("div", { className: "card" }, head, element("pre", { textContent: sample.text }));
}

function column(title, policy) {
  const cards = policy.samples.map(card);
  return element("div", {}, element("h4", { textContent: `${title}: ${percent(policy.rate)}` }), ...cards);
}

function details(prompt) {
  const words = [prompt.id, prompt.source, prompt.level && `level ${prompt.level}`].filter(Boolean).join(" · ");
  const asked = element("pre", { className: "asked", textContent: prompt.prompt });
  const gold = element("p", {}, element("b", { textContent: "gold answer: " }), prompt.gold ?? "–");
  const before = column("before", prompt.policies.initial);
  const after = column(`after, ${fields.run.value}`, prompt.policies[fields.run.value]);
  const both = element("div", { className: "pair" }, before, after);
  const cell = element("td", { colSpan: 4 }, element("p", { className: "note", textContent: words }), asked, gold, both);
  return element("tr", { className: "opened" }, cell);
}

function row(prompt) {
  const button = element("button", { type: "button", className: "open", textContent: prompt.prompt.slice(0, 160) });
  button.setAttribute("aria-expanded", "false");
  const policy = prompt.policies[fields.run.value];
  const cells = [percent(prompt.policies.initial.rate), percent(policy.rate), policy.change ?? "–"];
  const made = element("tr", {}, element("td", {}, button), ...cells.map((textContent) => element("td", { textContent })));
  button.addEventListener("click", () => {
    const isOpen = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!isOpen));
    if (isOpen) made.nextSibling.remove();
    else made.after(details(prompt));
  });
  return made;
}

function isShown(prompt, index) {
  const policy = prompt.policies[fields.run.value];
  if (fields.change.value && policy.change !== fields.change.value) return false;
  if (fields.outcome.value && !policy.samples.some((sample) => sample.outcome === fields.outcome.value)) return false;
  const words = fields.search.value.toLowerCase().split(/\s+/).filter(Boolean);
  return words.every((word) => texts[index].includes(word));
}

function filter() {
  const shown = prompts.filter(isShown);
  list.replaceChildren(...shown.slice(0, STEP).map(row));
  found.textContent = `${shown.length} of ${prompts.length} prompts`;
  let end = STEP;
  more.onclick = () => {
    list.append(...shown.slice(end, end + STEP).map(row));
    end += STEP;
    more.hidden = end >= shown.length;
  };
  more.hidden = end >= shown.length;
}

function options(select, values) {
  select.append(...values.map((value) => element("option", { value, textContent: value })));
}

const outcomes = prompts.flatMap((prompt) => Object.values(prompt.policies)).flatMap((policy) => policy.samples);
options(fields.run, runs);
options(fields.change, data.rollouts.changes);
options(fields.outcome, [...new Set(outcomes.map((sample) => sample.outcome))].sort());
Object.values(fields).forEach((field) => field.addEventListener("input", filter));
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  event.preventDefault();
  list.closest("details").open = true;
  fields.search.focus();
});
filter();
