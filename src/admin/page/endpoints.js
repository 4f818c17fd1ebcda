// The endpoints of one pool: a table, or cards on a phone. Trouble comes first, and most healthy ones are folded.

import { attribute, el, keyed, text } from "./dom.js";
import { requestRate } from "./data.js";
import { NONE, count, figure, ms, percent, rowsAtFirst, span, words } from "./format.js";
import { HEALTHY, STANDINGS, severity, why } from "./trouble.js";

/** Healthy endpoints that are shown at first, and rows in all; the second number is for phones. */
const FOLDED = [20, 5], MOST = [60, 20];

function badge() {
  const label = el("span");
  const reason = el("small", { class: "soft" });
  const node = el("div", {}, label, reason);
  return {
    node,
    update(endpoint) {
      const [tone] = STANDINGS[endpoint.status] ?? ["soft"];
      attribute(label, "class", `badge ${severity(endpoint) < HEALTHY && tone === "good" ? "warn" : tone}`);
      text(label, words(endpoint.status));
      const earlier = endpoint.ejections ? `ejected ${count(endpoint.ejections)} times so far` : "";
      text(reason, why(endpoint) || (endpoint.status === "ready" ? "" : earlier));
      attribute(reason, "title", earlier || null);
    },
  };
}

function bar() {
  const fill = el("i");
  const label = el("span");
  const node = el("div", { class: "meter" }, el("span", { class: "bar", "aria-hidden": "true" }, fill), label);
  return {
    node,
    update(endpoint) {
      const metrics = endpoint.metrics;
      const used = metrics ? Math.min(1, Math.max(0, metrics.kv_usage)) : null;
      fill.style.width = `${(used ?? 0) * 100}%`;
      attribute(fill, "class", used >= 0.9 ? "hot" : null);
      text(label, percent(used));
    },
  };
}

function name() {
  const own = el("strong");
  const address = el("small", { class: "soft" });
  return {
    node: el("div", {}, own, address),
    update(endpoint) {
      text(own, endpoint.name);
      text(address, endpoint.name === endpoint.address ? "" : endpoint.address);
    },
  };
}

/** A cell with a text, and a class if something is wrong with it. */
const plain = (value, tone = () => null, title = () => null) => () => {
  const node = el("span");
  return {
    node,
    update(endpoint, pool) {
      text(node, value(endpoint, pool));
      attribute(node, "class", tone(endpoint));
      attribute(node, "title", title(endpoint));
    },
  };
};

const known = (value, format) => value == null ? NONE : format(value);

function age(endpoint) {
  const metrics = endpoint.metrics;
  if (!metrics) return endpoint.scrape_error ? "failed" : "never";
  const old = metrics.age_ms < 10_000 ? ms(metrics.age_ms) : span(metrics.age_ms / 1_000);
  return metrics.stale ? `${old}, stale` : old;
}

/**
 * The columns: title, class, cell, value to sort by. `if`: only pools with such an endpoint have the column. Columns
 * of the class `low` are left out on narrow screens.
 */
const COLUMNS = [
  { title: "Endpoint", kind: "name", cell: name, by: endpoint => endpoint.name },
  { title: "Status", kind: "standing", cell: badge, by: severity },
  { title: "Role", kind: "", cell: plain(endpoint => endpoint.roles), by: endpoint => endpoint.roles, if: pool => new Set(pool.endpoints.map(endpoint => endpoint.roles)).size > 1 },
  { title: "Req/s", kind: "number", cell: plain((endpoint, pool) => figure(requestRate(pool, endpoint))), by: (endpoint, pool) => requestRate(pool, endpoint) ?? 0 },
  { title: "In flight", kind: "number", cell: plain(endpoint => count(endpoint.in_flight)), by: endpoint => endpoint.in_flight },
  { title: "Running", kind: "number", cell: plain(endpoint => known(endpoint.metrics?.running, count)), by: endpoint => endpoint.metrics?.running ?? -1 },
  { title: "Waiting", kind: "number", cell: plain(endpoint => known(endpoint.metrics?.waiting, count), endpoint => endpoint.metrics?.waiting ? "warn" : null), by: endpoint => endpoint.metrics?.waiting ?? -1 },
  { title: "KV cache", kind: "", cell: bar, by: endpoint => endpoint.metrics?.kv_usage ?? -1 },
  { title: "Prefix hits", kind: "number low", cell: plain(endpoint => known(endpoint.metrics?.prefix_hit_ratio, percent)), by: endpoint => endpoint.metrics?.prefix_hit_ratio ?? -1, if: pool => pool.endpoints.some(endpoint => endpoint.metrics?.prefix_hit_ratio != null) },
  { title: "Metrics age", kind: "number", cell: plain(age, endpoint => endpoint.metrics?.stale || endpoint.scrape_error ? "bad" : null, endpoint => endpoint.scrape_error), by: endpoint => endpoint.metrics?.age_ms ?? Infinity },
  { title: "Prefill tokens", kind: "number low", cell: plain(endpoint => count(endpoint.prefill_tokens)), by: endpoint => endpoint.prefill_tokens },
  { title: "Prefill tok/s", kind: "number low", cell: plain(endpoint => known(endpoint.learned?.prefill_tokens_per_second, count_whole)), by: endpoint => endpoint.learned?.prefill_tokens_per_second ?? -1, if: pool => pool.endpoints.some(endpoint => endpoint.learned) },
  { title: "KV events", kind: "low", cell: plain(endpoint => known(endpoint.kv_events, words)), by: endpoint => endpoint.kv_events ?? "", if: pool => pool.endpoints.some(endpoint => endpoint.kv_events) },
  { title: "Routed", kind: "number low", cell: plain(endpoint => count(endpoint.routed)), by: endpoint => endpoint.routed },
];

function count_whole(value) {
  return count(Math.round(value));
}

/** Whether an endpoint has the text in its name, address, role or labels. */
function matches(endpoint, wanted) {
  if (!wanted) return true;
  const labels = Object.entries(endpoint.labels).map(([key, value]) => `${key}=${value}`);
  return [endpoint.name, endpoint.address, endpoint.roles, endpoint.engine, endpoint.status, ...labels]
    .some(part => String(part).toLowerCase().includes(wanted));
}

/** The endpoints that the filter lets through. `standing`: `all`, `trouble` or a status. */
export function filtered(pool, { wanted, standing }) {
  return pool.endpoints.filter(endpoint => matches(endpoint, wanted) &&
    (standing === "all" || (standing === "trouble" ? severity(endpoint) < HEALTHY : endpoint.status === standing)));
}

function compare(a, b) {
  return typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
}

function heading(column, sorting) {
  const button = el("button", { type: "button", click: () => sorting.by(column) }, column.title, el("i", { "aria-hidden": "true" }));
  return el("th", { scope: "col", role: "columnheader", class: column.kind }, button);
}

function row(columns) {
  const cells = columns.map(column => column.cell());
  const node = el("tr", { role: "row" }, ...cells.map((cell, i) =>
    el("td", { role: "cell", class: columns[i].kind, "data-label": columns[i].title }, cell.node)));
  return {
    node,
    update({ endpoint, pool }) {
      attribute(node, "class", severity(endpoint) < HEALTHY ? "troubled" : null);
      cells.forEach(cell => cell.update(endpoint, pool));
    },
  };
}

/** The table of a pool. `update(pool, list)` shows the endpoints of `list`. */
export function endpointTable(poolName) {
  let columns = [], rows, order = null, all = false, last;
  const node = el("div", { class: "card endpoints" });
  const more = el("button", { type: "button", class: "more" });
  const sorting = {
    by(column) {
      // A second click turns the order around, a third one restores the worst first.
      if (order?.title !== column.title) order = { title: column.title, down: column.kind.includes("number") };
      else if (order.turned) order = null;
      else order = { ...order, down: !order.down, turned: true };
      update(...last);
    },
  };
  more.addEventListener("click", () => {
    all = !all;
    update(...last);
  });

  function build(pool) {
    const wanted = COLUMNS.filter(column => column.if?.(pool) ?? true);
    if (wanted.length === columns.length && wanted.every((column, i) => column === columns[i])) return;
    columns = wanted;
    const body = el("tbody", { role: "rowgroup" });
    const head = el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...columns.map(column => heading(column, sorting))));
    rows = keyed(body, ({ endpoint }) => endpoint.id, () => row(columns));
    node.replaceChildren(el("table", { role: "table", "aria-label": `Endpoints of pool ${poolName}` }, head, body), more);
  }

  function sorted(pool, list) {
    const column = columns.find(column => column.title === order?.title);
    if (!column) return list.toSorted((a, b) => Math.min(severity(a), HEALTHY) - Math.min(severity(b), HEALTHY));
    const sign = order.down ? -1 : 1;
    return list.toSorted((a, b) => sign * compare(column.by(a, pool), column.by(b, pool)));
  }

  function showOrder() {
    [...node.querySelectorAll("th")].forEach((head, i) => {
      const is = columns[i].title === order?.title;
      attribute(head, "aria-sort", is ? (order.down ? "descending" : "ascending") : null);
    });
  }

  function update(pool, list) {
    last = [pool, list];
    build(pool);
    showOrder();
    const troubled = order ? 0 : list.filter(endpoint => severity(endpoint) < HEALTHY).length;
    const folded = Math.min(list.length, rowsAtFirst(...MOST), troubled + rowsAtFirst(...FOLDED));
    const shown = all ? list.length : folded;
    rows(sorted(pool, list).slice(0, shown).map(endpoint => ({ endpoint, pool })));
    const hidden = list.length - shown;
    const folds = troubled < shown ? "healthy " : "";
    more.hidden = list.length === folded;
    text(more, all ? "Show fewer" : `Show ${hidden} more ${order ? "" : folds}endpoints`);
    attribute(more, "aria-expanded", all);
  }
  return { node, update };
}
