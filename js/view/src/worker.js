// @ts-check
/** The worker: opens, reads and verifies. The page itself never touches bytes. @module */
import { CkptError } from "../../src/errors.js";
import { boxOf } from "../../src/indexes.js";
import { join, parseCheckpointName, partPath } from "../../src/names.js";
import { extentsOfBox } from "../../src/parts.js";
import { openCheckpoint } from "../../src/checkpoint.js";
import { openRun } from "../../src/run.js";
import { readAhead } from "../../src/sources/ahead.js";
import { blobSource, handleSource } from "../../src/sources/files.js";
import { httpSource } from "../../src/sources/http.js";
import { listingOf } from "./listing.js";
import { Stats } from "./stats.js";
import { childrenOf, lineOf } from "./values.js";

/** @typedef {import("../../src/sources/source.js").Source} Source */
/** @typedef {import("../../src/checkpoint.js").Checkpoint} Checkpoint */
/** @typedef {import("../../src/tree.js").Tree} Tree */
/**
 * Where to read from.
 *
 * @typedef {{kind: "files", files: Map<string, Blob>, name: string}
 *   | {kind: "handle", handle: FileSystemDirectoryHandle} | {kind: "url", url: string}} Origin
 */
/** @typedef {{signal: AbortSignal, report: (progress: any) => void}} Call */

const MOST_FOLDERS = 1000;
const MOST_BOXES = 200;
const MOST_EXTENTS = 50;
const REPORT_MS = 100;
/** Elements of a piece of a summary, so that a cancellation is seen soon. */
const PIECE_NBYTES = 4 * 1024 * 1024;

/** @type {Source | null} */
let source = null;
/** @type {Map<string, Promise<Checkpoint>>} */
const checkpoints = new Map();
/** @type {Map<number, Tree>} */
const nodes = new Map();
let nextNode = 1;

/** @param {Origin} origin @returns {Source} */
function sourceOf(origin) {
  if (origin.kind === "files") return blobSource(origin.files, origin.name);
  if (origin.kind === "handle") return handleSource(origin.handle);
  const list = listingOf(origin.url);
  return httpSource(origin.url, {
    list: (path) =>
      list(path).catch((cause) => {
        throw new CkptError("STORE_UNSUPPORTED", cause.message, {
          where: path || origin.url,
          remedy: "Serve the folder with `ckptfmt view`, or open one checkpoint by its URL.",
          cause,
        });
      }),
  });
}

const aheadSource = () => readAhead(required());

const required = () => /** @type {Source} */ (source);

/** @param {string} path */
async function kindOf(path) {
  for (const [file, kind] of [
    ["run.json", "run"],
    ["manifest.json", "checkpoint"],
  ]) {
    const stat = await required().stat(join(path, file));
    if (stat?.kind === "file") return kind;
  }
  return null;
}

/** @param {string} path @returns {Promise<Checkpoint>} */
function checkpointAt(path) {
  let opening = checkpoints.get(path);
  if (opening === undefined) {
    opening = openCheckpoint(required(), path);
    checkpoints.set(path, opening);
    opening.catch(() => checkpoints.delete(path));
    // Indexes of a few checkpoints are kept, since they may be large.
    for (const oldest of checkpoints.keys()) {
      if (checkpoints.size <= 3) break;
      checkpoints.delete(oldest);
    }
  }
  return opening;
}

/** @param {Tree} tree */
function nodeOf(tree) {
  const line = lineOf(tree);
  if (line.count === 0) return { ...line, id: 0 };
  nodes.set(nextNode, tree);
  nextNode += 1;
  return { ...line, id: nextNode - 1 };
}

/** @param {Call} call */
function throttled({ report }) {
  let last = 0;
  return (/** @type {any} */ progress) => {
    const now = performance.now();
    if (now - last < REPORT_MS) return;
    last = now;
    report(progress);
  };
}

/** @param {import("../../src/documents.js").Manifest} manifest */
function sizesOf({ fields }) {
  let nbytes = 0;
  let stored = 0;
  for (const field of Object.values(fields)) {
    if (field.state !== "present") continue;
    nbytes += field.nbytes;
    stored += field.stored_nbytes ?? field.nbytes;
  }
  return { nbytes, stored };
}

/** @param {unknown} error */
function errorOf(error) {
  if (error instanceof CkptError) {
    const { code, kind, detail, where, clause, phase } = error;
    const remedy =
      code === "BASE_MISSING"
        ? "Open the folder of the run, which has the bases of its deltas."
        : error.remedy;
    return { code, kind, detail, where, clause, phase, remedy };
  }
  const { name = "", message = String(error) } = /** @type {Error} */ (error);
  if (name === "AbortError") return { code: "CANCELLED", kind: "", detail: "cancelled" };
  return {
    code: "UNEXPECTED",
    kind: "",
    detail: `${name}: ${message}`,
    where: null,
    clause: null,
    phase: null,
    remedy: "This is a fault of the page: report it, with this text.",
  };
}

/** @type {Record<string, (argument: any, call: Call) => Promise<any>>} */
const METHODS = {
  /** Open a place, and say what is there. @param {{origin: Origin}} argument */
  async open({ origin }) {
    source = sourceOf(origin);
    checkpoints.clear();
    nodes.clear();
    const kind = await kindOf("");
    const { name } = source;
    if (kind !== null) return { kind, name };
    const entries = await source.list("").catch((error) => {
      if (error.code === "STORE_UNSUPPORTED") return [];
      throw error;
    });
    if (entries.some(({ name: own }) => parseCheckpointName(own) !== null || own === "launches")) {
      await openRun(source); // says why it is no run
    }
    const found = [];
    for (const entry of entries.slice(0, MOST_FOLDERS)) {
      if (entry.kind !== "folder" || entry.name.startsWith(".")) continue;
      const inner = await kindOf(entry.name);
      if (inner !== null) found.push({ name: entry.name, kind: inner });
    }
    if (found.length > 0) return { kind: "folder", name, found };
    const names = entries.slice(0, 6).map(({ name: own }) => own);
    throw new CkptError(
      "NOT_COMMITTED",
      names.length === 0
        ? "no file of a checkpoint or run was found"
        : `the folder has ${names.join(", ")}${entries.length > 6 ? ", …" : ""}`,
      {
        where: name,
        clause: "REQ-MAN-001",
        remedy:
          "Open a checkpoint (a folder with manifest.json), a run (a folder with run.json), or a" +
          " folder of these.",
      },
    );
  },

  /** Read a run. @param {{path: string}} argument */
  async run({ path }, { signal }) {
    const run = await openRun(required(), path, { signal });
    const labels = await run.labels(signal);
    let next = null;
    /** @type {string[]} */
    let lineage = [];
    let choiceError = null;
    try {
      const candidates = run.candidates();
      lineage = candidates.flatMap(({ name }) => (name === null ? [] : [name]));
      next = candidates.find(({ isSuspect }) => !isSuspect) ?? null;
    } catch (error) {
      choiceError = errorOf(error);
    }
    return {
      name: required().name,
      path,
      runId: run.runId,
      launches: run.launches.map((info) => ({
        launch: Number(info.launch),
        chosenBy: info.record?.chosen_by ?? null,
        from: info.record?.resume_from?.name ?? null,
        isOvertaken: run.isOvertaken(info),
        error: info.error && errorOf(info.error),
      })),
      checkpoints: run.checkpoints.map(({ name, step, launch, state, manifest, digest, error }) => {
        const own = labels.get(name);
        return {
          name,
          path: join(path, name),
          step: Number(step),
          launch: Number(launch),
          state,
          digest,
          error: error && errorOf(error),
          profile: manifest?.profile ?? null,
          saved: manifest?.saved_unix_s ?? null,
          suspect: manifest?.suspect ?? null,
          durability: manifest?.durability ?? null,
          references: manifest?.references.map((reference) => reference.name) ?? [],
          metrics: { ...manifest?.metrics, ...own?.metrics },
          tags: [...new Set([...(manifest?.tags ?? []), ...(own?.tags ?? [])])],
          isPinned: own?.isPinned ?? false,
          isOnLineage: lineage.includes(name),
          ...(manifest ? sizesOf(manifest) : { nbytes: null, stored: null }),
        };
      }),
      next: next?.name ?? null,
      choiceError,
    };
  },

  /** Read a checkpoint's manifest and index. @param {{path: string}} argument */
  async checkpoint({ path }) {
    const checkpoint = await checkpointAt(path);
    const { manifest, digest } = checkpoint;
    const count = checkpoint.tensors.size;
    /** @type {Record<string, string[]>} */
    const aliases = {};
    const columns = {
      name: /** @type {string[]} */ (new Array(count)),
      field: /** @type {string[]} */ (new Array(count)),
      scope: /** @type {string[]} */ (new Array(count)),
      dtype: /** @type {string[]} */ (new Array(count)),
      shape: /** @type {number[][]} */ (new Array(count)),
      nbytes: new Float64Array(count),
      isPersistent: new Uint8Array(count),
      aliases,
    };
    let row = 0;
    for (const info of checkpoint.tensors.values()) {
      columns.name[row] = info.name;
      columns.field[row] = info.field;
      columns.scope[row] = info.scope;
      columns.dtype[row] = info.dtype;
      columns.shape[row] = info.shape;
      columns.nbytes[row] = info.nbytes;
      columns.isPersistent[row] = Number(info.isPersistent);
      if (info.aliases.length > 0) aliases[row] = info.aliases;
      row += 1;
    }
    return {
      name: path === "" ? required().name : path.slice(path.lastIndexOf("/") + 1),
      path,
      digest,
      manifest,
      ...sizesOf(manifest),
      count,
      columns,
      leaves: checkpoint.leaves,
      streams: checkpoint.streams,
    };
  },

  /** Say where the boxes of a tensor lie. @param {{path: string, key: string}} argument */
  async places({ path, key }, { signal }) {
    const checkpoint = await checkpointAt(path);
    const row = checkpoint.rowOf(key);
    checkpoint.tensor(key);
    const { index, manifest } = checkpoint;
    const cut = index.shardings[index.sharding[row]];
    const boxes = [];
    for (let k = 0; k < Math.min(cut.boxCount, MOST_BOXES); k += 1) {
      const box = boxOf(cut, k);
      const place = await checkpoint.placeOf(row, box, cut.writers[k], signal);
      const { part } = place;
      const { extents, files, encodings } = part;
      const rows = extentsOfBox(part, place.box);
      boxes.push({
        box,
        writer: cut.writers[k],
        part: partPath(manifest.attempt, cut.writers[k]),
        extentCount: rows.length,
        blocks: part.boxBlocks[place.box],
        extents: rows.slice(0, MOST_EXTENTS).map((own) => {
          const hasFile = extents.file[own] < files.count;
          const reference = part.references[extents.reference[own] - 1];
          return {
            encoding: encodings[extents.encoding[own]],
            isPredicted: extents.predicted[own] === 1,
            blocks: [extents.blockBegin[own], extents.blockBegin[own] + extents.blockCount[own]],
            file: hasFile ? files.name[extents.file[own]] : null,
            begin: hasFile ? extents.byteBegin[own] : null,
            nbytes: hasFile ? extents.nbytes[own] : null,
            base: reference?.name ?? null,
          };
        }),
      });
    }
    return { boxCount: cut.boxCount, boxes };
  },

  /** Read a box of a tensor. @param {{path: string, key: string, box: any}} argument */
  async read({ path, key, box }, { signal }) {
    const checkpoint = await checkpointAt(path);
    const { dtype, shape, data } = await checkpoint.readTensor(key, { box, signal });
    const stats = new Stats(dtype);
    stats.add(data);
    return { dtype, shape, data, summary: stats.summary() };
  },

  /** Summarise a whole tensor. @param {{path: string, key: string}} argument */
  async summary({ path, key }, call) {
    const checkpoint = await openCheckpoint(aheadSource(), path, { signal: call.signal });
    const { dtype, nbytes } = checkpoint.tensor(key);
    const stats = new Stats(dtype);
    const report = throttled(call);
    const begin = performance.now();
    let doneNbytes = 0;
    const options = { signal: call.signal, pieceNbytes: PIECE_NBYTES };
    for await (const { data } of checkpoint.streamTensor(key, options)) {
      stats.add(data);
      doneNbytes += data.byteLength;
      report({ doneNbytes, totalNbytes: nbytes, seconds: (performance.now() - begin) / 1000 });
    }
    return { summary: stats.summary(), seconds: (performance.now() - begin) / 1000 };
  },

  /** Read a leaf. @param {{path: string, row: number}} argument */
  async leaf({ path, row }, { signal }) {
    const checkpoint = await checkpointAt(path);
    const { field, name, scope } = checkpoint.leaves[row];
    return nodeOf(await checkpoint.leafTree(field, name, { scope, signal }));
  },

  /** Read the state of a stream. @param {{path: string, row: number}} argument */
  async stream({ path, row }, { signal }) {
    const checkpoint = await checkpointAt(path);
    const { name, scope } = checkpoint.streams[row];
    return nodeOf((await checkpoint.stream(name, { scope, signal })).state);
  },

  /** List children of a node. @param {{id: number, from: number, to: number}} argument */
  async children({ id, from, to }) {
    const tree = nodes.get(id);
    if (tree === undefined) return [];
    return childrenOf(tree, from, to).map((child) => ({ key: child.key, ...nodeOf(child.tree) }));
  },

  /** Verify a checkpoint. @param {{path: string}} argument */
  async verify({ path }, call) {
    const checkpoint = await openCheckpoint(aheadSource(), path, { signal: call.signal });
    const { stored } = sizesOf(checkpoint.manifest);
    const begin = performance.now();
    const report = throttled(call);
    const found = await checkpoint.verify({
      signal: call.signal,
      onProgress: ({ doneNbytes, totalNbytes, where }) =>
        report({
          doneNbytes,
          totalNbytes: Math.max(totalNbytes, stored),
          where,
          seconds: (performance.now() - begin) / 1000,
        }),
    });
    return {
      ...found,
      problems: found.problems.map(errorOf),
      bases: found.bases.map(({ name, problems }) => ({ name, problems: problems.map(errorOf) })),
    };
  },

  /** Choose the checkpoint of the next launch. @param {{path: string}} argument */
  async choose({ path }, call) {
    const run = await openRun(aheadSource(), path, { signal: call.signal });
    const begin = performance.now();
    const report = throttled(call);
    const choice = await run.chooseNext({
      signal: call.signal,
      onProgress: (progress) =>
        report({ ...progress, seconds: (performance.now() - begin) / 1000 }),
    });
    return {
      ...choice,
      passedOver: choice.passedOver.map(({ name, error }) => ({
        name,
        error: error && errorOf(error),
      })),
    };
  },
};

/** @type {Map<number, AbortController>} */
const running = new Map();

self.addEventListener("message", async ({ data }) => {
  const { id, method, argument } = data;
  if (method === "cancel") {
    running.get(argument)?.abort(new DOMException("cancelled", "AbortError"));
    return;
  }
  const controller = new AbortController();
  running.set(id, controller);
  try {
    const value = await METHODS[method](argument, {
      signal: controller.signal,
      report: (progress) => self.postMessage({ id, progress }),
    });
    const buffer = value?.data?.buffer;
    self.postMessage({ id, value }, { transfer: buffer instanceof ArrayBuffer ? [buffer] : [] });
  } catch (error) {
    self.postMessage({ id, error: errorOf(error) });
  } finally {
    running.delete(id);
  }
});
