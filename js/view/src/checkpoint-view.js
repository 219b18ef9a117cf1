// @ts-check
/** A checkpoint: its manifest, its fields, and its tensors, values and random streams. @module */
import { tensorKey } from "../../src/checkpoint.js";
import { FIELDS, readerProfiles } from "../../src/names.js";
import { announce, badge, button, el, facts, newId } from "./dom.js";
import { Table } from "./table.js";
import { tensorPanel } from "./tensor-view.js";
import { counted, countText, shapeText, sizeText, timeText } from "./text.js";
import { treeList } from "./values-view.js";
import { verifyInto } from "./verify-view.js";

/** @param {string} text */
const fold = (text) => text.toLowerCase();

/**
 * Return the rows whose name or alias has all words of a search, and a field.
 *
 * @param {any} columns @param {string[]} folded the names in lower case @param {string} wanted
 * @param {string} field `""` for all
 */
export function searchRows(columns, folded, wanted, field) {
  const words = fold(wanted).split(/\s+/).filter(Boolean);
  /** @type {number[]} */
  const rows = [];
  for (let row = 0; row < folded.length; row += 1) {
    if (field !== "" && columns.field[row] !== field) continue;
    if (words.every((word) => folded[row].includes(word))) rows.push(row);
  }
  return rows;
}

/** @param {any} manifest */
function manifestFacts({ manifest, digest, nbytes, stored }, /** @type {any} */ link) {
  const { features, references, metrics = {} } = manifest;
  return facts([
    ["Digest", el("span", { class: "mono digest" }, digest)],
    ["Run", manifest.run_id === null ? "none" : el("span", { class: "mono" }, manifest.run_id)],
    ["Launch", manifest.launch === null ? "none" : countText(manifest.launch)],
    ["Writers", countText(manifest.writer_count)],
    [
      "Size",
      nbytes === stored ? sizeText(nbytes) : `${sizeText(stored)} stored of ${sizeText(nbytes)}`,
    ],
    ["Block size", sizeText(manifest.block_nbytes)],
    ["Format", manifest.format_version],
    ["A reader needs", readerProfiles(features.reader).join(", ")],
    ...(references.length > 0
      ? [
          /** @type {[string, any]} */ ([
            "Needs the bases",
            references.map((/** @type {any} */ one) =>
              el("div", { class: "mono" }, link(one.name)),
            ),
          ]),
        ]
      : []),
    ...Object.entries(metrics).map(
      ([name, value]) =>
        /** @type {[string, any]} */ ([name, el("span", { class: "mono" }, value)]),
    ),
    ...(manifest.suspect ? [/** @type {[string, any]} */ (["Suspect", manifest.suspect])] : []),
    ...(manifest.durability
      ? [/** @type {[string, any]} */ (["Durability", manifest.durability])]
      : []),
    ["Attempt", el("span", { class: "mono" }, manifest.attempt)],
  ]);
}

/** @param {any} fields of the manifest */
function fieldsTable(fields) {
  const number = (/** @type {number} */ count) =>
    count === 0 ? el("td", { class: "muted" }, "–") : el("td", null, countText(count));
  const rows = FIELDS.map((name) => [name, fields[name]]).map(([name, field]) =>
    el(
      "tr",
      { class: field.state },
      el("th", { scope: "row" }, name),
      field.state === "absent"
        ? el("td", { colspan: 4, class: "muted" }, `absent: ${field.reason}`)
        : [
            number(field.tensor_count),
            number(field.leaf_count),
            number(field.stream_count),
            field.nbytes === 0 ? number(0) : el("td", null, sizeText(field.nbytes)),
          ],
    ),
  );
  return el(
    "table",
    { class: "fields" },
    el("caption", { class: "visually-hidden" }, "The seven fields"),
    el(
      "thead",
      null,
      el(
        "tr",
        null,
        ["Field", "Tensors", "Values", "Streams", "Size"].map((title) =>
          el("th", { scope: "col" }, title),
        ),
      ),
    ),
    el("tbody", null, rows),
  );
}

/**
 * Show a checkpoint.
 *
 * @param {{client: any, origin: any, go: (route: any, how?: string) => void,
 *   linkTo: (path: string, text: string) => Node, route: any}} context
 * @param {any} data of the worker
 */
export function checkpointView(context, data) {
  const { client, origin, go } = context;
  const { manifest, path, columns, count, leaves, streams, name } = data;
  const verifyPlace = el("div", { class: "verify-place" });
  const verifyButton = button(
    "Verify every byte",
    async () => {
      verifyButton.disabled = true;
      await verifyInto(origin, path, verifyPlace);
      verifyButton.disabled = false;
      verifyButton.textContent = "Verify again";
    },
    { class: "primary" },
  );
  const folder = path.includes("/") ? path.slice(0, path.lastIndexOf("/") + 1) : "";
  const link = (/** @type {string} */ base) =>
    path === "" ? base : context.linkTo(folder + base, base);

  const workspace = el("div", { class: "workspace" });
  /** @type {HTMLElement | null} */
  let detail = null;
  const tabs = tabList(
    [
      { name: "tensors", title: "Tensors", count, panel: () => tensorsTab() },
      {
        name: "values",
        title: "Values",
        count: leaves.length,
        panel: () => valuesTab(client, path, leaves),
      },
      {
        name: "streams",
        title: "Streams",
        count: streams.length,
        panel: () => streamsTab(client, path, streams),
      },
    ],
    context.route.tab,
    (tab) => go({ ...current(), tab, tensor: "" }, "replace"),
  );
  const current = () => ({ view: "checkpoint", path, tab: tabs.chosen(), tensor: "" });

  /** @type {Table | null} */
  let table = null;
  /** @type {Map<string, number>} */
  const rowsByKey = new Map();
  for (let row = 0; row < count; row += 1) {
    rowsByKey.set(tensorKey(columns.field[row], columns.name[row], columns.scope[row]), row);
  }
  const keyOf = (/** @type {number} */ row) =>
    tensorKey(columns.field[row], columns.name[row], columns.scope[row]);

  function tensorsTab() {
    const folded = columns.name.map((/** @type {string} */ own, /** @type {number} */ row) =>
      fold([own, columns.dtype[row], ...(columns.aliases[row] ?? [])].join("\n")),
    );
    const byText =
      (/** @type {string} */ column) => (/** @type {number} */ a, /** @type {number} */ b) =>
        columns[column][a] < columns[column][b]
          ? -1
          : columns[column][a] > columns[column][b]
            ? 1
            : 0;
    table = new Table({
      label: "Tensors",
      name: "tensors",
      empty: "No tensor has such a name.",
      columns: [
        {
          name: "name",
          title: "Name",
          compare: byText("name"),
          text: (row, cell) => {
            const aliases = columns.aliases[row];
            const isPersistent = columns.isPersistent[row];
            if (aliases === undefined && isPersistent) return columns.name[row];
            cell.replaceChildren(
              columns.name[row],
              aliases
                ? badge(
                    `= ${aliases[0]}${aliases.length > 1 ? ` +${aliases.length - 1}` : ""}`,
                    "",
                    aliases.join("\n"),
                  )
                : "",
              isPersistent ? "" : badge("non-persistent", "warn"),
            );
            return null;
          },
        },
        {
          name: "dtype",
          title: "Dtype",
          compare: byText("dtype"),
          text: (row) => columns.dtype[row],
        },
        { name: "shape", title: "Shape", text: (row) => shapeText(columns.shape[row]) },
        {
          name: "size",
          title: "Size",
          compare: (a, b) => columns.nbytes[a] - columns.nbytes[b],
          text: (row) => sizeText(columns.nbytes[row]),
        },
        {
          name: "field",
          title: "Field",
          compare: byText("field"),
          text: (row) =>
            columns.scope[row] === "global"
              ? columns.field[row]
              : `${columns.field[row]} @${columns.scope[row]}`,
        },
      ],
      onOpen: (row) => go({ ...current(), tensor: keyOf(row) }, "replace"),
    });
    const all = Array.from({ length: count }, (_, row) => row);
    const result = el("p", { class: "result muted", role: "status" }, counted(count, "tensor"));
    const search = el("input", {
      type: "search",
      id: "search",
      placeholder: "Search by name, alias or dtype",
      autocomplete: "off",
      spellcheck: "false",
    });
    const fields = [...new Set(columns.field)];
    const select = el(
      "select",
      { id: "field", "aria-label": "Field" },
      el("option", { value: "" }, "All fields"),
      fields.map((field) => el("option", { value: field }, field)),
    );
    const filter = () => {
      const rows =
        search.value === "" && select.value === ""
          ? all
          : searchRows(columns, folded, search.value, select.value);
      table?.setRows(rows);
      result.textContent =
        rows.length === count
          ? counted(count, "tensor")
          : `${countText(rows.length)} of ${counted(count, "tensor")}`;
    };
    search.addEventListener("input", filter);
    search.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key !== "ArrowDown") return;
      event.preventDefault();
      table?.element.focus();
    });
    select.addEventListener("change", filter);
    table.setRows(all);
    return el(
      "div",
      { class: "tensors-tab" },
      el(
        "div",
        { class: "tools" },
        el("label", { for: "search", class: "visually-hidden" }, "Search tensors"),
        search,
        fields.length > 1 ? select : null,
        result,
      ),
      table.element,
    );
  }

  const title = el("h1", { tabindex: "-1" }, `Step ${countText(manifest.step)}`);
  const element = el(
    "div",
    { class: "screen checkpoint" },
    el(
      "header",
      { class: "title" },
      el(
        "div",
        null,
        title,
        el(
          "p",
          { class: "subtitle" },
          badge(manifest.profile, manifest.profile === "delta" ? "delta" : "full"),
          (manifest.tags ?? []).map((/** @type {string} */ tag) => badge(tag, "tag")),
          manifest.suspect ? badge("suspect", "warn") : null,
          el("span", { class: "mono" }, name),
          el("span", { class: "muted" }, `saved ${timeText(manifest.saved_unix_s)}`),
          el("span", { class: "muted" }, sizeText(data.stored)),
        ),
      ),
      verifyButton,
    ),
    verifyPlace,
    el(
      "div",
      { class: "columns" },
      el(
        "div",
        { class: "side" },
        el(
          "section",
          { class: "panel", "aria-labelledby": "fields-title" },
          el("h2", { id: "fields-title" }, "Fields"),
          fieldsTable(manifest.fields),
        ),
        el(
          "section",
          { class: "panel", "aria-labelledby": "facts-title" },
          el("h2", { id: "facts-title" }, "Manifest"),
          manifestFacts(data, link),
        ),
      ),
      workspace,
    ),
  );
  workspace.append(tabs.element);
  tabs.choose(tabs.chosen());

  /** Show the tensor of a route. @param {any} route @param {boolean} isFirst */
  const follow = (route, isFirst) => {
    if (tabs.chosen() !== (route.tab || "tensors")) tabs.choose(route.tab || "tensors");
    detail?.remove();
    detail = null;
    const row = rowsByKey.get(route.tensor);
    workspace.classList.toggle("with-detail", row !== undefined);
    if (row === undefined) {
      table?.choose(null);
      if (!isFirst) table?.element.focus();
      return;
    }
    table?.choose(row);
    const close = () => go({ ...current(), tensor: "" }, "replace");
    const { panel, heading } = tensorPanel(
      { client, origin, path, onClose: close },
      {
        key: route.tensor,
        name: columns.name[row],
        field: columns.field[row],
        scope: columns.scope[row],
        dtype: columns.dtype[row],
        shape: columns.shape[row],
        nbytes: columns.nbytes[row],
        isPersistent: columns.isPersistent[row] === 1,
        aliases: columns.aliases[row] ?? [],
      },
    );
    panel.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Escape") close();
    });
    detail = panel;
    workspace.append(panel);
    heading.focus({ preventScroll: window.innerWidth > 1100 });
    announce(`Tensor ${columns.name[row]}`);
  };
  return { element, title, follow, name: `Step ${countText(manifest.step)}` };
}

/** @param {any} client @param {string} path @param {any[]} leaves */
function valuesTab(client, path, leaves) {
  if (leaves.length === 0)
    return el("p", { class: "empty" }, "The checkpoint has no plain values.");
  const fields = [...new Set(leaves.map(({ field }) => field))];
  return el(
    "div",
    { class: "values-tab" },
    fields.map((field) => {
      const id = newId("field");
      const entries = leaves.flatMap((leaf, row) =>
        leaf.field !== field
          ? []
          : [
              {
                title: leaf.name === "" ? field : leaf.name,
                note: leaf.scope === "global" ? "" : leaf.scope,
                method: "leaf",
                argument: { path, row },
              },
            ],
      );
      return el(
        "section",
        { "aria-labelledby": id },
        el("h3", { id }, field),
        treeList(client, entries),
      );
    }),
  );
}

/** @param {any} client @param {string} path @param {any[]} streams */
function streamsTab(client, path, streams) {
  if (streams.length === 0)
    return el("p", { class: "empty" }, "The checkpoint has no random streams.");
  const entries = streams.map(({ name, scope, kind }, row) => ({
    title: name,
    note: scope === "global" ? kind : `${kind}, ${scope}`,
    method: "stream",
    argument: { path, row },
  }));
  return el("div", { class: "values-tab" }, treeList(client, entries));
}

/**
 * Make tabs; panels are made when they are shown first.
 *
 * @param {{name: string, title: string, count: number, panel: () => HTMLElement}[]} tabs
 * @param {string} first @param {(name: string) => void} onChoose
 */
function tabList(tabs, first, onChoose) {
  let chosen = tabs.some(({ name }) => name === first) ? first : tabs[0].name;
  const prefix = newId("tab");
  const heads = tabs.map(({ name, title, count }) =>
    el(
      "button",
      {
        type: "button",
        role: "tab",
        id: `${prefix}-${name}`,
        "aria-controls": `${prefix}-${name}-panel`,
        onclick: () => {
          choose(name);
          onChoose(name);
        },
      },
      title,
      el("span", { class: "tab-count" }, countText(count)),
    ),
  );
  const panels = tabs.map(({ name }) =>
    el("div", {
      role: "tabpanel",
      id: `${prefix}-${name}-panel`,
      "aria-labelledby": `${prefix}-${name}`,
      hidden: true,
    }),
  );
  const list = el(
    "div",
    {
      role: "tablist",
      class: "tabs",
      "aria-label": "Contents",
      onkeydown: (/** @type {KeyboardEvent} */ event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (step === undefined) return;
        const at =
          (tabs.findIndex(({ name }) => name === chosen) + step + tabs.length) % tabs.length;
        choose(tabs[at].name);
        onChoose(tabs[at].name);
        heads[at].focus();
      },
    },
    heads,
  );
  const choose = (/** @type {string} */ name) => {
    chosen = name;
    tabs.forEach((tab, at) => {
      const isChosen = tab.name === name;
      heads[at].setAttribute("aria-selected", String(isChosen));
      heads[at].tabIndex = isChosen ? 0 : -1;
      panels[at].hidden = !isChosen;
      if (isChosen && panels[at].childElementCount === 0) panels[at].append(tab.panel());
    });
  };
  return {
    element: el("section", { class: "panel contents", "aria-label": "Contents" }, list, panels),
    choose,
    chosen: () => chosen,
  };
}
