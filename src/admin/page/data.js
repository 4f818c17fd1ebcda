// What the picker reports, and when the page asks for it.

/** Milliseconds between two requests for endpoints and decisions, and for the slower pages. */
const FAST = 2_000, SLOW = 5_000;
/** The same while the page is hidden. */
const HIDDEN = 30_000;
const TIMEOUT = 10_000;
/** Samples of a series that the picker keeps. */
export const KEPT = 360;
/** Decisions on the page. */
const DECISIONS = 60;
/** Time over which the requests per second of an endpoint are counted. */
const TRAFFIC_WINDOW = 30_000;

export const store = {
  pools: null,
  /** What the picker advises to change. */
  warnings: [],
  status: null,
  decisions: [],
  history: null,
  /** Step of the history that is shown, seconds. */
  step: 5,
  paused: false,
  /** When the last response came, and since when none comes. */
  heard: null,
  lost: null,
};

const traffic = new Map();
const listeners = [];
let due = 0, timer;

export const onChange = listener => listeners.push(listener);
export const changed = () => listeners.forEach(listener => listener(store));

async function get(path) {
  const response = await fetch(path, { signal: AbortSignal.timeout(TIMEOUT) });
  if (!response.ok) throw new Error(`${path}: ${response.status}`);
  return response.json();
}

/** Adds the samples of `more` to those that are known. */
function joined(known, more) {
  if (!known || known.step_seconds !== more.step_seconds || more.sequence < known.sequence) return null;
  const pools = {};
  for (const [name, columns] of Object.entries(more.pools)) {
    const before = known.pools[name] ?? {};
    pools[name] = {};
    for (const [column, values] of Object.entries(columns)) {
      pools[name][column] = [...before[column] ?? [], ...values].slice(-KEPT);
    }
  }
  return { ...more, pools };
}

async function readHistory() {
  const known = store.history?.step_seconds === store.step ? store.history : null;
  const more = await get(`/api/history?step=${store.step}&after=${known?.sequence ?? 0}`);
  // A picker that has restarted counts from zero.
  store.history = known ? joined(known, more) ?? await get(`/api/history?step=${store.step}`) : more;
  store.history.read = Date.now();
}

function countTraffic(pools, now) {
  const seen = new Set();
  for (const pool of pools) {
    for (const endpoint of pool.endpoints) {
      const key = `${pool.name} ${endpoint.id}`;
      const counts = traffic.get(key) ?? [];
      seen.add(key);
      // A process that has restarted counts from zero.
      if (counts.length && counts.at(-1)[1] > endpoint.routed) counts.length = 0;
      counts.push([now, endpoint.routed]);
      while (counts.length > 2 && now - counts[0][0] > TRAFFIC_WINDOW) counts.shift();
      traffic.set(key, counts);
    }
  }
  for (const key of traffic.keys()) if (!seen.has(key)) traffic.delete(key);
}

/** Requests per second that the endpoint got recently; null until that is known. */
export function requestRate(pool, endpoint) {
  const counts = traffic.get(`${pool.name} ${endpoint.id}`) ?? [];
  if (counts.length < 2) return null;
  const [[from, before], [until, now]] = [counts[0], counts.at(-1)];
  return until > from ? (now - before) * 1_000 / (until - from) : null;
}

async function refresh() {
  const now = Date.now();
  const slow = now >= due;
  try {
    const reads = [get("/endpoints"), get(`/decisions?limit=${DECISIONS}`)];
    if (slow) reads.push(get("/api/status"), readHistory());
    const [page, decisions, status] = await Promise.all(reads);
    store.pools = page.pools;
    store.warnings = page.warnings;
    store.decisions = decisions;
    if (slow) {
      store.status = status;
      due = now + SLOW - FAST / 2;
    }
    countTraffic(page.pools, now);
    store.heard = Date.now();
    store.lost = null;
  } catch (error) {
    store.lost ??= { since: now, why: error.message };
  }
  changed();
}

async function turn() {
  clearTimeout(timer);
  if (!store.paused) await refresh();
  clearTimeout(timer);
  timer = setTimeout(turn, document.hidden ? HIDDEN : store.lost ? SLOW : FAST);
}

/** Asks for everything at once. */
export function now() {
  due = 0;
  return turn();
}

export function start() {
  document.addEventListener("visibilitychange", () => document.hidden || now());
  return now();
}

/** The explanation of the decision about a request: `{explanation}`, or `{missing}` with the reason. */
export async function explanation(requestId) {
  try {
    const path = `/explain?request_id=${encodeURIComponent(requestId)}`;
    const response = await fetch(path, { signal: AbortSignal.timeout(TIMEOUT) });
    return response.ok ? { explanation: await response.json() } : { missing: (await response.text()).trim() };
  } catch (error) {
    return { missing: `The picker did not respond: ${error.message}` };
  }
}
