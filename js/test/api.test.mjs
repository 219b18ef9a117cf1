// @ts-check
/** The interface of the package: reading, verification, aborts, errors, numbers. @module */
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { gzipSync } from "node:zlib";
import { describe, test } from "node:test";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";
import {
  Blake3,
  CkptError,
  blake3,
  loadBlake3,
  memorySource,
  openCheckpoint,
  openRun,
  readerProfiles,
  toFloat32,
} from "../src/index.js";
import { inflate } from "../src/inflate.js";
import { decodeFrame, xxh64 } from "../src/zstd.js";
import { toHex } from "../src/text.js";
import { compare } from "./forged.mjs";
import { zerosSource } from "./make.mjs";
import { readCases } from "./vectors.mjs";
import { existsSync } from "node:fs";
import { REFERENCE } from "./forged.mjs";

const path = (/** @type {string} */ name) => fileURLToPath(new URL(name, import.meta.url));

test("the profiles that a reader of a checkpoint needs", () => {
  assert.deepEqual(readerProfiles([]), ["R-core"]);
  assert.deepEqual(readerProfiles(["adam", "deltas", "labels", "planes"]), [
    "R-core",
    "R-delta",
    "labels",
    "prediction",
  ]);
});

describe("checkpoints", () => {
  const tensors = [
    { name: "a", shape: [4, 1024, 1024] },
    { name: "b", shape: [1024, 1024] },
  ];

  test("a tensor, a box, and pieces", async () => {
    const checkpoint = await openCheckpoint(zerosSource(tensors));
    assert.deepEqual([...checkpoint.tensors.keys()], ["weights/a", "weights/b"]);
    assert.equal(checkpoint.tensor("b").nbytes, 4 << 20);
    const { data, shape, dtype } = await checkpoint.readTensor("a", {
      box: [
        [1, 3],
        [5, 6],
        [0, 1024],
      ],
    });
    assert.deepEqual([dtype, shape, data.length], ["float32", [2, 1, 1024], 2048]);
    assert.ok(data instanceof Float32Array);
    let count = 0;
    for await (const piece of checkpoint.streamTensor("a", { pieceNbytes: 3_000_000 })) {
      assert.ok(piece.data.byteLength <= 3_000_000);
      count += piece.data.length;
    }
    assert.equal(count, 4 << 20);
  });

  test("errors say what happened, where, and what to do", async () => {
    const checkpoint = await openCheckpoint(zerosSource(tensors));
    await assert.rejects(checkpoint.readTensor("c"), (/** @type {CkptError} */ error) => {
      assert.ok(error instanceof CkptError);
      assert.deepEqual([error.code, error.kind], ["TENSOR_MISSING", "StateError"]);
      assert.match(error.message, /TENSOR_MISSING at .*: the checkpoint has no tensor "c"\. See/);
      return true;
    });
    await assert.rejects(checkpoint.readTensor("a", { box: [[0, 9]] }), { code: "ARGUMENT" });
    await assert.rejects(openCheckpoint(memorySource({})), {
      code: "NOT_COMMITTED",
      phase: "open",
    });
    await assert.rejects(
      openCheckpoint(zerosSource(tensors), "", { digest: `blake3:${"0".repeat(64)}` }),
      { code: "DOC_DIGEST", clause: "REQ-OPN-001" },
    );
  });

  test("verification reports progress and stops at a signal", async () => {
    const checkpoint = await openCheckpoint(zerosSource(tensors));
    /** @type {import("../src/index.js").Progress[]} */
    const seen = [];
    const report = await checkpoint.verify({ onProgress: (progress) => seen.push(progress) });
    assert.ok(report.isWhole);
    assert.equal(report.readNbytes, 20 << 20);
    assert.equal(seen.length, 20);
    assert.deepEqual([seen[19].doneNbytes, seen[19].totalNbytes], [20 << 20, 20 << 20]);
    const controller = new AbortController();
    let calls = 0;
    const stopped = checkpoint.verify({
      signal: controller.signal,
      onProgress: () => {
        calls += 1;
        if (calls === 3) controller.abort(new Error("enough"));
      },
    });
    await assert.rejects(stopped, /enough/);
    assert.equal(calls, 3);
    await assert.rejects(
      checkpoint.readTensor("a", { signal: AbortSignal.abort(new Error("before")) }),
      /before/,
    );
  });

  test("a checkpoint that is replaced during a read is reported as gone", async () => {
    const [own] = readCases(["whole"]).filter(
      ({ id, path: at, kind }) => id.startsWith("whole/valid/") && at !== "." && kind === "open",
    );
    const files = new Map(own.files);
    const checkpoint = await openCheckpoint(memorySource(files), own.path);
    for (const name of files.keys()) if (name.startsWith(`${own.path}/`)) files.delete(name);
    const key = [...checkpoint.tensors.keys()][0];
    await assert.rejects(checkpoint.readTensor(key), { code: "CHECKPOINT_RETIRED" });
  });

  test("memory doesn't grow with tensors", () => {
    const out = execFileSync(process.execPath, ["--expose-gc", path("memory_child.mjs"), "2"]);
    const { median, nbytes, isWhole } = JSON.parse(String(out));
    assert.ok(isWhole && nbytes === 512 * 2 ** 20);
    assert.ok(median < 12 * 2 ** 20, `${median} bytes of live buffers`);
  });
});

describe("runs", () => {
  test("labels, launches and checkpoints", async () => {
    const own = readCases(["examples", "run"]).find(
      ({ files }) =>
        [...files.keys()].some((name) => name.startsWith("labels/")) && files.has("run.json"),
    );
    if (own === undefined) return;
    const run = await openRun(memorySource(own.files));
    assert.ok(run.launches.length > 0);
    assert.ok((await run.labels()).size > 0);
  });

  test("no run is no run", async () => {
    await assert.rejects(openRun(memorySource({})), { code: "NOT_COMMITTED" });
    await assert.rejects(openRun(memorySource({ "launches/0001.json": new Uint8Array(1) })), {
      code: "FILE_MISSING",
    });
  });
});

describe("numbers", () => {
  test("floats of 16 and 8 bits", () => {
    const values = (/** @type {string} */ dtype, /** @type {any} */ elements) =>
      Array.from(toFloat32(dtype, elements));
    assert.deepEqual(values("bfloat16", Uint16Array.of(0x3f80, 0xc000, 0x7f80)), [1, -2, Infinity]);
    assert.deepEqual(values("float16", Uint16Array.of(0x3c00, 0x0001, 0xfc00)), [
      1,
      2 ** -24,
      -Infinity,
    ]);
    assert.deepEqual(values("float8_e4m3fn", Uint8Array.of(0x38, 0x7e, 0x7f, 0x01)), [
      1,
      448,
      NaN,
      2 ** -9,
    ]);
    assert.deepEqual(values("float8_e5m2", Uint8Array.of(0x3c, 0x7c, 0x7b)), [1, Infinity, 57344]);
    assert.deepEqual(values("float8_e4m3fnuz", Uint8Array.of(0x40, 0x80, 0x7f)), [1, NaN, 240]);
    assert.deepEqual(values("float8_e5m2fnuz", Uint8Array.of(0x40, 0x80)), [1, NaN]);
    assert.deepEqual(values("float8_e8m0fnu", Uint8Array.of(127, 128, 255)), [1, 2, NaN]);
    assert.deepEqual(values("float4_e2m1fn_x2", Uint8Array.of(0x72)), [1, 6]);
    assert.deepEqual(values("int64", BigInt64Array.of(-5n)), [-5]);
  });
});

describe("digests and compression", () => {
  test("BLAKE3 by vectors and by plain JavaScript", async () => {
    // From the test vectors of BLAKE3: byte i is i mod 251.
    const expected = new Map([
      [0, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"],
      [1, "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"],
      [1024, "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7"],
      [1025, "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444"],
    ]);
    const input = (/** @type {number} */ count) =>
      Uint8Array.from({ length: count }, (_, at) => at % 251);
    for (const [count, digest] of expected) assert.equal(toHex(blake3(input(count))), digest);
    await loadBlake3();
    for (const [count, digest] of expected) assert.equal(toHex(blake3(input(count))), digest);
    const long = input(3 * 2 ** 20 + 77);
    const pieces = new Blake3();
    for (let at = 0; at < long.length; at += 99_999) pieces.update(long.subarray(at, at + 99_999));
    assert.deepEqual(pieces.digest(), blake3(long));
  });

  test("XXH64, zstd and zlib refuse what is damaged", () => {
    assert.equal(xxh64(new TextEncoder().encode("abc")), 0x44bc2cf5ad770999n);
    const frame = Uint8Array.from(Buffer.from("28b52ffd2030c2000007c3000009", "hex"));
    assert.deepEqual(decodeFrame(frame, 48).subarray(23, 25), Uint8Array.of(7, 9));
    for (let at = 0; at < frame.length; at += 1) {
      assert.throws(() => decodeFrame(frame.subarray(0, at), 48), { code: "ENCODED_FORM" });
    }
    const stream = Uint8Array.from(Buffer.from("7801010400fbff81a1610104ae0185", "hex"));
    assert.equal(inflate(stream, 4).length, 4);
    assert.throws(() => inflate(stream, 3), { code: "DOC_COMPRESSION" });
    for (let at = 0; at < stream.length; at += 1) {
      const flipped = stream.slice();
      flipped[at] ^= 1;
      // Two bytes of the header have many values; the digest of the document covers them.
      assert.throws(() => inflate(flipped, 4), { code: "DOC_COMPRESSION" }, `byte ${at}`);
    }
  });
});

test("the bundle is small", async () => {
  const {
    outputFiles: [file],
  } = await build({
    entryPoints: [path("../src/index.js")],
    bundle: true,
    minify: true,
    format: "esm",
    write: false,
    platform: "browser",
    target: "es2022",
  });
  const nbytes = gzipSync(file.contents, { level: 9 }).length;
  assert.ok(nbytes <= 60 * 1024, `the bundle has ${nbytes} bytes, minified and gzipped`);
});

test(
  "forged checkpoints are judged as the reference implementation judges them",
  {
    skip: !existsSync(REFERENCE[0]) && "there is no .venv",
  },
  async () => {
    const { count, disagreements } = await compare({ count: 150, seed: 3 });
    assert.equal(count, 150);
    assert.deepEqual(disagreements, []);
  },
);
