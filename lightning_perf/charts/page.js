"use strict";
const text = value => value.toLocaleString("en-US", value < 1000
  ? { minimumSignificantDigits: 3, maximumSignificantDigits: 3 } : { maximumFractionDigits: 0 });

for (const chart of document.querySelectorAll(".chart")) {
  const canvas = chart.querySelector(".canvas"), tip = chart.querySelector(".tip");
  const at = chart.querySelector(".at"), data = JSON.parse(canvas.dataset.chart);
  const layers = [...chart.querySelectorAll(".band")];
  const legend = [...chart.querySelectorAll("[data-layer]")];
  let shown = -1;

  const line = (swatch, cells, kind) => {
    const row = document.createElement("tr");
    for (const cell of cells) row.appendChild(document.createElement(kind)).textContent = cell;
    if (swatch) row.firstChild.prepend(swatch.cloneNode());
    return row;
  };
  const show = window => {
    shown = Math.max(0, Math.min(window, data.windows.length - 1));
    const values = data.values.map(layer => layer[shown]);
    const total = values.reduce((sum, value) => sum + value, 0);
    const table = document.createElement("table");
    table.append(line(null, [data.windows[shown], `${text(total)} ${data.unit}`, ""], "th"));
    legend.forEach((row, layer) => {
      const value = values[layer];
      if (value > 0) table.append(line(row.querySelector(".swatch"), [row.cells[0].textContent,
        `${text(value)} ${data.unit}`, `${(100 * value / total).toFixed(1)}%`], "td"));
    });
    tip.replaceChildren(table);
    tip.hidden = at.hidden = false;
    const [from, to] = data.edges.slice(shown);
    at.style.left = `${100 * from}%`;
    at.style.width = `${100 * (to - from)}%`;
    const room = canvas.clientWidth - tip.offsetWidth;
    const right = to * canvas.clientWidth + 12, left = from * canvas.clientWidth - tip.offsetWidth - 12;
    tip.style.left = `${Math.max(0, Math.min(right <= room ? right : left, room))}px`;
  };
  const hide = () => { tip.hidden = at.hidden = true; };
  const below = event => {
    const box = canvas.getBoundingClientRect(), x = (event.clientX - box.left) / box.width;
    const end = data.edges.findIndex((edge, i) => i && x < edge);
    return end < 0 ? data.windows.length - 1 : end - 1;
  };
  for (const kind of ["pointermove", "pointerdown"]) canvas.addEventListener(kind, event => show(below(event)));
  for (const kind of ["pointerleave", "blur"]) canvas.addEventListener(kind, hide);
  canvas.addEventListener("keydown", event => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) { event.preventDefault(); show(shown + by); }
    if (event.key === "Escape") hide();
  });
  const light = lit => {
    canvas.classList.toggle("dim", lit >= 0);
    layers.forEach((layer, i) => layer.classList.toggle("lit", i === lit));
  };
  legend.forEach((row, layer) => {
    row.addEventListener("pointerenter", () => light(layer));
    row.addEventListener("pointerleave", () => light(-1));
  });
}
