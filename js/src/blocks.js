// @ts-check
/** Blocks of boxes: read, verified and decoded, from a checkpoint and its bases (pages 45, 70). */
import { blake3 } from "./blake3.js";
import { decodeBlock } from "./encodings.js";
import { CkptError, refuse } from "./errors.js";
import * as limits from "./limits.js";
import { join } from "./names.js";
import { blockDigest, blockNbytes, extentsOfBox } from "./parts.js";
import {
  baseRoles,
  checkRoles,
  decodeGradient,
  gradientRoles,
  newRoles,
  parseRule,
  predict,
} from "./prediction.js";
import { readPieces, readExactly, sizeOf } from "./reading.js";
import { equalBytes } from "./text.js";

/** @typedef {import("./parts.js").Part} Part */
/** @typedef {import("./checkpoint.js").Checkpoint} Checkpoint */

/**
 * A box of a part of a checkpoint.
 *
 * @typedef {{checkpoint: Checkpoint, part: Part, box: number}} Place
 */

/** Bytes of decoded blocks that are kept, since several blocks may need one. */
const CACHE_NBYTES = 24 * 1024 * 1024;

/** Counts for reports: what was read from storage, and what was decoded. */
export class Counts {
  /** Bytes of blocks read and compared with their digests. */
  readNbytes = 0;
  /** Bytes of blocks that were decoded. */
  decodedNbytes = 0;
}

/** The blocks of a checkpoint that was opened first, and of its bases. */
export class Blocks {
  /** @type {Map<string, {bytes: Uint8Array}>} */
  #cache = new Map();
  #cacheNbytes = 0;
  /** @type {WeakMap<Part, import("./prediction.js").Rule[]>} */
  #rules = new WeakMap();

  /**
   * @param {(place: Place, reference: number) => Promise<Place>} findBase of a box, in the
   *   checkpoint of a row of `references`
   */
  constructor(findBase) {
    this.findBase = findBase;
    this.counts = new Counts();
  }

  /**
   * Read blocks `[from, to)` of a box, in their order. The bytes of a block may be overwritten as
   * soon as the next block is asked for.
   *
   * @param {Place} place @param {number} from @param {number} to @param {AbortSignal} [signal]
   * @returns {AsyncGenerator<{block: number, bytes: Uint8Array}>}
   */
  async *read(place, from, to, signal) {
    const { part, box } = place;
    const { extents, encodings } = part;
    for (const row of extentsOfBox(part, box)) {
      const begin = extents.blockBegin[row];
      const low = Math.max(from, begin);
      const high = Math.min(to, begin + extents.blockCount[row]);
      if (low >= high) continue;
      const encoding = encodings[extents.encoding[row]];
      if (encoding === "raw") yield* this.#readRaw(place, row, low, high, signal);
      else if (encoding === "same") {
        const base = await this.findBase(place, extents.reference[row]);
        for (let block = low; block < high; block += 1) {
          if (!equalBytes(blockDigest(part, box, block), blockDigest(base.part, base.box, block))) {
            refuse(
              "BASE_BLOCK",
              "REQ-DEL-023",
              "the base has another block than this checkpoint",
              where(place, block),
            );
          }
        }
        yield* this.read(base, low, high, signal);
      } else yield* this.#readEncoded(place, row, encoding, low, high, signal);
    }
  }

  /** @param {Place} place @param {number} row @param {number} low @param {number} high
   *  @param {AbortSignal} [signal]
   *  @returns {AsyncGenerator<{block: number, bytes: Uint8Array}>} */
  async *#readRaw(place, row, low, high, signal) {
    const { checkpoint, part, box } = place;
    const { extents, files } = part;
    const path = await openFile(checkpoint, part, extents.file[row], signal);
    let at = extents.byteBegin[row] + (low - extents.blockBegin[row]) * part.origin.block_nbytes;
    let block = low;
    const pieces = readPieces(
      checkpoint.source,
      path,
      at,
      high - low,
      (piece) => blockNbytes(part, box, low + piece),
      signal,
    );
    for await (const bytes of pieces) {
      if (!equalBytes(blake3(bytes), blockDigest(part, box, block))) {
        refuse(
          "BLOCK_DIGEST",
          "REQ-OPN-006",
          `the bytes of block ${block} of ${where(place)} aren't the saved bytes`,
          `${path}, bytes ${at} to ${at + bytes.length}, of ${files.name[extents.file[row]]}`,
        );
      }
      this.counts.readNbytes += bytes.length;
      yield { block, bytes };
      at += bytes.length;
      block += 1;
    }
  }

  /** @param {Place} place @param {number} row @param {string} encoding @param {number} low
   *  @param {number} high @param {AbortSignal} [signal]
   *  @returns {AsyncGenerator<{block: number, bytes: Uint8Array}>} */
  async *#readEncoded(place, row, encoding, low, high, signal) {
    const { checkpoint, part, box } = place;
    const { extents, stored } = part;
    const isPredicted = extents.predicted[row] === 1;
    const base =
      extents.reference[row] === 0 ? null : await this.findBase(place, extents.reference[row]);
    const path = await openFile(checkpoint, part, extents.file[row], signal);
    let first = extents.storedBegin[row];
    let at = extents.byteBegin[row];
    for (let block = extents.blockBegin[row]; block < low; block += 1) {
      at += stored.nbytes[first];
      first += 1;
    }
    const dtype = part.dtypes[part.tensors.dtype[part.boxTensor[box]]];
    const pieces = readPieces(
      checkpoint.source,
      path,
      at,
      high - low,
      (piece) => stored.nbytes[first + piece],
      signal,
    );
    const baseBlocks = base === null ? null : this.read(base, low, high, signal);
    let block = low;
    try {
      for await (const bytes of pieces) {
        const own = first + block - low;
        if (!equalBytes(blake3(bytes), stored.digest.subarray(32 * own, 32 * own + 32))) {
          refuse(
            "BLOCK_DIGEST",
            "REQ-ENC-004",
            `the stored bytes of block ${block} of ${where(place)} are damaged`,
            `${path}, bytes ${at} to ${at + bytes.length}`,
          );
        }
        this.counts.readNbytes += bytes.length;
        at += bytes.length;
        const nbytes = blockNbytes(part, box, block);
        const content = isPredicted
          ? await this.#decodePredicted(place, encoding, block, bytes, nbytes, dtype, signal)
          : decodeAt(
              place,
              block,
              encoding,
              bytes,
              nbytes,
              dtype,
              baseBlocks === null ? null : (await baseBlocks.next()).value.bytes,
            );
        if (!equalBytes(blake3(content), blockDigest(part, box, block))) {
          refuse(
            "DECODED_DIGEST",
            "REQ-DEL-008",
            "a block doesn't decode to the saved bytes",
            where(place, block),
          );
        }
        this.counts.decodedNbytes += nbytes;
        yield { block, bytes: content };
        block += 1;
      }
    } finally {
      await baseBlocks?.return(undefined);
    }
  }

  /**
   * Decode a block whose base is a prediction.
   *
   * @param {Place} place @param {string} encoding @param {number} block
   * @param {Uint8Array} bytes stored ones @param {number} nbytes @param {string} dtype
   * @param {AbortSignal} [signal]
   */
  async #decodePredicted(place, encoding, block, bytes, nbytes, dtype, signal) {
    const { part, box } = place;
    const group = part.groupOf[box];
    const members = part.groups.boxes[group];
    const rule = this.#ruleOf(part, group);
    const role = rule.roles[part.roleOf[box]];
    const isGradient = encoding === "gradient";
    const width = dtype === "float32" ? 4 : 2;
    const begin = (block * part.origin.block_nbytes) / width;
    const end = begin + nbytes / width;
    /** @param {string[]} roles @param {(member: number) => Promise<Place>} find */
    const gather = async (roles, find) => {
      /** @type {import("./prediction.js").Blocks} */
      const blocks = new Map();
      for (const name of roles) {
        const member = await find(members[rule.roles.indexOf(name)]);
        const raw = await this.#range(member, 4 * begin, 4 * end, signal);
        blocks.set(name, new Float32Array(raw.buffer, raw.byteOffset, raw.length / 4));
      }
      return blocks;
    };
    const bases = await gather(
      isGradient ? gradientRoles(rule, role) : baseRoles(rule, role),
      (member) => this.findBase({ ...place, box: member }, part.groups.reference[group]),
    );
    if (isGradient) {
      return decoded(place, block, () => decodeGradient(rule, role, bytes, nbytes, bases));
    }
    const news = await gather(newRoles(rule, role), async (member) => ({ ...place, box: member }));
    return decodeAt(place, block, encoding, bytes, nbytes, dtype, predict(rule, role, bases, news));
  }

  /** @param {Part} part @param {number} group */
  #ruleOf(part, group) {
    const rules = this.#rules.get(part) ?? [];
    this.#rules.set(part, rules);
    if (rules[group] === undefined) {
      const { kind, rule, boxes } = part.groups;
      const parsed = parseRule(rule[group], kind[group]);
      checkRoles(
        parsed,
        boxes[group].map((box) => part.dtypes[part.tensors.dtype[part.boxTensor[box]]]),
      );
      rules[group] = parsed;
    }
    return rules[group];
  }

  /**
   * Read bytes of a box, from the kept blocks where they are there.
   *
   * @param {Place} place @param {number} begin @param {number} end @param {AbortSignal} [signal]
   * @returns {Promise<Uint8Array>} in a buffer of their own
   */
  async #range(place, begin, end, signal) {
    const { checkpoint, part, box } = place;
    const size = part.origin.block_nbytes;
    const out = new Uint8Array(end - begin);
    for (let block = Math.floor(begin / size); block * size < end; block += 1) {
      const key = `${checkpoint.digest} ${part.writer} ${box} ${block}`;
      let kept = this.#cache.get(key);
      if (kept === undefined) {
        const step = await this.read(place, block, block + 1, signal).next();
        kept = { bytes: step.value.bytes.slice() };
        this.#keep(key, kept);
      }
      const from = Math.max(begin, block * size);
      const to = Math.min(end, (block + 1) * size);
      out.set(kept.bytes.subarray(from - block * size, to - block * size), from - begin);
    }
    return out;
  }

  /** @param {string} key @param {{bytes: Uint8Array}} kept */
  #keep(key, kept) {
    this.#cache.set(key, kept);
    this.#cacheNbytes += kept.bytes.length;
    for (const [oldest, { bytes }] of this.#cache) {
      if (this.#cacheNbytes <= CACHE_NBYTES || oldest === key) return;
      this.#cache.delete(oldest);
      this.#cacheNbytes -= bytes.length;
    }
  }
}

/** @param {Place} place @param {number} [block] @returns {string} a box, for messages */
export function where({ checkpoint, part, box }, block) {
  const tensor = part.boxTensor[box];
  const name = `${JSON.stringify(part.tensors.name[tensor])} in ${checkpoint.path || "."}`;
  return block === undefined ? `the tensor ${name}` : `block ${block} of the tensor ${name}`;
}

/**
 * @param {Place} place @param {number} block @param {() => Uint8Array} decode
 */
function decoded(place, block, decode) {
  try {
    return decode();
  } catch (error) {
    throw error instanceof CkptError ? error.at(where(place, block), "read") : error;
  }
}

/** @param {Place} place @param {number} block @param {string} encoding @param {Uint8Array} bytes
 *  @param {number} nbytes @param {string} dtype @param {Uint8Array | null} base */
const decodeAt = (place, block, encoding, bytes, nbytes, dtype, base) =>
  decoded(place, block, () => decodeBlock(encoding, bytes, nbytes, dtype, base));

/**
 * Compare a file's size and header with the part, once (REQ-OPN-011).
 *
 * @param {Checkpoint} checkpoint @param {Part} part @param {number} file its row
 * @param {AbortSignal} [signal]
 * @returns {Promise<string>} the path of the file
 */
export function openFile(checkpoint, part, file, signal) {
  const name = part.files.name[file];
  const known = checkpoint.openedFiles.get(name);
  if (known !== undefined) return known;
  const opening = (async () => {
    const path = join(checkpoint.path, name);
    await readHeader(checkpoint, part, file, signal);
    return path;
  })();
  checkpoint.openedFiles.set(name, opening);
  opening.catch(() => checkpoint.openedFiles.delete(name));
  return opening;
}

/**
 * Read the header of a file: length, JSON and padding, or the 64 bytes of a pack.
 *
 * @param {Checkpoint} checkpoint
 * @param {Part} part
 * @param {number} file
 * @param {AbortSignal} [signal]
 */
export async function readHeader(checkpoint, part, file, signal) {
  const { files } = part;
  const path = join(checkpoint.path, files.name[file]);
  const nbytes = await sizeOf(checkpoint.source, path, signal);
  if (nbytes === null) {
    if (part.labels.durability !== undefined) {
      throw new CkptError("FILES_IN_CACHES", "the file is in caches of nodes, and not at home", {
        clause: "REQ-OPN-012",
        where: path,
        remedy: "Look for the nodes that saved the checkpoint, or use an older checkpoint.",
      });
    }
    refuse("FILE_MISSING", "REQ-CKP-004", "the file isn't there", path);
  }
  if (nbytes !== files.nbytes[file]) {
    refuse(
      "FILE_NBYTES",
      "REQ-CKP-003",
      `the file has ${nbytes} bytes instead of ${files.nbytes[file]}`,
      path,
    );
  }
  const headerNbytes = files.headerNbytes[file];
  if (headerNbytes > limits.SHARD_HEADER_NBYTES + 8) {
    refuse("LIMIT_EXCEEDED", "REQ-SHD-001", "the header is too long", path);
  }
  const header = await readExactly(checkpoint.source, path, 0, headerNbytes, signal);
  if (!equalBytes(blake3(header), files.headerDigest.subarray(32 * file, 32 * file + 32))) {
    refuse("HEADER_DIGEST", "REQ-PRT-008", "the header isn't the saved header", path);
  }
  return header;
}
