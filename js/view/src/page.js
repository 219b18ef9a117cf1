// @ts-check
/** The page: what is open, and which of it is shown. @module */
import { droppedFiles, listedFiles } from "../../src/sources/files.js";
import { checkpointView } from "./checkpoint-view.js";
import { Client, ViewError } from "./client.js";
import { announce, badge, button, el, errorCard } from "./dom.js";
import { runView } from "./run-view.js";

/** @typedef {{view: string, path: string, tensor: string, tab: string}} Route */

const main = /** @type {HTMLElement} */ (document.getElementById("main"));
const trail = /** @type {HTMLElement} */ (document.getElementById("trail"));
const another = /** @type {HTMLElement} */ (document.getElementById("another"));
/** Folders' handles can't be passed to a worker of a page without an origin. */
const hasHandles = location.protocol !== "file:" && "showDirectoryPicker" in window;

/** @type {{client: Client, origin: any, found: any} | null} */
let opened = null;
/** @type {{route: Route, follow: (route: Route, isFirst: boolean) => void} | null} */
let shown = null;
let visits = 0;

/** @returns {Route} */
function readRoute() {
  const read = new URLSearchParams(location.hash.slice(1));
  const get = (/** @type {string} */ name) => read.get(name) ?? "";
  return { view: get("view"), path: get("path"), tensor: get("tensor"), tab: get("tab") };
}

/** @param {Partial<Route>} route */
function hashOf(route) {
  const entries = Object.entries(route).filter(([, value]) => value !== "" && value !== undefined);
  return `#${new URLSearchParams(/** @type {any} */ (entries))}`;
}

/** @param {Partial<Route>} route @param {string} [how] `replace` keeps no step of the history */
function go(route, how = "push") {
  const hash = hashOf(route);
  if (how === "replace") history.replaceState(null, "", hash);
  else history.pushState(null, "", hash);
  void show();
}

/** @param {string} path @param {string} text */
const linkTo = (path, text) => el("a", { href: hashOf({ view: "checkpoint", path }) }, text);

/** @param {unknown} error @param {string} title */
function showError(error, title) {
  const fields =
    error instanceof ViewError ? error.fields : { code: "UNEXPECTED", detail: String(error) };
  announce(`${title}: ${fields.code}`);
  return el(
    "div",
    { class: "screen narrow" },
    el("h1", { tabindex: "-1" }, title),
    errorCard(fields, "h2"),
  );
}

/** @param {[string, Partial<Route> | null][]} steps */
function showTrail(steps) {
  another.hidden = opened === null;
  trail.replaceChildren(
    ...steps.map(([text, route], at) =>
      el(
        "li",
        null,
        at === steps.length - 1 || route === null
          ? el("span", { "aria-current": at === steps.length - 1 ? "page" : null }, text)
          : el("a", { href: hashOf(route) }, text),
      ),
    ),
  );
}

/** @param {string} path */
const lastOf = (path) => path.replace(/\/$/, "").replace(/^.*\//, "");

/** @param {Route} route */
function trailOf(route) {
  const { found, origin } = /** @type {NonNullable<typeof opened>} */ (opened);
  const root = lastOf(origin.kind === "url" ? new URL(found.name).pathname : found.name) || "/";
  /** @type {[string, Partial<Route>][]} */
  const steps = [[root, { view: found.kind, path: "" }]];
  const parts = route.path === "" ? [] : route.path.split("/");
  parts.forEach((part, at) => {
    const isLast = at === parts.length - 1;
    steps.push([
      part,
      { view: isLast ? route.view : "run", path: parts.slice(0, at + 1).join("/") },
    ]);
  });
  return steps;
}

/** Show what the address says. */
async function show() {
  visits += 1;
  const visit = visits;
  const route = readRoute();
  if (opened === null) {
    showStart();
    return;
  }
  const { client, origin, found } = opened;
  if (route.view === "") {
    history.replaceState(null, "", hashOf({ view: found.kind, path: "" }));
    void show();
    return;
  }
  const context = { client, origin, go, linkTo, route };
  if (shown !== null && shown.route.view === route.view && shown.route.path === route.path) {
    shown.route = route;
    shown.follow(route, false);
    return;
  }
  shown = null;
  const timer = setTimeout(
    () => main.replaceChildren(el("p", { class: "loading" }, "Reading…")),
    150,
  );
  try {
    let view;
    if (route.view === "folder") view = folderView(found);
    else {
      const data = await client.call(route.view === "run" ? "run" : "checkpoint", {
        path: route.path,
      });
      if (visit !== visits) return;
      view = route.view === "run" ? runView(context, data) : checkpointView(context, data);
    }
    clearTimeout(timer);
    main.replaceChildren(view.element);
    shown = { route, follow: view.follow };
    document.title = `${view.name} – ckptfmt view`;
    view.title.focus({ preventScroll: true });
    window.scrollTo(0, 0);
    view.follow(route, true);
  } catch (error) {
    clearTimeout(timer);
    if (visit !== visits) return;
    const view = showError(
      error,
      route.view === "run" ? "The run can't be opened" : "The checkpoint can't be opened",
    );
    main.replaceChildren(view);
    view.querySelector("h1").focus();
  }
  showTrail(trailOf(route));
}

/** @param {any} found */
function folderView(found) {
  const title = el("h1", { tabindex: "-1" }, lastOf(found.name));
  const element = el(
    "div",
    { class: "screen narrow" },
    el("header", { class: "title" }, title),
    el(
      "section",
      { class: "panel", "aria-label": "Runs and checkpoints" },
      el(
        "ul",
        { class: "folder" },
        found.found.map((/** @type {any} */ entry) =>
          el(
            "li",
            null,
            el("a", { href: hashOf({ view: entry.kind, path: entry.name }) }, entry.name),
            badge(entry.kind),
          ),
        ),
      ),
    ),
  );
  return { element, title, follow: () => {}, name: lastOf(found.name) };
}

/** @param {any} origin */
async function open(origin) {
  opened?.client.close();
  opened = null;
  shown = null;
  const client = new Client();
  main.replaceChildren(el("p", { class: "loading" }, "Opening…"));
  announce("Opening");
  try {
    const found = await client.call("open", { origin });
    opened = { client, origin, found };
    void show();
  } catch (error) {
    client.close();
    showStart(showError(error, "This can't be opened"));
  }
}

/** @param {HTMLElement | null} [error] */
function showStart(error = null) {
  shown = null;
  document.title = "ckptfmt view";
  showTrail([]);
  const input = el("input", {
    type: "file",
    webkitdirectory: true,
    multiple: true,
    id: "folder-input",
    class: "visually-hidden",
    tabindex: "-1",
    "aria-label": "A folder",
    onchange: () => {
      if (input.files.length > 0) void openFiles(listedFiles(input.files));
    },
  });
  const choose = button(
    "Choose a folder",
    async () => {
      if (!hasHandles) {
        input.click();
        return;
      }
      try {
        // @ts-expect-error: not in all browsers
        const handle = await window.showDirectoryPicker();
        history.replaceState(null, "", "#");
        void open({ kind: "handle", handle });
      } catch (cause) {
        if (/** @type {Error} */ (cause).name !== "AbortError") input.click();
      }
    },
    { class: "primary big" },
  );
  const url = el("input", {
    id: "url",
    name: "url",
    type: "text",
    inputmode: "url",
    placeholder: "data/my-run/",
    required: true,
    autocomplete: "off",
  });
  const form = el(
    "form",
    {
      class: "url-form",
      onsubmit: (/** @type {Event} */ event) => {
        event.preventDefault();
        openUrl(url.value);
      },
    },
    el("label", { for: "url" }, "or a URL on this server"),
    el("div", { class: "row-input" }, url, el("button", { type: "submit" }, "Open")),
  );
  const title = el("h1", { tabindex: "-1" }, "Look into a checkpoint");
  main.replaceChildren(
    error ?? "",
    el(
      "div",
      { class: "start" },
      error ? el("h2", null, "Open something else") : title,
      el(
        "div",
        { class: "drop", id: "drop" },
        el("p", { class: "drop-text" }, "Drop the folder of a run or a checkpoint here"),
        choose,
        input,
      ),
      location.protocol === "file:" ? null : form,
      el(
        "ul",
        { class: "promises" },
        el(
          "li",
          null,
          el("strong", null, "Nothing leaves the browser. "),
          "The page reads your files where they are, and may connect to its own server alone.",
        ),
        el(
          "li",
          null,
          el("strong", null, "Every value was compared with its digest "),
          "before the page shows it.",
        ),
        el(
          "li",
          null,
          el("strong", null, "A delta needs its run: "),
          "open the folder of the run, where its bases are.",
        ),
      ),
    ),
  );
  if (error) /** @type {any} */ (error.querySelector("h1"))?.focus();
}

/** @param {{files: Map<string, Blob>, name: string}} listed */
function openFiles({ files, name }) {
  history.replaceState(null, "", "#");
  return open({ kind: "files", files, name });
}

/** @param {string} text */
function openUrl(text) {
  const page = new URL(location.href);
  page.search = new URLSearchParams({ url: text }).toString();
  page.hash = "";
  location.assign(page);
}

/** Open what the address names. @param {string} text */
function openNamed(text) {
  /** @type {URL} */
  let url;
  try {
    url = new URL(text, location.href);
  } catch {
    showStart(
      showError(
        new ViewError({
          code: "ARGUMENT",
          detail: "the URL is malformed",
          where: text,
          remedy: "Correct the URL.",
        }),
        "This can't be opened",
      ),
    );
    return;
  }
  // @ts-expect-error: a constant of the build
  const allowed = [location.origin, ...ALLOWED_ORIGINS];
  if (location.protocol === "file:" || !allowed.includes(url.origin)) {
    showStart(
      showError(
        new ViewError({
          code: "STORE_ACCESS",
          detail: "the page may only read from its own server",
          where: url.href,
          remedy: "Put the page on that server, or serve the folder with `ckptfmt view PATH`.",
        }),
        "This can't be opened",
      ),
    );
    return;
  }
  url.search = "";
  url.hash = "";
  if (!url.pathname.endsWith("/")) url.pathname += "/";
  void open({ kind: "url", url: url.href });
}

let depth = 0;
const drag = (/** @type {number} */ change) => {
  depth = Math.max(0, depth + change);
  document.body.classList.toggle("dragging", depth > 0);
};
document.addEventListener("dragenter", () => drag(1));
document.addEventListener("dragleave", () => drag(-1));
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", async (event) => {
  event.preventDefault();
  drag(-depth);
  const transfer = event.dataTransfer;
  if (transfer === null) return;
  const items = [...transfer.items].filter(({ kind }) => kind === "file");
  const first = /** @type {any} */ (items[0]);
  if (!hasHandles || items.length !== 1 || !("getAsFileSystemHandle" in first)) {
    void openFiles(await droppedFiles(transfer));
    return;
  }
  // With a handle, no listing of thousands of files comes before the first screen.
  const handle = await first.getAsFileSystemHandle();
  history.replaceState(null, "", "#");
  if (handle.kind === "directory") void open({ kind: "handle", handle });
  else void openFiles(listedFiles([await handle.getFile()]));
});
another.addEventListener("click", () => {
  opened?.client.close();
  opened = null;
  history.pushState(null, "", location.pathname);
  showStart();
  main.querySelector("h1")?.focus();
});
document.getElementById("skip")?.addEventListener("click", (event) => {
  event.preventDefault(); // the address says what is shown
  main.focus();
});
window.addEventListener("popstate", () => void show());

const named = new URLSearchParams(location.search).get("url");
if (named === null) showStart();
else openNamed(named);
