// @ts-check
/** The pure parts of the page: texts, summaries, windows, listings, the drawing, lines of trees. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { layOut, ticksOf } from "../src/lineage.js";
import { listingOf, parseListing } from "../src/listing.js";
import { clampPosition, gridOf, windowOf } from "../src/slices.js";
import { Stats } from "../src/stats.js";
import { durationText, float32Text, floatText, sizeText, valuesOf } from "../src/text.js";
import { childrenOf, lineOf } from "../src/values.js";

describe("texts", () => {
  test("sizes have three digits and a unit", () => {
    const texts = [0, 999, 1000, 1048576, 999_600, 503316480, 2e15].map(sizeText);
    assert.deepEqual(texts, ["0 B", "999 B", "1.00 kB", "1.05 MB", "1.00 MB", "503 MB", "2.00 PB"]);
  });

  test("a float32 has the shortest digits that are the same float32", () => {
    const values = [0.1, 1 / 3, 16777216, 1e-45, 3.4028234663852886e38, -2.5].map(Math.fround);
    assert.deepEqual(values.map(float32Text), [
      "0.1",
      "0.33333334",
      "16777216.0",
      "1e-45",
      "3.4028235e+38",
      "-2.5",
    ]);
    for (let k = 0; k < 20_000; k += 1) {
      const value = new Float32Array(new Uint32Array([Math.random() * 2 ** 32]).buffer)[0];
      if (Number.isFinite(value)) assert.equal(Math.fround(Number(float32Text(value))), value);
    }
  });

  test("special floats", () => {
    assert.deepEqual([NaN, Infinity, -Infinity, -0, 1e22].map(floatText), [
      "nan",
      "inf",
      "-inf",
      "-0.0",
      "1e+22",
    ]);
  });

  test("durations", () => {
    assert.deepEqual([0.04, 12.4, 130, 7200, Infinity].map(durationText), [
      "0.0 s",
      "12 s",
      "2 min",
      "2.0 h",
      "unknown",
    ]);
  });

  test("elements of all kinds", () => {
    const texts = (/** @type {string} */ dtype, /** @type {any} */ data) => {
      const { count, text } = valuesOf(dtype, data);
      return Array.from({ length: count }, (_, at) => text(at));
    };
    assert.deepEqual(texts("int64", new BigInt64Array([2n ** 62n + 1n])), ["4611686018427387905"]);
    assert.deepEqual(texts("bool", new Uint8Array([1, 0])), ["true", "false"]);
    assert.deepEqual(texts("complex64", new Float32Array([1, -2, 0, 0.5])), [
      "1.0-2.0i",
      "0.0+0.5i",
    ]);
    assert.deepEqual(texts("float16", new Uint16Array([0x3c00, 0x7e00])), ["1.0", "nan"]);
    assert.deepEqual(texts("float4_e2m1fn_x2", new Uint8Array([0x21])), ["0.5, 1.0"]);
  });
});

describe("summaries", () => {
  test("pieces add up", () => {
    const stats = new Stats("float32");
    stats.add(new Float32Array([1, NaN, -3]));
    stats.add(new Float32Array([Infinity, 0, 2]));
    assert.deepEqual(stats.summary(), {
      count: 6,
      nans: 1,
      infinities: 1,
      zeros: 1,
      min: "-3.0",
      max: "inf",
      mean: "0.0",
      deviation: "1.870829",
    });
  });

  test("integers keep all digits, and nothing has no least value", () => {
    const stats = new Stats("int64");
    stats.add(new BigInt64Array([2n ** 62n + 1n, -5n]));
    stats.add(new BigInt64Array([7n]));
    assert.equal(stats.summary().max, "4611686018427387905");
    assert.equal(stats.summary().min, "-5");
    assert.equal(new Stats("float32").summary().min, null);
  });
});

describe("windows", () => {
  test("a matrix, a cube, a vector and a scalar", () => {
    assert.deepEqual(gridOf([5000]), { rows: 625, columns: 8, isVector: true });
    const at = clampPosition([3, 40, 30], { lead: [9], row: 35, column: 28 });
    assert.deepEqual(at, { lead: [2], row: 35, column: 28 });
    assert.deepEqual(windowOf([3, 40, 30], at).box, [
      [2, 3],
      [35, 40],
      [28, 30],
    ]);
    assert.deepEqual(windowOf([5000], { lead: [], row: 624, column: 0 }).box, [[4992, 5000]]);
    assert.deepEqual(windowOf([], { lead: [], row: 0, column: 0 }).box, []);
    assert.deepEqual(clampPosition([4, 4], { lead: [], row: NaN, column: -1 }), {
      lead: [],
      row: 0,
      column: 0,
    });
  });
});

describe("listings", () => {
  test("JSON of nginx and of ckptfmt view", () => {
    const text =
      '[{"name":"a","type":"directory"},{"name":"..","type":"file"},{"name":"l","type":"other"}]';
    assert.deepEqual(parseListing(text, "application/json"), [
      { name: "a", kind: "folder" },
      { name: "l", kind: "other" },
    ]);
  });

  test("links of a page, without those that lead elsewhere", () => {
    const page = `<a href="../">up</a><a href="a%20b/">x</a><a class=c href='run.json'>y</a>
      <a href="?C=N">sort</a><a href="https://evil.example/">z</a><a href="/abs">q</a>`;
    assert.deepEqual(parseListing(page, "text/html"), [
      { name: "a b", kind: "folder" },
      { name: "run.json", kind: "file" },
    ]);
  });

  test("requests have encoded paths", async () => {
    /** @type {string[]} */
    const asked = [];
    const list = listingOf("https://x.example/t/data/", async (url) => {
      asked.push(String(url));
      return new Response("[]", { headers: { "content-type": "application/json" } });
    });
    await list("");
    await list("é/b");
    assert.deepEqual(asked, ["https://x.example/t/data/", "https://x.example/t/data/%C3%A9/b/"]);
  });
});

describe("the drawing", () => {
  test("a lane begins at the checkpoint that its launch resumed from", () => {
    const launches = [
      { launch: 1, from: null },
      { launch: 2, from: "a" },
    ];
    const marks = [
      { name: "a", step: 10, launch: 1, state: "committed" },
      { name: "b", step: 20, launch: 1, state: "committed" },
      { name: "c", step: 30, launch: 2, state: "committed" },
    ];
    const { lanes, links, dots } = layOut(launches, marks, {
      width: 240,
      lane: 30,
      left: 20,
      right: 20,
      top: 10,
    });
    assert.deepEqual(
      dots.map(({ x, y }) => [x, y]),
      [
        [20, 10],
        [120, 10],
        [220, 40],
      ],
    );
    assert.deepEqual([lanes[1].begin, lanes[1].end], [20, 220]);
    assert.deepEqual(links, [{ launch: 2, x: 20, fromY: 10, toY: 40 }]);
  });

  test("ticks are round and few", () => {
    assert.deepEqual(ticksOf(1, 7), [1, 2, 3, 4, 5, 6, 7]);
    assert.deepEqual(ticksOf(130, 9_900), [2000, 4000, 6000, 8000]);
    assert.deepEqual(ticksOf(5, 5), [5]);
    assert.deepEqual(ticksOf(Infinity, -Infinity), []);
  });
});

describe("lines of trees", () => {
  test("values as Python writes them", () => {
    const float = new Uint8Array(new Float64Array([0.1]).buffer);
    assert.deepEqual(lineOf(null), { kind: "none", text: "None", count: 0 });
    assert.equal(lineOf({ kind: "float", bytes: float }).text, "0.1");
    assert.equal(lineOf(2n ** 70n).text, "1180591620717411303424");
    assert.equal(lineOf("é\n").text, '"é\\n"');
    assert.equal(lineOf({ kind: "tuple", items: [] }).text, "()");
    assert.equal(lineOf({ kind: "list", items: [1, 2] }).text, "2 items");
  });

  test("children in ranges", () => {
    /** @type {import("../../src/tree.js").Tree} */
    const tree = {
      kind: "dict",
      entries: [
        ["a", 1],
        [{ kind: "tuple", items: [1, "b"] }, 2],
      ],
    };
    assert.deepEqual(childrenOf(tree, 1, 2), [{ key: '(1, "b")', tree: 2 }]);
    assert.deepEqual(childrenOf({ kind: "list", items: [5, 6, 7] }, 1, 2), [{ key: "1", tree: 6 }]);
  });
});
