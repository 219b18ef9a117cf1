// @ts-check
/** Calls of the worker from the page. @module */

/* global WORKER_TEXT */

/** An error that the worker reported. */
export class ViewError extends Error {
  /** @param {any} fields */
  constructor(fields) {
    super(fields.detail);
    this.fields = fields;
  }

  get isCancelled() {
    return this.fields.code === "CANCELLED";
  }
}

/** A worker of the page. Its text is part of the page's script, since `file:` has no workers. */
export class Client {
  #next = 1;
  /** @type {Map<number, {resolve: (value: any) => void, reject: (error: unknown) => void,
   *   onProgress?: (progress: any) => void}>} */
  #waiting = new Map();

  constructor() {
    // @ts-expect-error: a constant of the build
    const url = URL.createObjectURL(new Blob([WORKER_TEXT], { type: "text/javascript" }));
    this.worker = new Worker(url);
    URL.revokeObjectURL(url);
    this.worker.onmessage = ({ data }) => {
      const call = this.#waiting.get(data.id);
      if (call === undefined) return;
      if ("progress" in data) {
        call.onProgress?.(data.progress);
        return;
      }
      this.#waiting.delete(data.id);
      if ("error" in data) call.reject(new ViewError(data.error));
      else call.resolve(data.value);
    };
    this.worker.onerror = (event) => {
      const detail = `the worker failed: ${event.message || "it could not be started"}`;
      const error = new ViewError({
        code: "UNEXPECTED",
        detail,
        remedy: "Reload the page, or use a newer browser.",
      });
      for (const { reject } of this.#waiting.values()) reject(error);
      this.#waiting.clear();
    };
  }

  /**
   * Call a method of the worker.
   *
   * @param {string} method @param {any} argument
   * @param {{signal?: AbortSignal, onProgress?: (progress: any) => void}} [options]
   * @returns {Promise<any>}
   */
  call(method, argument, { signal, onProgress } = {}) {
    const id = this.#next;
    this.#next += 1;
    return new Promise((resolve, reject) => {
      if (signal?.aborted) {
        reject(new ViewError({ code: "CANCELLED", detail: "cancelled" }));
        return;
      }
      this.#waiting.set(id, { resolve, reject, onProgress });
      this.worker.postMessage({ id, method, argument });
      signal?.addEventListener("abort", () =>
        this.worker.postMessage({ id: 0, method: "cancel", argument: id }),
      );
    });
  }

  /** End the worker. */
  close() {
    this.worker.terminate();
  }
}
