"use strict";
{
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);
  const show = (event) => {
    const shape = event.target.closest("[data-tip]");
    tip.hidden = !shape;
    if (!shape) return;
    tip.textContent = shape.dataset.tip;
    const room = document.documentElement.clientWidth - tip.offsetWidth - 4;
    tip.style.left = `${Math.max(4, Math.min(event.pageX + 12, room))}px`;
    tip.style.top = `${event.pageY + 18}px`;
  };
  addEventListener("pointermove", show);
  addEventListener("pointerdown", show);

  const figures = document.querySelector("[data-runs]");
  const runs = figures ? JSON.parse(figures.dataset.runs) : [];
  const switches = document.createElement("fieldset");
  switches.innerHTML = "<legend>Runs in the figures</legend>";
  runs.forEach(([name, colour], run) => {
    const shapes = figures.querySelectorAll(`[data-run="${run}"]`);
    if (!shapes.length) return;
    const label = document.createElement("label");
    const box = document.createElement("input");
    box.type = "checkbox";
    box.checked = true;
    box.style.accentColor = colour;
    box.addEventListener("change", () => {
      shapes.forEach((shape) => shape.classList.toggle("off", !box.checked));
    });
    label.append(box, name);
    switches.append(label);
  });
  if (switches.children.length > 2) figures.querySelector("h2").after(switches);
}
