// @ts-check
/** A run: its launches as a drawing, its checkpoints, and what the next launch resumes from. */
import { ViewError } from "./client.js";
import { announce, badge, button, el, errorCard, facts, section, svg } from "./dom.js";
import { runJob } from "./jobs.js";
import { layOut } from "./lineage.js";
import { Table } from "./table.js";
import { countText, counted, sizeText, timeText } from "./text.js";

const MOST_LANES = 60;
const MOST_DOTS = 3000;

/** @type {Record<string, string>} */
const STATES = {
  committed: "committed",
  aborted: "given up",
  retired: "retired",
  undecided: "not committed",
  unreadable: "damaged",
};
/** @type {Record<string, string>} */
const STATE_KINDS = { committed: "good", unreadable: "bad", aborted: "warn", undecided: "warn" };

/**
 * Draw launches and checkpoints.
 *
 * @param {any} run of the worker @param {(path: string) => void} onOpen
 */
function drawing(run, onOpen) {
  const launches = run.launches.slice(-MOST_LANES);
  /** @type {any[]} */
  const marks = run.checkpoints.slice(-MOST_DOTS);
  // The width of the window, or more if marks would overlap.
  const width = Math.max(
    560,
    Math.min(1690, window.innerWidth - 96),
    Math.min(4000, 160 + marks.length * 14),
  );
  const sizes = { width, lane: 34, left: 96, right: 28, top: 22 };
  const { dots, lanes, links, ticks, height } = layOut(launches, marks, sizes);
  const bottom = height + 26;
  /** @type {Map<string, any>} */
  const infos = new Map(marks.map((/** @type {any} */ mark) => [mark.name, mark]));
  const onLine = new Set(
    dots.filter(({ name }) => infos.get(name).isOnLineage).map(({ launch }) => launch),
  );
  const lastOn = (/** @type {number} */ launch) =>
    Math.max(
      ...dots
        .filter((dot) => dot.launch === launch && infos.get(dot.name).isOnLineage)
        .map(({ x }) => x),
    );
  const text = lanes
    .map(
      ({ launch, from }) => `launch ${launch} ${from ? `resumed from ${from.name}` : "began anew"}`,
    )
    .join("; ");
  const picture = svg(
    "svg",
    {
      class: "lineage",
      viewBox: `0 0 ${width} ${bottom}`,
      role: "img",
      "aria-label": `Lineage: ${text}`,
      width,
      height: bottom,
    },
    ticks.map(({ step, x }) => [
      svg("line", { class: "tick-line", x1: x, x2: x, y1: 8, y2: height - 6 }),
      svg("text", { class: "tick", x, y: bottom - 8, "text-anchor": "middle" }, countText(step)),
    ]),
    links.map(({ launch, x, fromY, toY }) =>
      svg("path", {
        class: `link ${onLine.has(launch) ? "on" : ""}`,
        d: `M${x},${fromY} C${x},${(fromY + toY) / 2} ${x},${(fromY + toY) / 2} ${x},${toY}`,
      }),
    ),
    lanes.map(({ launch, y, begin, end }) => [
      svg("text", { class: "lane-name", x: 8, y: y + 4 }, `launch ${launch}`),
      svg("line", { class: "lane", x1: begin, x2: end, y1: y, y2: y }),
      onLine.has(launch)
        ? svg("line", { class: "lane on", x1: begin, x2: lastOn(launch), y1: y, y2: y })
        : null,
    ]),
    dots.map(({ name, x, y, step }) => {
      const info = infos.get(name);
      const isNext = run.next === name;
      const label =
        `step ${countText(step)}, launch ${info.launch}: ${STATES[info.state]}` +
        (isNext ? "; the next launch resumes from here" : "");
      return svg(
        "g",
        {
          class: `dot ${info.state} ${info.isOnLineage ? "on" : ""} ${info.profile ?? ""}`,
          onclick: () => onOpen(name),
        },
        svg("title", {}, label),
        isNext ? svg("circle", { class: "next", cx: x, cy: y, r: 10 }) : null,
        svg("circle", { class: "hit", cx: x, cy: y, r: 12 }),
        svg("circle", { class: "mark", cx: x, cy: y, r: 5.5 }),
      );
    }),
  );
  const item = (/** @type {string} */ kind, /** @type {string} */ label) =>
    el(
      "li",
      null,
      svg(
        "svg",
        { width: 16, height: 16, viewBox: "0 0 16 16", "aria-hidden": "true" },
        svg(
          "g",
          { class: `dot ${kind}` },
          kind.includes("is-next") ? svg("circle", { class: "next", cx: 8, cy: 8, r: 7 }) : null,
          svg("circle", { class: "mark", cx: 8, cy: 8, r: kind.includes("is-next") ? 4 : 5 }),
        ),
      ),
      label,
    );
  return el(
    "div",
    null,
    el(
      "div",
      {
        class: "lineage-scroll",
        tabindex: "0",
        role: "group",
        "aria-label": "Drawing of the lineage",
      },
      picture,
    ),
    el(
      "ul",
      { class: "legend", "aria-label": "Legend" },
      item("committed on", "on the lineage"),
      item("committed", "off the lineage"),
      item("committed on is-next", "the next launch resumes here"),
      marks.some(({ state }) => state === "retired") ? item("retired", "retired") : null,
      marks.some(({ state }) => state === "aborted" || state === "undecided")
        ? item("undecided", "given up, or not committed")
        : null,
      marks.some(({ state }) => state === "unreadable") ? item("unreadable", "damaged") : null,
    ),
    run.launches.length > launches.length
      ? el(
          "p",
          { class: "muted" },
          `The newest ${launches.length} of ${countText(run.launches.length)} launches are drawn.`,
        )
      : null,
  );
}

/** @param {any[]} launches @param {(name: string) => Node} link */
function launchTable(launches, link) {
  const how = { lineage: "by lineage", fallback: "passed over damage", hand: "chosen by hand" };
  const rows = launches.map(({ launch, chosenBy, from, isOvertaken, error }) =>
    el(
      "tr",
      null,
      el("th", { scope: "row" }, launch),
      el(
        "td",
        { class: "mono" },
        error
          ? badge(error.code, "bad")
          : from === null
            ? el("span", { class: "muted" }, "began anew")
            : link(from),
      ),
      el(
        "td",
        { class: "muted" },
        error ? error.detail : /** @type {any} */ (how)[chosenBy],
        isOvertaken ? " (overtaken by a clean-up)" : "",
      ),
    ),
  );
  return el(
    "details",
    { class: "launches" },
    el("summary", null, `${counted(launches.length, "launch", "launches")} as a table`),
    el(
      "table",
      { class: "plain" },
      el(
        "thead",
        null,
        el(
          "tr",
          null,
          ["Launch", "Resumed from", "How"].map((title) => el("th", { scope: "col" }, title)),
        ),
      ),
      el("tbody", null, rows),
    ),
  );
}

/**
 * Show a run.
 *
 * @param {{client: any, origin: any, go: (route: any) => void,
 *   linkTo: (path: string, text: string) => Node}} context
 * @param {any} run of the worker
 */
export function runView(context, run) {
  const { origin, go } = context;
  const { checkpoints, launches, next, choiceError, path } = run;
  const byName = new Map(checkpoints.map((/** @type {any} */ info) => [info.name, info]));
  const errorPlace = el("div", { role: "alert" });
  const open = (/** @type {any} */ info) => {
    if (info.state === "committed") go({ view: "checkpoint", path: info.path });
    else if (info.error) errorPlace.replaceChildren(errorCard(info.error));
    else
      errorPlace.replaceChildren(
        el(
          "p",
          { class: "note" },
          `${info.name} is ${STATES[info.state]}: there is nothing to open.`,
        ),
      );
  };
  const link = (/** @type {string} */ name) =>
    byName.has(name) ? context.linkTo(byName.get(name).path, name) : document.createTextNode(name);
  const numbers = (/** @type {string} */ state) =>
    checkpoints.filter((/** @type {any} */ info) => info.state === state).length;
  const stored = checkpoints.reduce(
    (/** @type {number} */ sum, /** @type {any} */ info) => sum + (info.stored ?? 0),
    0,
  );
  const choicePlace = el("div", { class: "choice-place" });
  const choose = button("Verify this choice", async () => {
    choose.disabled = true;
    try {
      const choice = await runJob({
        origin,
        method: "choose",
        argument: { path },
        title: "Choice of the next launch, with every byte verified",
        place: choicePlace,
      });
      if (choice === null)
        choicePlace.replaceChildren(el("p", { class: "note" }, "The verification was cancelled."));
      else {
        const text =
          choice.resumeFrom === null
            ? "The next launch begins anew."
            : `The next launch resumes from ${choice.resumeFrom}: every byte is as it was saved.`;
        announce(text);
        choicePlace.replaceChildren(
          el("div", { class: "verdict good" }, el("p", { class: "verdict-text" }, `✓ ${text}`)),
          choice.passedOver.map((/** @type {any} */ one) =>
            one.error
              ? errorCard(one.error)
              : el("p", { class: "note" }, `${one.name} is passed over: it is marked suspect.`),
          ),
        );
      }
    } catch (error) {
      choicePlace.replaceChildren(
        errorCard(
          error instanceof ViewError ? error.fields : { code: "UNEXPECTED", detail: String(error) },
        ),
      );
    }
    choose.disabled = false;
  });
  const nextInfo = next === null ? null : byName.get(next);
  const compare =
    (/** @type {string} */ key) => (/** @type {number} */ a, /** @type {number} */ b) =>
      (checkpoints[a][key] ?? -1) - (checkpoints[b][key] ?? -1);
  const table = new Table({
    label: "Checkpoints",
    name: "checkpoints",
    empty: "The run has no checkpoint yet.",
    columns: [
      {
        name: "step",
        title: "Step",
        compare: compare("step"),
        text: (row) => countText(checkpoints[row].step),
      },
      {
        name: "launch",
        title: "Launch",
        compare: compare("launch"),
        text: (row) => String(checkpoints[row].launch),
      },
      {
        name: "state",
        title: "State",
        text: (row, cell) => {
          const info = checkpoints[row];
          cell.replaceChildren(
            badge(STATES[info.state], STATE_KINDS[info.state] ?? ""),
            info.error ? el("span", { class: "bad mono" }, ` ${info.error.code}`) : "",
            info.suspect ? badge("suspect", "warn", info.suspect) : "",
          );
          return null;
        },
      },
      {
        name: "profile",
        title: "Profile",
        text: (row, cell) => {
          const { profile } = checkpoints[row];
          cell.replaceChildren(profile === null ? "" : badge(profile, profile));
          return null;
        },
      },
      {
        name: "size",
        title: "Stored",
        compare: compare("stored"),
        text: (row) => (checkpoints[row].stored === null ? "" : sizeText(checkpoints[row].stored)),
      },
      {
        name: "saved",
        title: "Saved",
        compare: compare("saved"),
        text: (row) =>
          checkpoints[row].saved === null
            ? ""
            : timeText(checkpoints[row].saved).replace(/:\d\d UTC$/, " UTC"),
      },
      {
        name: "labels",
        title: "Labels",
        text: (row, cell) => {
          const { metrics, tags, isPinned, name } = checkpoints[row];
          cell.replaceChildren(
            name === next ? badge("next", "next", "The next launch resumes from here") : "",
            isPinned ? badge("pinned", "tag") : "",
            ...tags.map((/** @type {string} */ tag) => badge(tag, "tag")),
            ...Object.entries(metrics).map(([metric, value]) =>
              el("span", { class: "metric" }, el("span", { class: "muted" }, `${metric} `), value),
            ),
          );
          return null;
        },
      },
    ],
    onOpen: (row) => open(checkpoints[row]),
  });
  // The newest first: people look for these.
  table.setRows(
    Array.from({ length: checkpoints.length }, (_, row) => checkpoints.length - 1 - row),
  );
  const title = el(
    "h1",
    { tabindex: "-1" },
    (path === "" ? run.name : path).replace(/\/$/, "").replace(/^.*\//, "") || "Run",
  );
  const element = el(
    "div",
    { class: "screen run" },
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
          badge("run"),
          el("span", { class: "mono muted" }, run.runId),
        ),
      ),
    ),
    el(
      "div",
      { class: "cards" },
      el(
        "section",
        { class: "panel next-card", "aria-labelledby": "next-title" },
        el("h2", { id: "next-title" }, "The next launch"),
        choiceError
          ? errorCard(choiceError)
          : next === null
            ? el(
                "p",
                null,
                launches.length === 0
                  ? "begins anew: the run has no launch."
                  : "has no checkpoint to resume from, and begins anew.",
              )
            : [
                el(
                  "p",
                  { class: "next-name" },
                  "resumes from ",
                  nextInfo
                    ? context.linkTo(nextInfo.path, `step ${countText(nextInfo.step)}`)
                    : el("span", { class: "mono" }, next),
                ),
                el(
                  "p",
                  { class: "muted" },
                  nextInfo?.error
                    ? `Its register is damaged (${nextInfo.error.code}): a launch passes over it.`
                    : "Chosen by the records. A launch also compares every byte.",
                ),
                choose,
                choicePlace,
              ],
      ),
      el(
        "section",
        { class: "panel", "aria-labelledby": "facts-title" },
        el("h2", { id: "facts-title" }, "In numbers"),
        facts([
          ["Launches", countText(launches.length)],
          ["Committed", countText(numbers("committed"))],
          ...(numbers("retired")
            ? [/** @type {[string, any]} */ (["Retired", countText(numbers("retired"))])]
            : []),
          ...(numbers("aborted") + numbers("undecided")
            ? [
                /** @type {[string, any]} */ ([
                  "Given up or open",
                  countText(numbers("aborted") + numbers("undecided")),
                ]),
              ]
            : []),
          ...(numbers("unreadable")
            ? [
                /** @type {[string, any]} */ ([
                  "Damaged",
                  el("span", { class: "bad" }, countText(numbers("unreadable"))),
                ]),
              ]
            : []),
          ["Stored", sizeText(stored)],
        ]),
      ),
    ),
    section(
      "Lineage",
      { class: "panel" },
      checkpoints.length === 0 && launches.length === 0
        ? el("p", { class: "muted" }, "No launch yet.")
        : drawing(run, (name) => open(byName.get(name))),
      launches.length > 0 ? launchTable(launches, link) : null,
    ),
    section("Checkpoints", { class: "panel" }, table.element, errorPlace),
  );
  return { element, title, follow: () => {}, name: title.textContent };
}
