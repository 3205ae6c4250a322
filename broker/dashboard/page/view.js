// What the page of several runs shows, as the part of its address after #.

const AXES = ["step", "wall_s", "trained_tokens"];
const MOST_SMOOTHING = 0.99;

/** Return the view that a fragment holds; what it does not hold is as at first. */
export function viewOf(fragment) {
  const held = new URLSearchParams(fragment.replace(/^#/, ""));
  const smooth = Number(held.get("smooth"));
  return {
    metric: held.get("metric") ?? "",
    x: AXES.includes(held.get("x")) ? held.get("x") : AXES[0],
    smooth: smooth > 0 && smooth <= MOST_SMOOTHING ? smooth : 0,
    log: held.get("log") === "1",
    runs: held.has("run") ? held.getAll("run") : null,
    a: held.get("a") ?? "",
    b: held.get("b") ?? "",
  };
}

/** Return the fragment that holds a view. */
export function fragmentOf({ metric, x, smooth, log, runs, a, b }) {
  const held = new URLSearchParams({ metric, x });
  if (smooth > 0) held.set("smooth", String(smooth));
  if (log) held.set("log", "1");
  for (const run of runs ?? []) held.append("run", run);
  if (a) held.set("a", a);
  if (b) held.set("b", b);
  return `#${held}`;
}
