// The process beside its pools: configuration, certificates, connections, peers, rejections, models and tenants.

import { byId, el, keyed, table } from "./dom.js";
import { NONE, count, figure, span, words } from "./format.js";
import { VALIDITIES } from "./trouble.js";

const tone = (kind, content) => el("span", { class: kind }, content);
const badge = (kind, label) => el("span", { class: `badge ${kind}` }, label);
const perSecond = value => value == null ? NONE : figure(value);

function configuration({ configuration: { refusal, seconds_since_reload } }) {
  if (refusal) {
    return [badge("bad", "refused"), ` ${span(seconds_since_reload)} ago; the last known good configuration stays in effect.`, el("pre", {}, refusal)];
  }
  return [badge("good", "in effect"), seconds_since_reload == null ? " since the start" : ` reloaded ${span(seconds_since_reload)} ago`];
}

function certificates(status) {
  const rows = status.certificates.map(certificate => {
    const left = certificate.expires_in_seconds;
    const refused = certificate.refused_replacements;
    return [certificate.name, tone(VALIDITIES[certificate.validity], left < 0 ? `expired ${span(-left)} ago` : span(left)), refused ? tone("warn", count(refused)) : "0"];
  });
  return [table("Certificates", [["Certificate", ""], ["Expires in", "number"], ["Refused", "number"]], rows)];
}

function redis({ redis }) {
  const failures = Object.entries(redis.failures);
  const list = failures.map(([reason, number]) => `${words(reason)} ${count(number)}`).join(", ");
  return [redis.connected ? badge("good", "connected") : badge("bad", "not connected"), failures.length ? ` Requests without a response: ${list}` : ""];
}

const SNAPSHOT = { waiting: "waits for a peer", importing: "is imported", done: "is complete" };

function peers({ nats, peers }) {
  const link = nats && el("p", {}, nats.connected ? badge("good", "NATS connected") : badge("bad", "NATS not connected"),
    nats.dropped_messages ? ` ${count(nats.dropped_messages)} messages not sent` : "",
    peers.snapshot ? ` · prefix index of a peer ${SNAPSHOT[peers.snapshot.state]}` : "");
  const rows = peers.peers.map(peer => [
    peer.name,
    tone(peer.seconds_since_last_message > 10 ? "warn" : "", span(peer.seconds_since_last_message)),
    count(peer.requests_in_flight),
    peer.behind ? tone("warn", "changes missing") : "up to date",
  ]);
  const columns = [["Peer", "mono"], ["Last message", "number"], ["In flight", "number"], ["State", ""]];
  return [link, rows.length ? table("Peers", columns, rows) : el("p", { class: "empty" }, "No other picker.")];
}

function rejections(status) {
  const rows = status.rejections.toSorted((a, b) => (b.requests_per_second ?? 0) - (a.requests_per_second ?? 0) || b.requests - a.requests)
    .map(rejection => [
      words(rejection.reason),
      rejection.pool ?? "none chosen",
      tone(rejection.requests_per_second ? "warn" : "", perSecond(rejection.requests_per_second)),
      count(rejection.requests),
    ]);
  return [table("Rejections", [["Reason", ""], ["Pool", "soft"], ["Per second", "number"], ["Total", "number"]], rows)];
}

function degraded(status) {
  const rows = status.degraded.map(mode =>
    [words(mode.mode), tone(mode.times_per_second ? "warn" : "", perSecond(mode.times_per_second)), count(mode.times)]);
  return [table("Degraded modes", [["Mode", ""], ["Per second", "number"], ["Total", "number"]], rows)];
}

/** Models or tenants, the busiest first. */
const names = (caption, list) => {
  const columns = [[caption, "mono"], ["Req/s", "number"], ["Prompt tok/s", "number"], ["Output tok/s", "number"], ["Requests", "number"], ["Refused", ""]];
  const rows = list.toSorted((a, b) => b.requests - a.requests).map(model => [
    model.name,
    perSecond(model.requests_per_second),
    perSecond(model.prompt_tokens_per_second),
    perSecond(model.completion_tokens_per_second),
    count(model.requests),
    model.refused.length ? tone("warn", model.refused.map(({ limit, requests }) => `${words(limit)} ${count(requests)}`).join(", ")) : "0",
  ]);
  return [table(`${caption}s`, columns, rows)];
};

/** The cards: id, title, note, whether it is shown, content. */
const CARDS = [
  ["rejections", "Rejections", "rate of the last minute", status => status.rejections.length, rejections],
  ["degraded", "Degraded modes", "rate of the last minute", status => status.degraded.length, degraded],
  ["configuration", "Configuration", "", () => true, configuration],
  ["models", "Models", "rates of the last minute", status => status.models.length, status => names("Model", status.models)],
  ["certificates", "Certificates", "", status => status.certificates.length, certificates],
  ["tenants", "Tenants", "rates of the last minute", status => status.tenants.length, status => names("Tenant", status.tenants)],
  ["peers", "NATS and peers", "", status => status.nats || status.peers.shares_state, peers],
  ["redis", "Redis", "", status => status.redis, redis],
];
const WIDE = ["models", "tenants"];

const cards = keyed(byId("process"), ([id]) => id, ([id, title, note, , content]) => {
  const body = el("div", { class: "body" });
  const heading = el("h3", {}, title, note && el("small", { class: "soft" }, ` ${note}`));
  let drawn = "";
  return {
    node: el("section", { id: `card-${id}`, class: WIDE.includes(id) ? "card wide" : "card", "aria-label": title }, heading, body),
    update([, , , , , status]) {
      const nodes = content(status);
      const holder = el("div", {}, ...nodes.filter(node => node));
      // A text that someone is reading or has selected stays.
      if (holder.textContent === drawn) return;
      drawn = holder.textContent;
      body.replaceChildren(...holder.childNodes);
    },
  };
});

/** Shows the process. */
export function processView({ status }) {
  if (!status) return;
  cards(CARDS.filter(([, , , shows]) => shows(status)).map(card => [...card, status]));
}
