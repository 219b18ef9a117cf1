// @ts-check
/** One tensor: its facts, a window of its values, a summary, and where its bytes lie. @module */
import { ViewError } from "./client.js";
import { announce, badge, button, el, errorCard, facts, section } from "./dom.js";
import { runJob } from "./jobs.js";
import { COLUMNS, ROWS, clampPosition, gridOf, windowOf } from "./slices.js";
import {
  countText,
  counted,
  durationText,
  lanesOf,
  shapeText,
  sizeText,
  valuesOf,
} from "./text.js";

/**
 * @typedef {object} Tensor
 * @property {string} key @property {string} name @property {string} field @property {string} scope
 * @property {string} dtype @property {number[]} shape @property {number} nbytes
 * @property {boolean} isPersistent @property {string[]} aliases
 */

/** @param {unknown} error */
const fieldsOf = (error) =>
  error instanceof ViewError ? error.fields : { code: "UNEXPECTED", detail: String(error) };

/**
 * Make the panel of a tensor.
 *
 * @param {{client: any, origin: any, path: string, onClose: () => void}} context
 * @param {Tensor} tensor
 */
export function tensorPanel(context, tensor) {
  const { name, field, scope, dtype, shape, nbytes, isPersistent, aliases } = tensor;
  const count = shape.reduce((product, extent) => product * extent, 1);
  const heading = el(
    "h2",
    { id: "tensor-title", tabindex: "-1", class: "mono" },
    name || "(no name)",
  );
  const panel = el(
    "section",
    { class: "panel detail", "aria-labelledby": "tensor-title" },
    el(
      "div",
      { class: "detail-head" },
      heading,
      button("Close", context.onClose, { class: "quiet", "aria-label": "Close the tensor" }),
    ),
    el(
      "p",
      { class: "tensor-shape" },
      badge(dtype, "dtype"),
      " ",
      el("span", { class: "mono" }, shapeText(shape)),
      isPersistent
        ? null
        : [" ", badge("non-persistent", "warn", "A buffer that a state_dict leaves out")],
    ),
    facts([
      ["Size", `${sizeText(nbytes)}, ${counted(count, "element")}`],
      ["Field", field],
      ["Scope", scope],
      ...(aliases.length > 0
        ? [
            /** @type {[string, any]} */ ([
              "Also named",
              aliases.map((alias) => el("div", { class: "mono" }, alias)),
            ]),
          ]
        : []),
    ]),
    valuesSection(context, tensor, count),
    placesSection(context, tensor),
  );
  return { panel, heading };
}

/** @param {any} summary */
function summaryFacts({ count, nans, infinities, zeros, min, max, mean, deviation }) {
  const entry = (/** @type {string} */ term, /** @type {any} */ value, kind = "") =>
    el(
      "div",
      { class: `stat ${kind}` },
      el("dt", null, term),
      el("dd", { class: "mono" }, value ?? "–"),
    );
  return el(
    "dl",
    { class: "stats" },
    entry("Min", min),
    entry("Max", max),
    entry("Mean", mean),
    entry("Std", deviation),
    entry("NaN", countText(nans), nans > 0 ? "bad" : ""),
    entry("Inf", countText(infinities), infinities > 0 ? "bad" : ""),
    entry("Zeros", countText(zeros)),
    entry("Count", countText(count)),
  );
}

/** @param {any} context @param {Tensor} tensor @param {number} count */
function valuesSection({ client, origin, path }, tensor, count) {
  const { key, dtype, shape, nbytes } = tensor;
  if (count === 0)
    return section("Values", {}, el("p", { class: "muted" }, "The tensor is empty."));
  const grid = gridOf(shape);
  let position = clampPosition(shape, { lead: [], row: 0, column: 0 });
  const holder = el("div", {
    class: "values",
    tabindex: "0",
    role: "group",
    "aria-label": "Values",
  });
  const summary = el("div", { class: "summary" });
  const whole = el("div", { class: "whole" });
  let asked = 0;
  const show = async (/** @type {Partial<typeof position>} */ change) => {
    position = clampPosition(shape, { ...position, ...change });
    asked += 1;
    const own = asked;
    holder.setAttribute("aria-busy", "true");
    refresh(); // now, since an answer may come while someone types the next number
    const { box, rows, columns } = windowOf(shape, position);
    try {
      const read = await client.call("read", { path, key, box });
      if (own !== asked) return;
      holder.replaceChildren(gridTable(shape, position, rows, columns, valuesOf(dtype, read.data)));
      summary.replaceChildren(
        el(
          "h3",
          null,
          nbytes > read.data.byteLength ? "Of the values shown" : "Of the whole tensor",
        ),
        summaryFacts(read.summary),
      );
    } catch (error) {
      if (own === asked) holder.replaceChildren(errorCard(fieldsOf(error)));
    } finally {
      if (own === asked) holder.removeAttribute("aria-busy");
    }
  };
  /** @type {(() => void)[]} */
  const refreshers = [];
  const refresh = () => refreshers.forEach((one) => one());
  const mover = (
    /** @type {"row" | "column"} */ axis,
    /** @type {number} */ size,
    /** @type {number} */ extent,
  ) => {
    if (extent <= size) return null;
    const unit = grid.isVector ? COLUMNS : 1;
    const text = el("span", { class: "range mono" });
    const back = button("‹", () => show({ [axis]: position[axis] - size }), {
      "aria-label": `Earlier ${axis}s`,
    });
    const next = button("›", () => show({ [axis]: position[axis] + size }), {
      "aria-label": `Later ${axis}s`,
    });
    const input = el("input", {
      type: "number",
      min: 0,
      max: (extent - 1) * unit,
      step: unit,
      value: 0,
      "aria-label": grid.isVector ? "First element" : `First ${axis}`,
      onchange: () => show({ [axis]: Math.floor(input.valueAsNumber / unit) }),
    });
    refreshers.push(() => {
      input.value = String(position[axis] * unit);
      back.disabled = position[axis] === 0;
      next.disabled = position[axis] + size >= extent;
      const end = Math.min(position[axis] + size, extent) * unit;
      text.textContent = `to ${countText(Math.min(end, grid.isVector ? shape[0] : end) - 1)}`;
    });
    return el(
      "div",
      { class: "mover", role: "group", "aria-label": grid.isVector ? "Elements" : `${axis}s` },
      el(
        "span",
        { class: "muted" },
        grid.isVector ? "Elements" : axis === "row" ? "Rows" : "Columns",
      ),
      back,
      input,
      text,
      next,
    );
  };
  const lead = shape.slice(0, -2).map((extent, dim) => {
    const input = el("input", {
      type: "number",
      min: 0,
      max: extent - 1,
      value: 0,
      id: `dim-${dim}`,
      onchange: () => {
        const changed = position.lead.slice();
        changed[dim] = input.valueAsNumber;
        void show({ lead: changed });
      },
    });
    refreshers.push(() => {
      input.value = String(position.lead[dim]);
    });
    return el(
      "div",
      { class: "mover" },
      el("label", { class: "muted", for: `dim-${dim}` }, `Dim ${dim}`),
      input,
      el("span", { class: "range mono" }, `of ${countText(extent)}`),
    );
  });
  const askWhole = button("Summarise the whole tensor", async () => {
    try {
      const found = await runJob({
        origin,
        method: "summary",
        argument: { path, key },
        title: "Summary of the tensor",
        place: whole,
      });
      if (found === null) whole.replaceChildren(askWhole);
      else {
        announce("The summary is complete");
        whole.replaceChildren(
          el("h3", null, "Of the whole tensor"),
          summaryFacts(found.summary),
          el("p", { class: "muted" }, `${sizeText(nbytes)} in ${durationText(found.seconds)}`),
        );
      }
    } catch (error) {
      whole.replaceChildren(errorCard(fieldsOf(error)));
    }
  });
  const isPart = shape.length > 2 || grid.rows > ROWS || grid.columns > COLUMNS;
  if (isPart) whole.append(askWhole);
  const movers = el(
    "div",
    { class: "movers" },
    lead,
    mover("row", ROWS, grid.rows),
    grid.isVector ? null : mover("column", COLUMNS, grid.columns),
  );
  void show({});
  return section(
    "Values",
    {},
    movers,
    holder,
    lanesOf(dtype) === 2 && dtype.startsWith("float4")
      ? el("p", { class: "muted" }, "Each element is a byte with two numbers.")
      : null,
    summary,
    whole,
  );
}

/**
 * Make the table of a window.
 *
 * @param {number[]} shape @param {import("./slices.js").Position} position @param {number} rows
 * @param {number} columns @param {ReturnType<typeof valuesOf>} values
 */
function gridTable(shape, position, rows, columns, values) {
  const { isVector } = gridOf(shape);
  let greatest = 0;
  for (let at = 0; at < values.count; at += 1) {
    const size = Math.abs(values.number(at));
    if (Number.isFinite(size)) greatest = Math.max(greatest, size);
  }
  const heads = Array.from({ length: columns }, (_, at) =>
    el("th", { scope: "col" }, isVector ? `+${at}` : countText(position.column + at)),
  );
  const body = Array.from({ length: rows }, (_, row) => {
    const label = isVector ? (position.row + row) * columns : position.row + row;
    const cells = [];
    for (let column = 0; column < columns; column += 1) {
      const at = row * columns + column;
      if (at >= values.count) break;
      const number = values.number(at);
      const cell = el("td", null, values.text(at));
      if (!Number.isFinite(number)) cell.className = "bad";
      else if (greatest > 0) {
        // The shade goes with the root, so that small values don't vanish.
        const share = Math.sqrt(Math.abs(number) / greatest);
        cell.style.setProperty("--shade", share.toFixed(3));
        cell.className = number < 0 ? "below" : "above";
      }
      cells.push(cell);
    }
    return el("tr", null, el("th", { scope: "row" }, countText(label)), cells);
  });
  return el(
    "table",
    { class: "grid" },
    el("caption", { class: "visually-hidden" }, "Values by row and column"),
    shape.length === 0 ? null : el("thead", null, el("tr", null, el("td", null), heads)),
    el("tbody", null, body),
  );
}

/** @param {[number, number][]} box */
const boxText = (box) =>
  box.length === 0 ? "all" : box.map(([begin, end]) => `${begin}–${end}`).join(" × ");

/** @param {[number, number]} range of blocks */
const blocksText = ([begin, end]) =>
  end - begin === 1 ? `block ${begin}` : `blocks ${begin}–${end - 1}`;

/** @param {{begin: number, nbytes: number}} extent */
const bytesText = ({ begin, nbytes }) =>
  `bytes ${countText(begin)} to ${countText(begin + nbytes - 1)}, ${sizeText(nbytes)}`;

/** @param {any} context @param {Tensor} tensor */
function placesSection({ client, path }, { key }) {
  const holder = el("div", { class: "places" }, el("p", { class: "muted" }, "Reading the parts…"));
  const fill = async () => {
    const { boxCount, boxes } = await client.call("places", { path, key });
    const cards = boxes.map((/** @type {any} */ box) =>
      el(
        "article",
        { class: "box" },
        el(
          "h3",
          null,
          "Box ",
          el("span", { class: "mono" }, boxText(box.box)),
          el("span", { class: "muted" }, ` writer ${box.writer}`),
        ),
        el("p", { class: "mono muted" }, box.part),
        box.extents.length === 0
          ? el("p", { class: "muted" }, "No bytes.")
          : el(
              "ul",
              null,
              box.extents.map((/** @type {any} */ extent) => {
                const blocks = blocksText(extent.blocks);
                return el(
                  "li",
                  null,
                  badge(extent.encoding, extent.encoding === "raw" ? "" : "delta"),
                  extent.isPredicted ? badge("predicted", "delta") : null,
                  ` ${blocks} `,
                  extent.file === null
                    ? null
                    : [
                        el("div", { class: "mono file" }, extent.file),
                        el("div", { class: "muted" }, bytesText(extent)),
                      ],
                  extent.base === null
                    ? null
                    : el(
                        "div",
                        { class: "muted" },
                        "from the base ",
                        el("span", { class: "mono" }, extent.base),
                      ),
                );
              }),
            ),
        box.extentCount > box.extents.length
          ? el(
              "p",
              { class: "muted" },
              `and ${counted(box.extentCount - box.extents.length, "more extent")}`,
            )
          : null,
      ),
    );
    holder.replaceChildren(
      ...cards,
      ...(boxCount > boxes.length
        ? [
            el(
              "p",
              { class: "muted" },
              `and ${counted(boxCount - boxes.length, "more box", "more boxes")}`,
            ),
          ]
        : []),
    );
  };
  fill().catch((error) => holder.replaceChildren(errorCard(fieldsOf(error))));
  return section("Where it lies", {}, holder);
}
