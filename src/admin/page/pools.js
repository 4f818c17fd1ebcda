// The pools: history, queues and endpoints of each. Pools in trouble come first, and quiet ones are closed if there are
// many.

import { attribute, byId, chips, el, keyed, table, text } from "./dom.js";
import { charts } from "./charts.js";
import { count, plural, words } from "./format.js";
import { endpointTable, filtered } from "./endpoints.js";
import { HEALTHY, STANDINGS, severity } from "./trouble.js";

/** Pools that are open at first. */
const OPEN = 4;
const SEGMENTS = ["good", "warn", "bad", "soft"];

const filter = { wanted: "", standing: "all" };
let shown = null;

/** The share of endpoints of each tone, as one bar. */
function shares() {
  const parts = SEGMENTS.map(tone => el("i", { class: tone }));
  return {
    node: el("span", { class: "shares", "aria-hidden": "true" }, ...parts),
    update(endpoints) {
      SEGMENTS.forEach((tone, i) => {
        const number = endpoints.filter(endpoint => {
          const own = STANDINGS[endpoint.status]?.[0] ?? "soft";
          return tone === (own === "good" && severity(endpoint) < HEALTHY ? "warn" : own);
        }).length;
        parts[i].style.flexGrow = String(number);
        parts[i].hidden = !number;
      });
    },
  };
}

function facts(pool) {
  const serving = pool.endpoints.filter(endpoint => STANDINGS[endpoint.status]?.[1]).length;
  return [
    `${serving} of ${plural(pool.endpoints.length, "endpoint")} in service`,
    pool.strategy,
    pool.queued_requests ? `${count(pool.queued_requests)} queued` : null,
    pool.synced ? null : "not synced yet",
  ].filter(fact => fact).join(" · ");
}

/** The queue of each priority, the highest first. */
function queues() {
  const list = el("ul", { class: "queues" });
  const node = el("div", { class: "line" }, el("span", { class: "soft" }, "Queue by priority"), list);
  const rows = keyed(list, band => band.priority, band => {
    const number = el("b");
    const row = el("li", {}, el("span", { class: "soft" }, String(band.priority)), number);
    return {
      node: row,
      update({ requests }) {
        text(number, count(requests));
        attribute(row, "class", requests ? "busy" : null);
      },
    };
  });
  return {
    node,
    update(bands) {
      node.hidden = !bands.length;
      rows(bands);
    },
  };
}

function unread() {
  const node = el("div", { class: "card" });
  let drawn = "";
  return {
    node,
    update(kinds) {
      node.hidden = !kinds.length;
      const now = JSON.stringify(kinds);
      if (now === drawn) return;
      drawn = now;
      const columns = [["Model", "mono"], ["Prompts without tokens, routed without prefix lookup", "wrap warn"], ["Prompts", "number"]];
      node.replaceChildren(table("Prompts without tokens", columns, kinds.map(kind => [kind.model, kind.reason, count(kind.prompts)])));
    },
  };
}

function section(first, position) {
  const [title, line, share, tiles, bands, kinds, list] =
    [el("span"), el("small", { class: "soft" }), shares(), charts(first.name), queues(), unread(), endpointTable(first.name)];
  const empty = el("p", { class: "empty" }, "Discovery has found no endpoints.");
  const node = el("details", { class: "pool" },
    el("summary", {}, el("h2", { class: "title" }, "Pool ", title), line, share.node), tiles.node, bands.node, kinds.node, empty, list.node);
  node.open = position < OPEN;
  // What is closed is drawn when it is opened.
  node.addEventListener("toggle", () => shown && render(shown));
  return {
    node,
    update({ pool, endpoints, history }) {
      text(title, pool.name);
      text(line, facts(pool));
      share.update(pool.endpoints);
      if (!node.open) return;
      tiles.update(history);
      bands.update(pool.queues);
      kinds.update(pool.unread_prompts);
      empty.hidden = pool.endpoints.length > 0;
      list.node.hidden = !pool.endpoints.length;
      list.update(pool, endpoints);
    },
  };
}

let position = 0;
const sections = keyed(byId("pools"), ({ pool }) => pool.name, ({ pool }) => section(pool, position++));

const standings = chips(byId("standings"), "all", value => {
  filter.standing = value;
  if (shown) render(shown);
});

/** The statuses to choose from, each with its number of endpoints. */
function standingOptions(endpoints) {
  const options = Object.keys(STANDINGS).map(status => [status, words(status), endpoints.filter(endpoint => endpoint.status === status).length]);
  const troubled = endpoints.filter(endpoint => severity(endpoint) < HEALTHY).length;
  const present = options.filter(([status, , number]) => number || status === filter.standing);
  return [["all", "all", endpoints.length], ...(troubled || filter.standing === "trouble" ? [["trouble", "in trouble", troubled]] : []), ...present];
}

function render(store) {
  const endpoints = store.pools.flatMap(pool => pool.endpoints);
  standings(standingOptions(endpoints));
  const narrowed = filter.wanted || filter.standing !== "all";
  const worst = pool => pool.endpoints.length ? Math.min(HEALTHY, ...pool.endpoints.map(severity)) : -1;
  const all = store.pools.map(pool => ({ pool, endpoints: filtered(pool, filter), history: store.history }));
  const visible = narrowed ? all.filter(one => one.endpoints.length) : all;
  sections(visible.toSorted((a, b) => worst(a.pool) - worst(b.pool)));
  const number = all.reduce((sum, one) => sum + one.endpoints.length, 0);
  text(byId("matches"), narrowed ? `${count(number)} of ${count(endpoints.length)} shown` : "");
}

/** Shows the pools. */
export function poolsView(store) {
  if (!store.pools) return;
  shown = store;
  render(store);
}

/** Shows only endpoints with this status, and goes to them. */
export function showStanding(status) {
  const button = [...byId("standings").children].find(chip => chip.textContent.startsWith(status === "trouble" ? "in trouble" : words(status)));
  button?.click();
  byId("pools").scrollIntoView({ block: "start" });
}

byId("filter").addEventListener("input", event => {
  filter.wanted = event.target.value.trim().toLowerCase();
  if (shown) render(shown);
});
