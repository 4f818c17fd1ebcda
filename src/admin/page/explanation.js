// All candidates of one decision with their costs.

import { attribute, el, table, text } from "./dom.js";
import { explanation } from "./data.js";
import { NONE, count, ms, plural, words } from "./format.js";

/** Candidates that are shown at first. */
const FOLDED = 12;

const score = value => value == null ? NONE : Number(value.toPrecision(4)).toString();

/** Rank, and weighted sum of all parts, of each candidate. */
function ranked({ endpoints, choice }) {
  const parts = choice.parts ?? [];
  const rows = endpoints.map(candidate => {
    const scores = parts.map(part => part.endpoints[candidate.address] ?? null);
    const known = scores.some((value, i) => value != null && parts[i].weight);
    const total = known ? scores.reduce((sum, value, i) => sum + (value ?? 0) * parts[i].weight, 0) : null;
    const place = choice.picks.indexOf(candidate.address);
    return { candidate, scores, total, place: place >= 0 ? place : candidate.address === choice.runner_up ? 1_000 : candidate.excluded ? 9_999 : 5_000 };
  });
  // Costs: the least wins. Scores: the greatest. The choice tells which.
  const chosen = rows.find(row => row.place === 0)?.total;
  const others = rows.filter(row => row.place >= 1_000 && row.total != null).map(row => row.total);
  const sign = chosen != null && others.length && chosen > Math.max(...others) ? -1 : 1;
  return rows.toSorted((a, b) => a.place - b.place || sign * ((a.total ?? Infinity) - (b.total ?? Infinity)) || 0);
}

function role({ place, candidate }) {
  if (place === 0) return el("span", { class: "badge good" }, "chosen");
  if (place < 1_000) return el("span", { class: "badge soft" }, `${place + 1}. choice`);
  if (place === 1_000) return el("span", { class: "badge warn" }, "runner-up");
  return el("span", { class: "soft" }, candidate.excluded ? words(candidate.excluded) : "");
}

function candidates(decision) {
  const rows = ranked(decision);
  const parts = decision.choice.parts ?? [];
  const columns = [["Candidate", "mono"], ["", ""], ["Cached tokens", "number"], ["Requests", "number"],
    ...parts.map(part => [part.weight === 1 ? words(part.part) : `${words(part.part)} × ${part.weight}`, "number"]),
    ...(parts.length > 1 ? [["Sum", "number"]] : [])];
  const cells = row => [row.candidate.address, role(row), count(row.candidate.cached_tokens), count(row.candidate.requests),
    ...row.scores.map(score), ...(parts.length > 1 ? [score(row.total)] : [])];
  const holder = el("div", { class: "scroll" });
  const more = el("button", { type: "button", class: "more" }, `Show ${rows.length - FOLDED} more candidates`);
  const draw = list => holder.replaceChildren(table("Candidates", columns, list.map(cells)));
  draw(rows.slice(0, FOLDED));
  more.hidden = rows.length <= FOLDED;
  more.addEventListener("click", () => {
    draw(rows);
    more.hidden = true;
  });
  return [holder, more];
}

/** The agent of a request, as far as the request names it. */
export function agentText(agent) {
  if (!agent) return "";
  const chain = agent.chain === agent.program ? "" : `, chain ${agent.chain}`;
  const parent = agent.parent ? `, parent ${agent.parent}` : "";
  return `${words(agent.kind)} of program ${agent.program}${chain}${parent} (${agent.source}: ${agent.field})`;
}

function summary(decision) {
  const facts = [decision.choice.reason, `strategy ${decision.strategy}`, decision.profile && `profile ${decision.profile}`,
    agentText(decision.agent), decision.priority ? `priority ${decision.priority}` : null, `prompt ${plural(decision.prompt_tokens, "token")}`,
    decision.waited_ms ? `queued ${ms(decision.waited_ms)}` : null];
  return facts.filter(fact => fact).join(" · ");
}

/** The details of one decision, which are read when they are opened. */
export function explanationView(requestId) {
  const note = el("p", { class: "soft" }, requestId ? "Reading …" : "The request has no x-request-id, so that no explanation is kept.");
  const node = el("div", { class: "explanation" }, note);
  async function read() {
    if (!requestId) return;
    const { explanation: decision, missing } = await explanation(requestId);
    if (missing || !decision.endpoints || !decision.choice) {
      text(note, missing ?? "The picker has another form of explanation for this request.");
      return;
    }
    text(note, summary(decision));
    attribute(note, "class", null);
    const pair = decision.choice.pair;
    node.replaceChildren(note, ...candidates(decision), pair ? el("pre", {}, JSON.stringify(pair, null, 1)) : "");
  }
  return { node, read };
}
