// @ts-check
/** A small writer of full checkpoints of float32 tensors, for tests and benchmarks. @module */
import { deflateSync } from "node:zlib";
import { blake3 } from "../src/blake3.js";
import { canonicalJson } from "../src/json.js";
import { FIELDS } from "../src/names.js";
import { digestText } from "../src/text.js";
import { dumpMsgpack, pack } from "./vectors.mjs";

const ATTEMPT = "00112233445566ff";
export const SHARD = `weights-${ATTEMPT}-00000.safetensors`;
const BLOCK = 1 << 20;

/** @param {any} content */
function msgpackDocument(content) {
  const raw = dumpMsgpack(content);
  const signed = new Uint8Array(deflateSync(raw, { level: 0 }));
  const digest = blake3(signed);
  return { digest, bytes: dumpMsgpack(table({ digest, nbytes: raw.length, signed })) };
}

/** @param {Record<string, any>} members */
const table = (members) => new Map(Object.entries(members));

/** @param {string[]} texts */
const strings = (texts) => [pack(texts.map((text) => Buffer.byteLength(text))), texts.join("")];

/** @param {number} count */
const zeros = (count) => pack(Array(count).fill(0));

/**
 * Make the header of the shard, and then the documents.
 *
 * @param {{name: string, shape: number[]}[]} tensors sorted by name, of float32
 * @param {(tensor: number, block: number) => Uint8Array} digestOf a block
 * @param {{run_id: string | null, launch: number | null, step: number}} [place] in a run
 * @returns all files but the shard; its header and its size
 */
export function makeCheckpoint(tensors, digestOf, place = { run_id: null, launch: null, step: 1 }) {
  const sizes = tensors.map(
    ({ shape }) => 4 * shape.reduce((product, extent) => product * extent, 1),
  );
  /** @type {Record<string, any>} */
  const listed = { __metadata__: { format: "pt" } };
  let end = 0;
  tensors.forEach(({ name, shape }, at) => {
    listed[name] = { dtype: "F32", shape, data_offsets: [end, end + sizes[at]] };
    end += sizes[at];
  });
  let text = JSON.stringify(listed);
  text += " ".repeat((64 - ((8 + text.length) % 64)) % 64);
  const header = new Uint8Array(8 + text.length);
  new DataView(header.buffer).setUint32(0, text.length, true);
  header.set(Buffer.from(text), 8);
  const nbytes = header.length + end;
  const blocks = sizes.map((size) => Math.ceil(size / BLOCK));
  const digests = Buffer.concat(
    blocks.flatMap((count, tensor) =>
      Array.from({ length: count }, (_, block) => digestOf(tensor, block)),
    ),
  );
  const count = tensors.length;
  const dims = tensors.flatMap(({ shape }) => shape);
  const absent = new Map(FIELDS.slice(1).map((field) => [field, "a test"]));
  const both = {
    format_version: "1.0",
    features: table({ reader: [], writer: [] }),
    ...place,
    nonce: "00".repeat(16),
    attempt: ATTEMPT,
    writer_count: 1,
    block_nbytes: BLOCK,
    saved_unix_s: 0,
    scopes: count ? ["global"] : [],
    dtypes: count ? ["float32"] : [],
    absent,
    aliases: table({ tensor: pack([]), name: strings([]) }),
  };
  const rows = {
    field: zeros(count),
    name: strings(tensors.map(({ name }) => name)),
    scope: zeros(count),
    dtype: zeros(count),
    ndim: pack(tensors.map(({ shape }) => shape.length)),
    global_shape: pack(dims),
    storage: zeros(count),
  };
  const part = msgpackDocument(
    table({
      ...both,
      type: "part",
      writer: 0,
      references: [],
      encodings: ["raw"],
      digests: new Uint8Array(digests),
      files: table({
        name: strings([SHARD]),
        kind: strings(["safetensors"]),
        nbytes: pack([nbytes]),
        header_nbytes: pack([header.length]),
        header_digest: blake3(header),
      }),
      tensors: table({ ...rows, box_count: pack(Array(count).fill(1)) }),
      boxes: table({
        begin: zeros(dims.length),
        cut_shape: zeros(dims.length),
        replica: zeros(count),
        digest_count: pack(blocks),
      }),
      extents: table({
        box: zeros(count),
        block_begin: zeros(count),
        block_count: pack(blocks),
        file: zeros(count),
        gap_nbytes: zeros(count),
        encoding: zeros(count),
        key: strings(Array(count).fill("")),
      }),
      streams: table({ name: strings([]), kind: strings([]), scope: pack([]), state: [] }),
      leaves: table({ name: strings([]), field: pack([]), scope: pack([]), value: [] }),
    }),
  );
  /** @type {Map<string, number>} */
  const shardings = new Map();
  for (const { shape } of tensors) {
    if (!shardings.has(String(shape))) shardings.set(String(shape), shardings.size);
  }
  const cuts = [...shardings.keys()].map((key) => key.split(",").map(Number));
  const cutDims = cuts.flat();
  const index = msgpackDocument(
    table({
      ...both,
      type: "index",
      parts: table({ nbytes: pack([part.bytes.length]), digest: part.digest }),
      tensors: table({
        ...rows,
        sharding: pack(tensors.map(({ shape }) => shardings.get(String(shape)) ?? 0)),
      }),
      shardings: table({
        ndim: pack(cuts.map((cut) => cut.length)),
        form: pack(cuts.map(() => 1)),
        box_count: pack(cuts.map(() => 1)),
        grid_shape: pack(cutDims.map(() => 1)),
        extent: pack(cutDims),
        begin: pack([]),
        box_shape: pack([]),
        part: zeros(cuts.length),
      }),
      streams: table({ name: strings([]), kind: strings([]), scope: pack([]), part: pack([]) }),
      leaves: table({ name: strings([]), field: pack([]), scope: pack([]), part: pack([]) }),
    }),
  );
  const name = `index-${ATTEMPT}.msgpack`;
  /** @type {any} */
  const signed = {
    type: "manifest",
    format_version: "1.0",
    features: { reader: [], writer: [] },
    ...place,
    nonce: "00".repeat(16),
    attempt: ATTEMPT,
    writer_count: 1,
    block_nbytes: BLOCK,
    saved_unix_s: 0,
    profile: "full",
    references: [],
    fields: Object.fromEntries(
      FIELDS.map((field) => [
        field,
        field === "weights"
          ? { state: "present", tensor_count: count, nbytes: end, stream_count: 0, leaf_count: 0 }
          : { state: "absent", reason: "a test" },
      ]),
    ),
    index: { name, nbytes: index.bytes.length, digest: digestText(index.digest) },
  };
  const digest = digestText(blake3(new TextEncoder().encode(canonicalJson(signed))));
  const manifest = new TextEncoder().encode(canonicalJson({ digest, signed }));
  return {
    header,
    nbytes,
    files: new Map([
      [`parts/${ATTEMPT}-00000.msgpack`, part.bytes],
      [name, index.bytes],
      ["manifest.json", manifest],
    ]),
  };
}

/**
 * A source with a checkpoint whose tensors are zeros, which are made as they are read.
 *
 * @param {{name: string, shape: number[]}[]} tensors of whole blocks
 * @returns {import("../src/index.js").Source}
 */
export function zerosSource(tensors) {
  const digest = blake3(new Uint8Array(BLOCK));
  const { files, header, nbytes } = makeCheckpoint(tensors, () => digest);
  return {
    name: "zeros",
    async stat(path) {
      if (path === SHARD) return { kind: "file", nbytes };
      const file = files.get(path);
      return file ? { kind: "file", nbytes: file.length } : null;
    },
    async read(path, begin, end, signal) {
      signal?.throwIfAborted();
      if (path !== SHARD) return (files.get(path) ?? new Uint8Array(0)).subarray(begin, end);
      const bytes = new Uint8Array(Math.max(0, Math.min(end, nbytes) - begin));
      if (begin < header.length) bytes.set(header.subarray(begin, Math.min(end, header.length)));
      return bytes;
    },
    async list() {
      return [];
    },
  };
}
