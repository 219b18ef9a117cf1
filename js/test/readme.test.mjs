// @ts-check
/** Each example of the README runs. @module */
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { promisify } from "node:util";
import { after, before, describe, test } from "node:test";
import { fileURLToPath } from "node:url";
import { randomFillSync } from "node:crypto";
import { blake3 } from "../src/blake3.js";
import { canonicalJson } from "../src/json.js";
import { digestText } from "../src/text.js";
import { SHARD, makeCheckpoint } from "./make.mjs";
import { serve } from "./server.mjs";

const HERE = fileURLToPath(new URL(".", import.meta.url));
const text = readFileSync(join(HERE, "../README.md"), "utf8");
const examples = [...text.matchAll(/```js\n([\s\S]*?)```/g)].map(([, code]) => code);
/** What each example prints, in the order of the README. */
const printed = [
  /weights\/w float32 \[ 3, 4 \]\nfloat32 \[ 2, 2 \]/,
  /\[ 3, 4 \] Float32Array/,
  /step-00000003-l0001 committed/,
  /48 of 48 bytes\ntrue \[\]/,
  /launch 1 from null\nstep-00000003-l0001 lineage/,
  /NOT_COMMITTED NOT_COMMITTED at \./,
];

/** A stand-in for the page onto which `my-run` is dropped. */
const PAGE = `
import { readFileSync, readdirSync, statSync } from "node:fs";
const entry = (path, name) => statSync(path).isDirectory()
  ? { isFile: false, isDirectory: true, name, createReader() {
      const left = readdirSync(path).map((own) => entry(path + "/" + own, own));
      return { readEntries: (done) => done(left.splice(0)) };
    } }
  : { isFile: true, isDirectory: false, name,
      file: (done) => done(new File([readFileSync(path)], name)) };
globalThis.document = { addEventListener(kind, listener) {
  if (kind === "drop") {
    const items = [{ kind: "file", webkitGetAsEntry: () => entry("my-run", "my-run") }];
    listener({ preventDefault() {}, dataTransfer: { items, files: [] } });
  }
} };
`;

/** @param {any} signed */
const document = (signed) =>
  canonicalJson({
    digest: digestText(blake3(new TextEncoder().encode(canonicalJson(signed)))),
    signed,
  });

describe("the examples of the README", () => {
  let folder = "";
  /** @type {Map<string, Uint8Array>} */
  const files = new Map();
  before(() => {
    // Below the package's folder, so that the package finds itself by its name.
    folder = mkdtempSync(join(HERE, "tmp-"));
    const bytes = randomFillSync(new Uint8Array(48));
    const head = {
      format_version: "1.0",
      features: { reader: [], writer: [] },
      run_id: "ab".repeat(16),
    };
    const records = {
      "run.json": { ...head, type: "run" },
      "launches/0001.json": {
        ...head,
        type: "launch",
        launch: 1,
        nonce: "00".repeat(16),
        chosen_by: "lineage",
        resume_from: null,
      },
    };
    const inRun = makeCheckpoint([{ name: "w", shape: [3, 4] }], () => blake3(bytes), {
      run_id: head.run_id,
      launch: 1,
      step: 3,
    });
    for (const [path, content] of inRun.files) files.set(`step-00000003-l0001/${path}`, content);
    files.set(`step-00000003-l0001/${SHARD}`, Buffer.concat([inRun.header, bytes]));
    for (const [path, signed] of Object.entries(records))
      files.set(path, Buffer.from(document(signed)));
    for (const [path, content] of files) {
      const target = join(folder, "my-run", path);
      mkdirSync(dirname(target), { recursive: true });
      writeFileSync(target, content);
    }
    writeFileSync(join(folder, "page.mjs"), PAGE);
  });
  after(() => rmSync(folder, { recursive: true, force: true }));

  test("all are tested", () => assert.equal(examples.length, printed.length));

  examples.forEach((code, at) => {
    test(`example ${at + 1}`, async () => {
      const server = await serve(files);
      try {
        const file = join(folder, `example${at}.mjs`);
        writeFileSync(file, code.replace("https://example.org/my-run/", server.url));
        const { stdout } = await promisify(execFile)(
          process.execPath,
          ["--import", "./page.mjs", file],
          { cwd: folder },
        );
        assert.match(stdout, printed[at]);
      } finally {
        await server.close();
      }
    });
  });
});
