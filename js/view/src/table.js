// @ts-check
/** A table of any number of rows, of which only the visible ones are elements. @module */
import { el, newId } from "./dom.js";

/**
 * @typedef {object} Column
 * @property {string} name a class of its cells
 * @property {string} title
 * @property {(row: number, cell: HTMLElement) => string | null} text of a cell; null if the
 *   function filled the cell
 * @property {(a: number, b: number) => number} [compare] rows, if the column sorts
 */

const ROW_HEIGHT = 32;
/** Rows beyond the visible ones, so that a fast scroll shows no gap. */
const OVERSCAN = 12;
/** Most pixels of the scrolled area: browsers limit the heights of elements. */
const MOST_HEIGHT = 8_000_000;

/** A grid with keyboard: arrows, Page Up, Page Down, Home, End, and Enter to open a row. */
export class Table {
  #first = -1;
  #isAsked = false;
  /** @type {{node: any, cells: any[], shown: number, y: number, marks: number}[]} */
  #pool = [];
  /** @type {ArrayLike<number>} */
  #order = [];
  #active = 0;
  /** @type {{column: number, isDown: boolean} | null} */
  #sort = null;
  /** @type {number | null} a row of the data */
  #chosen = null;

  /**
   * @param {object} options
   * @param {string} options.label
   * @param {string} options.name a class
   * @param {Column[]} options.columns
   * @param {(row: number) => void} options.onOpen
   * @param {string} [options.empty] shown without rows
   */
  constructor({ label, name, columns, onOpen, empty = "Nothing." }) {
    this.columns = columns;
    this.onOpen = onOpen;
    this.id = newId("grid");
    this.heads = columns.map((column, at) =>
      el(
        "div",
        { role: "columnheader", class: `cell ${column.name}`, "aria-colindex": at + 1 },
        column.compare
          ? el(
              "button",
              { type: "button", class: "sort", onclick: () => this.#sortBy(at) },
              column.title,
              el("span", { class: "arrow", "aria-hidden": "true" }),
            )
          : column.title,
      ),
    );
    this.canvas = el("div", { class: "canvas", role: "presentation" });
    this.empty = el("p", { class: "empty", hidden: true }, empty);
    this.body = el(
      "div",
      { class: "table-body", role: "rowgroup", tabindex: "-1", onscroll: () => this.#ask() },
      this.canvas,
    );
    this.element = el(
      "div",
      {
        class: `table ${name}`,
        role: "grid",
        tabindex: "0",
        "aria-label": label,
        "aria-colcount": columns.length,
        onkeydown: (/** @type {KeyboardEvent} */ event) => this.#press(event),
      },
      el(
        "div",
        { role: "rowgroup", class: "table-head" },
        el("div", { role: "row", class: "row", "aria-rowindex": 1 }, this.heads),
      ),
      this.body,
      this.empty,
    );
    this.observer = new ResizeObserver(() => this.render(true));
    this.observer.observe(this.body);
  }

  /** Show rows, in this order unless a column sorts them. @param {ArrayLike<number>} rows */
  setRows(rows) {
    this.#order = this.#sorted(rows);
    this.#active = Math.max(0, Math.min(this.#active, rows.length - 1));
    this.element.setAttribute("aria-rowcount", String(rows.length + 1));
    this.empty.hidden = rows.length > 0;
    this.body.hidden = rows.length === 0;
    const height = Math.min(rows.length * ROW_HEIGHT, MOST_HEIGHT);
    this.canvas.style.height = `${height}px`;
    this.body.style.setProperty("--content", `${height}px`);
    this.body.scrollTop = 0;
    this.render(true);
  }

  /** Mark a row as chosen. @param {number | null} row of the data */
  choose(row) {
    this.#chosen = row;
    if (row !== null) {
      const at = Array.prototype.indexOf.call(this.#order, row);
      if (at >= 0) {
        this.#active = at;
        this.#reveal();
      }
    }
    this.render(true);
  }

  /** @param {ArrayLike<number>} rows */
  #sorted(rows) {
    if (this.#sort === null) return rows;
    const { column, isDown } = this.#sort;
    const compare = /** @type {(a: number, b: number) => number} */ (this.columns[column].compare);
    const sorted = Array.from(rows).sort((a, b) => compare(a, b) || a - b);
    return isDown ? sorted.reverse() : sorted;
  }

  /** @param {number} column */
  #sortBy(column) {
    const isSame = this.#sort?.column === column;
    this.#sort = { column, isDown: isSame ? !this.#sort?.isDown : false };
    this.heads.forEach((head, at) => {
      if (at !== column) head.removeAttribute("aria-sort");
      else head.setAttribute("aria-sort", this.#sort?.isDown ? "descending" : "ascending");
    });
    this.setRows(this.#order);
  }

  #ask() {
    if (this.#isAsked) return;
    this.#isAsked = true;
    requestAnimationFrame(() => {
      this.#isAsked = false;
      this.render(false);
    });
  }

  /** Return the pixels of all rows above the visible ones. */
  #offset() {
    const full = this.#order.length * ROW_HEIGHT;
    const height = Math.min(full, MOST_HEIGHT);
    const view = this.body.clientHeight;
    const ratio = full > height && height > view ? (full - view) / (height - view) : 1;
    return { top: this.body.scrollTop * ratio, ratio, view };
  }

  /** Show the visible rows. @param {boolean} isNew whether the content of rows may have changed */
  render(isNew) {
    if (isNew) {
      const gutter = this.body.offsetWidth - this.body.clientWidth;
      this.element.style.setProperty("--gutter", `${gutter}px`);
    }
    const { top, view } = this.#offset();
    const shift = this.body.scrollTop - top;
    const most = Math.min(this.#order.length, Math.ceil(view / ROW_HEIGHT) + 2 * OVERSCAN + 1);
    const last = this.#order.length - most;
    const first = Math.max(0, Math.min(Math.floor(top / ROW_HEIGHT) - OVERSCAN, last));
    if (!isNew && first === this.#first && shift === 0) return;
    this.#first = first;
    this.#grow(most);
    for (let at = first; at < first + most; at += 1) {
      const entry = this.#pool[at % this.#pool.length];
      const y = at * ROW_HEIGHT + shift;
      if (entry.y !== y) {
        entry.node.style.transform = `translateY(${y}px)`;
        entry.y = y;
      }
      if (isNew || entry.shown !== at) this.#show(entry, at);
    }
    this.#mark();
  }

  /** @param {number} most rows */
  #grow(most) {
    if (this.#pool.length === most) return;
    while (this.#pool.length > most) this.#pool.pop()?.node.remove();
    while (this.#pool.length < most) {
      const cells = this.columns.map(({ name }, at) =>
        el("div", { role: "gridcell", class: `cell ${name}`, "aria-colindex": at + 1 }),
      );
      const node = el("div", { role: "row", class: "row", id: newId(this.id) }, cells);
      const entry = { node, cells, shown: -1, y: -1, marks: -1 };
      node.addEventListener("click", () => this.#open(entry.shown));
      this.#pool.push(entry);
      this.canvas.append(node);
    }
    for (const entry of this.#pool) entry.shown = -1;
  }

  /** @param {{node: any, cells: any[], shown: number}} entry @param {number} at */
  #show(entry, at) {
    const row = this.#order[at];
    entry.shown = at;
    entry.node.setAttribute("aria-rowindex", at + 2);
    entry.cells.forEach((cell, column) => {
      const text = this.columns[column].text(row, cell);
      if (text === null) return;
      const [first] = cell.childNodes;
      if (cell.childNodes.length !== 1 || first.nodeType !== Node.TEXT_NODE) {
        cell.textContent = text;
      } else if (first.data !== text) first.data = text;
    });
  }

  #mark() {
    let active = null;
    for (const entry of this.#pool) {
      const { node, shown } = entry;
      const isActive = shown === this.#active;
      const isChosen = this.#order[shown] === this.#chosen;
      const marks = (isActive ? 1 : 0) + (isChosen ? 2 : 0);
      if (marks !== entry.marks) {
        entry.marks = marks;
        node.classList.toggle("active", isActive);
        node.classList.toggle("chosen", isChosen);
        node.setAttribute("aria-selected", String(isChosen));
      }
      if (isActive) active = node.id;
    }
    if (active === null) this.element.removeAttribute("aria-activedescendant");
    else this.element.setAttribute("aria-activedescendant", active);
  }

  /** Scroll so that the active row is visible. */
  #reveal() {
    const { top, ratio, view } = this.#offset();
    const y = this.#active * ROW_HEIGHT;
    if (y < top) this.body.scrollTop = y / ratio;
    else if (y + ROW_HEIGHT > top + view) {
      this.body.scrollTop = (y + ROW_HEIGHT - view) / ratio;
    }
  }

  /** @param {number} at */
  #open(at) {
    if (at < 0 || at >= this.#order.length) return;
    this.#active = at;
    this.#mark();
    this.onOpen(this.#order[at]);
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    if (event.target !== this.element && event.target !== this.body) return;
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const page = Math.max(1, Math.floor(this.body.clientHeight / ROW_HEIGHT) - 1);
    /** @type {Record<string, number>} */
    const moves = {
      ArrowDown: this.#active + 1,
      ArrowUp: this.#active - 1,
      PageDown: this.#active + page,
      PageUp: this.#active - page,
      Home: 0,
      End: this.#order.length - 1,
    };
    if (event.key === "Enter" || event.key === " ") this.#open(this.#active);
    else if (event.key in moves) {
      this.#active = Math.max(0, Math.min(moves[event.key], this.#order.length - 1));
      this.#reveal();
      this.render(false);
      this.#mark();
    } else return;
    event.preventDefault();
  }

  /** Return the number of shown rows. */
  get length() {
    return this.#order.length;
  }
}
