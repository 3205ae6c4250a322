// Questions to the broker, and its refusals in words.

export const REFUSED = 401; // the token is of another run or of an earlier broker
export const SILENT = 0; // no answer
export const MOVED = "the broker was restarted with another address: open the one that `slipstream top --once` prints";
const PATIENCE_MS = 15000;
const SAID_CHARS = 200;

/** An answer that is none; `status` is that of HTTP, or SILENT. */
export class Refusal extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

/** Return what a path holds as JSON, or throw a Refusal. */
export async function ask(path) {
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (answer.ok) return await answer.json();
    const reason = (await answer.text()).trim().slice(0, SAID_CHARS);
    throw new Refusal(answer.status, answer.status === REFUSED ? MOVED : reason || `the broker answers ${answer.status}`);
  } catch (error) {
    if (error instanceof Refusal) throw error;
    throw new Refusal(SILENT, "the broker does not answer");
  }
}
