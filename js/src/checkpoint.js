// @ts-check
/** Opening and reading a checkpoint (page 70, "Open and read"). @module */
import { loadBlake3 } from "./blake3.js";
import { Blocks } from "./blocks.js";
import { intersect, product, requireBox, runsOf } from "./boxes.js";
import { parseRegister, parseRun, requireManifest } from "./documents.js";
import { dtypeOf, toElements } from "./dtypes.js";
import { CkptError, located, locatedAsync, refuse } from "./errors.js";
import { readFrozen, readLocation } from "./frozen.js";
import { boxOf, checkAgainstManifest, checkTilings, parseIndex } from "./indexes.js";
import * as limits from "./limits.js";
import { FIELDS, baseName, join, parentOf, parseCheckpointName, partPath } from "./names.js";
import { findBox, findTensor, isFrozenLeaf, parsePart } from "./parts.js";
import { CHUNK_NBYTES, readNamed, readSmall } from "./reading.js";
import { ORIGIN, shapeOfRow } from "./tables.js";
import { digestBytes } from "./text.js";
import { parseTree, toPlain } from "./tree.js";
import { verify } from "./verify.js";

/** @typedef {import("./sources/source.js").Source} Source */
/** @typedef {import("./documents.js").Manifest} Manifest */
/** @typedef {import("./boxes.js").Box} Box */
/** @typedef {import("./names.js").Field} Field */
/** @typedef {import("./parts.js").Part} Part */
/** @typedef {import("./blocks.js").Place} Place */
/** @typedef {import("./frozen.js").FrozenTensor} FrozenTensor */

/** Bytes of parts that are kept, beside the newest two. */
const PARTS_NBYTES = 32 * 1024 * 1024;

/** A place where the base of a delta may be. @typedef {{source: Source, path: string}} BasePlace */

/**
 * @typedef {object} OpenOptions
 * @property {string} [digest] accept only the checkpoint with this digest of the manifest
 * @property {BasePlace[]} [bases] directories of bases, in addition to those beside the checkpoint
 * @property {AbortSignal} [signal]
 */

/**
 * A tensor of a checkpoint.
 *
 * @typedef {object} TensorInfo
 * @property {Field} field
 * @property {string} name
 * @property {string} scope `global`, or `lw/` and the number of a logical worker
 * @property {string} dtype a name of page 50 of the specification
 * @property {number[]} shape
 * @property {number} nbytes
 * @property {boolean} isPersistent
 * @property {string[]} aliases further names of the same memory
 */

/**
 * A leaf or a stream of a checkpoint.
 *
 * @typedef {{field: Field, name: string, scope: string}} LeafInfo
 * @typedef {{name: string, scope: string, kind: string}} StreamInfo
 */

/**
 * What the register of a directory holds.
 *
 * @typedef {{state: "undecided"} | {state: "committed", manifest: Manifest, digest: string}
 *   | {state: "retired" | "aborted", content: any}
 *   | {state: "unreadable", error: CkptError}} Register
 */

/**
 * Read the register at a path, at most `MANIFEST_NBYTES`.
 *
 * @param {Source} source @param {string} path of the directory @param {AbortSignal} [signal]
 */
async function readRegister(source, path, signal) {
  const bytes = await readSmall(
    source,
    join(path, "manifest.json"),
    limits.MANIFEST_NBYTES,
    signal,
  );
  if (bytes === null) {
    refuse("NOT_COMMITTED", "REQ-MAN-001", "there is no committed checkpoint here", path || ".");
  }
  return parseRegister(bytes);
}

/**
 * Compare a register with the place of its directory in a run (REQ-MAN-002, REQ-RUN-003).
 *
 * @param {{run_id: string | null, launch: number | null, step: number}} content
 * @param {string} path
 * @param {string | null} runId the run's id, null if it can't be read
 */
export function checkPlace(content, path, runId) {
  const named = parseCheckpointName(baseName(path));
  if (named === null || named.step !== content.step || named.launch !== content.launch) {
    refuse(
      "STEP_MISMATCH",
      "REQ-MAN-002",
      `step ${content.step} and launch ${content.launch} aren't those of the directory's name`,
    );
  }
  if (runId !== null && runId !== content.run_id) {
    refuse("RUN_MISMATCH", "REQ-RUN-003", "the checkpoint belongs to another run");
  }
}

/**
 * Tell whether a directory lies inside of a run, and which.
 *
 * @param {Source} source @param {string} path @param {AbortSignal} [signal]
 * @returns {Promise<{runId: string | null} | null>} null outside of a run
 */
async function runAround(source, path, signal) {
  const parent = parentOf(path);
  if (parent === null || parseCheckpointName(baseName(path)) === null) return null;
  const runPath = join(parent, "run.json");
  if ((await source.stat(runPath, signal)) === null) return null;
  try {
    const bytes = await readSmall(source, runPath, limits.JSON_NBYTES, signal);
    return { runId: bytes === null ? null : parseRun(bytes).run_id };
  } catch (error) {
    if (!(error instanceof CkptError) || error.kind === "StoreError") throw error;
    return { runId: null }; // step and launch are compared all the same
  }
}

/**
 * Open a checkpoint: its register and its index are read and checked, and nothing else.
 *
 * @param {Source} source
 * @param {string} [path] the checkpoint's directory; `""` for the source's root. The run and the
 *   bases of a delta are looked for beside it, and so only below the root.
 * @param {OpenOptions} [options]
 * @returns {Promise<Checkpoint>}
 * @throws {CkptError}
 */
export async function openCheckpoint(source, path = "", options = {}) {
  await loadBlake3();
  const { signal } = options;
  return locatedAsync(join(path, "manifest.json"), "open", async () => {
    const { content, digest } = await readRegister(source, path, signal);
    // Type first, then step, launch and run: the order of page 70.
    const manifest = requireManifest(content);
    const run = await runAround(source, path, signal);
    if (run !== null) checkPlace(manifest, path, run.runId);
    if (options.digest !== undefined && options.digest !== digest) {
      refuse(
        "DOC_DIGEST",
        "REQ-OPN-001",
        `the checkpoint has the digest ${digest} instead of ` + options.digest,
      );
    }
    const checkpoint = new Checkpoint(source, path, manifest, digest, options);
    await checkpoint.loadIndex(signal);
    return checkpoint;
  });
}

/** A checkpoint that was opened. */
export class Checkpoint {
  /** @type {import("./indexes.js").Index | null} */
  #index = null;
  /** @type {Map<string, number> | null} */
  #rows = null;
  /** @type {Map<number, Promise<Part>>} */
  #parts = new Map();
  /** @type {Map<string, Promise<Checkpoint>>} */
  #opened = new Map();
  /** @type {WeakMap<Part, Map<string, Promise<Place>>>} */
  #found = new WeakMap();
  /** @type {Checkpoint} */
  #root;
  /**
   * All tensors, by `field/name`, and by `field/name@scope` where the scope isn't `global`.
   *
   * @type {Map<string, TensorInfo>}
   */
  tensors = new Map();
  /** @type {LeafInfo[]} All leaves: plain values. */
  leaves = [];
  /** @type {StreamInfo[]} All random-number streams. */
  streams = [];

  /**
   * Not for callers: use `openCheckpoint`.
   *
   * @param {Source} source @param {string} path @param {Manifest} manifest @param {string} digest
   * @param {OpenOptions} options @param {Checkpoint | null} [root] the delta that this is a base of
   */
  constructor(source, path, manifest, digest, options, root = null) {
    /** Where the checkpoint is read from. */
    this.source = source;
    /** Its directory. */
    this.path = path;
    /** The content of its manifest. */
    this.manifest = manifest;
    /** The digest of its manifest, which names the checkpoint. */
    this.digest = digest;
    this.options = options;
    /** @type {Map<string, Promise<string>>} files whose size and header were compared */
    this.openedFiles = new Map();
    this.#root = root ?? this;
    /** Reads blocks, also for the bases of this checkpoint. */
    this.blocks = root?.blocks ?? new Blocks((place, row) => this.findBase(place, row));
  }

  /** The parsed index. */
  get index() {
    return /** @type {import("./indexes.js").Index} */ (this.#index);
  }

  /** Read and check the index. @param {AbortSignal} [signal] */
  async loadIndex(signal) {
    const { name, nbytes, digest } = this.manifest.index;
    const path = join(this.path, name);
    await locatedAsync(path, "open", () =>
      this.guard(async () => {
        const bytes = await readNamed(this.source, path, nbytes, limits.MSGPACK_NBYTES, signal);
        const index = parseIndex(bytes, digestBytes(digest));
        checkAgainstManifest(index, this.manifest);
        checkTilings(index);
        const isFrozen = index.leaves.name.some(
          (leaf, row) => index.leaves.field[row] === 0 && isFrozenLeaf(leaf),
        );
        if (isFrozen !== this.manifest.features.reader.includes("frozen")) {
          refuse("DOC_MISMATCH", "REQ-FRZ-001", "the feature frozen doesn't go with the index");
        }
        this.#index = index;
      }, signal),
    );
    this.tensors = this.#listTensors();
    this.leaves = Array.from(this.index.leaves.name, (leaf, row) => ({
      field: FIELDS[this.index.leaves.field[row]],
      name: leaf,
      scope: this.index.scopes[this.index.leaves.scope[row]],
    }));
    this.streams = Array.from(this.index.streams.name, (stream, row) => ({
      name: stream,
      scope: this.index.scopes[this.index.streams.scope[row]],
      kind: this.index.streams.kind[row],
    }));
  }

  #listTensors() {
    const { tensors, aliases, scopes, dtypes } = this.index;
    /** @type {string[][]} */
    const names = [];
    aliases.tensor.forEach((/** @type {number} */ row, /** @type {number} */ at) => {
      (names[row] ??= []).push(aliases.name[at]);
    });
    /** @type {Map<string, TensorInfo>} */
    const listed = new Map();
    this.#rows = new Map();
    for (let row = 0; row < tensors.count; row += 1) {
      const shape = shapeOfRow(tensors, row);
      const dtype = dtypes[tensors.dtype[row]];
      const info = {
        field: FIELDS[tensors.field[row]],
        name: tensors.name[row],
        scope: scopes[tensors.scope[row]],
        dtype,
        shape,
        nbytes: product(shape) * dtypeOf(dtype).nbytes,
        isPersistent: tensors.storage[row] === 0,
        aliases: names[row] ?? [],
      };
      listed.set(tensorKey(info.field, info.name, info.scope), info);
      this.#rows.set(tensorKey(info.field, info.name, info.scope), row);
    }
    for (const info of listed.values()) {
      const row = /** @type {number} */ (
        this.#rows.get(tensorKey(info.field, info.name, info.scope))
      );
      for (const alias of info.aliases) {
        const key = tensorKey(info.field, alias, info.scope);
        if (!this.#rows.has(key)) this.#rows.set(key, row);
      }
    }
    return listed;
  }

  /**
   * Find a tensor by its key, by an alias, or in `weights` by its name alone.
   *
   * @param {string} key
   * @returns {number} the row in the index, or -1
   */
  rowOf(key) {
    const rows = /** @type {Map<string, number>} */ (this.#rows);
    return rows.get(key) ?? rows.get(`weights/${key}`) ?? -1;
  }

  /**
   * Whether there is a tensor of a field and scope with this name or alias.
   *
   * @param {number} field its number @param {string} name @param {string} scope
   */
  hasTensor(field, name, scope) {
    return this.#rows?.has(tensorKey(FIELDS[field], name, scope)) ?? false;
  }

  /** @param {string} key @returns {number} the row in the index */
  #requireRow(key) {
    const row = this.rowOf(key);
    if (row < 0) {
      throw new CkptError("TENSOR_MISSING", `the checkpoint has no tensor ${JSON.stringify(key)}`, {
        where: this.path || ".",
        remedy: "See the keys of `tensors` for those it has.",
      });
    }
    return row;
  }

  /**
   * Return what is known of a tensor.
   *
   * @param {string} key `field/name`, an alias, or in `weights` the name alone
   * @returns {TensorInfo}
   */
  tensor(key) {
    const { tensors, scopes } = this.index;
    const row = this.#requireRow(key);
    const own = tensorKey(
      FIELDS[tensors.field[row]],
      tensors.name[row],
      scopes[tensors.scope[row]],
    );
    return /** @type {TensorInfo} */ (this.tensors.get(own));
  }

  /**
   * Read a tensor, or a box of it.
   *
   * Every block is compared with its digest before its bytes are returned.
   *
   * @param {string} key as for `tensor`
   * @param {object} [options]
   * @param {Box} [options.box] `[[begin, end], ...]` in elements, by default all of it
   * @param {AbortSignal} [options.signal]
   * @returns {Promise<{dtype: string, shape: number[], data: import("./dtypes.js").Elements}>}
   */
  async readTensor(key, { box, signal } = {}) {
    const row = this.#requireRow(key);
    const { tensors, dtypes } = this.index;
    const dtype = dtypes[tensors.dtype[row]];
    const wanted = requireBox(box, shapeOfRow(tensors, row));
    const shape = wanted.map(([begin, end]) => end - begin);
    const bytes = await this.readBox(row, wanted, signal);
    return { dtype, shape, data: toElements(dtype, bytes) };
  }

  /**
   * Read a tensor piece by piece, in C order and bounded memory.
   *
   * @param {string} key as for `tensor`
   * @param {object} [options]
   * @param {AbortSignal} [options.signal]
   * @param {number} [options.pieceNbytes] most bytes of a piece, unless an element is larger
   * @returns {AsyncGenerator<{box: Box, dtype: string, data: import("./dtypes.js").Elements}>}
   */
  async *streamTensor(key, { signal, pieceNbytes = CHUNK_NBYTES } = {}) {
    const row = this.#requireRow(key);
    const dtype = this.index.dtypes[this.index.tensors.dtype[row]];
    const shape = shapeOfRow(this.index.tensors, row);
    for (const box of slabsOf(shape, Math.max(1, pieceNbytes / dtypeOf(dtype).nbytes))) {
      yield { box, dtype, data: toElements(dtype, await this.readBox(row, box, signal)) };
    }
  }

  /**
   * Read a box of the tensor in a row of the index.
   *
   * @param {number} row @param {Box} wanted @param {AbortSignal} [signal]
   * @returns {Promise<Uint8Array>}
   */
  readBox(row, wanted, signal) {
    const { tensors, sharding, shardings, dtypes } = this.index;
    const width = dtypeOf(dtypes[tensors.dtype[row]]).nbytes;
    const name = `the tensor ${JSON.stringify(tensors.name[row])} in ${this.path || "."}`;
    return locatedAsync(name, "read", () =>
      this.guard(async () => {
        const out = allocate(product(wanted.map(([begin, end]) => end - begin)) * width);
        if (out.length === 0) return out;
        const cut = shardings[sharding[row]];
        for (let k = 0; k < cut.boxCount; k += 1) {
          const box = boxOf(cut, k);
          const common = intersect(box, wanted);
          if (common === null) continue;
          signal?.throwIfAborted();
          const place = await this.placeOf(row, box, cut.writers[k], signal);
          await this.#fill(out, place, common, box, wanted, width, signal);
        }
        return out;
      }, signal),
    );
  }

  /**
   * Copy the common elements of a box of a part into the destination.
   *
   * @param {Uint8Array} out @param {Place} place @param {Box} common @param {Box} box
   * @param {Box} wanted @param {number} width @param {AbortSignal} [signal]
   */
  async #fill(out, place, common, box, wanted, width, signal) {
    const size = place.part.origin.block_nbytes;
    /** @type {[number, number][]} */
    const ranges = [];
    for (const { from, count } of runsOf(common, box, wanted)) {
      const low = Math.floor((from * width) / size);
      const high = Math.floor(((from + count) * width - 1) / size) + 1;
      const last = ranges[ranges.length - 1];
      if (last !== undefined && low <= last[1]) last[1] = Math.max(last[1], high);
      else ranges.push([low, high]);
    }
    const runs = runsOf(common, box, wanted);
    let run = runs.next();
    for (const [low, high] of ranges) {
      for await (const { block, bytes } of this.blocks.read(place, low, high, signal)) {
        signal?.throwIfAborted();
        const begin = block * size;
        const end = begin + bytes.length;
        while (!run.done) {
          const { from, to, count } = run.value;
          const first = Math.max(from * width, begin);
          const last = Math.min((from + count) * width, end);
          if (first < last) {
            out.set(bytes.subarray(first - begin, last - begin), to * width + first - from * width);
          }
          if ((from + count) * width > end) break;
          run = runs.next();
        }
      }
    }
  }

  /**
   * Find a box of the index in its part.
   *
   * @param {number} row of the tensor @param {Box} box @param {number} writer
   * @param {AbortSignal} [signal]
   * @returns {Promise<Place>}
   */
  async placeOf(row, box, writer, signal) {
    const part = await this.part(writer, signal);
    return this.placeIn(part, row, box);
  }

  /** Find a box of the index in a part. @param {Part} part @param {number} row @param {Box} box */
  placeIn(part, row, box) {
    const { tensors, scopes, dtypes } = this.index;
    const differs = (/** @type {string} */ detail) => {
      throw new CkptError("DOC_MISMATCH", detail, {
        clause: "REQ-IDX-001",
        where:
          `${join(this.path, partPath(this.manifest.attempt, part.writer))}, tensor ` +
          JSON.stringify(tensors.name[row]),
        phase: "open",
      });
    };
    const scope = scopes[tensors.scope[row]];
    const own = findTensor(part, tensors.field[row], tensors.name[row], scope);
    if (own < 0) differs("the part lacks the tensor that the index places there");
    const shape = shapeOfRow(tensors, row);
    if (
      part.dtypes[part.tensors.dtype[own]] !== dtypes[tensors.dtype[row]] ||
      part.tensors.storage[own] !== tensors.storage[row] ||
      part.tensors.ndim[own] !== shape.length ||
      shapeOfRow(part.tensors, own).some((extent, dim) => extent !== shape[dim])
    ) {
      differs("the part has the tensor with another dtype, shape or storage");
    }
    const found = findBox(part, own, box);
    if (found < 0) differs("the part doesn't store the box that the index places there");
    return { checkpoint: /** @type {Checkpoint} */ (this), part, box: found };
  }

  /**
   * Read the part of a writer, and check it against index and manifest.
   *
   * @param {number} writer @param {AbortSignal} [signal]
   * @returns {Promise<Part>}
   */
  part(writer, signal) {
    const known = this.#parts.get(writer);
    if (known !== undefined) {
      this.#parts.delete(writer);
      this.#parts.set(writer, known);
      return known;
    }
    const reading = this.#readPart(writer, signal);
    this.#parts.set(writer, reading);
    reading.catch(() => this.#parts.delete(writer));
    const { nbytes } = this.index.parts;
    let total = 0;
    [...this.#parts.keys()].reverse().forEach((own, age) => {
      total += nbytes[own];
      if (age >= 2 && total > PARTS_NBYTES) this.#parts.delete(own);
    });
    return reading;
  }

  /** @param {number} writer @param {AbortSignal} [signal] @returns {Promise<Part>} */
  async #readPart(writer, signal) {
    const { parts } = this.index;
    const path = join(this.path, partPath(this.manifest.attempt, writer));
    return locatedAsync(path, "open", async () => {
      const bytes = await readNamed(
        this.source,
        path,
        parts.nbytes[writer],
        limits.MSGPACK_NBYTES,
        signal,
      );
      const part = parsePart(bytes, parts.digest.slice(32 * writer, 32 * writer + 32));
      const differs = (/** @type {string} */ clause, /** @type {string} */ detail) =>
        refuse("DOC_MISMATCH", clause, detail);
      for (const name of ORIGIN) {
        if (part.origin[name] !== this.manifest[name])
          differs("REQ-PRT-001", `part and manifest have another ${name}`);
      }
      if (part.writer !== writer)
        differs("REQ-PRT-001", "the part has the number of another writer");
      const { features, references } = this.manifest;
      if (part.features.some((name) => !features.reader.includes(name))) {
        differs("REQ-IDX-001", "the part has a feature that the manifest doesn't list");
      }
      if (
        part.references.some(
          ({ name, digest }) =>
            !references.some((own) => own.digest === digest && own.name === name),
        )
      ) {
        differs("REQ-IDX-001", "the part has a reference that the manifest doesn't list");
      }
      return part;
    });
  }

  /* ---------------------------------------------------------------- leaves and streams ---- */

  /**
   * Read a plain value.
   *
   * @param {Field} field @param {string} [name] `""` for the only value of a field
   * @param {{scope?: string, signal?: AbortSignal}} [options]
   * @returns {Promise<any>} see `toPlain`
   */
  async leaf(field, name = "", options = {}) {
    return toPlain(await this.leafTree(field, name, options));
  }

  /**
   * Read a plain value as a tree, which keeps the types of its parts.
   *
   * @param {Field} field @param {string} [name]
   * @param {{scope?: string, signal?: AbortSignal}} [options]
   * @returns {Promise<import("./tree.js").Tree>}
   */
  async leafTree(field, name = "", { scope = "global", signal } = {}) {
    const { leaves } = this.index;
    const row = this.leaves.findIndex(
      (leaf) => leaf.field === field && leaf.name === name && leaf.scope === scope,
    );
    const place = `the leaf ${JSON.stringify(name)} of ${field} in ${this.path || "."}`;
    if (row < 0) {
      throw new CkptError("LEAF_MISSING", "the checkpoint has no such value", {
        where: place,
        remedy: "See `leaves` for those it has.",
      });
    }
    return this.guard(async () => {
      const part = await this.part(leaves.part[row], signal);
      return located(place, "read", () => parseTree(this.leafBytes(part, row)));
    }, signal);
  }

  /** @param {Part} part @param {number} row in the index @returns {Uint8Array} the tree's bytes */
  leafBytes(part, row) {
    const { leaves, scopes } = this.index;
    const scope = scopes[leaves.scope[row]];
    const own = part.leaves.name.findIndex(
      (name, at) =>
        name === leaves.name[row] &&
        part.leaves.field[at] === leaves.field[row] &&
        part.scopes[part.leaves.scope[at]] === scope,
    );
    if (own < 0) this.#lacks(part, `the leaf ${JSON.stringify(leaves.name[row])}`);
    return part.leaves.value[own];
  }

  /** @param {Part} part @param {string} what @returns {never} */
  #lacks(part, what) {
    throw new CkptError("DOC_MISMATCH", `the part lacks ${what}, which the index places there`, {
      clause: "REQ-IDX-001",
      phase: "open",
      where: join(this.path, partPath(this.manifest.attempt, part.writer)),
    });
  }

  /**
   * Read the state of a random-number stream.
   *
   * @param {string} name @param {{scope?: string, signal?: AbortSignal}} [options]
   * @returns {Promise<{kind: string, state: import("./tree.js").Tree}>}
   */
  async stream(name, { scope = "global", signal } = {}) {
    const row = this.streams.findIndex((own) => own.name === name && own.scope === scope);
    const place = `the stream ${JSON.stringify(name)} in ${this.path || "."}`;
    if (row < 0) {
      throw new CkptError("STREAM_MISSING", "the checkpoint has no such stream", {
        where: place,
        remedy: "See `streams` for those it has.",
      });
    }
    return this.guard(async () => {
      const part = await this.part(this.index.streams.part[row], signal);
      const state = located(place, "read", () => parseTree(this.streamBytes(part, row)));
      return { kind: this.index.streams.kind[row], state };
    }, signal);
  }

  /** @param {Part} part @param {number} row in the index @returns {Uint8Array} the tree's bytes */
  streamBytes(part, row) {
    const { streams, scopes } = this.index;
    const scope = scopes[streams.scope[row]];
    const own = part.streams.name.findIndex(
      (name, at) => name === streams.name[row] && part.scopes[part.streams.scope[at]] === scope,
    );
    if (own < 0 || part.streams.kind[own] !== streams.kind[row]) {
      this.#lacks(part, `the stream ${JSON.stringify(streams.name[row])}`);
    }
    return part.streams.state[own];
  }

  /**
   * List the tensors of a frozen base that this checkpoint refers to (page 46).
   *
   * The location is information: it is never opened.
   *
   * @param {AbortSignal} [signal]
   * @returns {Promise<{location: string, tensors: FrozenTensor[]} | null>} null without a base
   */
  async frozen(signal) {
    const { leaves, scopes } = this.index;
    /** @type {string | null} */
    let location = null;
    /** @type {FrozenTensor[]} */
    const tensors = [];
    let isFrozen = false;
    for (let row = 0; row < leaves.count; row += 1) {
      const name = leaves.name[row];
      if (leaves.field[row] !== 0 || !isFrozenLeaf(name)) continue;
      isFrozen = true;
      const part = await this.part(leaves.part[row], signal);
      const where = `the leaf ${JSON.stringify(name)} of weights`;
      const tree = located(where, "read", () => parseTree(this.leafBytes(part, row)));
      located(where, "open", () => {
        if (scopes[leaves.scope[row]] !== "global") {
          refuse("FROZEN_FORM", "REQ-FRZ-002", "a reference isn't in the scope global");
        }
        if (name === "~frozen") location = readLocation(tree);
        else tensors.push(readFrozen(name, tree));
      });
    }
    if (!isFrozen) return null;
    if (location === null) {
      return refuse("FROZEN_FORM", "REQ-FRZ-002", "there are references without the leaf ~frozen");
    }
    const taken = new Set();
    const take = (/** @type {string} */ name) => {
      if (taken.has(name)) {
        refuse("TENSOR_DIVERGED", "REQ-FRZ-004", `${JSON.stringify(name)} belongs to two tensors`);
      }
      taken.add(name);
    };
    for (const info of this.tensors.values()) {
      if (info.field === "weights" && info.scope === "global") {
        for (const name of [info.name, ...info.aliases]) taken.add(name);
      }
    }
    for (const { name, aliases } of tensors) [name, ...aliases].forEach(take);
    return { location, tensors };
  }

  /* ---------------------------------------------------------------------------- bases ---- */

  /**
   * Find the base of a box.
   *
   * @param {Place} place @param {number} reference row in the references of its part, plus 1
   * @returns {Promise<Place>}
   */
  findBase(place, reference) {
    const known = this.#found.get(place.part) ?? new Map();
    this.#found.set(place.part, known);
    const key = `${place.box} ${reference}`;
    const found = known.get(key) ?? this.#searchBase(place, reference);
    known.set(key, found);
    found.catch(() => known.delete(key));
    return found;
  }

  /** @param {Place} place @param {number} reference @returns {Promise<Place>} */
  async #searchBase({ part, box }, reference) {
    const { name, digest } = part.references[reference - 1];
    const base = await this.openBase(name, digest);
    const tensor = part.boxTensor[box];
    const { tensors } = part;
    const shape = shapeOfRow(tensors, tensor);
    const scope = part.scopes[tensors.scope[tensor]];
    const lacks = (/** @type {string} */ detail) => {
      throw new CkptError("BASE_BLOCK", detail, {
        clause: "REQ-DEL-022",
        phase: "read",
        where: `${base.path}, tensor ${JSON.stringify(tensors.name[tensor])}`,
      });
    };
    const { index } = base;
    const row = base.rowOfName(tensors.field[tensor], tensors.name[tensor], scope);
    if (row < 0) lacks("the base hasn't the tensor");
    if (
      index.dtypes[index.tensors.dtype[row]] !== part.dtypes[tensors.dtype[tensor]] ||
      String(shapeOfRow(index.tensors, row)) !== String(shape) ||
      base.manifest.block_nbytes !== part.origin.block_nbytes
    ) {
      lacks("the base has the tensor with another dtype, shape or size of blocks");
    }
    const at = part.boxDims[box];
    /** @type {Box} */
    const wanted = shape.map((_, dim) => {
      const begin = part.begin[at + dim];
      return [begin, begin + part.boxShape[at + dim]];
    });
    const cut = index.shardings[index.sharding[row]];
    for (let k = 0; k < cut.boxCount; k += 1) {
      const own = boxOf(cut, k);
      if (own.every(([begin, end], dim) => begin === wanted[dim][0] && end === wanted[dim][1])) {
        try {
          return await base.placeOf(row, own, cut.writers[k]);
        } catch (error) {
          if (error instanceof CkptError) error.phase = "read";
          throw error;
        }
      }
    }
    return lacks("the base is cut into other boxes");
  }

  /**
   * @param {number} field
   * @param {string} name
   * @param {string} scope
   * @returns {number} -1 for none
   */
  rowOfName(field, name, scope) {
    const { tensors } = this.index;
    const row = this.#rows?.get(tensorKey(FIELDS[field], name, scope)) ?? -1;
    return row >= 0 && tensors.name[row] === name ? row : -1;
  }

  /**
   * Open a base, once (page 45, "Read a block", step 2).
   *
   * @param {string} name @param {string} digest
   * @returns {Promise<Checkpoint>}
   */
  openBase(name, digest) {
    const root = this.#root;
    const known = root.#opened.get(digest);
    if (known !== undefined) return known;
    const opening = root.#openBase(name, digest);
    root.#opened.set(digest, opening);
    opening.catch(() => root.#opened.delete(digest));
    return opening;
  }

  /** @param {string} name @param {string} digest @returns {Promise<Checkpoint>} */
  async #openBase(name, digest) {
    const { references } = this.manifest;
    const fail = (
      /** @type {string} */ code,
      /** @type {string} */ clause,
      /** @type {string} */ detail,
    ) => {
      throw new CkptError(code, detail, { clause, where: name, phase: "read" });
    };
    if (!references.some((own) => own.digest === digest && own.name === name)) {
      fail("REFERENCE_CLOSURE", "REQ-DEL-021", "the manifest doesn't list this base");
    }
    const parent = parentOf(this.path);
    const places = [
      ...(parent === null ? [] : [{ source: this.source, path: join(parent, name) }]),
      ...(this.options.bases ?? []),
    ];
    let isOther = false;
    for (const { source, path } of places) {
      let found = null;
      try {
        found = await readRegister(source, path);
      } catch (error) {
        if (!(error instanceof CkptError) || error.kind === "StoreError") throw error;
        isOther ||= error.code !== "NOT_COMMITTED";
        continue;
      }
      if (found.content.type !== "manifest" || found.digest !== digest) {
        isOther = true;
        continue;
      }
      try {
        const manifest = requireManifest(found.content);
        const run = await runAround(source, path);
        if (run !== null) checkPlace(manifest, path, run.runId);
        const base = new Checkpoint(source, path, manifest, digest, this.options, this);
        await base.loadIndex();
        if (
          manifest.references.some(
            (own) =>
              !references.some(
                (listed) => listed.digest === own.digest && listed.name === own.name,
              ),
          )
        ) {
          fail(
            "REFERENCE_CLOSURE",
            "REQ-DEL-021",
            "the manifest leaves out references of its base",
          );
        }
        return base;
      } catch (error) {
        if (error instanceof CkptError) {
          error.at(path);
          error.phase = "read";
        }
        throw error;
      }
    }
    return isOther
      ? fail("BASE_MISMATCH", "REQ-DEL-020", "another checkpoint lies where the base should be")
      : fail("BASE_MISSING", "REQ-DEL-020", "the base isn't there");
  }

  /* ---------------------------------------------------------------------- verification ---- */

  /**
   * Check everything: every byte of every file, all documents, values and bases.
   *
   * @param {import("./verify.js").VerifyOptions} [options]
   * @returns {Promise<import("./verify.js").Report>}
   */
  verify(options) {
    return verify(/** @type {Checkpoint} */ (this), options);
  }

  /**
   * Run work; if a file is missing or damaged, see whether the register still holds this manifest.
   *
   * @template T
   * @param {() => Promise<T>} work @param {AbortSignal} [signal]
   * @returns {Promise<T>}
   */
  async guard(work, signal) {
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof CkptError) || !DAMAGE.has(error.code)) throw error;
      let isSame = false;
      try {
        isSame = (await readRegister(this.source, this.path, signal)).digest === this.digest;
      } catch (other) {
        // A storage that doesn't answer says nothing about the checkpoint.
        isSame = !(other instanceof CkptError) || other.kind === "StoreError";
      }
      if (isSame) throw error;
      throw new CkptError(
        "CHECKPOINT_RETIRED",
        "the checkpoint was replaced or retired while it was read",
        {
          clause: "REQ-OPN-013",
          where: this.path || ".",
          phase: error.phase,
          cause: error,
          remedy: "Open it again, or open another checkpoint.",
        },
      );
    }
  }
}

/** Codes of files that are missing or damaged. */
const DAMAGE = new Set([
  "FILE_MISSING",
  "FILE_NBYTES",
  "DOC_DIGEST",
  "BLOCK_DIGEST",
  "HEADER_DIGEST",
  "UNSAFE_FILE",
  "FILES_IN_CACHES",
  "STORE_IO",
]);

/**
 * Return the key of a tensor in `Checkpoint.tensors`.
 *
 * @param {string} field @param {string} name @param {string} scope
 */
export const tensorKey = (field, name, scope) =>
  `${field}/${name}${scope === "global" ? "" : `@${scope}`}`;

/** @param {number} nbytes @returns {Uint8Array} */
function allocate(nbytes) {
  try {
    return new Uint8Array(nbytes);
  } catch (cause) {
    throw new CkptError("LOAD_MEMORY", `there is no memory for ${nbytes} bytes at once`, {
      cause,
      remedy: "Read boxes of the tensor, or use streamTensor.",
    });
  }
}

/**
 * Cut a shape into boxes of at most `most` elements that follow each other in C order.
 *
 * @param {number[]} shape @param {number} most
 * @returns {Generator<Box>}
 */
function* slabsOf(shape, most) {
  if (product(shape) === 0) return;
  // The first dimension whose rows have at most `most` elements is cut.
  let dim = 0;
  while (dim < shape.length && product(shape.slice(dim + 1)) > most) dim += 1;
  if (dim >= shape.length) {
    yield shape.map((extent) => [0, extent]);
    return;
  }
  const rows = Math.max(1, Math.floor(most / product(shape.slice(dim + 1))));
  const outer = product(shape.slice(0, dim));
  for (let at = 0; at < outer; at += 1) {
    /** @type {Box} */
    const head = [];
    for (let k = dim - 1, rest = at; k >= 0; k -= 1) {
      head.unshift([rest % shape[k], (rest % shape[k]) + 1]);
      rest = Math.floor(rest / shape[k]);
    }
    for (let begin = 0; begin < shape[dim]; begin += rows) {
      yield [
        ...head,
        [begin, Math.min(begin + rows, shape[dim])],
        ...shape.slice(dim + 1).map((extent) => /** @type {[number, number]} */ ([0, extent])),
      ];
    }
  }
}
