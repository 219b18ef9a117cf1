// @ts-check
/** Elements of the page. Texts of checkpoints are always text nodes, never markup. @module */

/** @typedef {Node | string | number | null | undefined | false} Child */

/**
 * Make an element.
 *
 * @param {string} tag
 * @param {Record<string, any> | null} [attributes] attributes; `on…` adds a listener, and `text`
 *   sets the text
 * @param {...any} children nodes, texts, and lists of these
 * @returns {any} the element
 */
export function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes ?? {}, children);
}

/** Make an element of a drawing. @param {string} tag @param {Record<string, any>} attributes
 *  @param {...any} children @returns {any} */
export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

/** @param {Element} node @param {Record<string, any>} attributes @param {any[]} children */
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(2)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

/** Make a list of terms. @param {[string, Child | Child[]][]} entries @param {string} [name] */
export const facts = (entries, name = "facts") =>
  el(
    "dl",
    { class: name },
    entries.flatMap(([term, value]) => [el("dt", null, term), el("dd", null, value)]),
  );

/** Make a small label. @param {string} text @param {string} [kind] @param {string} [title] */
export const badge = (text, kind = "", title = "") =>
  el("span", { class: `badge ${kind}`, title: title || null }, text);

/** Make a button. @param {string} text @param {() => void} onclick @param {any} [attributes] */
export const button = (text, onclick, attributes = {}) =>
  el("button", { type: "button", onclick, ...attributes }, text);

/** @type {Record<string, string>} */
const PHASES = { open: "at opening", read: "at reading", validate: "by the check" };

let ids = 0;

/** Return an id for the page. @param {string} prefix */
export function newId(prefix) {
  ids += 1;
  return `${prefix}-${ids}`;
}

/** Make a section with a heading. @param {string} title @param {any} [attributes]
 *  @param {...any} children */
export function section(title, attributes, ...children) {
  const id = newId("section");
  return el(
    "section",
    { "aria-labelledby": id, ...attributes },
    el("h2", { id }, title),
    ...children,
  );
}

/** Tell people with screen readers. @param {string} text */
export function announce(text) {
  const status = document.getElementById("status");
  if (status) status.textContent = text;
}

/**
 * Show an error: code, place, clause and remedy.
 *
 * @param {any} fields of the error @param {string} [level] tag of the heading
 */
export function errorCard({ code, detail, where, clause, phase, remedy, kind }, level = "h3") {
  return el(
    "article",
    { class: "error" },
    el(
      level,
      { class: "error-code" },
      code,
      kind ? el("span", { class: "muted" }, ` ${kind}`) : "",
    ),
    el("p", null, `${detail.charAt(0).toUpperCase()}${detail.slice(1)}.`),
    facts(
      /** @type {[string, string][]} */ ([
        ["Place", where],
        ["Clause", clause],
        ["Found", PHASES[phase]],
        ["Remedy", remedy],
      ]).filter(([, value]) => value),
    ),
  );
}
