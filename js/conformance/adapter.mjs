#!/usr/bin/env node
// @ts-check
/**
 * The adapter between the conformance suite and this package: `describe`, `serve`, or a kind.
 *
 * @module
 */
import { readFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { createInterface } from "node:readline";
import { checkCursor } from "../src/cursor.js";
import {
  parseDocument,
  parseLabels,
  parseLaunchFile,
  parseRegister,
  parseRun,
  parseWriterFile,
} from "../src/documents.js";
import { parsePacked, parsePackedExactly, parseStrings } from "../src/columns.js";
import { checkTilings, parseIndex } from "../src/indexes.js";
import {
  Blake3,
  CkptError,
  blake3,
  loadBlake3,
  openCheckpoint,
  openRun,
  parseTree,
  toTagged,
} from "../src/index.js";
import { openEnvelope, parseMsgpack } from "../src/msgpack.js";
import { locate } from "../src/node.js";
import { parsePart } from "../src/parts.js";
import { headerNbytesOf, parseHeader } from "../src/shards.js";
import { toHex } from "../src/text.js";
import { checkDocuments } from "../src/verify.js";

const { version } = JSON.parse(readFileSync(new URL("../package.json", import.meta.url), "utf8"));

const FORMS = [
  "run",
  "launch",
  "manifest",
  "abort",
  "tombstone",
  "pins",
  "failure",
  "labels",
  "ledger",
  "witness",
  "healing",
  "index",
  "part",
  "packed_document",
  "shard",
  "cursor",
  "tree",
  "msgpack",
  "packed",
  "strings",
];

/** The profiles of the specification; of pipelines and loaders the form, but not the continuation. */
const PROFILES = [
  "R-core",
  "R-validate",
  "R-delta",
  "R-run",
  "R-context",
  "caches",
  "frozen",
  "healing",
  "labels",
  "ledger",
  "loaders",
  "mixtures",
  "pipelines",
  "prediction",
  "suspect",
  "witness",
];

const CLAIM = {
  name: "ckptfmt-js",
  version,
  spec: ["0.10", "1.0"],
  roles: ["reader"],
  profiles: PROFILES,
  features: [
    "adam",
    "caches",
    "cast",
    "classes",
    "deltas",
    "difference",
    "frozen",
    "gradient",
    "labels",
    "planes",
    "sgd",
    "sparse",
    "suspect",
    "xor",
    "launch",
    ...FORMS.map((form) => `parse-${form}`),
  ],
  kinds: ["open", "read", "reshard", "context", "parse"],
  serve: true,
};

class Unsupported extends Error {
  /** @param {string} feature */
  constructor(feature) {
    super(feature);
    this.feature = feature;
  }
}

/** @param {string} input @param {any} request */
async function openAt(input, request) {
  const { source, path } = await locate(input);
  const isRun =
    (await source.stat(`${path}/run.json`)) !== null ||
    (await source.stat(`${path}/launches`)) !== null ||
    ((await source.stat(`${path}/manifest.json`)) === null &&
      (await source.list(path)).some(({ name }) => /^step-/.test(name)));
  const bases = await Promise.all(
    (request.bases ?? []).map((/** @type {string} */ base) => locate(resolve(input, base))),
  );
  const options = { digest: request.digest, bases };
  if (isRun) return (await openRun(source, path)).open(undefined, options);
  return openCheckpoint(source, path, options);
}

/** @param {import("../src/index.js").Checkpoint} checkpoint @param {string} key */
async function digestOf(checkpoint, key) {
  const { dtype, shape } = checkpoint.tensor(key);
  const hash = new Blake3();
  let first16 = null;
  for await (const { data } of checkpoint.streamTensor(key)) {
    const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    first16 ??= toHex(bytes.subarray(0, 16));
    hash.update(bytes);
  }
  return { dtype, shape, blake3: toHex(hash.digest()), first16: first16 ?? "" };
}

/** @param {import("../src/index.js").Checkpoint} checkpoint @param {any} request */
async function readTensors(checkpoint, request) {
  await checkDocuments(checkpoint, async (work) => {
    await checkpoint.guard(work);
  });
  /** @type {Record<string, unknown>} */
  const tensors = {};
  for (const key of checkpoint.tensors.keys()) tensors[key] = await digestOf(checkpoint, key);
  for (const { field, name, scope } of checkpoint.leaves) {
    await checkpoint.leafTree(field, name, { scope });
  }
  for (const { name, scope } of checkpoint.streams) await checkpoint.stream(name, { scope });
  if (request.verify === "all") {
    const { problems, bases } = await checkpoint.verify();
    // The suite asks for the faults of bases by themselves, too.
    const [first] = [...problems, ...bases.flatMap((base) => base.problems)];
    if (first) throw first;
  }
  return { tensors };
}

/** @param {string} input @param {any} request */
async function open(input, request) {
  if (request.launch === true) {
    const { source, path } = await locate(input);
    const run = await openRun(source, path);
    const choice = await run.chooseNext();
    return {
      launch: {
        resume_from: choice.resumeFrom,
        chosen_by: choice.chosenBy,
        // A launch record that was passed over is no directory.
        passed_over: choice.passedOver.flatMap(({ name }) => (name === null ? [] : [name])),
      },
    };
  }
  return readTensors(await openAt(input, request), request);
}

/**
 * @param {import("../src/index.js").Checkpoint} checkpoint
 * @param {string} tensor
 * @param {any} box
 */
async function boxDigest(checkpoint, tensor, box) {
  const { data } = await checkpoint.readTensor(tensor, { box });
  return toHex(blake3(new Uint8Array(data.buffer, data.byteOffset, data.byteLength)));
}

/** @param {unknown} value @returns {any} a value of msgpack as tagged JSON */
function tagged(value) {
  if (value instanceof Map) {
    return { dict: [...value].map(([key, member]) => [key, tagged(member)]) };
  }
  if (Array.isArray(value)) return { list: value.map(tagged) };
  if (value instanceof Uint8Array) return { bytes: toHex(value) };
  return typeof value === "bigint" ? { int: String(value) } : value;
}

/** @param {string} input @param {{form: string, file: string}} request */
function parse(input, { form, file }) {
  if (!FORMS.includes(form)) throw new Unsupported(`parse-${form}`);
  const bytes = new Uint8Array(readFileSync(join(input, file)));
  const name = file.slice(file.lastIndexOf("/") + 1);
  switch (form) {
    case "run":
      parseRun(bytes);
      break;
    case "launch":
    case "ledger":
    case "witness":
    case "healing":
      parseLaunchFile(bytes, form, name, null);
      break;
    case "labels":
      parseLabels(bytes, name, null);
      break;
    case "manifest":
    case "abort":
    case "tombstone": {
      const { content } = parseRegister(bytes);
      if (content.type !== form) parseDocument(bytes, [form]);
      break;
    }
    case "failure":
    case "pins":
      parseWriterFile(bytes, form, name);
      break;
    case "index":
      checkTilings(parseIndex(bytes));
      break;
    case "part":
      parsePart(bytes);
      break;
    case "packed_document":
      openEnvelope(bytes);
      break;
    case "shard": {
      const nbytes = headerNbytesOf(bytes.subarray(0, 8), bytes.length);
      parseHeader(bytes.subarray(0, nbytes), bytes.length);
      break;
    }
    case "cursor":
      checkCursor(parseTree(bytes));
      break;
    case "tree":
      return { value: toTagged(parseTree(bytes)) };
    case "msgpack":
      return { value: tagged(parseMsgpack(bytes)) };
    case "packed":
      return {
        value: tagged((parsePacked(parseMsgpack(bytes)), parsePackedExactly(parseMsgpack(bytes)))),
      };
    case "strings":
      return { value: tagged(parseStrings(parseMsgpack(bytes))) };
  }
  return {};
}

/** @param {string} kind @param {string} input @param {any} request */
async function answerOf(kind, input, request) {
  if (kind === "open") return open(input, request);
  if (kind === "read") {
    return { blake3: await boxDigest(await openAt(input, request), request.tensor, request.box) };
  }
  if (kind === "reshard") {
    const checkpoint = await openAt(input, request);
    const digests = [];
    for (const box of request.boxes) digests.push(await boxDigest(checkpoint, request.tensor, box));
    return { digests };
  }
  if (kind === "parse") return parse(input, request);
  if (kind === "context") {
    for (const feature of ["samples", "tickets", "loader"]) {
      if (feature in request) throw new Unsupported(feature);
    }
    return { tree: toTagged(parseTree(new Uint8Array(readFileSync(join(input, "tree.msgpack"))))) };
  }
  throw new Unsupported(kind);
}

/** @param {string} kind @param {string} input @param {any} request */
async function respond(kind, input, request) {
  try {
    return { exit: 0, answer: await answerOf(kind, input, request) };
  } catch (error) {
    if (error instanceof Unsupported) return { exit: 11, answer: { feature: error.feature } };
    if (!(error instanceof CkptError)) throw error;
    const phase = kind === "parse" || request.launch ? "open" : (error.phase ?? "open");
    return { exit: 10, answer: { error: error.code, where: error.where, phase } };
  }
}

/**
 * Print a line of JSON. A BigInt becomes a number: the suite wants the `maxlen` of a deque so.
 *
 * @param {unknown} value
 */
function print(value) {
  const text = JSON.stringify(value, (_, member) =>
    typeof member === "bigint" ? `\u0001integer:${member}` : member,
  );
  process.stdout.write(`${text.replace(/"\\u0001integer:(-?\d+)"/g, "$1")}\n`);
}

async function main() {
  const [kind, ...rest] = process.argv.slice(2);
  if (kind === "describe") {
    print(CLAIM);
    return;
  }
  await loadBlake3();
  if (kind === "serve") {
    print({ ready: true });
    for await (const line of createInterface({ input: process.stdin })) {
      const question = JSON.parse(line);
      try {
        const { exit, answer } = await respond(
          question.kind,
          question.input,
          question.request ?? {},
        );
        print({ id: question.id, exit, answer });
      } catch (error) {
        print({ id: question.id, exit: 1, message: String(/** @type {Error} */ (error).stack) });
      }
    }
    return;
  }
  const option = (/** @type {string} */ name) => rest[rest.indexOf(name) + 1];
  const request = rest.includes("--request")
    ? JSON.parse(readFileSync(option("--request"), "utf8"))
    : {};
  const { exit, answer } = await respond(kind, option("--input"), request);
  print(answer);
  process.exitCode = exit;
}

await main();
