"use strict";
(() => {
  const form = document.getElementById("filter");
  const outcomes = [...document.querySelectorAll("#outcomes .outcome")];
  const subjects = [...document.querySelectorAll("#outcomes .subject")];
  const boxes = [...form.querySelectorAll("input[type=checkbox]")];
  const said = form.querySelector("output");
  form.hidden = false;

  const about = (element) => element.closest("[data-kind]").dataset;
  const words = (outcome) => `${outcome.dataset.claim} ${about(outcome).subject}`.toLowerCase();

  function apply() {
    const states = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
    const wanted = form.text.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (data) =>
      (!form.kind.value || data.kind === form.kind.value) &&
      (!form.dist.value || data.dists.split(" ").includes(form.dist.value));
    let shown = 0;
    for (const outcome of outcomes) {
      const text = words(outcome);
      outcome.hidden = !(states.has(outcome.dataset.state) && fits(about(outcome)) && wanted.every((w) => text.includes(w)));
      shown += outcome.hidden ? 0 : 1;
    }
    for (const holder of document.querySelectorAll("#outcomes .set, #outcomes .subject, #outcomes .kind"))
      holder.hidden = !holder.querySelector(".outcome:not([hidden])");
    for (const cell of document.querySelectorAll("td[data-kind]"))
      cell.classList.toggle("off", !fits(cell.dataset));
    said.value = shown === outcomes.length ? `All ${shown} outcomes.` : `${shown} of ${outcomes.length} outcomes.`;
  }

  function reveal() {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    if (target.closest("[hidden]")) { form.reset(); apply(); }
    for (let e = target; e; e = e.parentElement) if (e instanceof HTMLDetailsElement) e.open = true;
    target.scrollIntoView();
  }

  form.addEventListener("input", apply);
  form.addEventListener("reset", () => setTimeout(apply));
  form.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("open").addEventListener("click", () => subjects.forEach((s) => { s.open = !s.hidden; }));
  document.getElementById("close").addEventListener("click", () => subjects.forEach((s) => { s.open = false; }));
  for (const tile of document.querySelectorAll("a[data-only]"))
    tile.addEventListener("click", () => {
      boxes.forEach((box) => { box.checked = box.value === tile.dataset.only; });
      apply();
      subjects.forEach((s) => { s.open = !s.hidden; });
    });
  window.addEventListener("hashchange", reveal);
  apply();
  reveal();
})();
