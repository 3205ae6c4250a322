// What the simulator, fitted on this run, expects of one change at a time; computed when it is asked for.

import { ask } from "/static/ask.js";
import { byId, element, fillTable, setText } from "/static/dom.js";
import { fixed, percent } from "/static/format.js";

const AGAIN_MS = 2000;
const HEAD = ["change", "seconds a step", "faster", "learner waits", "staleness, p95", "setting"];

/** Return one number, or two where they differ when shown. */
function span([low, high], show) {
  return show(low) === show(high) ? show(low) : `${show(low)} to ${show(high)}`;
}

const signed = (share) => (share > 0 ? "+" : "") + percent(share, 0);

function row(one, isNow) {
  return [one.change, span(one.step_s, (s) => fixed(s, 2)), isNow ? "" : span(one.gain, signed), percent(one.learner_waits, 0),
    `${fixed(one.mean_staleness, 2)}, ${fixed(one.p95_staleness)}`, isNow ? "" : one.setting || "(there is none)"];
}

function show(advice) {
  const simulated = span(advice.simulated_s, (s) => fixed(s, 2));
  setText(byId("expected-note"), `${advice.sentence[0].toUpperCase()}${advice.sentence.slice(1)}. Predicted from the last ${fixed(advice.num_steps)} steps, `
    + `not measured: they took ${fixed(advice.measured_s, 2)} s each, the same run simulated ${simulated} s.`);
  fillTable(byId("expected-changes"), HEAD, [row(advice.now, true), ...advice.changes.map((one) => row(one, false))]);
  byId("expected-notes").replaceChildren(...advice.cautions.map((text) => element("li", { text: `Caution: ${text}.` })),
    ...advice.laws.map((text) => element("li", { text })));
}

/** Have the button compute. */
export function create() {
  const button = byId("expected-ask");
  const look = async () => {
    try {
      const found = await ask("/expected.json");
      if (found.state === "computing") {
        setTimeout(look, AGAIN_MS);
        return;
      }
      if (found.state === "known") show(found.advice);
      else setText(byId("expected-note"), `Nothing is expected yet: ${found.reason}`);
    } catch (error) {
      setText(byId("expected-note"), error.message);
    }
    button.disabled = false;
  };
  button.addEventListener("click", () => {
    button.disabled = true;
    setText(byId("expected-note"), "It is simulated beside the run, which takes some seconds.");
    look();
  });
}
