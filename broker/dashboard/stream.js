// The live stream. A break is told at once, and mended: by the browser, or by us where it gives up.

const QUIET_S = 5;
const LONGEST_WAIT_S = 10;

/** Keep a stream open: `hear(object)` per event, `tell(state, since)` as it goes on or breaks. */
export class Stream {
  constructor(address, { hear, tell, back }) {
    Object.assign(this, { address, hear, tell, back, wait: 1, heardAt: performance.now(), heard: new Date(), broken: false });
    this.open();
    this.watch = setInterval(() => this.check(), 1000);
  }

  open() {
    this.source?.close();
    this.source = new EventSource(this.address);
    this.source.onmessage = (event) => this.message(event.data);
    this.source.onerror = () => this.lost();
  }

  message(text) {
    this.heardAt = performance.now();
    this.heard = new Date();
    this.wait = 1;
    if (this.broken) {
      this.broken = false;
      this.back();
    }
    this.tell("live");
    this.hear(JSON.parse(text));
  }

  lost() {
    this.broken = true;
    this.tell("broken", this.heard);
    if (this.source.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
    clearTimeout(this.retry);
    this.retry = setTimeout(() => this.open(), this.wait * 1000);
    this.wait = Math.min(LONGEST_WAIT_S, this.wait * 2);
  }

  silence() { return (performance.now() - this.heardAt) / 1000; }

  // A connection may stay open and say nothing: a stopped broker, a laptop that slept.
  check() {
    if (this.silence() < QUIET_S) return;
    if (!this.broken) this.lost();
    if (this.silence() > 2 * QUIET_S && this.source.readyState === EventSource.OPEN) this.open();
  }

  close() {
    clearInterval(this.watch);
    clearTimeout(this.retry);
    this.source.close();
  }
}
