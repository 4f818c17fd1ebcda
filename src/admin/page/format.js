// Numbers and times as text. What is unknown is a dash.

export const NONE = "–";

const whole = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export const count = value => value == null ? NONE : value < 100_000 ? whole.format(value) : compact.format(value);

/** A number with as many decimals as its size needs: 0.04, 1.3, 27, 4,100. */
export function figure(value) {
  if (value == null) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 0.01) return "<0.01";
  if (size < 1) return value.toFixed(2);
  return size < 10 ? value.toFixed(1) : count(Math.round(value));
}

/** Milliseconds with a unit that fits. */
export function ms(value) {
  if (value == null) return NONE;
  const size = Math.abs(value);
  if (size < 10) return `${value.toFixed(1)} ms`;
  if (size < 1_000) return `${Math.round(value)} ms`;
  if (size < 60_000) return `${(value / 1_000).toFixed(size < 10_000 ? 2 : 1)} s`;
  return span(value / 1_000);
}

/** Seconds as one rounded-down unit. */
export function span(seconds) {
  if (seconds == null) return NONE;
  for (const [size, unit] of [[86_400, "day"], [3_600, "h"], [60, "min"]]) {
    const number = Math.floor(seconds / size);
    if (number >= 1) return `${number} ${unit}${unit === "day" && number > 1 ? "s" : ""}`;
  }
  return `${Math.max(0, Math.floor(seconds))} s`;
}

export const percent = ratio => ratio == null ? NONE : `${Math.round(ratio * 100)} %`;
export const words = code => code.replaceAll("_", " ").replaceAll("-", " ");
export const time = date => clock.format(date);
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** The first entries of a list as text, and how many others there are. */
export function some(list, most = 3) {
  const rest = list.length - most;
  return list.slice(0, most).join(", ") + (rest > 0 ? ` and ${rest} more` : "");
}

const narrow = matchMedia("(max-width: 600px)");
/** How many rows are shown at first: fewer on a phone, where each row is a card. */
export const rowsAtFirst = (wide, phone) => narrow.matches ? phone : wide;
