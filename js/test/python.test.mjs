// @ts-check
/** Checkpoints made by the Python package: every tensor is the same, byte by byte. @module */
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { existsSync, mkdtempSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { fileURLToPath } from "node:url";
import { openCheckpoint, openRun } from "../src/index.js";
import { directorySource, locate } from "../src/node.js";
import { OWN, REFERENCE, Server } from "./forged.mjs";

const HERE = fileURLToPath(new URL(".", import.meta.url));
const [PYTHON] = REFERENCE;
const hasPython = existsSync(PYTHON);

describe("checkpoints of the Python package", { skip: !hasPython && "there is no .venv" }, () => {
  /** A folder of checkpoints may be given, so that they aren't made anew. */
  const given = process.env.CKPTFMT_JS_CHECKPOINTS;
  let folder = given ?? "";
  /** @type {Server[]} */
  let servers = [];

  before(async () => {
    if (given === undefined) {
      folder = mkdtempSync(join(tmpdir(), "ckptfmt-made-"));
      execFileSync(PYTHON, [join(HERE, "make_checkpoints.py"), folder], { stdio: "ignore" });
    }
    servers = [new Server(OWN), new Server(REFERENCE)];
    for (const server of servers) await server.ready();
  });

  after(() => {
    for (const server of servers) server.close();
    if (given === undefined) rmSync(folder, { recursive: true, force: true });
  });

  /** @returns {string[]} paths of all checkpoints */
  const list = () =>
    readdirSync(folder)
      .filter((name) => !name.includes("."))
      .flatMap((name) => {
        const inner = readdirSync(join(folder, name)).filter((own) => own.startsWith("step-"));
        return inner.length > 0 ? inner.map((own) => join(name, own)) : [name];
      });

  test("each tensor has the same digest", async () => {
    const encodings = new Set();
    let tensors = 0;
    for (const name of list()) {
      const path = join(folder, name);
      const [own, theirs] = await Promise.all(
        servers.map((server) => server.ask(path, { verify: "all" })),
      );
      assert.equal(own.exit, 0, `${name}: ${JSON.stringify(own)}`);
      assert.equal(theirs.exit, 0, `${name}: ${JSON.stringify(theirs)}`);
      assert.deepEqual(own.answer.tensors, theirs.answer.tensors, name);
      tensors += Object.keys(own.answer.tensors).length;
      const { source, path: place } = await locate(path);
      const { manifest } = await openCheckpoint(source, place);
      for (const feature of manifest.features.reader) encodings.add(feature);
    }
    assert.ok(
      list().length >= 15 && tensors > 100,
      `${list().length} checkpoints, ${tensors} tensors`,
    );
    for (const feature of ["deltas", "adam", "sgd", "sparse", "frozen", "labels"]) {
      assert.ok(encodings.has(feature), `no checkpoint has the feature ${feature}`);
    }
  });

  test("a chain of five deltas is read from its full checkpoint", async () => {
    const run = await openRun(directorySource(join(folder, "run-adamw")));
    const last = await run.open();
    assert.equal(last.manifest.profile, "delta");
    assert.equal(last.manifest.references.length, 5);
    const report = await last.verify();
    assert.deepEqual(report.problems, []);
    assert.ok(report.isWhole);
  });

  test("the next launch goes on from the newest checkpoint", async () => {
    const run = await openRun(directorySource(join(folder, "run-again")));
    assert.deepEqual(
      run.launches.map(({ launch }) => launch),
      [1, 2],
    );
    const choice = await run.chooseNext();
    assert.equal(choice.resumeFrom, "step-00000004-l0002");
    assert.equal(choice.chosenBy, "lineage");
    assert.deepEqual(run.lineage(), [
      { launch: 2, from: "step-00000002-l0001" },
      { launch: 1, from: null },
    ]);
    const [first] = run.checkpoints;
    assert.deepEqual(first.manifest?.tags, ["x"]);
  });

  test("plain values come back", async () => {
    const { source, path } = await locate(join(folder, "leaves"));
    const checkpoint = await openCheckpoint(source, path);
    const config = await checkpoint.leaf("config");
    assert.equal(config.name, "small");
    assert.equal(config.width, 64);
    assert.deepEqual(config.rates, Array(20).fill(0.1));
    assert.equal(config.names[1], "é");
    assert.equal(config.big, 2n ** 70n);
    assert.deepEqual(config.deep, { t: [1, null] });
    assert.deepEqual(checkpoint.manifest.metrics, { loss: "2.5" });
  });

  test("references to a frozen base are listed", async () => {
    const { source, path } = await locate(join(folder, "adapters"));
    const frozen = await (await openCheckpoint(source, path)).frozen();
    assert.ok(frozen?.location.endsWith("base.safetensors"));
    assert.deepEqual(frozen?.tensors.map(({ name }) => name).sort(), [
      "base_layer.bias",
      "base_layer.weight",
    ]);
  });

  test("all boxes of a tensor of several writers fit together", async () => {
    const { source, path } = await locate(join(folder, "writers"));
    const checkpoint = await openCheckpoint(source, path);
    const { data, shape } = await checkpoint.readTensor("w3");
    const box = await checkpoint.readTensor("weights/w3", {
      box: [
        [5, 30],
        [7, 11],
      ],
    });
    assert.deepEqual(box.shape, [25, 4]);
    for (let row = 0; row < 25; row += 1) {
      for (let column = 0; column < 4; column += 1) {
        assert.ok(Object.is(box.data[row * 4 + column], data[(row + 5) * shape[1] + column + 7]));
      }
    }
    assert.deepEqual(await checkpoint.leaf("data", "", { scope: "lw/2" }), { batches: 2 });
  });
});
