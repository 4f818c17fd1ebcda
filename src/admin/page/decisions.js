// The latest decisions: predicted and actual time to the first token, and how much better the endpoint was than the next.

import { attribute, byId, chips, el, keyed, text } from "./dom.js";
import { NONE, count, ms, rowsAtFirst, span, words } from "./format.js";
import { agentText, explanationView } from "./explanation.js";

/** Decisions that are shown, on wide screens and on phones. */
const SHOWN = [30, 8];
const filter = { wanted: "", kind: "all" };
/** A prediction that is off by more than this part of it is marked. */
const FAR = 0.5;

const isTroubled = record => record.end !== "complete" && record.end !== "unwatched" || record.status >= 400;

/** Difference of the actual time from the predicted one, as a part of the latter. */
function error(record) {
  const predicted = record.predicted_ttft_ms;
  return predicted > 0 && record.ttft_ms != null ? record.ttft_ms / predicted - 1 : null;
}

function deviation(record) {
  const off = error(record);
  return off == null ? NONE : `${off < 0 ? "−" : "+"}${Math.round(Math.abs(off) * 100)} %`;
}

function margin(record) {
  const next = record.runner_up;
  if (!next) return NONE;
  if (next.margin_ms != null) return ms(next.margin_ms);
  return next.margin_score == null ? NONE : Number(next.margin_score.toPrecision(3)).toString();
}

function outcome(record) {
  const end = words(record.end);
  if (!record.status) return end;
  return record.end === "complete" ? String(record.status) : `${record.status} ${end}`;
}

const outcomeTone = record => record.status >= 500 || ["aborted", "connect_failure", "gateway"].includes(record.end) ? "bad" : isTroubled(record) ? "warn" : "";

function cached(record) {
  const exact = record.prompt_tokens != null;
  const prompt = exact ? record.prompt_tokens : record.estimated_prompt_tokens;
  const held = record.cached_tokens ?? record.estimated_cached_tokens;
  return `${record.cached_tokens == null ? "~" : ""}${count(held)} / ${exact ? "" : "~"}${count(prompt)}`;
}

/** The parts of a row: label, class, text, tone, tooltip. */
const PARTS = [
  ["Age", "age number", record => span(record.age_ms / 1_000)],
  ["Request", "id mono", record => record.request_id || NONE, () => "", record => [record.request_id, agentText(record.agent)].filter(part => part).join(", ")],
  ["Model", "model", record => record.model || NONE, () => "", record => `${record.model}, pool ${record.pool}, ${words(record.api)}`],
  ["Endpoint", "mono goes", record => goes(record), record => record.endpoint ? "" : "warn", record => words(record.reason)],
  ["Predicted TTFT", "number", record => ms(record.predicted_ttft_ms)],
  ["Actual TTFT", "number", record => ms(record.ttft_ms), () => "", record => record.ttft_ms == null ? "not streamed" : null],
  ["Error", "number off", deviation, record => Math.abs(error(record) ?? 0) > FAR ? "warn" : "soft"],
  ["Margin", "number", margin, () => "", record => record.runner_up ? `runner-up: ${record.runner_up.endpoint}` : null],
  ["Queued", "number", record => record.queued_ms == null ? NONE : ms(record.queued_ms)],
  ["Cached/prompt", "number", cached],
  ["Output", "number", record => count(record.completion_tokens)],
  ["Total", "number", record => ms(record.duration_ms)],
  ["Outcome", "outcome", outcome, outcomeTone],
];

function goes(record) {
  if (!record.endpoint) return words(record.reason);
  const path = record.prefill ? `${record.prefill} → ${record.endpoint}` : record.endpoint;
  return record.served ? `${path}, served by ${record.served}` : path;
}

function row(first) {
  const cells = PARTS.map(([label, kind]) => ({ value: el("span", { class: "value" }), label, kind }));
  const parts = cells.map(({ value, label, kind }) => el("span", { class: `part ${kind}` }, el("span", { class: "label" }, label), value));
  const details = explanationView(first.request_id);
  const node = el("details", { class: "decision" }, el("summary", {}, ...parts), details.node);
  let read = false;
  node.addEventListener("toggle", () => {
    if (!node.open || read) return;
    read = true;
    details.read();
  });
  return {
    node,
    update(record) {
      PARTS.forEach(([, , value, tone, title], i) => {
        text(cells[i].value, value(record));
        attribute(cells[i].value, "class", `value ${tone?.(record) ?? ""}`);
        attribute(parts[i], "title", title?.(record));
      });
    },
  };
}

const head = el("div", { class: "decision-head", "aria-hidden": "true" }, ...PARTS.map(([label, kind]) => el("span", { class: `part ${kind}` }, label)));
const list = el("div", {});
const empty = el("p", { class: "empty" });
byId("decisions").append(head, list, empty);
const rows = keyed(list, record => record.sequence, row);

let shown = null;
/** Opened decisions stay, although newer ones would push them out. */
const opened = new Map();

function keptOpen(records) {
  const known = new Map(records.map(record => [record.sequence, record]));
  [...list.children].forEach((node, i) => {
    const record = drawn[i];
    if (node.open) opened.set(record.sequence, known.get(record.sequence) ?? record);
    else opened.delete(record.sequence);
  });
  return [...opened.values()].filter(record => !known.has(record.sequence));
}

let drawn = [];
function render({ decisions }) {
  const fits = record => [record.request_id, record.model, record.endpoint, record.pool, record.reason, record.end, agentText(record.agent)]
    .some(part => String(part).toLowerCase().includes(filter.wanted));
  const found = decisions.filter(record => fits(record) && (filter.kind === "all" || isTroubled(record)));
  kinds([["all", "all", decisions.length], ["trouble", "failed or rejected", decisions.filter(isTroubled).length]]);
  const kept = keptOpen(found);
  const shownAtFirst = rowsAtFirst(...SHOWN);
  drawn = [...found.slice(0, shownAtFirst), ...found.slice(shownAtFirst).filter(record => opened.has(record.sequence)), ...kept];
  rows(drawn);
  head.hidden = !drawn.length;
  empty.hidden = drawn.length > 0;
  text(empty, decisions.length ? "No decision matches the filter." : "No decisions yet. They appear here as requests end.");
}

const kinds = chips(byId("decision-kinds"), "all", value => {
  filter.kind = value;
  if (shown) render(shown);
});

byId("decision-filter").addEventListener("input", event => {
  filter.wanted = event.target.value.trim().toLowerCase();
  if (shown) render(shown);
});

/** Shows the decisions. */
export function decisionsView(store) {
  if (!store.heard) return;
  shown = store;
  render(store);
}
