// @ts-check
/** Sources: memory, directory, HTTP, chosen and dropped files, handles. @module */
import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { after, before, describe, test } from "node:test";
import { execFileSync } from "node:child_process";
import {
  dropSource,
  fileListSource,
  handleSource,
  httpSource,
  memorySource,
  openCheckpoint,
  openRun,
} from "../src/index.js";
import { directorySource, locate } from "../src/node.js";
import { serve } from "./server.mjs";
import { readCases } from "./vectors.mjs";

const cases = readCases(["examples", "deltas", "run"]);
const delta = cases.find(({ id }) => id === "deltas/valid/example");
const run = cases.find(({ id }) => id === "run/valid/rolled-back");
assert.ok(delta && run);

/** @param {Promise<unknown>} work @param {string} code */
const refuses = (work, code) => assert.rejects(work, { name: "CkptError", code });

/** @param {Map<string, Uint8Array>} files @param {string} folder */
function write(files, folder) {
  for (const [path, bytes] of files) {
    mkdirSync(dirname(join(folder, path)), { recursive: true });
    writeFileSync(join(folder, path), bytes);
  }
}

/** @param {any} source */
async function check(source) {
  const checkpoint = await openCheckpoint(source, delta.path);
  const report = await checkpoint.verify();
  assert.deepEqual(report.problems, []);
  assert.equal(checkpoint.tensors.size, Object.keys(delta.expect.tensors).length);
}

/** Folders and files as a browser gives them. @param {Map<string, Uint8Array>} files */
function asTree(files) {
  /** @type {any} */
  const root = { name: "dropped", kind: "directory", children: new Map() };
  for (const [path, bytes] of files) {
    const parts = path.split("/");
    let at = root;
    parts.forEach((part, depth) => {
      if (depth === parts.length - 1)
        at.children.set(part, new File([/** @type {any} */ (bytes)], part));
      else {
        if (!at.children.has(part))
          at.children.set(part, { name: part, kind: "directory", children: new Map() });
        at = at.children.get(part);
      }
    });
  }
  return root;
}

/** @param {any} node @returns {any} a handle of the File System Access API */
const handleOf = (node) =>
  node instanceof File
    ? { kind: "file", name: node.name, getFile: async () => node }
    : {
        kind: "directory",
        name: node.name,
        async getFileHandle(/** @type {string} */ name) {
          const child = node.children.get(name);
          if (!child) throw new DOMException("missing", "NotFoundError");
          if (!(child instanceof File)) throw new DOMException("a folder", "TypeMismatchError");
          return handleOf(child);
        },
        async getDirectoryHandle(/** @type {string} */ name) {
          return handleOf(node.children.get(name));
        },
        async *values() {
          for (const child of node.children.values()) yield handleOf(child);
        },
      };

/** @param {any} node @returns {any} an entry of a drop, which lists at most two children at once */
const entryOf = (node) =>
  node instanceof File
    ? {
        isFile: true,
        isDirectory: false,
        name: node.name,
        file: (/** @type {any} */ done) => done(node),
      }
    : {
        isFile: false,
        isDirectory: true,
        name: node.name,
        createReader() {
          const left = [...node.children.values()].map(entryOf);
          return { readEntries: (/** @type {any} */ done) => done(left.splice(0, 2)) };
        },
      };

describe("sources", () => {
  let folder = "";
  before(() => {
    folder = mkdtempSync(join(tmpdir(), "ckptfmt-sources-"));
    write(delta.files, folder);
  });
  after(() => rmSync(folder, { recursive: true, force: true }));

  test("memory", () => check(memorySource(delta.files)));

  test("a directory", async () => {
    await check(directorySource(folder));
    const { source, path } = await locate(join(folder, delta.path));
    assert.equal(path, delta.path);
    await check(source);
    assert.equal(await directorySource(join(folder, "nowhere")).stat("x"), null);
  });

  test("a directory whose files are links or pipes is refused", async () => {
    const other = mkdtempSync(join(tmpdir(), "ckptfmt-links-"));
    try {
      write(delta.files, other);
      const shard = [...delta.files.keys()].find((path) => path.endsWith(".pack"));
      rmSync(join(other, shard));
      symlinkSync(join(folder, shard), join(other, shard));
      const linked = await openCheckpoint(directorySource(other), delta.path);
      const { problems } = await linked.verify();
      assert.ok(problems.some(({ code }) => code === "UNSAFE_FILE"));
      rmSync(join(other, shard));
      execFileSync("mkfifo", [join(other, shard)]);
      const piped = await openCheckpoint(directorySource(other), delta.path);
      assert.ok((await piped.verify()).problems.some(({ code }) => code === "UNSAFE_FILE"));
      symlinkSync(join(folder, delta.path), join(other, "step-00000009-l0001"));
      await refuses(openCheckpoint(directorySource(other), "step-00000009-l0001"), "UNSAFE_FILE");
    } finally {
      rmSync(other, { recursive: true, force: true });
    }
  });

  test("paths that lead out of a source are refused", async () => {
    for (const path of ["../x", "a//b", "/x", "a\\b", "a/./b", ".tmp-x/y"]) {
      await refuses(memorySource({}).stat(path), "UNSAFE_PATH");
    }
  });

  test("HTTP", async () => {
    const server = await serve(delta.files);
    try {
      await check(httpSource(server.url));
      const packs = server.requests.filter(
        (line) => line.includes(".pack") && line.startsWith("GET"),
      );
      assert.ok(packs.length > 0 && packs.every((line) => / bytes=\d+-\d+$/.test(line)));
      await refuses(openCheckpoint(httpSource(`${server.url}nowhere`)), "NOT_COMMITTED");
      await refuses(openRun(httpSource(server.url)), "STORE_UNSUPPORTED");
    } finally {
      await server.close();
    }
    await refuses(openCheckpoint(httpSource(server.url), delta.path), "STORE_NO_ANSWER");
  });

  test("HTTP servers with faults", async () => {
    for (const [options, code] of /** @type {[any, string][]} */ ([
      [{ status: 500 }, "STORE_IO"],
      [{ status: 403 }, "STORE_ACCESS"],
      [{ wrongRange: true }, "STORE_IO"],
      [{ ignoreRanges: true }, "STORE_UNSUPPORTED"],
    ])) {
      const server = await serve(delta.files, options);
      try {
        const opening = openCheckpoint(httpSource(server.url), delta.path).then((checkpoint) =>
          checkpoint.verify({ failFast: true }),
        );
        await refuses(opening, code);
      } finally {
        await server.close();
      }
    }
  });

  test("HTTP with headers and a listing", async () => {
    const server = await serve(run.files, { requireToken: "Bearer x" });
    try {
      const listing = memorySource(run.files);
      const source = httpSource(server.url, {
        headers: { Authorization: "Bearer x" },
        list: (path) => listing.list(path),
      });
      const opened = await openRun(source);
      assert.equal(opened.checkpoints.length, (await openRun(listing)).checkpoints.length);
    } finally {
      await server.close();
    }
  });

  test("chosen files, with and without a common folder", async () => {
    const list = [...delta.files].map(([path, bytes]) => {
      const file = new File([bytes], path.slice(path.lastIndexOf("/") + 1));
      Object.defineProperty(file, "webkitRelativePath", { value: `chosen/${path}` });
      return file;
    });
    await check(fileListSource(list));
  });

  test("dropped folders", async () => {
    const root = asTree(delta.files);
    const items = [{ kind: "file", webkitGetAsEntry: () => entryOf(root) }];
    await check(await dropSource(/** @type {any} */ ({ items, files: [] })));
    const several = [...root.children.values()].map((child) => ({
      kind: "file",
      webkitGetAsEntry: () => entryOf(child),
    }));
    await check(await dropSource(/** @type {any} */ ({ items: several, files: [] })));
  });

  test("handles of folders", async () => {
    const source = handleSource(handleOf(asTree(delta.files)));
    await check(source);
    assert.ok((await source.list("")).some(({ kind }) => kind === "folder"));
    assert.equal(await source.stat("nowhere/x"), null);
  });
});
