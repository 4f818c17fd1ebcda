// What is wrong now, the worst first, as one line and as a list.

import { attribute, byId, el, keyed, text } from "./dom.js";
import { figure, plural, some, span, words } from "./format.js";

/** Statuses of endpoints, the worst first: label, tone, and whether the endpoint gets requests. */
export const STANDINGS = {
  "ejected": ["bad", false],
  "unreachable": ["bad", false],
  "half-open": ["warn", true],
  "not-reached": ["warn", false],
  "slow-start": ["warn", true],
  "draining": ["soft", false],
  "ready": ["good", true],
};
/** How bad each validity of a certificate is. */
export const VALIDITIES = { "valid": "good", "expires_soon": "warn", "expired": "bad" };
/** Warnings that are shown otherwise: by the endpoints, or with the rate of rejections. */
const SHOWN_OTHERWISE = ["no_endpoints", "no_endpoint_reached", "rejects_for_load"];
/** Warnings with which requests fail. */
const BAD_WARNINGS = ["tls_handshakes_fail"];
/** Seconds of silence from which a peer is shown as trouble. */
const PEER_SILENCE = 10;
/** Uses of KV events that are trouble, the worst first. Events that have yet to come are none. */
const KV_TROUBLE = { "unused": "not used", "partial": "used with estimates" };

/** How many times longer than the others in its role an endpoint takes, if it is slow. */
const slowness = ({ slowdown }) => slowdown?.slow ? Math.max(slowdown.first_token, slowdown.per_token) : null;

/** How bad an endpoint is: 0 is the worst, and from `HEALTHY` on nothing is wrong. */
export const HEALTHY = 5;
export function severity(endpoint) {
  const metrics = endpoint.metrics;
  const place = ["ejected", "unreachable", "half-open"].indexOf(endpoint.status);
  if (place >= 0) return place;
  if (metrics?.stale || endpoint.scrape_error || KV_TROUBLE[endpoint.kv_event_use] || slowness(endpoint)) return 3;
  if (endpoint.status === "not-reached") return 4;
  return HEALTHY + Number(endpoint.status === "ready");
}

/** Why an endpoint has its status, and when that changes. */
export function why(endpoint) {
  const ejection = endpoint.ejection;
  if (ejection) {
    const returns = ejection.returns_in_ms ? `probe in ${span(ejection.returns_in_ms / 1_000 + 1)}` : "next request is the probe";
    return `${words(ejection.cause)}; ${returns}`;
  }
  if (endpoint.status === "unreachable") return "last connection failed";
  if (endpoint.status === "not-reached") return "no response yet";
  if (endpoint.status === "half-open") return "one request at a time";
  if (endpoint.status === "slow-start") return "growing share of requests";
  if (endpoint.metrics?.stale) return "metrics are stale";
  if (endpoint.scrape_error) return `metrics: ${endpoint.scrape_error}`;
  const use = KV_TROUBLE[endpoint.kv_event_use];
  if (use) return `KV events ${use}: ${words(endpoint.kv_events)}`;
  const slow = slowness(endpoint);
  if (slow) return `takes ${figure(slow)} times as long as others`;
  return "";
}

const named = list => some(list.map(([pool, endpoint]) => `${endpoint.name} (${why(endpoint) || pool.name})`));

function ofEndpoints(pools) {
  const all = pools.flatMap(pool => pool.endpoints.map(endpoint => [pool, endpoint]));
  const found = [];
  const add = (key, level, filter, headline, standing = "trouble") => {
    const matching = all.filter(([, endpoint]) => filter(endpoint));
    if (matching.length) found.push({ key, level, line: headline(matching.length), detail: named(matching), standing });
  };
  const isAway = endpoint => ["ejected", "unreachable"].includes(endpoint.status);
  const of = `of ${plural(all.length, "endpoint")}`;
  add("ejected", "bad", e => e.status === "ejected", n => `${n} ${of} ejected`, "ejected");
  add("unreachable", "bad", e => e.status === "unreachable", n => `${n} ${of} unreachable`, "unreachable");
  add("half-open", "warn", e => e.status === "half-open", n => `${n} ${of} probed by one request at a time`, "half-open");
  add("stale", "warn", e => e.metrics?.stale, n => `metrics of ${n} are stale`);
  add("scrapes", "warn", e => !e.metrics && e.scrape_error && !isAway(e), n => `metrics of ${n} can't be scraped`);
  for (const [use, are] of Object.entries(KV_TROUBLE)) {
    add(`events ${use}`, "warn", e => e.kv_event_use === use, n => `KV events of ${n} are ${are}`);
  }
  add("new", "warn", e => e.status === "not-reached", n => `${n} ${of} not reached yet`, "not-reached");
  return found;
}

function ofPools(pools) {
  const found = [];
  for (const pool of pools) {
    const usable = pool.endpoints.filter(endpoint => STANDINGS[endpoint.status]?.[1]);
    if (pool.endpoints.length && !usable.length) {
      found.push({ key: `none ${pool.name}`, level: "bad", line: `no endpoint of pool ${pool.name} in service`,
        detail: "Requests are sent to ejected endpoints as a last resort, or rejected." });
    } else if (!pool.endpoints.length) {
      found.push({ key: `empty ${pool.name}`, level: "bad", line: `pool ${pool.name} has no endpoints`,
        detail: "Discovery has found none: its requests get 503." });
    }
    if (!pool.synced) {
      found.push({ key: `unsynced ${pool.name}`, level: "warn", line: `pool ${pool.name} not synced yet`,
        detail: "Discovery has not reported its endpoints." });
    }
  }
  return found;
}

function ofTraffic(status, history) {
  const found = [];
  const rejected = status.rejections.filter(rejection => rejection.requests_per_second > 0);
  if (rejected.length) {
    const rate = rejected.reduce((sum, rejection) => sum + rejection.requests_per_second, 0);
    found.push({ key: "rejections", level: "warn", line: `${figure(rate)} requests/s rejected`, href: "#card-rejections",
      detail: some(rejected.map(rejection => `${words(rejection.reason)} ${figure(rejection.requests_per_second)}/s`)) });
  }
  for (const [name, columns] of Object.entries(history?.pools ?? {})) {
    const recent = columns.errors.slice(-12).filter(value => value != null);
    const rate = recent.reduce((sum, value) => sum + value, 0) / Math.max(1, recent.length);
    if (rate > 0) {
      found.push({ key: `errors ${name}`, level: "warn", line: `${figure(rate)} responses/s of pool ${name} with status 5xx`,
        detail: "Average of the last samples. Decisions with their status are below." });
    }
  }
  const degraded = status.degraded.filter(mode => mode.times_per_second > 0);
  if (degraded.length) {
    found.push({ key: "degraded", level: "warn", line: `degraded: ${some(degraded.map(mode => words(mode.mode)), 2)}`,
      href: "#card-degraded", detail: some(degraded.map(mode => `${words(mode.mode)} ${figure(mode.times_per_second)}/s`)) });
  }
  return found;
}

function ofProcess(status) {
  const found = [];
  const add = (key, level, line, detail, href) => found.push({ key, level, line, detail, href });
  if (!status.ready) add("ready", "bad", "not ready", `Waiting for: ${status.missing.join(", ")}`);
  const { refusal, seconds_since_reload } = status.configuration;
  if (refusal) {
    add("configuration", "bad", `configuration refused ${span(seconds_since_reload)} ago`,
      `The last known good one stays in effect. ${refusal}`, "#card-configuration");
  }
  for (const certificate of status.certificates) {
    const left = certificate.expires_in_seconds, level = VALIDITIES[certificate.validity];
    const ends = left < 0 ? `${certificate.name} expired ${span(-left)} ago` : `${certificate.name} expires in ${span(left)}`;
    if (level !== "good") add(certificate.name, level, ends, "Replace the files; Attaché reads them again.", "#card-certificates");
    if (certificate.refused_replacements) {
      add(`refused ${certificate.name}`, "warn", `a new ${certificate.name} was refused`, "The log has the reason; the previous one stays in use.", "#card-certificates");
    }
  }
  if (status.redis && !status.redis.connected) add("redis", "bad", "no connection to Redis", "Limits and tenant records follow `redis.onFailure`.", "#card-redis");
  if (status.nats && !status.nats.connected) add("nats", "bad", "no connection to NATS", "This picker sees only its own requests.", "#card-peers");
  const silent = status.peers.peers.filter(peer => peer.seconds_since_last_message > PEER_SILENCE);
  if (silent.length) add("peers", "warn", `${plural(silent.length, "peer")} silent`, some(silent.map(peer => `${peer.name}: ${span(peer.seconds_since_last_message)}`)), "#card-peers");
  return found;
}

/** What the picker itself warns of. */
function ofPicker(warnings) {
  const found = warnings.filter(warning => !SHOWN_OTHERWISE.includes(warning.code));
  return found.map(({ code, pool, message, help }) => {
    // The first part says what is wrong, the rest what follows.
    const [, line, rest] = message.match(/^(.*?)(?:(?:, |: |; )(.*))?$/);
    return {
      key: `${code} ${pool ?? ""}`,
      level: BAD_WARNINGS.includes(code) ? "bad" : "warn",
      line: line + (pool ? ` (pool ${pool})` : ""),
      detail: `${rest ? `${rest}: ` : ""}${help}.`,
    };
  });
}

/** All trouble, the worst first. */
export function trouble({ pools, warnings, status, history, lost }) {
  const found = [];
  if (lost) {
    found.push({ key: "lost", level: "bad", line: `no response of the picker for ${span((Date.now() - lost.since) / 1_000)}`,
      detail: `${lost.why}. The figures below are old.` });
  }
  if (pools) found.push(...ofPools(pools), ...ofEndpoints(pools));
  found.push(...ofPicker(warnings));
  if (status) found.push(...ofProcess(status), ...ofTraffic(status, history));
  return [...found.filter(one => one.level === "bad"), ...found.filter(one => one.level === "warn")];
}

const MARKS = { bad: "▲", warn: "●" };
const IN_LINE = 4;
let announced = "";

/** Shows trouble. `onStanding` filters endpoints by a status. */
export function troubleView(onStanding) {
  const rows = keyed(byId("trouble-list"), one => one.key, first => {
    const line = first.standing
      ? el("button", { type: "button", class: "link", click: () => onStanding(first.standing) })
      : first.href ? el("a", { href: first.href }) : el("strong");
    const mark = el("span", { "aria-hidden": "true" });
    const detail = el("span", { class: "soft" });
    const node = el("li", {}, mark, line, detail);
    return {
      node,
      update(one) {
        text(mark, MARKS[one.level]);
        attribute(node, "class", one.level);
        text(line, one.line);
        text(detail, one.detail ?? "");
      },
    };
  });
  return store => {
    if (!store.pools && !store.lost) return;
    const all = trouble(store);
    const endpoints = (store.pools ?? []).flatMap(pool => pool.endpoints);
    const rest = all.length - IN_LINE;
    const line = all.length
      ? all.slice(0, IN_LINE).map(one => one.line).join("; ") + (rest > 0 ? `; ${rest} more` : "")
      : `No trouble: ${plural(endpoints.length, "endpoint")} of ${plural(store.pools.length, "pool")} in service`;
    text(byId("trouble-line"), line[0].toUpperCase() + line.slice(1));
    attribute(byId("trouble"), "class", `trouble ${all[0]?.level ?? "good"}`);
    rows(all);
    document.title = all.length ? `(${all.length}) Attaché: ${all[0].line}` : "Attaché";
    // Ages change with each refresh. Only new and ended trouble is announced.
    const kinds = all.map(one => one.key).join();
    if (kinds !== announced) text(byId("announcer"), line);
    announced = kinds;
  };
}
