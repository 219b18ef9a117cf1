// @ts-check
/** Plain values and random streams as collapsible trees. @module */
import { ViewError } from "./client.js";
import { badge, button, el } from "./dom.js";
import { countText } from "./text.js";

/** Children that are shown at once. */
const PAGE = 200;
/** Values that are read as soon as the list is shown. */
const READ_AT_ONCE = 60;
const MOST_ROWS = 400;

/** @param {string} key @param {any} node a line of the worker */
const lineParts = (key, { kind, text, count }) => [
  el("span", { class: "key" }, key),
  el("span", { class: `value kind-${kind} ${count > 0 ? "muted" : ""}` }, text),
  el("span", { class: "kind" }, kind),
];

/** @param {any} client @param {string} key @param {any} node @returns {HTMLElement} */
function nodeElement(client, key, node) {
  if (node.count === 0) return el("div", { class: "line" }, lineParts(key, node));
  const list = el("div", { class: "children" });
  let isFilled = false;
  const details = el(
    "details",
    {
      ontoggle: () => {
        if (!details.open || isFilled) return;
        isFilled = true;
        void more(client, node, list, 0);
      },
    },
    el("summary", { class: "line" }, lineParts(key, node)),
    list,
  );
  return details;
}

/** @param {any} client @param {any} node @param {HTMLElement} list @param {number} from */
async function more(client, node, list, from) {
  const to = Math.min(node.count, from + PAGE);
  const children = await client.call("children", { id: node.id, from, to });
  list.append(...children.map((/** @type {any} */ child) => nodeElement(client, child.key, child)));
  if (to === node.count) return;
  const rest = button(`Show ${countText(Math.min(PAGE, node.count - to))} more`, () => {
    rest.remove();
    void more(client, node, list, to);
  });
  list.append(rest);
}

/**
 * Make a list of trees that are read when they are opened.
 *
 * @param {any} client
 * @param {{title: string, note: string, method: string, argument: any}[]} entries
 */
export function treeList(client, entries) {
  const list = el("div", { class: "trees" });
  const add = (/** @type {number} */ from) => {
    const to = Math.min(entries.length, from + MOST_ROWS);
    entries
      .slice(from, to)
      .forEach((entry, at) =>
        list.append(entryElement(client, entry, at < READ_AT_ONCE && from === 0)),
      );
    if (to === entries.length) return;
    const rest = button(`Show ${countText(Math.min(MOST_ROWS, entries.length - to))} more`, () => {
      rest.remove();
      add(to);
    });
    list.append(rest);
  };
  add(0);
  return list;
}

/** @param {any} client @param {any} entry @param {boolean} isRead */
function entryElement(client, entry, isRead) {
  const holder = el("div", { class: "tree" });
  const title = el("span", { class: "key" }, entry.title);
  const note = entry.note ? badge(entry.note) : null;
  const read = async () => {
    try {
      const node = await client.call(entry.method, entry.argument);
      const element = nodeElement(client, entry.title, node);
      if (note) element.querySelector(".kind")?.before(note);
      holder.replaceChildren(element);
      return element;
    } catch (error) {
      const { code, detail } =
        error instanceof ViewError ? error.fields : { code: "UNEXPECTED", detail: String(error) };
      holder.replaceChildren(
        el("div", { class: "line" }, title, el("span", { class: "bad" }, `${code}: ${detail}`)),
      );
      return null;
    }
  };
  const details = el(
    "details",
    {
      ontoggle: async () => {
        const element = await read();
        if (element instanceof HTMLDetailsElement) element.open = true;
        element?.querySelector("summary")?.focus();
      },
    },
    el("summary", { class: "line" }, title, note),
  );
  holder.append(details);
  if (isRead) void read();
  return holder;
}
