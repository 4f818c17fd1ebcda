// The page: connects what the picker reports with the parts that show it.

import { attribute, byId, chips, text } from "./dom.js";
import { changed, now, onChange, start, store } from "./data.js";
import { span } from "./format.js";
import { decisionsView } from "./decisions.js";
import { poolsView, showStanding } from "./pools.js";
import { processView } from "./process.js";
import { troubleView } from "./trouble.js";

function headView({ status, lost }) {
  if (!status && !lost) return;
  const ready = byId("ready");
  attribute(ready, "class", `badge ${lost ? "bad" : status.ready ? "good" : "warn"}`);
  text(ready, lost ? "no response" : status.ready ? "ready" : "not ready");
  if (status) text(byId("version"), `${status.version} · up ${span(status.uptime_seconds)}`);
}

onChange(headView);
onChange(troubleView(showStanding));
onChange(poolsView);
onChange(processView);
onChange(decisionsView);

const range = chips(byId("range"), 5, step => {
  store.step = step;
  range(RANGES);
  now();
});
const RANGES = [[5, "30 min"], [60, "6 h"]];
range(RANGES);

const pause = byId("pause");
pause.addEventListener("click", () => {
  store.paused = !store.paused;
  attribute(pause, "aria-pressed", store.paused);
  text(pause, store.paused ? "Resume" : "Pause");
  if (store.paused) changed();
  else now();
});

document.addEventListener("keydown", event => {
  const typing = event.target.closest?.("input, textarea, select");
  if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  byId("filter").focus();
});

start();
