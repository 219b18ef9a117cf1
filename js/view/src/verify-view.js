// @ts-check
/** The check of every byte, and its findings. @module */
import { ViewError } from "./client.js";
import { announce, el, errorCard } from "./dom.js";
import { runJob } from "./jobs.js";
import { counted, durationText, sizeText } from "./text.js";

/**
 * Verify a checkpoint and show the findings.
 *
 * @param {any} origin @param {string} path @param {HTMLElement} place
 */
export async function verifyInto(origin, path, place) {
  const title = "Verification of every byte";
  let report = null;
  try {
    report = await runJob({ origin, method: "verify", argument: { path }, title, place });
  } catch (error) {
    const fields =
      error instanceof ViewError ? error.fields : { code: "UNEXPECTED", detail: String(error) };
    announce(`The verification failed: ${fields.code}`);
    place.replaceChildren(errorCard(fields));
    return;
  }
  if (report === null) {
    place.replaceChildren(el("p", { class: "note" }, "The verification was cancelled."));
    return;
  }
  const { isWhole, problems, bases, readNbytes, seconds } = report;
  const rate = sizeText(readNbytes / Math.max(seconds, 1e-3));
  const read = `${sizeText(readNbytes)} read and compared in ${durationText(seconds)} (${rate}/s)`;
  const verdict = isWhole
    ? "Whole: a run may continue from this checkpoint"
    : `Damaged: ${counted(problems.length, "finding")}`;
  announce(verdict);
  place.replaceChildren(
    el(
      "div",
      { class: `verdict ${isWhole ? "good" : "bad"}` },
      el("p", { class: "verdict-text" }, `${isWhole ? "✓" : "✗"} ${verdict}`),
      el("p", { class: "muted" }, read),
    ),
    el(
      "div",
      { class: "findings" },
      problems.map((/** @type {any} */ one) => errorCard(one)),
    ),
    ...bases.flatMap((/** @type {any} */ base) =>
      base.problems.length === 0
        ? []
        : [
            el("h3", null, `In the base ${base.name}`),
            el("p", { class: "muted" }, "This checkpoint may not read the damaged blocks."),
            el(
              "div",
              { class: "findings" },
              base.problems.map((/** @type {any} */ one) => errorCard(one)),
            ),
          ],
    ),
  );
}
