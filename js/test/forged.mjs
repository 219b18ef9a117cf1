// @ts-check
/**
 * A corpus of forged checkpoints: vectors with seeded mutations, read by this package and by
 * another implementation, which must agree on what is accepted, and on the bytes of every tensor.
 *
 *     node js/test/forged.mjs --count 2000 --seed 1 [--other 'COMMAND'] [--codes] [--keep DIR]
 *         [--areas encodings,prediction] [--kinds 8,9]
 *
 * COMMAND is an adapter of the conformance suite with `serve`; by default the reference
 * implementation, run by the Python of `.venv` beside `js/`.
 *
 * @module
 */
import { spawn } from "node:child_process";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { createInterface } from "node:readline";
import { deflateSync } from "node:zlib";
import { fileURLToPath } from "node:url";
import { blake3 } from "../src/blake3.js";
import { parsePacked } from "../src/columns.js";
import { canonicalJson } from "../src/json.js";
import { openEnvelope, parseMsgpack } from "../src/msgpack.js";
import { digestText } from "../src/text.js";
import { decodeBlock } from "../src/encodings.js";
import { Checkpoint, CkptError, memorySource, openCheckpoint } from "../src/index.js";
import { blockNbytes } from "../src/parts.js";
import { dumpMsgpack, pack, randomFrom, readCases } from "./vectors.mjs";

/** @typedef {ReturnType<typeof randomFrom>} Random */
/** @typedef {Map<string, Uint8Array>} Files */

/** @param {string} text @returns {Uint8Array} */
const bytesOf = (text) => new TextEncoder().encode(text);

/** Write a msgpack document. @param {any} members @param {Random} random */
function dumpDocument(members, random) {
  const content = dumpMsgpack(members);
  const signed = new Uint8Array(deflateSync(content, { level: random.pick([0, 0, 6]) }));
  const digest = blake3(signed);
  const document = dumpMsgpack(
    new Map(
      Object.entries({
        digest,
        nbytes: content.length,
        signed,
      }),
    ),
  );
  return { digest, document };
}

/** @param {any} signed a JSON document's content */
const dumpJson = (signed) => {
  const digest = digestText(blake3(bytesOf(canonicalJson(signed))));
  return bytesOf(canonicalJson({ digest, signed }));
};

/** The documents of a checkpoint in memory, to be changed and written again. */
class Forge {
  /** @param {Files} files @param {string} folder @param {Random} random */
  constructor(files, folder, random) {
    this.files = files;
    this.prefix = folder === "" ? "" : `${folder}/`;
    this.random = random;
    this.manifest = JSON.parse(
      Buffer.from(/** @type {Uint8Array} */ (files.get(`${this.prefix}manifest.json`))).toString(
        "utf8",
      ),
    ).signed;
    this.index = this.#read(this.manifest.index.name);
    this.parts = Array.from({ length: this.manifest.writer_count }, (_, writer) =>
      this.#read(this.#partName(writer)),
    );
  }

  /** @param {number} writer */
  #partName(writer) {
    return `parts/${this.manifest.attempt}-${String(writer).padStart(5, "0")}.msgpack`;
  }

  /** @param {string} name @returns {Map<string, any>} */
  #read(name) {
    const bytes = /** @type {Uint8Array} */ (this.files.get(this.prefix + name));
    return /** @type {any} */ (parseMsgpack(openEnvelope(bytes).content));
  }

  /** Write all documents, with digests and sizes made to fit. */
  write() {
    const digests = [];
    const sizes = [];
    for (const [writer, part] of this.parts.entries()) {
      const { digest, document } = dumpDocument(part, this.random);
      this.files.set(this.prefix + this.#partName(writer), document);
      digests.push(digest);
      sizes.push(document.length);
    }
    const table = this.index.get("parts");
    if (table instanceof Map && table.has("digest") && table.has("nbytes")) {
      table.set("digest", new Uint8Array(Buffer.concat(digests)));
      table.set("nbytes", pack(sizes));
    }
    const { digest, document } = dumpDocument(this.index, this.random);
    const { name } = this.manifest.index;
    this.files.set(this.prefix + name, document);
    this.manifest.index.digest = digestText(digest);
    this.manifest.index.nbytes = document.length;
    this.files.set(`${this.prefix}manifest.json`, dumpJson(this.manifest));
  }
}

/* --------------------------------------------------------------------------- mutations ---- */

/** Change bytes without any rule. @param {Uint8Array} bytes @param {Random} random */
function scramble(bytes, random) {
  const copy = new Uint8Array(bytes);
  const at = random.below(Math.max(1, copy.length));
  const kind = random.below(6);
  if (copy.length === 0) return { bytes: Uint8Array.of(random.below(256)), note: "a byte added" };
  if (kind < 3) {
    copy[at] ^= 1 << random.below(8);
    return { bytes: copy, note: `bit of byte ${at} flipped` };
  }
  if (kind === 3) return { bytes: copy.slice(0, at), note: `truncated to ${at}` };
  if (kind === 4) {
    const longer = new Uint8Array(copy.length + 1);
    longer.set(copy.subarray(0, at));
    longer[at] = random.below(256);
    longer.set(copy.subarray(at), at + 1);
    return { bytes: longer, note: `a byte inserted at ${at}` };
  }
  copy.fill(random.pick([0, 255]), at, at + 1 + random.below(8));
  return { bytes: copy, note: `bytes at ${at} filled` };
}

/** Change a value somewhere in a tree of values. @param {any} value @param {Random} random
 *  @returns {{value: any, note: string}} */
function mutate(value, random) {
  if (
    value instanceof Map ||
    Array.isArray(value) ||
    (value !== null && typeof value === "object" && !(value instanceof Uint8Array))
  ) {
    const isMap = value instanceof Map;
    const keys = isMap ? [...value.keys()] : Object.keys(value);
    if (keys.length === 0 || random.below(12) === 0) {
      if (Array.isArray(value)) {
        const copy = value.slice();
        const kind = random.below(3);
        if (kind === 0 && copy.length > 0) copy.splice(random.below(copy.length), 1);
        else if (kind === 1 && copy.length > 1) copy.reverse();
        else copy.push(copy.length > 0 ? random.pick(copy) : random.pick([0, "x", null]));
        return { value: copy, note: "list changed" };
      }
      const copy = isMap ? new Map(value) : { ...value };
      const key = keys.length > 0 && random.below(2) ? random.pick(keys) : null;
      if (key === null) isMap ? copy.set("extra", 1) : (copy.extra = 1);
      else isMap ? copy.delete(key) : delete copy[key];
      return { value: copy, note: key === null ? "member added" : `${key} removed` };
    }
    const key = random.pick(keys);
    const inner = mutate(isMap ? value.get(key) : value[key], random);
    if (isMap) {
      return { value: new Map(value).set(key, inner.value), note: `${key}: ${inner.note}` };
    }
    if (Array.isArray(value)) {
      const copy = value.slice();
      copy[Number(key)] = inner.value;
      return { value: copy, note: `${key}: ${inner.note}` };
    }
    return { value: { ...value, [key]: inner.value }, note: `${key}: ${inner.note}` };
  }
  if (value instanceof Uint8Array) {
    if (random.below(3) && value.length > 0) {
      const copy = new Uint8Array(value);
      const at = random.below(copy.length);
      copy[at] = random.below(2)
        ? copy[at] ^ (1 << random.below(8))
        : random.pick([0, 1, 2, 127, 255]);
      return { value: copy, note: `byte ${at} is ${copy[at]}` };
    }
    return { value: scramble(value, random).bytes, note: "bytes scrambled" };
  }
  if (typeof value === "number" || typeof value === "bigint") {
    const other = random.pick([
      Number(value) + 1,
      Math.max(0, Number(value) - 1),
      0,
      1,
      2 ** 32,
      Number(value) * 2,
      null,
      "1",
    ]);
    return { value: other, note: `${value} is ${other}` };
  }
  if (typeof value === "string") {
    const at = random.below(value.length + 1);
    const other = random.pick([
      value.slice(0, at),
      `${value.slice(0, at)}x${value.slice(at)}`,
      value.toUpperCase(),
      "",
      "\u00e9",
      "e\u0301",
      `${value}\u0000`,
      7,
      value.replace(/[0-9]/, "9"),
    ]);
    return { value: other, note: `string is ${JSON.stringify(other).slice(0, 40)}` };
  }
  return { value: random.pick([null, true, false, 0, "x"]), note: "value replaced" };
}

/** Replace a packed column's entry by another integer. @param {Map<string, any>} document
 *  @param {Random} random */
function mutateColumn(document, random) {
  const tables = [...document].filter(([, table]) => table instanceof Map && table.size > 0);
  if (tables.length === 0) return null;
  const [tableName, table] = random.pick(tables);
  const columns = [...table].filter(
    ([, column]) =>
      Array.isArray(column) &&
      column.length === 2 &&
      typeof column[0] === "number" &&
      column[1] instanceof Uint8Array &&
      column[1].length > 0,
  );
  if (columns.length === 0) return null;
  const [name, column] = random.pick(columns);
  const numbers = Array.from(parsePacked(column));
  const at = random.below(numbers.length);
  const before = numbers[at];
  const kind = random.below(8);
  if (kind === 0) numbers.splice(at, 1);
  else if (kind === 1) numbers.splice(at, 0, before);
  else
    numbers[at] = [before + 1, Math.max(0, before - 1), 0, before * 2, before + 2, 4096][kind - 2];
  table.set(name, pack(numbers));
  return `${tableName}.${name}[${at}] of ${before}: kind ${kind}`;
}

/** Change a tree of a leaf or stream. @param {Map<string, any>} part @param {Random} random */
function mutateTree(part, random) {
  const [table, column] = random.pick([
    ["leaves", "value"],
    ["streams", "state"],
    ["groups", "rule"],
  ]);
  const trees = part.get(table)?.get(column);
  if (!Array.isArray(trees) || trees.length === 0) return null;
  const at = random.below(trees.length);
  let tree;
  try {
    tree = parseMsgpack(trees[at]);
  } catch {
    return null;
  }
  const { value, note } = random.below(4)
    ? mutate(tree, random)
    : { value: null, note: "scrambled" };
  trees[at] = note === "scrambled" ? scramble(trees[at], random).bytes : dumpMsgpack(value);
  return `${table} tree ${at}: ${note}`;
}

/**
 * Change bytes of a file of tensors, and perhaps the digests that cover them.
 *
 * @param {Forge} forge @param {Files} files @param {Random} random
 */
async function mutateBytes(forge, files, random) {
  const source = memorySource(files);
  /** @type {Checkpoint} */
  let checkpoint;
  try {
    checkpoint = await openCheckpoint(source, forge.prefix.slice(0, -1));
  } catch {
    return null;
  }
  const writer = random.below(checkpoint.manifest.writer_count);
  const part = await checkpoint.part(writer).catch(() => null);
  if (part === null) return null;
  const rows = Array.from({ length: part.extents.count }, (_, row) => row).filter(
    (row) => part.extents.nbytes[row] > 0,
  );
  if (rows.length === 0) return null;
  const row = random.pick(rows);
  const { extents, encodings } = part;
  const path = forge.prefix + part.files.name[extents.file[row]];
  const file = new Uint8Array(/** @type {Uint8Array} */ (files.get(path)));
  const encoding = encodings[extents.encoding[row]];
  const box = extents.box[row];
  const block = random.below(extents.blockCount[row]);
  const own = extents.blockBegin[row] + block;
  let at = extents.byteBegin[row];
  let nbytes = 0;
  if (encoding === "raw") {
    at += block * part.origin.block_nbytes;
    nbytes = blockNbytes(part, box, own);
  } else {
    const first = extents.storedBegin[row];
    for (let k = 0; k < block; k += 1) at += part.stored.nbytes[first + k];
    nbytes = part.stored.nbytes[first + block];
  }
  const changes = 1 + random.below(3);
  for (let k = 0; k < changes; k += 1) {
    const place = at + random.below(nbytes);
    file[place] = random.below(3) ? file[place] ^ (1 << random.below(8)) : random.below(256);
  }
  files.set(path, file);
  const isFitted = random.below(4) > 0;
  if (!isFitted) return `a byte of block ${own} of ${encoding} changed`;
  const document = forge.parts[writer];
  const stored = file.slice(at, at + nbytes);
  const content = new Uint8Array(document.get("digests"));
  const place = 32 * (part.digestBegin[box] + own);
  if (encoding === "raw") content.set(blake3(stored), place);
  else {
    const table = document.get("stored");
    const digests = new Uint8Array(table.get("digest"));
    digests.set(blake3(stored), 32 * (extents.storedBegin[row] + block));
    table.set("digest", digests);
    // Where the forged bytes decode, the content's digest is made to fit as well.
    const dtype = part.dtypes[part.tensors.dtype[part.boxTensor[box]]];
    try {
      const base =
        extents.predicted[row] === 1 || encoding === "planes" || encoding === "gradient"
          ? null
          : await baseBlock(checkpoint, part, box, own, extents.reference[row]);
      if (extents.predicted[row] !== 1) {
        content.set(
          blake3(decodeBlock(encoding, stored, blockNbytes(part, box, own), dtype, base)),
          place,
        );
      }
    } catch (error) {
      if (!(error instanceof CkptError)) throw error;
    }
  }
  document.set("digests", content);
  return `a byte of block ${own} of ${encoding} changed, with digests`;
}

/** @param {any} checkpoint @param {any} part @param {number} box @param {number} block
 *  @param {number} reference */
async function baseBlock(checkpoint, part, box, block, reference) {
  const base = await checkpoint.findBase({ checkpoint, part, box }, reference);
  const step = await checkpoint.blocks.read(base, block, block + 1).next();
  return step.value.bytes.slice();
}

/**
 * Make one forged case.
 *
 * @param {any} base a case of the suite @param {Random} random
 * @param {number[]} kinds of mutations to choose from
 * @returns {Promise<{files: Files, note: string} | null>}
 */
async function forgeCase(base, random, kinds) {
  /** @type {Files} */
  const files = new Map(base.files);
  const path = base.path === "." ? "" : base.path;
  const kind = random.pick(kinds);
  const names = [...files.keys()];
  if (kind === 0) {
    const name = random.pick(names);
    const { bytes, note } = scramble(/** @type {Uint8Array} */ (files.get(name)), random);
    files.set(name, bytes);
    return { files, note: `${name}: ${note}` };
  }
  if (kind === 1) {
    const name = random.pick(names);
    files.delete(name);
    if (random.below(2)) files.set(random.pick(names), new Uint8Array(base.files.get(name)));
    return { files, note: `${name} is missing` };
  }
  const folders = names
    .filter((name) => name.endsWith("manifest.json"))
    .map((name) => name.slice(0, -"/manifest.json".length + (name === "manifest.json" ? 1 : 0)));
  const folder = folders.includes(path) || folders.length === 0 ? path : random.pick(folders);
  /** @type {Forge} */
  let forge;
  try {
    forge = new Forge(files, folder === "manifest.json" ? "" : folder, random);
  } catch {
    return null;
  }
  let note = null;
  try {
    if (kind === 2) {
      const { value, note: own } = mutate(forge.manifest, random);
      forge.manifest = value;
      note = `manifest: ${own}`;
      files.set(`${forge.prefix}manifest.json`, dumpJson(value));
      return { files, note };
    }
    if (kind === 3) {
      const { value, note: own } = mutate(forge.index, random);
      forge.index = value;
      note = `index: ${own}`;
    } else if (kind === 4) {
      const writer = random.below(forge.parts.length);
      const { value, note: own } = mutate(forge.parts[writer], random);
      forge.parts[writer] = value;
      note = `part ${writer}: ${own}`;
    } else if (kind === 5) {
      note = mutateColumn(forge.index, random);
    } else if (kind < 8) {
      note =
        kind === 6 || random.below(2)
          ? mutateColumn(random.pick(forge.parts), random)
          : mutateTree(random.pick(forge.parts), random);
    } else note = await mutateBytes(forge, files, random);
    if (note === null) return null;
    forge.write();
  } catch (error) {
    if (error instanceof CkptError || error instanceof TypeError || error instanceof RangeError)
      return null;
    throw error;
  }
  return { files, note };
}

/* ----------------------------------------------------------------------------- servers ---- */

/** An adapter of the suite that serves. */
export class Server {
  /** @param {string[]} command */
  constructor(command) {
    this.process = spawn(command[0], command.slice(1), { stdio: ["pipe", "pipe", "ignore"] });
    this.lines = createInterface({ input: this.process.stdout })[Symbol.asyncIterator]();
    this.count = 0;
  }

  async ready() {
    const line = await this.lines.next();
    if (line.done || !JSON.parse(line.value).ready) throw new Error("the adapter isn't ready");
  }

  /** @param {string} input @param {any} request */
  async ask(input, request) {
    this.count += 1;
    this.process.stdin.write(
      `${JSON.stringify({ id: this.count, kind: "open", input, request })}\n`,
    );
    const line = await this.lines.next();
    if (line.done) throw new Error("the adapter ended");
    return JSON.parse(line.value);
  }

  close() {
    this.process.stdin.end();
  }
}

const HERE = dirname(fileURLToPath(import.meta.url));
export const REFERENCE = [
  join(HERE, "../../.venv/bin/python"),
  "-c",
  "import sys; from ckptfmt_conformance.protocol import run_as_command; " +
    "from ckptfmt_conformance.adapters.reference import Reference; " +
    "sys.exit(run_as_command(Reference(), sys.argv[1:]))",
  "serve",
];
export const OWN = [process.execPath, join(HERE, "../conformance/adapter.mjs"), "serve"];

/** @param {any} answer @returns {string} what decides whether two answers agree */
function verdict(answer) {
  if (answer.exit === 0) {
    const tensors = Object.entries(answer.answer.tensors).sort(([a], [b]) => (a < b ? -1 : 1));
    return `accepted ${tensors
      .map(
        ([name, own]) => `${name}=${own.dtype}[${own.shape}]${own.blake3.replace("blake3:", "")}`,
      )
      .join(" ")}`;
  }
  return answer.exit === 10 ? "rejected" : `no answer: ${answer.message ?? answer.exit}`;
}

/**
 * Forge cases and compare the two implementations.
 *
 * @param {object} options
 * @param {number} options.count @param {number} options.seed
 * @param {string[]} [options.other] command of the other adapter
 * @param {string} [options.keep] folder for cases on which the two disagree
 * @param {string[]} [options.areas] areas of the vectors, by default all
 * @param {number[]} [options.kinds] kinds of mutations, by default all
 */
export async function compare({ count, seed, other = REFERENCE, keep, areas, kinds }) {
  const cases = readCases(areas).filter(
    (own) =>
      own.kind === "open" &&
      own.expect.outcome === "accept" &&
      own.spec === "1.0" &&
      own.request.launch === undefined &&
      own.request.bases === undefined &&
      [...own.files.values()].reduce((sum, bytes) => sum + bytes.length, 0) < 300_000,
  );
  const random = randomFrom(seed);
  const servers = [new Server(OWN), new Server(other)];
  for (const server of servers) await server.ready();
  const folder = mkdtempSync(join(tmpdir(), "ckptfmt-forged-"));
  const found = {
    count: 0,
    accepted: 0,
    disagreements: /** @type {any[]} */ ([]),
    codes: /** @type {any[]} */ ([]),
  };
  try {
    while (found.count < count) {
      const base = random.pick(cases);
      const forged = await forgeCase(base, random, kinds ?? [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
      if (forged === null) continue;
      const id = String(found.count);
      const root = join(folder, id);
      for (const [path, bytes] of forged.files) {
        const target = join(root, path);
        mkdirSync(dirname(target), { recursive: true });
        writeFileSync(target, bytes);
      }
      // For a run, the suite doesn't say what is verified beside the checkpoint that is opened.
      const isRun = base.path === "." && base.files.has("run.json");
      const request = { ...base.request, verify: isRun ? undefined : "all" };
      delete request.digest;
      const input = base.path === "." ? root : join(root, base.path);
      const [own, theirs] = await Promise.all(servers.map((server) => server.ask(input, request)));
      found.count += 1;
      const entry = { base: base.id, note: forged.note, own: own.answer, other: theirs.answer };
      if (verdict(own) === "rejected") {
        if (own.answer.error !== theirs.answer?.error && verdict(theirs) === "rejected") {
          found.codes.push({ ...entry, own: own.answer.error, other: theirs.answer.error });
        }
      } else found.accepted += 1;
      if (verdict(own) !== verdict(theirs)) {
        const isKept = keep !== undefined;
        found.disagreements.push({
          ...entry,
          own: verdictText(own),
          other: verdictText(theirs),
          id,
        });
        if (isKept) {
          for (const [path, bytes] of forged.files) {
            const target = join(keep, id, path);
            mkdirSync(dirname(target), { recursive: true });
            writeFileSync(target, bytes);
          }
        }
      }
      rmSync(root, { recursive: true, force: true });
    }
  } finally {
    for (const server of servers) server.close();
    rmSync(folder, { recursive: true, force: true });
  }
  return found;
}

/** @param {any} answer */
const verdictText = (answer) =>
  answer.exit === 10
    ? `${answer.answer.error} ${answer.answer.where}`
    : verdict(answer).slice(0, 200);

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const option = (/** @type {string} */ name, /** @type {string} */ otherwise) => {
    const at = process.argv.indexOf(name);
    return at < 0 ? otherwise : process.argv[at + 1];
  };
  const keep = option("--keep", "");
  const command = option("--other", "");
  const areas = option("--areas", "");
  const kinds = option("--kinds", "");
  const found = await compare({
    count: Number(option("--count", "2000")),
    seed: Number(option("--seed", "1")),
    ...(areas === "" ? {} : { areas: areas.split(",") }),
    ...(kinds === "" ? {} : { kinds: kinds.split(",").map(Number) }),
    ...(keep === "" ? {} : { keep }),
    ...(command === "" ? {} : { other: command.split(" ") }),
  });
  for (const entry of found.disagreements) console.log("DISAGREE", JSON.stringify(entry));
  if (process.argv.includes("--codes")) {
    for (const entry of found.codes) console.log("CODE", JSON.stringify(entry));
  }
  console.log(
    `${found.count} forged cases: ${found.accepted} accepted, ${found.disagreements.length} ` +
      `disagreements, ${found.codes.length} refused by both with different codes`,
  );
  process.exitCode = found.disagreements.length > 0 ? 1 : 0;
}
