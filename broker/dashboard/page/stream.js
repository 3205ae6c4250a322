// The live stream. A break is shown at once and repaired: the next stream requests the missed events.

import { ask, REFUSED, SILENT } from "/static/ask.js";

const QUIET_S = 5;
const LONGEST_WAIT_S = 10;

/**
 * Keeps a stream open. address: returns the path to open now; `receive(object)` per event;
 * `showState(state, since)` while it is open (live) or breaks (broken, refused); `back()` after a break.
 */
export class Stream {
  constructor(address, { receive, showState, back }) {
    Object.assign(this, { address, receive, showState, back, wait: 1, receivedAt: performance.now(), received: new Date(), broken: false });
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
    this.receivedAt = performance.now();
    this.received = new Date();
    this.wait = 1;
    const wasBroken = this.broken;
    this.broken = false;
    this.showState("live");
    this.receive(JSON.parse(text));
    if (wasBroken && !this.closed) this.back();
  }

  // The browser would try again by itself, but with the old address.
  lost() {
    this.source.close();
    if (this.closed) return;
    if (!this.broken) this.showState("broken", this.received);
    this.broken = true;
    clearTimeout(this.retry);
    this.retry = setTimeout(() => this.again(), this.wait * 1000);
    this.wait = Math.min(LONGEST_WAIT_S, this.wait * 2);
  }

  // A refused stream gives no reason; a request does.
  async again() {
    const status = await ask("/why.json").then(() => 200, (refusal) => refusal.status);
    if (this.closed) return;
    if (status !== SILENT && status !== REFUSED) {
      this.open();
      return;
    }
    this.showState(status === REFUSED ? "refused" : "broken", this.received);
    this.lost();
  }

  // A connection may stay open and silent: a stopped broker, a laptop that slept.
  check() {
    const now = performance.now();
    if (!this.broken && now - Math.max(this.receivedAt, this.openedAt) > QUIET_S * 1000) this.lost();
    if (this.broken && this.source.readyState !== EventSource.CLOSED && now - this.openedAt > 2 * QUIET_S * 1000) this.lost();
  }

  close() {
    this.closed = true;
    clearInterval(this.watch);
    clearTimeout(this.retry);
    this.source.close();
  }
}
