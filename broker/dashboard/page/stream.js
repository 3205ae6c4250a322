// The live stream. A break is told at once and mended: the next one asks for what was missed.

import { ask, REFUSED, SILENT } from "/static/ask.js";

const QUIET_S = 5;
const LONGEST_WAIT_S = 10;

/**
 * Keeps a stream open. address: returns the path to open now; `hear(object)` per event;
 * `tell(state, since)` as it goes on (live) or breaks (broken, refused); `back()` after a break.
 */
export class Stream {
  constructor(address, { hear, tell, back }) {
    Object.assign(this, { address, hear, tell, back, wait: 1, heardAt: performance.now(), heard: new Date(), broken: false });
    this.open();
    this.watch = setInterval(() => this.check(), 1000);
  }

  open() {
    this.openedAt = performance.now();
    this.source?.close();
    this.source = new EventSource(this.address());
    this.source.onmessage = (event) => this.message(event.data);
    this.source.onerror = () => this.lost();
  }

  message(text) {
    this.heardAt = performance.now();
    this.heard = new Date();
    this.wait = 1;
    const wasBroken = this.broken;
    this.broken = false;
    this.tell("live");
    this.hear(JSON.parse(text));
    if (wasBroken && !this.closed) this.back();
  }

  // The browser would try again by itself, but with the old address.
  lost() {
    this.source.close();
    if (this.closed) return;
    if (!this.broken) this.tell("broken", this.heard);
    this.broken = true;
    clearTimeout(this.retry);
    this.retry = setTimeout(() => this.again(), this.wait * 1000);
    this.wait = Math.min(LONGEST_WAIT_S, this.wait * 2);
  }

  // A stream that is refused does not say why; a question does.
  async again() {
    const status = await ask("/why.json").then(() => 200, (refusal) => refusal.status);
    if (this.closed) return;
    if (status !== SILENT && status !== REFUSED) {
      this.open();
      return;
    }
    this.tell(status === REFUSED ? "refused" : "broken", this.heard);
    this.lost();
  }

  // A connection may stay open and say nothing: a stopped broker, a laptop that slept.
  check() {
    const now = performance.now();
    if (!this.broken && now - Math.max(this.heardAt, this.openedAt) > QUIET_S * 1000) this.lost();
    if (this.broken && this.source.readyState !== EventSource.CLOSED && now - this.openedAt > 2 * QUIET_S * 1000) this.lost();
  }

  close() {
    this.closed = true;
    clearInterval(this.watch);
    clearTimeout(this.retry);
    this.source.close();
  }
}
