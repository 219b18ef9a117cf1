// @ts-check
/** Long work in a worker of its own, with progress and a way to end it. @module */
import { Client, ViewError } from "./client.js";
import { announce, button, el, newId } from "./dom.js";
import { durationText, sizeText } from "./text.js";

/** Return the text of a progress. @param {{doneNbytes: number, totalNbytes: number,
 *  seconds: number}} progress */
export function progressText({ doneNbytes, totalNbytes, seconds }) {
  const rate = doneNbytes / Math.max(seconds, 1e-3);
  const left = Math.max(0, totalNbytes - doneNbytes) / Math.max(rate, 1);
  const head = `${sizeText(doneNbytes)} of ${sizeText(totalNbytes)} at ${sizeText(rate)}/s`;
  if (doneNbytes >= totalNbytes) return `${head}; checking documents and bases`;
  return seconds < 0.5 ? head : `${head}, ${durationText(left)} left`;
}

/**
 * Run a method in a new worker.
 *
 * @param {object} options
 * @param {any} options.origin @param {string} options.method @param {any} options.argument
 * @param {string} options.title of the work
 * @param {HTMLElement} options.place where progress is shown
 * @returns {Promise<any>} null after a cancellation
 */
export async function runJob({ origin, method, argument, title, place }) {
  const controller = new AbortController();
  const client = new Client();
  const id = newId("progress");
  const bar = el("progress", { max: 1, "aria-labelledby": id });
  const line = el("p", { class: "progress-text" }, "Starting…");
  const cancel = button("Cancel", () => controller.abort(), { class: "cancel" });
  let announced = 0;
  place.replaceChildren(
    el("div", { class: "job" }, el("p", { id, class: "job-title" }, title), bar, line, cancel),
  );
  announce(`${title}: started`);
  try {
    await client.call("open", { origin });
    return await client.call(method, argument, {
      signal: controller.signal,
      onProgress: (progress) => {
        const share = Math.min(1, progress.doneNbytes / Math.max(1, progress.totalNbytes));
        bar.value = share;
        line.textContent = progressText(progress);
        // A tenth at a time: a live region that changes ten times a second can't be followed.
        if (Math.floor(share * 10) > announced) {
          announced = Math.floor(share * 10);
          announce(`${title}: ${announced * 10} percent`);
        }
      },
    });
  } catch (error) {
    if (error instanceof ViewError && error.isCancelled) {
      announce(`${title}: cancelled`);
      return null;
    }
    throw error;
  } finally {
    client.close();
  }
}
