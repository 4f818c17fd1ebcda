// Elements of the page. Data becomes text nodes and attributes, never markup.

const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value == null || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter(child => child != null && child !== false));
  return node;
}

/** An element. Attributes that are functions listen to the event of their name. */
export const el = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);
export const byId = id => document.getElementById(id);

/** Sets a text or an attribute only if it changes, so that an idle page causes no layout. */
export function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}
export function attribute(node, name, value) {
  if (value == null || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/**
 * Keeps the children of `parent` in step with a list. Rows that stay keep their element, and with it focus and opened
 * parts. `make(item)` returns `{node, update(item)}`.
 */
export function keyed(parent, keyOf, make) {
  const rows = new Map();
  return items => {
    const wanted = new Map(items.map(item => [keyOf(item), item]));
    for (const [key, row] of rows) {
      if (wanted.has(key)) continue;
      row.node.remove();
      rows.delete(key);
    }
    let next = parent.firstChild;
    for (const [key, item] of wanted) {
      if (!rows.has(key)) rows.set(key, make(item));
      const row = rows.get(key);
      row.update(item);
      if (row.node === next) next = next.nextSibling;
      else parent.insertBefore(row.node, next);
    }
  };
}

/** A table of plain cells. `columns`: `[name, class]`; `rows`: lists of texts or elements. */
export function table(caption, columns, rows) {
  const head = columns.map(([name, kind]) => el("th", { scope: "col", role: "columnheader", class: kind }, name));
  const body = rows.map(cells => el("tr", { role: "row" }, ...cells.map((cell, i) =>
    el("td", { role: "cell", class: columns[i][1], "data-label": columns[i][0] }, cell))));
  return el("table", { role: "table", "aria-label": caption },
    el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...head)), el("tbody", { role: "rowgroup" }, ...body));
}

/** Buttons of which one is chosen. `update(options)` takes `[value, label, count]`. */
export function chips(parent, chosen, onChoice) {
  let current = chosen;
  const update = keyed(parent, ([value]) => value, ([value]) => {
    const number = el("b");
    const label = el("span");
    const choose = () => {
      current = value;
      onChoice(value);
    };
    const node = el("button", { type: "button", class: "chip", click: choose }, label, number);
    return {
      node,
      update([, name, total]) {
        text(label, name);
        text(number, total == null ? "" : String(total));
        attribute(node, "aria-pressed", value === current);
      },
    };
  });
  return options => {
    if (!options.some(([value]) => value === current)) onChoice(current = options[0][0]);
    update(options);
  };
}
