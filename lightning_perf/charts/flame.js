for (const find of document.querySelectorAll("input.find")) find.addEventListener("input", () => {
  for (const frame of document.querySelectorAll("svg.flame svg")) {
    const name = frame.querySelector("text").textContent.toLowerCase();
    frame.classList.toggle("other", !name.includes(find.value.toLowerCase()));
  }
});
for (const flame of document.querySelectorAll("svg.flame")) {
  const frames = [...flame.querySelectorAll("svg")];
  frames.forEach(clicked => clicked.addEventListener("click", () => {
    const left = +clicked.dataset.x, width = +clicked.dataset.w;
    frames.forEach(frame => {
      const x = (frame.dataset.x - left) / width, end = x + frame.dataset.w / width;
      frame.style.display = end <= 1e-6 || x >= 1 - 1e-6 ? "none" : "";
      const from = Math.max(x, 0), to = Math.min(end, 1);
      frame.setAttribute("x", `${100 * from}%`);
      frame.setAttribute("width", `${100 * Math.max(to - from, 0)}%`);
    });
  }));
}
