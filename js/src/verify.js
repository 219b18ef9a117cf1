// @ts-check
/** A check of everything: whether a checkpoint is whole (page 30). @module */
import { blake3 } from "./blake3.js";
import { openFile, readHeader } from "./blocks.js";
import { checkTiling } from "./boxes.js";
import { checkPosition } from "./cursor.js";
import { CkptError, located, refuse } from "./errors.js";
import { boxOf } from "./indexes.js";
import { FIELDS, join, partPath } from "./names.js";
import { extentsOfBox } from "./parts.js";
import { compareHeader, parseHeader } from "./shards.js";
import { shapeOfRow } from "./tables.js";
import { equalBytes, toHex } from "./text.js";
import { parseTree, tensorNames } from "./tree.js";

/** @typedef {import("./checkpoint.js").Checkpoint} Checkpoint */
/** @typedef {import("./parts.js").Part} Part */

/**
 * How far a verification is.
 *
 * @typedef {object} Progress
 * @property {number} doneNbytes bytes of tensors checked so far, as stored in files
 * @property {number} totalNbytes bytes of all files of tensors, as far as the parts read so far say
 * @property {string} where what was checked last
 */
/**
 * @typedef {object} VerifyOptions
 * @property {(progress: Progress) => void} [onProgress] called after each block, synchronously
 * @property {AbortSignal} [signal] ends the verification; the promise is then rejected with its
 *   reason
 * @property {boolean} [failFast] throw the first problem instead of listing all
 */
/**
 * What a verification found.
 *
 * @typedef {object} Report
 * @property {boolean} isWhole whether a run may continue from this checkpoint
 * @property {CkptError[]} problems
 * @property {{name: string, problems: CkptError[]}[]} bases for each base of a delta what is wrong
 *   there by itself, also in blocks that this checkpoint doesn't read
 * @property {number} readNbytes bytes of blocks read and compared with their digests
 * @property {number} seconds
 */

/**
 * Check everything of a checkpoint.
 *
 * @param {Checkpoint} checkpoint @param {VerifyOptions} [options]
 * @returns {Promise<Report>}
 */
export async function verify(checkpoint, options = {}) {
  const begin = performance.now();
  const { signal } = options;
  const before = checkpoint.blocks.counts.readNbytes;
  /** @type {CkptError[]} */
  const problems = [];
  const attempt = async (/** @type {() => Promise<void>} */ work) => {
    signal?.throwIfAborted();
    try {
      await checkpoint.guard(work, signal);
    } catch (error) {
      if (
        !(error instanceof CkptError) ||
        error.kind === "StoreError" ||
        error.code === "CHECKPOINT_RETIRED" ||
        options.failFast
      )
        throw error;
      error.phase ??= "validate";
      problems.push(error);
    }
  };
  checkpoint.openedFiles.clear();
  await checkDocuments(checkpoint, attempt, signal);
  await checkContent(checkpoint, attempt, options);
  /** @type {Report["bases"]} */
  const bases = [];
  for (const { name, digest } of checkpoint.manifest.references) {
    await attempt(async () => {
      const base = await checkpoint.openBase(name, digest);
      if (options.failFast) return;
      const report = await verifyBase(base, options);
      bases.push({ name, problems: report });
    });
  }
  return {
    isWhole: problems.length === 0,
    problems,
    bases,
    readNbytes: checkpoint.blocks.counts.readNbytes - before,
    seconds: (performance.now() - begin) / 1000,
  };
}

/** @param {Checkpoint} base @param {VerifyOptions} options @returns {Promise<CkptError[]>} */
async function verifyBase(base, { signal }) {
  /** @type {CkptError[]} */
  const problems = [];
  const attempt = async (/** @type {() => Promise<void>} */ work) => {
    signal?.throwIfAborted();
    try {
      await base.guard(work, signal);
    } catch (error) {
      if (!(error instanceof CkptError) || error.kind === "StoreError") throw error;
      error.phase = "validate"; // what the delta reads of the base was found before
      problems.push(error);
    }
  };
  base.openedFiles.clear();
  await checkDocuments(base, attempt, signal);
  await checkContent(base, attempt, { signal });
  return problems;
}

/** @typedef {(work: () => Promise<void>) => Promise<void>} Attempt */

/** @param {Checkpoint} checkpoint @param {number} writer */
const placeOfPart = (checkpoint, writer) =>
  join(checkpoint.path, partPath(checkpoint.manifest.attempt, writer));

/**
 * Check all parts against the index: each box, leaf and stream that the index places in a part.
 *
 * @param {Checkpoint} checkpoint @param {Attempt} attempt @param {AbortSignal} [signal]
 */
export async function checkDocuments(checkpoint, attempt, signal) {
  const { index, manifest } = checkpoint;
  const rows = Array.from({ length: manifest.writer_count }, () => ({
    tensors: /** @type {[number, number][]} */ ([]),
    leaves: /** @type {number[]} */ ([]),
    streams: /** @type {number[]} */ ([]),
  }));
  for (let row = 0; row < index.tensors.count; row += 1) {
    const { writers } = index.shardings[index.sharding[row]];
    writers.forEach((writer, box) => rows[writer].tensors.push([row, box]));
  }
  index.leaves.part.forEach((/** @type {number} */ writer, /** @type {number} */ row) =>
    rows[writer].leaves.push(row),
  );
  index.streams.part.forEach((/** @type {number} */ writer, /** @type {number} */ row) =>
    rows[writer].streams.push(row),
  );
  for (const [writer, own] of rows.entries()) {
    await attempt(async () => {
      const part = await checkpoint.part(writer, signal);
      for (const [row, box] of own.tensors) {
        checkpoint.placeIn(part, row, boxOf(index.shardings[index.sharding[row]], box));
      }
      for (const row of own.leaves) checkpoint.leafBytes(part, row);
      for (const row of own.streams) checkpoint.streamBytes(part, row);
    });
  }
  await attempt(async () => void (await checkpoint.frozen(signal)));
}

/**
 * Check files, blocks, trees and the merge.
 *
 * @param {Checkpoint} checkpoint @param {Attempt} attempt @param {VerifyOptions} options
 */
async function checkContent(checkpoint, attempt, { signal, onProgress }) {
  const { manifest } = checkpoint;
  const merge = new Merge(checkpoint);
  const progress = { doneNbytes: 0, totalNbytes: 0, where: "" };
  let isComplete = true;
  for (let writer = 0; writer < manifest.writer_count; writer += 1) {
    /** @type {Part | null} */
    let part = null;
    await checkpoint.part(writer, signal).then(
      (found) => {
        part = found;
      },
      () => {},
    );
    if (part === null) {
      isComplete = false; // reported already
      continue;
    }
    await checkPart(checkpoint, part, attempt, progress, signal, onProgress);
    await attempt(async () =>
      located(placeOfPart(checkpoint, writer), "validate", () =>
        merge.add(/** @type {Part} */ (/** @type {unknown} */ (part))),
      ),
    );
  }
  if (isComplete)
    await attempt(async () => located(checkpoint.path || ".", "validate", () => merge.finish()));
  if (isComplete) {
    await attempt(async () => {
      const wanted = new Map(merge.references);
      for (const [digest, name] of merge.references) {
        const base = await checkpoint.openBase(name, digest);
        for (const own of base.manifest.references) wanted.set(own.digest, own.name);
      }
      if (wanted.size !== manifest.references.length) {
        throw new CkptError("DOC_MISMATCH", "the manifest has references that no part needs", {
          clause: "REQ-DEL-021",
          where: checkpoint.path,
          phase: "validate",
        });
      }
    });
  }
}

/**
 * @param {Checkpoint} checkpoint @param {Part} part @param {Attempt} attempt
 * @param {Progress} progress @param {AbortSignal} [signal]
 * @param {(progress: Progress) => void} [onProgress]
 */
async function checkPart(checkpoint, part, attempt, progress, signal, onProgress) {
  const { files, groups, leaves, streams } = part;
  const place = placeOfPart(checkpoint, part.writer);
  for (let file = 0; file < files.count; file += 1) {
    progress.totalNbytes += files.nbytes[file] - files.headerNbytes[file];
    await attempt(async () => {
      const header = await readHeader(checkpoint, part, file, signal);
      if (files.kind[file] === "pack") return;
      located(join(checkpoint.path, files.name[file]), "validate", () =>
        compareHeader(parseHeader(header, files.nbytes[file]), part, file),
      );
    });
  }
  const done = new Set();
  for (let group = 0; group < groups.count; group += 1) {
    // Members of a group are read side by side, so that each block is decoded once.
    await attempt(() =>
      readGroup(checkpoint, part, groups.boxes[group], progress, signal, onProgress),
    );
    for (const box of groups.boxes[group]) done.add(box);
  }
  for (let box = 0; box < part.boxCount; box += 1) {
    if (done.has(box) || extentsOfBox(part, box).length === 0) continue;
    await attempt(() => readBox(checkpoint, part, box, progress, signal, onProgress));
  }
  for (let row = 0; row < streams.count; row += 1) {
    const where = `the stream ${JSON.stringify(streams.name[row])} in ${place}`;
    await attempt(async () =>
      checkTree(checkpoint, streams.state[row], 2, part.scopes[streams.scope[row]], where, false),
    );
  }
  for (let row = 0; row < leaves.count; row += 1) {
    const where = `the leaf ${JSON.stringify(leaves.name[row])} in ${place}`;
    await attempt(async () =>
      checkTree(
        checkpoint,
        leaves.value[row],
        leaves.field[row],
        part.scopes[leaves.scope[row]],
        where,
        leaves.field[row] === 3,
      ),
    );
  }
}

/**
 * @param {Checkpoint} checkpoint @param {Part} part @param {number} box @param {Progress} progress
 * @param {AbortSignal} [signal] @param {(progress: Progress) => void} [onProgress]
 */
async function readBox(checkpoint, part, box, progress, signal, onProgress) {
  const { files, extents, boxBlocks } = part;
  if (boxBlocks[box] === 0) {
    for (const row of extentsOfBox(part, box)) {
      if (extents.file[row] < files.count)
        await openFile(checkpoint, part, extents.file[row], signal);
    }
    return;
  }
  const place = { checkpoint, part, box };
  const { counts } = checkpoint.blocks;
  let before = counts.readNbytes;
  const name = part.tensors.name[part.boxTensor[box]];
  for await (const { block } of checkpoint.blocks.read(place, 0, boxBlocks[box], signal)) {
    signal?.throwIfAborted();
    void block;
    progress.doneNbytes += counts.readNbytes - before;
    before = counts.readNbytes;
    progress.where = name;
    onProgress?.({ ...progress });
  }
}

/**
 * @param {Checkpoint} checkpoint @param {Part} part @param {number[]} boxes
 * @param {Progress} progress @param {AbortSignal} [signal]
 * @param {(progress: Progress) => void} [onProgress]
 */
async function readGroup(checkpoint, part, boxes, progress, signal, onProgress) {
  const { counts } = checkpoint.blocks;
  const most = Math.max(...boxes.map((box) => part.boxBlocks[box]));
  for (let slot = 0; slot < most; slot += 1) {
    for (const box of boxes) {
      // Boxes of narrower elements have fewer blocks for the same elements.
      const ratio = part.boxBlocks[box] / most;
      const from = Math.ceil(slot * ratio);
      const to = Math.ceil((slot + 1) * ratio);
      let before = counts.readNbytes;
      for await (const { block } of checkpoint.blocks.read(
        { checkpoint, part, box },
        from,
        to,
        signal,
      )) {
        signal?.throwIfAborted();
        void block;
        progress.doneNbytes += counts.readNbytes - before;
        before = counts.readNbytes;
        progress.where = part.tensors.name[part.boxTensor[box]];
        onProgress?.({ ...progress });
      }
    }
  }
}

/**
 * Check a tree, its references to tensors, and a position in the data.
 *
 * @param {Checkpoint} checkpoint @param {Uint8Array} bytes @param {number} field
 * @param {string} scope @param {string} where @param {boolean} mayBePosition
 */
function checkTree(checkpoint, bytes, field, scope, where, mayBePosition) {
  const tree = located(where, "read", () => parseTree(bytes));
  located(where, "validate", () => {
    for (const name of tensorNames(tree)) {
      // The field `rng` has no tensors: a reference in a stream refers to none.
      if (field === 2 || !checkpoint.hasTensor(field, name, scope)) {
        refuse(
          "TREE_REFERENCE",
          "REQ-TRE-004",
          `a tree refers to ${JSON.stringify(name)}, and the ` +
            `index has no such tensor of ${FIELDS[field]}`,
        );
      }
    }
    if (mayBePosition) checkPosition(tree);
  });
}

/** The index and the manifest that follow from the parts (page 70, "Merge"). */
class Merge {
  /** @type {Map<string, {row: [string, string, number], aliases: Set<string>,
   *    boxes: Map<string, {box: import("./boxes.js").Box, writer: number, digests: string | null,
   *    isReplica: boolean, isEmpty: boolean}>}>} */
  #tensors = new Map();
  /** @type {Map<string, {writer: number, bytes: Uint8Array}>} */
  #leaves = new Map();
  /** @type {Map<string, {writer: number, bytes: Uint8Array, kind: string}>} */
  #streams = new Map();
  #content = new Set();
  /** @type {Map<string, number>} how many parts give a reason for each field */
  #reasons = new Map();
  /** @type {Part | null} */
  #first = null;
  #features = new Set();
  #storedNbytes = FIELDS.map(() => 0);
  #weakest = "home";
  /** @type {Map<string, string>} name by digest */
  references = new Map();

  /** @param {Checkpoint} checkpoint */
  constructor(checkpoint) {
    this.checkpoint = checkpoint;
  }

  /** Add the next part, in the order of their writers. @param {Part} part */
  add(part) {
    this.#first ??= part;
    for (const name of part.features) this.#features.add(name);
    for (const { name, digest } of part.references) this.references.set(digest, name);
    const durability = part.labels.durability ?? "home";
    const order = ["node", "peers", "home"];
    if (order.indexOf(durability) < order.indexOf(this.#weakest)) this.#weakest = durability;
    for (const field of part.absent.keys()) {
      this.#reasons.set(field, (this.#reasons.get(field) ?? 0) + 1);
    }
    this.#addTensors(part);
    this.#addValues(part);
    for (let row = 0; row < part.extents.count; row += 1) {
      const tensor = part.boxTensor[part.extents.box[row]];
      if (part.extents.file[row] < part.files.count) {
        this.#storedNbytes[part.tensors.field[tensor]] += part.extents.nbytes[row];
      }
    }
  }

  /** @param {Part} part */
  #addTensors(part) {
    const { tensors, scopes, dtypes, aliases } = part;
    for (let row = 0; row < tensors.count; row += 1) {
      const field = tensors.field[row];
      const key = `${field} ${scopes[tensors.scope[row]]} ${tensors.name[row]}`;
      this.#content.add(field);
      const shape = shapeOfRow(tensors, row);
      /** @type {[string, string, number]} */
      const own = [dtypes[tensors.dtype[row]], String(shape), tensors.storage[row]];
      const merged = this.#tensors.get(key) ?? { row: own, aliases: new Set(), boxes: new Map() };
      this.#tensors.set(key, merged);
      if (String(merged.row) !== String(own)) {
        refuse(
          "TENSOR_DIVERGED",
          "REQ-CMT-011",
          `parts have ${JSON.stringify(tensors.name[row])} ` +
            "with different dtypes, shapes or kinds",
        );
      }
      for (let box = part.boxBegin[row]; box < part.boxBegin[row + 1]; box += 1) {
        this.#addBox(
          part,
          merged.boxes,
          box,
          shape.length,
          shape.every((extent) => extent > 0),
        );
      }
    }
    aliases.tensor.forEach((/** @type {number} */ row, /** @type {number} */ at) => {
      const key = `${tensors.field[row]} ${scopes[tensors.scope[row]]} ${tensors.name[row]}`;
      this.#tensors.get(key)?.aliases.add(aliases.name[at]);
    });
  }

  /**
   * @param {Part} part @param {Map<string, any>} boxes @param {number} box @param {number} ndim
   * @param {boolean} hasElements whether the tensor has any
   */
  #addBox(part, boxes, box, ndim, hasElements) {
    const at = part.boxDims[box];
    const place = Array.from(
      { length: ndim },
      (_, dim) =>
        /** @type {[number, number]} */ ([
          part.begin[at + dim],
          part.begin[at + dim] + part.boxShape[at + dim],
        ]),
    );
    if (hasElements && part.boxNbytes[box] === 0) return;
    const key = String(place);
    const isReplica = part.replica[box] === 1;
    const begin = 32 * part.digestBegin[box];
    const count = part.digestCount[box];
    const digests =
      count === 0 && part.boxBlocks[box] > 0
        ? null
        : toHex(blake3(part.digests.subarray(begin, begin + 32 * count)));
    const isWritten = extentsOfBox(part, box).length > 0;
    const known = boxes.get(key);
    if (known === undefined) {
      boxes.set(key, { box: place, writer: isWritten ? part.writer : -1, digests, isReplica });
      return;
    }
    if (known.digests !== null && digests !== null && known.digests !== digests) {
      refuse("REPLICA_DIVERGED", "REQ-CMT-012", "holders of one box have different contents");
    }
    known.isReplica &&= isReplica;
    if ((known.digests === null || digests === null) && !known.isReplica) {
      refuse(
        "REPLICA_DIVERGED",
        "REQ-CMT-012",
        "a holder of a box that isn't declared a replica " + "gives no digests",
      );
    }
    known.digests ??= digests;
    if (known.writer < 0 && isWritten) known.writer = part.writer;
  }

  /** @param {Part} part */
  #addValues(part) {
    const { leaves, streams, scopes } = part;
    const diverge = (/** @type {string} */ name) =>
      refuse(
        "LEAF_DIVERGED",
        "REQ-CMT-014",
        `parts have different values of ${JSON.stringify(name)}`,
      );
    for (let row = 0; row < leaves.count; row += 1) {
      this.#content.add(leaves.field[row]);
      const key = `${leaves.field[row]} ${scopes[leaves.scope[row]]} ${leaves.name[row]}`;
      const known = this.#leaves.get(key);
      if (known === undefined)
        this.#leaves.set(key, { writer: part.writer, bytes: leaves.value[row] });
      else if (!equalBytes(known.bytes, leaves.value[row])) diverge(leaves.name[row]);
    }
    for (let row = 0; row < streams.count; row += 1) {
      this.#content.add(2);
      const key = `${scopes[streams.scope[row]]} ${streams.name[row]}`;
      const known = this.#streams.get(key);
      if (known === undefined) {
        this.#streams.set(key, {
          writer: part.writer,
          bytes: streams.state[row],
          kind: streams.kind[row],
        });
      } else if (known.kind !== streams.kind[row] || !equalBytes(known.bytes, streams.state[row])) {
        diverge(streams.name[row]);
      }
    }
  }

  /** Compare the result with index and manifest. */
  finish() {
    const { index, manifest } = this.checkpoint;
    const first = /** @type {Part} */ (this.#first);
    const differs = (/** @type {string} */ clause, /** @type {string} */ detail) =>
      refuse("DOC_MISMATCH", clause, detail);
    this.#compareTensors(differs);
    this.#compareValues(differs);
    FIELDS.forEach((field, number) => {
      const isAbsent =
        !this.#content.has(number) && this.#reasons.get(field) === manifest.writer_count;
      const reason = isAbsent ? first.absent.get(field) : undefined;
      if (index.absent.get(field) !== reason) {
        differs(
          "REQ-CMT-017",
          `the index says of the absence of ${field} another thing than the parts`,
        );
      }
      const summary = manifest.fields[field];
      if (
        summary.state === "present" &&
        summary.stored_nbytes !== undefined &&
        summary.stored_nbytes !== this.#storedNbytes[number]
      ) {
        refuse(
          "MANIFEST_SUMMARY",
          "REQ-MAN-006",
          `stored_nbytes of ${field} doesn't follow from the parts`,
        );
      }
    });
    if (first.origin.saved_unix_s !== index.origin.saved_unix_s) {
      differs("REQ-CMT-018", "saved_unix_s isn't the value of part 0");
    }
    const features = [...this.#features].sort();
    if (String(features) !== String(manifest.features.reader)) {
      differs("REQ-DEL-001", "the features of the manifest aren't those of the parts together");
    }
    const { metrics, tags, suspect } = first.labels;
    const sorted = (/** @type {Record<string, string> | undefined} */ map) =>
      map && Object.entries(map).sort(([a], [b]) => (a < b ? -1 : 1));
    if (
      JSON.stringify([sorted(metrics), tags, suspect]) !==
      JSON.stringify([sorted(manifest.metrics), manifest.tags, manifest.suspect])
    ) {
      differs("REQ-CMT-039", "the labels of the manifest aren't those of part 0");
    }
    if (this.#weakest !== (manifest.durability ?? "home")) {
      differs("REQ-CMT-046", "the durability of the manifest isn't the weakest of the parts");
    }
  }

  /** @param {(clause: string, detail: string) => never} differs */
  #compareTensors(differs) {
    const { index } = this.checkpoint;
    const { tensors, scopes, dtypes, aliases } = index;
    /** @type {Map<string, Set<string>>} */
    const names = new Map();
    const keyOf = (/** @type {number} */ row) =>
      `${tensors.field[row]} ${scopes[tensors.scope[row]]} ${tensors.name[row]}`;
    aliases.tensor.forEach((/** @type {number} */ row, /** @type {number} */ at) => {
      names.set(keyOf(row), (names.get(keyOf(row)) ?? new Set()).add(aliases.name[at]));
    });
    /** @type {Set<string>} */
    const taken = new Set();
    for (const [key, { row, boxes, aliases: own }] of this.#tensors) {
      const name = key.split(" ").slice(2).join(" ");
      const space = key.slice(0, key.length - name.length);
      for (const each of [name, ...own]) {
        if (taken.has(space + each)) {
          refuse(
            "TENSOR_DIVERGED",
            "REQ-IDX-008",
            `${JSON.stringify(each)} belongs to two tensors`,
          );
        }
        taken.add(space + each);
      }
      const shape = row[1] === "" ? [] : row[1].split(",").map(Number);
      for (const { writer, box } of boxes.values()) {
        if (writer < 0) {
          refuse(
            "HELD_NOT_WRITTEN",
            "REQ-CMT-013",
            `no writer wrote the box ${JSON.stringify(box)} of ${JSON.stringify(name)}`,
          );
        }
      }
      const list = [...boxes.values()];
      located(`the tensor ${JSON.stringify(name)}`, "validate", () =>
        checkTiling(
          shape,
          list.length,
          (box, dim) => list[box].box[dim][0],
          (box, dim) => list[box].box[dim][1] - list[box].box[dim][0],
        ),
      );
    }
    if (tensors.count !== this.#tensors.size) {
      differs("REQ-IDX-001", "the index has other tensors than the parts together");
    }
    for (let row = 0; row < tensors.count; row += 1) {
      const merged = this.#tensors.get(keyOf(row));
      const own = [
        dtypes[tensors.dtype[row]],
        String(shapeOfRow(tensors, row)),
        tensors.storage[row],
      ];
      if (merged === undefined || String(merged.row) !== String(own)) {
        return differs("REQ-CMT-011", "the index has a tensor that no part has so");
      }
      const cut = index.shardings[index.sharding[row]];
      if (cut.boxCount !== merged.boxes.size) {
        differs("REQ-CMT-015", "the index has other boxes of a tensor than the parts together");
      }
      for (let k = 0; k < cut.boxCount; k += 1) {
        if (merged.boxes.get(String(boxOf(cut, k)))?.writer !== cut.writers[k]) {
          differs("REQ-CMT-016", "the index doesn't name the lowest writer of a box");
        }
      }
      const listed = names.get(keyOf(row)) ?? new Set();
      if (
        listed.size !== merged.aliases.size ||
        ![...listed].every((alias) => merged.aliases.has(alias))
      ) {
        differs("REQ-CMT-011", "the index has other aliases than the parts together");
      }
    }
  }

  /** @param {(clause: string, detail: string) => never} differs */
  #compareValues(differs) {
    const { leaves, streams, scopes } = this.checkpoint.index;
    if (leaves.count !== this.#leaves.size || streams.count !== this.#streams.size) {
      differs("REQ-CMT-014", "the index has other leaves or streams than the parts together");
    }
    for (let row = 0; row < leaves.count; row += 1) {
      const merged = this.#leaves.get(
        `${leaves.field[row]} ${scopes[leaves.scope[row]]} ${leaves.name[row]}`,
      );
      if (merged?.writer !== leaves.part[row]) {
        differs("REQ-CMT-014", "the index doesn't name the lowest writer of a leaf");
      }
    }
    for (let row = 0; row < streams.count; row += 1) {
      const merged = this.#streams.get(`${scopes[streams.scope[row]]} ${streams.name[row]}`);
      if (merged?.writer !== streams.part[row] || merged.kind !== streams.kind[row]) {
        differs("REQ-CMT-014", "the index doesn't name the lowest writer of a stream");
      }
    }
  }
}
