// @ts-check
/** Positions in the data: epochs whose length skips change. @module */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { describe, test } from "node:test";
import { checkCursor } from "../src/cursor.js";
import { loadBlake3 } from "../src/index.js";
import { orderOf, placeOf } from "../src/positions.js";

const page = readFileSync(new URL("../../spec/companions/63-mixtures.md", import.meta.url), "utf8");
const example = /name=skipping-cursor\n([\s\S]*?)\n```/.exec(page)?.[1] ?? "";

/** @param {any} value @returns {import("../src/tree.js").Tree} */
function treeOf(value) {
  if (Array.isArray(value)) return { kind: "list", items: value.map(treeOf) };
  if (value === null || typeof value !== "object") return value;
  return {
    kind: "dict",
    entries: Object.entries(value).map(([key, member]) => [key, treeOf(member)]),
  };
}

/** Check the example of page 63 after a change. @param {(cursor: any) => void} change */
function checkAfter(change) {
  const cursor = JSON.parse(example);
  change(cursor);
  checkCursor(treeOf(cursor));
}

describe("positions in the data", () => {
  test("the order of samples is that of page 64", async () => {
    await loadBlake3();
    /** @param {bigint} n @param {bigint} seed @param {bigint} epoch @param {bigint[]} positions */
    const samples = (n, seed, epoch, positions) => {
      const order = orderOf(n, seed, epoch);
      const found = positions.map(order.sampleAt);
      assert.deepEqual(found.map(order.positionOf), positions);
      return found.map(Number);
    };
    const ten = Array.from({ length: 10 }, (_, at) => BigInt(at));
    assert.deepEqual(samples(10n, 0n, 0n, ten), [3, 1, 4, 2, 8, 5, 9, 6, 0, 7]);
    assert.deepEqual(samples(1000n, 1n, 2n, [0n, 999n]), [988, 936]);
    assert.deepEqual(
      samples(2n ** 48n, 2n ** 64n - 1n, 3n, [0n, 2n ** 48n - 1n]),
      [37976156300933, 41421302834276],
    );
  });

  test("a cursor with shifted epochs has one epoch and position in it", () => {
    checkAfter(() => {});
    for (const change of [
      (/** @type {any} */ { commit }) => (commit.pos_in_epoch = 0),
      (/** @type {any} */ { commit }) => (commit.epoch = 0),
      (/** @type {any} */ { commit }) => (commit.global_pos = 7),
      (/** @type {any} */ { skips }) => (skips[2].range = [8, 16]),
      (/** @type {any} */ { skips }) => skips.pop(),
    ]) {
      assert.throws(() => checkAfter(change), { code: "CURSOR_FORM", clause: "REQ-CUR-004" });
    }
  });

  test("samples removed within an epoch shorten it only if they were to come", () => {
    // The order of the epoch is 3 1 4 2 8 5 9 6 0 7; six positions are before the skip.
    const order = { n: 10n, batch: 1n, tail: "carry", seed: 0n };
    /** @param {bigint} sample @param {bigint} position */
    const after = (sample, position) => {
      const skip = { first: 6n, ranges: [/** @type {[bigint, bigint]} */ ([sample, sample + 1n])] };
      return placeOf(position, order, [{ ...skip, draws: 0n }]);
    };
    assert.deepEqual(after(4n, 9n), { epoch: 0n, within: 9n }); // it was the third
    assert.deepEqual(after(6n, 9n), { epoch: 1n, within: 0n }); // it is the eighth
    assert.deepEqual(after(4n, 19n), { epoch: 2n, within: 0n }); // 10 and 9 positions
    assert.deepEqual(after(6n, 18n), { epoch: 2n, within: 0n }); // 9 and 9 positions
  });

  test("hostile skips take no time", () => {
    const shifts = Array.from({ length: 10_000 }, (_, at) => ({
      first: BigInt(7 * at),
      ranges: [/** @type {[bigint, bigint]} */ ([0n, 1_000_000n])],
      draws: 0n,
    }));
    const order = { n: 2n ** 40n, batch: 1n, tail: "carry", seed: 0n };
    assert.equal(placeOf(2n ** 60n, order, shifts), null);
  });
});
