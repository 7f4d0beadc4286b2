"use strict";
// The pair that is asked, its keys, and the result when all pairs are done.

const KEYS = { ArrowLeft: "left", ArrowRight: "right", ArrowDown: "tie", u: "undo", Backspace: "undo" };
const SMALL = 256;

let state = null;
let isReady = false;

const body = () => document.getElementById("body");
const source = (side) => `pictures/${state.pair}/${side}`;

/** The answer of the server; an answer that a vote does not count has the state that does. */
async function ask(path, sent) {
  const reply = await fetch(`api/${path}`, sent
    ? { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(sent) } : {});
  const answer = await reply.json();
  if (answer.problem) throw new Error(answer.problem);
  return answer;
}

async function go(path, sent) {
  isReady = false;
  try {
    state = await ask(path, sent);
    await draw();
  } catch (error) {
    body().replaceChildren(make("p", { class: "bad", role: "alert" }, error.message),
      make("button", { click: () => go("vote") }, "try again"));
  }
}

function act(choice) {
  if (!isReady) return;
  if (choice === "undo") {
    if (state.done) go("undo", { done: state.done, session: state.session });
  } else if (!state.result) go("vote", { pair: state.pair, choice, session: state.session });
}

async function draw() {
  const progress = document.getElementById("progress");
  [progress.max, progress.value] = [Math.max(1, state.total), state.done];
  document.getElementById("live").textContent = `${state.done} of ${state.total}`;
  const undo = make("button", { click: () => act("undo"), disabled: !state.result }, "undo ", make("kbd", {}, "U"));
  if (state.result) {
    body().replaceChildren(
      make("section", {}, make("h2", {}, "Done"), state.result.map((line) => make("p", { dir: "auto" }, line)),
        make("p", { class: "faint" }, `Saved in ${state.files.join(" and ")}`)),
      make("div", { class: "others" }, undo));
    isReady = true;
    return;
  }
  const sides = ["left", "right"].map((side) => {
    const image = make("img", { src: source(side), alt: `the ${side} image` });
    const key = make("kbd", {}, side === "left" ? "←" : "→");
    return [image, make("button", { class: "side", disabled: true, click: () => act(side) }, image, `${side} `, key)];
  });
  const tie = make("button", { click: () => act("tie"), disabled: true }, "no preference ", make("kbd", {}, "↓"));
  const inputs = Array.from({ length: state.num_inputs }, (_, at) =>
    make("img", { src: source(at), alt: "an image of the prompt" }));
  body().replaceChildren(
    make("div", { class: "prompt", dir: "auto" }, state.prompt),
    make("div", { class: "inputs" }, inputs),
    make("div", { class: "sides" }, sides.map(([, button]) => button)),
    make("div", { class: "others" }, tie, undo));
  // A vote on an image that was not seen yet would be none.
  await Promise.all(sides.map(([image]) => image.decode().catch(async () => {
    const answer = await (await fetch(image.src)).json().catch(() => ({}));
    throw new Error(answer.problem || "an image could not be loaded.");
  })));
  for (const [image, button] of sides) {
    image.classList.toggle("small", image.naturalWidth < SMALL);
    button.disabled = false;
  }
  [tie.disabled, undo.disabled] = [false, !state.done];
  isReady = true;
}

document.addEventListener("keydown", (event) => {
  const choice = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!choice || event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act(choice);
});

go("vote");
